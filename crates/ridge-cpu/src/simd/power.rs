//! Powers of two on AVX-512.

use std::arch::x86_64::{
    __m512, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _MM_FROUND_TO_NEG_INF, _mm512_fmadd_ps, _mm512_reduce_ps,
    _mm512_scalef_ps, _mm512_set1_ps, _mm512_sub_ps,
};

/// `2^r` over 0 to 1 (relative error below 2^-13.7) and over -1/2 to 1/2 (2^-29), from the highest power on: the least
/// of largest relative errors.
const LOW: [f32; 4] = [0.078_024_52, 0.226_067_16, 0.695_833_5, 0.999_925_2];
const HIGH: [f32; 7] =
    [0.000_153_458_12, 0.001_339_993_1, 0.009_618_489, 0.055_503_286, 0.240_226_46, std::f32::consts::LN_2, 1.0];

/// `2^x` of what is not positive, or hardly: within 2^-13 for one term of bf16, which has a 16th of its rounding, and
/// within 2^-22 for more.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(crate) fn power<const TERMS: usize>(x: __m512) -> __m512 {
    let polynomial = |powers: &[f32], r: __m512| {
        let mut p = _mm512_set1_ps(powers[0]);
        for c in &powers[1..] {
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
        }
        p
    };
    // Scaling rounds its exponent down, and of infinity there is no rest, so that minus infinity gives 0.
    if TERMS == 1 {
        let r = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x);
        return _mm512_scalef_ps(polynomial(&LOW, r), x);
    }
    let r = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    _mm512_scalef_ps(polynomial(&HIGH, r), _mm512_sub_ps(x, r))
}

#[cfg(test)]
mod tests {
    use std::arch::x86_64::_mm512_storeu_ps;

    use super::super::LANES;
    use super::*;

    #[test]
    fn exponentials_are_as_accurate_as_their_terms() {
        if super::super::isa() < super::super::Isa::Avx512 {
            return;
        }
        let mut worst = [0f64; 2];
        for i in 0..=10_000 {
            let x = -(i as f32) * 0.0125;
            let mut got = [[0f32; LANES]; 2];
            // SAFETY: there is AVX-512.
            unsafe {
                _mm512_storeu_ps(got[0].as_mut_ptr(), power::<1>(_mm512_set1_ps(x)));
                _mm512_storeu_ps(got[1].as_mut_ptr(), power::<3>(_mm512_set1_ps(x)));
            }
            for (worst, got) in worst.iter_mut().zip(got) {
                let exact = f64::from(x).exp2();
                let error = (f64::from(got[3]) - exact).abs() / exact;
                assert!(error < 1.0, "2^{x} is {exact}, not {}", got[3]);
                *worst = worst.max(error);
            }
        }
        assert!(worst[0] < 2f64.powi(-13) && worst[1] < 2f64.powi(-22), "{worst:?}");
    }
}
