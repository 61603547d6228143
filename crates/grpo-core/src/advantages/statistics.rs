//! Mean and standard deviation of what is present, and the one test of whether it is all the same.

/// Of values that are not NaN.
#[derive(Clone, Copy, Debug)]
pub(super) struct Statistics {
    /// Sum of the weights.
    pub(super) count: f64,
    pub(super) mean: f64,
    pub(super) std: f64,
    /// Compared on the values: a rounded standard deviation of equal ones need not be 0.
    pub(super) all_equal: bool,
}

impl Statistics {
    pub(super) fn of(values: &[f64], ddof: u8) -> Self {
        Self::weighted(values, |_| 1.0, ddof)
    }

    /// As if value i were there weight(i) times.
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

    /// value - mean; exactly 0 where all are equal, NaN where there is no value.
    pub(super) fn centred(&self, value: f64) -> f64 {
        if self.all_equal && !value.is_nan() { 0.0 } else { value - self.mean }
    }
}

/// value / divisor, where a value of 0 stays 0 whatever the divisor.
pub(super) fn scaled(value: f64, divisor: f64) -> f64 {
    if value == 0.0 { 0.0 } else { value / divisor }
}

/// (value - mean) / divisor(std) of the values that are not NaN; those of weight 0 are not counted.
pub(super) fn whiten(values: &mut [f64], weight: impl Fn(usize) -> f64, ddof: u8, divisor: impl Fn(f64) -> f64) {
    let statistics = Statistics::weighted(values, weight, ddof);
    let divisor = divisor(statistics.std);
    for value in values {
        *value = scaled(statistics.centred(*value), divisor);
    }
}
