//! The sizes of a core's L1 and L2 caches, which determine the blocking of products. L2 changes the order of work, but
//! no result. L1 determines how many products are summed before they are added to the result, and so its last bits.

use std::fs::read_to_string;
use std::path::Path;
use std::sync::OnceLock;

/// The folder in which Linux describes the caches of a processor.
const FOLDER: &str = "/sys/devices/system/cpu/cpu0/cache";
/// Default L1 and L2 sizes if the system reports none: the sizes of most processors; others lose little.
const DEFAULT: [usize; 2] = [32 << 10, 512 << 10];

/// Returns the bytes of L1 cache per thread: its size divided by the number of processors that share it.
pub(crate) fn first_cache() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| cache_of(Path::new(FOLDER), "1").unwrap_or(DEFAULT[0]).clamp(DEFAULT[0], DEFAULT[0] * 2))
}

/// Returns the bytes of L2 cache per thread: its size divided by the number of processors that share it.
pub(crate) fn second_cache() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| cache_of(Path::new(FOLDER), "2").unwrap_or(DEFAULT[1]).clamp(DEFAULT[1] / 4, DEFAULT[1] * 8))
}

/// Returns the size of the data cache of a level per processor, from `folder` in the format of Linux.
fn cache_of(folder: &Path, level: &str) -> Option<usize> {
    std::fs::read_dir(folder).ok()?.flatten().find_map(|cache| {
        let read = |name: &str| read_to_string(cache.path().join(name)).ok();
        let matches = read("level")?.trim() == level && read("type")?.trim() != "Instruction";
        let bytes = kibibytes(read("size")?.trim())? << 10;
        matches.then(|| bytes / read("shared_cpu_list").map_or(1, |list| processors(list.trim())))
    })
}

/// Parses `1024K` and returns 1024.
fn kibibytes(size: &str) -> Option<usize> {
    size.strip_suffix('K')?.parse().ok().filter(|size| *size < 1 << 30)
}

/// Counts the processors in a list such as `0-1,4`; 1 if it cannot be parsed.
fn processors(list: &str) -> usize {
    let range_len = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)?.saturating_add(1))
    };
    list.split(',').map(range_len).sum::<Option<usize>>().unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_sizes_are_read_from_sysfs() {
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
    fn processor_lists_are_counted() {
        for (list, count) in [("0", 1), ("0-1", 2), ("0,4", 2), ("0-3,8-11", 8), ("", 1), ("3-1", 1), ("all", 1)] {
            assert_eq!(processors(list), count, "{list}");
        }
    }
}
