//! Times a training step of random weights: loss, gradients and AdamW.
//!
//! ```text
//! cargo run --release -p ridge-models --example training_step -- gpt2 --sequences 4 --context 256 --dtype bf16 --trace
//! ```
//!
//! Models: `gpt2` (124M, vocabulary 50304), `nano` (4 layers x 128, characters), `llama` (1.14B). With `--dtype bf16`
//! forward and backward run on bf16 copies of f32 masters, which the optimiser writes. `--trace` shows where a step's time
//! goes, by kernel.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_cuda::{Cuda, CudaOptions};
use ridge_graph::grad::{Differentiated, float_weights};
use ridge_graph::ops::AdamW;
use ridge_graph::passes::{group_linears, prune, retype};
use ridge_graph::{Bindings, DType, Graph, Role, Shape, Tensor, Type};
use ridge_models::{BuildOptions, ModelConfig, symbols};
use ridge_runtime::{Backend, Session};

const GPT2: &str = r#"{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50304, "n_embd": 768,
    "n_layer": 12, "n_head": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-5}"#;
const NANO: &str = r#"{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 65, "n_embd": 128,
    "n_layer": 4, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 1e-5}"#;
const LLAMA: &str = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": false, "rope_theta": 10000.0}"#;

const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

struct Arguments {
    model: String,
    sequences: usize,
    context: usize,
    steps: usize,
    dtype: DType,
    device: String,
    /// Of the CPU: as many as there are cores, if `None`.
    threads: Option<usize>,
    trace: bool,
}

fn arguments() -> Result<Arguments, Box<dyn Error>> {
    let mut all = Arguments {
        model: "gpt2".into(),
        sequences: 4,
        context: 256,
        steps: 5,
        dtype: DType::F32,
        device: "cpu".into(),
        threads: None,
        trace: false,
    };
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        if name == "--trace" {
            all.trace = true;
            continue;
        }
        let mut value = || given.next().ok_or_else(|| format!("{name} takes a value"));
        match name.as_str() {
            "--sequences" => all.sequences = value()?.parse()?,
            "--context" => all.context = value()?.parse()?,
            "--steps" => all.steps = value()?.parse()?,
            "--device" => all.device = value()?,
            "--threads" => all.threads = Some(value()?.parse()?),
            "--dtype" => all.dtype = if value()? == "bf16" { DType::BF16 } else { DType::F32 },
            model => all.model = model.to_owned(),
        }
    }
    Ok(all)
}

