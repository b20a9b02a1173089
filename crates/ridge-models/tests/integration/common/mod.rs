//! The models of `fixtures/llama` and `fixtures/families`, and steps of a paged cache to run them on: by evaluation or on the CPU.

pub(crate) mod mesh;
pub(crate) mod modules;
mod training;

pub(crate) use training::{STEPS, TrainingBatch};

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ridge_cpu::{Cpu, CpuOptions};
use ridge_files::Checkpoint;
use ridge_graph::grad::{Differentiated, float_weights};
use ridge_graph::ops::AdamW;
use ridge_graph::{
    Arg, Bindings, DType, Graph, GraphError, Precision, Role, Shape, Tensor, Type, Value, conformance, evaluate, passes,
};
use ridge_models::{
    BuildOptions, Model, ModelConfig, ModelFiles, STATE_LINES, WeightSource, block_table_name, has_fixed_state,
    symbols, windows, with_blocks, with_loss,
};
use ridge_runtime::{Backend, Compiled, Session, lower};
use safetensors::SafeTensors;

/// Every Llama.
pub(crate) const ALL: [&str; 6] =
    ["mha_untied", "gqa2_tied", "gqa8_llama3_rope", "odd_head_dim", "bf16_sharded", "biased"];

/// Every decoder, with the context that it is built for: the whole sequence where frequencies depend on it.
pub(crate) const FAMILIES: &[(&str, Option<usize>)] = &[
    ("bamba", None),
    ("bloom", None),
    ("cohere", None),
    ("cohere2", None),
    ("deepseek_v2", None),
    ("deepseek_v2_groups", None),
    ("deepseek_v3", None),
    ("deepseek_v32", None),
    ("exaone4", None),
    ("falcon", None),
    ("falcon_h1", None),
    ("falcon_h1_plain", None),
    ("falcon_mamba", None),
    ("falcon_rw", None),
    ("gemma2", None),
    ("gemma3", None),
    ("gemma3n", None),
    ("gemma3n_four", None),
    ("gemma4", None),
    ("gemma4_dense", None),
    ("gemma4_moe", None),
    ("gla", None),
    ("glm", None),
    ("glm4", None),
    ("glm4_moe", None),
    ("glm_moe_dsa", None),
    ("gpt2", None),
    ("gpt_neox", None),
    ("gpt_oss", None),
    ("gpt_oss_mxfp4", None),
    ("granite", None),
    ("granitemoe", None),
    ("granitemoehybrid", None),
    ("granitemoehybrid_dense", None),
    ("granitemoeshared", None),
    ("hyena", None),
    ("jamba", None),
    ("lfm2", None),
    ("linear_attn", None),
    ("linear_attn_elu", None),
    ("llama4", None),
    ("llama_dynamic", Some(24)),
    ("llama_linear", None),
    ("llama_yarn", None),
    ("llama_yarn_mscale", None),
    ("mamba", None),
    ("mamba2", None),
    ("minimax_m2", None),
    ("mistral", None),
    ("mixtral", None),
    ("mpt", None),
    ("nemotron_h", None),
    ("olmo2", None),
    ("olmo3", None),
    ("olmoe", None),
    ("phi3", None),
    ("phi3_longrope", None),
    ("qwen2", None),
    ("qwen2_moe", None),
    ("qwen3", None),
    ("qwen3_moe", None),
    ("qwen3_5", None),
    ("qwen3_5_moe", None),
    ("qwen3_next", None),
    ("retnet", None),
    ("rwkv4", None),
    ("rwkv6", None),
    ("rwkv7", None),
    ("smollm3", None),
    ("stablelm", None),
    ("stablelm_parallel", None),
    ("starcoder2", None),
    ("zamba2", None),
    ("zamba2_plain", None),
];

/// Tokens of a block of the cache: not a divisor of anything else here.
pub(crate) const BLOCK_SIZE: usize = 5;
/// Blocks of the cache, and columns of its table.
pub(crate) const BLOCKS: usize = 13;
pub(crate) const TABLE: usize = 6;

pub(crate) fn fixtures() -> PathBuf {
    // A bundle of tests brings its own.
    std::env::var_os("RIDGE_FIXTURES")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures"), PathBuf::from)
}

