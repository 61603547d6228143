//! Bounds of comparisons, and how far results are below them.
//!
//! Processors, compilers and shardings round sums differently, so a result that just passes on one machine fails on another. Every
//! comparison of a device with the host, or of a mesh with one device, therefore prints its margin (`cargo test ... -- --nocapture`), and
//! `GRPO_TEST_MARGIN=2` fails all comparisons that are not below half of their bounds, except those of [`assert_below_without_margin`].

use std::sync::OnceLock;

/// The largest absolute difference, infinite if a number is NaN.
///
/// # Panics
/// Panics unless both have the same length.
#[track_caller]
pub fn largest_difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "different lengths");
    let off = found.iter().zip(expected).map(|(found, expected)| {
        // Equal infinities have no difference.
        let off = if found == expected { 0.0 } else { (found - expected).abs() };
        if off.is_nan() { f64::INFINITY } else { off }
    });
    off.fold(0.0, f64::max)
}

/// Prints how many times `off` fits into `bound`, and fails if it is larger.
///
/// # Panics
/// Panics if `off` is NaN or exceeds the bound, which `GRPO_TEST_MARGIN` divides.
#[track_caller]
pub fn assert_below(what: &str, off: f64, bound: f64) {
    println!("margin {:.1}: {what}: off by {off:.2e}, bound {bound:.2e}", bound / off);
    let margin = required();
    assert!(off * margin <= bound, "{what}: off by {off:e}, expected at most {bound:e} / {margin}");
}

/// Like [`assert_below`] without `GRPO_TEST_MARGIN`: for a difference that hardly depends on the processor, for the printed `reason`.
///
/// # Panics
/// Panics if `off` is NaN or exceeds the bound.
#[track_caller]
pub fn assert_below_without_margin(what: &str, off: f64, bound: f64, reason: &str) {
    println!("exempt margin {:.1}: {what}: off by {off:.2e}, bound {bound:.2e}: {reason}", bound / off);
    assert!(off <= bound, "{what}: off by {off:e}, expected at most {bound:e}");
}

/// Returns the smallest margin that passes: 1, or the environment's `GRPO_TEST_MARGIN`.
fn required() -> f64 {
    static REQUIRED: OnceLock<f64> = OnceLock::new();
    *REQUIRED.get_or_init(|| match std::env::var("GRPO_TEST_MARGIN") {
        Ok(text) => text.parse().expect("GRPO_TEST_MARGIN: expected a number of at least 1, such as 2"),
        Err(_) => 1.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_and_an_infinity_of_one_side_exceed_every_bound() {
        assert_eq!(largest_difference(&[1.0, f64::INFINITY], &[1.5, f64::INFINITY]), 0.5);
        for found in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert_eq!(largest_difference(&[0.0, found], &[0.0, 1.0]), f64::INFINITY);
        }
        assert_eq!(largest_difference(&[1.0], &[f64::NAN]), f64::INFINITY);
    }

    #[test]
    #[should_panic(expected = "expected at most")]
    fn a_difference_above_the_bound_fails() {
        assert_below("a sum", 1.1e-5, 1e-5);
    }

    #[test]
    #[should_panic(expected = "expected at most")]
    fn a_difference_above_the_bound_fails_without_margin() {
        assert_below_without_margin("a sum", 1.1e-5, 1e-5, "it is exact");
    }

    #[test]
    #[should_panic(expected = "expected at most")]
    fn nan_fails() {
        assert_below("a sum", f64::NAN, 1e-5);
    }

    #[test]
    #[should_panic(expected = "expected at most")]
    fn nan_fails_without_margin() {
        assert_below_without_margin("a sum", f64::NAN, 1e-5, "it is exact");
    }
}
