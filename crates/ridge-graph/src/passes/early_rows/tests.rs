//! What is computed of rows alone, what stays, and that it means the same.

use super::take_rows_early;
use crate::dim::{Bindings, Dim, Sym};
use crate::dtype::DType;
use crate::error::Result;
use crate::eval::{Precision, evaluate};
use crate::graph::{Arg, Builder, FuncId, Graph, Op, Role, Var};
use crate::ops::{MoeRouter, PagedAttention, Rope};
use crate::passes::{prune, tidy};
use crate::prim::{Combine, Prim};
use crate::sample::Rng;
use crate::tensor::{Tensor, Value};
use crate::types::Type;
use crate::work::Work;

const WIDTH: usize = 8;

fn tokens() -> Dim {
    Dim::sym("tokens")
}

fn seqs() -> Dim {
    Dim::sym("seqs")
}

fn hidden() -> Type {
    Type::tensor(DType::F32, [tokens(), WIDTH.into()])
}

fn ints(extent: Dim) -> Type {
    Type::tensor(DType::I32, [&extent])
}

/// `x` by a matrix of this name.
fn linear(g: &mut Builder, name: &str, x: Var, to: usize) -> Result<Var> {
    let from = g.ty(x)?.shape.last().as_const().unwrap_or_default();
    g.scoped(name, |g| {
        let w = g.weight("w", Type::tensor(DType::F32, [to, from]))?;
        g.linear(x, w)
    })
}

fn norm(g: &mut Builder, name: &str, x: Var) -> Result<Var> {
    let w = g.weight(name, Type::tensor(DType::F32, [WIDTH]))?;
    g.rms_norm(x, w, 1e-5)
}

fn gated(g: &mut Builder, x: Var) -> Result<Var> {
    let (gate, up) = (linear(g, "gate", x, 12)?, linear(g, "up", x, 12)?);
    let h = g.swiglu(gate, up)?;
    linear(g, "down", h, WIDTH)
}

/// The share of two of four experts of each token.
fn experts(g: &mut Builder, x: Var) -> Result<Var> {
    let logits = linear(g, "router", x, 4)?;
    let op = MoeRouter { top_k: 2, sigmoid: false, normalise: true, scale: 1.0, bias: false, groups: None };
    let (ids, weights) = g.moe_router(logits, None, op)?;
    let seq_ids = g.step_input("seq_ids", ints(tokens()))?;
    let (rows, places, offsets) = g.expert_permutation(ids, seq_ids, 4)?;
    let reached = Sym::new("reached");
    let project = |g: &mut Builder, name: &str, x: Var, [out, inner]: [usize; 2], rows: Option<Var>| {
        let w = g.weight(name, Type::tensor(DType::F32, [4, out, inner]))?;
        g.scoped(name, |g| g.grouped_linear(x, w, offsets, rows, &reached))
    };
    let gate = project(g, "gates", x, [12, WIDTH], Some(rows))?;
    let up = project(g, "ups", x, [12, WIDTH], Some(rows))?;
    let h = g.swiglu(gate, up)?;
    let y = project(g, "downs", h, [WIDTH, 12], None)?;
    g.expert_combine(y, places, weights)
}

