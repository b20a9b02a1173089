//! Vector loops, compiled for each instruction set and chosen at run time; conversions between storage and f32 are in
//! `simd/convert.rs`, the exponential in `simd/exp.rs`, that of 2 on AVX-512 in `simd/power.rs`, sines and cosines in
//! `simd/angle.rs`.
//!
//! Loops are written over fixed-size arrays of lanes that the compiler turns into vector registers. Sums keep one
//! partial sum a lane and add the lanes up in a fixed tree, so a sum's bits depend on its length alone.
#![allow(clippy::inline_always)] // what a vector loop calls must compile with the loop's instruction set

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
mod angle;
mod convert;
mod exp;
#[cfg(target_arch = "x86_64")]
mod power;

use std::sync::LazyLock;

pub(crate) use angle::angles;
#[cfg(target_arch = "x86_64")]
pub(crate) use convert::stream_rows;
pub(crate) use convert::{
    E4M3, E5M2, Element, add_rows, load, place, put, round, store, store_rows, view, widen_lanes, with_element,
};
pub(crate) use exp::{exp, exp_scaled, exp_sum, sum_exp, swiglu};
#[cfg(target_arch = "x86_64")]
pub(crate) use power::power;

/// Lanes of partial sums: one AVX-512 register, two of AVX2, four of NEON.
pub(crate) const LANES: usize = 16;

/// Instruction sets that loops are compiled for, each with all before it, but that AVX-512 need not have AVX-VNNI.
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
    /// And matrix tiles of bf16 and of bytes.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

impl Isa {
    /// Has this machine it, given that `best` is the best that it has?
    fn within(self, best: Self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self == Self::AvxVnni {
            return self <= best && is_x86_feature_detected!("avxvnni");
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
        Self::Amx,
    ];

    fn name(self) -> &'static str {
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
            Self::Amx => "amx",
        }
    }
}

/// Names the environment variable that makes programs use an instruction set below the machine's best.
pub(crate) const ISA_VARIABLE: &str = "RIDGE_CPU_ISA";

/// The instruction set that programs use: the machine's best, or the one that [`ISA_VARIABLE`] names.
pub(crate) fn isa() -> Isa {
    *CHOICE.as_ref().unwrap_or(&Isa::Portable)
}

/// What is wrong with [`ISA_VARIABLE`], if something is.
pub(crate) fn check_isa() -> Result<(), String> {
    CHOICE.as_ref().map(|_| ()).map_err(Clone::clone)
}

static CHOICE: LazyLock<Result<Isa, String>> = LazyLock::new(|| {
    let best = best();
    let Some(wanted) = std::env::var_os(ISA_VARIABLE) else { return Ok(best) };
    let possible: Vec<Isa> = Isa::ALL.iter().copied().filter(|isa| isa.within(best)).collect();
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
                true => Isa::Avx512Vnni,
                false => Isa::Avx512,
            };
        }
        if avx2 {
            return if is_x86_feature_detected!("avxvnni") { Isa::AvxVnni } else { Isa::Avx2 };
        }
    }
    Isa::Portable
}

/// Defines a function whose body is compiled once for each [`Isa`] and dispatched at the call. Inside, `FMA` says
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
            match $crate::simd::isa() {
                $crate::simd::Isa::Portable => generic::<$($($g,)*)? { cfg!(target_arch = "aarch64") }, false>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `isa` found the features on this machine.
                $crate::simd::Isa::Avx2 | $crate::simd::Isa::AvxVnni => unsafe { avx2 $(::<$($g),*>)? ($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `isa` found the features on this machine.
                $crate::simd::Isa::Avx512 | $crate::simd::Isa::Avx512Vnni | $crate::simd::Isa::Amx => unsafe { avx512 $(::<$($g),*>)? ($($arg),*) },
            }
        }
    };
}
pub(crate) use vectorised;

/// `a * b + c`: in one rounding where the machine does that, the same everywhere on one machine.
#[inline(always)]
pub(crate) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Adds up lanes in a fixed tree: halves, then halves of those.
#[inline(always)]
pub(crate) fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// [`sum_lanes`] of each of `sums`, of which there are at most 32 and as many as `out` has elements.
#[inline(always)]
pub(crate) fn sum_each(sums: &[[f32; LANES]], out: &mut [f32]) {
    let mut quarters = [[0f32; 4]; 32];
    for (sums, quarter) in sums.iter().zip(&mut quarters) {
        // Hidden from the compiler, which would otherwise make lanes of the sums and gather them one by one.
        let sums = std::hint::black_box(sums);
        let mut half = [0f32; 8];
        for i in 0..8 {
            half[i] = sums[i] + sums[i + 8];
        }
        for i in 0..4 {
            quarter[i] = half[i] + half[i + 4];
        }
    }
    for (o, q) in out.iter_mut().zip(&quarters) {
        *o = (q[0] + q[2]) + (q[1] + q[3]);
    }
}

/// Brings `bytes` bytes from `at` on, wherever that is, to cache.
#[cfg(target_arch = "x86_64")]
pub(crate) fn fetch(at: *const u8, bytes: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    for line in (0..bytes).step_by(64) {
        // SAFETY: fetching ahead touches nothing, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(line).cast()) };
    }
}

/// Brings part `nth` of `parts` of the `bytes` bytes from `at` on, wherever that is, to cache: lines of every page at
/// once, since what the machine fetches ahead by itself follows one line after another in each page, and in several pages
/// at a time more of it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn fetch_share(at: *const u8, bytes: usize, nth: usize, parts: usize) {
    const PAGE: usize = 4096;
    const LINE: usize = 64;
    let lines = PAGE / LINE;
    let before = at.addr() % PAGE;
    for line in nth * lines / parts..(nth + 1) * lines / parts {
        for of_page in (line * LINE..before + bytes).step_by(PAGE) {
            fetch(at.wrapping_sub(before).wrapping_add(of_page), LINE);
        }
    }
}

vectorised! {
    /// Inner product.
    pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0f32; LANES];
        let (a_chunks, a_rest) = a.as_chunks::<LANES>();
        let (b_chunks, b_rest) = b.as_chunks::<LANES>();
        for (x, y) in a_chunks.iter().zip(b_chunks) {
            for i in 0..LANES {
                lanes[i] = fma::<FMA>(x[i], y[i], lanes[i]);
            }
        }
        for (i, (x, y)) in a_rest.iter().zip(b_rest).enumerate() {
            lanes[i] = fma::<FMA>(*x, *y, lanes[i]);
        }
        sum_lanes(lanes)
    }
}

vectorised! {
    /// `x += y`.
    pub(crate) fn add(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

vectorised! {
    /// `x = x * factor`.
    pub(crate) fn scale(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }
}

vectorised! {
    /// The largest element; NaN are passed over, and of none it is minus infinity.
    pub(crate) fn max(x: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for i in 0..LANES {
                lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
            }
        }
        rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m })
    }
}
