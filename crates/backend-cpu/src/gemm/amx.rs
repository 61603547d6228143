//! Products of bf16 tiles (Intel AMX).

use std::sync::OnceLock;

/// Whether the processor has tiles with bf16 products and the system lets this process use them. The first call asks
/// for that permission, which holds for every thread of the process.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_tiles() && permitted())
}

/// Tiles need a system that saves them; only Linux is asked.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub(crate) fn is_available() -> bool {
    false
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn has_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    #[target_feature(enable = "xsave")]
    fn enabled_state() -> u64 {
        // SAFETY: register 0 is there wherever the instruction is.
        unsafe { _xgetbv(0) }
    }
    const OSXSAVE: u32 = 1 << 27;
    const TILES: u32 = 1 << 22 | 1 << 24; // AMX-BF16, AMX-TILE
    const TILE_STATE: u64 = 1 << 17 | 1 << 18;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 || __cpuid_count(7, 0).edx & TILES != TILES {
        return false;
    }
    // SAFETY: OSXSAVE says that the instruction is there and allowed.
    let state = unsafe { enabled_state() };
    state & TILE_STATE == TILE_STATE
}

/// arch_prctl(ARCH_REQ_XCOMP_PERM, tile data).
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    let mut result = ARCH_PRCTL;
    // SAFETY: a system call that takes two integers and touches no memory of ours; it clobbers rcx and r11.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") result,
            in("rdi") 0x1023_i64, // ARCH_REQ_XCOMP_PERM
            in("rsi") 18_i64,     // XFEATURE_XTILEDATA
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}
