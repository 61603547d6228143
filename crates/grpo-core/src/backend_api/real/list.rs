//! One number per token of a sequence, with elementwise arithmetic: the host's counterpart of a vector in a compiled program.

use super::{Real, Scalar};
use std::ops::{Add, Div, Mul, Neg, Sub};

/// One number per token, in order. All lists of an expression have the same length.
#[derive(Clone, Debug, PartialEq)]
pub struct List<R>(pub Vec<R>);

impl<R: Scalar> List<R> {
    /// Returns, for every token, the sum over all tokens, accumulated in f64.
    pub fn sum(&self) -> Self {
        let sum = R::from_f64(self.0.iter().map(|x| x.to_f64()).sum());
        Self(vec![sum; self.0.len()])
    }

    fn map(&self, f: impl Fn(&R) -> R) -> Self {
        Self(self.0.iter().map(f).collect())
    }

    fn zip<T>(&self, other: &Self, f: impl Fn(&R, &R) -> T) -> Vec<T> {
        debug_assert_eq!(self.0.len(), other.0.len(), "tokens of one sequence");
        self.0.iter().zip(&other.0).map(|(a, b)| f(a, b)).collect()
    }
}

macro_rules! token_by_token {
    ($($operation:ident::$function:ident),*) => {$(
        impl<R: Scalar> $operation for List<R> {
            type Output = Self;
            fn $function(self, other: Self) -> Self {
                Self(self.zip(&other, |a, b| a.$function(*b)))
            }
        }
    )*};
}
token_by_token!(Add::add, Sub::sub, Mul::mul, Div::div);

impl<R: Scalar> Neg for List<R> {
    type Output = Self;
    fn neg(self) -> Self {
        self.map(|x| -*x)
    }
}

impl<R: Scalar> Real for List<R> {
    type Bool = Vec<bool>;
    fn constant(&self, value: f64) -> Self {
        Self(vec![R::from_f64(value); self.0.len()])
    }
    fn exp(&self) -> Self {
        self.map(Real::exp)
    }
    fn ln(&self) -> Self {
        self.map(Real::ln)
    }
    fn sqrt(&self) -> Self {
        self.map(Real::sqrt)
    }
    fn lt(&self, other: &Self) -> Vec<bool> {
        self.zip(other, Real::lt)
    }
    fn le(&self, other: &Self) -> Vec<bool> {
        self.zip(other, Real::le)
    }
    fn and(a: &Vec<bool>, b: &Vec<bool>) -> Vec<bool> {
        a.iter().zip(b).map(|(a, b)| *a && *b).collect()
    }
    fn not(a: &Vec<bool>) -> Vec<bool> {
        a.iter().map(|a| !a).collect()
    }
    fn select(predicate: &Vec<bool>, on_true: &Self, on_false: &Self) -> Self {
        let sides = on_true.0.iter().zip(&on_false.0);
        Self(predicate.iter().zip(sides).map(|(holds, (a, b))| if *holds { *a } else { *b }).collect())
    }
    fn stop_gradient(&self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend_api::real::Dual;

    #[test]
    fn arithmetic_on_a_list_is_elementwise() {
        fn formula<R: Real>(x: R, y: R) -> R {
            let bounded = (x.clone() - y.clone()).exp().clamp(0.5, 2.0) * y.sigmoid();
            R::select(&x.le(&y), &(bounded / (x.abs() + x.constant(1.0))), &(-x.ln()).max(&y))
        }
        let (xs, ys) = ([-1.5, 0.25, 3.0, f64::NAN], [0.5, 0.25, -2.0, 1.0]);
        let of_lists = formula(Dual::variable(List(xs.to_vec())), Dual::fixed(List(ys.to_vec())));
        for i in 0..xs.len() {
            let alone = formula(Dual::variable(xs[i]), Dual::fixed(ys[i]));
            let same = |a: f64, b: f64| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            let found = (of_lists.value.0[i], of_lists.tangent.0[i]);
            assert!(same(found.0, alone.value) && same(found.1, alone.tangent), "{i}: {found:?} and {alone:?}");
        }
        assert_eq!(List(vec![1.0, 2.0, 4.5]).sum(), List(vec![7.5; 3]));
    }
}
