//! Twenty AdamW steps of the tiny Llama `gqa2_tied` against torch's (`fixtures/training.py`): loss, gradients and
//! optimiser are derived from the graph that also serves it.

use std::sync::Arc;

use crate::common::{
    BLOCKS, Expected, Fixture, SHUFFLED, STEPS, Sequence, TrainingBatch as Batch, empty_state, find, loss_graph,
    relative, step, training_step,
};
use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::grad::{float_weights, gradient};
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, DType, Graph, Op, Precision, Role, Tensor, Value, conformance, evaluate};
use ridge_models::{symbols, with_loss};
use ridge_runtime::{Backend, Session, lower};

type Named<T> = Vec<(String, T)>;

fn expected() -> Expected {
    Expected::open("training/adamw20.safetensors")
}

fn value(fixture: &Fixture, batch: &Batch, inputs: &Named<Tensor>, arg: &Arg) -> Option<Value> {
    let given = find(inputs, &arg.name).cloned().map(Value::from).or_else(|| fixture.weight(&arg.name));
    given.or_else(|| (arg.role == Role::State).then(|| empty_state(arg, &batch.bindings)))
}

fn run(fixture: &Fixture, batch: &Batch, graph: &Graph) -> Named<Value> {
    let of = |arg: &Arg| value(fixture, batch, &batch.inputs, arg);
    evaluate(graph, &of, &batch.bindings, Precision::Exact).expect("evaluates")
}

fn floats<'a>(outputs: &'a Named<Value>, name: &str) -> &'a [f64] {
    find(outputs, name).unwrap_or_else(|| panic!("no output {name}")).tensor().floats()
}

/// The losses of the steps and all states after them, by evaluation.
fn trained(precision: Precision) -> (Vec<f64>, Named<Value>) {
    let (fixture, batch) = (Fixture::open("gqa2_tied"), Batch::new(&expected()));
    let graph = training_step(&loss_graph(&fixture)).expect("differentiates");
    let mut states: Named<Value> = Vec::new();
    let mut losses = Vec::new();
    for count in 1..=STEPS {
        let inputs = batch.at(count);
        let of = |arg: &Arg| find(&states, &arg.name).cloned().or_else(|| value(&fixture, &batch, &inputs, arg));
        let outputs = evaluate(&graph, &of, &batch.bindings, precision).expect("evaluates");
        losses.push(floats(&outputs, "loss")[0]);
        states = outputs.into_iter().filter(|(name, _)| name != "loss").collect();
    }
    (losses, states)
}

#[test]
fn the_first_gradients_are_those_of_torch() {
    let (fixture, expected) = (Fixture::open("gqa2_tied"), expected());
    let loss = loss_graph(&fixture);
    let weights = float_weights(&loss);
    assert_eq!(weights.len(), 20);
    let outputs = run(&fixture, &Batch::new(&expected), &gradient(&loss, "loss", &weights).expect("differentiates"));
    let first = expected.tensor("losses_f64").floats()[0];
    assert!((floats(&outputs, "loss")[0] / first - 1.0).abs() < 1e-13, "the loss is {}", floats(&outputs, "loss")[0]);
    for name in &weights {
        let got: Vec<f64> = floats(&outputs, &format!("grad.{name}")).iter().map(|x| DType::F32.round(*x)).collect();
        let off = relative(&got, expected.tensor(&format!("grad.{name}")).floats());
        assert!(off < 1e-7, "{name}: off by {off:e}");
    }
}

