//! The rule of tolerance judges right what is right, and wrong what is wrong.

use std::collections::BTreeSet;

use ridge_graph::conformance::{all_samples, expected, judge};
use ridge_graph::ops::RmsNorm;
use ridge_graph::sample::{Check, Rng, Sample};
use ridge_graph::{Combine, DType, Precision, Prim, Tensor};

const FLOATS: [DType; 5] = [DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2];

fn product(dtype: DType) -> Sample {
    let mut rng = Rng::new(1);
    Sample::prim(Prim::MatMul { trans_a: false, trans_b: false, out: dtype })
        .input(rng.normal(dtype, &[8, 64]))
        .input(rng.normal(dtype, &[64, 32]))
}

fn norm(dtype: DType) -> Sample {
    let mut rng = Rng::new(2);
    Sample::new(RmsNorm { eps: 1e-5 }).input(rng.normal(dtype, &[8, 64])).input(rng.normal(dtype, &[64]))
}

/// Each element of the exact result, changed.
fn changed(sample: &Sample, change: impl Fn(usize, f64) -> f64) -> Vec<Tensor> {
    let exact = expected(sample, Precision::Exact).unwrap().remove(0);
    let values = exact.floats().iter().enumerate().map(|(i, x)| change(i, *x)).collect();
    vec![Tensor::float(exact.dtype, &exact.shape, values)]
}

#[test]
fn a_plain_implementation_is_right_on_every_sample() {
    for dtype in FLOATS {
        for (name, sample) in all_samples(dtype, 0) {
            let plain = expected(&sample, Precision::Rounded).unwrap_or_else(|e| panic!("{name}: {e}"));
            if let Err(why) = judge(&sample, &plain) {
                panic!("{name}: {why}");
            }
        }
    }
}

#[test]
fn the_exact_result_rounded_once_is_right_on_every_sample_judged_by_norm() {
    for dtype in FLOATS {
        for (name, sample) in all_samples(dtype, 0) {
            if !matches!(sample.check, Check::Norm) {
                continue;
            }
            let exact = expected(&sample, Precision::Exact).unwrap_or_else(|e| panic!("{name}: {e}"));
            let rounded: Vec<Tensor> = exact.into_iter().map(Tensor::rounded).collect();
            if let Err(why) = judge(&sample, &rounded) {
                panic!("{name}: {why}");
            }
        }
    }
}

#[test]
fn every_primitive_has_samples_and_edges_of_no_elements() {
    let mut names = BTreeSet::new();
    let mut empty = BTreeSet::new();
    for (name, sample) in all_samples(DType::F32, 0) {
        if expected(&sample, Precision::Rounded).unwrap().iter().any(Tensor::is_empty) {
            empty.insert(name.clone());
        }
        names.insert(name);
    }
    assert_eq!(names.len(), ridge_graph::prim_registry().len() + ridge_graph::ops::registry().len());
    for prim in ["const", "iota", "unary", "binary", "cast", "reduce", "scan", "matmul", "gather", "sort"] {
        assert!(empty.contains(prim), "{prim}");
    }
}

#[test]
fn samples_are_the_same_each_time_and_other_ones_for_another_seed() {
    let text = |seed| format!("{:?}", all_samples(DType::BF16, seed));
    assert_eq!(text(3), text(3));
    assert_ne!(text(3), text(4));
}

/// Sums in eight interleaved lanes, then over the lanes: another order than the plain one, as a vector unit has it.
fn lanes(products: impl Iterator<Item = f32>) -> f64 {
    let mut sums = [0f32; 8];
    for (i, x) in products.enumerate() {
        sums[i % 8] += x;
    }
    f64::from(sums.iter().rev().sum::<f32>())
}

#[test]
fn sums_in_another_order_are_right_whatever_the_numbers() {
    let single = |x: &[f64]| x.iter().map(|v| *v as f32).collect::<Vec<f32>>();
    for seed in 0..50 {
        let mut rng = Rng::new(seed);
        for dtype in [DType::F32, DType::BF16] {
            let x = rng.normal(dtype, &[16, 500]);
            let sums = x.floats().chunks(500).map(|row| lanes(single(row).into_iter())).collect();
            let got = Tensor::float(dtype, &[16, 1], sums).rounded();
            let sample = Sample::prim(Prim::Reduce { op: Combine::Sum, axis: 1 }).input(x);
            judge(&sample, &[got]).unwrap();

            let (a, b) = (rng.normal(dtype, &[5, 200]), rng.normal(dtype, &[9, 200]));
            let (va, vb) = (single(a.floats()), single(b.floats()));
            let dot = |i: usize| {
                let (a, b) = (&va[i / 9 * 200..][..200], &vb[i % 9 * 200..][..200]);
                lanes(a.iter().zip(b).map(|(a, b)| a * b))
            };
            let got = Tensor::float(dtype, &[5, 9], (0..45).map(dot).collect()).rounded();
            let prim = Prim::MatMul { trans_a: false, trans_b: true, out: dtype };
            judge(&Sample::prim(prim).input(a).input(b), &[got]).unwrap();
        }
    }
}

#[test]
fn one_rounding_of_bias_passes() {
    for dtype in FLOATS {
        for sample in [product(dtype), norm(dtype)] {
            let used = judge(&sample, &changed(&sample, |_, x| x * (1.0 + dtype.unit_roundoff()))).unwrap();
            assert!(used > 0.1, "{dtype} {used}");
        }
    }
}