/// A layer of a decoder, which ends with `mlp`; with a cache of its own if it `keeps` one, else it reads `kv` of its scope.
fn layer(g: &mut Builder, keeps: bool, mlp: fn(&mut Builder, Var) -> Result<Var>) -> Result<FuncId> {
    g.function("layer", |g| {
        let x = g.arg("x", hidden());
        let (positions, slots) = (g.arg("positions", ints(tokens())), g.arg("slots", ints(tokens())));
        let seq_ids = g.step_input("seq_ids", ints(tokens()))?;
        let table = g.step_input("block_table", Type::tensor(DType::I32, [seqs(), Dim::sym("table")]))?;
        let h = norm(g, "before", x)?;
        let rope = Rope { inv_freq: vec![1.0, 0.25].into(), scale: 1.0 };
        let rotated = |g: &mut Builder, name: &str, heads: usize| {
            let y = linear(g, name, h, heads * 4)?;
            let y = g.reshape(y, [tokens(), heads.into(), 4.into()])?;
            g.rope(y, positions, &rope)
        };
        let q = rotated(g, "q", 2)?;
        let mut kv =
            g.state("kv", Type::state(DType::F32, [Dim::sym("blocks"), 2.into(), 1.into(), 4.into(), 4.into()]))?;
        if keeps {
            let k = rotated(g, "k", 1)?;
            let v = linear(g, "v", h, 4)?;
            let v = g.reshape(v, [tokens(), 1.into(), 4.into()])?;
            kv = g.kv_write(kv, k, v, slots)?;
        }
        let op = PagedAttention::new(0.5, Sym::new("pairs"), Sym::new("cached"));
        let a = g.scoped("attention", |g| g.attention(q, kv, table, seq_ids, positions, op))?;
        let a = g.reshape(a, [tokens(), WIDTH.into()])?;
        let a = linear(g, "o", a, WIDTH)?;
        let x = g.add(x, a)?;
        let h = norm(g, "between", x)?;
        let y = mlp(g, h)?;
        Ok(vec![g.add(x, y)?])
    })
}

/// A decoder of three layers, of which the last one or two keep no cache.
fn decoder(keeping: usize, mlp: fn(&mut Builder, Var) -> Result<Var>) -> Result<Graph> {
    let mut g = Builder::new();
    let mut x = g.step_input("x", hidden())?;
    let [positions, slots] = ["positions", "slots"].map(|name| g.step_input(name, ints(tokens())));
    let (positions, slots) = (positions?, slots?);
    let functions = [layer(&mut g, true, mlp)?, layer(&mut g, false, mlp)?];
    for nth in 0..3 {
        let owner = nth.min(keeping - 1);
        let name = |name: &str| format!("{}.{name}", if name == "kv" { owner } else { nth });
        let of = functions[usize::from(nth >= keeping)];
        x = g.scoped(&nth.to_string(), |g| g.call_named(of, &[x, positions, slots], name))?[0];
    }
    let x = norm(&mut g, "norm", x)?;
    let last = g.step_input("last", ints(seqs()))?;
    let rows = g.take_rows(x, last, 0)?;
    let logits = linear(&mut g, "head", rows, 5)?;
    let all = linear(&mut g, "head", x, 5)?;
    g.finish(vec![("logits".into(), logits), ("all".into(), all)])
}

/// The pass, on the graph for these outputs.
fn early(graph: &Graph, outputs: &[&str]) -> (Graph, Graph) {
    let mut before = graph.clone();
    prune(&mut before, outputs).expect("has them");
    let mut after = before.clone();
    take_rows_early(&mut after);
    (before, after)
}

/// Products and attention with what has their rows.
fn products(graph: &Graph) -> Vec<String> {
    let of = |node: &&crate::Node| {
        matches!(node.op, Op::Prim(Prim::MatMul { .. }))
            || !matches!(node.work(), Work::View | Work::Pass) && node.op_name() != "call"
    };
    let text = |name: &str, node: &crate::Node| format!("{name} {} {}", node.scope, node.outputs[0].shape.0[0]);
    graph.functions.iter().flat_map(|f| f.nodes.iter().filter(of).map(|node| text(&f.name, node))).collect()
}

fn takings(graph: &Graph) -> Vec<(String, usize)> {
    let count = |f: &crate::Function| f.nodes.iter().filter(|node| node.op_name() == "take_rows").count();
    graph.functions.iter().map(|f| (f.name.to_string(), count(f))).collect()
}

