//! Values of a program as the numbers of a loss.

use grpo_core::backend_api::real::Real;
use grpo_stablehlo::Value;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// A [`Real`] that is an expression of a program: a vector over tokens, or a constant without a shape.
///
/// Constants fold, and 0 x = 0 even for infinite x: a zero here is the derivative of a constant.
#[derive(Clone, Debug)]
pub(crate) enum Traced {
    Constant(f64),
    Value(Value),
}

/// A predicate over tokens, or a constant one.
#[derive(Clone, Debug)]
pub(crate) enum TracedBool {
    Known(bool),
    Value(Value),
}

use Traced::Constant;

impl Traced {
    /// Returns the expression as a value of the type of `like`.
    pub(crate) fn into_value(self, like: &Value) -> Value {
        match self {
            Constant(number) => like.like(number),
            Self::Value(value) => value,
        }
    }

    /// Returns both operands: two numbers, or two values.
    fn both(&self, other: &Self) -> Result<(f64, f64), (Value, Value)> {
        match (self, other) {
            (Constant(a), Constant(b)) => Ok((*a, *b)),
            (Self::Value(a), b) => Err((a.clone(), b.clone().into_value(a))),
            (a, Self::Value(b)) => Err((a.clone().into_value(b), b.clone())),
        }
    }

    fn combine(&self, other: &Self, fold: impl Fn(f64, f64) -> f64, emit: impl Fn(&Value, &Value) -> Value) -> Self {
        match self.both(other) {
            Ok((a, b)) => Constant(fold(a, b)),
            Err((a, b)) => Self::Value(emit(&a, &b)),
        }
    }

    fn map(&self, fold: impl Fn(f64) -> f64, emit: impl Fn(&Value) -> Value) -> Self {
        match self {
            Constant(a) => Constant(fold(*a)),
            Self::Value(a) => Self::Value(emit(a)),
        }
    }

    fn compare(
        &self,
        other: &Self,
        fold: impl Fn(&f64, &f64) -> bool,
        emit: impl Fn(&Value, &Value) -> Value,
    ) -> TracedBool {
        match self.both(other) {
            Ok((a, b)) => TracedBool::Known(fold(&a, &b)),
            Err((a, b)) => TracedBool::Value(emit(&a, &b)),
        }
    }

    fn is(&self, number: f64) -> bool {
        matches!(self, Constant(c) if *c == number)
    }
}

impl Add for Traced {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        if other.is(0.0) {
            return self;
        }
        if self.is(0.0) {
            return other;
        }
        self.combine(&other, |a, b| a + b, |a, b| a + b)
    }
}

impl Sub for Traced {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        if other.is(0.0) {
            return self;
        }
        if self.is(0.0) {
            return -other;
        }
        self.combine(&other, |a, b| a - b, |a, b| a - b)
    }
}

impl Mul for Traced {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        if self.is(0.0) || other.is(1.0) {
            return self;
        }
        if other.is(0.0) || self.is(1.0) {
            return other;
        }
        self.combine(&other, |a, b| a * b, |a, b| a * b)
    }
}

impl Div for Traced {
    type Output = Self;
    fn div(self, other: Self) -> Self {
        if self.is(0.0) || other.is(1.0) {
            return self;
        }
        self.combine(&other, |a, b| a / b, |a, b| a / b)
    }
}

impl Neg for Traced {
    type Output = Self;
    fn neg(self) -> Self {
        self.map(|a| -a, |a| -a)
    }
}

impl Real for Traced {
    type Bool = TracedBool;
    fn constant(&self, value: f64) -> Self {
        Constant(value)
    }
    fn exp(&self) -> Self {
        self.map(f64::exp, Value::exp)
    }
    fn ln(&self) -> Self {
        self.map(f64::ln, Value::log)
    }
    fn sqrt(&self) -> Self {
        self.map(f64::sqrt, Value::sqrt)
    }
    fn lt(&self, other: &Self) -> TracedBool {
        self.compare(other, PartialOrd::lt, Value::lt)
    }
    fn le(&self, other: &Self) -> TracedBool {
        self.compare(other, PartialOrd::le, Value::le)
    }
    fn and(a: &TracedBool, b: &TracedBool) -> TracedBool {
        match (a, b) {
            (TracedBool::Known(false), _) | (_, TracedBool::Known(false)) => TracedBool::Known(false),
            (TracedBool::Known(true), other) | (other, TracedBool::Known(true)) => other.clone(),
            (TracedBool::Value(a), TracedBool::Value(b)) => TracedBool::Value(a & b),
        }
    }
    fn not(a: &TracedBool) -> TracedBool {
        match a {
            TracedBool::Known(known) => TracedBool::Known(!known),
            TracedBool::Value(value) => TracedBool::Value(!value),
        }
    }
    fn select(predicate: &TracedBool, on_true: &Self, on_false: &Self) -> Self {
        let predicate = match predicate {
            TracedBool::Known(true) => return on_true.clone(),
            TracedBool::Known(false) => return on_false.clone(),
            TracedBool::Value(predicate) => predicate,
        };
        match (on_true, on_false) {
            (Constant(a), Constant(b)) if a == b => Constant(*a),
            (Constant(a), Constant(b)) => {
                let number = predicate.convert(grpo_stablehlo::Dtype::F64);
                Self::Value(predicate.select(&number.like(*a), &number.like(*b)))
            }
            _ => on_true.combine(on_false, |a, _| a, |a, b| predicate.select(a, b)),
        }
    }
    fn stop_gradient(&self) -> Self {
        self.clone()
    }
}
