//! The softmax of precomputed logits as two TPU kernels: row statistics, and the gradient in place.
//!
//! Letters: B batch, T tokens, V vocabulary; z a logit, y the target, s the scale of the logits.
//!
//! With M the maximum of z_j except for the target, d_j = s (z_j - M) and e_j = exp(d_j), and all sums over j != y:
//!
//! * statistics: M, S = sum e_j, D = sum e_j d_j, z_y;
//! * dlogits: e_j (constant + linear d_j), and a separate derivative at y.
//!
//! Probabilities, entropy and the loss are computed per row between the two kernels.
//!
//! Per-row numbers are `[B, n, T]` with tokens along the lanes, because `[B, T, n]` would be padded to 128 columns in
//! memory. Inside of a kernel, each row's number fills the 128 lanes of its row, so that no operation over the
//! vocabulary crosses lanes.
//!
//! Logits must be row-major. If V is not a multiple of 128, the compiler chooses another layout for arguments and
//! results of a program, and copies them; the attribute `mhlo.layout_mode = "{2,1,0}"` on them prevents that.

mod dlogits;
mod spec;
mod statistics;

pub use dlogits::{COEFFICIENTS, dlogits_kernel};
pub use spec::KernelSpec;
pub use statistics::{STATISTICS, statistics_kernel};
