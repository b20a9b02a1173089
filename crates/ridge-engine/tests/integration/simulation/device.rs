//! A device whose model is a hash. What it keeps of a token in the cache depends on all tokens before it, as keys and
//! values do, and the token that follows a sequence depends on all that it keeps, which it reads through the block table,
//! as attention does. A block that two sequences own, that was freed too early or that was found for another prefix gives
//! other tokens, and a step costs next to nothing.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use ridge_graph::ops::{AcceptCandidates, Quantize};
use ridge_graph::passes::{Kernel, Pattern};
use ridge_graph::{Bindings, Function, Graph, Op, Role, Sym, Type};
use ridge_models::{HISTORY, LAST_TOKEN, LENGTH, OFFSETS, PARENTS, ROWS, RowTables, symbols};
use ridge_runtime::{
    Backend, Buffer, MemoryBytes, MemoryOwner, Program, Result, Run, RuntimeError, Staged, StepOrder, WeightData, plan,
};

/// What the model keeps of `token` behind one of which it keeps `before`, computed by codes of 8 bits or exactly.
pub(crate) fn keep(before: Option<i32>, token: u32, by_codes: bool) -> i32 {
    if before == Some(NOT_FINITE) || token == DAMAGED {
        return NOT_FINITE;
    }
    let before = before.unwrap_or(0x5bd1) ^ i32::from(by_codes) << 20;
    (before.wrapping_mul(0x0100_0193) ^ (token as i32).wrapping_mul(0x9e37)).rotate_left(9) | 1
}

/// What the model keeps of `tokens`, those behind the first `exact` computed by codes.
pub(crate) fn cache(tokens: &[u32], exact: usize) -> Vec<i32> {
    let mut before = None;
    tokens.iter().enumerate().map(|(at, token)| *before.insert(keep(before, *token, at >= exact))).collect()
}

/// The next token behind those of which the model keeps `cache`, of which `forbidden` are not to come; none where one was
/// [`DAMAGED`].
pub(crate) fn next_token(cache: &[i32], stream: u64, forbidden: impl Fn(u32) -> bool) -> Option<u32> {
    if cache.contains(&NOT_FINITE) {
        return None;
    }
    let drawn = fold(cache, stream);
    // It often goes round in circles, so that candidates are right now and then.
    let first = if drawn >> 61 < 6 { 20 + cache.len() as u32 % 5 } else { (drawn % VOCAB as u64) as u32 };
    (0..VOCAB as u32).map(|i| (first + i) % VOCAB as u32).find(|token| *token != DAMAGED && !forbidden(*token))
}

/// What it says of the probability of `token` there.
pub(crate) fn score(cache: &[i32], token: u32) -> f32 {
    -((fold(cache, u64::from(token)) >> 48) as f32)
}

fn fold(cache: &[i32], start: u64) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325 ^ start.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    cache
        .iter()
        .fold(start, |h, kept| (h ^ u64::from(kept.cast_unsigned())).wrapping_mul(0x0100_0000_01b3).rotate_left(23))
}

/// What is kept where something is not finite. All else is odd.
const NOT_FINITE: i32 = 2;

/// Tokens of the model.
pub(crate) const VOCAB: usize = 512;

/// The token whose logits are not finite.
pub(crate) const DAMAGED: u32 = 13;

#[derive(Clone, Default)]
pub(crate) struct Parrot {
    /// The next step fails.
    pub fail: Arc<AtomicBool>,
    /// It computes nothing: every token is the first.
    pub blank: bool,
    /// Where the columns of rows are; told before a program is bound.
    pub tables: Arc<OnceLock<RowTables>>,
    /// Steps behind one that failed fail too, until somebody was told.
    pub order: Arc<StepOrder>,
}

/// The kernel that says that products of a graph take activations by codes.
const BY_CODES: &str = "linear_by_codes";

type State = Arc<Mutex<Vec<i32>>>;

