//! The programs of a model, compiled when they are first needed, and their buckets: what a step writes its inputs to.

use std::sync::Arc;

use ridge_graph::{Bindings, Graph};
use ridge_models::{Model, block_table_name, blocks_symbol, symbols, with_scores};
use ridge_runtime::{Bucket, CachedProgram, Compiled, ParamVersions, RuntimeError, Session};

use crate::error::Result;

/// Buckets of a program that are kept ready; more are made when needed and the oldest dropped.
pub const MAX_BUCKETS: usize = 64;

/// Bytes on the device that inputs, outputs and constants of all buckets of an engine may take together: when a new one
/// would exceed them, the oldest are dropped, of whatever program.
pub const MAX_STAGING_BYTES: usize = 64 << 20;

/// Buckets that are kept whatever they take: a new one, and those of a step of prompts and answers.
pub const MIN_BUCKETS: usize = 3;

/// The output with the log-probabilities of targets.
const SCORES: &str = "scores";

/// What a step gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// The next token of each row.
    pub(crate) tokens: bool,
    /// After biases and penalties.
    pub(crate) adjusted: bool,
    /// And the logarithms of probabilities.
    pub(crate) logprobs: bool,
    /// The logarithms of the probabilities of the targets.
    pub(crate) scores: bool,
    /// By the graph for tokens of an answer; there must be one ([`Programs::divide`]).
    pub(crate) answer: bool,
}

impl Wanted {
    fn outputs(self) -> Vec<&'static str> {
        let (next, logprob) = if self.adjusted { ("next_adjusted", "adjusted_logprob") } else { ("next", "logprob") };
        let mut outputs = match (self.tokens, self.logprobs) {
            (false, _) => Vec::new(),
            (true, false) => vec![next],
            (true, true) => vec![next, logprob, "top_ids", "top_logprobs"],
        };
        outputs.extend(self.scores.then_some(SCORES));
        outputs
    }
}

/// Extents of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extents {
    pub(crate) tokens: usize,
    pub(crate) seqs: usize,
    pub(crate) table: usize,
    pub(crate) blocks: usize,
    /// Logit biases of a row.
    pub(crate) biases: usize,
    /// DRY's breakers of a row.
    pub(crate) breakers: usize,
    /// Tokens of a row whose log-probabilities are given.
    pub(crate) top: usize,
    /// Words of a row that say which tokens are forbidden.
    pub(crate) forbidden: usize,
}

impl Extents {
    fn bindings(self) -> Bindings {
        Bindings::new()
            .with(symbols::TOKENS, self.tokens)
            .with(symbols::SEQS, self.seqs)
            .with(symbols::TABLE, self.table)
            .with(symbols::BLOCKS, self.blocks)
            .with(symbols::BIASES, self.biases)
            .with(symbols::BREAKERS, self.breakers)
            .with(symbols::TOP, self.top)
            .with(symbols::FORBIDDEN, self.forbidden)
    }
}

/// Declares the step inputs with the names that graphs give them.
macro_rules! inputs {
    ($($variant:ident = $name:literal,)*) => {
        /// A step input, by its position in [`ReadyBucket::inputs`].
        #[derive(Clone, Copy)]
        pub(crate) enum StepInput {
            $($variant,)*
        }

        const INPUT_NAMES: &[&str] = &[$($name),*];
    };
}

inputs! {
    TokenIds = "token_ids",
    SeqIds = "seq_ids",
    QueryStart = "query_start",
    Lengths = "lengths",
    BlockTable = "block_table",
    Temperature = "temperature",
    TopK = "top_k",
    TopP = "top_p",
    MinP = "min_p",
    TypicalP = "typical_p",
    Seed = "seed",
    Sequence = "sequence",
    PromptLengths = "prompt_lengths",
    Repetition = "repetition_penalty",
    Frequency = "frequency_penalty",
    Presence = "presence_penalty",
    DryMultiplier = "dry_multiplier",
    DryBase = "dry_base",
    DryAllowed = "dry_allowed_length",
    DryRange = "dry_range",
    DryBreakers = "dry_breakers",
    BiasIds = "bias_ids",
    BiasValues = "bias_values",
    Forbidden = "forbidden",
    Targets = "targets",
}

/// A bucket with the positions of its inputs.
pub(crate) struct ReadyBucket {
    pub(crate) bucket: Bucket,
    inputs: [Option<usize>; INPUT_NAMES.len()],
    /// Positions of the block tables of windows, those that the program reads.
    windows: Vec<Option<usize>>,
    /// Positions of [`Wanted::outputs`].
    outputs: Vec<usize>,
    /// Position of the scores, where they are wanted.
    scores: Option<usize>,
}

