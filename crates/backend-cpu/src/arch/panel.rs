//! Sizes of the panels of packed operands; [`crate::gemm`] has the layouts.

/// The rows of a lhs panel for vector kernels. AMX has [`super::amx::LHS_PANEL`].
pub(crate) const LHS_PANEL: usize = 12;
/// The columns of a rhs panel.
pub(crate) const RHS_PANEL: usize = 32;
/// The values of a coded group, four registers of bf16.
pub(crate) const GROUP: usize = 128;
/// The u16 of a coded group: 12 bits per value.
pub(crate) const GROUP_U16: usize = GROUP / 4 * 3;
/// The bits of sign and mantissa of a bf16 value.
pub(crate) const SIGN_AND_MANTISSA: u16 = 0x807f;