impl Backend for Parrot {
    fn name(&self) -> &'static str {
        "parrot"
    }

    fn kernels(&self) -> &[Kernel] {
        static KERNELS: LazyLock<[Kernel; 1]> = LazyLock::new(|| {
            let supports = |function: &Function| {
                let rounds = |op: &Op| matches!(op, Op::Composite(op) if op.downcast::<Quantize>().is_some());
                function.nodes.iter().any(|node| rounds(&node.op))
            };
            [Kernel::at_roofline(BY_CODES, Pattern::parse("linear(quantize(x), w)"), supports)]
        });
        &*KERNELS
    }

    fn upload(&self, _ty: &Type, _parts: Vec<WeightData>) -> Result<Buffer> {
        Ok(Buffer::new(0, ()))
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        Ok(Buffer::new(bytes, State::default()))
    }

    fn read(&self, _buffer: &Buffer) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn write(&self, _buffer: &Buffer, _bytes: &[u8]) -> Result<()> {
        Ok(())
    }

    fn compile(&self, graph: Arc<Graph>) -> Result<Box<dyn Program>> {
        let by_codes = graph.functions.iter().flat_map(|f| &f.nodes).any(|node| node.op_name() == BY_CODES);
        Ok(Box::new(Compiled { graph, by_codes, device: self.clone() }))
    }
}

struct Compiled {
    graph: Arc<Graph>,
    by_codes: bool,
    device: Parrot,
}

impl Program for Compiled {
    fn bind(&self, bindings: &Bindings, _weights: &[Buffer], states: &[Buffer]) -> Result<Box<dyn Run>> {
        let sizes = plan(&self.graph, bindings)?;
        let names = |role| self.graph.args(role).map(|a| a.name.to_string()).collect::<Vec<_>>();
        let state = |name: &str| -> State {
            let at = names(Role::State).iter().position(|n| n == name);
            let Some((at, state)) = at.and_then(|at| Some((at, states[at].inner::<State>()?))) else {
                return State::default();
            };
            let mut words = state.lock().unwrap_or_else(PoisonError::into_inner);
            // Tables are zeroed; what is read of the cache was written before.
            words.resize(states[at].bytes() / 4, if name == HISTORY { -1 } else { 0 });
            Arc::clone(state)
        };
        let extent = |name: &str| bindings.get(&Sym::new(name)).unwrap_or(0);
        let block_size = self.graph.args(Role::State).find(|a| &*a.name == HISTORY);
        let results = self.graph.main().outputs.iter().filter(|o| o.role == Role::Data);
        let inputs: Vec<Vec<u8>> = sizes.input_bytes.iter().map(|n| vec![0; *n]).collect();
        let tables = self.device.tables.get().expect("the tables are told before the first program");
        Ok(Box::new(Step {
            device: self.device.clone(),
            by_codes: self.by_codes,
            history: state(HISTORY),
            tables: tables.tables.iter().map(|table| state(&format!("rows.{}", table.name))).collect(),
            block_size: block_size.and_then(|a| a.ty.shape.last().as_const()).unwrap_or(1),
            rows: extent(symbols::SEQS),
            top: extent(symbols::TOP),
            words: extent(symbols::FORBIDDEN),
            names: names(Role::StepInput),
            staging: [inputs.clone(), inputs.clone()],
            inputs,
            results: results.map(|o| o.name.to_string()).collect(),
            outputs: std::array::from_fn(|_| sizes.output_bytes.iter().map(|n| vec![POISON; *n]).collect()),
            outcomes: [None, None],
            numbers: [0; 2],
            held: None,
        }))
    }

    fn memory(&self, bindings: &Bindings) -> Result<MemoryBytes> {
        Ok(MemoryBytes::default().with(MemoryOwner::Workspace, plan(&self.graph, bindings)?.arena_bytes))
    }
}

/// What staging memory holds while it belongs to the device.
const POISON: u8 = 0xa5;

struct Step {
    device: Parrot,
    by_codes: bool,
    history: State,
    /// In the order of the device's tables.
    tables: Vec<State>,
    block_size: usize,
    rows: usize,
    top: usize,
    words: usize,
    names: Vec<String>,
    /// What the device has of the inputs.
    inputs: Vec<Vec<u8>>,
    staging: [Vec<Vec<u8>>; 2],
    results: Vec<String>,
    outputs: [Vec<Vec<u8>>; 2],
    /// What the steps that were submitted give.
    outcomes: [Option<Result<Vec<Vec<u8>>>>; 2],
    /// The numbers of those steps.
    numbers: [u64; 2],
    /// The slot of a step that waits for its late inputs.
    held: Option<usize>,
}

fn words(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word)).collect()
}

impl Step {
    /// A step input in words; none where the program does not read it.
    fn ints(&self, name: &str) -> Vec<i32> {
        let at = self.names.iter().position(|n| n == name);
        at.map_or_else(Vec::new, |at| words(&self.inputs[at]))
    }

