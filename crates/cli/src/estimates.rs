//! Numbers of compilers as text.

use grpo_backend_tpu::aot::Chip;
use grpo_backend_tpu::program::Blocking;

/// Formats the peak rates and the memory of a device.
pub(crate) fn rates(chip: Chip) -> String {
    let (flops, bandwidth) = (chip.peak_flops / 1e12, chip.bandwidth / 1e9);
    format!("{flops:.0} TFLOP/s, {bandwidth:.0} GB/s, {}", bytes(chip.memory))
}

/// Returns `2048 tokens`, `4096 columns`, or `-`.
pub(crate) fn tiles(blocking: Option<Blocking>) -> String {
    blocking.map_or("-".into(), |blocking| blocking.to_string())
}

pub(crate) fn milliseconds(seconds: f64) -> String {
    format!("{:.2} ms", 1e3 * seconds)
}

/// Formats a number of bytes with a unit in powers of ten.
pub(crate) fn bytes(bytes: u64) -> String {
    match bytes as f64 {
        b if b >= 1e9 => format!("{:.3} GB", b / 1e9),
        b if b >= 1e6 => format!("{:.1} MB", b / 1e6),
        b if b >= 1e3 => format!("{:.1} kB", b / 1e3),
        b => format!("{b} B"),
    }
}