/// Tensors of a safetensors file, f64 ones too.
pub(crate) struct Expected(Vec<u8>);

impl Expected {
    pub(crate) fn open(path: &str) -> Self {
        let path = fixtures().join(path);
        Self(std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }

    /// Float tensors as f32, those of f64 unrounded; integers as i64.
    pub(crate) fn tensor(&self, name: &str) -> Tensor {
        let file = SafeTensors::deserialize(&self.0).expect("a fixture");
        let view = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        let shape = view.shape();
        match view.dtype() {
            safetensors::Dtype::F64 => {
                let values = view.data().as_chunks::<8>().0.iter().map(|c| f64::from_le_bytes(*c)).collect();
                Tensor::float(DType::F32, shape, values)
            }
            safetensors::Dtype::F32 => Tensor::from_bytes(DType::F32, shape, view.data()),
            safetensors::Dtype::I64 => Tensor::from_bytes(DType::I64, shape, view.data()),
            other => panic!("{name} is {other:?}"),
        }
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        SafeTensors::deserialize(&self.0).expect("a fixture").tensor(name).is_ok()
    }

    pub(crate) fn tokens(&self, name: &str) -> Vec<i64> {
        self.tensor(name).ints().to_vec()
    }
}

/// How the models of tests are built.
pub(crate) fn options() -> BuildOptions {
    BuildOptions { block_size: BLOCK_SIZE, ..BuildOptions::default() }
}

/// A fixture's model, its weights stored as the checkpoint has them.
pub(crate) struct Fixture {
    pub(crate) name: &'static str,
    pub(crate) config: ModelConfig,
    pub(crate) model: Model,
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) expected: Expected,
}

impl Fixture {
    pub(crate) fn open(name: &'static str) -> Self {
        Self::with(name, DType::F32)
    }

    /// With activations and cache of `activations`.
    pub(crate) fn with(name: &'static str, activations: DType) -> Self {
        Self::built(name, "llama", BuildOptions { activations, cache: activations, ..options() })
    }

    /// One of `fixtures/families`, built for contexts of at most `context` tokens if that is given.
    pub(crate) fn family(name: &'static str, context: Option<usize>) -> Self {
        Self::family_in(name, context, DType::F32)
    }

    /// The same with activations and cache of `activations`.
    pub(crate) fn family_in(name: &'static str, context: Option<usize>, activations: DType) -> Self {
        Self::built(name, "families", BuildOptions { context, activations, cache: activations, ..options() })
    }

    /// One of `fixtures/prediction`, with this many drafts.
    pub(crate) fn predicting(name: &'static str, drafts: usize) -> Self {
        Self::built(name, "prediction", BuildOptions { drafts, ..options() })
    }

    /// One of `fixtures/families` as the model at `path` has it.
    pub(crate) fn family_at(name: &'static str, path: &Path) -> Self {
        Self::of_files(name, "families", &ModelFiles::open(Some(path)).expect("a model"), options())
    }

    fn built(name: &'static str, kind: &str, options: BuildOptions) -> Self {
        let files = ModelFiles::open(Some(&fixtures().join(kind).join(name))).expect("a model");
        Self::of_files(name, kind, &files, options)
    }

    fn of_files(name: &'static str, kind: &str, files: &ModelFiles, options: BuildOptions) -> Self {
        let config = files.config().unwrap_or_else(|e| panic!("{e}"));
        let mut model = config.build(&options).unwrap_or_else(|e| panic!("{name}: {e}"));
        let checkpoint = config.arrange_for(files.checkpoint().expect("its weights"), &options).expect("divides");
        let checkpoint = Arc::new(checkpoint);
        let source = WeightSource::Checkpoint(Arc::clone(&checkpoint));
        model.store(&source, None).unwrap_or_else(|e| panic!("{name}: {e}"));
        let expected = Expected::open(&format!("{kind}/{name}/expected.safetensors"));
        Self { name, config, model, checkpoint, expected }
    }

    /// The graph for `outputs` alone.
    pub(crate) fn graph(&self, outputs: &[&str]) -> Graph {
        let mut graph = self.model.graph.clone();
        passes::prune(&mut graph, outputs).expect("has them");
        graph
    }

