//! How a training step is divided over GPUs, and which divisions have a meaning.

use std::fmt;

use ridge_hw::units::Bytes;
use serde::Serialize;

use crate::error::PlanError;
use crate::reading::Reading;

/// What is computed again in the backward pass rather than kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing.
    None,
    /// The inside of attention (Korthikanti et al. 2022, section 5). Fused attention does so by itself.
    Attention,
    /// Everything but attention and every second matrix product: what TorchTitan calls selective.
    Products,
    /// Whole layers from their inputs.
    Full,
}

impl Recompute {
    /// All of them, from what keeps most.
    pub const ALL: [Self; 4] = [Self::None, Self::Attention, Self::Products, Self::Full];
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::None => "none",
            Self::Attention => "attention",
            Self::Products => "products",
            Self::Full => "full",
        })
    }
}

/// Degrees of parallelism and what goes with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Layout {
    /// Tensor parallel ranks.
    pub tp: usize,
    /// Pipeline stages.
    pub pp: usize,
    /// Data parallel replicas.
    pub dp: usize,
    /// Ranks that share a sequence.
    pub cp: usize,
    /// Ranks, of those of `dp * cp`, that share the experts.
    pub ep: usize,
    /// Sequences of a micro-batch.
    pub micro_batch: usize,
    /// Chunks of layers of each stage; 1 without interleaving.
    pub interleave: usize,
    /// What is computed again.
    pub recompute: Recompute,
    /// ZeRO stage (Rajbhandari et al. 2020): 1 cuts optimiser states over `dp * cp`, 2 gradients too, 3 weights too.
    pub zero: u8,
    /// Are activations outside products cut over tensor parallelism (Korthikanti et al. 2022, section 4.2.2)?
    pub sequence_parallel: bool,
}

impl Default for Layout {
    fn default() -> Self {
        let recompute = Recompute::None;
        Self {
            tp: 1,
            pp: 1,
            dp: 1,
            cp: 1,
            ep: 1,
            micro_batch: 1,
            interleave: 1,
            recompute,
            zero: 0,
            sequence_parallel: false,
        }
    }
}

/// Why a layout has no meaning. Small, so that a search can have millions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Reject {
    /// A degree is 0.
    Zero,
    /// Heads do not divide over tensor parallelism.
    Heads {
        /// Heads there are.
        heads: usize,
        /// Nearest number of ranks that works.
        nearest: usize,
    },
    /// Layers do not divide over stages and chunks.
    Layers {
        /// Layers there are.
        layers: usize,
        /// Nearest number of stages that works.
        nearest: usize,
    },
    /// Experts do not divide.
    Experts {
        /// Experts there are.
        experts: usize,
        /// Nearest number of ranks that works.
        nearest: usize,
    },
    /// Expert parallelism needs ranks of data parallelism.
    ExpertRanks {
        /// Ranks that there are.
        ranks: usize,
    },
    /// The batch does not divide into micro-batches of the replicas.
    Batch {
        /// Sequences of a step.
        global: usize,
        /// Sequences that all replicas take at once.
        unit: usize,
    },
    /// Sequences do not divide over context parallelism.
    Sequence {
        /// Tokens of a sequence.
        seq: usize,
        /// Ranks.
        cp: usize,
    },
    /// Interleaving needs more than one stage.
    Interleave,
    /// ZeRO above 1 would reduce or gather for every micro-batch of a pipeline.
    ZeroWithPipeline,
    /// There is no ZeRO stage of this number.
    ZeroStage,
    /// Ridge's own training does not do it yet.
    NotOfRidge {
        /// What.
        what: &'static str,
    },
    /// It does not fit.
    Memory {
        /// Memory needed on the rank with the highest use, in MiB, rounded up.
        needed_mib: u64,
        /// Available memory, in MiB, rounded down.
        has_mib: u64,
    },
}

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Zero => f.write_str("a degree is 0; the minimum is 1"),
            Self::Heads { heads, nearest } => {
                write!(f, "tp does not divide {heads} heads; the nearest divisor is {nearest}")
            }
            Self::Layers { layers, nearest } => {
                write!(f, "pp times interleave does not divide {layers} layers; the nearest valid pp is {nearest}")
            }
            Self::Experts { experts: 0, .. } => f.write_str("ep is above 1, but the model has no experts; set ep to 1"),
            Self::Experts { experts, nearest } => {
                write!(f, "ep does not divide {experts} experts; the nearest divisor is {nearest}")
            }
            Self::ExpertRanks { ranks } => {
                write!(f, "ep does not divide dp * cp = {ranks}, whose ranks share the experts")
            }
            Self::Batch { global, unit } => {
                let nearest = (global as f64 / unit as f64).round().max(1.0) as usize * unit;
                write!(
                    f,
                    "dp * micro-batch = {unit} does not divide a batch of {global} sequences; the nearest batch is {nearest}"
                )
            }
            Self::Sequence { seq, cp } => write!(f, "2 cp = {} does not divide sequences of {seq} tokens", 2 * cp),
            Self::Interleave => f.write_str("interleave is above 1, but there is one stage; set interleave to 1"),
            Self::ZeroWithPipeline => f.write_str(
                "ZeRO 2 and 3 communicate in every micro-batch, which is too slow with a pipeline; use ZeRO 1, or pp = 1",
            ),
            Self::ZeroStage => f.write_str("ZeRO stages are 0 to 3"),
            Self::NotOfRidge { what } => write!(f, "Ridge does not train with {what}; leave it out, or --software"),
            Self::Memory { needed_mib, has_mib } => {
                let gib = |mib: u64| mib as f64 / 1024.0;
                // Amounts that are nearly alike read alike; what is lacking does not.
                let lacking = Bytes::from_mib(needed_mib.saturating_sub(has_mib));
                write!(f, "needs {:.1} GiB per GPU of {:.1}, {lacking} more than it has", gib(needed_mib), gib(has_mib))
            }
        }
    }
}

