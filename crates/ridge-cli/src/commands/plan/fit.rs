//! `ridge plan fit`: whether a model fits a device, and with how many sequences.

use clap::Args;
use ridge_hw::units::{Bytes, BytesPerSecond};
use ridge_plan::PlanError;
use ridge_plan::ledger::{
    Quantisation, ServingMemory, holding_one, of_latents, sequence_bytes, sequence_states, serving,
};
use ridge_plan::plot::{Axis, Bars, Chart, Mark, Series, Style, Unit};
use ridge_plan::reading::Reading;
use serde_json::json;

use super::host::{self, HostFit};
use super::page::{Page, PageArgs, PageBlock, PageTable, ledger_bar, ledger_table};
use super::parsers::quantisation;
use super::target::{TargetArgs, cache_dtype, cache_element, sources, sources_json};
use crate::args::{Speculate, gpu_memory, speculate, whole};
use crate::error::{Error, Result, refused};
use crate::output::grouped;

/// Whether a model fits, and for how many sequences
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan fit ~/models/Llama-3.1-8B --device A100 --weights int4 --context 8192
  ridge plan fit DeepSeek-V3/config.json --device H200 --tp 8 --weights fp8 --cache-bits 8 --explain
  ridge plan fit --shape D=4096,L=32,V=128256,m=3.5,N=32,K=8 --device RTX4090 --weights int4
  ridge plan fit Qwen3-30B-A3B/config.json --device H100 --gpu-memory 24GiB

Exit codes: 0 at least one sequence fits, 1 failed, 2 usage error, 3 does not fit.")]
pub(crate) struct PlanFitArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// Format of matrices: bf16, fp8, q8, int4, nvfp4, mxfp4, or a GGUF format such as q4_k [default: as the model's
    /// files store them, or without files of weights as the config's quantization_config says, otherwise bf16]
    #[arg(long, value_name = "FORMAT", value_parser = quantisation)]
    weights: Option<Quantisation>,

    /// Bits per element of the KV cache; one of 8 bits also has a 4-byte scale per key and value of each head
    #[arg(long, value_name = "BITS", default_value_t = 16, value_parser = whole::<usize, 2, 32>)]
    cache_bits: usize,

    /// Tokens per sequence [default: 8192, or the model's maximum if that is less]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, { u64::MAX }>)]
    context: Option<usize>,

    /// Tensor parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    tp: usize,

    /// Pipeline stages
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    pp: usize,

    /// Expert-parallel replicas: the number of GPUs is tp x pp x ep, unlike `plan serve --ep`, which divides tp x attention-dp
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    ep: usize,

    /// Maximum tokens per step, which determines the workspace [default: 8192, or 512 with --gpu-memory]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 10_000_000>)]
    step_tokens: Option<usize>,

    /// Speculative decoding with the model's own multi-token prediction module: counts its weights and its cache
    #[arg(
        long, value_name = "mtp[:N]", value_parser = speculate, allow_negative_numbers = true, default_value = "0",
        hide_default_value = true, conflicts_with = "gpu_memory"
    )]
    speculate: Speculate,

    /// Plan Ridge's own engine with this much GPU memory, such as 24GiB, and the other weights in host memory: what is where, bytes
    /// over the host link, and time per token
    #[arg(long, value_name = "SIZE", value_parser = gpu_memory)]
    gpu_memory: Option<Bytes>,

    /// Rate that copies over the host link reach, such as 55GB/s [default: 0.86 of the rate in the device's sheet]
    #[arg(long, value_name = "RATE", requires = "gpu_memory")]
    host_link: Option<BytesPerSecond>,

    #[command(flatten)]
    page: PageArgs,
}

