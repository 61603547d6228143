//! The memory of a process, as the kernel counts it.

/// The bytes behind `key` in `/proc/self/status`; `None` where there is no such file.
fn status(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Bytes that this process holds now, but for the pages of its program and other files.
pub(crate) fn resident() -> Option<u64> {
    Some(status("VmRSS")?.saturating_sub(of_files()?))
}

/// The most that it has held since [`reset_high_water`]. What it has read of its program and other files is taken as it is
/// now: code that runs for the first time is no memory of a step.
pub(crate) fn high_water() -> Option<u64> {
    Some(status("VmHWM")?.saturating_sub(of_files()?))
}

fn of_files() -> Option<u64> {
    Some(status("RssFile")? + status("RssShmem")?)
}

/// Begins anew with what it holds now. `None` where the kernel does not offer it: a high water would be that of the
/// process's whole life then.
pub(crate) fn reset_high_water() -> Option<()> {
    std::fs::write("/proc/self/clear_refs", "5").ok()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::hint::black_box;

    #[test]
    fn a_buffer_that_comes_and_goes_is_seen_and_forgotten() {
        const BYTES: u64 = 256 << 20;
        reset_high_water().expect("Linux has clear_refs");
        let before = resident().expect("Linux has VmRSS");
        let mut buffer = Vec::new();
        buffer.resize(BYTES as usize, black_box(1_u8));
        drop(black_box(buffer));
        let seen = high_water().expect("Linux has VmHWM") - before;
        // Other tests of this process come and go meanwhile, but not with as much.
        assert!(seen >= BYTES / 2, "{seen}");
        reset_high_water().expect("Linux has clear_refs");
        assert!(high_water().expect("Linux has VmHWM") < before + BYTES / 2);
    }
}
