//! The scalar type over which losses are generic.
//!
//! [`crate::objective`] states each loss once, as a generic function over [`Real`]. With `f64` it is the
//! oracle and the loss on the host, with [`List`] the loss of all tokens of a sequence, with [`Dual`] its derivative. A value
//! of a compiled program (StableHLO) can implement [`Real`] too, because no function branches on a value: selections
//! are [`Real::select`].

mod list;

pub use list::List;

use std::ops::{Add, Div, Mul, Neg, Sub};

/// Arithmetic of losses, without control flow that depends on a value.
pub trait Real:
    Clone + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + Neg<Output = Self>
{
    /// Result of a comparison: `bool` for numbers, a predicate value in a compiled program.
    type Bool: Clone;

    /// Returns a constant in the context (program, device, tangent space) of `self`.
    fn constant(&self, value: f64) -> Self;
    /// Returns e^x.
    fn exp(&self) -> Self;
    /// Returns the natural logarithm.
    fn ln(&self) -> Self;
    /// Returns the square root.
    fn sqrt(&self) -> Self;
    /// Returns `self < other`.
    fn lt(&self, other: &Self) -> Self::Bool;
    /// Returns `self <= other`.
    fn le(&self, other: &Self) -> Self::Bool;
    /// Returns `a && b`.
    fn and(a: &Self::Bool, b: &Self::Bool) -> Self::Bool;
    /// Returns `!a`.
    fn not(a: &Self::Bool) -> Self::Bool;
    /// Returns `on_true` where the predicate holds, else `on_false`. A NaN on the other side does not reach the result or its derivative.
    fn select(predicate: &Self::Bool, on_true: &Self, on_false: &Self) -> Self;
    /// Returns the same value as a constant of differentiation.
    fn stop_gradient(&self) -> Self;

    /// Returns `a || b`.
    fn or(a: &Self::Bool, b: &Self::Bool) -> Self::Bool {
        Self::not(&Self::and(&Self::not(a), &Self::not(b)))
    }

    /// Returns `true` if this is NaN, the only value that is not `<=` itself.
    fn is_nan(&self) -> Self::Bool {
        Self::not(&self.le(self))
    }

    /// Returns `origin` if it is NaN, else `self`. For a `self` that was selected by comparing `origin`: comparisons with a NaN are false, so
    /// it would be lost.
    fn or_nan_of(&self, origin: &Self) -> Self {
        Self::select(&origin.is_nan(), origin, self)
    }

    /// Returns |x|; the derivative at 0 is 0. NaN stays NaN.
    fn abs(&self) -> Self {
        let zero = self.constant(0.0);
        let not_below = Self::select(&self.le(&zero), &zero, self);
        Self::select(&self.lt(&zero), &-self.clone(), &not_below)
    }

    /// Returns 1 / (1 + e^-x).
    fn sigmoid(&self) -> Self {
        self.constant(1.0) / (self.constant(1.0) + (-self.clone()).exp())
    }

    /// Returns the minimum; `self` on a tie, which decides the derivative. NaN if either is NaN, as in PyTorch.
    fn min(&self, other: &Self) -> Self {
        Self::select(&Self::or(&self.le(other), &self.is_nan()), self, other)
    }

    /// Returns the maximum; `self` on a tie. NaN if either is NaN, as in PyTorch.
    fn max(&self, other: &Self) -> Self {
        Self::select(&Self::or(&other.le(self), &self.is_nan()), self, other)
    }

    /// Clamps `self` to two constants; the derivative is 1 at the bounds and 0 beyond them. NaN stays NaN.
    fn clamp(&self, low: f64, high: f64) -> Self {
        self.max(&self.constant(low)).min(&self.constant(high))
    }

    /// Returns 1 where the predicate holds, else 0.
    fn indicator(&self, predicate: &Self::Bool) -> Self {
        Self::select(predicate, &self.constant(1.0), &self.constant(0.0))
    }
}