    fn layout(&self) -> &RowTables {
        self.device.tables.get().expect("told before")
    }

    /// The words of a row's element in a column, or of a later one.
    fn column(&self, row: usize, name: &str, nth: usize) -> (usize, usize, usize) {
        let (table, at) = self.layout().column(name).expect("is a column");
        let of = &self.layout().tables[table];
        let words = of.dtype.size_bytes() / 4;
        (table, (row * of.width + at + nth) * words, words)
    }

    fn get(&self, row: usize, name: &str, nth: usize) -> i64 {
        let (table, at, words) = self.column(row, name, nth);
        let of = self.tables[table].lock().unwrap_or_else(PoisonError::into_inner);
        match words {
            1 => i64::from(of[at]),
            _ => i64::from(of[at].cast_unsigned()) | i64::from(of[at + 1]) << 32,
        }
    }

    fn put(&self, row: usize, name: &str, value: i32) {
        let (table, at, _) = self.column(row, name, 0);
        self.tables[table].lock().unwrap_or_else(PoisonError::into_inner)[at] = value;
    }

    /// Applies changes of rows.
    fn change(&self) {
        for (table, state) in self.layout().tables.iter().zip(&self.tables) {
            let [count, places, values] = table.inputs().map(|name| self.ints(&name));
            let width = table.dtype.size_bytes() / 4;
            let mut words = state.lock().unwrap_or_else(PoisonError::into_inner);
            for (place, value) in places[..count[0] as usize].iter().zip(values.chunks(width)) {
                let at = usize::try_from(*place).expect("is a place") * width;
                words[at..at + width].copy_from_slice(value);
            }
        }
    }

    /// What step `number` gives.
    fn run(&mut self, number: u64) -> Result<Vec<Vec<u8>>> {
        let failed = |why: String| RuntimeError::Device { backend: "parrot", why };
        if let Some(why) = self.device.order.failed_before(number) {
            return Err(failed(why));
        }
        if self.device.fail.swap(false, Ordering::Relaxed) {
            let why = "it was told to fail";
            self.device.order.failed(number, why);
            return Err(failed(why.to_owned()));
        }
        let mut outputs: Vec<Vec<u8>> = self.outputs[0].iter().map(|bytes| vec![0; bytes.len()]).collect();
        if self.device.blank {
            return Ok(outputs);
        }
        if self.names.iter().any(|name| name.ends_with(".places")) {
            self.change();
            return Ok(outputs);
        }
        let [ids, of, starts, rows] = ["token_ids", "seq_ids", "query_start", ROWS].map(|n| self.ints(n));
        let [offsets, parents] = [OFFSETS, PARENTS].map(|n| self.ints(n));
        let (forbidden, targets) = (self.ints("forbidden"), self.ints("targets"));
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let row_of = |line: usize| usize::try_from(rows[line]).ok();
        let before: Vec<usize> = (0..self.rows)
            .map(|line| row_of(line).map_or(0, |row| self.get(row, LENGTH, 0) as usize))
            .zip(offsets.iter().chain(std::iter::repeat(&0)))
            .map(|(length, offset)| length + *offset as usize)
            .collect();
        let slot = |row: usize, position: usize| {
            let block = self.get(row, "block_table", position / self.block_size) - 1;
            let block = usize::try_from(block).expect("a token's block is in the table");
            block * self.block_size + position % self.block_size
        };
        let mut written = HashSet::new();
        for (at, (id, line)) in ids.iter().zip(&of).enumerate() {
            let Some((line, row)) = usize::try_from(*line).ok().and_then(|line| Some((line, row_of(line)?))) else {
                continue;
            };
            let id = if *id < 0 { self.get(row, LAST_TOKEN, 0) as u32 } else { *id as u32 };
            let position = before[line] + at - starts[line] as usize;
            let before = position.checked_sub(1).map(|before| history[slot(row, before)]);
            let slot = slot(row, position);
            assert!(written.insert(slot), "two tokens of a step are written to slot {slot}");
            history[slot] = keep(before, id, self.by_codes);
        }
        let said = |row: usize, length: usize| -> Vec<i32> {
            (0..length).map(|position| history[slot(row, position)]).collect()
        };
        let mut put = |name: &str, index: usize, word: [u8; 4]| {
            if let Some(at) = self.results.iter().position(|n| n == name) {
                outputs[at].as_chunks_mut::<4>().0[index] = word;
            }
        };
        for (at, target) in targets.iter().enumerate() {
            if let (Ok(target), Ok(line)) = (u32::try_from(*target), usize::try_from(of[at])) {
                let row = row_of(line).expect("a token with a target has a row");
                let cache = said(row, before[line] + at - starts[line] as usize + 1);
                put("scores", at, score(&cache, target).to_le_bytes());
                for i in 0..self.top {
                    put("score_ids", at * self.top + i, (i as i32).to_le_bytes());
                    put("score_logprobs", at * self.top + i, score(&cache, i as u32).to_le_bytes());
                }
            }
        }
        let mut accepted: Vec<Option<i32>> = vec![None; self.rows];
        for line in 0..self.rows {
            let count = (starts[line + 1] - starts[line]) as usize;
            let Some(row) = row_of(line).filter(|_| count > 0) else { continue };
            let length = before[line] + count;
            let parent = parents.get(line).copied().unwrap_or(AcceptCandidates::ROOT);
            let follows = usize::try_from(parent).map(|parent| accepted[parent] == Some(ids[starts[line] as usize]));
            let is_accepted = follows.unwrap_or(parent == AcceptCandidates::ROOT);
            if is_accepted {
                self.put(row, LENGTH, length as i32);
            }
            if !self.results.iter().any(|name| name.starts_with("next")) {
                continue;
            }
            let cache = said(row, length);
            let bit =
                |t: u32| forbidden.get(line * self.words + t as usize / 32).is_some_and(|w| w >> (t % 32) & 1 == 1);
            let bit = |t: u32| self.words > 0 && bit(t);
            let token = next_token(&cache, self.get(row, "sequence", 0).cast_unsigned(), bit);
            let word = token.map_or(-1, |t| t as i32);
            if is_accepted {
                accepted[line] = Some(word);
                self.put(row, LAST_TOKEN, word);
            }
            let logprob = token.map_or(f32::NAN, |t| score(&cache, t)).to_le_bytes();
            for (next, its) in [("next", "logprob"), ("next_adjusted", "adjusted_logprob")] {
                put(next, line, word.to_le_bytes());
                put(its, line, logprob);
            }
            for i in 0..self.top {
                put("top_ids", line * self.top + i, (i as i32).to_le_bytes());
                put("top_logprobs", line * self.top + i, score(&cache, i as u32).to_le_bytes());
            }
        }
        Ok(outputs)
    }

