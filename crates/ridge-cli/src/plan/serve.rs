//! `ridge plan serve`: latencies, throughput and money of a server at one point.

use clap::Args;
use ridge_hw::units::Bytes;
use ridge_plan::ledger::{Quantisation, ServingMemory, serving};
use ridge_plan::serve::{ServeLayout, Traffic, aggregated, disaggregated, dollars_per_million, gpus_for};
use serde_json::json;

use super::{ShownArgs, TargetArgs, amount, quantisation, seconds, serving_machine, sources, sources_json};
use crate::args::whole;
use crate::error::Result;
use crate::output::{columns, print, print_json};
use crate::settings::refused;

/// Estimate a server's latencies and throughput, the GPUs for a rate, and dollars for a million tokens
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan serve Llama-3.1-70B --device H200 --weights fp8 --tp 4 --prompt 2048 --answer 512 --batch 64
  ridge plan serve DeepSeek-V3 --device H200 --weights fp8 --tp 8 --ep 8 --rate 20 --price 3 --disaggregate 2")]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// Format of matrices: bf16, fp8, q8, int4, nvfp4 or mxfp4
    #[arg(long, value_name = "FORMAT", value_parser = quantisation, default_value = "bf16")]
    weights: Quantisation,

    /// Bits of an element of the cache
    #[arg(long, value_name = "BITS", default_value_t = 16, value_parser = whole::<usize, 2, 32>)]
    cache_bits: usize,

    /// Tensor parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    tp: usize,

    /// Pipeline stages
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    pp: usize,

    /// Replicas of attention that share the experts
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    attention_dp: usize,

    /// Ranks that share the experts
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    ep: usize,

    /// Tokens of a prompt
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = whole::<usize, 1, 100_000_000>)]
    prompt: usize,

    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = whole::<usize, 1, 100_000_000>)]
    answer: usize,

    /// Sequences under way at once [default: as many as fit, 256 at most]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    batch: Option<usize>,

    /// Requests a second that are to be served
    #[arg(long, value_name = "N", value_parser = amount)]
    rate: Option<f64>,

    /// Dollars of a GPU hour
    #[arg(long, value_name = "USD", value_parser = amount)]
    price: Option<f64>,

    /// Take prompts on this many replicas of their own for each that answers
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1024>)]
    disaggregate: Option<usize>,

    #[command(flatten)]
    shown: ShownArgs,
}

pub(super) fn run(args: &ServeArgs) -> Result<()> {
    let reading = args.target.reading()?;
    let machine = serving_machine(&args.target.device, args.weights)?;
    let cache_bytes = args.cache_bits as f64 / 8.0;
    let ranks = args.tp * args.attention_dp;
    if !ranks.is_multiple_of(args.ep) {
        let why = format!("does not divide the {ranks} ranks of tp x attention-dp, which share the experts");
        return Err(refused("--ep", args.ep, &why));
    }
    let layout = ServeLayout {
        tp: args.tp,
        pp: args.pp,
        attention_dp: args.attention_dp,
        ep: args.ep,
        weights: args.weights,
        cache_bytes,
    };
    let memory = ServingMemory {
        tp: args.tp,
        pp: args.pp,
        // Within a group of experts tensor parallelism cuts them too.
        ep: if reading.experts > 0 { (ranks / args.tp).max(1) } else { args.ep },
        weights: args.weights,
        cache_bytes,
        step_tokens: 8192,
        utilisation: 0.94,
    };
    let context = args.prompt + args.answer;
    let fit = serving(&reading, Bytes(machine.memory as u64), &memory, context)?;
    let most = fit.sequences as usize;
    let batch = args.batch.unwrap_or(most.min(256));
    if batch > most || batch == 0 {
        let why = format!("sequences of {context} tokens do not fit beside the weights; {most} do");
        return Err(refused("--batch", batch, &why));
    }
    let traffic = Traffic { prompt: args.prompt, answer: args.answer, batch };
    let point = match args.disaggregate {
        None => aggregated(&reading, &machine, &layout, &traffic),
        Some(replicas) => disaggregated(&reading, &machine, &layout, &traffic, replicas),
    };
    let gpus = args.rate.map(|rate| gpus_for(rate, point.requests_per_second, point.gpus));
    let dollars = args.price.map(|price| dollars_per_million(price, point.gpus, point.tokens_per_second));
    if args.shown.json {
        return print_json(&json!({
            "model": reading.family, "device": machine.name, "layout": layout, "traffic": traffic, "point": point,
            "most_sequences": most, "gpus_for_rate": gpus, "dollars_per_million_output_tokens": dollars,
            "sources": sources_json(&machine),
        }));
    }
    let mut rows = vec![
        (
            "time to first token",
            seconds(point.ttft),
            "the prompt alone, what of it shares steps with answers, one step",
        ),
        (
            "time per output token",
            seconds(point.tpot),
            "a decode step, and batch / answer of a prompt while answers go on",
        ),
        (
            "a decode step alone",
            seconds(point.decode_step),
            "per op max(FLOPs / rate, weights and cache / bandwidth), sums, host",
        ),
        ("a prompt alone", seconds(point.prefill), "the same for the prompt's tokens, in chunks of 8192"),
        ("output tokens/s", format!("{:.0}", point.tokens_per_second), "batch x answer / (first token + answer)"),
        ("requests/s", format!("{:.2}", point.requests_per_second), "tokens/s / answer"),
        ("GPUs of a replica", point.gpus.to_string(), "tp x pp x attention-dp, and those for prompts"),
        ("sequences that fit", most.to_string(), "room / bytes of a sequence, see ridge plan fit"),
    ];
    if let Some(gpus) = gpus {
        rows.push(("GPUs for the rate", gpus.to_string(), "rate / requests of a replica, rounded up to replicas"));
    }
    if let Some(dollars) = dollars {
        rows.push((
            "dollars per million output tokens",
            format!("{dollars:.3}"),
            "price x GPUs / 3600 / tokens/s x 1e6",
        ));
    }
    let row = |(what, figure, formula): (&str, String, &str)| {
        let mut row = vec![what.to_owned(), figure];
        row.extend(args.shown.explain.then(|| formula.to_owned()));
        row
    };
    let mut text = format!(
        "{} on {}: {batch} sequences of {} + {} tokens{}\n\n",
        reading.family,
        machine.name,
        args.prompt,
        args.answer,
        if args.disaggregate.is_some() { ", prompts apart" } else { "" }
    );
    text += &columns(&rows.into_iter().map(row).collect::<Vec<_>>());
    if args.shown.explain {
        text += &sources(&machine);
    }
    print(&text)
}
