//! The memory of a process, according to the kernel.

/// Returns the bytes of `key` in `/proc/self/status`; `None` if the file does not exist.
fn status(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Returns the resident bytes of this process, excluding file-backed pages.
pub(crate) fn resident() -> Option<u64> {
    Some(status("VmRSS")?.saturating_sub(file_backed()?))
}

/// Returns the peak of resident bytes since [`reset_high_water`], excluding the file-backed pages of now: code that runs for the first
/// time is not memory of a step.
pub(crate) fn high_water() -> Option<u64> {
    Some(status("VmHWM")?.saturating_sub(file_backed()?))
}

fn file_backed() -> Option<u64> {
    Some(status("RssFile")? + status("RssShmem")?)
}

/// Resets the peak to the current resident bytes. `None` if the kernel does not support it; the peak would then cover the whole life
/// of the process.
pub(crate) fn reset_high_water() -> Option<()> {
    std::fs::write("/proc/self/clear_refs", "5").ok()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::hint::black_box;

    #[test]
    fn high_water_sees_a_freed_buffer_until_it_is_reset() {
        const BYTES: u64 = 256 << 20;
        reset_high_water().expect("Linux has clear_refs");
        let before = resident().expect("Linux has VmRSS");
        let mut buffer = Vec::new();
        buffer.resize(BYTES as usize, black_box(1_u8));
        drop(black_box(buffer));
        let seen = high_water().expect("Linux has VmHWM") - before;
        // Other tests of this process allocate at the same time, but less.
        assert!(seen >= BYTES / 2, "{seen}");
        reset_high_water().expect("Linux has clear_refs");
        assert!(high_water().expect("Linux has VmHWM") < before + BYTES / 2);
    }
}
