//! Sessions find step inputs and outputs by name, on any backend.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ridge_graph::passes::Kernel;
use ridge_graph::{Bindings, Builder, DType, Graph, Tensor, Type};
use ridge_runtime::{
    Backend, Bucket, Buffer, CompileReason, MemoryBytes, MemoryOwner, Plan, Program, Result, Run, RuntimeError,
    Session, Staged, WeightData, plan,
};

/// A backend that computes nothing, and whose steps fail while `fails` says so.
#[derive(Default)]
struct Idle {
    fails: Arc<AtomicBool>,
}

struct IdleProgram(Arc<Graph>, Arc<AtomicBool>);

struct IdleRun {
    fails: Arc<AtomicBool>,
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
}

impl Backend for Idle {
    fn name(&self) -> &'static str {
        "idle"
    }

    fn kernels(&self) -> &[Kernel] {
        &[]
    }

    fn upload(&self, _ty: &Type, parts: Vec<WeightData>) -> Result<Buffer> {
        Ok(Buffer::new(parts.iter().map(|part| part.bytes().len()).sum(), ()))
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        Ok(Buffer::new(bytes, ()))
    }

    fn read(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        Ok(vec![0; buffer.bytes()])
    }

    fn write(&self, _buffer: &Buffer, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }

    fn compile(&self, graph: Arc<Graph>) -> Result<Box<dyn Program>> {
        Ok(Box::new(IdleProgram(graph, Arc::clone(&self.fails))))
    }
}

impl Program for IdleProgram {
    fn bind(&self, bindings: &Bindings, _weights: &[Buffer], _states: &[Buffer]) -> Result<Box<dyn Run>> {
        let Plan { input_bytes, output_bytes, .. } = plan(&self.0, bindings)?;
        let zeros = |sizes: &[usize]| sizes.iter().map(|n| vec![0; *n]).collect();
        let fails = Arc::clone(&self.1);
        Ok(Box::new(IdleRun { fails, inputs: zeros(&input_bytes), outputs: zeros(&output_bytes) }))
    }

    fn memory(&self, bindings: &Bindings) -> Result<MemoryBytes> {
        let plan = plan(&self.0, bindings)?;
        Ok(MemoryBytes::default()
            .with(MemoryOwner::Workspace, plan.arena_bytes)
            .with(MemoryOwner::Inputs, plan.input_bytes.iter().sum())
            .with(MemoryOwner::Outputs, plan.output_bytes.iter().sum()))
    }
}

impl Run for IdleRun {
    fn input(&mut self, _slot: usize, index: usize) -> &mut [u8] {
        &mut self.inputs[index]
    }

    fn submit(&mut self, _slot: usize, _staged: &[Staged], _held: bool) -> Result<()> {
        Ok(())
    }

    fn release(&mut self, _slot: usize, _staged: &[Staged]) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, _slot: usize) -> Result<bool> {
        Ok(true)
    }

    fn wait(&mut self, _slot: usize) -> Result<()> {
        match self.fails.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(RuntimeError::Device { backend: "idle", why: "fails".into() }),
        }
    }

    fn output(&self, _slot: usize, index: usize) -> &[u8] {
        &self.outputs[index]
    }
}

/// Outputs `sum` of `left` and `right`, and `product` of `left` and `factor`; a weight `scale` of both.
fn graph() -> Graph {
    let mut g = Builder::new();
    let [left, right, factor] =
        ["left", "right", "factor"].map(|name| g.step_input(name, Type::tensor(DType::F32, [3])).expect("fresh"));
    let scale = g.weight("scale", Type::tensor(DType::F32, [3])).expect("fresh");
    let sum = g.add(left, right).expect("types");
    let sum = g.mul(sum, scale).expect("types");
    let product = g.mul(left, factor).expect("types");
    let product = g.mul(product, scale).expect("types");
    g.finish(vec![("product".into(), product), ("sum".into(), sum)]).expect("finishes")
}