/// Rows of real tokens and states of both graphs are equal, of two sequences of 3 and 2 tokens, the second behind 5 others, a token of
/// padding and a row without tokens.
fn means_the_same(before: &Graph, after: &Graph) {
    let bindings = Bindings::new().with("tokens", 6).with("seqs", 3).with("table", 2).with("blocks", 4);
    let run = |graph: &Graph| {
        let value = |arg: &Arg| {
            let shape = arg.ty.shape.eval(&bindings).expect("is bound");
            let ints = |values: &[i64]| Tensor::int(DType::I32, &shape, values.to_vec());
            let seed = arg.name.bytes().fold(1, |seed, byte| seed * 31 + u64::from(byte));
            Some(Value::Plain(match &*arg.name {
                "seq_ids" => ints(&[0, 0, 0, 1, 1, -1]),
                "positions" => ints(&[0, 1, 2, 5, 6, 0]),
                "slots" => ints(&[8, 9, 10, 13, 14, -1]),
                "block_table" => ints(&[2, -1, 0, 3, -1, -1]),
                "last" => ints(&[2, 4, -1]),
                _ => Rng::new(seed).normal(arg.ty.dtype, &shape),
            }))
        };
        let mut outputs = evaluate(graph, &value, &bindings, Precision::Exact).expect("evaluates");
        let states = outputs.split_off(1);
        let logits = outputs[0].1.tensor().floats().to_vec();
        (logits[..logits.len() / 3 * 2].to_vec(), states)
    };
    assert_eq!(run(before), run(after));
}

#[test]
fn the_last_layer_computes_its_cache_for_all_tokens_and_the_rest_for_the_rows_taken() {
    let (before, after) = early(&decoder(3, gated).expect("builds"), &["logits"]);
    let layer = |name: &str, rows: [&str; 8]| {
        let scopes = ["q", "k", "v", "attention", "o", "gate", "up", "down"];
        scopes.into_iter().zip(rows).map(|(scope, rows)| format!("{name} {scope} {rows}")).collect::<Vec<_>>()
    };
    let expected = [
        layer("layer", ["tokens"; 8]),
        // Queries are of one product with keys and values.
        layer("layer_rows", ["tokens", "tokens", "tokens", "seqs", "seqs", "seqs", "seqs", "seqs"]),
        vec!["main head seqs".into()],
    ];
    assert_eq!(products(&after), expected.concat());
    // The residual, the queries, their positions; and their sequences, which nothing else in the function reads.
    assert_eq!(takings(&after), [("layer".into(), 0), ("layer_rows".into(), 3), ("main".into(), 1)]);
    means_the_same(&before, &after);
    // The cost of attention is that of a row for each sequence.
    let pairs = |graph: &Graph| graph.cost().matrix_flops.symbols().filter(|s| s.name() == "taken_pairs").count();
    assert_eq!((pairs(&before), pairs(&after)), (0, 1));
}

#[test]
fn layers_that_keep_no_cache_compute_rows_alone() {
    let (before, after) = early(&decoder(1, gated).expect("builds"), &["logits"]);
    let all: Vec<String> = products(&after).into_iter().filter(|product| product.ends_with("tokens")).collect();
    assert_eq!(all, ["layer_rows q tokens", "layer_rows k tokens", "layer_rows v tokens"]);
    let takings = takings(&after);
    // Both calls are of one function, which is given all that it reads.
    assert_eq!(takings.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [3, 0, 2]);
    means_the_same(&before, &after);
}

#[test]
fn experts_of_the_rows_taken_get_an_order_of_their_own() {
    let (before, after) = early(&decoder(3, experts).expect("builds"), &["logits"]);
    let of_experts: Vec<String> = products(&after)
        .into_iter()
        .filter(|product| ["router", "gates", "ups", "downs"].iter().any(|name| product.contains(name)))
        .filter(|product| product.starts_with("layer_rows"))
        .collect();
    assert_eq!(
        of_experts,
        ["layer_rows router seqs", "layer_rows gates 2*seqs", "layer_rows ups 2*seqs", "layer_rows downs 2*seqs"]
    );
    means_the_same(&before, &after);
}

#[test]
fn what_others_read_is_computed_for_all() {
    let (before, after) = early(&decoder(3, gated).expect("builds"), &["logits", "all"]);
    assert_eq!(before, after);
}

