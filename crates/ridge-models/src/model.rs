//! What every family gives: a graph, and what the engine must know to run it.

use std::collections::BTreeSet;

use crate::module::{Module, StateGroup};
use ridge_graph::ops::PagedAttention;
use ridge_graph::passes::{Activations, fetch_weights, round_activations};
use ridge_graph::{
    Arg, Bindings, Builder, Cost, DType, Dim, Graph, Op, Result as GraphResult, Role, Shape, Sym, Type, Var,
};

/// How a model's graph is to be built. Storage of weights is not here: that is a rewrite of the graph, see
/// `weights.rs`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BuildOptions {
    /// Dtype of activations.
    pub activations: DType,
    /// Dtype of keys and values in the cache: a float, or i8 for codes with a scale for each key and value of each head.
    pub cache: DType,
    /// Tokens of one cache block.
    pub block_size: usize,
    /// The longest context that the model will run, in tokens; the longest that it was made for if `None`. Scalings of
    /// rotary frequencies that depend on the context take it from here.
    pub context: Option<usize>,
    /// Factor of the z-loss of a training graph, the square of the logarithm of each token's sum of exponentials; 0 for
    /// none.
    pub z_loss: f64,
    /// Tokens that the model's prediction module drafts in each step, for speculative decoding; 0 leaves the module out.
    pub drafts: usize,
    /// Is attention over a cache told which tokens are of a prompt
    /// ([`PagedAttention::prompt_lengths`](ridge_graph::ops::PagedAttention::prompt_lengths))?
    pub prompt_lengths: bool,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            activations: DType::F32,
            cache: DType::F32,
            block_size: 16,
            context: None,
            z_loss: 0.0,
            drafts: 0,
            prompt_lengths: false,
        }
    }
}

/// A decoder ready to be compiled: a module that continues texts.
#[derive(Clone, Debug)]
pub struct Model {
    /// What all networks have. The step inputs and outputs of its graph are those that [`StepInputs`] and
    /// [`finish_decoder`](crate::finish_decoder) name.
    pub module: Module,
    /// The graph for tokens of an answer, where they are computed otherwise than those of a prompt. It has the weights,
    /// states, inputs and outputs of `graph`.
    pub answers: Option<Graph>,
    /// The graph that drafts tokens behind those of a step, of a model built with [`BuildOptions::drafts`]. Its weights and states are
    /// among those of `graph`. See [`DRAFTS`].
    pub drafts: Option<Graph>,
    /// The tokens themselves, in the blocks of groups without a window.
    pub history: StateGroup,
    /// Dtype of keys and values in the cache.
    pub cache: DType,
    /// Tokens of one cache block.
    pub block_size: usize,
    /// Longest context it was made for.
    pub max_context: usize,
    /// Rows of its output.
    pub vocab_size: usize,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
}

impl Model {
    /// Makes products by weights in formats take the tokens of prompts and those of answers as said. Once: what is
    /// quantised stays so.
    pub fn take_activations(&mut self, prompts: Activations, answers: Activations) {
        let mut other = self.graph.clone();
        round_activations(&mut self.module.graph, prompts);
        round_activations(&mut other, answers);
        self.answers = (other != self.graph).then_some(other);
        self.drafts.iter_mut().for_each(|graph| round_activations(graph, answers));
    }

    /// Is attention told which tokens are of a prompt, as [`BuildOptions::prompt_lengths`] asks?
    pub fn attends_by_prompt(&self) -> bool {
        let told = |op: &Op| match op {
            Op::Composite(op) => op.downcast::<PagedAttention>().is_some_and(|op| op.prompt_lengths),
            _ => false,
        };
        self.graph.functions.iter().flat_map(|function| &function.nodes).any(|node| told(&node.op))
    }

    /// Makes steps copy the weights of these names, which are kept in memory of the host, ahead of their use where they
    /// would read them more than once: [`fetch_weights`].
    pub fn fetch(&mut self, names: &BTreeSet<String>) {
        let graphs = std::iter::once(&mut self.module.graph).chain(&mut self.answers).chain(&mut self.drafts);
        graphs.for_each(|graph| fetch_weights(graph, names));
    }
}

