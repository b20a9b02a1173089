//! The meaning of each op of `ops/` against plain loops written here, which share no code with its decomposition.

mod dense;
mod errors;
mod paged;
mod sampling;
mod symbolic;
mod training;

use ridge_graph::format::{ScaleLayout, ScaledFormat};
use ridge_graph::ops::registry;
use ridge_graph::sample::{Rng, Sample};
use ridge_graph::{Bindings, Composite, DType, Op, Precision, Tensor, Value, evaluate};

const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F8E4M3];

/// The samples of the op called `name`, over dtypes.
fn samples(name: &str) -> Vec<Sample> {
    let registry = registry();
    let entry = registry.get(name).expect("the op is registered");
    DTYPES.into_iter().flat_map(|dtype| entry.samples(&mut Rng::new(7), dtype)).collect()
}

/// The op of a sample as its own type.
fn op<T: Composite>(sample: &Sample) -> &T {
    match &sample.op {
        Op::Composite(op) => op.downcast().expect("a sample of this op"),
        other => panic!("{other:?} is no composite"),
    }
}

/// What the decomposition gives: plain outputs in order, then states.
fn run(sample: &Sample, precision: Precision) -> Vec<Tensor> {
    let graph = sample.graph().expect("the sample is valid");
    let input = |arg: &ridge_graph::Arg| arg.name.parse().ok().and_then(|i: usize| sample.inputs.get(i).cloned());
    let outputs = evaluate(&graph, &input, &Bindings::new(), precision).expect("the sample evaluates");
    outputs.into_iter().map(|(_, value)| value.tensor().clone()).collect()
}

/// Checks the first output, and the others if there are more in `expected`, against plain loops in f64.
fn holds(sample: &Sample, expected: &[Vec<f64>]) {
    let outputs = run(sample, Precision::Exact);
    assert_eq!(outputs.len(), expected.len(), "outputs of {:?}", sample.op);
    for (output, expected) in outputs.iter().zip(expected) {
        let got = numbers(output);
        assert_eq!(got.len(), expected.len(), "elements of {:?} on {:?}", sample.op, sample.types());
        for (i, (a, b)) in got.iter().zip(expected).enumerate() {
            let near = (a - b).abs() <= 1e-10 * (1.0 + b.abs());
            assert!(near, "{:?} on {:?}: element {i} is {a}, expected {b}", sample.op, sample.types());
        }
    }
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    if tensor.dtype.is_float() { tensor.floats().to_vec() } else { tensor.ints().iter().map(|x| *x as f64).collect() }
}

/// Numbers of an input; those of a stored value as its format reads them, codes times scales unrounded.
fn input(sample: &Sample, i: usize) -> Vec<f64> {
    match &sample.inputs[i] {
        Value::Plain(tensor) => numbers(tensor),
        Value::Stored { format, components, shape, .. } => {
            if let Some(format) = format.downcast::<ScaledFormat>() {
                let (codes, scales) = (components[0].numbers(), components[1].floats());
                let inner = shape.last().copied().unwrap_or(1).max(1);
                let scale = |row: usize, column: usize| match format.scales {
                    ScaleLayout::Tensor => scales[0],
                    ScaleLayout::Row => scales[row],
                    ScaleLayout::Group(size) => scales[row * inner.div_ceil(size) + column / size],
                    ScaleLayout::Block => scales[row / 128 * inner.div_ceil(128) + column / 128],
                };
                return codes.iter().enumerate().map(|(i, code)| code * scale(i / inner, i % inner)).collect();
            }
            let bytes: Vec<Vec<u8>> = components.iter().map(Tensor::to_bytes).collect();
            let bytes: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
            format.values(&bytes, shape).into_iter().map(f64::from).collect()
        }
    }
}

/// Extents of an input.
fn shape(sample: &Sample, i: usize) -> Vec<usize> {
    sample.types()[i].shape.as_const().expect("samples are concrete")
}

#[test]
fn every_op_infers_what_its_decomposition_gives() {
    for entry in &registry() {
        for sample in samples(&entry.name) {
            let Op::Composite(op) = &sample.op else { panic!("{} is no composite", entry.name) };
            assert_eq!(op.name(), &*entry.name);
            let inferred = op.infer(&sample.types()).expect("the sample is valid");
            let mut g = ridge_graph::Builder::new();
            let vars: Vec<_> =
                sample.types().into_iter().enumerate().map(|(i, ty)| g.arg(&i.to_string(), ty)).collect();
            let outputs = op.decompose(&mut g, &vars).expect("what is inferred decomposes");
            let types: Vec<_> = outputs.iter().map(|v| g.ty(*v).expect("its own value").clone()).collect();
            assert_eq!(types, inferred, "{op:?} on {:?}", sample.types());
        }
    }
}

#[test]
fn samples_are_small_enough_to_run_everywhere() {
    for entry in &registry() {
        for sample in samples(&entry.name) {
            let graph = sample.graph().expect("the sample is valid");
            let bindings = Bindings::new().with("pairs", 400).with("cached", 400);
            let flops = graph.cost().flops().eval(&bindings).expect("every symbol of a sample is bound");
            assert!(flops < 2_500_000, "{}: {flops} FLOPs on {:?}", entry.name, sample.types());
        }
    }
}