    /// Takes over what was staged.
    fn copy(&mut self, slot: usize, staged: &[Staged]) {
        for Staged { input, bytes } in staged {
            self.inputs[*input][..*bytes].copy_from_slice(&self.staging[slot][*input][..*bytes]);
        }
    }
}

impl Run for Step {
    fn input(&mut self, slot: usize, index: usize) -> &mut [u8] {
        &mut self.staging[slot][index]
    }

    fn submit(&mut self, slot: usize, staged: &[Staged], held: bool) -> Result<()> {
        assert!(self.held.is_none() && self.outcomes[slot].is_none(), "the slot is free, and no step is held");
        self.copy(slot, staged);
        let order = Arc::clone(&self.device.order);
        let number = order.submit(held, |_| Ok(()))?;
        self.numbers[slot] = number;
        if held {
            self.held = Some(slot);
        } else {
            self.outcomes[slot] = Some(self.run(number));
        }
        if !self.device.blank {
            self.staging[slot].iter_mut().chain(&mut self.outputs[slot]).for_each(|bytes| bytes.fill(POISON));
        }
        Ok(())
    }

    fn release(&mut self, slot: usize, staged: &[Staged]) -> Result<()> {
        assert_eq!(self.held.take(), Some(slot), "the step is held");
        self.copy(slot, staged);
        let number = self.numbers[slot];
        self.outcomes[slot] = Some(self.run(number));
        self.device.order.release(number, || Ok(()))
    }

    fn poll(&mut self, slot: usize) -> Result<bool> {
        self.wait(slot).map(|()| true)
    }

    fn wait(&mut self, slot: usize) -> Result<()> {
        if let Some(outcome) = self.outcomes[slot].take() {
            if outcome.is_err() {
                self.device.order.reported(self.numbers[slot]);
            }
            self.outputs[slot] = outcome?;
        }
        Ok(())
    }

    fn output(&self, slot: usize, index: usize) -> &[u8] {
        &self.outputs[slot][index]
    }
}