    pub(crate) fn weight(&self, name: &str) -> Option<Value> {
        let view = self.checkpoint.tensor(name).ok()?;
        let Some(format) = view.format else {
            return Some(Tensor::from_bytes(view.dtype, view.shape, view.data).into());
        };
        let parts = self.checkpoint.components(name).ok()?;
        let of = format.components(&Shape::new(view.shape.iter().copied()));
        let components = of.iter().zip(&parts).map(|(component, bytes)| {
            let shape = component.shape.as_const().expect("numbers");
            Tensor::from_bytes(component.dtype, &shape, bytes.as_ref())
        });
        let (format, shape) = (format.clone(), view.shape.to_vec());
        Some(Value::Stored { format, dtype: view.dtype, shape, components: components.collect() })
    }

    pub(crate) fn prompt(&self) -> Vec<i64> {
        self.expected.tokens("input_ids")
    }
}

/// A sequence of a test: its tokens, how many of them are in the cache, and the blocks that it owns.
#[derive(Clone)]
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<i64>,
    pub(crate) cached: usize,
    pub(crate) blocks: Vec<i64>,
    /// The lines that its fixed-size states take in turn, the one that is read first, if there is something to read.
    lines: [i64; 2],
}

impl Sequence {
    /// Nothing cached yet, in these blocks.
    pub(crate) fn new(tokens: &[i64], blocks: &[i64]) -> Self {
        Self { tokens: tokens.to_vec(), cached: 0, blocks: blocks.to_vec(), lines: [blocks[0], blocks[1]] }
    }
}

/// Blocks in an order that no formula gives, for two sequences of 30 tokens.
pub(crate) const SHUFFLED: [[i64; TABLE]; 2] = [[7, 0, 12, 3, 9, 5], [2, 11, 4, 8, 1, 10]];

/// Inputs of one step that processes the next `counts[i]` tokens of sequence `i`, which are then in its cache, of a model
/// without fixed-size states.
pub(crate) fn step(sequences: &mut [Sequence], counts: &[usize]) -> (Vec<(String, Tensor)>, Bindings) {
    let (mut inputs, bindings) = step_with_lines(sequences, counts);
    inputs.retain(|(name, _)| name != STATE_LINES);
    (inputs, bindings)
}

/// The same with the lines of fixed-size states.
fn step_with_lines(sequences: &mut [Sequence], counts: &[usize]) -> (Vec<(String, Tensor)>, Bindings) {
    let (mut ids, mut rows, mut starts) = (Vec::new(), Vec::new(), vec![0]);
    let lengths: Vec<i64> = sequences.iter().map(|s| s.cached as i64).collect();
    let (mut table, mut lines) = (Vec::new(), Vec::new());
    for (row, (s, count)) in sequences.iter_mut().zip(counts).enumerate() {
        ids.extend(&s.tokens[s.cached..s.cached + count]);
        rows.extend(vec![row as i64; *count]);
        starts.push(ids.len() as i64);
        // A sequence starts from zeros, whatever its lines hold.
        lines.extend([if s.cached == 0 { -1 } else { s.lines[0] }, s.lines[1]]);
        s.lines.reverse();
        s.cached += count;
        // Only the blocks that are needed by now.
        let used = s.cached.div_ceil(BLOCK_SIZE);
        table.extend((0..TABLE).map(|i| if i < used { s.blocks[i] } else { -1 }));
    }
    let seqs = sequences.len();
    let i32s =
        |name: &str, shape: &[usize], values: Vec<i64>| (name.to_owned(), Tensor::int(DType::I32, shape, values));
    let bindings = Bindings::new()
        .with(symbols::TOKENS, ids.len())
        .with(symbols::SEQS, seqs)
        .with(symbols::TABLE, TABLE)
        .with(symbols::BLOCKS, BLOCKS)
        .with(symbols::STATE_LINES, BLOCKS);
    let inputs = vec![
        i32s("token_ids", &[ids.len()], ids.clone()),
        i32s("seq_ids", &[rows.len()], rows),
        i32s("query_start", &[seqs + 1], starts),
        i32s("lengths", &[seqs], lengths),
        i32s("block_table", &[seqs, TABLE], table),
        i32s(STATE_LINES, &[seqs, 2], lines),
    ];
    (inputs, bindings)
}