/// An encoder ready to be compiled: a module whose every token sees all of its text, with nothing kept between steps.
#[derive(Clone, Debug)]
pub struct Encoder {
    /// What all networks have. Step inputs: `token_ids`, `token_type_ids`, `seq_ids`, i32 `[tokens]`, and `query_start`,
    /// i32 `[seqs + 1]`, as in [`StepInputs`]. Outputs: `hidden`, f32 `[tokens, hidden]`, and those of
    /// [`with_pooling`](crate::with_pooling); with a classifier `class_logits` and `scores`, f32 `[seqs, labels]`.
    pub module: Module,
    /// Width of its output.
    pub hidden_size: usize,
    /// Rows of its embedding.
    pub vocab_size: usize,
    /// Tokens of a text at most.
    pub max_context: usize,
    /// Labels of its classifier; 0 without one.
    pub labels: usize,
    /// Do tokens see those before them only, as in a decoder?
    pub causal: bool,
}

/// A classifier of images ready to be compiled: a module that sees images of one size.
#[derive(Clone, Debug)]
pub struct ImageClassifier {
    /// What all networks have. Step input: `pixel_values`, f32 `[images, channels, height, width]`, scaled and normalised
    /// as the model was trained. Outputs: `logits`, f32 `[images, labels]`, and `hidden`, f32 `[images, positions, hidden]`,
    /// the class token's first.
    pub module: Module,
    /// Channels of an image.
    pub channels: usize,
    /// Height and width of an image, in pixels.
    pub size: [usize; 2],
    /// Positions of an image: its patches and the class token.
    pub positions: usize,
    /// Names of the classes, in the order of the logits.
    pub labels: Vec<String>,
}

/// Each is a module, whose fields and methods are its own.
macro_rules! deref_to_module {
    ($($network:ty),*) => {$(
        impl std::ops::Deref for $network {
            type Target = Module;

            fn deref(&self) -> &Module {
                &self.module
            }
        }

        impl std::ops::DerefMut for $network {
            fn deref_mut(&mut self) -> &mut Module {
                &mut self.module
            }
        }
    )*};
}

deref_to_module!(Model, Encoder, ImageClassifier);

/// Symbols of a step's extents.
pub mod symbols {
    /// Tokens that the step processes, over all sequences.
    pub const TOKENS: &str = "tokens";
    /// Images that the step processes.
    pub const IMAGES: &str = "images";
    /// Rows of the sequence tables.
    pub const SEQS: &str = "seqs";
    /// Rows of the tables that a device keeps: the most sequences that run.
    pub const ROWS: &str = "rows";
    /// Changes of rows that are sent at a time.
    pub const CHANGES: &str = "changes";
    /// Blocks of the cache of groups without a window, and of the history. For those with one see
    /// [`blocks_symbol`](super::blocks_symbol).
    pub const BLOCKS: &str = "blocks";
    /// Lines of the states of a fixed size, see [`read_fixed`](crate::read_fixed).
    pub const STATE_LINES: &str = "state_lines";
    /// Columns of the block table: the most blocks of a sequence.
    pub const TABLE: &str = "table";
    /// Columns of the table of logit biases.
    pub const BIASES: &str = "biases";
    /// Columns of the table of tokens that DRY does not go over.
    pub const BREAKERS: &str = "breakers";
    /// Tokens whose log-probabilities are told beside the chosen one's.
    pub const TOP: &str = "top";
    /// Columns of the table of forbidden tokens: 0, or enough for a bit of each token.
    pub const FORBIDDEN: &str = "forbidden";
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
    /// I32 `[seqs, table]`: the blocks of each sequence in the pool of groups without a window, in order; negative where
    /// there is none. For groups with a window see [`block_table`].
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
        let block_table = block_table(g, None)?;
        Ok(Self {
            token_ids: g.step_input("token_ids", i32s([&tokens].into()))?,
            seq_ids: g.step_input("seq_ids", i32s([&tokens].into()))?,
            query_start: g.step_input("query_start", i32s([seqs.clone() + 1].into()))?,
            lengths: g.step_input("lengths", i32s([&seqs].into()))?,
            block_table,
        })
    }
}