pub(super) fn run(args: &PlanFitArgs) -> Result<()> {
    if let Some(gpu_memory) = args.gpu_memory {
        return on_one_gpu(args, gpu_memory);
    }
    let reading = args.target.reading_with_cache(args.cache_bits)?;
    let reading = args.target.with_drafts(reading, args.speculate.by_module()?)?;
    let weights = args.target.weights(args.weights)?;
    let machine = args.target.server(weights)?;
    let context = args.context.unwrap_or(8192.min(reading.max_context));
    let step_tokens = args.step_tokens.unwrap_or(8192);
    let memory = ServingMemory {
        tp: args.tp,
        pp: args.pp,
        ep: args.ep,
        weights,
        cache_bytes: args.cache_bits as f64 / 8.0,
        step_tokens,
        utilisation: 0.94,
    };
    let device = Bytes(machine.memory as u64);
    let ranks = args.tp * args.pp * args.ep;
    let title = format!(
        "{} with {} parameters on {ranks} x {} of {device}",
        reading.family,
        grouped(reading.parameters),
        machine.name
    );
    let fit = match serving(&reading, device, &memory, context) {
        Ok(fit) => fit,
        Err(why @ PlanError::Room { needed, .. }) => {
            let json = json!({
                "model": reading.family, "parameters": reading.parameters, "device": machine.name, "device_bytes": device,
                "memory": memory, "context": context, "needed_bytes": needed, "sources": sources_json(&machine),
            });
            return args.page.shown.does_not_fit(&title, &why.to_string(), json);
        }
        Err(other) => return Err(other.into()),
    };
    let states = sequence_states(&reading, &memory, context);
    let tokens = grouped(context as u64);
    let mut answer = format!(
        "a cached token takes {} per GPU, a sequence of {tokens} tokens {}\nthe cache holds {} tokens, ",
        fit.per_token,
        fit.per_sequence,
        grouped(fit.tokens)
    );
    answer += &match fit.sequences {
        0 => format!("less than one sequence of {tokens}: {}", holding_one(&reading, device, &memory, context)),
        n => format!("or {} sequences of {tokens}", grouped(n)),
    };
    let latents = of_latents(&reading);
    if args.tp > 1 && !latents.is_empty() {
        answer += &format!("\ntp {}{latents}", args.tp);
    }
    let mut of_sequence =
        PageTable::with_head("cache per sequence", ["state", "layers", "tokens", "per token", "total"]);
    for s in &states {
        let kept = s.window.map_or(grouped(context as u64), |w| grouped(w.min(context) as u64));
        let kept = if s.per_token.0 == 0 { "any".to_owned() } else { kept };
        let cells =
            [s.kind.to_owned(), s.layers.to_string(), kept, s.per_token.to_string(), s.per_sequence.to_string()];
        of_sequence.push(
            cells,
            format!("{} layers over {} ranks, sharded over at most {}", s.layers, args.tp * args.pp, s.heads * args.pp),
        );
    }
    // The table is shown without --explain if there are several kinds.
    of_sequence.detail = states.len() < 2;
    let mut formats = PageTable::with_head("by format of matrices", ["format", "weights", "free", "sequences"]);
    let mut bars = Vec::new();
    let own = Some((weights.name(), weights)).filter(|own| !Quantisation::ALL.contains(own));
    for (name, weights) in own.into_iter().chain(Quantisation::ALL) {
        let bits = &weights.bits_shown()[0];
        let other = ServingMemory { weights, ..memory };
        let Ok(fit) = serving(&reading, device, &other, context) else {
            formats.push([name.to_owned(), "does not fit".to_owned()], format!("{bits} bits"));
            continue;
        };
        let weights_bytes = fit.ledger.of("weights").to_string();
        let cells = [name.to_owned(), weights_bytes, fit.room.to_string(), grouped(fit.sequences)];
        formats.push(cells, format!("{bits} bits per element, including scales"));
        bars.push(ledger_bar(name, &fit.ledger));
    }
    formats.detail = true;
    let limit = Some((machine.name.clone(), device.as_f64()));
    let axis = Axis::linear("memory per GPU", Unit::Bytes);
    let bars = Bars { title: title.clone(), axis, bars, limit };
    let mut page = Page {
        title,
        blocks: vec![
            PageBlock::Table(ledger_table("", &fit.ledger.entries)),
            PageBlock::Table(of_sequence),
            PageBlock::Table(formats),
            PageBlock::Answer(answer),
        ],
        panels: vec![bars.into(), over_context(&reading, &memory, fit.room, context).into()],
        sources: sources(&machine),
        json: json!({
            "model": reading.family, "parameters": reading.parameters, "device": machine.name, "device_bytes": device,
            "memory": memory, "context": context, "fits": fit.sequences > 0,
            "prediction_parameters": reading.prediction.as_ref().map(|of| of.parameters), "fit": fit, "states": states, "sources": sources_json(&machine),
        }),
        ..Page::default()
    };
    page.given("format of matrices", format!("{}, {} bits", weights.name(), weights.bits_shown()[0]), "--weights");
    page.given("cache element", cache_element(args.cache_bits), "--cache-bits");
    page.given("maximum tokens per step", step_tokens, "--step-tokens");
    page.given("usable share of the device's memory", memory.utilisation, "set: the rest is margin");
    page.assume(&machine);
    args.page.show(&page)?;
    if fit.sequences == 0 { Err(Error::DoesNotFit) } else { Ok(()) }
}

/// With a limit of the GPU's memory: the engine on one GPU, with weights as they are stored or published.
fn on_one_gpu(args: &PlanFitArgs, gpu_memory: Bytes) -> Result<()> {
    for (flag, degree) in [("--tp", args.tp), ("--pp", args.pp), ("--ep", args.ep)] {
        if degree > 1 {
            return Err(refused(flag, degree, "with --gpu-memory, plans are for one GPU; leave it out"));
        }
    }
    let cache = cache_dtype(args.cache_bits);
    if cache.size_bytes() * 8 != args.cache_bits {
        let why = "with --gpu-memory, the cache is one that the engine has; use 8, 16 or 32";
        return Err(refused("--cache-bits", args.cache_bits, why));
    }
    if let Some(weights) = args.weights {
        let why = "with --gpu-memory, weights are planned as the model's files or its config have them; leave it out";
        return Err(refused("--weights", weights.name(), why));
    }
    let PlanFitArgs { target, host_link, context, step_tokens, page, .. } = args;
    let (host_link, context, step_tokens) = (*host_link, *context, *step_tokens);
    host::run(&HostFit { target, gpu_memory, cache, host_link, context, step_tokens, page })
}

/// Number of sequences that fit, over their length.
fn over_context(reading: &Reading, memory: &ServingMemory, room: Bytes, context: usize) -> Chart {
    let lengths = std::iter::successors(Some(256), |n| Some(n * 2)).take_while(|n| *n < reading.max_context);
    let fits = |n: usize| (n as f64, (room.as_f64() / sequence_bytes(reading, memory, n).max(1.0)).floor());
    let (x, y) = (Axis::log("tokens per sequence", Unit::Number), Axis::log("sequences that fit", Unit::Number));
    let points = lengths.chain([reading.max_context]).map(fits);
    let mut chart = Chart::new("Sequences that fit", x, y);
    chart.series.push(Series::new("sequences", Style::Both, points));
    chart.marks.push(Mark { name: "requested".into(), x: context as f64 });
    chart
}
