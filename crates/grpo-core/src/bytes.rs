//! Readable byte counts.

/// Formats a number of bytes with a decimal unit, as vendors of disks and clouds do: `4 B`, `12.3 kB`, `512.0 MB`, `3.21 GB`.
///
/// ```
/// use grpo_core::readable_bytes;
///
/// assert_eq!([999, 12_345, 512_000_000, 3_210_000_000].map(readable_bytes), ["999 B", "12.3 kB", "512.0 MB", "3.21 GB"]);
/// ```
pub fn readable_bytes(bytes: u64) -> String {
    let value = bytes as f64;
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", value / 1e6),
        1_000_000_000..1_000_000_000_000 => format!("{:.2} GB", value / 1e9),
        _ => format!("{:.2} TB", value / 1e12),
    }
}