/// The step input of a graph built with [`BuildOptions::drafts`] with the token that follows each of the step's, i32 `[tokens]`; negative
/// where it is not known, and nothing is added for the token to the prediction module's cache.
pub const FOLLOWERS: &str = "followers";

/// The output of a graph built with [`BuildOptions::drafts`], and the step input of its drafting graph: the hidden state of each row's last
/// token, `[seqs, hidden]` of the activations' dtype.
pub const LAST_HIDDEN: &str = "last_hidden";

/// The output of a drafting graph, i32 `[seqs, drafts]`: tokens that may follow the one of each row, which stands behind `lengths` others.
/// Its step inputs are those of [`StepInputs`], the keys of sampling and [`LAST_HIDDEN`]: rows have one token, and the last hidden
/// state is that of the token before it.
pub const DRAFTS: &str = "drafts";

/// What the names of a pool of blocks end with, before the window.
const WITHIN: &str = "_within_";

/// Name of the step input with the block table of groups with this window: `block_table`, or `block_table_within_1024`.
pub fn block_table_name(window: Option<usize>) -> String {
    named_by("block_table", window)
}

/// Name of the symbol for the blocks of the pool of groups with this window: `blocks`, or `blocks_within_1024`.
pub fn blocks_symbol(window: Option<usize>) -> String {
    named_by(symbols::BLOCKS, window)
}

fn named_by(name: &str, window: Option<usize>) -> String {
    window.map_or_else(|| name.to_owned(), |window| format!("{name}{WITHIN}{window}"))
}

/// The windows of a decoder's graph that have a pool of blocks of their own, in ascending order.
pub fn windows(graph: &Graph) -> Vec<usize> {
    let prefix = format!("{}{WITHIN}", block_table_name(None));
    let window = |arg: &Arg| arg.name.strip_prefix(&prefix)?.parse().ok();
    let mut windows: Vec<usize> = graph.args(Role::StepInput).filter_map(window).collect();
    windows.sort_unstable();
    windows
}

/// `bindings` with `blocks` blocks in each pool of a decoder's graph: those of groups without a window, and those of each
/// window.
pub fn with_blocks(graph: &Graph, bindings: Bindings, blocks: usize) -> Bindings {
    let bindings = bindings.with(symbols::BLOCKS, blocks);
    windows(graph).into_iter().fold(bindings, |all, window| all.with(&blocks_symbol(Some(window)), blocks))
}

/// The block table of groups with this window: i32 `[seqs, table]`, the blocks of each sequence by position; negative where
/// there is none. Blocks that lie before the window of all tokens of a step are not read, and may be negative too.
///
/// # Errors
/// When a function before asked for it with another type.
pub fn block_table(g: &mut Builder, window: Option<usize>) -> GraphResult<Var> {
    let shape = [Dim::sym(symbols::SEQS), Dim::sym(symbols::TABLE)];
    g.step_input(&block_table_name(window), Type::tensor(DType::I32, shape))
}

/// The type of one layer's paged keys and values, of a layer with this window: with two sides, or one where keys are the
/// values too.
pub fn paged_kv([sides, heads, dim]: [usize; 3], window: Option<usize>, options: &BuildOptions) -> Type {
    let blocks = Dim::sym(&blocks_symbol(window));
    let shape = vec![blocks, sides.into(), heads.into(), options.block_size.into(), dim.into()];
    Type::state(options.cache, Shape(shape))
}

/// The name of one layer's keys and values in the cache.
pub(crate) const KV: &str = "kv";

