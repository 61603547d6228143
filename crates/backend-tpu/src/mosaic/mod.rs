//! The softmax of given logits as two TPU kernels: row statistics, and the gradient over the logits themselves.
//!
//! Letters: B batch, T tokens, V vocabulary; z a logit, y the target, s the scale of the logits.
//!
//! With M the largest z_j but the target's, d_j = s (z_j - M) and e_j = exp(d_j), all sums over j != y:
//!   statistics: M, S = sum e_j, D = sum e_j d_j, z_y        dlogits: e_j (constant + linear d_j); its own slope at y.
//! What is made of them (probabilities, entropy, the loss) happens between the two, per row; kernels know none of it.
//!
//! Per-row numbers are `[B, n, T]`, tokens along the lanes, because `[B, T, n]` would be padded to 128 columns in memory.
//! Inside, each row's number fills the 128 lanes of its row, so that no operation over the vocabulary crosses lanes.
//!
//! Logits have to be row-major. Where V is no multiple of 128 the compiler likes another layout for arguments and results
//! of a program, and then copies them: give those the attribute `mhlo.layout_mode = "{2,1,0}"`.

mod dlogits;
mod spec;
mod statistics;

pub use dlogits::{COEFFICIENTS, dlogits_kernel};
pub use spec::KernelSpec;
pub use statistics::{STATISTICS, statistics_kernel};
