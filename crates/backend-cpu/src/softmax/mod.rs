//! Row statistics of logits and their gradient, shared by `logits` and `fused`.
//!
//! A row is always summed in tiles of [`TILE`] entries, merged from left to right in f64, so that its bits depend on
//! the row only, not on the division of work.
//!
//! The target is excluded from the sums. With M the maximum of the other logits, d_j = logit_scale (z_j - M), e_j =
//! exp(d_j) and S = sum over j != y of e_j:
//!   margin = logit_scale (M - z_y) + ln S,  log p_y = -softplus(margin),  q = 1 - p_y = -expm1(log p_y),
//!   p_j = e_j q / S,  entropy = -p_y log p_y - q log q + q (ln S - sum e_j d_j / S).
//! z_j are logits after [`Transform`], and logit_scale is the row's factor in [`Scales`]. There is no cancellation,
//! even for a collapsed distribution, and differences of logits are taken before scaling. With a sampling mask, the logits of
//! other ids are -inf after [`Transform`].

mod exp;
mod gradient;
mod keep;
mod partial;
mod row;
mod scales;
mod tanh;
mod transform;

pub(crate) use exp::exp;
pub(crate) use gradient::{RowGrad, add_gradient, gradient, gradient_to};
pub(crate) use keep::keep_only;
pub(crate) use partial::{Partial, TILE};
pub(crate) use row::{Row, RowSums};
pub(crate) use scales::Scales;
pub(crate) use transform::{Transform, transform_to};

#[cfg(test)]
mod tests;