impl ReadyBucket {
    /// Fills an input, if the program reads it, and what `values` leave of it with `rest`.
    pub(crate) fn fill<const N: usize>(
        &mut self,
        input: StepInput,
        values: impl Iterator<Item = [u8; N]>,
        rest: [u8; N],
    ) {
        if let Some(index) = self.inputs[input as usize] {
            let mut to = self.bucket.input(index).as_chunks_mut::<N>().0.iter_mut();
            // Values first: the side that ends must not have taken a place.
            values.zip(to.by_ref()).for_each(|(from, to)| *to = from);
            to.for_each(|to| *to = rest);
        }
    }

    /// Fills an input of rows of `width` words, if the program reads it.
    pub(crate) fn fill_rows(&mut self, input: StepInput, width: usize, mut row: impl FnMut(usize, &mut [[u8; 4]])) {
        if let Some(index) = self.inputs[input as usize].filter(|_| width > 0) {
            let words = self.bucket.input(index).as_chunks_mut::<4>().0;
            words.chunks_exact_mut(width).enumerate().for_each(|(at, words)| row(at, words));
        }
    }

    /// Fills the block table of window `nth`, as [`fill_rows`](Self::fill_rows).
    pub(crate) fn fill_window(&mut self, nth: usize, width: usize, mut row: impl FnMut(usize, &mut [[u8; 4]])) {
        if let Some(index) = self.windows[nth].filter(|_| width > 0) {
            let words = self.bucket.input(index).as_chunks_mut::<4>().0;
            words.chunks_exact_mut(width).enumerate().for_each(|(at, words)| row(at, words));
        }
    }

    /// The scores, in words; none where they are not wanted.
    pub(crate) fn scores(&self) -> &[[u8; 4]] {
        self.scores.map_or(&[], |index| self.bucket.output(index).as_chunks::<4>().0)
    }

    /// Output `nth` of those wanted, in words.
    pub(crate) fn output(&self, nth: usize) -> &[[u8; 4]] {
        self.bucket.output(self.outputs[nth]).as_chunks::<4>().0
    }
}

/// A compiled graph and its buckets, with when each was used last. Looked through in order, as there are few.
struct CompiledProgram {
    wanted: Wanted,
    compiled: Compiled,
    ready: Vec<(Extents, u64, ReadyBucket)>,
}

/// Declares the programs of `model` to a session, before its weights are loaded: those that fill the cache, sample and
/// score, of prompts and of answers. All others read weights as these do.
///
/// # Errors
/// When the device has no kernel for an op of the model, or memory runs out.
pub fn declare(session: &Session, model: &Model) -> Result<()> {
    let graph = with_scores(&model.graph).map_err(RuntimeError::from)?;
    let answers = model.answers.as_ref().map(with_scores).transpose().map_err(RuntimeError::from)?;
    let of_answers = answers.iter().flat_map(|answers| [(answers, &[][..]), (answers, &["next"][..])]);
    let programs = [(&graph, &[][..]), (&graph, &["next"]), (&graph, &[SCORES])].into_iter().chain(of_answers);
    Ok(session.declare(&programs.collect::<Vec<_>>())?)
}

/// All programs of a model.
pub(crate) struct Programs {
    session: Session,
    graph: Graph,
    /// For tokens of an answer, where they have one of their own.
    answers: Option<Graph>,
    /// Of each window, the name of its block table, and the symbol and number of its blocks.
    windows: Vec<(String, String, usize)>,
    programs: Vec<CompiledProgram>,
    uses: u64,
    /// Of the weights.
    versions: ParamVersions,
}

impl Programs {
    /// Those of `model`, with pools of blocks of these `(window, blocks)`.
    pub(crate) fn new(session: Session, model: &Model, pools: &[(usize, usize)]) -> Result<Self> {
        let graph = with_scores(&model.graph).map_err(RuntimeError::from)?;
        let answers = model.answers.as_ref().map(with_scores).transpose().map_err(RuntimeError::from)?;
        let versions = session.versions(&graph);
        let window = |(window, blocks): &(usize, usize)| {
            (block_table_name(Some(*window)), blocks_symbol(Some(*window)), *blocks)
        };
        let windows = pools.iter().map(window).collect();
        Ok(Self { session, graph, answers, windows, programs: Vec::new(), uses: 0, versions })
    }

    /// Have weights changed since the last [`update`](Self::update)?
    pub(crate) fn changed(&self) -> bool {
        self.versions.changed()
    }

