//! Values at sample points, with bounds of their rounding errors.

use grpo_rng::stable_hash;
use num_complex::Complex64;
use num_traits::Zero;
use std::f64::consts::PI;

/// The number of sample points for expressions with variables.
pub(super) const POINTS: usize = 6;
/// The relative rounding error of one operation.
const EPSILON: f64 = 1e-15;
/// The maximum relative difference of equal values, due to rounding.
const ROUNDING: f64 = 1e-10;
/// The maximum absolute difference between a value and its decimal: six places.
const DECIMAL: f64 = 5.1e-7;
/// The maximum relative difference between a small value and its decimal.
const DECIMAL_SHARE: f64 = 1e-3;

/// A value at a sample point and a bound of its rounding error.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) value: Complex64,
    /// The maximum absolute rounding error.
    pub(super) error: f64,
}

impl Sample {
    pub(super) fn real(value: f64) -> Self {
        Self::exactly(Complex64::new(value, 0.0))
    }

    pub(super) fn exactly(value: Complex64) -> Self {
        Self::with_error(value, 0.0)
    }

    /// Returns a value with the rounding error of the last operation added to `error`, the error from its operands. Infinite errors become
    /// 0.
    fn with_error(value: Complex64, error: f64) -> Self {
        let error = error + EPSILON * value.norm();
        Self { value, error: if error.is_finite() { error } else { 0.0 } }
    }

    /// Returns the value of a variable: its magnitude is in [0.5, 2.5). All variables are positive at the first point and negative at the
    /// second. At other points, the sign depends on the low bits of the name's letters, so that adjacent letters differ. Different signs
    /// are needed to compare roots, logarithms and absolute values.
    pub(super) fn variable(name: &str, point: usize) -> Self {
        let hash = stable_hash(&format!("{name}/{point}"));
        let size = 0.5 + (hash % 1_000_003) as f64 / 1_000_003.0 * 2.0;
        let letters: u32 = name.chars().map(u32::from).sum();
        let is_negative = point == 1 || point > 1 && (letters >> (point - 2)) % 2 == 1;
        Self::real(if is_negative { -size } else { size })
    }

    pub(super) fn negative(self) -> Self {
        // Avoids -0 in the imaginary part, which changes the branch of roots.
        let value = if self.value.im == 0.0 { Complex64::new(-self.value.re, 0.0) } else { -self.value };
        Self { value, error: self.error }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self::with_error(self.value + other.value, self.error + other.error)
    }

    pub(super) fn times(self, other: Self) -> Self {
        let (a, b) = (self.value, other.value);
        // Products of real numbers stay real, because infinity times 0i is NaN.
        let value = if a.im == 0.0 && b.im == 0.0 { Complex64::new(a.re * b.re, 0.0) } else { a * b };
        Self::with_error(value, a.norm() * other.error + b.norm() * self.error + self.error * other.error)
    }

    /// Returns the quotient; NaN if the divisor is 0 up to rounding.
    pub(super) fn over(self, other: Self) -> Self {
        let (a, b) = (self.value, other.value);
        if b.norm() <= other.error {
            return Self::real(f64::NAN);
        }
        let value = if a.im == 0.0 && b.im == 0.0 { Complex64::new(a.re / b.re, 0.0) } else { a / b };
        Self::with_error(value, (self.error + value.norm() * other.error) / (b.norm() - other.error))
    }

    pub(super) fn to_the(self, exponent: Self) -> Self {
        let value = raise(self.value, exponent.value);
        if self.value.is_zero() {
            return Self::with_error(value, self.error);
        }
        let share = exponent.value.norm() * self.error / self.value.norm() + self.value.ln().norm() * exponent.error;
        Self::with_error(value, value.norm() * share)
    }

    /// Applies a function of one variable. The error is the change of the result over the argument's error.
    pub(super) fn map(self, f: impl Fn(Complex64) -> Complex64) -> Self {
        let value = f(self.value);
        Self::with_error(value, (f(self.value + self.error) - value).norm())
    }

