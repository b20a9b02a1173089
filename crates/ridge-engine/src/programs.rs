//! The programs of a model, compiled on first use, and their buckets.

use std::sync::Arc;

use ridge_graph::{Bindings, Graph};
use ridge_models::{
    DRAFTS, Model, RowTables, RowWidths, Sampled, blocks_symbol, symbols, with_draft_rows, with_rows, with_scores,
};
use ridge_runtime::{
    Bucket, CachedProgram, Compiled, MemoryBytes, ParamVersions, RuntimeError, Session, Slot, Steps, Ticket,
};

use crate::columns::Columns;
use crate::error::Result;
use crate::extents::{Extents, SCORES, Wanted};
use crate::lattice::{Lattice, LatticeOptions, exactly};
use crate::rows::Rows;
use crate::sampling::{MAX_BIASES, MAX_BREAKERS};

/// Buckets of a program that are kept ready; more are made when needed and the oldest dropped.
pub const MAX_BUCKETS: usize = 64;

/// Bytes on the device that inputs, outputs and constants of all buckets of an engine may take together: when a new one
/// would exceed them, the oldest are dropped, of whatever program.
pub const MAX_STAGING_BYTES: usize = 64 << 20;

/// Buckets that are kept whatever they take: a new one, and those of two steps of prompts and answers.
pub const MIN_BUCKETS: usize = 5;

/// Candidates of a row in a step at most.
pub const MAX_CANDIDATES: usize = 16;

/// What an engine has made for its steps so far. None of it grows while one serves whose buckets were made ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Made {
    /// Programs that were compiled.
    pub compiled: u64,
    /// Buckets that were bound.
    pub bound: u64,
    /// Choices among kernels that the device made by timing them, for all engines of the device.
    pub timed: u64,
}

/// Declares the step inputs with the names that graphs give them.
macro_rules! inputs {
    ($($variant:ident = $name:literal,)*) => {
        /// A step input, by its position in [`ReadyBucket::inputs`].
        #[derive(Clone, Copy, PartialEq, Eq)]
        pub(crate) enum StepInput {
            $($variant,)*
        }

        impl StepInput {
            /// May a step be queued before it is known?
            fn is_late(self) -> bool {
                self == Self::Forbidden
            }
        }

        const INPUT_NAMES: &[&str] = &[$($name),*];
    };
}

inputs! {
    TokenIds = "token_ids",
    SeqIds = "seq_ids",
    QueryStart = "query_start",
    Rows = "rows",
    Offsets = "offsets",
    Parents = "parents",
    Forbidden = "forbidden",
    Targets = "targets",
    StateLines = "state_lines",
    Followers = "followers",
}

/// A bucket with the positions of its inputs, and what the device has of them.
pub(crate) struct ReadyBucket {
    bucket: Bucket,
    inputs: [Option<usize>; INPUT_NAMES.len()],
    /// What was staged last of each input; what stays as it is is not sent again.
    sent: [Vec<u8>; INPUT_NAMES.len()],
    /// Does the device have all of `sent`?
    fresh: bool,
    /// Positions of [`Wanted::outputs`].
    outputs: Vec<usize>,
    /// Positions of [`SCORES`], where they are wanted.
    scores: Option<[usize; 3]>,
    /// Bytes that were staged in all.
    bytes: u64,
}

impl ReadyBucket {
    /// The steps of the bucket.
    pub(crate) fn steps(&mut self) -> &mut Steps {
        self.bucket.steps()
    }

    pub(crate) fn memory(&self) -> MemoryBytes {
        self.bucket.memory()
    }

    /// Says that the device may have anything in the inputs, since a step failed.
    pub(crate) fn forget(&mut self) {
        self.fresh = false;
    }

    /// Says that all inputs were filled.
    pub(crate) fn filled(&mut self) {
        self.fresh = true;
    }

