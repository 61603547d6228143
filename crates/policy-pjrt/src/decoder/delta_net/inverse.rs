//! Inverses of unit lower triangular matrices, out of matrix products.
//!
//! ```text
//! X = I                                  # inverses of the diagonal blocks of size 1
//! for s = 1, 2, 4, ... below C:          # of size 2s: [[P, 0], [L, Q]]^-1 = [[P^-1, 0], [-Q^-1 L P^-1, Q^-1]]
//!     X = X - X (the blocks L of A) X
//! ```
//!
//! Rounding errors are as small as with substitution, because the products have only entries of inverses. The powers of A in
//! (I - A)(I + A^2)(I + A^4) ... would have entries of 10^17 for a chunk of 64 equal keys, which cancel.
//!
//! Legend: C rows of a matrix.

use super::super::{Compute, dot};
use crate::leaves::all;
use grpo_stablehlo::{Dtype, Result, TensorType, Value, trace};

/// Returns (I + A)^-1 of every matrix `[..., C, C]`, f32, where A is the strictly lower part of `a`.
///
/// For the result X, the derivative is -X^T dX X^T: two products. Differentiating the forward pass would take two per product.
///
/// # Errors
/// Never for square matrices.
pub(super) fn inverse(a: &Value) -> Result<Value> {
    let ty = a.ty().clone();
    let forward = trace(std::slice::from_ref(&ty), |_, arguments| {
        let inverse = by_blocks(&arguments[0]);
        vec![inverse.clone(), inverse]
    })?;
    let backward = trace(&[ty.clone(), ty], |_, arguments| {
        let [inverse, cotangent] = all(arguments);
        let last = inverse.shape().len() - 1;
        let left = product(inverse, cotangent, (last - 1, last - 1));
        let both = product(&left, inverse, (last, last));
        vec![lower(&-both, |row, column| column.lt(row))]
    })?;
    Ok(a.builder().custom_vjp(&forward, &backward, &[a], 1).swap_remove(0))
}

fn by_blocks(a: &Value) -> Value {
    let last = a.shape().len() - 1;
    let mut inverse: Option<Value> = None;
    let mut size = 1;
    while size < a.shape()[last] {
        // Rows of the second half of a block of 2s, and columns of its first half.
        let below = lower(a, |row, column| {
            let [of_row, of_column] = [row, column].map(|index| index / index.like(size as i64));
            let two = of_row.like(2);
            (&of_row / &two).eq(&(&of_column / &two)) & of_column.lt(&of_row)
        });
        inverse = Some(match inverse {
            None => lower_identity(a) - below,
            Some(inverse) => {
                let left = product(&inverse, &below, (last, last - 1));
                &inverse - product(&left, &inverse, (last, last - 1))
            }
        });
        size *= 2;
    }
    inverse.unwrap_or_else(|| lower_identity(a))
}

/// Returns a product of matrices in f32 that sums over these dimensions.
fn product(left: &Value, right: &Value, contract: (usize, usize)) -> Value {
    let batch: Vec<usize> = (0..left.shape().len() - 2).collect();
    dot(left, right, (&batch, &batch), contract, Compute::F32)
}

/// Returns the entries of matrices whose row and column `is_there` selects, and 0 elsewhere.
fn lower(a: &Value, is_there: impl FnOnce(&Value, &Value) -> Value) -> Value {
    let last = a.shape().len() - 1;
    let square = TensorType::new(Dtype::I32, [a.shape()[last]; 2]);
    let f = a.builder();
    let mask = is_there(&f.iota(0, square.clone()), &f.iota(1, square));
    mask.broadcast_in_dim(a.shape(), &[last - 1, last]).select(a, &a.like(0.0))
}

fn lower_identity(a: &Value) -> Value {
    lower(&a.like(1.0), Value::eq)
}