/// Inputs of such a step for `graph`, whose windows have the same blocks.
pub(crate) fn step_of(
    graph: &Graph,
    sequences: &mut [Sequence],
    counts: &[usize],
) -> (Vec<(String, Tensor)>, Bindings) {
    let (mut inputs, bindings) = step_with_lines(sequences, counts);
    if !has_fixed_state(graph) {
        inputs.retain(|(name, _)| name != STATE_LINES);
    }
    let table = find(&inputs, "block_table").cloned().expect("is an input");
    inputs.extend(windows(graph).into_iter().map(|window| (block_table_name(Some(window)), table.clone())));
    (inputs, with_blocks(graph, bindings, BLOCKS))
}

/// Looks up a value by name.
pub(crate) fn find<'a, T>(values: &'a [(String, T)], name: &str) -> Option<&'a T> {
    values.iter().find(|(n, _)| n == name).map(|(_, v)| v)
}

/// Zeros of a state's type.
pub(crate) fn empty_state(arg: &Arg, bindings: &Bindings) -> Value {
    Tensor::zeros(arg.ty.dtype, &arg.ty.shape.eval(bindings).expect("bound")).into()
}

/// A model run by evaluation, with its states from step to step.
pub(crate) struct Evaluated<'a> {
    fixture: &'a Fixture,
    graph: Graph,
    precision: Precision,
    states: Vec<(String, Value)>,
}

impl<'a> Evaluated<'a> {
    pub(crate) fn new(fixture: &'a Fixture, precision: Precision) -> Self {
        Self { fixture, graph: fixture.graph(&["all_logits"]), precision, states: Vec::new() }
    }

    /// Exactly, after the passes of a backend with these kernels.
    pub(crate) fn lowered(fixture: &'a Fixture, kernels: &[passes::Kernel]) -> Self {
        let graph = lower(&fixture.model.graph, &["all_logits"], kernels).expect("lowers");
        Self { fixture, graph, precision: Precision::Exact, states: Vec::new() }
    }

    /// Logits of the step's tokens.
    pub(crate) fn run(&mut self, sequences: &mut [Sequence], counts: &[usize]) -> Tensor {
        let (inputs, bindings) = step_of(&self.graph, sequences, counts);
        let value = |arg: &Arg| match arg.role {
            Role::Weight => self.fixture.weight(&arg.name),
            Role::State => Some(find(&self.states, &arg.name).cloned().unwrap_or_else(|| empty_state(arg, &bindings))),
            _ => find(&inputs, &arg.name).cloned().map(Value::from),
        };
        let mut outputs = evaluate(&self.graph, &value, &bindings, self.precision).expect("evaluates");
        self.states = outputs.split_off(1);
        outputs[0].1.tensor().clone()
    }
}

/// A model run on the CPU, its states on the device.
pub(crate) struct OnCpu {
    pub(crate) session: Session,
    compiled: Compiled,
}

impl OnCpu {
    pub(crate) fn new(fixture: &Fixture, threads: usize) -> Self {
        let cpu = Cpu::new(CpuOptions { threads: Some(threads), ..CpuOptions::default() }).expect("starts");
        Self::with(fixture, Arc::new(cpu))
    }

    pub(crate) fn with(fixture: &Fixture, backend: Arc<dyn Backend>) -> Self {
        let mut session = Session::new(backend);
        let source = WeightSource::Checkpoint(Arc::clone(&fixture.checkpoint));
        source.load(&mut session, &fixture.model.graph, |_| ()).expect("loads");
        let lines = Bindings::new().with(symbols::STATE_LINES, BLOCKS);
        let blocks = with_blocks(&fixture.model.graph, lines, BLOCKS);
        session.allocate_states(&fixture.model.graph, &blocks).expect("fits");
        let compiled = session.compile(&fixture.model.graph, &["all_logits"]).expect("compiles");
        Self { session, compiled }
    }

    /// Logits of the step's tokens.
    pub(crate) fn run(&mut self, sequences: &mut [Sequence], counts: &[usize]) -> Tensor {
        let (inputs, bindings) = step_of(self.compiled.graph(), sequences, counts);
        let mut bucket = self.compiled.bucket(&bindings).unwrap_or_else(|e| panic!("{e}"));
        for (name, tensor) in &inputs {
            bucket.set(name, tensor).expect("fits");
        }
        bucket.submit().expect("runs");
        bucket.wait().expect("completes");
        bucket.tensor("all_logits").expect("asked for")
    }
}