/// A graph whose one output is a product of rows of what `build` makes of `x`, `[tokens, 8]`, and the index.
fn of_rows(build: impl FnOnce(&mut Builder, Var) -> Result<(Var, Var, Vec<Var>)>) -> Result<Graph> {
    let mut g = Builder::new();
    let x = g.step_input("x", hidden())?;
    let (y, rows, others) = build(&mut g, x)?;
    let y = g.take_rows(y, rows, 0)?;
    let y = linear(&mut g, "head", y, 5)?;
    let mut outputs = vec![("y".into(), y)];
    outputs.extend(others.into_iter().enumerate().map(|(nth, var)| (format!("other {nth}"), var)));
    let mut graph = g.finish(outputs)?;
    tidy(&mut graph);
    Ok(graph)
}

fn moved(graph: &Graph) -> Vec<String> {
    let mut graph = graph.clone();
    take_rows_early(&mut graph);
    products(&graph)
}

#[test]
fn products_of_one_input_stay_together_and_rows_are_taken_behind_them() {
    let graph = of_rows(|g, x| {
        let (a, b) = (linear(g, "a", x, 8)?, linear(g, "b", x, 8)?);
        let a = g.tanh(a)?;
        let c = linear(g, "c", a, 8)?;
        Ok((c, g.step_input("last", ints(seqs()))?, vec![b]))
    });
    let graph = graph.expect("builds");
    assert_eq!(moved(&graph), ["main a tokens", "main b tokens", "main c seqs", "main head seqs"]);
}

#[test]
fn what_goes_from_row_to_row_ends_it() {
    let graph = of_rows(|g, x| {
        let a = linear(g, "a", x, 8)?;
        let a = g.prim(Prim::Scan { op: Combine::Sum, axis: 0 }, &[a])?[0];
        let b = linear(g, "b", a, 8)?;
        Ok((b, g.step_input("last", ints(seqs()))?, Vec::new()))
    });
    assert_eq!(moved(&graph.expect("builds")), ["main a tokens", "main b seqs", "main head seqs"]);
}

#[test]
fn rows_of_another_axis_are_taken_through_transpositions() {
    let graph = of_rows(|g, x| {
        let heads = g.reshape(x, [tokens(), 2.into(), 4.into()])?;
        let heads = g.transpose(heads, &[1, 0, 2])?;
        let w = g.weight("w", Type::tensor(DType::F32, [2, 4, 3]))?;
        let y = g.scoped("heads", |g| g.matmul(heads, w, false, false, DType::F32))?;
        let y = g.transpose(y, &[1, 0, 2])?;
        let y = g.reshape(y, [tokens(), 6.into()])?;
        Ok((y, g.step_input("last", ints(seqs()))?, Vec::new()))
    });
    let graph = graph.expect("builds");
    let mut after = graph.clone();
    take_rows_early(&mut after);
    let product = after.main().nodes.iter().find(|node| &*node.scope == "heads").expect("is there");
    assert_eq!(product.outputs[0].shape.to_string(), "[2, seqs, 3]");
    means_the_same(&graph, &after);
}

#[test]
fn an_index_that_depends_on_a_value_does_not_move_it() {
    let graph = of_rows(|g, x| {
        let function = g.function("both", |g| {
            let x = g.arg("x", hidden());
            let y = linear(g, "a", x, 8)?;
            let best = g.prim(Prim::ArgMax { axis: 0 }, &[x])?[0];
            Ok(vec![y, g.reshape(best, [WIDTH])?])
        })?;
        let outputs = g.call(function, &[x])?;
        Ok((outputs[0], outputs[1], Vec::new()))
    });
    let graph = graph.expect("builds");
    assert_eq!(moved(&graph), products(&graph));
    // Though it moves where the index is another.
    let graph = of_rows(|g, x| {
        let y = linear(g, "a", x, 8)?;
        Ok((y, g.step_input("last", ints(seqs()))?, Vec::new()))
    });
    assert_eq!(moved(&graph.expect("builds")), ["main a seqs", "main head seqs"]);
}