    /// Fills an input of a step, if the program reads it and the device does not have it so, and what `values` leave of it
    /// with `rest`.
    pub(crate) fn fill<const N: usize>(
        &mut self,
        slot: &Slot,
        input: StepInput,
        mut values: impl Iterator<Item = [u8; N]>,
        rest: [u8; N],
    ) {
        let Some(index) = self.inputs[input as usize] else { return };
        let sent = &mut self.sent[input as usize];
        if sent.is_empty() {
            sent.resize(self.bucket.steps().input(slot, index).len(), 0);
        }
        let mut changed = !self.fresh;
        for to in sent.as_chunks_mut::<N>().0 {
            let from = values.next().unwrap_or(rest);
            changed |= *to != from;
            *to = from;
        }
        if changed {
            self.bucket.steps().input(slot, index).copy_from_slice(sent);
            self.bytes += sent.len() as u64;
        } else if input.is_late() {
            // It is known, and as the device has it.
            let part = self.bucket.steps().input_part(slot, index, 0);
            debug_assert!(part.is_ok(), "no bytes are always there");
        }
    }

    /// Queues the rest of a step that is held, with the masks of its rows.
    pub(crate) fn release(&mut self, ticket: &Ticket, masks: &[u8]) -> Result<()> {
        let Some(index) = self.inputs[StepInput::Forbidden as usize] else { return Ok(()) };
        masks.clone_into(&mut self.sent[StepInput::Forbidden as usize]);
        self.bytes += masks.len() as u64;
        Ok(self.bucket.steps().release(ticket, &[(index, masks)])?)
    }

    /// The words of output `nth` of [`SCORES`] of a complete step; none where they are not wanted.
    pub(crate) fn scores(&mut self, ticket: &Ticket, nth: usize) -> &[[u8; 4]] {
        match self.scores {
            Some(indices) => self.bucket.steps().output(ticket, indices[nth]).as_chunks::<4>().0,
            None => &[],
        }
    }

    /// The words of output `nth` of those wanted.
    pub(crate) fn words(&mut self, ticket: &Ticket, nth: usize) -> &[[u8; 4]] {
        self.bucket.steps().output(ticket, self.outputs[nth]).as_chunks::<4>().0
    }
}

/// A bucket of a program.
struct BoundBucket {
    extents: Extents,
    /// When it was used last.
    used: u64,
    /// One of those that were made ready beforehand, which stay.
    kept: bool,
    ready: ReadyBucket,
}

/// A compiled graph and its buckets. Looked through in order, as there are few.
struct CompiledProgram {
    wanted: Wanted,
    compiled: Compiled,
    buckets: Vec<BoundBucket>,
}

/// The widths of lists of rows, for sequences of at most `blocks` blocks.
pub fn row_widths(blocks: usize) -> RowWidths {
    RowWidths { blocks, biases: MAX_BIASES, breakers: MAX_BREAKERS }
}

/// A model's graph as an engine runs it for these outputs: over rows on the device, each with at most `blocks` blocks, and
/// with scores. Besides the model's symbols it has [`symbols::ROWS`].
///
/// # Errors
/// When the graph is none of a decoder.
pub fn served(graph: &Graph, outputs: &[&str], blocks: usize) -> Result<Graph> {
    served_with(graph, outputs, blocks, 0)
}

/// The same, as steps have it in which rows have candidates.
///
/// # Errors
/// When the graph is none of a decoder.
pub fn verifying(graph: &Graph, outputs: &[&str], blocks: usize) -> Result<Graph> {
    served_with(graph, outputs, blocks, MAX_CANDIDATES)
}

/// The same, with at most so many candidates of a row.
fn served_with(graph: &Graph, outputs: &[&str], blocks: usize, candidates: usize) -> Result<Graph> {
    let output = outputs.iter().copied().find(|name| ["next", "next_adjusted"].contains(name));
    let sampled = Sampled { output, candidates };
    let graph = with_scores(graph).map_err(RuntimeError::from)?;
    Ok(with_rows(&graph, &RowTables::of(&graph, row_widths(blocks)), sampled).map_err(RuntimeError::from)?)
}

/// The drafting graph of a model as an engine runs it, over the rows of [`served`]; `None` of a model without drafts.
///
/// # Errors
/// When the graph is none that drafts.
pub fn drafting(model: &Model, blocks: usize) -> Result<Option<Graph>> {
    let tables = RowTables::of(&model.graph, row_widths(blocks));
    let graph = model.drafts.as_ref().map(|graph| with_draft_rows(graph, &tables)).transpose();
    Ok(graph.map_err(RuntimeError::from)?)
}

