//! Values of a program as the numbers and the matrices of update rules.

use grpo_core::backend_api::real::Real;
use grpo_policy::Matrices;
use grpo_stablehlo::{DotDimensions, Dtype, Precision, Reducer, Value};
use std::ops::{Add, Div, Mul, Neg, Sub};

/// A value of a program as the numbers of an update rule: a tensor, or a scalar, which operations with a tensor broadcast.
#[derive(Clone, Debug)]
pub(super) struct Element(pub(super) Value);

impl Element {
    fn zip(self, other: Self, operation: impl Fn(&Value, &Value) -> Value) -> Self {
        Self(match (self.0.shape(), other.0.shape()) {
            ([], shape @ [_, ..]) => operation(&self.0.broadcast_in_dim(shape, &[]), &other.0),
            (shape @ [_, ..], []) => operation(&self.0, &other.0.broadcast_in_dim(shape, &[])),
            _ => operation(&self.0, &other.0),
        })
    }
}

macro_rules! arithmetic {
    ($($operator:ident $method:ident),*) => {$(
        impl $operator for Element {
            type Output = Self;
            fn $method(self, other: Self) -> Self {
                self.zip(other, |a, b| $operator::$method(a, b))
            }
        }
    )*};
}

arithmetic!(Add add, Sub sub, Mul mul, Div div);

impl Neg for Element {
    type Output = Self;
    fn neg(self) -> Self {
        Self(-&self.0)
    }
}

/// A stack of matrices: the last two dimensions.
impl Matrices for Element {
    fn dims(&self) -> [usize; 2] {
        let [.., rows, columns] = *self.0.shape() else { unreachable!("the rule of matrices is for matrices only") };
        [rows, columns]
    }

    fn transposed(&self) -> Self {
        let stacked = self.stacked();
        let permutation: Vec<usize> = (0..stacked).chain([stacked + 1, stacked]).collect();
        Self(self.0.transpose(&permutation))
    }

    fn gram(&self) -> Self {
        self.contract(self, 1)
    }

    fn product(&self, other: &Self) -> Self {
        self.contract(other, 0)
    }

    fn combined(&self, a: f64, other: &Self, b: f64) -> Self {
        Self(&self.0 * self.0.like(a) + &other.0 * other.0.like(b))
    }

    fn normalised(&self, smallest: f64) -> Self {
        let stacked = self.stacked();
        let norms = (&self.0 * &self.0).reduce(Reducer::Add, &[stacked + 1]).reduce(Reducer::Add, &[stacked]).sqrt();
        let norms = norms.max(&norms.like(smallest));
        let dimensions: Vec<usize> = (0..stacked).collect();
        Self(&self.0 / norms.broadcast_in_dim(self.0.shape(), &dimensions))
    }
}

impl Element {
    /// Returns the number of dimensions before the matrices.
    fn stacked(&self) -> usize {
        self.0.shape().len() - 2
    }

    /// Sums over the columns of these matrices, and over dimension `over` of the matrices of `other`.
    fn contract(&self, other: &Self, over: usize) -> Self {
        let stacked = self.stacked();
        let stack: Vec<usize> = (0..stacked).collect();
        let dimensions =
            DotDimensions { batch: (stack.clone(), stack), contract: (vec![stacked + 1], vec![stacked + over]) };
        Self(self.0.dot_general(&other.0, dimensions, Dtype::F32, Precision::Highest))
    }
}

impl Real for Element {
    type Bool = Value;

    fn constant(&self, value: f64) -> Self {
        Self(self.0.like(value))
    }
    fn exp(&self) -> Self {
        Self(self.0.exp())
    }
    fn ln(&self) -> Self {
        Self(self.0.log())
    }
    fn sqrt(&self) -> Self {
        Self(self.0.sqrt())
    }
    fn lt(&self, other: &Self) -> Value {
        self.clone().zip(other.clone(), Value::lt).0
    }
    fn le(&self, other: &Self) -> Value {
        self.clone().zip(other.clone(), Value::le).0
    }
    fn and(a: &Value, b: &Value) -> Value {
        a & b
    }
    fn not(a: &Value) -> Value {
        !a
    }
    fn select(predicate: &Value, on_true: &Self, on_false: &Self) -> Self {
        on_true.clone().zip(on_false.clone(), |a, b| predicate.select(a, b))
    }
    fn stop_gradient(&self) -> Self {
        Self(self.0.stop_gradient())
    }
}