#[test]
fn nothing_moves_for_rows_that_are_as_many_as_there_are_or_where_no_product_gains() {
    let as_many = of_rows(|g, x| {
        let y = linear(g, "a", x, 8)?;
        Ok((y, g.step_input("rows", ints(tokens()))?, Vec::new()))
    });
    let no_product = of_rows(|g, x| {
        let y = norm(g, "norm", x)?;
        Ok((y, g.step_input("last", ints(seqs()))?, Vec::new()))
    });
    for graph in [as_many.expect("builds"), no_product.expect("builds")] {
        let mut after = graph.clone();
        take_rows_early(&mut after);
        assert_eq!(after, graph);
    }
}

#[test]
fn a_layer_called_elsewhere_for_all_tokens_keeps_its_function() {
    let (_, after) = early(&decoder(3, gated).expect("builds"), &["logits"]);
    let called: Vec<&str> = after
        .main()
        .nodes
        .iter()
        .filter_map(|node| match node.op {
            Op::Call(callee) => Some(&*after.function(callee).name),
            _ => None,
        })
        .collect();
    assert_eq!(called, ["layer", "layer", "layer_rows"]);
    let weights = |graph: &Graph| graph.args(Role::Weight).map(|arg| arg.name.to_string()).collect::<Vec<_>>();
    let (before, _) = early(&decoder(3, gated).expect("builds"), &["logits"]);
    assert_eq!(weights(&after), weights(&before));
}

#[test]
fn an_index_that_depends_on_an_update_does_not_move_what_reads_the_state_before_it() {
    let graph = of_rows(|g, x| {
        let [positions, slots, seq_ids] =
            ["positions", "slots", "seq_ids"].map(|name| g.step_input(name, ints(tokens())));
        let table = g.step_input("block_table", Type::tensor(DType::I32, [seqs(), Dim::sym("table")]))?;
        let kv =
            g.state("kv", Type::state(DType::F32, [Dim::sym("blocks"), 2.into(), 1.into(), 4.into(), 4.into()]))?;
        let q = linear(g, "q", x, 8)?;
        let q = g.reshape(q, [tokens(), 2.into(), 4.into()])?;
        let op = PagedAttention::new(0.5, Sym::new("pairs"), Sym::new("cached"));
        let a = g.scoped("attention", |g| g.attention(q, kv, table, seq_ids?, positions?, op))?;
        let a = g.reshape(a, [tokens(), WIDTH.into()])?;
        let [k, v] = ["k", "v"].map(|name| {
            let y = linear(g, name, x, 4)?;
            g.reshape(y, [tokens(), 1.into(), 4.into()])
        });
        let kv = g.kv_write(kv, k?, v?, slots?)?;
        let all = g.state_read(kv)?;
        let best = g.prim(Prim::ArgMax { axis: 4 }, &[all])?[0];
        let best = g.slice(best, 0, 0, 1)?;
        Ok((a, g.reshape(best, [WIDTH])?, Vec::new()))
    });
    let graph = graph.expect("builds");
    let mut after = graph.clone();
    take_rows_early(&mut after);
    assert_eq!(after, graph);
}

#[test]
fn functions_made_for_each_other_are_told_apart() {
    let graph = of_rows(|g, x| {
        let inner = g.function("inner", |g| {
            let x = g.arg("x", hidden());
            Ok(vec![linear(g, "a", x, WIDTH)?])
        })?;
        let outer = g.function("outer", |g| {
            let x = g.arg("x", hidden());
            let y = g.call(inner, &[x])?[0];
            let y = g.tanh(y)?;
            Ok(vec![linear(g, "b", y, WIDTH)?])
        })?;
        let y = g.call(outer, &[x])?[0];
        Ok((y, g.step_input("last", ints(seqs()))?, Vec::new()))
    });
    let mut graph = graph.expect("builds");
    take_rows_early(&mut graph);
    let of = |what: fn(&crate::Function) -> String| graph.functions.iter().map(what).collect::<Vec<_>>();
    assert_eq!(of(|f| f.name.to_string()), ["inner_rows", "outer_rows", "main"]);
    let owners: std::collections::BTreeSet<String> = of(|f| f.owner.to_string()).into_iter().collect();
    assert_eq!(owners.len(), 3, "{owners:?}");
}
