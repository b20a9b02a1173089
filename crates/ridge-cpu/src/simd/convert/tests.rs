//! Conversions beside those of the dtypes.

use super::*;
use ridge_graph::{f8e4m3_to_f64, f8e5m2_to_f64};

fn same(a: f32, b: f64) -> bool {
    a.is_nan() == b.is_nan() && (b.is_nan() || f64::from(a) == b && a.is_sign_negative() == b.is_sign_negative())
}

/// Of a slice that is two vectors and a rest.
#[test]
fn slices_are_converted_as_single_elements_are() {
    fn check<T: Element + PartialEq + std::fmt::Debug>(bits: impl Fn(T) -> u32) {
        let mut rng = ridge_graph::sample::Rng::new(2);
        for _ in 0..5000 {
            let x: Vec<f32> = (0..37).map(|_| f32::from_bits(rng.bits() as u32)).collect();
            let scaled: Vec<f32> = (0..37).map(|_| (rng.gauss() * 1e-5) as f32).collect();
            for x in [x, scaled] {
                let (mut narrowed, mut widened) = (vec![T::narrow(0.0); 37], vec![0f32; 37]);
                narrow(&x, &mut narrowed);
                widen(&narrowed, &mut widened);
                for (i, x) in x.iter().enumerate() {
                    let alone = T::narrow(*x);
                    assert!(bits(alone) == bits(narrowed[i]) || x.is_nan(), "{x:e}: {alone:?}, {:?}", narrowed[i]);
                    assert!(same(widened[i], f64::from(alone.widen())), "{alone:?} as {:e}", widened[i]);
                }
            }
        }
    }
    check::<f16>(|x| x.to_bits().into());
    check::<bf16>(|x| x.to_bits().into());
    check::<f32>(f32::to_bits);
}

#[test]
fn every_code_of_16_and_8_bits_widens_to_its_value() {
    for bits in 0..=u16::MAX {
        assert!(same(f16::from_bits(bits).widen(), f16::from_bits(bits).to_f64()), "f16 {bits:#x}");
        assert!(same(bf16::from_bits(bits).widen(), bf16::from_bits(bits).to_f64()), "bf16 {bits:#x}");
    }
    for bits in 0..=u8::MAX {
        assert!(same(E4M3(bits).widen(), f8e4m3_to_f64(bits)), "e4m3 {bits:#x}");
        assert!(same(E5M2(bits).widen(), f8e5m2_to_f64(bits)), "e5m2 {bits:#x}");
    }
}

fn check<T: Element>(x: f32, wanted: f64) {
    let got = T::narrow(x).widen();
    assert!(same(got, wanted), "{} {x:e} ({:#x}) as {got:e}", std::any::type_name::<T>(), x.to_bits());
}

#[test]
fn narrowing_rounds_as_the_dtypes_define() {
    let mut rng = ridge_graph::sample::Rng::new(1);
    let random = (0..200_000).map(|_| f32::from_bits(rng.bits() as u32));
    // Each code's value, halfway to its neighbours, and just beside those.
    let edges = (0..=u16::MAX).flat_map(|b| {
        let bits = u32::from(b) << 16;
        [0, 1, 0x7fff, 0x8000, 0x8001].map(|low| f32::from_bits(bits | low))
    });
    let halves = (0..=u16::MAX).flat_map(|b| {
        let bits = f16::from_bits(b).to_f32().to_bits();
        [0, 0xfff, 0x1000, 0x1001].map(|low| f32::from_bits(bits | low))
    });
    for x in random.chain(edges).chain(halves) {
        check::<bf16>(x, bf16::from_f32(x).to_f64());
        check::<f16>(x, f16::from_f32(x).to_f64());
        check::<E4M3>(x, DType::F8E4M3.round(f64::from(x)));
        check::<E5M2>(x, DType::F8E5M2.round(f64::from(x)));
    }
}
