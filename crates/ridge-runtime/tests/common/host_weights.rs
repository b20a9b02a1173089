//! Weights in memory of the host: a small mixture of experts, and that a backend gives the same bits wherever its weights are.
#![allow(dead_code, unreachable_pub)] // each test binary uses its part

use std::collections::BTreeSet;
use std::sync::Arc;

use ridge_graph::format::Q8_0;
use ridge_graph::ops::MoeRouter;
use ridge_graph::passes::{fetch_weights, host_weights};
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, Dim, FormatRef, Graph, Result, Role, Sym, Tensor, Type, Value, Var};
use ridge_runtime::{Backend, Session, WeightData};

pub const VOCAB: usize = 96;
pub const WIDTH: usize = 128;
const INNER: usize = 256;
pub const EXPERTS: usize = 8;
pub const TOP_K: usize = 2;
pub const LAYERS: usize = 4;

/// Bytes of the three stacks of a layer.
pub const EXPERT_BYTES: u64 = (3 * EXPERTS * WIDTH * INNER * 2) as u64;

/// A decoder without attention over the symbol `tokens`: an embedding, layers of a plain matrix, one in Q8_0 and experts, and an
/// output projection. All in bf16. Outputs `logits`.
pub fn mixture() -> Result<Graph> {
    let mut g = Builder::new();
    let tokens = Dim::sym("tokens");
    let ids = g.step_input("ids", Type::tensor(DType::I32, [&tokens]))?;
    let table = g.weight("embed", Type::tensor(DType::BF16, [VOCAB, WIDTH]))?;
    let mut x = g.embedding(table, ids, DType::BF16)?;
    let layer = g.function("layer", |g| {
        let x = g.arg("x", Type::tensor(DType::BF16, [tokens.clone(), WIDTH.into()]));
        let gain = g.weight("norm", Type::tensor(DType::BF16, [WIDTH]))?;
        let h = g.rms_norm(x, gain, 1e-5)?;
        let up = g.weight("up", Type::tensor(DType::BF16, [INNER, WIDTH]))?;
        let down = Type::tensor(DType::BF16, [WIDTH, INNER]).stored_as(FormatRef::new(Q8_0));
        let down = g.weight("down", down)?;
        let h = g.linear(h, up)?;
        let h = g.linear(h, down)?;
        let x = g.add(x, h)?;
        let routed = experts(g, x)?;
        Ok(vec![g.add(x, routed)?])
    })?;
    for i in 0..LAYERS {
        x = g.scoped(&format!("layers.{i}"), |g| g.call(layer, &[x]))?[0];
    }
    let head = g.weight("head", Type::tensor(DType::BF16, [VOCAB, WIDTH]))?;
    let logits = g.linear(x, head)?;
    g.finish(vec![("logits".into(), logits)])
}

fn experts(g: &mut Builder, x: Var) -> Result<Var> {
    let router = g.weight("router", Type::tensor(DType::BF16, [EXPERTS, WIDTH]))?;
    let logits = g.linear(x, router)?;
    let op = MoeRouter { top_k: TOP_K, sigmoid: false, normalise: true, scale: 1.0, bias: false, groups: None };
    let (ids, share) = g.moe_router(logits, None, op)?;
    let seq_ids = g.step_input("seq_ids", Type::tensor(DType::I32, [Dim::sym("tokens")]))?;
    let (rows, places, offsets) = g.expert_permutation(ids, seq_ids, EXPERTS)?;
    let stack = |g: &mut Builder, name: &str, [out, inner]: [usize; 2], x: Var, rows: Option<Var>| {
        let w = g.weight(&format!("experts.{name}"), Type::tensor(DType::BF16, [EXPERTS, out, inner]))?;
        g.grouped_linear(x, w, offsets, rows, &Sym::new("reached"))
    };
    let gate = stack(g, "gate", [INNER, WIDTH], x, Some(rows))?;
    let up = stack(g, "up", [INNER, WIDTH], x, Some(rows))?;
    let h = g.swiglu(gate, up)?;
    let y = stack(g, "down", [WIDTH, INNER], h, None)?;
    g.expert_combine(y, places, share)
}

