//! Sizes of the panels that operands of a product are packed into; [`crate::gemm`] has the layouts.

/// Rows of a panel of the lhs, for vector kernels. AMX has [`super::amx::LHS_PANEL`].
pub(crate) const LHS_PANEL: usize = 12;
/// Columns of a panel of the rhs.
pub(crate) const RHS_PANEL: usize = 32;
