//! What a core's own caches hold: products cut their operands by it. The second changes the order of their work and no bit of a result,
//! the first how many products are added up before they meet the result, and so its last bits.

use std::fs::read_to_string;
use std::path::Path;
use std::sync::OnceLock;

/// Where Linux describes the caches of a processor.
const FOLDER: &str = "/sys/devices/system/cpu/cpu0/cache";
/// First and second cache where the system says nothing: what most processors have, and those that have more lose little.
const DEFAULT: [usize; 2] = [32 << 10, 512 << 10];

/// Bytes of the first cache that a thread has for itself: its size over the processors that share it.
pub(crate) fn first_cache() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| cache_of(Path::new(FOLDER), "1").unwrap_or(DEFAULT[0]).clamp(DEFAULT[0], DEFAULT[0] * 2))
}

/// Bytes of the second cache that a thread has for itself: its size over the processors that share it.
pub(crate) fn second_cache() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| cache_of(Path::new(FOLDER), "2").unwrap_or(DEFAULT[1]).clamp(DEFAULT[1] / 4, DEFAULT[1] * 8))
}

/// The cache for data of that level among those that `folder` describes, as Linux does.
fn cache_of(folder: &Path, level: &str) -> Option<usize> {
    std::fs::read_dir(folder).ok()?.flatten().find_map(|cache| {
        let read = |name: &str| read_to_string(cache.path().join(name)).ok();
        let it = read("level")?.trim() == level && read("type")?.trim() != "Instruction";
        let bytes = kibibytes(read("size")?.trim())? << 10;
        it.then(|| bytes / read("shared_cpu_list").map_or(1, |list| processors(list.trim())))
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
    fn caches_are_read_as_linux_describes_them() {
        let folder = tempfile::tempdir().unwrap();
        let (first_of, second_of) = (|folder| cache_of(folder, "1"), |folder| cache_of(folder, "2"));
        assert_eq!(second_of(folder.path()), None);
        let caches = [
            ("1", "Instruction", "64K", "0"),
            ("1", "Data", "48K", "0"),
            ("2", "Unified", "1024K", "0,2"),
            ("3", "Unified", "32768K", "0-3"),
        ];
        for (index, (level, kind, size, shared)) in caches.into_iter().enumerate() {
            let cache = folder.path().join(format!("index{index}"));
            std::fs::create_dir(&cache).unwrap();
            for (name, text) in [("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)] {
                std::fs::write(cache.join(name), format!("{text}\n")).unwrap();
            }
        }
        assert_eq!((first_of(folder.path()), second_of(folder.path())), (Some(48 << 10), Some(512 << 10)));
        std::fs::write(folder.path().join("index2/size"), "1 MiB").unwrap();
        assert_eq!(second_of(folder.path()), None);
    }

    #[test]
    fn lists_of_processors_are_counted() {
        for (list, count) in [("0", 1), ("0-1", 2), ("0,4", 2), ("0-3,8-11", 8), ("", 1), ("3-1", 1), ("all", 1)] {
            assert_eq!(processors(list), count, "{list}");
        }
    }
}
