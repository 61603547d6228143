//! Mean, standard deviation and equality of the values that are present.

/// Statistics of the values that are not NaN.
#[derive(Clone, Copy, Debug)]
pub(super) struct Statistics {
    /// Sum of the weights.
    pub(super) count: f64,
    pub(super) mean: f64,
    pub(super) std: f64,
    /// `true` if the values are equal. A rounded standard deviation of equal values need not be 0.
    pub(super) all_equal: bool,
}

impl Statistics {
    pub(super) fn of(values: &[f64], ddof: u8) -> Self {
        Self::weighted(values, |_| 1.0, ddof)
    }

    /// Computes statistics in which value i occurs weight(i) times.
    fn weighted(values: &[f64], weight: impl Fn(usize) -> f64, ddof: u8) -> Self {
        let present = || {
            let all = values.iter().enumerate().map(|(i, v)| (*v, weight(i)));
            all.filter(|(v, w)| !v.is_nan() && *w > 0.0)
        };
        let count: f64 = present().map(|(_, w)| w).sum();
        let mean = present().map(|(v, w)| v * w).sum::<f64>() / count.max(1.0);
        let squares: f64 = present().map(|(v, w)| (v - mean) * (v - mean) * w).sum();
        let first = present().next().map(|(v, _)| v);
        Self {
            count,
            mean,
            std: (squares / (count - f64::from(ddof)).max(1.0)).sqrt(),
            all_equal: present().all(|(v, _)| Some(v) == first),
        }
    }

    /// Returns value - mean: exactly 0 if all values are equal, NaN for NaN.
    pub(super) fn centred(&self, value: f64) -> f64 {
        if self.all_equal && !value.is_nan() { 0.0 } else { value - self.mean }
    }
}

/// Returns value / divisor, and 0 for value 0 with any divisor.
pub(super) fn scaled(value: f64, divisor: f64) -> f64 {
    if value == 0.0 { 0.0 } else { value / divisor }
}

/// Replaces each value by (value - mean) / divisor(std). NaN and values of weight 0 are excluded from the statistics.
pub(super) fn whiten(values: &mut [f64], weight: impl Fn(usize) -> f64, ddof: u8, divisor: impl Fn(f64) -> f64) {
    let statistics = Statistics::weighted(values, weight, ddof);
    let divisor = divisor(statistics.std);
    for value in values {
        *value = scaled(statistics.centred(*value), divisor);
    }
}
