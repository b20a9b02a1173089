//! The arguments of `ridge plan train`.

use clap::Args;
use ridge_plan::train::{Layout, Recompute};

use crate::args::whole;
use crate::commands::plan::page::PageArgs;
use crate::commands::plan::parsers::amount;
use crate::commands::plan::target::TargetArgs;

/// Search training layouts: step time, memory and cost
///
/// Without options such as --tp, --pp, --dp, --cp and --ep, all layouts on the GPUs are searched.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan train Llama-3.1-70B --gpus 256 --batch 1024 --tokens 1T --price 2.5
  ridge plan train Llama-3.1-8B --device H200 --gpus 1 --batch 1 --seq 8192 --software ridge
  ridge plan train Llama-3.1-8B --device A100 --gpus 8 --batch 64 --tp 2 --zero 1 --explain

Exit codes: 0 a layout fits, 1 failed, 2 usage error, 3 none fits.")]
pub(crate) struct PlanTrainArgs {
    #[command(flatten)]
    pub(super) target: TargetArgs,

    /// Number of GPUs; all are used
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    pub(super) gpus: usize,

    /// Sequences per step, over all GPUs
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = whole::<usize, 1, 10_000_000>)]
    pub(super) batch: usize,

    /// Tokens per sequence
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = whole::<usize, 1, 100_000_000>)]
    pub(super) seq: usize,

    /// Precision of matrix products
    #[arg(long, value_parser = ["bf16", "fp8"], default_value = "bf16")]
    pub(super) precision: String,

    /// Bytes per parameter with gradient and optimiser state: mixed (18), full (f32, 16) or half (8)
    #[arg(long, value_parser = ["mixed", "full", "half"], default_value = "mixed")]
    pub(super) states: String,

    /// Training software: others (Megatron and similar), or ridge (from its own graphs) [default: others]
    #[arg(long, value_parser = ["others", "ridge"], default_value = "others", hide_default_value = true)]
    pub(super) software: String,

    /// Bytes per second of the link to the host, in each direction, for --software ridge on one GPU
    #[arg(long, value_name = "N", value_parser = amount::<1_000_000_000_000>, default_value = "50e9")]
    pub(super) host_link: f64,

    #[command(flatten)]
    pub(super) layout: LayoutArgs,

    /// Tokens of the run, such as 15T
    #[arg(long, value_name = "N", value_parser = amount::<1_000_000_000_000_000_000>)]
    pub(super) tokens: Option<f64>,

    /// Price per GPU hour, in USD
    #[arg(long, value_name = "USD", value_parser = amount::<1_000_000>)]
    pub(super) price: Option<f64>,

    /// Mean time between failures of one GPU, in hours
    #[arg(long, value_name = "HOURS", value_parser = amount::<1_000_000_000_000>, default_value = "50000")]
    pub(super) gpu_mtbf: f64,

    /// Time to write a checkpoint, in seconds
    #[arg(long, value_name = "S", value_parser = amount::<1_000_000_000>, default_value = "30")]
    pub(super) checkpoint: f64,

    /// Number of layouts to show [default: 8]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 10_000>)]
    pub(super) top: Option<usize>,

    #[command(flatten)]
    pub(super) page: PageArgs,
}

/// Fixed parallel degrees.
#[derive(Debug, Args)]
#[command(next_help_heading = "Fixed layout")]
pub(super) struct LayoutArgs {
    /// Tensor parallel ranks
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    pub(super) tp: Option<usize>,
    /// Pipeline stages
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    pub(super) pp: Option<usize>,
    /// Data parallel replicas [default: GPUs / (tp x pp x cp)]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    pub(super) dp: Option<usize>,
    /// Context parallel ranks
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    pub(super) cp: Option<usize>,
    /// Expert parallel ranks
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    pub(super) ep: Option<usize>,
    /// Sequences per micro-batch
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    pub(super) micro_batch: Option<usize>,
    /// Layer chunks per stage
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    pub(super) interleave: Option<usize>,
    /// ZeRO stage
    #[arg(long, value_name = "0..3")]
    pub(super) zero: Option<u8>,
    /// Recomputed activations: none, attention, products or full
    #[arg(long, value_parser = recompute)]
    pub(super) recompute: Option<Recompute>,
}

fn recompute(typed: &str) -> Result<Recompute, String> {
    let found = Recompute::ALL.into_iter().find(|r| r.to_string() == typed);
    found.ok_or_else(|| "must be none, attention, products or full".to_owned())
}

impl PlanTrainArgs {
    pub(super) fn top(&self) -> usize {
        self.top.unwrap_or(8)
    }
}

impl LayoutArgs {
    /// The layout with these degrees on `gpus`, if any degree is given.
    pub(super) fn layout(&self, gpus: usize, by_ridge: bool) -> Option<Layout> {
        let degrees = [self.tp, self.pp, self.cp, self.ep, self.micro_batch, self.interleave];
        if degrees.iter().chain([&self.dp]).all(Option::is_none) && self.zero.is_none() && self.recompute.is_none() {
            return None;
        }
        let [tp, pp, cp, ep, micro_batch, interleave] = degrees.map(|d| d.unwrap_or(1));
        let dp = self.dp.unwrap_or(gpus / (tp * pp * cp)).max(1);
        let recompute = self.recompute.unwrap_or(Recompute::None);
        let sequence_parallel = tp > 1 && !by_ridge;
        let zero = self.zero.unwrap_or(if by_ridge { 3 * u8::from(dp > 1) } else { u8::from(dp > 1) });
        Some(Layout { tp, pp, dp, cp, ep, micro_batch, interleave, recompute, zero, sequence_parallel })
    }
}