/// Is the cache of codes, with a scale for each key and value of each head?
fn scaled(options: &BuildOptions) -> bool {
    matches!(options.cache, DType::I8 | DType::F8E4M3)
}

/// What the name of a cache's scales ends with.
pub(crate) const SCALES: &str = "_scales";

/// The states of one layer's cache called `name`, such as [`KV`].
pub(crate) fn cache_states(name: &str, options: &BuildOptions) -> Vec<String> {
    let scales = scaled(options).then(|| format!("{name}{SCALES}"));
    [name.to_owned()].into_iter().chain(scales).collect()
}

/// What one token takes of one layer's keys and values.
pub(crate) fn kv_bytes([sides, kv_heads, head_dim]: [usize; 3], options: &BuildOptions) -> usize {
    let scale = if scaled(options) { DType::F32.size_bytes() } else { 0 };
    sides * kv_heads * (head_dim * options.cache.size_bytes() + scale)
}

/// What a layer adds to its cache.
pub(crate) struct CacheRows<'a> {
    /// Keys and values, `[tokens, heads, dim]` each, or keys that are the values too; nothing where the cache has all that
    /// tokens attend to.
    pub(crate) rows: &'a [Var],
    /// Where they go, i32 `[tokens]`, in the pool of the layer's window.
    pub(crate) slots: Var,
    /// Sides, heads and their width of the cache.
    pub(crate) shape: [usize; 3],
}

/// The layer's cache called `name`, of a layer with this window, after the rows were added; with its scales where it is of codes.
pub(crate) fn write_cache(
    g: &mut Builder,
    name: &str,
    new: &CacheRows<'_>,
    window: Option<usize>,
    options: &BuildOptions,
) -> GraphResult<Vec<Var>> {
    let ty = paged_kv(new.shape, window, options);
    let mut cache = vec![g.state(name, ty.clone())?];
    if scaled(options) {
        let scales = Type::state(DType::F32, Shape(ty.shape.0[..4].to_vec()));
        cache.push(g.state(&format!("{name}{SCALES}"), scales)?);
    }
    if !new.rows.is_empty() {
        cache = g.kv_write_sides(&cache, new.rows, new.slots)?;
    }
    Ok(cache)
}

/// Causal attention of `q`, `[tokens, heads, dim]`, over the layer's cache, after the rows were added: `[tokens, heads,
/// dim]`. `of_heads` are the slopes and sinks that `op` asks for.
pub(crate) fn attend_cached(
    g: &mut Builder,
    q: Var,
    new: &CacheRows<'_>,
    positions: Var,
    of_heads: &[Var],
    op: PagedAttention,
    options: &BuildOptions,
) -> GraphResult<Var> {
    let step = StepInputs::ask(g)?;
    let table = block_table(g, op.window)?;
    let cache = write_cache(g, KV, new, op.window, options)?;
    let (kv, scales) = (cache[0], &cache[1..]);
    let mut more = [scales, of_heads].concat();
    if options.prompt_lengths {
        more.push(g.step_input(PROMPT_LENGTHS, Type::tensor(DType::I32, [&Dim::sym(symbols::SEQS)]))?);
    }
    let op = PagedAttention { prompt_lengths: options.prompt_lengths, ..op };
    g.attention_with([q, kv, table, step.seq_ids, positions], &more, op)
}

/// The step input with the number of tokens of each row's prompt, i32 `[seqs]`.
pub(crate) const PROMPT_LENGTHS: &str = "prompt_lengths";

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

/// The windows whose (query, key) pairs or cached tokens `cost` is told in, besides those of all tokens.
pub fn attended_windows(cost: &Cost) -> BTreeSet<usize> {
    let window = |sym: &Sym| {
        let sym = sym.taken_of().unwrap_or_else(|| sym.clone());
        let of = [symbols::PAIRS, symbols::CACHED].into_iter().find_map(|name| sym.name().strip_prefix(name))?;
        of.strip_prefix(WITHIN)?.parse().ok()
    };
    let polys = [&cost.matrix_flops, &cost.vector_flops, &cost.special_flops, &cost.bytes_read, &cost.bytes_written];
    polys.into_iter().flat_map(ridge_graph::Poly::symbols).filter_map(window).collect()
}

