//! Products of bf16 tiles (Intel AMX).
//!
//! Each loaded operand tile is used in two products: a `[32, 32]` block of the output is four tiles, computed from two
//! tiles of the lhs and two of the rhs. The sums start with the block's previous values and are stored in place, without
//! a pass of vector registers. Meanwhile, the kernel prefetches the next block of the output, and operands of the next
//! product, which come from the L3 cache or from memory.
//!
//! Resources: 4 + 2 + 2 of 8 tiles; in the L1 cache, a panel of 128 words of each operand (16 KiB each) and two blocks
//! of the output (4 KiB each).
#![allow(unsafe_code)]

use std::sync::OnceLock;

/// The rows of a lhs panel: two tiles.
pub(crate) const LHS_PANEL: usize = 32;
/// The words of a row of a tile.
pub(crate) const WORDS: usize = 16;
/// The words that [`Tiles::multiply`] prefetches per [`WORDS`] words: 6 cache lines, enough for both operands of a
/// product with an output of `[256, 512]`.
pub(crate) const AHEAD: usize = 96;

/// Returns `true` if the processor has tiles with bf16 products and the system permits them to this process. The first
/// call requests that permission, for all threads of the process.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_tiles() && permitted())
}

fn has_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    #[target_feature(enable = "xsave")]
    fn enabled_state() -> u64 {
        // SAFETY: register 0 exists on every processor with this instruction.
        unsafe { _xgetbv(0) }
    }
    const OSXSAVE: u32 = 1 << 27;
    const TILES: u32 = 1 << 22 | 1 << 24; // AMX-BF16, AMX-TILE
    const TILE_STATE: u64 = 1 << 17 | 1 << 18;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 || __cpuid_count(7, 0).edx & TILES != TILES {
        return false;
    }
    // SAFETY: OSXSAVE guarantees that the instruction exists and is enabled.
    let state = unsafe { enabled_state() };
    state & TILE_STATE == TILE_STATE
}

fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: a system call with two integers, which accesses no memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

/// The floating-point operations of an iteration of [`spin`]: four products of 16 rows, 16 columns and 16 pairs, with
/// two multiply-adds per pair.
pub(crate) const SPIN_FLOPS: usize = 4 * WORDS * WORDS * (2 * WORDS) * 2;

/// Multiplies the same two tiles repeatedly, in registers, to measure the arithmetic peak. Returns an entry of a sum.
///
/// # Panics
/// If AMX is not available.
pub(crate) fn spin(iterations: usize) -> f32 {
    assert!(is_available(), "tiles to multiply");
    let mut sum = [0.0; WORDS * WORDS];
    Tiles::new().spin(iterations, &mut sum);
    sum[sum.len() - 1]
}

/// The tile registers of this thread, configured for products of 16 rows and 16 words.
pub(crate) struct Tiles {
    /// Prevents sending to another thread: registers belong to a thread.
    here: std::marker::PhantomData<*const ()>,
}

impl Tiles {
    /// Configures the tile registers of this thread. [`is_available`] must be `true`.
    pub(crate) fn new() -> Self {
        debug_assert!(is_available());
        #[repr(align(64))]
        struct Shapes([u8; 64]);
        let mut shapes = Shapes([0; 64]);
        shapes.0[0] = 1; // palette
        for tile in 0..8 {
            shapes.0[16 + 2 * tile] = 64; // bytes per row, little-endian
            shapes.0[48 + tile] = 16; // rows
        }
        // SAFETY: callers have a token of an instruction set that includes AMX; the shapes are 64 aligned bytes in the
        // format of palette 1.
        unsafe { std::arch::asm!("ldtilecfg [{}]", in(reg) &shapes.0, options(nostack, readonly, preserves_flags)) };
        Self { here: std::marker::PhantomData }
    }

