//! Schedules by name.

use std::fmt;

use serde::Serialize;

/// In which order a device takes its passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Schedule {
    /// All forward passes, then all backward passes (Huang et al. 2019).
    GPipe,
    /// One forward, one backward after a warm-up (Narayanan et al. 2019, PipeDream-flush).
    OneFOneB,
    /// The same with several chunks of layers a device (Narayanan et al. 2021, section 2.2).
    Interleaved,
    /// Weight gradients fill the bubbles, at the memory of 1F1B (Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
    /// ZB-H1).
    ZeroBubbleH1,
    /// Two chunks a device, placed as a V, and no bubble while passes take equal times (Qi et al. 2024, "Pipeline
    /// Parallelism with Controllable Memory", section 3; ZB-V).
    ZeroBubbleV,
    /// Micro-batches from both ends, forward and backward passes in pairs (DeepSeek-AI 2024, section 3.2.1).
    DualPipe,
}

impl Schedule {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::GPipe, Self::OneFOneB, Self::Interleaved, Self::ZeroBubbleH1, Self::ZeroBubbleV, Self::DualPipe];

    /// The name that is typed.
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::Interleaved => "interleaved",
            Self::ZeroBubbleH1 => "zb-h1",
            Self::ZeroBubbleV => "zb-v",
            Self::DualPipe => "dualpipe",
        }
    }

    /// What is known of it on paper, for `p` devices, `m` micro-batches, `v` chunks; F, B, W the forward pass, the
    /// gradient of inputs and that of weights of a device's layers.
    pub fn formula(self) -> &'static str {
        match self {
            Self::GPipe => "(m + p - 1) (F + B + W); bubble (p - 1) / (m + p - 1); m micro-batches in flight",
            Self::OneFOneB => "(m + p - 1) (F + B + W); bubble (p - 1) / (m + p - 1); at most p in flight",
            Self::Interleaved => {
                "(m + (p - 1) / v) (F + B + W); bubble (p - 1) / (v m + p - 1); p + (p - 1) / v in flight"
            }
            Self::ZeroBubbleH1 => "m (F + B + W) + (p - 1) (F + B - W); at most p in flight",
            Self::ZeroBubbleV => "m (F + B + W) + (p - 1) F / 2 if F = B = W: no idle time; at most p in flight",
            Self::DualPipe => {
                "idle time (p / 2 - 1) (FB + B + W - 3 W), FB the time of a pair; p + 1 in flight, weights stored twice"
            }
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