/// `bindings` with the (query, key) pairs and cached tokens of a step of one token that sees `context`, for every window that
/// `cost` has some of.
pub(crate) fn with_attended(cost: &Cost, bindings: Bindings, context: usize) -> Bindings {
    [None].into_iter().chain(attended_windows(cost).into_iter().map(Some)).fold(bindings, |all, window| {
        let (pairs, cached) = attention_symbols(window);
        let seen = window.map_or(context, |window| window.min(context));
        let of_step = [pairs.of_taken_rows(), cached.of_taken_rows(), pairs, cached];
        of_step.iter().fold(all, |all, sym| all.with(sym.name(), seen))
    })
}

/// `bindings` with the (query, key) pairs of one text of `tokens` tokens that see each other, or if `causal` those before
/// them, for every window that `cost` has some of.
pub(crate) fn with_pairs_of_text(cost: &Cost, bindings: Bindings, tokens: usize, causal: bool) -> Bindings {
    let seen = |sym: &Sym| {
        let of = sym.name().strip_prefix(symbols::PAIRS)?;
        let window = if of.is_empty() { tokens } else { of.strip_prefix(WITHIN)?.parse::<usize>().ok()?.min(tokens) };
        // Pairs of two tokens that are less than `window` places apart.
        let others = window.saturating_sub(1);
        let apart = others.saturating_mul(window + 2 * (tokens - window)) / 2;
        let pairs = tokens.saturating_add(if causal { apart } else { apart.saturating_mul(2) });
        Some((sym.name().to_owned(), pairs))
    };
    let seen: Vec<_> = cost.matrix_flops.symbols().filter_map(seen).collect();
    seen.into_iter().fold(bindings, |all, (name, pairs)| all.with(&name, pairs))
}

/// What the name of [`reached_symbol`] begins with.
const REACHED: &str = "reached_";

/// Symbol for the experts of a layer that a step's tokens reach, where each goes to `top_k` of `experts`: an extent of no
/// tensor, for costs. [`with_reached`] binds it.
pub(crate) fn reached_symbol(experts: usize, top_k: usize) -> Sym {
    Sym::new(&format!("{REACHED}{top_k}_of_{experts}"))
}

/// `bindings` with the experts that `tokens` tokens reach, for every layer that `cost` has some of: `E (1 - (1 - k/E)^n)` of
/// `E`, what is expected if each of them is as likely as the others.
pub fn with_reached(cost: &Cost, bindings: Bindings, tokens: usize) -> Bindings {
    let expected = |sym: &Sym| {
        let (top_k, experts) = sym.name().strip_prefix(REACHED)?.split_once("_of_")?;
        let [top_k, experts] = [top_k, experts].map(str::parse::<f64>);
        let (top_k, experts) = (top_k.ok()?, experts.ok()?);
        let reached = experts * (1.0 - (1.0 - top_k / experts).powf(tokens as f64));
        Some((sym.name().to_owned(), reached.round() as usize))
    };
    let reached: Vec<_> = cost.bytes_read.symbols().filter_map(expected).collect();
    reached.into_iter().fold(bindings, |all, (name, reached)| all.with(&name, reached))
}

/// The state that holds the tokens of running sequences.
pub const HISTORY: &str = "history";

/// The type of the history.
pub(crate) fn history_type(options: &BuildOptions) -> Type {
    Type::state(DType::I32, Shape(vec![Dim::sym(symbols::BLOCKS), options.block_size.into()]))
}

/// What keeps the tokens.
pub(crate) fn history_group() -> StateGroup {
    let bytes_per_token = DType::I32.size_bytes();
    StateGroup { states: vec![HISTORY.to_owned()], bytes_per_token, bytes_per_sequence: 0, window: None, heads: 1 }
}
