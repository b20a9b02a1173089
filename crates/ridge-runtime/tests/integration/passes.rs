//! Lowering keeps the meaning of every graph, whatever kernels claim.

use crate::decoder::{Step, decoder};
use crate::random::case;
use proptest::prelude::*;
use ridge_graph::conformance::all_samples;
use ridge_graph::passes::{Kernel, Pattern};
use ridge_graph::{Arg, Bindings, DType, Data, Graph, Op, Precision, Role, Tensor, Value, evaluate};
use ridge_runtime::lower;

/// Kernels that claim all they can, alone and together, each with every way of naming values that patterns have.
fn kernels() -> Vec<Kernel> {
    [
        ("linear", "linear(x, w)"),
        ("linear_bias", "linear(x, w, b)"),
        ("linear_add", "add(r, linear(x, w))"),
        ("linear_group", "linear_group(x, ...)"),
        ("linear_swiglu", "swiglu(g@linear_group(x, ...).0, g.1)"),
        ("rms_norm", "rms_norm(x, w)"),
        ("add_rms_norm", "rms_norm(*add(x, r), w)"),
        ("rope", "rope(x, p)"),
        ("rope_kv_write", "kv_write(kv, rope(k, p), v, s)"),
        ("attention", "attention(q, kv, t, i, p)"),
        ("softmax", "softmax(x)"),
        ("sort", "sort(x)"),
        ("mul_add", "add(a, mul(b, c))"),
    ]
    .map(|(name, pattern)| Kernel::at_roofline(name, Pattern::parse(pattern), |_| true))
    .into()
}

fn data_outputs(graph: &Graph) -> Vec<&str> {
    graph.main().outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name).collect()
}

/// Are they the same numbers, NaN being equal to itself?
fn same(a: &Tensor, b: &Tensor) -> bool {
    let data = match (&a.data, &b.data) {
        (Data::Float(a), Data::Float(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a == b || (a.is_nan() && b.is_nan()))
        }
        (a, b) => a == b,
    };
    data && a.dtype == b.dtype && a.shape == b.shape
}

/// Requires the lowered graph to give what `graph` gives, to the bit in f64; gives the lowered one.
fn keeps_meaning(graph: &Graph, kernels: &[Kernel], bindings: &Bindings, value: &dyn Fn(&Arg) -> Value) -> Graph {
    let lowered = lower(graph, &data_outputs(graph), kernels).expect("lowers");
    let all = lowered.functions.iter().flat_map(|f| &f.nodes);
    assert!(all.clone().all(|n| !matches!(n.op, Op::Composite(_))), "a composite is left");
    let values = |g: &Graph| {
        evaluate(g, &|arg| Some(value(arg)), bindings, Precision::Exact).unwrap_or_else(|e| panic!("{e}\n{g}"))
    };
    let (before, after) = (values(graph), values(&lowered));
    assert_eq!(before.len(), after.len());
    for ((name, a), (other, b)) in before.iter().zip(&after) {
        assert_eq!(name, other);
        assert!(same(a.tensor(), b.tensor()), "output {name}: {a:?} became {b:?} in\n{lowered}");
    }
    lowered
}

#[test]
fn every_sample_means_the_same_after_lowering() {
    let kernels = kernels();
    for dtype in [DType::F32, DType::F16] {
        for (name, sample) in all_samples(dtype, 3) {
            let graph = sample.graph().unwrap_or_else(|e| panic!("{name}: {e}"));
            let value = |arg: &Arg| sample.inputs[arg.name.parse::<usize>().expect("inputs are numbered")].clone();
            for kernels in [&kernels[..], &[]] {
                keeps_meaning(&graph, kernels, &Bindings::new(), &value);
            }
        }
    }
}

#[test]
fn a_decoder_means_the_same_after_lowering() {
    for (dtype, stored) in [(DType::F32, false), (DType::BF16, true)] {
        let graph = decoder(dtype, stored).expect("builds");
        for lengths in [&[(0, 5), (3, 1), (7, 2)][..], &[(0, 1)], &[(9, 1), (0, 0)]] {
            let step = Step::new(lengths, 4);
            let claimed = keeps_meaning(&graph, &kernels(), &step.bindings, &|arg| step.value(arg));
            let names: Vec<&str> =
                claimed.functions.iter().flat_map(|f| &f.nodes).map(ridge_graph::Node::op_name).collect();
            for kernel in ["linear_swiglu", "linear_group", "linear_add", "rms_norm", "rope_kv_write", "attention"] {
                assert!(names.contains(&kernel), "{kernel} claims nothing in\n{claimed}");
            }
            keeps_meaning(&graph, &[], &step.bindings, &|arg| step.value(arg));
        }
    }
}

#[test]
fn only_what_the_outputs_need_is_left() {
    let graph = decoder(DType::F32, false).expect("builds");
    let lowered = lower(&graph, &["hidden"], &kernels()).expect("lowers");
    let inputs: Vec<&str> = lowered.args(Role::StepInput).map(|a| &*a.name).collect();
    assert!(inputs.contains(&"ids") && !inputs.contains(&"temperature"), "{inputs:?}");
    assert_eq!(lowered.args(Role::State).count(), 2);
    let step = Step::new(&[(2, 3)], 9);
    let of = |g: &Graph| {
        let all = evaluate(g, &|arg| Some(step.value(arg)), &step.bindings, Precision::Exact).expect("evaluates");
        all.into_iter().find(|(name, _)| name == "hidden").expect("asked for").1
    };
    assert!(same(of(&graph).tensor(), of(&lowered).tensor()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_graphs_mean_the_same_after_lowering(case in case(DType::F32)) {
        for kernels in [&kernels()[..], &[]] {
            keeps_meaning(&case.graph, kernels, &case.bindings, &|arg| case.value(arg));
        }
    }
}

#[test]
fn a_kernel_does_not_claim_what_it_reads_itself() {
    let mut g = ridge_graph::Builder::new();
    let x = g.arg("x", ridge_graph::Type::tensor(DType::F32, [4usize]));
    let square = g.mul(x, x).expect("multiplies");
    let twice = g.add(square, square).expect("adds");
    let graph = g.finish(vec![("twice".into(), twice)]).expect("finishes");
    let value = |_: &Arg| Value::from(Tensor::float(DType::F32, &[4], vec![1.0, -2.0, 3.0, 0.5]));
    let lowered = keeps_meaning(&graph, &kernels(), &Bindings::new(), &value);
    assert!(!lowered.to_string().contains("mul_add"), "{lowered}");
}

#[test]
fn a_state_that_goes_out_as_an_ordinary_value_is_refused() {
    let mut g = ridge_graph::Builder::new();
    let s = g.state("s", ridge_graph::Type::state(DType::F32, [4usize])).expect("a fresh name");
    let graph = g.finish(vec![("out".into(), s)]).expect("s is main's");
    let said = ridge_runtime::lower(&graph, &["out"], &[]).unwrap_err().to_string();
    assert!(said.contains("output `out`") && said.contains("state_read"), "{said}");
}