    /// Applies a function by its LaTeX name; NaN for unknown names.
    pub(super) fn function(self, name: &str) -> Self {
        let real = |x: f64| Complex64::new(x, 0.0);
        match name {
            "sin" => self.map(Complex64::sin),
            "cos" => self.map(Complex64::cos),
            "tan" => self.map(Complex64::tan),
            "cot" => Self::real(1.0).over(self.map(Complex64::tan)),
            "sec" => Self::real(1.0).over(self.map(Complex64::cos)),
            "csc" => Self::real(1.0).over(self.map(Complex64::sin)),
            "arcsin" => self.map(Complex64::asin),
            "arccos" => self.map(Complex64::acos),
            "arctan" => self.map(Complex64::atan),
            "sinh" => self.map(Complex64::sinh),
            "cosh" => self.map(Complex64::cosh),
            "tanh" => self.map(Complex64::tanh),
            "ln" => self.map(Complex64::ln),
            "log" | "lg" => self.map(|x| x.log(10.0)),
            "exp" => self.map(Complex64::exp),
            "abs" => self.map(|x| real(x.norm())),
            // A value within rounding of an integer is that integer.
            "floor" | "ceil" => {
                let x = self.value.re;
                let near = (x - x.round()).abs() <= 8.0 * self.error;
                Self::real(match name {
                    _ if near => x.round(),
                    "floor" => x.floor(),
                    _ => x.ceil(),
                })
            }
            _ => Self::real(f64::NAN),
        }
    }

    /// Returns `true` if the value is 0 up to rounding.
    pub(super) fn is_noise(self) -> bool {
        self.value.norm() <= 8.0 * self.error
    }

    /// Returns `true` if two values are equal up to rounding, or to six places if one is a decimal. NaN equals nothing.
    pub(super) fn is_near(self, other: Self, has_decimal: bool) -> bool {
        let (a, b) = (self.value, other.value);
        if a.re.is_infinite() || b.re.is_infinite() {
            return a.re == b.re;
        }
        let (difference, size) = ((a - b).norm(), a.norm().max(b.norm()));
        difference <= ROUNDING * size
            || difference <= 8.0 * (self.error + other.error)
            || has_decimal && difference <= DECIMAL.max(ROUNDING * size) && difference <= DECIMAL_SHARE * size
    }
}

fn raise(base: Complex64, exponent: Complex64) -> Complex64 {
    let is_real = base.im == 0.0 && exponent.im == 0.0;
    if is_real && (base.re >= 0.0 || exponent.re.fract() == 0.0) {
        return Complex64::new(base.re.powf(exponent.re), 0.0);
    }
    // Odd roots of negative numbers, and their powers, are real.
    let power_of_root = |root: f64| {
        let power = exponent.re * root;
        (is_real && (power - power.round()).abs() < 1e-9).then(|| power.round())
    };
    match [3.0, 5.0, 7.0, 9.0, 11.0].into_iter().find_map(power_of_root) {
        Some(power) => {
            let sign = if power % 2.0 == 0.0 { 1.0 } else { -1.0 };
            Complex64::new(sign * (-base.re).powf(exponent.re), 0.0)
        }
        None => base.powc(exponent),
    }
}

/// Coefficients of the Lanczos approximation of the gamma function, g = 7.
const LANCZOS: [f64; 9] = [
    0.999_999_999_999_809_9,
    676.520_368_121_885_1,
    -1_259.139_216_722_402_8,
    771.323_428_777_653_1,
    -176.615_029_162_140_6,
    12.507_343_278_686_905,
    -0.138_571_095_265_720_12,
    9.984_369_578_019_572e-6,
    1.505_632_735_149_311_6e-7,
];

/// Returns the gamma function of a real number; NaN for complex numbers.
pub(super) fn gamma(x: Complex64) -> Complex64 {
    fn of(x: f64) -> f64 {
        // Uses the reflection formula below 1/2, where the approximation is invalid.
        if x < 0.5 { PI / ((PI * x).sin() * of(1.0 - x)) } else { ln_gamma(x).exp() }
    }
    Complex64::new(if x.im == 0.0 { of(x.re) } else { f64::NAN }, 0.0)
}

/// Returns the logarithm of the gamma function of a number that is at least 1/2.
pub(super) fn ln_gamma(x: f64) -> f64 {
    let x = x - 1.0;
    let terms = LANCZOS[1..].iter().zip(1..).map(|(c, i)| c / (x + f64::from(i)));
    let t = x + 7.5;
    0.5 * (2.0 * PI).ln() + (x + 0.5) * t.ln() - t + (LANCZOS[0] + terms.sum::<f64>()).ln()
}
