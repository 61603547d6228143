//! The memory of this process and its limits: the machine's memory, control groups (cgroup versions 1 and 2), and `ulimit -v`.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// The machine's memory and the limits of this process in bytes. A field is `None` if the system does not report it, or if there is no
/// limit.
///
/// ```
/// use grpo_models::MemoryLimits;
///
/// let limits = MemoryLimits::of_this_process();
/// assert!(limits.left() <= limits.available);
/// # if cfg!(target_os = "linux") {
/// assert!(limits.available < limits.total);
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryLimits {
    /// The memory of the machine.
    pub total: Option<u64>,
    /// The part of `total` that can be allocated without swapping.
    pub available: Option<u64>,
    /// The limit of this process's control group, or of the ancestor with the least memory left.
    pub control_group: Option<MemoryLimit>,
    /// The limit of the address space (`ulimit -v`).
    pub address_space: Option<MemoryLimit>,
}

/// A limit of memory in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The limit.
    pub bytes: u64,
    /// The part of the limit that is not used.
    pub left: u64,
    /// The file that states the limit.
    pub file: PathBuf,
}

impl MemoryLimits {
    /// Reads the limits of this process from /proc and /sys.
    pub fn of_this_process() -> Self {
        Self::read(Path::new("/"))
    }

    /// Returns the bytes that this process can still allocate: `available`, or what a limit leaves if that is less. `None` if the system
    /// does not report it.
    pub fn left(&self) -> Option<u64> {
        let limits = [&self.control_group, &self.address_space].map(|limit| limit.as_ref().map(|limit| limit.left));
        limits.into_iter().chain([self.available]).flatten().min()
    }

    /// Reads the limits from a file system with its root at `root`.
    fn read(root: &Path) -> Self {
        let memory = read_to_string(root.join("proc/meminfo")).unwrap_or_default();
        Self {
            total: kib_in(&memory, "MemTotal:"),
            available: kib_in(&memory, "MemAvailable:"),
            control_group: control_group(root),
            address_space: address_space(root),
        }
    }
}

/// Returns the memory in bytes that this process can still allocate; see [`MemoryLimits::left`].
pub fn available_memory() -> Option<u64> {
    MemoryLimits::of_this_process().left()
}

/// Returns the current and the peak resident memory of this process in bytes; `None` if the system does not report them.
pub fn resident_memory() -> Option<(u64, u64)> {
    let status = read_to_string("/proc/self/status").ok()?;
    Some((kib_in(&status, "VmRSS:")?, kib_in(&status, "VmHWM:")?))
}

fn address_space(root: &Path) -> Option<MemoryLimit> {
    let file = root.join("proc/self/limits");
    let bytes = number_in(&read_to_string(&file).ok()?, "Max address space")?;
    let used = kib_in(&read_to_string(root.join("proc/self/status")).ok()?, "VmSize:")?;
    Some(MemoryLimit { bytes, left: bytes.saturating_sub(used), file })
}

/// The files of a control group, by version: the folder of the hierarchy below the root, the limit, the used bytes, and the key of
/// `memory.stat` with the bytes of page cache that count as used but can be reclaimed.
struct GroupFiles {
    hierarchy: &'static str,
    limit: &'static str,
    used: &'static str,
    reclaimable: &'static str,
}

const VERSION_1: GroupFiles = GroupFiles {
    hierarchy: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file ",
};
const VERSION_2: GroupFiles = GroupFiles {
    hierarchy: "sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    reclaimable: "inactive_file ",
};
/// Version 1 reports the largest multiple of the page size that fits in an `i64` if there is no limit.
const UNLIMITED: u64 = 1 << 62;

/// Returns the limit of the control group, or of the ancestor with the least memory left.
fn control_group(root: &Path) -> Option<MemoryLimit> {
    let groups = read_to_string(root.join("proc/self/cgroup")).ok()?;
    let (files, group) = memory_group(&groups)?;
    let hierarchy = root.join(files.hierarchy);
    let number = |path: &Path| read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = |folder: &Path| {
        let file = folder.join(files.limit);
        let bytes = number(&file).filter(|bytes| *bytes < UNLIMITED)?;
        let stat = read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let reclaimable = number_in(&stat, files.reclaimable).unwrap_or(0);
        let used = number(&folder.join(files.used))?.saturating_sub(reclaimable);
        Some(MemoryLimit { bytes, left: bytes.saturating_sub(used), file })
    };
    // In a container, the folder of the group may be outside of the mounted hierarchy, whose root then has the container's limit.
    let folder = hierarchy.join(group);
    let folders = folder.ancestors().take_while(|folder| folder.starts_with(&hierarchy));
    folders.filter_map(limit).min_by_key(|limit| limit.left)
}

