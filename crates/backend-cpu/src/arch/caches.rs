//! What a core's own caches hold: products cut their operands by it. It changes the order of their work and no bit of a result.

use std::fs::read_to_string;
use std::path::Path;
use std::sync::OnceLock;

/// Where the system says nothing: what most processors have, and those that have more lose little.
const DEFAULT: usize = 512 << 10;

/// Bytes of the second cache that a thread has for itself: its size over the processors that share it.
pub(crate) fn second_cache() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let known = second_of(Path::new("/sys/devices/system/cpu/cpu0/cache"));
        known.unwrap_or(DEFAULT).clamp(DEFAULT / 4, DEFAULT * 8)
    })
}

/// The second cache among those that `folder` describes, as Linux does.
fn second_of(folder: &Path) -> Option<usize> {
    std::fs::read_dir(folder).ok()?.flatten().find_map(|cache| {
        let read = |name: &str| read_to_string(cache.path().join(name)).ok();
        let second = read("level")?.trim() == "2" && read("type")?.trim() != "Instruction";
        let bytes = kibibytes(read("size")?.trim())? << 10;
        second.then(|| bytes / read("shared_cpu_list").map_or(1, |list| processors(list.trim())))
    })
}

/// The number of `1024K`.
fn kibibytes(size: &str) -> Option<usize> {
    size.strip_suffix('K')?.parse().ok().filter(|size| *size < 1 << 30)
}

/// How many processors a list such as `0-1,4` has; 1 where it cannot be read.
fn processors(list: &str) -> usize {
    let of_range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)?.saturating_add(1))
    };
    list.split(',').map(of_range).sum::<Option<usize>>().unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_cache_is_read_as_linux_describes_it() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(second_of(folder.path()), None);
        let caches = [("1", "Data", "32K", "0"), ("2", "Unified", "1024K", "0,2"), ("3", "Unified", "32768K", "0-3")];
        for (index, (level, kind, size, shared)) in caches.into_iter().enumerate() {
            let cache = folder.path().join(format!("index{index}"));
            std::fs::create_dir(&cache).unwrap();
            for (name, text) in [("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)] {
                std::fs::write(cache.join(name), format!("{text}\n")).unwrap();
            }
        }
        assert_eq!(second_of(folder.path()), Some(512 << 10));
        std::fs::write(folder.path().join("index1/size"), "1 MiB").unwrap();
        assert_eq!(second_of(folder.path()), None);
    }

    #[test]
    fn lists_of_processors_are_counted() {
        for (list, count) in [("0", 1), ("0-1", 2), ("0,4", 2), ("0-3,8-11", 8), ("", 1), ("3-1", 1), ("all", 1)] {
            assert_eq!(processors(list), count, "{list}");
        }
    }
}
