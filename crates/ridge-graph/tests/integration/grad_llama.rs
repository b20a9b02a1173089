//! Gradients and AdamW steps of a small Llama against what torch computed (`fixtures/training.py`): two sequences in
//! one packed batch, a tied embedding, grouped-query attention over a paged cache.

use std::path::Path;

use crate::support::gradients::{Inputs, adamw_step, floats, run, total};
use ridge_graph::grad::{float_weights, gradient};
use ridge_graph::ops::{AdamW, PagedAttention, Rope, rope_frequencies};
use ridge_graph::{Bindings, Builder, DType, Graph, Op, Result, Role, Sym, Tensor, Type, Var};
use safetensors::SafeTensors;

const SEQ_LENS: [usize; 2] = [12, 9];
const TOKENS: usize = 21;
const TARGETS: f64 = 19.0;
const HIDDEN: usize = 32;
const MLP: usize = 56;
const VOCAB: usize = 96;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 8;
/// Blocks of a sequence in the cache, and tokens of a block.
const BLOCKS: usize = 3;
const BLOCK_SIZE: usize = 4;

fn linear(g: &mut Builder, name: &str, x: Var, to: usize, from: usize) -> Result<Var> {
    g.scoped(name, |g| {
        let w = g.weight("weight", Type::tensor(DType::F32, [to, from]))?;
        g.linear(x, w)
    })
}

fn norm(g: &mut Builder, name: &str, x: Var) -> Result<Var> {
    let w = g.scoped(name, |g| g.weight("weight", Type::tensor(DType::F32, [HIDDEN])))?;
    g.rms_norm(x, w, 1e-5)
}

fn attention(g: &mut Builder, h: Var) -> Result<Var> {
    let index = |g: &mut Builder, name| g.step_input(name, Type::tensor(DType::I32, [TOKENS]));
    let (positions, slots, ids) = (index(g, "positions")?, index(g, "slots")?, index(g, "seq_ids")?);
    let table = g.step_input("block_table", Type::tensor(DType::I32, [SEQ_LENS.len(), BLOCKS]))?;
    let heads = |g: &mut Builder, name, n: usize| {
        let flat = linear(g, name, h, n * HEAD, HIDDEN)?;
        g.reshape(flat, [TOKENS, n, HEAD])
    };
    let (q, k, v) = (heads(g, "q_proj", HEADS)?, heads(g, "k_proj", KV_HEADS)?, heads(g, "v_proj", KV_HEADS)?);
    let rope = Rope { inv_freq: rope_frequencies(10_000.0, HEAD).into(), scale: 1.0 };
    let (q, k) = (g.rope(q, positions, &rope)?, g.rope(k, positions, &rope)?);
    let cache = [SEQ_LENS.len() * BLOCKS, 2, KV_HEADS, BLOCK_SIZE, HEAD];
    let kv = g.state("kv", Type::state(DType::F32, cache))?;
    let kv = g.kv_write(kv, k, v, slots)?;
    let scale = 1.0 / (HEAD as f64).sqrt();
    let op = PagedAttention::new(scale, Sym::new("pairs"), Sym::new("cached"));
    let a = g.attention(q, kv, table, ids, positions, op)?;
    let a = g.reshape(a, [TOKENS, HEADS * HEAD])?;
    linear(g, "o_proj", a, HIDDEN, HEADS * HEAD)
}

/// The mean loss of the batch.
fn llama() -> Result<Graph> {
    let mut g = Builder::new();
    let layer = g.function("decoder_layer", |g| {
        let x = g.arg("x", Type::tensor(DType::F32, [TOKENS, HIDDEN]));
        let h = norm(g, "input_layernorm", x)?;
        let a = g.scoped("self_attn", |g| attention(g, h))?;
        let x = g.add(x, a)?;
        let h = norm(g, "post_attention_layernorm", x)?;
        let m = g.scoped("mlp", |g| {
            let (gate, up) = (linear(g, "gate_proj", h, MLP, HIDDEN)?, linear(g, "up_proj", h, MLP, HIDDEN)?);
            let m = g.swiglu(gate, up)?;
            linear(g, "down_proj", m, HIDDEN, MLP)
        })?;
        Ok(vec![g.add(x, m)?])
    })?;
    let embedding = g.weight("model.embed_tokens.weight", Type::tensor(DType::F32, [VOCAB, HIDDEN]))?;
    let tokens = g.step_input("tokens", Type::tensor(DType::I32, [TOKENS]))?;
    let targets = g.step_input("targets", Type::tensor(DType::I32, [TOKENS]))?;
    let mut x = g.gather(embedding, tokens, 0)?;
    for i in 0..2 {
        x = g.scoped(&format!("model.layers.{i}"), |g| g.call(layer, &[x]))?[0];
    }
    let h = norm(&mut g, "model.norm", x)?;
    let logits = g.linear(h, embedding)?;
    let losses = g.cross_entropy(logits, targets)?;
    let sum = total(&mut g, losses)?;
    let count = g.constant(DType::F32, TARGETS)?;
    let loss = g.div(sum, count)?;
    g.finish(vec![("loss".into(), loss)])
}

