//! A small decoder: two calls of one layer with grouped-query attention over a paged cache and a gated MLP.

use ridge_graph::ops::{PagedAttention, Rope, rope_frequencies};
use ridge_graph::sample::Rng;
use ridge_graph::{Bindings, Builder, DType, Dim, FuncId, Graph, Result, Role, Shape, Sym, Tensor, Type, Value, Var};

/// Elements of a head.
pub(crate) const HEAD: usize = 4;
const HIDDEN: usize = 16;
const HEADS: usize = 4;
const MLP: usize = 64;
const BLOCKS: usize = 3;
const BLOCK_SIZE: usize = 4;

/// The decoder with `kv_heads`, over `tokens` tokens.
pub(crate) fn decoder(kv_heads: usize, tokens: &Dim) -> Graph {
    let mut g = Builder::new();
    let x = g.step_input("x", Type::tensor(DType::F32, [tokens, &HIDDEN.into()])).expect("fresh");
    let layer = g.function("decoder_layer", |g| layer(g, kv_heads, tokens)).expect("builds");
    let x = (0..2).try_fold(x, |x, i| call(&mut g, layer, i, x)).expect("calls");
    g.finish(vec![("hidden".into(), x)]).expect("finishes")
}

fn call(g: &mut Builder, layer: FuncId, index: usize, x: Var) -> Result<Var> {
    Ok(g.scoped(&format!("layers.{index}"), |g| g.call(layer, &[x]))?[0])
}

fn linear(g: &mut Builder, name: &str, x: Var, rows: usize, cols: usize) -> Result<Var> {
    g.scoped(name, |g| {
        let w = g.weight("weight", Type::tensor(DType::F32, [rows, cols]))?;
        g.linear(x, w)
    })
}

fn norm(g: &mut Builder, name: &str, x: Var) -> Result<Var> {
    g.scoped(name, |g| {
        let w = g.weight("weight", Type::tensor(DType::F32, [HIDDEN]))?;
        g.rms_norm(x, w, 1e-5)
    })
}

fn layer(g: &mut Builder, kv_heads: usize, tokens: &Dim) -> Result<Vec<Var>> {
    let x = g.arg("x", Type::tensor(DType::F32, [tokens, &HIDDEN.into()]));
    let h = norm(g, "input_layernorm", x)?;
    let o = g.scoped("self_attn", |g| attention(g, h, kv_heads, tokens))?;
    let x = g.add(x, o)?;
    let h = norm(g, "post_attention_layernorm", x)?;
    let m = g.scoped("mlp", |g| {
        let gate = linear(g, "gate_proj", h, MLP, HIDDEN)?;
        let up = linear(g, "up_proj", h, MLP, HIDDEN)?;
        let m = g.swiglu(gate, up)?;
        linear(g, "down_proj", m, HIDDEN, MLP)
    })?;
    Ok(vec![g.add(x, m)?])
}

fn attention(g: &mut Builder, h: Var, kv_heads: usize, tokens: &Dim) -> Result<Var> {
    let index = |g: &mut Builder, name| g.step_input(name, Type::tensor(DType::I32, [tokens]));
    let (positions, slots, ids) = (index(g, "positions")?, index(g, "slots")?, index(g, "seq_ids")?);
    let table = g.step_input("block_table", Type::tensor(DType::I32, [1usize, BLOCKS]))?;
    let rope = Rope { inv_freq: rope_frequencies(10_000.0, HEAD).into(), scale: 1.0 };
    let heads = |g: &mut Builder, name, n: usize| {
        let flat = linear(g, name, h, n * HEAD, HIDDEN)?;
        g.reshape(flat, Shape::new([tokens, &n.into(), &HEAD.into()]))
    };
    let (q, k, v) = (heads(g, "q_proj", HEADS)?, heads(g, "k_proj", kv_heads)?, heads(g, "v_proj", kv_heads)?);
    let (q, k) = (g.rope(q, positions, &rope)?, g.rope(k, positions, &rope)?);
    let kv = g.state("kv", Type::state(DType::F32, [BLOCKS, 2, kv_heads, BLOCK_SIZE, HEAD]))?;
    let kv = g.kv_write(kv, k, v, slots)?;
    let op = PagedAttention::new(0.5, Sym::new("pairs"), Sym::new("cached"));
    let a = g.attention(q, kv, table, ids, positions, op)?;
    let a = g.reshape(a, Shape::new([tokens, &(HEADS * HEAD).into()]))?;
    linear(g, "o_proj", a, HIDDEN, HEADS * HEAD)
}

/// Values of the main function's arguments: one sequence of which `tokens` are new.
pub(crate) fn arguments(graph: &Graph, tokens: usize, bindings: &Bindings) -> Vec<(String, Value)> {
    let mut rng = Rng::new(5);
    let range = |n: usize| Tensor::int(DType::I32, &[n], (0..n as i64).collect());
    let value = |arg: &ridge_graph::Arg| match (&*arg.name, arg.role) {
        ("positions" | "slots", _) => range(tokens),
        ("seq_ids", _) => Tensor::zeros(DType::I32, &[tokens]),
        ("block_table", _) => Tensor::int(DType::I32, &[1, BLOCKS], (0..BLOCKS as i64).collect()),
        (_, Role::State) => Tensor::zeros(arg.ty.dtype, &arg.ty.shape.eval(bindings).expect("bound")),
        _ => rng.normal(arg.ty.dtype, &arg.ty.shape.eval(bindings).expect("bound")),
    };
    let mut value = value;
    graph.main().args.iter().map(|a| (a.name.to_string(), Value::Plain(value(a)))).collect()
}
