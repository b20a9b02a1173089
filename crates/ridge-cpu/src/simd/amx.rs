//! Matrix tiles of x86 (AMX): are there some, and may this process use them?

use std::sync::OnceLock;

use ridge_hw::cpu::{Cpu, Feature};

/// Does this machine have tiles of bf16 and of 8-bit integers, and may this process use them?
pub(super) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        Cpu::detect().features.has_all(&[Feature::AmxTile, Feature::AmxBf16, Feature::AmxInt8, Feature::Avx512Bf16])
            // Without a name among features, and there wherever tiles are.
            && std::is_x86_feature_detected!("avx512vbmi")
            && asked_for()
    })
}

/// Asks the system for the leave to use tiles, which it gives to the whole process.
#[cfg(target_os = "linux")]
fn asked_for() -> bool {
    const ARCH_PRCTL: u64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let refused: i64;
    // SAFETY: a system call that changes what instructions this process may use, and no memory; it overwrites `rcx` and
    // `r11` as all do.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => refused,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    refused == 0
}

/// Other systems have other ways, which nobody has tried here.
#[cfg(not(target_os = "linux"))]
fn asked_for() -> bool {
    false
}