/// A [`Real`] that is an ordinary number on the host.
pub trait Scalar: Real<Bool = bool> + Copy + Send + Sync + Default + std::fmt::Debug + 'static {
    /// Rounds to this type.
    fn from_f64(value: f64) -> Self;
    /// Widens to f64, exactly.
    fn to_f64(self) -> f64;
}

macro_rules! impl_real {
    ($t:ty) => {
        impl Real for $t {
            type Bool = bool;
            fn constant(&self, value: f64) -> Self {
                value as $t
            }
            fn exp(&self) -> Self {
                <$t>::exp(*self)
            }
            fn ln(&self) -> Self {
                <$t>::ln(*self)
            }
            fn sqrt(&self) -> Self {
                <$t>::sqrt(*self)
            }
            fn lt(&self, other: &Self) -> bool {
                self < other
            }
            fn le(&self, other: &Self) -> bool {
                self <= other
            }
            fn and(a: &bool, b: &bool) -> bool {
                *a && *b
            }
            fn not(a: &bool) -> bool {
                !*a
            }
            fn select(predicate: &bool, on_true: &Self, on_false: &Self) -> Self {
                if *predicate { *on_true } else { *on_false }
            }
            fn stop_gradient(&self) -> Self {
                *self
            }
        }
        impl Scalar for $t {
            fn from_f64(value: f64) -> Self {
                value as $t
            }
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
        }
    };
}
impl_real!(f32);
impl_real!(f64);

/// A value and its derivative with respect to one input (forward mode).
///
/// The loss is a function of few inputs per token, so one forward pass per input is cheaper and simpler than a
/// tape, and no second formula for the gradient can diverge from the first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dual<R> {
    /// The value.
    pub value: R,
    /// d value / d input.
    pub tangent: R,
}

impl<R: Real> Dual<R> {
    /// Creates the input itself: derivative 1.
    pub fn variable(value: R) -> Self {
        let tangent = value.constant(1.0);
        Self { value, tangent }
    }

    /// Creates a value that does not depend on the input: derivative 0.
    pub fn fixed(value: R) -> Self {
        let tangent = value.constant(0.0);
        Self { value, tangent }
    }
}

impl<R: Real> Add for Dual<R> {
    type Output = Self;
    fn add(self, o: Self) -> Self {
        Self { value: self.value + o.value, tangent: self.tangent + o.tangent }
    }
}

impl<R: Real> Sub for Dual<R> {
    type Output = Self;
    fn sub(self, o: Self) -> Self {
        Self { value: self.value - o.value, tangent: self.tangent - o.tangent }
    }
}

impl<R: Real> Mul for Dual<R> {
    type Output = Self;
    fn mul(self, o: Self) -> Self {
        Self { value: self.value.clone() * o.value.clone(), tangent: self.tangent * o.value + self.value * o.tangent }
    }
}

impl<R: Real> Div for Dual<R> {
    type Output = Self;
    fn div(self, o: Self) -> Self {
        let value = self.value / o.value.clone();
        Self { tangent: (self.tangent - value.clone() * o.tangent) / o.value, value }
    }
}

impl<R: Real> Neg for Dual<R> {
    type Output = Self;
    fn neg(self) -> Self {
        Self { value: -self.value, tangent: -self.tangent }
    }
}

