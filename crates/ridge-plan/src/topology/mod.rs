//! Which rank goes on which GPU: the axes of a layout laid over the links of a machine that `nvidia-smi topo -m` shows,
//! the axis that sends most on the shortest ways.
//!
//! Ranks are numbered with tensor parallelism innermost, then context, data and pipeline parallelism; experts are spread
//! over neighbours of the context and data axes. What is left to choose is which GPU each place of a node is: places are
//! swapped while that makes the busiest axis quicker, and then the next. `links` says what a way carries.

mod links;
mod place;
#[cfg(test)]
mod tests;

use ridge_hw::topology::{Matrix, PathType};
use serde::Serialize;

pub use links::{Rates, SOURCE};
pub use place::{AxisUse, Placement, Seat};

use crate::error::PlanError;

/// An axis of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Tensor parallelism.
    Tp,
    /// Expert parallelism.
    Ep,
    /// Context parallelism.
    Cp,
    /// Data parallelism.
    Dp,
    /// Pipeline parallelism.
    Pp,
}

impl Axis {
    /// All of them, that which sends most first.
    pub const ALL: [Self; 5] = [Self::Tp, Self::Ep, Self::Cp, Self::Dp, Self::Pp];

    /// As it is typed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tp => "tp",
            Self::Ep => "ep",
            Self::Cp => "cp",
            Self::Dp => "dp",
            Self::Pp => "pp",
        }
    }

    /// What it sends, and when: why it stands where it stands.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Tp => "sums activations four times a layer, and the layer waits",
            Self::Ep => "sends tokens to their experts and back in each layer, and the layer waits",
            Self::Cp => "passes keys and values round in each layer, beside attention",
            Self::Dp => "sums gradients once a step, beside the backward pass",
            Self::Pp => "passes one stage's activations to the next, once a micro-batch",
        }
    }
}

/// Degrees of parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Degrees {
    /// Tensor parallel ranks.
    pub tp: usize,
    /// Pipeline stages.
    pub pp: usize,
    /// Data parallel ranks.
    pub dp: usize,
    /// Context parallel ranks.
    pub cp: usize,
    /// Ranks of the context and data axes that share the experts.
    pub ep: usize,
}

impl Degrees {
    /// Ranks in all.
    pub fn ranks(&self) -> usize {
        [self.tp, self.pp, self.dp, self.cp].into_iter().fold(1, usize::saturating_mul)
    }

    fn of(&self, axis: Axis) -> usize {
        match axis {
            Axis::Tp => self.tp,
            Axis::Ep => self.ep,
            Axis::Cp => self.cp,
            Axis::Dp => self.dp,
            Axis::Pp => self.pp,
        }
    }

    /// Ranks between a rank and its neighbour on the axis.
    fn stride(&self, axis: Axis) -> usize {
        match axis {
            Axis::Tp => 1,
            Axis::Cp | Axis::Ep => self.tp,
            Axis::Dp => self.tp * self.cp,
            Axis::Pp => self.tp * self.cp * self.dp,
        }
    }

    /// Degrees that fill `gpus` of each of `nodes` alike.
    ///
    /// # Errors
    /// [`PlanError::Setting`] where they do not, with what would.
    fn check(&self, gpus: usize, nodes: usize) -> Result<usize, PlanError> {
        for axis in Axis::ALL {
            if self.of(axis) == 0 {
                return Err(PlanError::setting(
                    axis.name(),
                    0,
                    "is no degree",
                    "set 1 for an axis that is not divided",
                ));
            }
        }
        let ranks = self.ranks();
        if !(self.dp * self.cp).is_multiple_of(self.ep) {
            let nearest = (1..=self.ep).rev().find(|n| (self.dp * self.cp).is_multiple_of(*n)).unwrap_or(1);
            let problem = format!("does not divide dp x cp = {}, whose ranks share the experts", self.dp * self.cp);
            return Err(PlanError::setting("ep", self.ep, problem, format!("the nearest below is {nearest}")));
        }
        if !ranks.is_multiple_of(nodes) {
            let problem = format!("ranks (tp x cp x dp x pp) do not divide over {nodes} nodes alike");
            let remedy = format!("set dp or pp so that they are a multiple of {nodes}");
            return Err(PlanError::setting("ranks", ranks, problem, remedy));
        }
        let local = ranks / nodes;
        if local > gpus {
            let problem = format!("(tp x cp x dp x pp) is more than the {} GPUs of {nodes} nodes", gpus * nodes);
            let remedy = format!("set nodes = {}, or lower a degree", ranks.div_ceil(gpus));
            return Err(PlanError::setting("ranks", ranks, problem, remedy));
        }
        Ok(local)
    }
}

/// Ranks on the GPUs of `nodes` machines like `matrix`.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// Degrees.
    pub degrees: Degrees,
    /// Machines.
    pub nodes: usize,
    /// Ranks of each.
    pub ranks_per_node: usize,
    /// Which rank of a node sits where, and what each axis has.
    pub best: Placement,
    /// The same with ranks numbered the other way round, pipeline parallelism innermost.
    pub reversed: Placement,
    /// The same with the GPUs of a node in the order that suits the axes least.
    pub shuffled: Placement,
}

impl Advice {
    /// Advice for these degrees.
    ///
    /// # Errors
    /// [`PlanError::Setting`] where the degrees do not fill the machines.
    pub fn new(matrix: &Matrix, rates: &Rates, degrees: Degrees, nodes: usize) -> Result<Self, PlanError> {
        if nodes == 0 {
            return Err(PlanError::setting("nodes", 0, "is no number of machines", "set 1 or more"));
        }
        let local = degrees.check(matrix.gpus.len(), nodes)?;
        let place = place::Places { matrix, rates, degrees, local, nodes };
        Ok(Self {
            degrees,
            nodes,
            ranks_per_node: local,
            best: place.best(),
            reversed: place.reversed(),
            shuffled: place.shuffled(),
        })
    }
}

/// Ways of a machine's GPU pairs, each with how many have it, the shortest first.
pub fn ways(matrix: &Matrix) -> Vec<(PathType, usize)> {
    let mut all: Vec<PathType> = (0..matrix.gpus.len()).flat_map(|i| matrix.between[i][..i].iter().copied()).collect();
    // More links before fewer.
    all.sort_by_key(|w| if let PathType::NvLink(n) = w { (*w.min(&PathType::Pix), u32::MAX - n) } else { (*w, 0) });
    all.chunk_by(|a, b| a == b).map(|same| (same[0], same.len())).collect()
}
