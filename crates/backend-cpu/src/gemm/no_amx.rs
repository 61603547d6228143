//! What stands for `amx.rs` where it cannot be: tiles are an extension of x86-64, and need a system that saves them, of which
//! only Linux is asked.

/// Rows of a lhs panel.
pub(super) const ROWS: usize = 32;
/// Words of a row of a tile.
pub(super) const WORDS: usize = 16;
/// Floating-point operations of an iteration of [`spin`].
pub(crate) const SPIN_FLOPS: usize = 0;

/// It is not.
pub(crate) fn is_available() -> bool {
    false
}

/// # Panics
/// Always: only what [`is_available`] may be asked to spin.
pub(crate) fn spin(_: usize) -> f32 {
    unreachable!("no tiles to multiply")
}

/// There are none.
pub(super) enum Tiles {}

impl Tiles {
    /// # Panics
    /// Always: no level has tiles.
    pub(super) fn new() -> Self {
        unreachable!("no level has tiles here")
    }

    /// # Safety
    /// None: it cannot be called.
    pub(super) unsafe fn multiply(&mut self, _: usize, _: *const u32, _: *const u32, _: &mut [f32]) {
        match *self {}
    }
}
