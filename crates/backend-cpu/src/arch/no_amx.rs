//! What stands for `amx.rs` where it cannot be: tiles are an extension of x86-64, and need a system that saves them, of which
//! only Linux is asked.
#![allow(unsafe_code)]

/// Rows of a lhs panel.
pub(crate) const LHS_PANEL: usize = 32;
/// Words of a row of a tile.
pub(crate) const WORDS: usize = 16;
/// Floating-point operations of an iteration of [`spin`].
pub(crate) const SPIN_FLOPS: usize = 0;

/// Whether AMX can be used, which is never the case on this target.
pub(crate) fn is_available() -> bool {
    false
}

/// # Panics
/// Always: only what [`is_available`] may be asked to spin.
pub(crate) fn spin(_: usize) -> f32 {
    unreachable!("no tiles to multiply")
}

/// The tile registers, of which this target has none.
pub(crate) enum Tiles {}

impl Tiles {
    /// # Panics
    /// Always: no level has tiles.
    pub(crate) fn new() -> Self {
        unreachable!("no level has tiles here")
    }

    /// # Safety
    /// None: it cannot be called.
    pub(crate) unsafe fn multiply(&mut self, _: usize, _: *const u32, _: *const u32, _: &mut [f32]) {
        match *self {}
    }
}
