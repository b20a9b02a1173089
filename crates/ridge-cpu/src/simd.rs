//! Vector loops, compiled for each instruction set and chosen at run time, and the conversions between storage and f32.
//!
//! Loops are written over fixed-size arrays of lanes that the compiler turns into vector registers. Sums keep one
//! partial sum a lane and add the lanes up in a fixed tree, so a sum's bits depend on its length alone.

use half::{bf16, f16};
use ridge_graph::DType;

use crate::kernel::{Io, Pod};

/// Lanes of partial sums: one AVX-512 register, two of AVX2, four of NEON.
pub(crate) const LANES: usize = 16;

/// Instruction sets that loops are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// The best instruction set of this machine.
pub(crate) fn isa() -> Isa {
    static ISA: std::sync::OnceLock<Isa> = std::sync::OnceLock::new();
    *ISA.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        {
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq");
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            if avx512 && avx2 {
                return Isa::Avx512;
            }
            if avx2 {
                return Isa::Avx2;
            }
        }
        Isa::Portable
    })
}

/// Defines a function whose body is compiled once for each [`Isa`] and dispatched at the call. Inside, `FMA` says
/// whether `mul_add` is one instruction; [`fma`] uses it.
macro_rules! vectorised {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($g:ident: $bound:path),*>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name $(<$($g: $bound),*>)? ($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(non_upper_case_globals, dead_code, clippy::inline_always)]
            fn generic<$($($g: $bound,)*)? const FMA: bool>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
            fn avx512<$($($g: $bound),*)?>($($arg: $ty),*) $(-> $ret)? { generic::<$($($g,)*)? true>($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2<$($($g: $bound),*)?>($($arg: $ty),*) $(-> $ret)? { generic::<$($($g,)*)? true>($($arg),*) }
            match $crate::simd::isa() {
                $crate::simd::Isa::Portable => generic::<$($($g,)*)? { cfg!(target_arch = "aarch64") }>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `isa` found the features on this machine.
                $crate::simd::Isa::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `isa` found the features on this machine.
                $crate::simd::Isa::Avx512 => unsafe { avx512($($arg),*) },
            }
        }
    };
}
#[allow(unused_imports)]
pub(crate) use vectorised;

/// `a * b + c`: in one rounding where the machine does that, the same everywhere on one machine.
#[inline(always)]
#[allow(clippy::inline_always)] // must compile with its caller's instruction set
pub(crate) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Adds up lanes in a fixed tree.
#[inline(always)]
#[allow(clippy::inline_always)] // must compile with its caller's instruction set
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
    /// `x = x * scale * w`.
    pub(crate) fn scale_mul(x: &mut [f32], scale: f32, w: &[f32]) {
        for (x, w) in x.iter_mut().zip(w) {
            *x = *x * scale * w;
        }
    }
}

/// Reads elements `at..at + out.len()` of input `index`, of float dtype `dtype`, as f32.
pub(crate) fn load(io: &Io<'_>, index: usize, dtype: DType, at: usize, out: &mut [f32]) {
    let end = at + out.len();
    match dtype {
        DType::F32 => out.copy_from_slice(&io.input::<f32>(index)[at..end]),
        DType::BF16 => widen(&io.input::<bf16>(index)[at..end], out, bf16::to_f32),
        DType::F16 => widen(&io.input::<f16>(index)[at..end], out, f16::to_f32),
        DType::F8E4M3 => widen(&io.input::<u8>(index)[at..end], out, |b| ridge_graph::f8e4m3_to_f64(b) as f32),
        DType::F8E5M2 => widen(&io.input::<u8>(index)[at..end], out, |b| ridge_graph::f8e5m2_to_f64(b) as f32),
        _ => unreachable!("{dtype} is not float: kernels support float dtypes here"),
    }
}

fn widen<T: Pod>(from: &[T], to: &mut [f32], f: impl Fn(T) -> f32) {
    for (t, x) in to.iter_mut().zip(from) {
        *t = f(*x);
    }
}

/// Writes `values`, rounded to `dtype`, to output `index` from element `at` on.
///
/// # Safety
/// These elements belong to the pieces that the caller was given.
pub(crate) unsafe fn store(io: &Io<'_>, index: usize, dtype: DType, at: usize, values: &[f32]) {
    let range = at..at + values.len();
    // SAFETY: passed on to the caller.
    unsafe {
        match dtype {
            DType::F32 => io.output::<f32>(index).part(range).copy_from_slice(values),
            DType::BF16 => narrow(values, io.output::<bf16>(index).part(range), bf16::from_f32),
            DType::F16 => narrow(values, io.output::<f16>(index).part(range), f16::from_f32),
            DType::F8E4M3 => {
                narrow(values, io.output::<u8>(index).part(range), |x| ridge_graph::f64_to_f8e4m3(f64::from(x)))
            }
            DType::F8E5M2 => {
                narrow(values, io.output::<u8>(index).part(range), |x| ridge_graph::f64_to_f8e5m2(f64::from(x)))
            }
            _ => unreachable!("{dtype} is not float: kernels support float dtypes here"),
        }
    }
}

fn narrow<T: Pod>(from: &[f32], to: &mut [T], f: impl Fn(f32) -> T) {
    for (t, x) in to.iter_mut().zip(from) {
        *t = f(*x);
    }
}

/// Rounds to what `dtype` can hold.
pub(crate) fn round(dtype: DType, values: &mut [f32]) {
    match dtype {
        DType::F32 => {}
        DType::BF16 => values.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
        DType::F16 => values.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
        _ => values.iter_mut().for_each(|x| *x = dtype.round(f64::from(*x)) as f32),
    }
}
