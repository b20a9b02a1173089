//! Axes of a layout and their degrees.

use serde::Serialize;

use crate::error::PlanError;

/// An axis of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ParallelAxis {
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

impl ParallelAxis {
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
            Self::Tp => "reduces activations four times per layer, not overlapped",
            Self::Ep => "sends tokens to their experts and back in each layer, not overlapped",
            Self::Cp => "passes keys and values around in each layer, overlapped with attention",
            Self::Dp => "reduces gradients once per step, overlapped with the backward pass",
            Self::Pp => "sends activations to the next stage once per micro-batch",
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

    pub(super) fn of(&self, axis: ParallelAxis) -> usize {
        match axis {
            ParallelAxis::Tp => self.tp,
            ParallelAxis::Ep => self.ep,
            ParallelAxis::Cp => self.cp,
            ParallelAxis::Dp => self.dp,
            ParallelAxis::Pp => self.pp,
        }
    }

    /// Ranks between a rank and its neighbour on the axis.
    pub(super) fn stride(&self, axis: ParallelAxis) -> usize {
        match axis {
            ParallelAxis::Tp => 1,
            ParallelAxis::Cp | ParallelAxis::Ep => self.tp,
            ParallelAxis::Dp => self.tp * self.cp,
            ParallelAxis::Pp => self.tp * self.cp * self.dp,
        }
    }

    /// Degrees that fill `gpus` of each of `nodes` alike.
    ///
    /// # Errors
    /// [`PlanError::Setting`] where they do not, with what would.
    pub(super) fn check(&self, gpus: usize, nodes: usize) -> Result<usize, PlanError> {
        for axis in ParallelAxis::ALL {
            if self.of(axis) == 0 {
                return Err(PlanError::setting(axis.name(), 0, "is not a valid degree", "set 1 for an unused axis"));
            }
        }
        let ranks = self.ranks();
        if !(self.dp * self.cp).is_multiple_of(self.ep) {
            let nearest = (1..=self.ep).rev().find(|n| (self.dp * self.cp).is_multiple_of(*n)).unwrap_or(1);
            let problem = format!("does not divide dp x cp = {}, whose ranks share the experts", self.dp * self.cp);
            return Err(PlanError::setting("ep", self.ep, problem, format!("the nearest below is {nearest}")));
        }
        if !ranks.is_multiple_of(nodes) {
            let problem = format!("ranks (tp x cp x dp x pp) cannot be divided evenly over {nodes} nodes");
            let remedy = format!("set dp or pp so that they are a multiple of {nodes}");
            return Err(PlanError::setting("ranks", ranks, problem, remedy));
        }
        let local = ranks / nodes;
        if local > gpus {
            let problem = format!("(tp x cp x dp x pp) exceeds the {} GPUs of {nodes} nodes", gpus * nodes);
            let remedy = format!("set nodes = {}, or lower a degree", ranks.div_ceil(gpus));
            return Err(PlanError::setting("ranks", ranks, problem, remedy));
        }
        Ok(local)
    }
}