/// A step of AdamW on the masters of all weights, which are the weights themselves in f32.
fn step(loss: &Graph, masters: bool) -> Result<Graph, Box<dyn Error>> {
    let mut step = Differentiated::training(loss, "loss", &float_weights(loss))?;
    let scalar = Type::tensor(DType::F32, Shape::default());
    let lr = step.g.step_input("lr", scalar.clone())?;
    let count = step.g.step_input("step", scalar)?;
    let one = step.g.constant(DType::F32, 1.0)?;
    for p in step.parameters.clone() {
        let ty = Type { state: true, ..step.g.ty(p.value)?.clone() };
        let wide = Type { dtype: DType::F32, ..ty.clone() };
        let copy = if masters { Some(step.g.state(&p.name, ty)?) } else { None };
        let master = if masters { format!("master.{}", p.name) } else { p.name.clone() };
        let names = [master, format!("adamw.m.{}", p.name), format!("adamw.v.{}", p.name)];
        let states = names.map(|name| step.g.state(&name, wide.clone()));
        let [param, m, v] = states;
        step.g.adamw_update([param?, m?, v?], copy, p.gradient, [lr, count, one], ADAMW)?;
    }
    Ok(step.finish(Vec::new())?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let a = arguments()?;
    let text = match a.model.as_str() {
        "gpt2" => GPT2.to_owned(),
        "nano" => NANO.to_owned(),
        "llama" => LLAMA.to_owned(),
        path => std::fs::read_to_string(path)?,
    };
    let config = ModelConfig::from_json("config.json", &text)?;
    let module = config.build_training(&BuildOptions { activations: a.dtype, ..BuildOptions::default() })?;
    let parameters = module.parameter_count();
    let mut loss = module.graph;
    prune(&mut loss, &["loss"])?;
    group_linears(&mut loss);
    let masters = a.dtype != DType::F32;
    if masters {
        loss = retype(&loss, &|_, ty| Some(Type { dtype: a.dtype, ..ty.clone() }))?;
    }
    let graph = step(&loss, masters)?;

    let backend: Arc<dyn Backend> = match a.device.as_str() {
        "cpu" => Arc::new(Cpu::new(CpuOptions { threads: a.threads, ..CpuOptions::default() })?),
        _ => Arc::new(Cuda::new(CudaOptions::default())?),
    };
    let mut session = Session::new(backend);
    session.allocate_states(&graph, &Bindings::new())?;
    // Weights of 0.02, and the same in their masters.
    for (index, arg) in loss.args(Role::Weight).enumerate() {
        let shape = arg.ty.shape.as_const().ok_or("a weight of a symbolic shape")?;
        let count: usize = shape.iter().product();
        let norm = shape.len() == 1 && arg.name.ends_with("weight");
        let values: Vec<f64> = (0..count).map(|i| if norm { 1.0 } else { noise(i, index) }).collect();
        let mut names = vec![(arg.name.to_string(), arg.ty.dtype)];
        if masters {
            names.push((format!("master.{}", arg.name), DType::F32));
        }
        for (name, dtype) in names {
            let buffer = session.state(&name).ok_or("no such state")?;
            session.backend().write(&buffer, &Tensor::float(dtype, &shape, values.clone()).rounded().to_bytes())?;
        }
    }
    let tokens = a.sequences * a.context;
    let compiled = session.compile(&graph, &["loss"])?;
    let mut bucket = compiled.bucket(&Bindings::new().with(symbols::TOKENS, tokens))?;
    let vocab = config.vocab_size as i64;
    let ints = |f: &dyn Fn(i64) -> i64| Tensor::int(DType::I32, &[tokens], (0..tokens as i64).map(f).collect());
    let context = a.context as i64;
    bucket.set("token_ids", &ints(&|i| (i * 7919 + i / 3) % vocab))?;
    bucket.set("targets", &ints(&|i| ((i + 1) * 7919 + (i + 1) / 3) % vocab))?;
    bucket.set("positions", &ints(&|i| i % context))?;
    bucket.set("seq_ids", &ints(&|i| i / context))?;
    let mut best = f64::INFINITY;
    for count in 1..=a.steps {
        bucket.set("lr", &Tensor::float(DType::F32, &[], vec![3e-4]))?;
        bucket.set("step", &Tensor::float(DType::F32, &[], vec![count as f64]))?;
        let begin = Instant::now();
        bucket.submit()?;
        bucket.wait()?;
        let seconds = begin.elapsed().as_secs_f64();
        best = best.min(seconds);
        println!("step {count}: loss {:.4}, {:.1} ms", bucket.tensor("loss")?.floats()[0], seconds * 1e3);
    }
    let flops = 6.0 * parameters as f64 * tokens as f64;
    println!(
        "{parameters} parameters, {tokens} tokens: {:.1} ms, {:.0} tokens/s, {:.0} GFLOP/s of 6 N",
        best * 1e3,
        tokens as f64 / best,
        flops / best / 1e9
    );
    if a.trace {
        let lowered = compiled.graph();
        let mut by_name: BTreeMap<String, (usize, f64)> = BTreeMap::new();
        for launch in bucket.timed()? {
            let function = lowered.function(launch.func);
            let node = &function.nodes[launch.node];
            let shapes: Vec<String> = node.outputs.iter().map(ToString::to_string).collect();
            let of = by_name.entry(format!("{} -> {}", node.op_name(), shapes.join(", "))).or_default();
            of.0 += 1;
            of.1 += launch.seconds;
        }
        let mut all: Vec<_> = by_name.into_iter().collect();
        all.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
        for (name, (count, seconds)) in all.into_iter().take(45) {
            println!("{:9.2} ms {count:5} x {name}", seconds * 1e3);
        }
    }
    Ok(())
}

/// Roughly normal numbers of standard deviation 0.02.
fn noise(i: usize, seed: usize) -> f64 {
    let mut x =
        (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (seed as u64 + 1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mut sum = 0.0;
    for _ in 0..3 {
        x ^= x >> 31;
        x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
        sum += (x >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
    }
    0.04 * sum
}
