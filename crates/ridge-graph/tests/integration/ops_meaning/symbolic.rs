//! Ops under symbolic extents: a model is built once, for every number of tokens, sequences and blocks.

use ridge_graph::ops::{AdamW, Linear, PagedAttention, Rope, SampleToken, rope_frequencies};
use ridge_graph::{Bindings, Builder, DType, Dim, FormatRef, Op, Sym, Type, Var, format};

fn dim(name: &str) -> Dim {
    Dim::sym(name)
}

/// Every op of a decoder's step, and the loss, with no extent of the batch known.
fn step(g: &mut Builder) -> ridge_graph::Result<Vec<Var>> {
    let (t, s, b) = (&dim("tokens"), &dim("seqs"), &dim("width"));
    let (f32s, i32s) = (DType::F32, DType::I32);
    let bf16 = DType::BF16;
    let ids = g.step_input("ids", Type::tensor(i32s, [t]))?;
    let seq_ids = g.step_input("seq_ids", Type::tensor(i32s, [t]))?;
    let starts = g.step_input("query_start", Type::tensor(i32s, [s.clone() + 1]))?;
    let lengths = g.step_input("lengths", Type::tensor(i32s, [s]))?;
    let table = g.step_input("block_table", Type::tensor(i32s, [s, b]))?;
    let kv = g.state("kv", Type::state(bf16, [dim("blocks"), 2.into(), 2.into(), 16.into(), 8.into()]))?;
    let q8 = FormatRef::new(format::Q8_0);
    let weight = |g: &mut Builder, name: &str, n: usize, k: usize| g.weight(name, Type::tensor(bf16, [n, k]));

    let (positions, slots) = g.token_layout(seq_ids, starts, lengths, table, 16)?;
    let embed = g.weight("embed", Type::tensor(bf16, [100usize, 32]).stored_as(q8))?;
    let x = g.embedding(embed, ids, bf16)?;
    let norm = g.weight("norm", Type::tensor(bf16, [32usize]))?;
    let h = g.rms_norm(x, norm, 1e-5)?;
    let (wq, wk, wv) = (weight(g, "q", 32, 32)?, weight(g, "k", 16, 32)?, weight(g, "v", 16, 32)?);
    let q = g.linear(h, wq)?;
    let kv_pair = g.linear_group(h, &[wk, wv], &[])?;
    let rope = Rope { inv_freq: rope_frequencies(1e4, 8).into(), scale: 1.0 };
    let q = g.reshape(q, [t.clone(), 4.into(), 8.into()])?;
    let k = g.reshape(kv_pair[0], [t.clone(), 2.into(), 8.into()])?;
    let v = g.reshape(kv_pair[1], [t.clone(), 2.into(), 8.into()])?;
    let q = g.rope(q, positions, &rope)?;
    let k = g.rope(k, positions, &rope)?;
    let kv = g.kv_write(kv, k, v, slots)?;
    let op = PagedAttention::new(0.35, Sym::new("pairs"), Sym::new("cached"));
    let a = g.attention(q, kv, table, seq_ids, positions, op)?;
    let a = g.reshape(a, [t.clone(), 32.into()])?;
    let m = g.swiglu(a, h)?;
    let out = g.weight("out", Type::tensor(bf16, [100usize, 32]))?;
    let logits = g.linear(m, out)?;
    let targets = g.step_input("targets", Type::tensor(i32s, [t]))?;
    let loss = g.cross_entropy(logits, targets)?;

    let scores = g.step_input("scores", Type::tensor(f32s, [s, &100.into()]))?;
    let scores = g.softmax(scores)?;
    let mut keys = Vec::new();
    for (name, dtype) in SampleToken::KEYS {
        keys.push(g.step_input(name, Type::tensor(dtype, [s]))?);
    }
    let token = g.sample_token(scores, keys.try_into().expect("a key each"))?;
    let flat = g.step_input("flat", Type::tensor(f32s, [dim("params")]))?;
    let scalar = g.constant(f32s, 1.0)?;
    let adamw = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };
    let (flat, ..) = g.adamw(flat, flat, flat, flat, scalar, scalar, adamw)?;
    Ok(vec![loss, token, flat])
}

#[test]
fn every_op_of_a_step_builds_and_decomposes_for_any_batch() {
    let mut g = Builder::new();
    let outputs = step(&mut g).expect("a step of any batch");
    let named = outputs.into_iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect();
    let graph = g.finish(named).expect("a graph");
    let main = graph.main();
    let mut seen = 0;
    for node in &main.nodes {
        let Op::Composite(op) = &node.op else { continue };
        let types = main.types(&node.inputs);
        let mut g = Builder::new();
        let vars: Vec<Var> = types.iter().enumerate().map(|(i, ty)| g.arg(&i.to_string(), ty.clone())).collect();
        let outputs = op.decompose(&mut g, &vars).unwrap_or_else(|e| panic!("{}: {e}", op.name()));
        let got: Vec<Type> = outputs.iter().map(|v| g.ty(*v).expect("its own value").clone()).collect();
        assert_eq!(got, node.outputs, "{}", op.name());
        seen += 1;
    }
    assert!(seen >= 15, "{seen}");
}

#[test]
fn costs_are_the_formulas_one_writes_by_hand() {
    let mut g = Builder::new();
    let outputs = step(&mut g).expect("a step of any batch");
    let graph = g.finish(vec![("0".into(), outputs[0])]).expect("a graph");
    let cost_of = |name: &str| {
        let node = graph.main().nodes.iter().position(|n| n.op_name() == name).expect("the op is there");
        graph.node_cost(graph.main, node)
    };
    assert_eq!(cost_of("linear").matrix_flops.to_string(), format!("{}*tokens", 2 * 32 * 32));
    assert_eq!(cost_of("linear_group").matrix_flops.to_string(), format!("{}*tokens", 2 * 32 * 16 * 2));
    // x once, both weights, both outputs, all bf16.
    let bytes = (32 + 2 * 16) * 2;
    assert_eq!(cost_of("linear_group").bytes().to_string(), format!("{bytes}*tokens + {}", 2 * 16 * 32 * 2));
    let attention = cost_of("attention");
    assert_eq!(attention.matrix_flops.to_string(), format!("{}*pairs", 4 * 4 * 8));
    assert_eq!(attention.special_flops.to_string(), "4*pairs");
    let bindings = Bindings::new().with("tokens", 3).with("seqs", 2).with("width", 5).with("cached", 70);
    // Keys and values of two heads of eight, q and the output, then the tables.
    let read = 70 * 2 * 2 * 8 * 2 + 3 * 32 * 2 + (2 * 5 + 3 + 3) * 4;
    assert_eq!(attention.bytes_read.eval(&bindings), Ok(read));
    assert_eq!(cost_of("kv_write").bytes_written.to_string(), format!("{}*tokens", 2 * 2 * 8 * 2));
    // 34 bytes a block of 32, and an id.
    assert_eq!(cost_of("embedding").bytes_read.to_string(), "38*tokens");
}

#[test]
fn two_symbolic_axes_cannot_be_rows_of_one_product() {
    let types = [Type::tensor(DType::F32, [dim("a"), dim("b"), 8.into()]), Type::tensor(DType::F32, [4usize, 8])];
    let why = ridge_graph::Composite::infer(&Linear::default(), &types).unwrap_err();
    assert!(why.contains("more than one is symbolic"), "{why}");
}