/// Declares the programs of `model` to a session, before its weights are loaded: those that fill the cache, sample and
/// score, of prompts and of answers. All others read weights as these do. `context` is the most tokens of a sequence.
///
/// # Errors
/// When the device has no kernel for an op of the model, or memory runs out.
pub fn declare(session: &Session, model: &Model, context: usize) -> Result<()> {
    let blocks = context.div_ceil(model.block_size);
    let fill = Wanted::default();
    let (sample, score) = (Wanted { tokens: true, ..fill }, Wanted { scores: true, ..fill });
    let prompts = [fill, sample, score].map(|wanted| (&model.graph, wanted.outputs()));
    let answers = model.answers.iter().flat_map(|graph| [fill, sample].map(|wanted| (graph, wanted.outputs())));
    let programs: Vec<(&Graph, Vec<&str>)> = prompts.into_iter().chain(answers).collect();
    let built = programs.iter().map(|(graph, outputs)| served(graph, outputs, blocks)).collect::<Result<Vec<_>>>()?;
    let drafts = drafting(model, blocks)?;
    let programs: Vec<(&Graph, &[&str])> = built
        .iter()
        .zip(programs.iter().map(|(_, outputs)| &outputs[..]))
        .chain(drafts.iter().map(|graph| (graph, &[DRAFTS][..])))
        .collect();
    Ok(session.declare(&programs)?)
}

/// How many tokens `model` drafts behind each row that samples.
pub fn drafts_of(model: &Model) -> usize {
    model.drafts.as_ref().map_or(0, count_of_drafts)
}

/// How many tokens a drafting graph gives for each row.
fn count_of_drafts(graph: &Graph) -> usize {
    let main = graph.main();
    let drafts = main.outputs.iter().find(|output| *output.name == *DRAFTS);
    drafts.and_then(|output| main.ty(output.var).shape.last().as_const()).unwrap_or_default()
}

/// All programs of a model.
pub(crate) struct Programs {
    session: Session,
    graph: Graph,
    /// For tokens of an answer, where they have one of their own.
    answers: Option<Graph>,
    /// See [`Programs::tells_prompts`].
    tells_prompts: bool,
    /// What drafts tokens, over rows, and how many of each row.
    drafts: Option<(Graph, usize)>,
    /// The most blocks of a row.
    table: usize,
    /// Of each window, the symbol and number of its blocks; and those of the lines of states of a fixed size.
    windows: Vec<(String, usize)>,
    programs: Vec<CompiledProgram>,
    /// The buckets that were made ready beforehand, if any were.
    lattice: Option<Lattice>,
    uses: u64,
    /// Buckets bound so far.
    bound: u64,
    /// Of the weights.
    versions: ParamVersions,
}