/// Logits of the prompt by plain implementations in the graph's own precision, which sum in different orders.
pub(crate) fn plain_logits(fixture: &Fixture) -> Vec<Tensor> {
    let tokens = fixture.prompt();
    let by = |precision| {
        let mut sequence = [Sequence::new(&tokens, &SHUFFLED[0])];
        Evaluated::new(fixture, precision).run(&mut sequence, &[tokens.len()])
    };
    let orders = (1..4).map(Precision::Reordered);
    [Precision::Rounded].into_iter().chain(orders).map(by).collect()
}

/// Holds `got` to the rule of tolerance: each row beside the largest error that torch and other plain implementations
/// make in it, and all rows together beside torch alone, whose luck with one row does not show there. Gives the share
/// of what torch alone allows.
pub(crate) fn judge(what: &str, got: &Tensor, torch: &Tensor, others: &[Tensor], exact: &Tensor) -> f64 {
    let plains: Vec<&Tensor> = [torch].into_iter().chain(others).collect();
    conformance::near(got, &plains, exact).unwrap_or_else(|why| panic!("{what}{why}"));
    let one_row = |t: &Tensor| Tensor { shape: vec![t.len()], ..t.clone() };
    let (got, torch, exact) = (one_row(got), one_row(torch), one_row(exact));
    conformance::near(&got, &[&torch], &exact).unwrap_or_else(|why| panic!("{what}, all rows{why}"))
}

/// Rows `range` of a matrix.
pub(crate) fn rows(tensor: &Tensor, range: std::ops::Range<usize>) -> Tensor {
    let width = tensor.shape[1];
    let values = tensor.floats()[range.start * width..range.end * width].to_vec();
    Tensor::float(tensor.dtype, &[range.len(), width], values)
}

/// Matrices below each other.
pub(crate) fn stack(parts: &[Tensor]) -> Tensor {
    let values: Vec<f64> = parts.iter().flat_map(|p| p.floats().to_vec()).collect();
    let rows = parts.iter().map(|p| p.shape[0]).sum();
    Tensor::float(parts[0].dtype, &[rows, parts[0].shape[1]], values)
}

/// The Euclidean norm of the difference, as a share of that of `want`.
pub(crate) fn relative(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut got.iter().zip(want).map(|(g, w)| g - w)) / norm(&mut want.iter().copied())
}

/// The mean loss over a batch's targets, as the one output of the model's own graph.
pub(crate) fn loss_graph(fixture: &Fixture) -> Graph {
    let mut graph = with_loss(&fixture.model.graph).expect("has logits");
    passes::prune(&mut graph, &["loss"]).expect("has it");
    graph
}

/// The optimiser of `fixtures/training.py`.
pub(crate) const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };

/// A training step: the loss, and updates of all weights and their moments, which are states.
pub(crate) fn training_step(loss: &Graph) -> Result<Graph, GraphError> {
    let mut step = Differentiated::training(loss, "loss", &float_weights(loss))?;
    let scalar = Type::tensor(DType::F32, Shape::default());
    let (lr, count) = (step.g.step_input("lr", scalar.clone())?, step.g.step_input("step", scalar)?);
    for p in step.parameters.clone() {
        let ty = step.g.ty(p.value)?.clone();
        let names = [p.name.clone(), format!("adamw.m.{}", p.name), format!("adamw.v.{}", p.name)];
        let (m, v) = (step.g.state(&names[1], ty.clone())?, step.g.state(&names[2], ty)?);
        let (m, v) = (step.g.state_read(m)?, step.g.state_read(v)?);
        let next = step.g.composite(ADAMW, &[p.value, p.gradient, m, v, lr, count])?;
        for (name, value) in names.iter().zip(next) {
            step.update(name, value)?;
        }
    }
    step.finish(Vec::new())
}

/// A CPU of this many threads, with poisoned memory.
pub(crate) fn cpu(threads: usize) -> Arc<dyn Backend> {
    let options = CpuOptions { threads: Some(threads), poison: true, ..CpuOptions::default() };
    Arc::new(Cpu::new(options).expect("starts"))
}