    /// Computes `c[32, 32] (+)= a b` for a lhs panel `a: [words / 16, 32, 16]` and a rhs panel `b: [words, 32]`. Rows
    /// of c are `stride` elements apart. Prefetches [`AHEAD`] words per 16 words from `ahead` into the L2 cache, and 4
    /// rows per 16 words of the block of the output at `next` into the L1 cache; both may have any address.
    ///
    /// # Safety
    /// * The panels hold that many words, a multiple of 16.
    /// * `c` points to 32 rows of 32 elements, and nothing else accesses them at the same time.
    #[allow(clippy::too_many_arguments)]
    pub(crate) unsafe fn multiply(
        &mut self,
        words: usize,
        a: *const u32,
        b: *const u32,
        ahead: *const u32,
        next: *const f32,
        c: *mut f32,
        stride: usize,
        add: bool,
    ) {
        // SAFETY: tiles read 16 rows of 64 bytes: rows of a are 64 bytes apart, 1024 bytes per tile; rows of b are 128
        // bytes apart, 16 rows per step; rows of c are `stride` elements apart. The caller guarantees this memory.
        // Prefetches may have any address. `new` has configured the tiles on this thread.
        unsafe {
            std::arch::asm!(
                "test {add:e}, {add:e}",
                "jz 3f",
                "tileloadd tmm0, [{c} + {row}]",
                "tileloadd tmm1, [{c} + {row} + 64]",
                "tileloadd tmm2, [{below} + {row}]",
                "tileloadd tmm3, [{below} + {row} + 64]",
                "jmp 4f",
                "3:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "4:",
                "test {steps}, {steps}",
                "jz 5f",
                "2:",
                "tileloadd tmm4, [{a} + {near}]",
                "tileloadd tmm6, [{b} + {far}]",
                "tileloadd tmm7, [{b} + {far} + 64]",
                "prefetcht0 [{next}]",
                "prefetcht0 [{next} + 64]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "prefetcht0 [{next} + {row}]",
                "prefetcht0 [{next} + {row} + 64]",
                "tileloadd tmm5, [{a} + {near} + 1024]",
                "prefetcht0 [{next} + 2 * {row}]",
                "prefetcht0 [{next} + 2 * {row} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "prefetcht0 [{fourth}]",
                "prefetcht0 [{fourth} + 64]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "prefetcht1 [{ahead}]",
                "prefetcht1 [{ahead} + 64]",
                "prefetcht1 [{ahead} + 128]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "prefetcht1 [{ahead} + 192]",
                "prefetcht1 [{ahead} + 256]",
                "prefetcht1 [{ahead} + 320]",
                "add {ahead}, 384",
                "lea {next}, [{next} + 4 * {row}]",
                "lea {fourth}, [{fourth} + 4 * {row}]",
                "add {a}, 2048",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 2b",
                "5:",
                "tilestored [{c} + {row}], tmm0",
                "tilestored [{c} + {row} + 64], tmm1",
                "tilestored [{below} + {row}], tmm2",
                "tilestored [{below} + {row} + 64], tmm3",
                steps = inout(reg) words / WORDS => _,
                a = inout(reg) a => _,
                b = inout(reg) b => _,
                ahead = inout(reg) ahead => _,
                next = inout(reg) next => _,
                fourth = inout(reg) next.wrapping_add(3 * stride) => _,
                c = in(reg) c,
                below = in(reg) c.wrapping_add(WORDS * stride),
                row = in(reg) stride * size_of::<f32>(),
                add = in(reg) u32::from(add),
                near = in(reg) 64_usize,
                far = in(reg) 128_usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    /// Adds `iterations` products of a tile of 1.5 and a tile of 0.5, 24 per element, to each of four sums; `out` is
    /// one of the sums. Each product waits for the previous one with the same sum; four sums hide that latency.
    fn spin(&mut self, iterations: usize, out: &mut [f32; WORDS * WORDS]) {
        // bf16 pairs.
        let (a, b) = ([0x3fc0_3fc0_u32; WORDS * WORDS], [0x3f00_3f00_u32; WORDS * WORDS]);
        // SAFETY: tiles read and write 16 rows of 64 bytes, 64 bytes apart: the complete arrays a, b and out. `new` has
        // configured the tiles on this thread.
        unsafe {
            std::arch::asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "tileloadd tmm4, [{a} + {near}]",
                "tileloadd tmm5, [{b} + {near}]",
                "test {steps}, {steps}",
                "jz 3f",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tdpbf16ps tmm1, tmm4, tmm5",
                "tdpbf16ps tmm2, tmm4, tmm5",
                "tdpbf16ps tmm3, tmm4, tmm5",
                "dec {steps}",
                "jnz 2b",
                "3:",
                "tilestored [{out} + {near}], tmm3",
                steps = inout(reg) iterations => _,
                a = in(reg) a.as_ptr(),
                b = in(reg) b.as_ptr(),
                out = in(reg) out.as_mut_ptr(),
                near = in(reg) 64_usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                options(nostack),
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: releases the registers, which `new` has configured on this thread.
        unsafe { std::arch::asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
