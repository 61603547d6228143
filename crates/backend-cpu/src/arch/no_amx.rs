//! A stub for targets without AMX: tiles are an extension of x86-64 and need support of the operating system, which is
//! implemented for Linux only.
#![allow(unsafe_code)]

/// The rows of a lhs panel.
pub(crate) const LHS_PANEL: usize = 32;
/// The words of a row of a tile.
pub(crate) const WORDS: usize = 16;
/// The words that are prefetched per [`WORDS`] words.
pub(crate) const AHEAD: usize = 96;
/// The floating-point operations of an iteration of [`spin`].
pub(crate) const SPIN_FLOPS: usize = 0;

/// Returns `true` if AMX can be used: never on this target.
pub(crate) fn is_available() -> bool {
    false
}

/// # Panics
/// Always: callers must check [`is_available`].
pub(crate) fn spin(_: usize) -> f32 {
    unreachable!("no tiles to multiply")
}

/// The tile registers; this target has none.
pub(crate) struct Tiles;

impl Tiles {
    /// # Panics
    /// Always: this target has no tiles.
    pub(crate) fn new() -> Self {
        unreachable!("no level has tiles here")
    }

    /// # Safety
    /// None: it cannot be called.
    #[allow(clippy::too_many_arguments)]
    pub(crate) unsafe fn multiply(
        &mut self,
        _: usize,
        _: *const u32,
        _: *const u32,
        _: *const u32,
        _: *const f32,
        _: *mut f32,
        _: usize,
        _: bool,
    ) {
        unreachable!("no level has tiles here")
    }
}