/// Returns the files and the relative path of the control group that limits memory, from the lines `ID:CONTROLLERS:/PATH` of
/// /proc/self/cgroup. Version 2 has no list of controllers; a controller in a hierarchy of version 1 is not in version 2.
fn memory_group(groups: &str) -> Option<(GroupFiles, &str)> {
    let group = |matches: fn(&str) -> bool| {
        let mut fields = groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(":/"));
        fields.find(|(controllers, _)| matches(controllers)).map(|(_, path)| path)
    };
    let version_1 = group(|controllers| controllers.split(',').any(|name| name == "memory"));
    let version_1 = version_1.map(|path| (VERSION_1, path));
    version_1.or_else(|| group(str::is_empty).map(|path| (VERSION_2, path)))
}

/// Returns the bytes of a line of /proc in kB.
fn kib_in(text: &str, name: &str) -> Option<u64> {
    Some(number_in(text, name)?.saturating_mul(1024))
}

/// Returns the first number of a line of /proc.
fn number_in(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: (&str, &str) = (
        "proc/meminfo",
        "MemTotal:       24000000 kB\nMemFree:         9000000 kB\nMemAvailable:   22000000 kB\nBuffers: 1 kB\n",
    );

    /// Returns the limits of a root with these files.
    fn limits(files: &[(&str, &str)]) -> (MemoryLimits, tempfile::TempDir) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (MemoryLimits::read(root.path()), root)
    }

    #[test]
    fn without_limits_the_available_memory_is_left() {
        let (found, _root) = limits(&[MEMORY]);
        let expected = [24_000_000 * 1024, 22_000_000 * 1024].map(Some);
        assert_eq!([found.total, found.available], expected);
        assert_eq!((found.left(), found.control_group, found.address_space), (expected[1], None, None));
        assert_eq!(limits(&[]).0, MemoryLimits::default());
    }

    #[test]
    fn the_ancestor_with_the_least_memory_left_limits_a_group_of_version_2() {
        let files = [
            MEMORY,
            ("proc/self/cgroup", "0::/outer/inner\n"),
            ("sys/fs/cgroup/outer/inner/memory.max", "max\n"),
            ("sys/fs/cgroup/outer/inner/memory.current", "100\n"),
            ("sys/fs/cgroup/outer/memory.max", "1000000\n"),
            ("sys/fs/cgroup/outer/memory.current", "900000\n"),
            ("sys/fs/cgroup/outer/memory.stat", "anon 1\ninactive_file 300000\nactive_file 7\n"),
        ];
        let (found, root) = limits(&files);
        let file = root.path().join("sys/fs/cgroup/outer/memory.max");
        assert_eq!(found.control_group, Some(MemoryLimit { bytes: 1_000_000, left: 400_000, file }));
        assert_eq!(found.left(), Some(400_000));
    }

    #[test]
    fn a_group_of_version_1_is_found_beside_version_2() {
        let groups = ("proc/self/cgroup", "4:cpu,memory:/pod/box\n1:name=systemd:/\n0::/\n");
        let files = [
            MEMORY,
            groups,
            ("sys/fs/cgroup/memory.max", "5\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "77\n"),
            ("sys/fs/cgroup/memory/pod/box/memory.limit_in_bytes", "5000\n"),
            ("sys/fs/cgroup/memory/pod/box/memory.usage_in_bytes", "4000\n"),
            ("sys/fs/cgroup/memory/pod/box/memory.stat", "inactive_file 1\ntotal_inactive_file 500\n"),
        ];
        let (found, root) = limits(&files);
        let file = root.path().join("sys/fs/cgroup/memory/pod/box/memory.limit_in_bytes");
        assert_eq!(found.control_group, Some(MemoryLimit { bytes: 5000, left: 1500, file }));

        // In a container, the group's own folder is not mounted.
        let mounted = [
            MEMORY,
            groups,
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "6000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n"),
        ];
        assert_eq!(limits(&mounted).0.left(), Some(5000));
    }

    #[test]
    fn damaged_files_are_no_limits() {
        for groups in ["", "0", "0:", "::", "0:memory\n", "memory:/\n", "0:memory:x\n", "\u{0}\n:::\n"] {
            let files = [MEMORY, ("proc/self/cgroup", groups), ("sys/fs/cgroup/memory.max", "many\n")];
            assert_eq!(limits(&files).0.control_group, None, "{groups:?}");
        }
    }

    #[test]
    fn the_address_space_is_limited_by_ulimit() {
        let with = |soft: &str| {
            let text = format!("Max processes 1 1 processes\nMax address space   {soft}    unlimited   bytes\n");
            limits(&[MEMORY, ("proc/self/limits", &text), ("proc/self/status", "VmPeak: 9 kB\nVmSize:\t1000 kB\n")]).0
        };
        let limited = with("4096000");
        assert_eq!(limited.address_space.as_ref().map(|limit| (limit.bytes, limit.left)), Some((4_096_000, 3_072_000)));
        assert_eq!(limited.left(), Some(3_072_000));
        assert_eq!(with("unlimited").address_space, None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn linux_reports_the_memory_of_this_process() {
        assert!(available_memory().unwrap() > 1 << 20);
        let (now, most) = resident_memory().unwrap();
        assert!(1 << 20 < now && now <= most);
    }
}
