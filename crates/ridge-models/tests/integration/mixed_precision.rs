//! Twenty AdamW steps of the tiny Llama `gqa2_tied` on f32 masters, forward and backward in bf16 from copies of them,
//! beside torch doing the same (`fixtures/training.py`); between the steps another program reads the same copies.

use std::sync::Arc;

use crate::common::{
    ADAMW, BLOCKS, Expected, Fixture, SHUFFLED, STEPS, Sequence, TrainingBatch, empty_state, find, step, training_step,
};
use crate::mixed::{copy_of_master, master, mixed_step};
use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::{
    Arg, Bindings, DType, Graph, Precision, Role, Shape, Tensor, Type, Value, conformance, evaluate, passes,
};
use ridge_models::{RowTables, RowWidths, Sampled, row_changes, symbols, with_blocks, with_loss, with_rows};
use ridge_runtime::{Backend, Bucket, Recipe, Refresh, Session, WeightData, lower, plan};

/// The model with weights, activations and cache of bf16, which are its own or copies of masters.
fn serving() -> (Fixture, Graph) {
    let fixture = Fixture::with("gqa2_tied", DType::BF16);
    let bf16 = |_: &str, ty: &Type| Some(Type { dtype: DType::BF16, ..ty.clone() });
    let mut graph = passes::retype(&fixture.model.graph, &bf16).expect("fits");
    passes::prune(&mut graph, &["all_logits"]).expect("has them");
    (fixture, graph)
}

fn step_graph(fused: bool) -> Graph {
    let mut loss = with_loss(&serving().1).expect("has logits");
    passes::prune(&mut loss, &["loss"]).expect("has it");
    mixed_step(&loss, ADAMW, fused).expect("differentiates")
}

fn cpu() -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(2), poison: true, ..CpuOptions::default() }).expect("starts"))
}

/// Weights after each step in doubles, as the masters are called.
fn exact_weights(batch: &TrainingBatch) -> Vec<Vec<(String, Tensor)>> {
    let fixture = Fixture::open("gqa2_tied");
    let mut loss = with_loss(&fixture.model.graph).expect("has logits");
    passes::prune(&mut loss, &["loss"]).expect("has it");
    let graph = training_step(&loss).expect("differentiates");
    let mut states: Vec<(String, Value)> = Vec::new();
    let mut all = Vec::new();
    for count in 1..=STEPS {
        let inputs = batch.at(count);
        let of = |arg: &Arg| {
            let known =
                find(&states, &arg.name).cloned().or_else(|| find(&inputs, &arg.name).cloned().map(Value::from));
            let weight = known.or_else(|| fixture.weight(&arg.name));
            weight.or_else(|| (arg.role == Role::State).then(|| empty_state(arg, &batch.bindings)))
        };
        let outputs = evaluate(&graph, &of, &batch.bindings, Precision::Exact).expect("evaluates");
        states = outputs.into_iter().filter(|(name, _)| name != "loss").collect();
        let weights = states.iter().filter(|(name, _)| fixture.weight(name).is_some());
        all.push(weights.map(|(name, value)| (master(name), value.tensor().clone())).collect());
    }
    all
}

fn read(session: &Session, name: &str, ty: &Type) -> Tensor {
    let bytes = session.backend().read(&session.state(name).expect("loaded")).expect("reads");
    Tensor::from_bytes(ty.dtype, &ty.shape.as_const().expect("constant"), &bytes)
}

/// Logits of the fixture's prompt, by a program that reads the session's weights.
fn prompt_logits(fixture: &Fixture, bucket: &mut Bucket) -> Vec<u8> {
    let tokens = fixture.prompt();
    for (name, tensor) in step(&mut [Sequence::new(&tokens, &SHUFFLED[0])], &[tokens.len()]).0 {
        bucket.set(&name, &tensor).expect("fits");
    }
    bucket.submit().unwrap_or_else(|e| panic!("{e}"));
    bucket.wait().expect("completes");
    bucket.output(0).to_vec()
}

fn reader(fixture: &Fixture, graph: &Graph, session: &Session) -> Bucket {
    let tokens = fixture.prompt().len();
    let (_, bindings) = step(&mut [Sequence::new(&fixture.prompt(), &SHUFFLED[0])], &[tokens]);
    session.compile(graph, &["all_logits"]).and_then(|c| c.bucket(&bindings)).unwrap_or_else(|e| panic!("{e}"))
}