/// The mixture with all of its weights that may be fetched.
pub fn fetching(graph: &Graph) -> (Graph, BTreeSet<String>) {
    let names: BTreeSet<String> = host_weights(graph).iter().map(|weight| weight.name.to_string()).collect();
    let mut fetching = graph.clone();
    fetch_weights(&mut fetching, &names);
    (fetching, names)
}

/// A weight of the mixture, the same for the same name.
pub fn weight(arg: &Arg) -> Value {
    let mut rng = Rng::new(arg.name.bytes().map(u64::from).sum());
    let shape = arg.ty.shape.as_const().expect("weights have numbers for extents");
    let values = rng.normal(DType::F32, &shape).floats().iter().map(|x| x / 10.0).collect();
    let values = Tensor::float(DType::BF16, &shape, values).rounded();
    match &arg.ty.format {
        Some(format) => Value::stored(&values, format),
        None => Value::Plain(values),
    }
}

/// Step inputs for so many tokens, of which the last belongs to no sequence.
pub fn inputs(tokens: usize) -> [(&'static str, Tensor); 2] {
    let ids = (0..tokens as i64).map(|i| i * 7 % VOCAB as i64).collect();
    let of = (0..tokens).map(|i| if i > 0 && i + 1 == tokens { -1 } else { 0 }).collect();
    [("ids", Tensor::int(DType::I32, &[tokens], ids)), ("seq_ids", Tensor::int(DType::I32, &[tokens], of))]
}

fn session(backend: &Arc<dyn Backend>, graph: &Graph, on_host: &BTreeSet<String>) -> Session {
    let mut session = Session::new(Arc::clone(backend));
    session.keep_on_host(on_host.iter().map(String::as_str));
    session.declare(&[(graph, &["logits"])]).expect("declares");
    for arg in graph.args(Role::Weight) {
        let parts = match weight(arg) {
            Value::Plain(tensor) => vec![WeightData::Owned(tensor.to_bytes())],
            Value::Stored { components, .. } => components.iter().map(|c| WeightData::Owned(c.to_bytes())).collect(),
        };
        session.load(&arg.name, &arg.ty, parts).expect("loads");
    }
    session
}

/// Requires that the logits of few tokens, whose experts are read in place, and of many, for which all is copied, have the same bits
/// with all weights that may be on the host there as with none, from the first step on.
pub fn hold(backend: &Arc<dyn Backend>) {
    let graph = mixture().expect("builds");
    let (fetching, names) = fetching(&graph);
    let sessions = [session(backend, &graph, &BTreeSet::new()), session(backend, &fetching, &names)];
    let programs =
        [(&sessions[0], &graph), (&sessions[1], &fetching)].map(|(s, g)| s.compile(g, &["logits"]).expect("compiles"));
    for tokens in [1, 3, 5, 8, 9, 40, 200] {
        let bindings = Bindings::new().with("tokens", tokens);
        let run = |program: &ridge_runtime::Compiled| {
            let mut bucket = program.bucket(&bindings).expect("binds");
            // The first step is queued launch by launch, those behind it as one.
            let steps = [0, 1, 2].map(|_| {
                inputs(tokens).iter().for_each(|(name, value)| bucket.set(name, value).expect("is declared"));
                bucket.submit().expect("submits");
                bucket.wait().expect("runs");
                bucket.output(0).to_vec()
            });
            assert!(steps[0] == steps[1] && steps[1] == steps[2], "steps of {tokens} tokens differ");
            steps[0].clone()
        };
        let [device, host] = [run(&programs[0]), run(&programs[1])];
        assert!(device.iter().any(|byte| *byte != 0), "logits of {tokens} tokens are zeros");
        assert!(device == host, "logits of {tokens} tokens differ with weights in memory of the host");
    }
}
