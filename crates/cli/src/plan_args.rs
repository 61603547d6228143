//! The arguments of `grpo plan`.

use crate::bench_layers::BenchArgs;

/// Arguments of `grpo plan`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "CONFIG is the configuration of a run, as in configs/train/ and configs/aot/: the table ranks the legal meshes of all devices \
    of the target, each with its best micro-batch and recomputation, by predicted time of a step, and the YAML has the keys of the best. The \
    compiler's bytes and times stand beside the predictions for the first few (--compile); its times leave out the links between devices. \
    Or CONFIG is a benchmark, as in configs/bench/: the largest chunk of tokens with which the loss of a variant fits. Times are \
    predictions and estimates, not measurements."
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) bench: BenchArgs,
    /// Memory of a device that may be used, e.g. 32GiB, 15GB, 1000000 [default: the chip's].
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) hbm: Option<u64>,
    /// Of a run: compile the update of the best N meshes [default: 3, or 0 without a plugin].
    #[arg(long, value_name = "N", conflicts_with = "variant")]
    pub(crate) compile: Option<usize>,
    /// Of a run: show at most N rows of a table [default: 10; with --json all candidates].
    #[arg(long, value_name = "N", conflicts_with = "variant")]
    pub(crate) top: Option<usize>,
    /// Of a benchmark: the variant to plan [default: fused].
    #[arg(long, value_name = "NAME")]
    pub(crate) variant: Option<String>,
    /// Print one JSON document instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Recompile instead of using cached results.
    #[arg(long)]
    pub(crate) recompile: bool,
}

/// Parses a number of bytes such as `32GiB`, `15GB` or `1.5e9`.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        other => return Err(format!("`{other}` is no unit: use B, kB, MB, GB, KiB, MiB or GiB")),
    };
    match digits.trim().parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 && number * unit < 2f64.powi(63) => Ok((number * unit) as u64),
        _ => Err("expected a size above 0 such as 32GiB".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_sizes_are_parsed_with_units() {
        assert_eq!(
            ["32GiB", "15 GB", "1000", "1.5e3", "2kib"].map(size),
            [32 << 30, 15e9 as u64, 1000, 1500, 2048].map(Ok)
        );
        for text in ["", "GiB", "-1GB", "3 parsecs", "nanGB", "1e300GB", "0"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