/// Trains, and holds each step to torch's error; between the steps, holds the logits that another program computes from
/// the same copies to those of a fresh session.
pub(crate) fn trains_as_near_to_exact_as_torch(backend: &Arc<dyn Backend>, refresh: Refresh) {
    let batch = TrainingBatch::new(&Expected::open("training/adamw20.safetensors"));
    let (fixture, graph) = serving();
    let blocks = Bindings::new().with(symbols::BLOCKS, BLOCKS);
    let mut session = Session::new(Arc::clone(backend));
    for arg in graph.args(Role::Weight) {
        let ty = Type { dtype: DType::F32, ..arg.ty.clone() };
        let bytes = fixture.weight(&arg.name).expect("in the file").tensor().to_bytes();
        session.load(&master(&arg.name), &ty, vec![WeightData::Owned(bytes)]).expect("fits");
        let recipe = copy_of_master(&arg.name, &arg.ty).expect("builds");
        session.derive(&Recipe { graph: recipe, refresh, evictable: false }).expect("is new");
    }
    let training = step_graph(refresh == Refresh::Fused);
    session.allocate_states(&training, &blocks).unwrap_or_else(|e| panic!("{e}"));
    let compiled = session.compile(&training, &["loss"]).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(plan(compiled.graph(), &batch.bindings).expect("plans").copies, []);
    let mut bucket = compiled.bucket(&batch.bindings).unwrap_or_else(|e| panic!("{e}"));
    let mut sharing = session.share();
    sharing.allocate_states(&graph, &blocks).expect("fits");
    let mut reading = reader(&fixture, &graph, &sharing);

    let torch = Expected::open("training/adamw20_bf16.safetensors");
    let (distances, exact) = (torch.tensor("distances"), exact_weights(&batch));
    let mut losses = Vec::new();
    let mut before = prompt_logits(&fixture, &mut reading);
    for count in 1..=STEPS {
        for (name, tensor) in batch.at(count) {
            bucket.set(&name, &tensor).expect("fits");
        }
        bucket.submit().unwrap_or_else(|e| panic!("{e}"));
        bucket.wait().expect("completes");
        losses.push(bucket.tensor("loss").expect("asked for").floats()[0]);
        let squares = |(name, want): &(String, Tensor)| -> f64 {
            let got = read(&session, name, &Type::tensor(DType::F32, Shape::new(want.shape.iter().copied())));
            got.floats().iter().zip(want.floats()).map(|(g, w)| (g - w) * (g - w)).sum()
        };
        let distance = exact[count - 1].iter().map(squares).sum::<f64>().sqrt();
        let allowed = 2.0 * distances.floats()[count - 1];
        println!("step {count}: {distance:.4} from exact, {:.2} of what is allowed", distance / allowed);
        assert!(distance <= allowed, "step {count}: {distance} from exact, torch is within {}", allowed / 2.0);

        // What another program reads is the update.
        let after = prompt_logits(&fixture, &mut reading);
        assert_ne!(after, before, "step {count} changes the logits");
        let mut fresh = Session::new(Arc::clone(backend));
        for arg in graph.args(Role::Weight) {
            let of = read(&session, &master(&arg.name), &Type { dtype: DType::F32, ..arg.ty.clone() });
            let bytes = DType::BF16.encode(of.floats().iter().copied());
            assert_eq!(read(&session, &arg.name, &arg.ty).to_bytes(), bytes, "the copy of {}", arg.name);
            fresh.load(&arg.name, &arg.ty, vec![WeightData::Owned(bytes)]).expect("fits");
        }
        fresh.allocate_states(&graph, &blocks).expect("fits");
        let wanted = prompt_logits(&fixture, &mut reader(&fixture, &graph, &fresh));
        assert!(after == wanted, "step {count}: logits are those of a fresh session");
        before = after;
    }
    let exact = Expected::open("training/adamw20.safetensors").tensor("losses_f64");
    let got = Tensor::float(DType::F32, &[STEPS], losses);
    let used = conformance::near(&got, &[&torch.tensor("losses")], &exact).unwrap_or_else(|why| panic!("losses{why}"));
    println!("losses: {used:.2} of what is allowed");
}

#[test]
fn steps_that_write_their_copies_are_as_near_to_exact_as_those_of_torch() {
    trains_as_near_to_exact_as_torch(&cpu(), Refresh::Fused);
}

#[test]
fn steps_on_copies_that_are_refreshed_lazily_are_as_near_to_exact_as_those_of_torch() {
    trains_as_near_to_exact_as_torch(&cpu(), Refresh::Lazy);
}

#[test]
fn no_shipped_program_copies_a_parameter() {
    let cpu = cpu();
    let gpu = ridge_cuda::CudaKernelRegistry::builtin().claims();
    let fixtures = crate::common::FAMILIES.iter().map(|(name, context)| Fixture::family(name, *context));
    let batch = TrainingBatch::new(&Expected::open("training/adamw20.safetensors"));
    let serving = [
        &["all_logits"][..],
        &["next"],
        &["next", "logprob", "top_ids", "top_logprobs"],
        &["next_adjusted", "adjusted_logprob", "top_ids", "top_logprobs"],
    ];
    let mut bindings = batch.bindings.clone();
    for symbol in
        [symbols::BIASES, symbols::BREAKERS, symbols::TOP, symbols::FORBIDDEN, symbols::ROWS, symbols::CHANGES]
    {
        bindings = bindings.with(symbol, 2);
    }
    let mut programs: Vec<(String, Graph, &[&str])> = Vec::new();
    for fixture in crate::common::ALL.into_iter().map(Fixture::open).chain(fixtures) {
        programs.extend(serving.map(|outputs| (fixture.name.to_owned(), fixture.model.graph.clone(), outputs)));
        bindings = with_blocks(&fixture.model.graph, bindings, 2);
        // As an engine runs it, over rows on the device.
        let tables = RowTables::of(&fixture.model.graph, RowWidths { blocks: 4, biases: 8, breakers: 8 });
        for candidates in [0, 4] {
            let sampled = Sampled { output: Some("next"), candidates };
            let rows = with_rows(&fixture.model.graph, &tables, sampled).unwrap_or_else(|e| panic!("{e}"));
            programs.push((format!("{} over rows", fixture.name), rows, &["next"]));
        }
        programs.push(("changes of rows".into(), row_changes(&tables).unwrap_or_else(|e| panic!("{e}")), &[]));
    }
    let loss = crate::common::loss_graph(&Fixture::open("gqa2_tied"));
    programs.push(("training".into(), training_step(&loss).expect("differentiates"), &["loss"]));
    programs.extend([true, false].map(|fused| ("mixed".into(), step_graph(fused), &["loss"][..])));
    for (name, graph, outputs) in &programs {
        for kernels in [&[], cpu.kernels(), &gpu] {
            let lowered = lower(graph, outputs, kernels).unwrap_or_else(|e| panic!("{name}: {e}"));
            let planned = plan(&lowered, &bindings).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(planned.copies, [], "{name}, {outputs:?}");
        }
    }
}
