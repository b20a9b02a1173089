//! A device whose model is a hash. What it keeps of a token in the cache depends on all tokens before it, as keys and
//! values do, and the token that follows a sequence depends on all that it keeps, which it reads through the block table,
//! as attention does. A block that two sequences own, that was freed too early or that was found for another prefix gives
//! other tokens, and a step costs next to nothing.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use ridge_graph::ops::Quantize;
use ridge_graph::passes::{Kernel, Pattern};
use ridge_graph::{Bindings, Function, Graph, Op, Role, Sym, Type};
use ridge_models::{HISTORY, symbols};
use ridge_runtime::{
    Backend, Buffer, MemoryBytes, MemoryOwner, Program, Result, Run, RuntimeError, Staged, WeightData, plan,
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
    let first = (fold(cache, stream) % VOCAB as u64) as u32;
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
        let at = names(Role::State).iter().position(|name| name == HISTORY);
        let mut history = State::default();
        if let Some(state) = at.and_then(|at| states[at].inner::<State>()) {
            let mut words = state.lock().unwrap_or_else(PoisonError::into_inner);
            words.resize(states[at.unwrap_or(0)].bytes() / 4, -1);
            history = Arc::clone(state);
        }
        let extent = |name: &str| bindings.get(&Sym::new(name)).unwrap_or(0);
        let block_size = self.graph.args(Role::State).find(|a| &*a.name == HISTORY);
        let results = self.graph.main().outputs.iter().filter(|o| o.role == Role::Data);
        Ok(Box::new(Step {
            device: self.device.clone(),
            by_codes: self.by_codes,
            history,
            block_size: block_size.and_then(|a| a.ty.shape.last().as_const()).unwrap_or(1),
            rows: extent(symbols::SEQS),
            table: extent(symbols::TABLE),
            top: extent(symbols::TOP),
            words: extent(symbols::FORBIDDEN),
            names: names(Role::StepInput),
            inputs: sizes.input_bytes.iter().map(|n| vec![0; *n]).collect(),
            results: results.map(|o| o.name.to_string()).collect(),
            outputs: sizes.output_bytes.iter().map(|n| vec![POISON; *n]).collect(),
            outcome: None,
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
    block_size: usize,
    rows: usize,
    table: usize,
    top: usize,
    words: usize,
    names: Vec<String>,
    inputs: Vec<Vec<u8>>,
    results: Vec<String>,
    outputs: Vec<Vec<u8>>,
    /// What the step that was submitted gives.
    outcome: Option<Result<Vec<Vec<u8>>>>,
}

impl Step {
    /// A step input in words; none where the program does not read it.
    fn ints(&self, name: &str) -> Vec<i32> {
        let at = self.names.iter().position(|n| n == name);
        let bytes = at.map_or(&[][..], |at| &self.inputs[at]);
        bytes.as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word)).collect()
    }

    fn streams(&self) -> Vec<u64> {
        let at = self.names.iter().position(|n| n == "sequence");
        let bytes = at.map_or(&[][..], |at| &self.inputs[at]);
        bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
    }

    fn run(&self) -> Result<Vec<Vec<u8>>> {
        if self.device.fail.swap(false, Ordering::Relaxed) {
            return Err(RuntimeError::Device { backend: "parrot", why: "it was told to fail".to_owned() });
        }
        let mut outputs: Vec<Vec<u8>> = self.outputs.iter().map(|bytes| vec![0; bytes.len()]).collect();
        if self.device.blank {
            return Ok(outputs);
        }
        let [ids, rows, starts, lengths] = ["token_ids", "seq_ids", "query_start", "lengths"].map(|n| self.ints(n));
        let (table, forbidden, targets) = (self.ints("block_table"), self.ints("forbidden"), self.ints("targets"));
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = |row: usize, position: usize| {
            let block = table[row * self.table + position / self.block_size];
            let block = usize::try_from(block).expect("a token's block is in the table");
            block * self.block_size + position % self.block_size
        };
        let mut written = HashSet::new();
        for (at, (id, row)) in ids.iter().zip(&rows).enumerate() {
            if let Ok(row) = usize::try_from(*row) {
                let position = lengths[row] as usize + at - starts[row] as usize;
                let before = position.checked_sub(1).map(|before| history[slot(row, before)]);
                let slot = slot(row, position);
                assert!(written.insert(slot), "two tokens of a step are written to slot {slot}");
                history[slot] = keep(before, *id as u32, self.by_codes);
            }
        }
        let streams = self.streams();
        let said = |row: usize, length: usize| -> Vec<i32> {
            (0..length).map(|position| history[slot(row, position)]).collect()
        };
        let mut put = |name: &str, index: usize, word: [u8; 4]| {
            if let Some(at) = self.results.iter().position(|n| n == name) {
                outputs[at].as_chunks_mut::<4>().0[index] = word;
            }
        };
        for row in 0..self.rows {
            let count = (starts[row + 1] - starts[row]) as usize;
            let Some(stream) = streams.get(row).filter(|_| count > 0) else { continue };
            let cache = said(row, lengths[row] as usize + count);
            let bit =
                |t: u32| forbidden.get(row * self.words + t as usize / 32).is_some_and(|w| w >> (t % 32) & 1 == 1);
            let bit = |t: u32| self.words > 0 && bit(t);
            let token = next_token(&cache, *stream, bit);
            let word = token.map_or(-1, |t| t as i32).to_le_bytes();
            let logprob = token.map_or(f32::NAN, |t| score(&cache, t)).to_le_bytes();
            for (next, its) in [("next", "logprob"), ("next_adjusted", "adjusted_logprob")] {
                put(next, row, word);
                put(its, row, logprob);
            }
            for i in 0..self.top {
                put("top_ids", row * self.top + i, (i as i32).to_le_bytes());
                put("top_logprobs", row * self.top + i, score(&cache, i as u32).to_le_bytes());
            }
        }
        for (at, target) in targets.iter().enumerate() {
            if let (Ok(target), Ok(row)) = (u32::try_from(*target), usize::try_from(rows[at])) {
                let cache = said(row, lengths[row] as usize + at - starts[row] as usize + 1);
                put("scores", at, score(&cache, target).to_le_bytes());
            }
        }
        Ok(outputs)
    }
}

impl Run for Step {
    fn input(&mut self, _slot: usize, index: usize) -> &mut [u8] {
        &mut self.inputs[index]
    }

    fn submit(&mut self, slot: usize, _staged: &[Staged], held: bool) -> Result<()> {
        assert!(slot == 0 && !held, "one step at a time");
        self.outcome = Some(self.run());
        if !self.device.blank {
            self.inputs.iter_mut().chain(&mut self.outputs).for_each(|bytes| bytes.fill(POISON));
        }
        Ok(())
    }

    fn release(&mut self, _slot: usize, _staged: &[Staged]) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, slot: usize) -> Result<bool> {
        self.wait(slot).map(|()| true)
    }

    fn wait(&mut self, _slot: usize) -> Result<()> {
        if let Some(outcome) = self.outcome.take() {
            self.outputs = outcome?;
        }
        Ok(())
    }

    fn output(&self, _slot: usize, index: usize) -> &[u8] {
        &self.outputs[index]
    }
}