fn bucket(outputs: &[&str]) -> Bucket {
    let mut session = Session::new(Arc::new(Idle::default()));
    let scale = vec![WeightData::Owned(vec![0; 12])];
    session.load("scale", &Type::tensor(DType::F32, [3]), scale).expect("fits");
    session.compile(&graph(), outputs).and_then(|c| c.bucket(&Bindings::new())).expect("binds")
}

fn three(value: f64) -> Tensor {
    Tensor::float(DType::F32, &[3], vec![value; 3])
}

/// Requires an error of this kind for `rigth` that names all of `known`.
fn names_what_is_known(error: &RuntimeError, kind: &str, known: &[&str]) {
    let text = error.to_string();
    assert!(text.starts_with(&format!("{kind} `rigth`")), "{text}");
    assert!(known.iter().all(|name| text.contains(name)), "{text}");
}

#[test]
fn unknown_step_input_is_an_error_that_names_the_others() {
    let mut bucket = bucket(&["sum"]);
    let known = ["left", "right", "factor"];
    names_what_is_known(&bucket.set("rigth", &three(1.0)).expect_err("is unknown"), "input", &known);
    names_what_is_known(&bucket.input_index("rigth").expect_err("is unknown"), "input", &known);
}

#[test]
fn step_input_that_no_output_needs_is_ignored() {
    let mut bucket = bucket(&["sum"]);
    assert_eq!(bucket.input_index("factor").expect("is declared"), None);
    bucket.set("factor", &three(1.0)).expect("is declared");
    for name in ["left", "right"] {
        let index = bucket.input_index(name).expect("is declared").expect("is read");
        bucket.set(name, &three(2.0)).expect("fits");
        assert_eq!(bucket.input(index), three(2.0).to_bytes(), "{name}");
    }
    assert_eq!(bucket.input_names().collect::<Vec<_>>(), ["left", "right"]);
}

#[test]
fn unknown_output_is_an_error_that_names_the_others() {
    let bucket = bucket(&["sum"]);
    assert_eq!(bucket.output_index("sum").expect("asked for"), 0);
    names_what_is_known(&bucket.output_index("rigth").expect_err("is unknown"), "output", &["sum"]);
    names_what_is_known(&bucket.tensor("rigth").expect_err("is unknown"), "output", &["sum"]);
    assert!(bucket.output_index("product").is_err(), "the program was compiled without it");
}

/// `w' = w + w`, over a cache of `blocks` that it updates too.
fn update() -> Graph {
    let mut g = Builder::new();
    for ty in [Type::tensor(DType::F32, [3]), Type::tensor(DType::F32, [ridge_graph::Dim::sym("blocks")])] {
        let state = g.state(if ty.shape.as_const().is_some() { "w" } else { "kv" }, ty).expect("fresh");
        let old = g.state_read(state).expect("reads");
        let new = g.add(old, old).expect("f32");
        g.state_write(state, new).expect("writes");
    }
    g.finish(Vec::new()).expect("finishes")
}

#[test]
fn a_parameter_of_a_step_that_failed_is_broken_until_it_is_loaded_again() {
    let idle = Idle::default();
    let fails = Arc::clone(&idle.fails);
    let (ty, bindings) = (Type::tensor(DType::F32, [3]), Bindings::new().with("blocks", 2));
    let mut session = Session::new(Arc::new(idle));
    session.load("w", &ty, vec![WeightData::Owned(vec![0; 12])]).expect("fits");
    let graph = update();
    session.allocate_states(&graph, &bindings).expect("fits");
    let bucket = |session: &Session| session.compile(&graph, &[]).and_then(|c| c.bucket(&bindings)).expect("binds");
    let (mut failing, mut later) = (bucket(&session), bucket(&session));
    later.submit().and_then(|()| later.wait()).expect("runs");

    failing.submit().expect("is queued");
    fails.store(true, Ordering::Relaxed);
    assert!(failing.wait().is_err());
    fails.store(false, Ordering::Relaxed);
    for bucket in [&mut failing, &mut later] {
        let said = bucket.submit().expect_err("the parameter is broken").to_string();
        assert!(said.contains("parameter `w`") && said.contains("load it again"), "{said}");
    }
    session.load("w", &ty, vec![WeightData::Owned(vec![0; 12])]).expect("fits");
    later.submit().and_then(|()| later.wait()).expect("is mended");

    // Of a step whose end nobody waited for.
    failing.submit().expect("is mended");
    fails.store(true, Ordering::Relaxed);
    drop(failing);
    fails.store(false, Ordering::Relaxed);
    assert!(later.submit().is_err());
}

