//! What is done to logits before a token is chosen: biases, penalties, those of DRY, and what a
//! grammar forbids.
//!
//! Floor: the logits read and written once, and the history of the rows that ask for it read once. A row whose settings
//! change nothing is copied.

use std::ops::Range;

use ridge_graph::DType;
use ridge_graph::ops::Dry as DryOp;

use super::history::HistoryRows;
use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd;

pub(super) fn entries() -> [KernelEntry; 4] {
    [
        KernelEntry::new("logit_bias", "logit_bias(x, ids, values)", |_| true, |s| make(s, What::Bias)),
        KernelEntry::new(
            "penalties",
            "penalties(x, history, table, lengths, prompts, repetition, frequency, presence)",
            |_| true,
            |s| make(s, What::Penalties),
        ),
        KernelEntry::new(
            "dry",
            "dry(x, history, table, lengths, multiplier, base, allowed, range, breakers)",
            |_| true,
            |s| make(s, What::Dry),
        ),
        KernelEntry::new("forbid_tokens", "forbid_tokens(x, forbidden)", |_| true, |s| make(s, What::Forbid)),
    ]
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Bias,
    Penalties,
    Dry,
    Forbid,
}

impl What {
    /// Is it about what was said before?
    fn reads_history(self) -> bool {
        matches!(self, Self::Penalties | Self::Dry)
    }
}

struct Adjust {
    what: What,
    rows: usize,
    vocab: usize,
    dtype: DType,
    /// Where rows find their history, where they have one.
    history: Option<HistoryRows>,
    /// Biases, breakers, or words of forbidden tokens, of a row.
    listed: usize,
}

fn make(spec: &KernelSpec<'_>, what: What) -> Result<Box<dyn CpuKernel>, String> {
    let x = &spec.inputs[0];
    Ok(Box::new(Adjust {
        what,
        rows: x.shape[0],
        vocab: x.shape[1],
        dtype: x.dtype,
        history: what.reads_history().then(|| HistoryRows::new(&spec.inputs, 1)),
        listed: spec.inputs[if what.reads_history() { spec.inputs.len() - 1 } else { 1 }].last(),
    }))
}

impl CpuKernel for Adjust {
    fn pieces(&self) -> usize {
        self.rows
    }

    fn nanos_per_piece(&self) -> f64 {
        20.0 + self.vocab as f64 * 0.2
    }

    fn run(&self, io: &KernelIo<'_>, rows: Range<usize>, scratch: &mut Scratch) {
        let history = self.history.as_ref().map_or(0, HistoryRows::most);
        let counted = if self.what.reads_history() { self.vocab } else { 0 };
        let [ids, counts, answered] = scratch.slices::<i32, 3>([history, counted, counted]);
        for row in rows {
            // SAFETY: this row is ours alone.
            let logits = unsafe { io.output::<f32>(0).part(row * self.vocab..(row + 1) * self.vocab) };
            simd::load(io, 0, self.dtype, row * self.vocab, logits);
            match (self.what, &self.history) {
                (What::Penalties, Some(history)) => penalise(io, row, history, logits, ids, [counts, answered]),
                (What::Dry, Some(history)) => self.dry(io, row, history, logits, ids, counts),
                (What::Forbid, _) => self.forbid(io, row, logits),
                _ => self.bias(io, row, logits),
            }
        }
    }
}

impl Adjust {
    fn bias(&self, io: &KernelIo<'_>, row: usize, logits: &mut [f32]) {
        let listed = row * self.listed..(row + 1) * self.listed;
        for (id, value) in io.input::<i32>(1)[listed.clone()].iter().zip(&io.input::<f32>(2)[listed]) {
            if let Some(logit) = usize::try_from(*id).ok().and_then(|id| logits.get_mut(id)) {
                *logit += value;
            }
        }
    }

    fn forbid(&self, io: &KernelIo<'_>, row: usize, logits: &mut [f32]) {
        let words = &io.input::<i32>(1)[row * self.listed..(row + 1) * self.listed];
        for (word, logits) in words.iter().zip(logits.chunks_mut(32)).filter(|(word, _)| **word != 0) {
            let forbidden = logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 1);
            forbidden.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
        }
    }

    fn dry(
        &self,
        io: &KernelIo<'_>,
        row: usize,
        history: &HistoryRows,
        logits: &mut [f32],
        ids: &mut [i32],
        longest: &mut [i32],
    ) {
        let (multiplier, base) = (io.input::<f32>(4)[row], io.input::<f32>(5)[row]);
        let (allowed, range) = (io.input::<i32>(6)[row], io.input::<i32>(7)[row]);
        // Not a number asks for nothing.
        if multiplier.is_nan() || multiplier <= 0.0 {
            return;
        }
        let length = history.read(io, row, ids);
        let start = usize::try_from(range).ok().filter(|r| *r > 0).map_or(0, |range| length.saturating_sub(range));
        let ids = &ids[start..length];
        let breakers = &io.input::<i32>(8)[row * self.listed..][..self.listed];
        let Some((last, before)) = ids.split_last() else { return };
        if breakers.contains(last) {
            return;
        }
        longest.fill(0);
        for at in (0..before.len()).filter(|at| before[*at] == *last) {
            let next = ids[at + 1];
            let Some(longest) = usize::try_from(next).ok().and_then(|next| longest.get_mut(next)) else { continue };
            if breakers.contains(&next) {
                continue;
            }
            let goes_on = |back: &usize| {
                let token = ids[before.len() - back];
                *back <= at && ids[at - back] == token && !breakers.contains(&token)
            };
            let length = 1 + (1..DryOp::LONGEST).take_while(goes_on).count() as i32;
            *longest = length.max(*longest);
        }
        for (logit, length) in logits.iter_mut().zip(&*longest) {
            if *length > 0 && *length >= allowed {
                *logit -= multiplier * base.powf((length - allowed) as f32);
            }
        }
    }
}

fn penalise(
    io: &KernelIo<'_>,
    row: usize,
    history: &HistoryRows,
    logits: &mut [f32],
    ids: &mut [i32],
    [said, answered]: [&mut [i32]; 2],
) {
    let [repetition, frequency, presence] = [5, 6, 7].map(|i| io.input::<f32>(i)[row]);
    if repetition == 1.0 && frequency == 0.0 && presence == 0.0 {
        return;
    }
    let length = history.read(io, row, ids);
    let prompt = usize::try_from(io.input::<i32>(4)[row]).unwrap_or(0);
    said.fill(0);
    answered.fill(0);
    for (position, id) in ids[..length].iter().enumerate() {
        if let Some(id) = usize::try_from(*id).ok().filter(|id| *id < said.len()) {
            said[id] = 1;
            answered[id] += i32::from(position >= prompt);
        }
    }
    for ((logit, said), answered) in logits.iter_mut().zip(&*said).zip(&*answered) {
        if *said > 0 {
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        }
        if *answered > 0 {
            *logit = *logit - *answered as f32 * frequency - presence;
        }
    }
}
