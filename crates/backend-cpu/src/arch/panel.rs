//! Sizes of the panels of packed operands; [`crate::gemm`] has the layouts.

/// The rows of a lhs panel for vector kernels. AMX has [`super::amx::LHS_PANEL`].
pub(crate) const LHS_PANEL: usize = 12;
/// The columns of a rhs panel.
pub(crate) const RHS_PANEL: usize = 32;
