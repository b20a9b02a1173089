//! Sessions bring parameters to the layouts that are settled over the declared programs.

use std::sync::{Arc, Mutex};

use ridge_graph::passes::{Kernel, Layout, Numerics, Offer, Pattern};
use ridge_graph::{Bindings, Builder, DType, Dim, Graph, Type};
use ridge_runtime::{Backend, Buffer, MemoryBytes, Program, Result, Run, RuntimeError, Session, WeightData};

const COLUMNS: usize = 4;

/// A backend whose linears want weights in columns. It computes nothing, and records what it did with weights.
struct Recording {
    kernels: Vec<Kernel>,
    done: Arc<Mutex<Vec<String>>>,
}

struct NoProgram;

impl Backend for Recording {
    fn name(&self) -> &'static str {
        "recording"
    }

    fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    fn upload(&self, ty: &Type, parts: Vec<WeightData>) -> Result<Buffer> {
        self.done.lock().expect("no panic").push(format!("upload {}", ty.shape));
        Ok(Buffer::new(parts[0].bytes().len(), ()))
    }

    fn set_layout(&self, _buffer: &Buffer, ty: &Type, layout: &str) -> Result<()> {
        self.done.lock().expect("no panic").push(format!("{layout} {}", ty.shape));
        Ok(())
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

    fn compile(&self, _graph: Arc<Graph>) -> Result<Box<dyn Program>> {
        Ok(Box::new(NoProgram))
    }
}

impl Program for NoProgram {
    fn bind(&self, _bindings: &Bindings, _weights: &[Buffer], _states: &[Buffer]) -> Result<Box<dyn Run>> {
        Err(RuntimeError::Device { backend: "recording", why: "computes nothing".into() })
    }

    fn memory(&self, _bindings: &Bindings) -> Result<MemoryBytes> {
        Ok(MemoryBytes::default())
    }
}

/// A session, and what its backend did since this was asked for last.
fn session() -> (Session, impl Fn() -> Vec<String>) {
    let linear = Kernel::new("linear", Pattern::parse("linear(x, w)"), |request| {
        let offer = request.at_efficiency(1.0, 1.0, Numerics::ByExtents);
        Some(Offer { layouts: vec![(1, Layout::Named("columns".into()))], ..offer })
    });
    let done: Arc<Mutex<Vec<String>>> = Arc::default();
    let backend = Recording { kernels: vec![linear], done: Arc::clone(&done) };
    (Session::new(Arc::new(backend)), move || std::mem::take(&mut *done.lock().expect("no panic")))
}

/// Output `product` by the weights `own` and `table`, and output `row` of `table`.
fn graph() -> Graph {
    let mut g = Builder::new();
    let x = g.step_input("x", Type::tensor(DType::F32, [Dim::sym("rows"), COLUMNS.into()])).expect("fresh");
    let ids = g.step_input("ids", Type::tensor(DType::I32, [1])).expect("fresh");
    let own = g.weight("own", Type::tensor(DType::F32, [COLUMNS, COLUMNS])).expect("fresh");
    let table = g.weight("table", Type::tensor(DType::F32, [7, COLUMNS])).expect("fresh");
    let hidden = g.linear(x, own).expect("types");
    let product = g.linear(hidden, table).expect("types");
    let row = g.embedding(table, ids, DType::F32).expect("types");
    g.finish(vec![("product".into(), product), ("row".into(), row)]).expect("finishes")
}

fn load(session: &mut Session, graph: &Graph) {
    for arg in graph.args(ridge_graph::Role::Weight) {
        let bytes = vec![0; arg.ty.bytes().as_const().expect("constant") as usize];
        session.load(&arg.name, &arg.ty, vec![WeightData::Owned(bytes)]).expect("loads");
    }
}

#[test]
fn declared_programs_settle_layouts_before_weights_are_loaded() {
    let (mut session, done) = session();
    let graph = graph();
    session.declare(&[(&graph, &["product"]), (&graph, &["row"])]).expect("lowers");
    assert!(done().is_empty());
    load(&mut session, &graph);
    assert_eq!(done(), ["upload [4, 4]", "columns [4, 4]", "upload [7, 4]"]);
    session.compile(&graph, &["product"]).expect("compiles");
    // Nothing was lowered twice, and the table stays in rows also for the program that would have taken columns.
    assert_eq!(session.programs().programs().len(), 2);
    assert!(done().is_empty());
    // Another weight of that name has the same layout.
    load(&mut session, &graph);
    assert_eq!(done(), ["upload [4, 4]", "columns [4, 4]", "upload [7, 4]"]);
}

#[test]
fn without_a_declaration_the_first_program_settles() {
    let (mut session, done) = session();
    let graph = graph();
    load(&mut session, &graph);
    assert_eq!(done(), ["upload [4, 4]", "upload [7, 4]"]);
    session.compile(&graph, &["product"]).expect("compiles");
    let mut columns = done();
    columns.sort_unstable();
    assert_eq!(columns, ["columns [4, 4]", "columns [7, 4]"]);
    session.compile(&graph, &["row"]).expect("compiles");
    assert!(done().is_empty());
}

#[test]
fn layouts_belong_to_a_model() {
    let (session, done) = session();
    let graph = graph();
    session.declare(&[(&graph, &["product"])]).expect("lowers");
    let mut other = session.model("other");
    load(&mut other, &graph);
    assert_eq!(done(), ["upload [4, 4]", "upload [7, 4]"]);
    let mut same = session.share();
    load(&mut same, &graph);
    assert_eq!(done(), ["upload [4, 4]", "columns [4, 4]", "upload [7, 4]", "columns [7, 4]"]);
}
