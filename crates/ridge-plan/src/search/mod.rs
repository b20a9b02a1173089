//! All ways to divide a training step over a number of GPUs: each is timed and held against memory, or rejected with its
//! reason. Nothing is allocated for a layout that is rejected, and the graph is read once before, so a core goes through
//! some hundred thousand layouts a second.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::efficiency::Machine;
use crate::ledger::training_total;
use crate::reading::Reading;
use crate::train::{Layout, Recompute, Reject, StepTime, Workload, step_time};

/// What may be chosen.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SearchSpace {
    /// GPUs, all of which are used.
    pub gpus: usize,
    /// Sequences of a micro-batch.
    pub micro_batches: Vec<usize>,
    /// Chunks of a stage.
    pub interleaves: Vec<usize>,
    /// What is computed again.
    pub recomputes: Vec<Recompute>,
    /// ZeRO stages.
    pub zeros: Vec<u8>,
    /// Most ranks of tensor parallelism: those of a node, mostly.
    pub most_tp: usize,
    /// Most ranks of context parallelism.
    pub most_cp: usize,
    /// Is sequence parallelism taken with tensor parallelism?
    pub sequence_parallel: bool,
    /// Share of the memory that may be used.
    pub utilisation: f64,
}

impl SearchSpace {
    /// Everything on `gpus` of nodes of `node`.
    pub fn new(gpus: usize, node: usize) -> Self {
        Self {
            gpus,
            micro_batches: vec![1, 2, 4, 8, 16],
            interleaves: vec![1, 2, 4],
            recomputes: Recompute::ALL.to_vec(),
            zeros: vec![0, 1, 2, 3],
            most_tp: node,
            most_cp: 16,
            sequence_parallel: true,
            utilisation: 0.94,
        }
    }
}

/// A layout that fits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LayoutCandidate {
    /// The layout.
    pub layout: Layout,
    /// Its time.
    pub step: StepTime,
    /// Bytes of the fullest rank.
    pub bytes: f64,
}

/// What a search found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SearchResult {
    /// Those that fit, fastest first.
    pub ranked: Vec<LayoutCandidate>,
    /// How many layouts were looked at.
    pub seen: usize,
    /// Rejected ones by reason, with one of each: the first, or of those that need too much memory the one that needs
    /// least.
    pub rejected: BTreeMap<String, (usize, Layout)>,
}

/// Divisors of `n` that are at most `most`.
fn divisors(n: usize, most: usize) -> impl Iterator<Item = usize> {
    (1..=n.min(most)).filter(move |d| n.is_multiple_of(*d))
}

/// Calls `each` with every layout of `space` for `reading`, whether or not it has a meaning.
pub fn layouts(reading: &Reading, space: &SearchSpace, mut each: impl FnMut(Layout)) {
    let experts = if reading.experts > 0 { space.gpus.min(reading.experts) } else { 1 };
    for tp in divisors(space.gpus, space.most_tp) {
        for pp in divisors(space.gpus / tp, reading.layers.len()) {
            for cp in divisors(space.gpus / tp / pp, space.most_cp) {
                let dp = space.gpus / tp / pp / cp;
                for ep in divisors(dp * cp, experts) {
                    for &micro_batch in &space.micro_batches {
                        for &interleave in space.interleaves.iter().filter(|v| pp > 1 || **v == 1) {
                            for &recompute in &space.recomputes {
                                for &zero in &space.zeros {
                                    each(Layout {
                                        tp,
                                        pp,
                                        dp,
                                        cp,
                                        ep,
                                        micro_batch,
                                        interleave,
                                        recompute,
                                        zero,
                                        sequence_parallel: space.sequence_parallel && tp > 1,
                                    });
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Looks at every layout of `space`.
pub fn search(reading: &Reading, machine: &Machine, work: &Workload, space: &SearchSpace) -> SearchResult {
    let mut found = SearchResult::default();
    let mut rejected: BTreeMap<RejectKind, (usize, Layout, Reject)> = BTreeMap::new();
    let has = machine.memory * space.utilisation;
    let mut space = space.clone();
    // Fused attention makes its scores again in any case.
    space.recomputes.retain(|r| !work.fused_attention || *r != Recompute::Attention);
    layouts(reading, &space, |layout| {
        found.seen += 1;
        match judge(reading, machine, work, &layout, has) {
            Ok(candidate) => found.ranked.push(candidate),
            Err(why) => {
                let kept = rejected.entry(RejectKind::of(why)).or_insert((0, layout, why));
                kept.0 += 1;
                // Of those that are too large the smallest is the nearest to fitting.
                if matches!(why, Reject::Memory { .. }) && why < kept.2 {
                    (kept.1, kept.2) = (layout, why);
                }
            }
        }
    });
    found.ranked.sort_by(|a, b| a.step.total.total_cmp(&b.step.total));
    found.rejected = rejected.into_values().map(|(count, layout, why)| (why.to_string(), (count, layout))).collect();
    found
}

/// One layout: what it takes, or why not.
///
/// # Errors
/// What it does not divide, or that it needs more than `has` bytes.
pub fn judge(
    reading: &Reading,
    machine: &Machine,
    work: &Workload,
    layout: &Layout,
    has: f64,
) -> Result<LayoutCandidate, Reject> {
    layout.check(reading, work.seq, work.global_batch)?;
    let bytes = training_total(reading, layout, work);
    if bytes > has {
        let [needed, has] = [bytes, has].map(|bytes| bytes / 1_048_576.0);
        return Err(Reject::Memory { needed_mib: needed.ceil() as u64, has_mib: has as u64 });
    }
    Ok(LayoutCandidate { layout: *layout, step: step_time(reading, machine, layout, work), bytes })
}

/// Reasons, their numbers left out.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct RejectKind(&'static str);

impl RejectKind {
    fn of(why: Reject) -> Self {
        Self(match why {
            Reject::Zero => "zero",
            Reject::Heads { .. } => "heads",
            Reject::Layers { .. } => "layers",
            Reject::Experts { .. } => "experts",
            Reject::ExpertRanks { .. } => "expert ranks",
            Reject::Batch { .. } => "batch",
            Reject::Sequence { .. } => "sequence",
            Reject::Interleave => "interleave",
            Reject::ZeroWithPipeline => "zero with pipeline",
            Reject::ZeroStage => "zero stage",
            Reject::NotOfRidge { .. } => "not of Ridge",
            Reject::Memory { .. } => "memory",
        })
    }
}

/// Those of several searches that no other beats in time, money and memory at once: `(step seconds, GPUs, bytes)`, all
/// to be small, money being time times GPUs.
pub fn pareto(candidates: &[LayoutCandidate]) -> Vec<LayoutCandidate> {
    let key = |c: &LayoutCandidate| [c.step.total, c.step.total * c.layout.gpus() as f64, c.bytes];
    let mut sorted: Vec<LayoutCandidate> = candidates.to_vec();
    sorted.sort_by(|a, b| a.step.total.total_cmp(&b.step.total).then(a.bytes.total_cmp(&b.bytes)));
    let mut front: Vec<LayoutCandidate> = Vec::new();
    for c in sorted {
        // Nothing behind is faster, so only those in front can beat it.
        if !front.iter().any(|f| key(f).iter().zip(key(&c)).all(|(f, c)| *f <= c)) {
            front.push(c);
        }
    }
    front
}
