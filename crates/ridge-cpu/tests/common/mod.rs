//! Running whole graphs on a backend with given values.
#![allow(dead_code, unreachable_pub)] // each test binary uses its part

use std::sync::Arc;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_graph::passes::Kernel;
use ridge_graph::{Arg, Bindings, Data, Graph, Role, Tensor, Type, Value};
use ridge_runtime::{Backend, Buffer, Compiled, Program, Result, Session, WeightData};

/// A CPU of `threads` threads, its memory poisoned before each step.
pub fn poisoned(threads: usize) -> Arc<dyn Backend> {
    let options = CpuOptions { threads: Some(threads), poison: true, ..CpuOptions::default() };
    Arc::new(Cpu::new(options).expect("threads start"))
}

/// A backend whose kernels claim nothing, so that everything is decomposed and fused.
pub struct Unclaimed(pub Arc<dyn Backend>);

impl Backend for Unclaimed {
    fn name(&self) -> &'static str {
        "unclaimed"
    }

    fn kernels(&self) -> &[Kernel] {
        &[]
    }

    fn upload(&self, ty: &Type, parts: Vec<WeightData>) -> Result<Buffer> {
        self.0.upload(ty, parts)
    }

    fn set_layout(&self, buffer: &Buffer, ty: &Type, layout: &str) -> Result<()> {
        self.0.set_layout(buffer, ty, layout)
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.0.allocate(bytes)
    }

    fn is_writable(&self, buffer: &Buffer) -> bool {
        self.0.is_writable(buffer)
    }

    fn read(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        self.0.read(buffer)
    }

    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()> {
        self.0.write(buffer, bytes)
    }

    fn compile(&self, graph: Arc<Graph>) -> Result<Box<dyn Program>> {
        self.0.compile(graph)
    }
}

/// The bytes of a weight's parts.
pub fn parts(value: &Value) -> Vec<WeightData> {
    match value {
        Value::Plain(tensor) => vec![WeightData::Owned(tensor.to_bytes())],
        Value::Stored { components, .. } => components.iter().map(|c| WeightData::Owned(c.to_bytes())).collect(),
    }
}

/// A session with the graph's weights and states.
pub fn session(
    backend: &Arc<dyn Backend>,
    graph: &Graph,
    bindings: &Bindings,
    value: &dyn Fn(&Arg) -> Value,
) -> Result<Session> {
    let mut session = Session::new(Arc::clone(backend));
    for arg in graph.args(Role::Weight) {
        session.load(&arg.name, &arg.ty, parts(&value(arg)))?;
    }
    session.allocate_states(graph, bindings)?;
    write_states(backend, graph, &session, value)?;
    Ok(session)
}

fn write_states(
    backend: &Arc<dyn Backend>,
    graph: &Graph,
    session: &Session,
    value: &dyn Fn(&Arg) -> Value,
) -> Result<()> {
    graph.args(Role::State).try_for_each(|arg| {
        let buffer = session.state(&arg.name).expect("is allocated");
        backend.write(&buffer, &value(arg).tensor().to_bytes())
    })
}

/// A graph on a backend with its weights and states, for steps of any extents.
pub struct LoadedGraph<'a> {
    backend: Arc<dyn Backend>,
    graph: &'a Graph,
    session: Session,
    compiled: Compiled,
}

impl<'a> LoadedGraph<'a> {
    pub fn new(
        backend: &Arc<dyn Backend>,
        graph: &'a Graph,
        bindings: &Bindings,
        value: &dyn Fn(&Arg) -> Value,
    ) -> Result<Self> {
        let session = session(backend, graph, bindings, value)?;
        let main = graph.main();
        let names: Vec<&str> = main.outputs.iter().filter(|o| o.role == Role::Data).map(|o| &*o.name).collect();
        let compiled = session.compile(graph, &names)?;
        Ok(Self { backend: Arc::clone(backend), graph, session, compiled })
    }

