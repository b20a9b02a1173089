//! Large matrix products, at extents around the tiles of fast kernels, against sums in f64.

use std::sync::Arc;

use crate::common::gpu;
use crate::running::{run, same_bits};
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, Tensor, Type, Value};
use ridge_runtime::Backend;

/// A product of `batches` matrices, each operand stored transposed or not.
#[derive(Clone, Copy, Debug)]
struct ProductCase {
    batches: usize,
    m: usize,
    n: usize,
    k: usize,
    dtype: DType,
    out: DType,
    transposed: (bool, bool),
}

impl ProductCase {
    /// `x w^T`, as linears are.
    fn linear(m: usize, n: usize, k: usize, dtype: DType, out: DType) -> Self {
        Self { batches: 1, m, n, k, dtype, out, transposed: (false, true) }
    }

    fn shapes(&self) -> [Vec<usize>; 2] {
        let Self { batches, m, n, k, transposed, .. } = *self;
        let shape = |(rows, columns), turned| if turned { [batches, columns, rows] } else { [batches, rows, columns] };
        let whole = [shape((m, k), transposed.0), shape((k, n), transposed.1)];
        whole.map(|s| if batches == 1 { s[1..].to_vec() } else { s.to_vec() })
    }
}

/// Entries that are looked at: all corners, and some in between.
const SAMPLES: usize = 400;

/// Requires every sampled entry to be a sum in f32 rounded once, every entry to be written, and the same bits twice.
fn holds(gpu: &Arc<dyn Backend>, case: ProductCase) {
    let [a_shape, b_shape] = case.shapes();
    let a = Rng::new(case.m as u64 + 1).normal(case.dtype, &a_shape);
    let b = Rng::new(case.n as u64 + 7).normal(case.dtype, &b_shape);
    let mut g = Builder::new();
    let x = g.step_input("a", a.ty()).expect("fresh");
    let w = g.weight("b", b.ty()).expect("fresh");
    let y = g.matmul(x, w, case.transposed.0, case.transposed.1, case.out).expect("multiplies");
    let graph = g.finish(vec![("y".into(), y)]).expect("finishes");
    let value = |arg: &Arg| Value::Plain(if &*arg.name == "a" { a.clone() } else { b.clone() });
    let got = run(gpu, &graph, &Bindings::new(), &value).expect("runs");
    assert!(same_bits(&got, &run(gpu, &graph, &Bindings::new(), &value).expect("runs")), "{case:?}: other bits");
    check(case, &a, &b, &got[0]);
}

fn check(case: ProductCase, a: &Tensor, b: &Tensor, got: &Tensor) {
    let ProductCase { batches, m, n, k, transposed, .. } = case;
    let (got, a, b) = (got.floats(), a.floats(), b.floats());
    assert_eq!(got.len(), batches * m * n);
    assert!(got.iter().all(|y| y.is_finite()), "{case:?}: not all of it is written");
    // Half a unit in the last place of the result's dtype, relative.
    let rounding = match case.out {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-23),
    };
    let step = (got.len() / SAMPLES).max(1) | 1;
    let corners = [0, n - 1, (m - 1) * n, m * n - 1].into_iter().chain([got.len() - 1]);
    for at in (0..got.len()).step_by(step).chain(corners) {
        let (batch, row, column) = (at / (m * n), at / n % m, at % n);
        let (mut sum, mut size) = (0.0, 0.0);
        for d in 0..k {
            let x = a[batch * m * k + if transposed.0 { d * m + row } else { row * k + d }];
            let y = b[batch * k * n + if transposed.1 { column * k + d } else { d * n + column }];
            sum += x * y;
            size += (x * y).abs();
        }
        // Sums in f32, in any order.
        let allowed = rounding * f64::abs(sum) + size * 2f64.powi(-24) * (k as f64).sqrt() * 4.0 + 1e-6;
        let error = f64::abs(got[at] - sum);
        assert!(error <= allowed, "{case:?} at [{batch}, {row}, {column}]: {} is {error:e} off {sum}", got[at]);
    }
}

#[test]
fn rows_around_tiles() {
    let Some(gpu) = gpu() else { return };
    for m in [17, 33, 63, 64, 65, 100, 127, 128, 129, 192, 255, 256, 257, 300, 513] {
        holds(&gpu, ProductCase::linear(m, 392, 776, DType::BF16, DType::BF16));
    }
}

#[test]
fn columns_and_depths_around_tiles() {
    let Some(gpu) = gpu() else { return };
    for (m, n, k) in
        [(65, 8, 8200), (130, 24, 2056), (40, 136, 1032), (129, 248, 520), (257, 264, 72), (300, 1000, 136)]
    {
        for (dtype, out) in [
            (DType::BF16, DType::BF16),
            (DType::F16, DType::F16),
            (DType::BF16, DType::F32),
            (DType::F16, DType::F32),
            (DType::F32, DType::F32),
        ] {
            holds(&gpu, ProductCase::linear(m, n, k, dtype, out));
        }
    }
}

#[test]
fn long_sums_of_many_tiles() {
    let Some(gpu) = gpu() else { return };
    holds(&gpu, ProductCase::linear(512, 4096, 4096, DType::BF16, DType::BF16));
    holds(&gpu, ProductCase::linear(200, 1024, 14_336, DType::BF16, DType::F32));
    holds(&gpu, ProductCase::linear(2048, 1536, 512, DType::F16, DType::F16));
}

#[test]
fn extents_that_are_no_multiples_of_eight() {
    let Some(gpu) = gpu() else { return };
    for (m, n, k) in [(130, 301, 515), (67, 1001, 264), (67, 1000, 267)] {
        holds(&gpu, ProductCase::linear(m, n, k, DType::BF16, DType::BF16));
    }
}

#[test]
fn transposed_operands_and_batches() {
    let Some(gpu) = gpu() else { return };
    for transposed in [(false, false), (false, true), (true, false), (true, true)] {
        for batches in [1, 3] {
            for dtype in [DType::BF16, DType::F32] {
                holds(&gpu, ProductCase { batches, m: 136, n: 264, k: 520, dtype, out: dtype, transposed });
            }
        }
    }
}

#[test]
fn linears_and_what_is_added_to_them() {
    let Some(gpu) = gpu() else { return };
    for (m, n, k) in [(70, 392, 520), (300, 520, 1032)] {
        let mut g = Builder::new();
        let x = g.step_input("x", Type::tensor(DType::BF16, [m, k])).expect("fresh");
        let r = g.step_input("r", Type::tensor(DType::BF16, [m, n])).expect("fresh");
        let w = g.weight("w", Type::tensor(DType::BF16, [n, k])).expect("fresh");
        let y = g.linear(x, w).expect("multiplies");
        let y = g.add(r, y).expect("adds");
        let graph = g.finish(vec![("y".into(), y)]).expect("finishes");
        let value = |arg: &Arg| {
            let shape = arg.ty.shape.as_const().expect("constant");
            Value::Plain(Rng::new(arg.name.as_bytes()[0].into()).normal(DType::BF16, &shape))
        };
        let got = run(&gpu, &graph, &Bindings::new(), &value).expect("runs");
        if let Err(why) = ridge_graph::conformance::judge_graph(&graph, &|arg| Some(value(arg)), &Bindings::new(), &got)
        {
            panic!("{m} x {n} x {k}: {why:.600}");
        }
    }
}