impl<R: Real> Real for Dual<R> {
    type Bool = R::Bool;
    fn constant(&self, value: f64) -> Self {
        Self::fixed(self.value.constant(value))
    }
    fn exp(&self) -> Self {
        let value = self.value.exp();
        Self { tangent: value.clone() * self.tangent.clone(), value }
    }
    fn ln(&self) -> Self {
        Self { value: self.value.ln(), tangent: self.tangent.clone() / self.value.clone() }
    }
    fn sqrt(&self) -> Self {
        let value = self.value.sqrt();
        Self { tangent: self.tangent.clone() / (value.clone() + value.clone()), value }
    }
    fn lt(&self, other: &Self) -> R::Bool {
        self.value.lt(&other.value)
    }
    fn le(&self, other: &Self) -> R::Bool {
        self.value.le(&other.value)
    }
    fn and(a: &R::Bool, b: &R::Bool) -> R::Bool {
        R::and(a, b)
    }
    fn not(a: &R::Bool) -> R::Bool {
        R::not(a)
    }
    fn select(predicate: &R::Bool, on_true: &Self, on_false: &Self) -> Self {
        Self {
            value: R::select(predicate, &on_true.value, &on_false.value),
            tangent: R::select(predicate, &on_true.tangent, &on_false.tangent),
        }
    }
    fn stop_gradient(&self) -> Self {
        Self::fixed(self.value.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;

    fn derivative(f: impl Fn(Dual<f64>) -> Dual<f64>, x: f64) -> f64 {
        f(Dual::variable(x)).tangent
    }

    #[test]
    fn rules_of_differentiation() {
        let x = 0.7;
        assert_relative_eq!(derivative(|x| x * x, x), 2.0 * x);
        assert_relative_eq!(derivative(|x| x.exp(), x), x.exp());
        assert_relative_eq!(derivative(|x| x.ln(), x), 1.0 / x);
        assert_relative_eq!(derivative(|x| x.sqrt(), x), 0.5 / x.sqrt());
        assert_relative_eq!(derivative(|x| x.constant(3.0) / x, x), -3.0 / (x * x));
        assert_relative_eq!(derivative(|x| -(x - x.constant(2.0)) * x, x), 2.0 - 2.0 * x, epsilon = 1e-15);
        assert_eq!(derivative(|x| x.stop_gradient() * x, x), x);
    }

    #[test]
    fn clamp_passes_the_derivative_up_to_its_bounds() {
        let slope = |x: f64| derivative(|x| x.clamp(0.5, 2.0), x);
        assert_eq!([slope(0.4), slope(0.5), slope(1.0), slope(2.0), slope(2.1)], [0.0, 1.0, 1.0, 1.0, 0.0]);
    }

    #[test]
    fn min_max_and_clamp_keep_nan_with_its_derivative() {
        let nan = Dual { value: f64::NAN, tangent: f64::NAN };
        let one = Dual::variable(1.0);
        for (how, found) in [
            ("min", nan.min(&one)),
            ("min of the other", one.min(&nan)),
            ("max", nan.max(&one)),
            ("max of the other", one.max(&nan)),
            ("clamp", nan.clamp(0.8, 1.2)),
            ("abs", nan.abs()),
            ("sigmoid", nan.sigmoid()),
            ("or_nan_of", one.or_nan_of(&nan)),
        ] {
            assert!(found.value.is_nan() && found.tangent.is_nan(), "{how}: {found:?}");
        }
        assert_eq!((one.or_nan_of(&one), one.abs()), (one, one));
        assert_eq!(
            [-2.0, 0.0, 3.0].map(|x| (x.abs(), derivative(|x| x.abs(), x))),
            [(2.0, -1.0), (0.0, 0.0), (3.0, 1.0)]
        );
        // Infinities are clamped.
        assert_eq!([f64::NEG_INFINITY, f64::INFINITY].map(|x| Real::clamp(&x, 0.8, 1.2)), [0.8, 1.2]);
    }

    #[test]
    fn select_drops_nan_of_the_other_side() {
        let x = Dual::variable(1000.0_f32);
        let overflow = x.exp(); // inf, with an infinite tangent
        let kept = Dual::select(&false, &overflow, &x);
        assert_eq!((kept.value, kept.tangent), (1000.0, 1.0));
        assert_eq!(overflow.min(&x.constant(5.0)).tangent, 0.0);
    }

    #[test]
    fn nested_duals_give_second_derivatives() {
        let x = Dual { value: Dual::variable(0.3_f64), tangent: Dual::fixed(1.0) };
        assert_relative_eq!((x * x * x).tangent.tangent, 6.0 * 0.3, epsilon = 1e-12);
    }
}