/// The divisor of `n` nearest to `to`.
fn nearest_divisor(n: usize, to: usize) -> usize {
    (1..=n).filter(|d| n.is_multiple_of(*d)).min_by_key(|d| d.abs_diff(to)).unwrap_or(1)
}

impl Layout {
    /// GPUs that it takes.
    pub fn gpus(&self) -> usize {
        self.tp * self.pp * self.dp * self.cp
    }

    /// Does it divide the model, `global_batch` sequences a step and `seq` tokens of each?
    ///
    /// # Errors
    /// The first thing that it does not.
    pub fn check(&self, reading: &Reading, seq: usize, global_batch: usize) -> Result<(), Reject> {
        if [self.tp, self.pp, self.dp, self.cp, self.ep, self.micro_batch, self.interleave].contains(&0) {
            return Err(Reject::Zero);
        }
        if reading.heads > 0 && !reading.heads.is_multiple_of(self.tp) {
            return Err(Reject::Heads { heads: reading.heads, nearest: nearest_divisor(reading.heads, self.tp) });
        }
        let layers = reading.layers.len();
        if !layers.is_multiple_of(self.pp * self.interleave) {
            return Err(Reject::Layers { layers, nearest: nearest_divisor(layers, self.pp) });
        }
        if self.ep > 1 && (reading.experts == 0 || !reading.experts.is_multiple_of(self.ep)) {
            let experts = reading.experts;
            return Err(Reject::Experts { experts, nearest: nearest_divisor(experts, self.ep) });
        }
        let ranks = self.dp * self.cp;
        if !ranks.is_multiple_of(self.ep) {
            return Err(Reject::ExpertRanks { ranks });
        }
        let unit = self.dp * self.micro_batch;
        if !global_batch.is_multiple_of(unit) || global_batch == 0 {
            return Err(Reject::Batch { global: global_batch, unit });
        }
        if self.cp > 1 && !seq.is_multiple_of(2 * self.cp) {
            return Err(Reject::Sequence { seq, cp: self.cp });
        }
        if self.interleave > 1 && self.pp == 1 {
            return Err(Reject::Interleave);
        }
        if self.zero > 3 {
            return Err(Reject::ZeroStage);
        }
        if let Some(what) = self.not_of_ridge().filter(|_| reading.is_of_ridge()) {
            return Err(Reject::NotOfRidge { what });
        }
        if self.zero > 1 && self.pp > 1 {
            return Err(Reject::ZeroWithPipeline);
        }
        Ok(())
    }

    /// What of it Ridge's own training does not do yet.
    fn not_of_ridge(&self) -> Option<&'static str> {
        let missing = [
            (self.pp > 1, "pipeline stages (pp)"),
            (self.cp > 1, "sequences over several ranks (cp)"),
            (self.ep > 1, "experts over several ranks (ep)"),
            (self.recompute != Recompute::None, "recomputation"),
            (self.sequence_parallel, "sequence parallelism"),
            (matches!(self.zero, 1 | 2), "ZeRO 1 and 2, because it shards all states or none"),
        ];
        missing.into_iter().find_map(|(asked, what)| asked.then_some(what))
    }

    /// As [`Layout::check`], with the error of a plan.
    ///
    /// # Errors
    /// [`PlanError::Setting`] with the layout and what does not divide.
    pub fn require(&self, reading: &Reading, seq: usize, global_batch: usize) -> Result<(), PlanError> {
        self.check(reading, seq, global_batch).map_err(|why| {
            let (problem, remedy) = (format!("{why}"), String::new());
            let (problem, remedy) =
                problem.split_once("; ").map_or((problem.clone(), remedy), |(p, r)| (p.to_owned(), r.to_owned()));
            let remedy = if remedy.is_empty() { "choose degrees that divide".to_owned() } else { remedy };
            PlanError::setting("layout", self, format!("is not possible: {problem}"), remedy)
        })
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp{} pp{} dp{}", self.tp, self.pp, self.dp)?;
        for (name, degree) in [("cp", self.cp), ("ep", self.ep), ("v", self.interleave)] {
            if degree > 1 {
                write!(f, " {name}{degree}")?;
            }
        }
        write!(f, " mb{} zero{} recompute-{}", self.micro_batch, self.zero, self.recompute)?;
        if self.sequence_parallel { f.write_str(" sp") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_that_read_alike_are_told_apart_by_their_difference() {
        let text = Reject::Memory { needed_mib: 76_731, has_mib: 76_719 }.to_string();
        assert_eq!(text, "needs 74.9 GiB per GPU of 74.9, 12 MiB more than it has");
    }
}