fn training_step() -> Result<Graph> {
    adamw_step(&llama()?, AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 })
}

fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn f32s(file: &SafeTensors<'_>, name: &str) -> Tensor {
    let tensor = file.tensor(name).unwrap();
    Tensor::from_bytes(DType::F32, tensor.shape(), tensor.data())
}

/// Values of every argument of `graph`: the model and batch of the fixtures, zeros for what is not in them.
fn inputs(graph: &Graph, expected: &SafeTensors<'_>) -> Inputs {
    let bytes = fixture("llama/gqa2_tied/model.safetensors");
    let model = SafeTensors::deserialize(&bytes).unwrap();
    let ints = |shape: &[usize], values: Vec<i64>| Tensor::int(DType::I32, shape, values);
    let each = |value: fn(usize, usize) -> i64| {
        let of = |(seq, len): (usize, &usize)| (0..*len).map(move |i| value(seq, i));
        ints(&[TOKENS], SEQ_LENS.iter().enumerate().flat_map(of).collect())
    };
    let batch = |name: &str| {
        let tensor = expected.tensor(name).unwrap();
        ints(&[TOKENS], Tensor::from_bytes(DType::I64, &[TOKENS], tensor.data()).ints().to_vec())
    };
    let value = |name: &str, ty: &Type| match name {
        "tokens" | "targets" => batch(name),
        "positions" => each(|_, i| i as i64),
        "seq_ids" => each(|seq, _| seq as i64),
        "slots" => each(|seq, i| (seq * BLOCKS * BLOCK_SIZE + i) as i64),
        "block_table" => ints(&[SEQ_LENS.len(), BLOCKS], (0..(SEQ_LENS.len() * BLOCKS) as i64).collect()),
        "lr" => Tensor::float(DType::F32, &[], vec![1e-2]),
        _ if model.tensor(name).is_ok() => f32s(&model, name),
        _ => Tensor::zeros(ty.dtype, &ty.shape.as_const().unwrap()),
    };
    graph.main().args.iter().map(|a| (a.name.to_string(), value(&a.name, &a.ty).into())).collect()
}

/// Torch's float64 run computes rotary tables and norms in f32, so it is no better than some digits of that.
fn assert_close(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut got.iter().zip(expected).map(|(g, e)| g - e)) / norm(&mut expected.iter().copied());
    assert!(got.len() == expected.len() && error < tolerance, "{what}: relative error {error}");
}

#[test]
fn the_first_gradients_are_those_of_torch() {
    let bytes = fixture("training/adamw20.safetensors");
    let expected = SafeTensors::deserialize(&bytes).unwrap();
    let graph = llama().unwrap();
    let weights = float_weights(&graph);
    assert_eq!(weights.len(), 20);
    let with_gradient = gradient(&graph, "loss", &weights).unwrap();
    let outputs = run(&with_gradient, &inputs(&graph, &expected), &Bindings::new()).unwrap();
    for name in weights.iter().map(|w| format!("grad.{w}")) {
        assert_close(&name, &floats(&outputs, &name), f32s(&expected, &name).floats(), 1e-6);
    }
}

#[test]
fn twenty_adamw_steps_end_where_torch_ends() {
    let bytes = fixture("training/adamw20.safetensors");
    let expected = SafeTensors::deserialize(&bytes).unwrap();
    let step = training_step().unwrap();
    let mut values = inputs(&step, &expected);
    let mut losses = Vec::new();
    for count in 1..=20 {
        for (name, value) in &mut values {
            if name == "step" {
                *value = Tensor::float(DType::F32, &[], vec![f64::from(count)]).into();
            }
        }
        let outputs = run(&step, &values, &Bindings::new()).unwrap();
        losses.extend(floats(&outputs, "loss"));
        for (name, new) in outputs {
            if let Some((_, value)) = values.iter_mut().find(|(n, _)| *n == name) {
                *value = new;
            }
        }
    }
    let recorded = expected.tensor("losses_f64").unwrap();
    let recorded: Vec<f64> = recorded.data().as_chunks::<8>().0.iter().map(|c| f64::from_le_bytes(*c)).collect();
    assert_close("losses", &losses, &recorded, 1e-6);
    for arg in step.args(Role::State).filter(|a| a.name.starts_with("model.") && a.name.ends_with("weight")) {
        let last = f32s(&expected, &format!("final.{}", arg.name));
        assert_close(&arg.name, &floats(&values, &arg.name), last.floats(), 1e-5);
    }
}

#[test]
fn each_half_of_the_layer_is_there_once() {
    let step = training_step().unwrap();
    let calls = |name: &str| {
        let is = |op: &Op| matches!(op, Op::Call(f) if &*step.function(*f).name == name);
        step.main().nodes.iter().filter(|n| is(&n.op)).count()
    };
    assert_eq!((step.functions.len(), calls("decoder_layer_fwd"), calls("decoder_layer_bwd")), (3, 2, 2));
}
