//! What every family gives: a graph, and what the engine must know to run it.

use ridge_graph::{Builder, DType, Dim, Graph, Result as GraphResult, Shape, Sym, Type, Var};

/// How a model's graph is to be built. Storage of weights is not here: that is a rewrite of the graph, see
/// `weights.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildOptions {
    /// Dtype of activations.
    pub activations: DType,
    /// Dtype of keys and values in the cache.
    pub cache: DType,
    /// Tokens of one cache block.
    pub block_size: usize,
    /// The longest context that the model will run, in tokens; the longest that it was made for if `None`. Scalings of
    /// rotary frequencies that depend on the context take it from here.
    pub context: Option<usize>,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self { activations: DType::F32, cache: DType::F32, block_size: 16, context: None }
    }
}

/// A group of layers that keep the same thing from step to step. The cache manager knows groups and blocks, never
/// keys or values, so every kind of attention is the same to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateGroup {
    /// Names of the graph's states that belong to it, one a layer.
    pub states: Vec<String>,
    /// Bytes that one token takes in all of them together.
    pub bytes_per_token: usize,
    /// Only the last this many tokens are ever read; all of them if `None`.
    pub window: Option<usize>,
}

/// A model ready to be compiled.
#[derive(Clone, Debug)]
pub struct Model {
    /// Family, such as `llama`.
    pub family: &'static str,
    /// The graph; its step inputs and outputs are those that [`StepInputs`] and [`finish_decoder`] name.
    pub graph: Graph,
    /// What it keeps between steps.
    pub state_groups: Vec<StateGroup>,
    /// Tokens of one cache block.
    pub block_size: usize,
    /// Longest context it was made for.
    pub max_context: usize,
    /// Rows of its output.
    pub vocab_size: usize,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
}

/// Symbols of a step's extents.
pub mod symbols {
    /// Tokens that the step processes, over all sequences.
    pub const TOKENS: &str = "tokens";
    /// Rows of the sequence tables.
    pub const SEQS: &str = "seqs";
    /// Blocks of the cache.
    pub const BLOCKS: &str = "blocks";
    /// Columns of the block table: the most blocks of a sequence.
    pub const TABLE: &str = "table";
    /// (query, key) pairs of the step: an extent of no tensor, for costs.
    pub const PAIRS: &str = "pairs";
    /// Tokens that the step reads from the cache: an extent of no tensor, for costs.
    pub const CACHED: &str = "cached";
}

/// The inputs of a decoder's step. Each running sequence owns a row of the tables; what a token's position and slot
/// are, the graph works out from them.
#[derive(Clone, Copy, Debug)]
pub struct StepInputs {
    /// I32 `[tokens]`: the tokens, those of one sequence together and in order.
    pub token_ids: Var,
    /// I32 `[tokens]`: row of the tables that each token belongs to; negative for padding.
    pub seq_ids: Var,
    /// I32 `[seqs + 1]`: where each row's tokens begin in this step, and where the last one's end.
    pub query_start: Var,
    /// I32 `[seqs]`: tokens in the cache before this step.
    pub lengths: Var,
    /// I32 `[seqs, table]`: the blocks of each sequence, in order; negative where there is none.
    pub block_table: Var,
}

impl StepInputs {
    /// Asks for them in the function being built.
    ///
    /// # Errors
    /// When a function before asked for one with another type.
    pub fn ask(g: &mut Builder) -> GraphResult<Self> {
        let (tokens, seqs) = (Dim::sym(symbols::TOKENS), Dim::sym(symbols::SEQS));
        let i32s = |shape: Shape| Type::tensor(DType::I32, shape);
        Ok(Self {
            token_ids: g.step_input("token_ids", i32s([&tokens].into()))?,
            seq_ids: g.step_input("seq_ids", i32s([&tokens].into()))?,
            query_start: g.step_input("query_start", i32s([seqs.clone() + 1].into()))?,
            lengths: g.step_input("lengths", i32s([&seqs].into()))?,
            block_table: g.step_input("block_table", i32s([seqs, Dim::sym(symbols::TABLE)].into()))?,
        })
    }
}

/// The type of one layer's paged keys and values.
pub fn paged_kv(kv_heads: usize, head_dim: usize, options: &BuildOptions) -> Type {
    let (heads, block, dim) = (kv_heads.into(), options.block_size.into(), head_dim.into());
    Type::state(options.cache, Shape(vec![Dim::sym(symbols::BLOCKS), 2.into(), heads, block, dim]))
}

/// Symbols that the cost of attention is told in: (query, key) pairs, and tokens read from the cache. Those within a
/// window are fewer, and have symbols of their own.
pub fn attention_symbols(window: Option<usize>) -> (Sym, Sym) {
    match window {
        None => (Sym::new(symbols::PAIRS), Sym::new(symbols::CACHED)),
        Some(window) => {
            let within = |name: &str| Sym::new(&format!("{name}_within_{window}"));
            (within(symbols::PAIRS), within(symbols::CACHED))
        }
    }
}

/// Ends a decoder's graph from its last hidden states `[tokens, hidden]`, with the outputs that compilation chooses
/// from:
/// - `all_logits`: f32 `[tokens, vocab]`;
/// - `logits`: f32 `[seqs, vocab]`, of each row's last token;
/// - `next`: i32 `[seqs]`, sampled from `logits` by each row's `temperature`, `top_k`, `top_p`, `seed` and `sequence`,
///   keyed by the position that the token will have.
///
/// # Errors
/// Those of `head`, which maps hidden states to logits.
pub fn finish_decoder(
    mut g: Builder,
    hidden: Var,
    step: &StepInputs,
    positions: Var,
    head: impl Fn(&mut Builder, Var) -> GraphResult<Var>,
) -> GraphResult<Graph> {
    let seqs = Dim::sym(symbols::SEQS);
    let all_logits = head(&mut g, hidden)?;
    let all_logits = g.cast(all_logits, DType::F32)?;

    let ends = g.slice(step.query_start, 0, 1, &seqs)?;
    let one = g.constant(DType::I32, 1.0)?;
    let last = g.sub(ends, one)?;
    let last_hidden = g.gather(hidden, last, 0)?;
    let logits = head(&mut g, last_hidden)?;
    let logits = g.cast(logits, DType::F32)?;

    let row = |dtype| Type::tensor(dtype, [&seqs]);
    let temperature = g.step_input("temperature", row(DType::F32))?;
    let top_k = g.step_input("top_k", row(DType::I32))?;
    let top_p = g.step_input("top_p", row(DType::F32))?;
    let seed = g.step_input("seed", row(DType::I64))?;
    let sequence = g.step_input("sequence", row(DType::I64))?;
    let position = g.gather(positions, last, 0)?;
    let position = g.add(position, one)?;
    let position = g.cast(position, DType::I64)?;
    let next = g.scoped("sample", |g| g.sample_token(logits, temperature, top_k, top_p, seed, sequence, position))?;
    g.finish(vec![("all_logits".into(), all_logits), ("logits".into(), logits), ("next".into(), next)])
}