#[test]
fn ten_times_what_is_allowed_fails() {
    for dtype in FLOATS {
        for sample in [product(dtype), norm(dtype)] {
            let bias = dtype.unit_roundoff();
            let used = judge(&sample, &changed(&sample, |_, x| x * (1.0 + bias))).unwrap();
            let why = judge(&sample, &changed(&sample, |_, x| x * (1.0 + 10.0 * bias / used))).unwrap_err();
            assert!(why.contains("row 0 of 8: error") && why.contains("allowed"), "{why}");
            assert!(judge(&sample, &changed(&sample, |_, x| x * (1.0 + 0.9 * bias / used))).is_ok());
        }
    }
}

#[test]
fn a_wrong_element_in_one_row_fails_and_is_found() {
    let sample = norm(DType::F32);
    let why = judge(&sample, &changed(&sample, |i, x| if i == 3 * 64 + 5 { x + 1e-4 } else { x })).unwrap_err();
    assert!(why.starts_with("RmsNorm { eps: 1e-5 }(f32[8, 64], f32[64]): output 0, row 3 of 8"), "{why}");
    assert!(why.contains("element 5"), "{why}");
}

#[test]
fn a_hidden_nan_or_infinity_fails() {
    for wrong in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let sample = product(DType::BF16);
        let why = judge(&sample, &changed(&sample, |i, x| if i == 77 { wrong } else { x })).unwrap_err();
        assert!(why.contains("row 2, element 13"), "{why}");
    }
}

#[test]
fn an_infinity_of_the_other_sign_or_a_number_in_its_place_fails() {
    let x = Tensor::float(DType::F32, &[2, 2], vec![f64::INFINITY, 1.0, f64::NAN, 1.0]);
    let sample = Sample::prim(Prim::Reduce { op: Combine::Sum, axis: 1 }).input(x);
    let got = |a, b| [Tensor::float(DType::F32, &[2, 1], vec![a, b])];
    assert!(judge(&sample, &got(f64::INFINITY, f64::NAN)).is_ok());
    assert!(judge(&sample, &got(f64::NEG_INFINITY, f64::NAN)).is_err());
    assert!(judge(&sample, &got(3e38, f64::NAN)).is_err());
    assert!(judge(&sample, &got(f64::INFINITY, 0.0)).is_err());
}

#[test]
fn swapped_rows_and_zeros_fail() {
    for dtype in FLOATS {
        let sample = product(dtype);
        let exact = expected(&sample, Precision::Exact).unwrap().remove(0);
        let swap = |i: usize| if i / 32 < 2 { (i + 32) % 64 } else { i };
        assert!(judge(&sample, &changed(&sample, |i, _| exact.floats()[swap(i)])).is_err());
        assert!(judge(&sample, &changed(&sample, |_, _| 0.0)).is_err());
    }
}

#[test]
fn luck_on_one_row_does_not_bind_and_a_cancelled_row_does_not_loosen() {
    // Row 0 is summed without error whatever the order, row 1 cancels, the others round.
    let mut rng = Rng::new(5);
    let mut x = rng.normal(DType::F32, &[16, 256]);
    if let ridge_graph::Data::Float(v) = &mut x.data {
        v[..256].fill(1.0);
        for i in (256..512).step_by(2) {
            v[i + 1] = -v[i];
        }
    }
    let ones = Tensor::float(DType::F32, &[256, 2], vec![1.0; 512]);
    let sample = Sample::prim(Prim::MatMul { trans_a: false, trans_b: false, out: DType::F32 }).input(x).input(ones);
    let plain = expected(&sample, Precision::Rounded).unwrap().remove(0);
    let exact = expected(&sample, Precision::Exact).unwrap().remove(0);
    let errors: Vec<f64> = plain.floats().iter().zip(exact.floats()).map(|(p, e)| p - e).collect();
    let usual = (errors.iter().map(|x| x * x).sum::<f64>() / 16.0).sqrt();
    let with_error = |row: usize, error: f64| changed(&sample, |i, x| if i == 2 * row { x + error } else { x });
    assert_eq!(errors[..2], [0.0; 2]);
    assert!(judge(&sample, &with_error(0, 1.9 * usual)).is_ok());
    for row in 0..16 {
        assert!(judge(&sample, &with_error(row, 100.0 * usual)).is_err(), "row {row}");
    }
}

#[test]
fn wrong_outputs_are_named() {
    let sample = product(DType::F32);
    assert!(judge(&sample, &[]).unwrap_err().contains("0 outputs, must be 1"));
    let other = Tensor::zeros(DType::F32, &[32, 8]);
    assert!(judge(&sample, &[other]).unwrap_err().contains("output 0 is f32[32, 8], must be f32[8, 32]"));
    let sort = Sample::prim(Prim::Sort { axis: 0, descending: false, keep: 2.into() })
        .input(Tensor::float(DType::F32, &[2], vec![2.0, 1.0]))
        .judged(Check::Exact);
    let values = Tensor::float(DType::F32, &[2], vec![1.0, 2.0]);
    let why = judge(&sort, &[values.clone(), Tensor::int(DType::I32, &[2], vec![0, 1])]).unwrap_err();
    assert!(why.contains("output 1, row 0, element 0: got 0, must be 1"), "{why}");
    assert!(judge(&sort, &[values, Tensor::int(DType::I32, &[2], vec![1, 0])]).is_ok());
}

#[test]
fn a_property_is_asked_for_instead_of_values() {
    fn sorted(_: &[ridge_graph::Value], got: &[Tensor]) -> Result<(), String> {
        if got[0].floats().is_sorted() { Ok(()) } else { Err("is not sorted".into()) }
    }
    let sample = product(DType::F32).judged(Check::Property(sorted));
    assert!(judge(&sample, &changed(&sample, |i, _| i as f64)).is_ok());
    assert!(judge(&sample, &changed(&sample, |i, _| -(i as f64))).unwrap_err().ends_with("is not sorted"));
}