#[test]
fn gradients_are_the_slopes_of_the_loss() {
    let mut rng = Rng::new(11);
    for name in ["gqa2_tied", "biased", "gqa8_llama3_rope"] {
        let fixture = Fixture::open(name);
        // Vocabularies differ: a batch of the model's own tokens.
        let tokens = fixture.prompt();
        let mut sequences = [Sequence::new(&tokens[..15], &SHUFFLED[0]), Sequence::new(&tokens[15..], &SHUFFLED[1])];
        let (mut inputs, bindings) = step(&mut sequences, &[15, 9]);
        let targets = (0..24).map(|i| if i % 7 == 6 { -100 } else { tokens[(i * 5 + 3) % 24] }).collect();
        inputs.push(("targets".into(), Tensor::int(DType::I32, &[24], targets)));
        let batch = Batch { inputs, bindings };
        let loss = loss_graph(&fixture);
        let weights = float_weights(&loss);
        let gradients = run(&fixture, &batch, &gradient(&loss, "loss", &weights).expect("differentiates"));
        for _ in 0..3 {
            // One direction through all weights together.
            let direction: Named<Vec<f64>> = weights
                .iter()
                .map(|w| (w.clone(), floats(&gradients, &format!("grad.{w}")).iter().map(|_| rng.gauss()).collect()))
                .collect();
            let at = |by: f64| {
                let moved = |arg: &Arg| {
                    let value = value(&fixture, &batch, &batch.inputs, arg)?;
                    let Some(direction) = find(&direction, &arg.name) else { return Some(value) };
                    let tensor = value.tensor();
                    let values = tensor.floats().iter().zip(direction).map(|(x, d)| x + by * d).collect();
                    Some(Tensor::float(tensor.dtype, &tensor.shape, values).into())
                };
                let outputs = evaluate(&loss, &moved, &batch.bindings, Precision::Exact).expect("evaluates");
                floats(&outputs, "loss")[0]
            };
            let slope = |h: f64| (at(h) - at(-h)) / (2.0 * h);
            let (wide, near) = (slope(2e-5), slope(1e-5));
            let wanted = (4.0 * near - wide) / 3.0;
            let got: f64 = direction
                .iter()
                .flat_map(|(w, d)| floats(&gradients, &format!("grad.{w}")).iter().zip(d).map(|(g, d)| g * d))
                .sum();
            assert!((got - wanted).abs() < 1e-8 * wanted.abs().max(1.0), "{name}: slope {wanted}, gradient says {got}");
        }
    }
}

#[test]
fn twenty_steps_in_doubles_are_those_of_torch() {
    let expected = expected();
    let (losses, states) = trained(Precision::Exact);
    let off = relative(&losses, expected.tensor("losses_f64").floats());
    assert!(off < 1e-12, "losses are off by {off:e}");
    for (name, value) in states.iter().filter(|(name, _)| name.starts_with("model.") && !name.ends_with("kv")) {
        let got: Vec<f64> = value.tensor().floats().iter().map(|x| DType::F32.round(*x)).collect();
        let off = relative(&got, expected.tensor(&format!("final.{name}")).floats());
        assert!(off < 1e-7, "{name}: off by {off:e}");
    }
}

#[test]
fn lowering_a_training_step_keeps_its_meaning() {
    let (fixture, batch) = (Fixture::open("gqa2_tied"), Batch::new(&expected()));
    let graph = training_step(&loss_graph(&fixture)).expect("differentiates");
    let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).expect("starts");
    let inputs = batch.at(1);
    let of = |arg: &Arg| value(&fixture, &batch, &inputs, arg);
    let one_step = |graph: &Graph| evaluate(graph, &of, &batch.bindings, Precision::Exact).expect("evaluates");
    let wanted = one_step(&graph);
    for kernels in [&[], cpu.kernels()] {
        let got = one_step(&lower(&graph, &["loss"], kernels).expect("lowers"));
        assert_eq!(got.len(), wanted.len());
        for (name, value) in &wanted {
            let (got, wanted) = (find(&got, name).expect("kept").tensor().numbers(), value.tensor().numbers());
            let off = relative(&got, &wanted);
            // A cache that nothing was written to is zero in both.
            assert!(off < 1e-9 || wanted == got, "{name}: off by {off:e}");
        }
    }
}