    /// Have weights changed since the last call?
    pub(crate) fn update(&mut self) -> bool {
        self.versions.update()
    }

    /// Are tokens of an answer computed by a graph of their own?
    pub(crate) fn divide(&self) -> bool {
        self.answers.is_some()
    }

    /// Compiles a program, if that has not been done, and says which it is.
    pub(crate) fn compile(&mut self, wanted: Wanted) -> Result<usize> {
        if let Some(found) = self.programs.iter().position(|p| p.wanted == wanted) {
            return Ok(found);
        }
        let graph = self.answers.as_ref().filter(|_| wanted.answer).unwrap_or(&self.graph);
        let compiled = self.session.compile(graph, &wanted.outputs())?;
        self.programs.push(CompiledProgram { wanted, compiled, ready: Vec::with_capacity(MAX_BUCKETS) });
        Ok(self.programs.len() - 1)
    }

    /// What was compiled, in order.
    pub(crate) fn compiled(&self) -> Vec<Arc<CachedProgram>> {
        self.session.programs().programs()
    }

    /// The graph of a program, if it has been compiled.
    pub(crate) fn lowered(&self, wanted: Wanted) -> Option<&Graph> {
        self.programs.iter().find(|p| p.wanted == wanted).map(|program| program.compiled.graph())
    }

    /// Drops buckets that were used longest ago while all take more than `most` bytes, but for those that a step may use.
    fn drop_oldest(&mut self, most: usize) {
        let bytes = |(_, _, ready): &(Extents, u64, ReadyBucket)| ready.bucket.memory().staging_on_device();
        let mut total: usize = self.programs.iter().flat_map(|program| &program.ready).map(bytes).sum();
        while total > most {
            let all = self.programs.iter().enumerate();
            let all = all.flat_map(|(p, program)| program.ready.iter().enumerate().map(move |(at, of)| (of.1, p, at)));
            let mut all: Vec<(u64, usize, usize)> = all.collect();
            if all.len() < MIN_BUCKETS {
                return;
            }
            all.sort_unstable();
            let (_, program, at) = all[0];
            total -= bytes(&self.programs[program].ready.swap_remove(at));
        }
    }

    /// A bucket of the program that gives what is wanted.
    pub(crate) fn ready(&mut self, wanted: Wanted, extents: Extents) -> Result<&mut ReadyBucket> {
        self.uses += 1;
        let which = self.compile(wanted)?;
        let known = self.programs[which].ready.iter().any(|(of, ..)| *of == extents);
        if !known {
            self.drop_oldest(MAX_STAGING_BYTES);
        }
        let program = &mut self.programs[which];
        let at = match program.ready.iter().position(|(of, ..)| *of == extents) {
            Some(at) => at,
            None => {
                if program.ready.len() >= MAX_BUCKETS
                    && let Some((oldest, _)) = program.ready.iter().enumerate().min_by_key(|(_, (_, used, _))| *used)
                {
                    program.ready.swap_remove(oldest);
                }
                let pools = self.windows.iter();
                let bindings = pools.fold(extents.bindings(), |all, (_, symbol, blocks)| all.with(symbol, *blocks));
                let bucket = program.compiled.bucket(&bindings)?;
                let is_window = |name: &str| self.windows.iter().any(|(table, ..)| table == name);
                if let Some(name) = bucket.input_names().find(|name| !INPUT_NAMES.contains(name) && !is_window(name)) {
                    let why = format!("the engine does not fill it; it fills {}", INPUT_NAMES.join(", "));
                    return Err(RuntimeError::Argument { kind: "input", name: name.to_owned(), why }.into());
                }
                let mut inputs = [None; INPUT_NAMES.len()];
                for (index, name) in inputs.iter_mut().zip(INPUT_NAMES) {
                    *index = bucket.input_index(name)?;
                }
                let windows = self.windows.iter().map(|(table, ..)| bucket.input_index(table));
                let windows: Vec<Option<usize>> = windows.collect::<Result<_, _>>()?;
                let outputs: Vec<usize> =
                    wanted.outputs().into_iter().map(|name| bucket.output_index(name)).collect::<Result<_, _>>()?;
                let scores = wanted.scores.then(|| bucket.output_index(SCORES)).transpose()?;
                program.ready.push((extents, 0, ReadyBucket { bucket, inputs, windows, outputs, scores }));
                program.ready.len() - 1
            }
        };
        let (_, used, ready) = &mut program.ready[at];
        *used = self.uses;
        Ok(ready)
    }
}
