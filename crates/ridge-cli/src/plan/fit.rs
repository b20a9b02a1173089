//! `ridge plan fit`: whether a model fits a device, and how many users beside it.

use clap::Args;
use ridge_hw::units::Bytes;
use ridge_plan::ledger::{Quantisation, ServingMemory, serving};
use serde_json::json;

use super::{ShownArgs, TargetArgs, ledger_rows, quantisation, serving_machine, sources, sources_json};
use crate::args::whole;
use crate::error::Result;
use crate::output::{grouped, print, print_json};

/// Tell whether a model fits, what is left for caches, and for how many sequences
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan fit ~/models/Llama-3.1-8B --device A100 --weights int4 --context 8192
  ridge plan fit DeepSeek-V3/config.json --device H200 --tp 8 --weights fp8 --cache-bits 8 --explain")]
pub(crate) struct FitArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// Format of matrices: bf16, fp8, q8, int4, nvfp4 or mxfp4
    #[arg(long, value_name = "FORMAT", value_parser = quantisation, default_value = "bf16")]
    weights: Quantisation,

    /// Bits of an element of the cache
    #[arg(long, value_name = "BITS", default_value_t = 16, value_parser = whole::<usize, 2, 32>)]
    cache_bits: usize,

    /// Tokens of each sequence [default: 8192, or what the model was made for if that is less]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, { u64::MAX }>)]
    context: Option<usize>,

    /// Tensor parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    tp: usize,

    /// Pipeline stages
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    pp: usize,

    /// Replicas that share the experts: GPUs are tp x pp x ep
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    ep: usize,

    /// Tokens of a step at most, which the workspace is for
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = whole::<usize, 1, 10_000_000>)]
    step_tokens: usize,

    #[command(flatten)]
    shown: ShownArgs,
}

pub(super) fn run(args: &FitArgs) -> Result<()> {
    let reading = args.target.reading()?;
    let machine = serving_machine(&args.target.device, args.weights)?;
    let context = args.context.unwrap_or(8192.min(reading.max_context));
    let memory = ServingMemory {
        tp: args.tp,
        pp: args.pp,
        ep: args.ep,
        weights: args.weights,
        cache_bytes: args.cache_bits as f64 / 8.0,
        step_tokens: args.step_tokens,
        utilisation: 0.94,
    };
    let device = Bytes(machine.memory as u64);
    let fit = serving(&reading, device, &memory, context)?;
    if args.shown.json {
        return print_json(&json!({
            "model": reading.family, "parameters": reading.parameters, "device": machine.name, "device_bytes": device,
            "memory": memory, "context": context, "fit": fit, "sources": sources_json(&machine),
        }));
    }
    let ranks = args.tp * args.pp * args.ep;
    let mut text = format!(
        "{} with {} parameters on {ranks} x {} of {device}\n\n",
        reading.family,
        grouped(reading.parameters),
        machine.name
    );
    text += &ledger_rows(&fit.ledger.entries, args.shown.explain);
    text += &format!(
        "\na token takes {} of a GPU's room; a sequence of {} tokens {}\n{} tokens of cache fit, or {} sequences of {}\n",
        fit.per_token,
        grouped(context as u64),
        fit.per_sequence,
        grouped(fit.tokens),
        grouped(fit.sequences),
        grouped(context as u64)
    );
    if args.shown.explain {
        text += &sources(&machine);
    }
    print(&text)
}