/// Losses and final weights on the CPU.
fn trained_on_cpu(threads: usize) -> (Vec<f64>, Named<Tensor>) {
    let (fixture, batch) = (Fixture::open("gqa2_tied"), Batch::new(&expected()));
    let graph = training_step(&loss_graph(&fixture)).expect("differentiates");
    assert_eq!(graph.args(Role::Weight).count(), 0);
    let cpu = Cpu::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).expect("starts");
    let mut session = Session::new(Arc::new(cpu));
    session.allocate_states(&graph, &Bindings::new().with(symbols::BLOCKS, BLOCKS)).expect("fits");
    for arg in graph.args(Role::State) {
        if let Some(weight) = fixture.weight(&arg.name) {
            let buffer = session.state(&arg.name).expect("allocated");
            session.backend().write(&buffer, &weight.tensor().to_bytes()).expect("fits");
        }
    }
    let compiled = session.compile(&graph, &["loss"]).unwrap_or_else(|e| panic!("{e}"));
    let mut bucket = compiled.bucket(&batch.bindings).unwrap_or_else(|e| panic!("{e}"));
    let mut losses = Vec::new();
    for count in 1..=STEPS {
        for (name, tensor) in batch.at(count) {
            bucket.set(&name, &tensor).expect("fits");
        }
        bucket.submit().expect("runs");
        bucket.wait().expect("completes");
        losses.push(bucket.tensor("loss").expect("asked for").floats()[0]);
    }
    let read = |arg: &Arg| {
        let bytes = session.backend().read(&session.state(&arg.name).expect("allocated")).expect("reads");
        let shape = arg.ty.shape.as_const()?;
        Some((arg.name.to_string(), Tensor::from_bytes(arg.ty.dtype, &shape, &bytes)))
    };
    (losses, graph.args(Role::State).filter_map(read).collect())
}

#[test]
fn losses_on_the_cpu_are_as_near_to_exact_as_those_of_torch() {
    let expected = expected();
    let (losses, states) = trained_on_cpu(2);
    let exact = expected.tensor("losses_f64");
    let got = Tensor::float(DType::F32, &[STEPS], losses);
    let used =
        conformance::near(&got, &[&expected.tensor("losses_f32")], &exact).unwrap_or_else(|why| panic!("losses{why}"));
    println!("{used:.2} of what is allowed; losses {:?}", got.floats());
    let mut weights = 0;
    for (name, value) in states.iter().filter(|(name, _)| name.starts_with("model.")) {
        // The file has the exact values rounded, and none of torch's own in f32.
        let off = relative(value.floats(), expected.tensor(&format!("final.{name}")).floats());
        assert!(off < 1e-4, "{name}: off by {off:e}");
        weights += 1;
    }
    assert_eq!(weights, 20);
}

#[test]
fn training_gives_the_same_bits_on_any_number_of_threads() {
    let one = trained_on_cpu(1);
    assert_eq!(trained_on_cpu(3), one);
}

#[test]
fn targets_below_zero_are_not_asked_for() {
    let (fixture, mut batch) = (Fixture::open("gqa2_tied"), Batch::new(&expected()));
    let loss = loss_graph(&fixture);
    let mean = floats(&run(&fixture, &batch, &loss), "loss")[0];
    let targets = find(&batch.inputs, "targets").expect("given").ints().to_vec();
    let mut sum = 0.0;
    let asked: Vec<usize> = (0..targets.len()).filter(|i| targets[*i] >= 0).collect();
    for i in &asked {
        let mut alone = vec![-1; targets.len()];
        alone[*i] = targets[*i];
        batch.inputs.iter_mut().find(|(n, _)| n == "targets").expect("given").1 =
            Tensor::int(DType::I32, &[targets.len()], alone);
        sum += floats(&run(&fixture, &batch, &loss), "loss")[0];
    }
    assert_eq!(asked.len(), 19);
    assert!((sum / 19.0 / mean - 1.0).abs() < 1e-14, "{sum} of 19 is not {mean}");
    batch.inputs.iter_mut().find(|(n, _)| n == "targets").expect("given").1 =
        Tensor::int(DType::I32, &[targets.len()], vec![-1; targets.len()]);
    assert_eq!(floats(&run(&fixture, &batch, &loss), "loss"), [0.0]);
}

#[test]
fn each_half_of_the_layer_is_there_once() {
    let graph = training_step(&loss_graph(&Fixture::open("gqa2_tied"))).expect("differentiates");
    let calls = |name: &str| {
        let is = |op: &Op| matches!(op, Op::Call(f) if &*graph.function(*f).name == name);
        graph.main().nodes.iter().filter(|n| is(&n.op)).count()
    };
    assert_eq!((graph.functions.len(), calls("decoder_layer_fwd"), calls("decoder_layer_bwd")), (3, 2, 2));
}

#[test]
fn a_graph_without_logits_has_no_loss() {
    let fixture = Fixture::open("gqa2_tied");
    let error = with_loss(&fixture.graph(&["next"])).expect_err("no logits").to_string();
    assert_eq!(error, "loss: no output `all_logits` to compare with targets; the graph has next");
}
