//! The instruction set that loops are compiled for and dispatched to.

use std::sync::LazyLock;

#[cfg(target_arch = "x86_64")]
use super::amx;

/// Instruction sets that loops are compiled for, each with all before it, but that AVX-512 need not have AVX-VNNI and
/// matrix tiles need no pairs of bf16. Every AArch64 processor has NEON; without a level of it, loops are those that compilers
/// make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2 with products of bytes; other loops are those of AVX2.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 with products of bytes; other loops are those of AVX-512.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// And with products of pairs of bf16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// And matrix tiles of bf16 and of bytes.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// Vectors of 128 bits, and products of 8-bit integers as 16-bit ones.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// And products of four 8-bit integers (`sdot`).
    #[cfg(target_arch = "aarch64")]
    NeonDotprod,
    /// And products of matrices of 8-bit integers (`smmla`).
    #[cfg(target_arch = "aarch64")]
    NeonI8mm,
    /// And products of matrices and of pairs of bf16 (`bfmmla`, `bfdot`).
    #[cfg(target_arch = "aarch64")]
    NeonBf16,
}

impl Isa {
    /// Has this machine it, given that `best` is the best that it has?
    fn within(self, best: Self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self == Self::AvxVnni {
            return self <= best && is_x86_feature_detected!("avxvnni");
        }
        #[cfg(target_arch = "x86_64")]
        if self == Self::Avx512Bf16 {
            return self <= best && is_x86_feature_detected!("avx512bf16");
        }
        self <= best
    }

    const ALL: &[Self] = &[
        Self::Portable,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        #[cfg(target_arch = "x86_64")]
        Self::AvxVnni,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512Vnni,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512Bf16,
        #[cfg(target_arch = "x86_64")]
        Self::Amx,
        #[cfg(target_arch = "aarch64")]
        Self::Neon,
        #[cfg(target_arch = "aarch64")]
        Self::NeonDotprod,
        #[cfg(target_arch = "aarch64")]
        Self::NeonI8mm,
        #[cfg(target_arch = "aarch64")]
        Self::NeonBf16,
    ];

    /// The one of this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|isa| isa.name() == name)
    }

    /// Its name, as `RIDGE_CPU_ISA` takes it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => "avx_vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => "avx512_vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => "avx512_bf16",
            #[cfg(target_arch = "x86_64")]
            Self::Amx => "amx",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Self::NeonDotprod => "neon_dotprod",
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm => "neon_i8mm",
            #[cfg(target_arch = "aarch64")]
            Self::NeonBf16 => "neon_bf16",
        }
    }
}

/// Names the environment variable that makes programs use an instruction set below the machine's best.
pub(crate) const ISA_VARIABLE: &str = "RIDGE_CPU_ISA";

/// The instruction set that programs use: the machine's best, or the one that [`ISA_VARIABLE`] names.
pub(crate) fn isa() -> Isa {
    *CHOICE.as_ref().unwrap_or(&Isa::Portable)
}

/// The instruction sets of this machine, the best last.
pub(crate) fn available() -> Vec<Isa> {
    let best = best();
    Isa::ALL.iter().copied().filter(|isa| isa.within(best)).collect()
}

/// What is wrong with [`ISA_VARIABLE`], if something is.
pub(crate) fn check_isa() -> Result<(), String> {
    CHOICE.as_ref().map(|_| ()).map_err(Clone::clone)
}

static CHOICE: LazyLock<Result<Isa, String>> = LazyLock::new(|| {
    let Some(wanted) = std::env::var_os(ISA_VARIABLE) else { return Ok(best()) };
    let possible = available();
    let found = possible.iter().find(|isa| wanted == isa.name());
    found.copied().ok_or_else(|| {
        let (wanted, names) = (wanted.display(), possible.iter().map(|isa| isa.name()).collect::<Vec<_>>());
        format!("{ISA_VARIABLE}={wanted} is none of what this machine has: {}", names.join(", "))
    })
});

/// The best instruction set of this machine.
fn best() -> Isa {
    #[cfg(target_arch = "x86_64")]
    {
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        let avx2 =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        if avx512 && avx2 {
            return match is_x86_feature_detected!("avx512vnni") {
                true if amx::available() => Isa::Amx,
                true if is_x86_feature_detected!("avx512bf16") => Isa::Avx512Bf16,
                true => Isa::Avx512Vnni,
                false => Isa::Avx512,
            };
        }
        if avx2 {
            return if is_x86_feature_detected!("avxvnni") { Isa::AvxVnni } else { Isa::Avx2 };
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        use std::arch::is_aarch64_feature_detected;

        match is_aarch64_feature_detected!("dotprod") {
            false => Isa::Neon,
            true if !is_aarch64_feature_detected!("i8mm") => Isa::NeonDotprod,
            true if !is_aarch64_feature_detected!("bf16") => Isa::NeonI8mm,
            true => Isa::NeonBf16,
        }
    }
    #[cfg(not(target_arch = "aarch64"))]
    Isa::Portable
}

/// Defines a function whose body is compiled once for each [`Isa`] of x86-64 and dispatched at the call; on AArch64 once, with
/// NEON. Inside, `FMA` says
/// whether `mul_add` is one instruction ([`fma`] uses it), and `WIDE` whether there are 32 registers of [`LANES`].
macro_rules! vectorised {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($g:ident: $bound:path),*>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name $(<$($g: $bound),*>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(non_upper_case_globals, dead_code, clippy::inline_always)]
            fn generic<$($($g: $bound,)*)? const FMA: bool, const WIDE: bool>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
            fn avx512<$($($g: $bound),*)?>($($arg: $ty),*) $(-> $ret)? { generic::<$($($g,)*)? true, true>($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2<$($($g: $bound),*)?>($($arg: $ty),*) $(-> $ret)? { generic::<$($($g,)*)? true, false>($($arg),*) }
            #[cfg(not(target_arch = "x86_64"))]
            return generic::<$($($g,)*)? { cfg!(target_arch = "aarch64") }, false>($($arg),*);
            #[cfg(target_arch = "x86_64")]
            match $crate::simd::isa() {
                $crate::simd::Isa::Portable => generic::<$($($g,)*)? false, false>($($arg),*),
                // SAFETY: `isa` found the features on this machine.
                $crate::simd::Isa::Avx2 | $crate::simd::Isa::AvxVnni => unsafe { avx2 $(::<$($g),*>)? ($($arg),*) },
                // SAFETY: `isa` found the features on this machine.
                $crate::simd::Isa::Avx512 | $crate::simd::Isa::Avx512Vnni | $crate::simd::Isa::Avx512Bf16 | $crate::simd::Isa::Amx => unsafe { avx512 $(::<$($g),*>)? ($($arg),*) },
            }
        }
    };
}
pub(crate) use vectorised;