#[test]
fn a_cache_has_no_version_and_is_each_sessions_own() {
    let bindings = Bindings::new().with("blocks", 2);
    let mut session = Session::new(Arc::new(Idle::default()));
    session.allocate_states(&update(), &bindings).expect("fits");
    let mut other = session.share();
    assert!(other.state("w").is_some() && other.state("kv").is_none());
    other.allocate_states(&update(), &Bindings::new().with("blocks", 5)).expect("fits");
    assert_eq!([&session, &other].map(|s| s.state("kv").map(|b| b.bytes())), [Some(8), Some(20)]);
    assert_eq!((session.version("kv"), session.version("w")), (None, Some(0)));
    let said = session.load("kv", &Type::tensor(DType::F32, [2]), vec![WeightData::Owned(vec![0; 8])]);
    assert!(said.expect_err("is a cache").to_string().contains("`kv`"));
    let mut bucket = session.compile(&update(), &[]).and_then(|c| c.bucket(&bindings)).expect("binds");
    bucket.submit().expect("runs");
    assert_eq!((other.version("kv"), other.version("w")), (None, Some(1)));
}

#[test]
fn a_graph_is_compiled_once_for_its_outputs_and_says_why() {
    let graph = |columns: usize| {
        let mut g = Builder::new();
        let ty = Type::tensor(DType::F32, [2, columns]);
        let layer = g.function("layer", |g| {
            let x = g.arg("x", ty.clone());
            Ok(vec![g.exp(x)?])
        })?;
        let x = g.step_input("x", ty.clone())?;
        let y = g.call(layer, &[x])?[0];
        let z = g.neg(y)?;
        g.finish(vec![("y".into(), y), ("z".into(), z)])
    };
    let (narrow, wide) = (graph(3).unwrap(), graph(5).unwrap());
    let session = Session::new(Arc::new(Idle::default()));
    let reason = |graph: &Graph, outputs: &[&str]| session.compile(graph, outputs).unwrap().reason().clone();
    assert_eq!(reason(&narrow, &["y"]), CompileReason::FirstUse);
    // Built again it is the same graph, and a program keeps its reason.
    assert_eq!(reason(&graph(3).unwrap(), &["y"]), CompileReason::FirstUse);
    assert_eq!(session.programs().programs().len(), 1);
    assert_eq!(reason(&narrow, &["y", "z"]), CompileReason::NewOutputs);
    let other = CompileReason::OtherGraph { function: "layer".into() };
    assert_eq!(reason(&wide, &["y"]), other);
    assert_eq!(other.to_string(), "other graph, from function `layer` on");
    assert_eq!(reason(&narrow, &["z"]), CompileReason::NewOutputs);
    // Another session of the same backend compiles nothing again.
    let second = Session::sharing(Arc::clone(session.programs()));
    second.compile(&wide, &["y"]).unwrap();
    second.compile(&narrow, &["y", "z"]).unwrap();
    assert_eq!(session.programs().programs().len(), 4);
    // What does not compile is not kept.
    assert!(session.compile(&narrow, &["nowhere"]).is_err());
    assert_eq!(second.programs().programs().len(), 4);
}