impl Programs {
    /// Those of `model`, whose sequences have at most `table` blocks. Allocates the tables of `rows` rows and the cache, of
    /// `blocks` blocks and, for the pools of windows, of these `(window, blocks)`; and `lines` lines of states of a fixed
    /// size.
    pub(crate) fn new(
        mut session: Session,
        model: &Model,
        [rows, table, blocks, lines]: [usize; 4],
        pools: &[(usize, usize)],
    ) -> Result<(Self, Rows, Columns)> {
        let graph = served(&model.graph, &[], table)?;
        let windows = pools.iter().map(|(window, blocks)| (blocks_symbol(Some(*window)), *blocks));
        let lines = (lines > 0).then(|| (symbols::STATE_LINES.to_owned(), lines));
        let windows: Vec<(String, usize)> = windows.chain(lines).collect();
        let bindings = Bindings::new().with(symbols::BLOCKS, blocks).with(symbols::ROWS, rows);
        let bindings = windows.iter().fold(bindings, |all, (symbol, blocks)| all.with(symbol, *blocks));
        session.allocate_states(&graph, &bindings)?;
        let drafts = drafting(model, table)?;
        drafts.iter().try_for_each(|graph| session.allocate_states(graph, &bindings))?;
        let count = drafts.as_ref().map_or(0, count_of_drafts);
        let drafts = drafts.map(|graph| (graph, count));
        let tables = RowTables::of(&model.graph, row_widths(table));
        let sent = Rows::new(&session, &tables, rows)?;
        let of_windows: Vec<usize> = pools.iter().map(|(window, _)| *window).collect();
        let columns = Columns::new(&sent, &tables, &of_windows)?;
        let (versions, programs) = (session.versions(&graph), Vec::new());
        let (graph, answers) = (model.graph.clone(), model.answers.clone());
        let (lattice, uses, bound) = (None, 0, 0);
        let tells_prompts = answers.is_some() || model.attends_by_prompt();
        let made = Self {
            session,
            graph,
            answers,
            tells_prompts,
            drafts,
            table,
            windows,
            programs,
            lattice,
            uses,
            bound,
            versions,
        };
        Ok((made, sent, columns))
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

    /// Are tokens of an answer computed otherwise than those of a prompt: by a graph of their own, or by other sums?
    pub(crate) fn tells_prompts(&self) -> bool {
        self.tells_prompts
    }

    /// Is attention of one graph told which tokens are of a prompt? A step of as many tokens as lines has none of a prompt then.
    pub(crate) fn attends_by_prompt(&self) -> bool {
        self.tells_prompts && !self.divide()
    }

    /// How many tokens are drafted behind each row that samples.
    pub(crate) fn drafts(&self) -> usize {
        self.drafts.as_ref().map_or(0, |(_, count)| *count)
    }

    /// Compiles a program, if that has not been done, and says which it is.
    pub(crate) fn compile(&mut self, wanted: Wanted) -> Result<usize> {
        if let Some(found) = self.programs.iter().position(|p| p.wanted == wanted) {
            return Ok(found);
        }
        let compiled = match self.drafts.as_ref().filter(|_| wanted.drafts) {
            Some((graph, _)) => self.session.compile(graph, &wanted.outputs())?,
            None => {
                let graph = self.answers.as_ref().filter(|_| wanted.answer).unwrap_or(&self.graph);
                let candidates = if wanted.candidates { MAX_CANDIDATES } else { 0 };
                let graph = served_with(graph, &wanted.outputs(), self.table, candidates)?;
                self.session.compile(&graph, &wanted.outputs())?
            }
        };
        self.programs.push(CompiledProgram { wanted, compiled, buckets: Vec::with_capacity(MAX_BUCKETS) });
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

    /// Drops buckets that were used longest ago while all take more than `most` bytes, but for those that a step may use and
    /// those that stay.
    fn drop_oldest(&mut self, most: usize) {
        let bytes = |bucket: &BoundBucket| bucket.ready.memory().staging_on_device();
        let mut total: usize = self.buckets().map(|(_, _, bucket)| bytes(bucket)).sum();
        while total > most {
            let mut all: Vec<(u64, usize, usize)> = self
                .buckets()
                .filter(|(.., bucket)| !bucket.kept)
                .map(|(p, at, bucket)| (bucket.used, p, at))
                .collect();
            if all.len() < MIN_BUCKETS {
                return;
            }
            all.sort_unstable();
            let (_, program, at) = all[0];
            total -= bytes(&self.programs[program].buckets.swap_remove(at));
        }
    }

    /// All buckets, with the numbers of their program and of themselves in it.
    fn buckets(&self) -> impl Iterator<Item = (usize, usize, &BoundBucket)> {
        let all = self.programs.iter().enumerate();
        all.flat_map(|(p, program)| program.buckets.iter().enumerate().map(move |(at, bucket)| (p, at, bucket)))
    }

    /// Says that the device may have anything in the inputs of all buckets, since a step failed.
    pub(crate) fn forget(&mut self) {
        self.programs.iter_mut().flat_map(|program| &mut program.buckets).for_each(|bucket| bucket.ready.forget());
    }

    /// Bytes that were staged for all steps so far.
    pub(crate) fn staged(&self) -> u64 {
        self.buckets().map(|(.., bucket)| bucket.ready.bytes).sum()
    }

    /// What has been made so far: programs compiled, buckets bound, and choices that the device timed.
    pub(crate) fn made(&self) -> Made {
        let compiled = self.session.programs().programs().len() as u64;
        Made { compiled, bound: self.bound, timed: self.session.backend().choices_timed() }
    }

    /// Compiles and binds the buckets that serve all steps from now on, and says which they are.
    ///
    /// # Errors
    /// When the device cannot run one of them, or memory runs out.
    pub(crate) fn bind_lattice(&mut self, options: &LatticeOptions, vocab: usize) -> Result<Vec<(Wanted, Extents)>> {
        let lattice = Lattice::new(options, [MAX_BIASES, vocab]);
        for (wanted, extents) in lattice.points() {
            let (program, at) = self.bound_bucket(*wanted, *extents)?;
            self.programs[program].buckets[at].kept = true;
        }
        let points = lattice.points().to_vec();
        self.lattice = Some(lattice);
        Ok(points)
    }

    /// The program and the extents for a step that needs these: those of a ready bucket, if there are some.
    pub(crate) fn serving(&self, wanted: Wanted, extents: Extents, prompts: bool) -> (Wanted, Extents) {
        let prompts = prompts && self.attends_by_prompt();
        let ready = self.lattice.as_ref().and_then(|lattice| lattice.cover(wanted, extents, prompts));
        ready.unwrap_or_else(|| exactly(wanted, extents, prompts))
    }

    /// A bucket of the program that gives what is wanted.
    pub(crate) fn ready(&mut self, wanted: Wanted, extents: Extents) -> Result<&mut ReadyBucket> {
        self.uses += 1;
        let (which, at) = self.bound_bucket(wanted, extents)?;
        let bucket = &mut self.programs[which].buckets[at];
        bucket.used = self.uses;
        Ok(&mut bucket.ready)
    }

    /// The numbers of a program and its bucket, which is bound if that has not been done.
    fn bound_bucket(&mut self, wanted: Wanted, extents: Extents) -> Result<(usize, usize)> {
        let which = self.compile(wanted)?;
        if let Some(at) = self.programs[which].buckets.iter().position(|bucket| bucket.extents == extents) {
            return Ok((which, at));
        }
        self.drop_oldest(MAX_STAGING_BYTES);
        let program = &mut self.programs[which];
        if program.buckets.len() >= MAX_BUCKETS {
            let old = program.buckets.iter().enumerate().filter(|(_, bucket)| !bucket.kept);
            if let Some((oldest, _)) = old.min_by_key(|(_, bucket)| bucket.used) {
                program.buckets.swap_remove(oldest);
            }
        }
        let pools = self.windows.iter();
        let bindings = pools.fold(extents.bindings(), |all, (symbol, blocks)| all.with(symbol, *blocks));
        let bucket = program.compiled.bucket(&bindings)?;
        self.bound += 1;
        if let Some(name) = bucket.input_names().find(|name| !INPUT_NAMES.contains(name)) {
            let why = format!("the engine does not provide it; it provides {}", INPUT_NAMES.join(", "));
            return Err(RuntimeError::Argument { kind: "input", name: name.to_owned(), why }.into());
        }
        let mut inputs = [None; INPUT_NAMES.len()];
        for (index, name) in inputs.iter_mut().zip(INPUT_NAMES) {
            *index = bucket.input_names().position(|of| of == *name);
        }
        let outputs: Vec<usize> =
            wanted.outputs().into_iter().map(|name| bucket.output_index(name)).collect::<Result<_, _>>()?;
        let scores = match wanted.scores {
            true => {
                let [targets, ids, logprobs] = SCORES.map(|name| bucket.output_index(name));
                Some([targets?, ids?, logprobs?])
            }
            false => None,
        };
        let sent = std::array::from_fn(|_| Vec::new());
        let ready = ReadyBucket { bucket, inputs, sent, fresh: false, outputs, scores, bytes: 0 };
        program.buckets.push(BoundBucket { extents, used: self.uses, kept: false, ready });
        Ok((which, program.buckets.len() - 1))
    }
}
