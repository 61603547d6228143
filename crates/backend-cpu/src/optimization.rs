//! The warning about kernels that were compiled with little optimisation.
//!
//! A profile may optimise this package alone, so `cfg!(debug_assertions)` would not show the level of the kernels.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The optimisation of this build's kernels.
pub(crate) static KERNELS: Optimization = Optimization::new(env!("GRPO_OPT_LEVEL"));

/// An optimisation level, and whether its warning was logged.
pub(crate) struct Optimization {
    level: &'static str,
    warned: AtomicBool,
}

impl Optimization {
    const fn new(level: &'static str) -> Self {
        Self { level, warned: AtomicBool::new(false) }
    }

    /// Logs a warning if kernels of this level are slow, in the first call only.
    pub(crate) fn warn_once(&self) {
        if self.is_slow() && !self.warned.swap(true, Relaxed) {
            tracing::warn!(
                "the kernels of grpo-backend-cpu were compiled with opt-level {}, which makes them 10 to 400 times slower: add \
                 `[profile.dev.package.grpo-backend-cpu]` and `opt-level = 3` to the program's Cargo.toml",
                self.level
            );
        }
    }

    /// Returns `true` for levels at which intrinsics are not inlined into the kernels.
    fn is_slow(&self) -> bool {
        !matches!(self.level, "2" | "3")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the lines that two calls log.
    fn lines(optimization: &Optimization) -> Vec<String> {
        let log = grpo_testkit::logged(|| {
            optimization.warn_once();
            optimization.warn_once();
        });
        log.lines().map(str::to_owned).collect()
    }

    #[test]
    fn slow_kernels_warn_once_and_name_the_lines_of_the_manifest() {
        for level in ["0", "1", "s", "z"] {
            let lines = lines(&Optimization::new(level));
            let [line] = &lines[..] else { panic!("opt-level {level}: {lines:?}") };
            for part in ["WARN", level, "[profile.dev.package.grpo-backend-cpu]", "opt-level = 3"] {
                assert!(line.contains(part), "{line}");
            }
        }
    }

    #[test]
    fn optimised_kernels_do_not_warn() {
        for level in ["2", "3"] {
            assert_eq!(lines(&Optimization::new(level)), [""; 0], "opt-level {level}");
        }
        // The profiles of this workspace optimise the kernels.
        assert_eq!(lines(&KERNELS), [""; 0]);
    }
}