    /// The outputs of one step, in the order of the main function's, states as they are afterwards.
    pub fn step(&self, bindings: &Bindings, value: &dyn Fn(&Arg) -> Value) -> Result<Vec<Tensor>> {
        let mut bucket = self.compiled.bucket(bindings)?;
        for arg in self.graph.args(Role::StepInput) {
            bucket.set(&arg.name, value(arg).tensor())?;
        }
        bucket.submit()?;
        while !bucket.poll()? {
            std::thread::yield_now();
        }
        let main = self.graph.main();
        let mut outputs = Vec::with_capacity(main.outputs.len());
        for output in &main.outputs {
            outputs.push(if output.role == Role::State {
                let ty = main.ty(output.var);
                let bytes = self.backend.read(&self.session.state(&output.name).expect("allocated"))?;
                Tensor::from_bytes(ty.dtype, &ty.shape.eval(bindings)?, &bytes)
            } else {
                bucket.tensor(&output.name)?
            });
        }
        Ok(outputs)
    }
}

/// The outputs of one step of a graph that is loaded for it: see [`LoadedGraph::step`].
pub fn run(
    backend: &Arc<dyn Backend>,
    graph: &Graph,
    bindings: &Bindings,
    value: &dyn Fn(&Arg) -> Value,
) -> Result<Vec<Tensor>> {
    LoadedGraph::new(backend, graph, bindings, value)?.step(bindings, value)
}

/// Are two results the same to the bit?
pub fn same_bits(a: &[Tensor], b: &[Tensor]) -> bool {
    // Of NaN the sign and payload are nobody's meaning: processors choose them by the order of an addition's operands.
    let same = |a: &f64, b: &f64| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    let equal = |a: &Tensor, b: &Tensor| match (&a.data, &b.data) {
        (Data::Float(x), Data::Float(y)) => x.iter().zip(y).all(|(x, y)| same(x, y)),
        (x, y) => x == y,
    };
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a.dtype, &a.shape) == (b.dtype, &b.shape) && equal(a, b))
}

/// Rows `rows` of a tensor.
pub fn rows(tensor: &Tensor, rows: std::ops::Range<usize>) -> Tensor {
    let row = tensor.len() / tensor.shape[0];
    let (shape, of_rows) = ([&[rows.len()], &tensor.shape[1..]].concat(), rows.start * row..rows.end * row);
    match &tensor.data {
        Data::Float(values) => Tensor::float(tensor.dtype, &shape, values[of_rows].to_vec()),
        Data::Int(values) => Tensor::int(tensor.dtype, &shape, values[of_rows].to_vec()),
    }
}

/// Requires that output 0 for some rows of the inputs named `by_row` is those rows of the output for all of them.
pub fn cuts_agree(graph: &Graph, symbol: &str, values: &dyn Fn(&str) -> Value, by_row: &[&str], cuts: &[usize]) {
    let total = values(by_row[0]).tensor().shape[0];
    let bound = |rows: usize| Bindings::new().with(symbol, rows);
    let whole_value = |arg: &Arg| values(&arg.name);
    let on_threads: [LoadedGraph<'_>; 3] =
        std::array::from_fn(|i| LoadedGraph::new(&poisoned(i + 1), graph, &bound(total), &whole_value).expect("loads"));
    let part = |range: std::ops::Range<usize>, threads: usize| {
        let value = |arg: &Arg| match values(&arg.name) {
            Value::Plain(tensor) if by_row.contains(&&*arg.name) => Value::Plain(rows(&tensor, range.clone())),
            value => value,
        };
        let on = &on_threads[threads - 1];
        write_states(&on.backend, graph, &on.session, &whole_value).expect("are written");
        on.step(&bound(range.len()), &value).expect("runs").remove(0)
    };
    let whole = part(0..total, 1);
    for threads in [2, 3] {
        assert_eq!(part(0..total, threads).to_bytes(), whole.to_bytes(), "{threads} threads");
    }
    for cut in cuts.windows(2) {
        let range = cut[0]..cut[1];
        let got = part(range.clone(), 1 + cut[0] % 3);
        assert_eq!(got.to_bytes(), rows(&whole, range.clone()).to_bytes(), "rows {range:?} of {total}");
    }
}
