//! `ridge plan serve`: latency, throughput and cost of a server at one operating point.

use clap::Args;
use ridge_hw::units::Bytes;
use ridge_plan::PlanError;
use ridge_plan::efficiency::Machine;
use ridge_plan::ledger::{Quantisation, ServingMemory, cache_tokens, holding_one, serving};
use ridge_plan::plot::{Axis, Bars, Chart, ChartPoint, Mark, Panel, Series, Style, Unit};
use ridge_plan::reading::Reading;
use ridge_plan::serve::{
    OperatingPoint, ServeLayout, Software, Speculation, Traffic, disaggregated, dollars_per_million, drafting,
    gpus_for, simulated,
};
use serde_json::json;

use super::page::{Page, PageArgs, PageBlock, PageTable, ledger_bar, ledger_table, seconds};
use super::parsers::{amount, quantisation};
use super::target::{TargetArgs, sources, sources_json};
use crate::args::{Speculate, speculate, whole};
use crate::error::{Result, refused};
use crate::output::grouped;

/// Estimate serving latency, throughput and cost
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan serve Llama-3.1-70B --device H200 --weights fp8 --tp 4 --prompt 2048 --batch 64
  ridge plan serve DeepSeek-V3 --device H200 --weights fp8 --tp 8 --ep 8 --rate 20 --price 3

Exit codes: 0 it fits, 1 failed, 2 usage error, 3 does not fit.")]
pub(crate) struct PlanServeArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// Format of matrices: bf16, fp8, q8, int4, nvfp4, mxfp4, or a GGUF format such as q4_k [default: as the model's
    /// files store them, or without files of weights as the config's quantization_config says, otherwise bf16]
    #[arg(long, value_name = "FORMAT", value_parser = quantisation)]
    weights: Option<Quantisation>,

    /// Bits per element of the KV cache, without scales: the software has one for a whole tensor
    #[arg(long, value_name = "BITS", default_value_t = 16, value_parser = whole::<usize, 2, 32>)]
    cache_bits: usize,

    /// Tensor parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    tp: usize,

    /// Pipeline stages
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    pp: usize,

    /// Data-parallel attention replicas that share the experts, each of tp x pp GPUs and with its own sequences
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    attention_dp: usize,

    /// Expert-parallel ranks among those of tp x attention-dp; unlike `plan fit --ep`, it adds no GPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    ep: usize,

    /// Tokens per prompt
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = whole::<usize, 1, 100_000_000>)]
    prompt: usize,

    /// Tokens per response
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = whole::<usize, 1, 100_000_000>)]
    answer: usize,

    /// Concurrent sequences per attention replica [default: as many as fit, at most 256]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    batch: Option<usize>,

    /// Request rate to serve, in requests per second
    #[arg(long, value_name = "N", value_parser = amount::<1_000_000_000>)]
    rate: Option<f64>,

    /// Price per GPU hour, in USD
    #[arg(long, value_name = "USD", value_parser = amount::<1_000_000>)]
    price: Option<f64>,

    /// Disaggregated serving: prefill replicas per decode replica
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1024>)]
    disaggregate: Option<usize>,

    /// Serving software, for its overhead per step and request: vllm, trtllm or sglang
    #[arg(long, value_name = "NAME", default_value = "vllm", value_parser = software, conflicts_with = "disaggregate")]
    software: &'static Software,

    /// Speculative decoding with one token, or N, of each step drafted by the model's own multi-token prediction module
    #[arg(
        long, value_name = "mtp[:N]", value_parser = speculate, allow_negative_numbers = true, default_value = "0",
        hide_default_value = true, requires = "acceptance"
    )]
    speculate: Speculate,

    /// Probability that a draft token is accepted, given that those before it were
    #[arg(long, value_name = "RATE", value_parser = probability, requires = "speculate")]
    acceptance: Option<f64>,

    #[command(flatten)]
    page: PageArgs,
}

/// Parses a probability.
fn probability(typed: &str) -> std::result::Result<f64, String> {
    let parsed = typed.parse().ok().filter(|rate| (0.0..=1.0).contains(rate));
    parsed.ok_or_else(|| "must be a number from 0 to 1".to_owned())
}

/// Serving software from the table.
fn software(name: &str) -> std::result::Result<&'static Software, String> {
    Software::find(name, "").ok_or_else(|| format!("is not one of {}", Software::names().join(", ")))
}

/// Median error of these figures in percent, for dense and for mixture-of-experts models, from `cargo xtask accuracy` on
/// held-out measurements.
const ERRORS: [(&str, [f64; 2]); 2] = [("time to first token", [12.1, 48.2]), ("time per output token", [8.1, 14.7])];

pub(super) fn run(args: &PlanServeArgs) -> Result<()> {
    let drafts = args.speculate.by_module()?;
    let reading = args.target.with_drafts(args.target.reading()?, drafts)?;
    let weights = args.target.weights(args.weights)?;
    let machine = args.target.server(weights)?;
    let ranks = args.tp * args.attention_dp;
    if !ranks.is_multiple_of(args.ep) {
        let why = format!("does not divide the {ranks} ranks of tp x attention-dp, which share the experts");
        return Err(refused("--ep", args.ep, &why));
    }
    let layout = args.layout(args.tp, weights);
    let memory = args.memory(&reading, &layout);
    let context = args.prompt + args.answer;
    let device = Bytes(machine.memory as u64);
    let no_room = |why: &str| {
        let what =
            format!("{} on {}: sequences of {} + {} tokens", reading.family, machine.name, args.prompt, args.answer);
        let json = json!({ "model": reading.family, "device": machine.name, "layout": layout, "sources": sources_json(&machine) });
        args.page.shown.does_not_fit(&what, why, json)
    };
    let fit = match serving(&reading, device, &memory, context) {
        Err(why @ PlanError::Room { .. }) => return no_room(&why.to_string()),
        found => found?,
    };
    let most = fit.sequences as usize;
    if most == 0 {
        return no_room(&format!(
            "no sequence of {context} tokens fits next to the weights: it takes {} per GPU and {} are free; {}",
            fit.per_sequence,
            fit.room,
            holding_one(&reading, device, &memory, context)
        ));
    }
    let batch = args.batch.unwrap_or(most.min(256));
    if batch > most {
        return no_room(&format!("--batch {batch}: only {most} sequences of {context} tokens fit next to the weights"));
    }
    let traffic = Traffic { prompt: args.prompt, answer: args.answer, batch };
    let cached = cache_tokens(&reading, &memory, fit.room, context);
    let point = args.point(&reading, &machine, &layout, &traffic, cached);
    let gpus = args.rate.map(|rate| gpus_for(rate, point.requests_per_second, point.gpus));
    // The cost of the GPUs that the rate needs, which may be partly idle; without a rate, that of a fully loaded replica.
    let (paid, yielded) = match args.rate.zip(gpus) {
        Some((rate, gpus)) => (gpus, rate * args.answer as f64),
        None => (point.gpus, point.tokens_per_second),
    };
    let dollars = args.price.map(|price| dollars_per_million(price, paid, yielded));
    let each = if args.attention_dp > 1 { " per attention replica" } else { "" };
    let json = json!({
        "model": reading.family, "device": machine.name, "layout": layout, "traffic": traffic, "point": point,
        "most_sequences": most, "gpus_for_rate": gpus, "dollars_per_million_output_tokens": dollars,
        "dollars_are_at": dollars.map(|_| if gpus.is_some() { "the rate" } else { "full load" }),
        "tokens_per_step": layout.tokens_per_step(), "ledger": fit.ledger, "sources": sources_json(&machine),
    });
    let mut rows = vec![
        (
            "time to first token",
            seconds(point.ttft),
            args.latency("simulated: closed loop, all clients start together"),
        ),
        (
            "time per output token",
            seconds(point.tpot),
            args.latency("from the same simulation: decode steps, including those with prompt chunks"),
        ),
        (
            "decode step without prefill",
            seconds(point.decode_step),
            "per op max(FLOPs / rate, weights and cache / bandwidth), collectives, host",
        ),
        ("prefill without decoding", seconds(point.prefill), "the same for the prompt's tokens, in chunks of 8192"),
        ("output tokens/s", format!("{:.0}", point.tokens_per_second), args.throughput()),
        ("requests/s", format!("{:.2}", point.requests_per_second), "tokens/s / response length"),
        ("GPUs per replica", point.gpus.to_string(), "tp x pp x attention-dp, plus prefill replicas"),
        ("sequences that fit", format!("{most}{each}"), "free memory / bytes per sequence, see ridge plan fit"),
    ];
    if let Some(Speculation { drafts, acceptance }) = layout.speculation {
        let tokens = format!("{:.2}, with {drafts} drafted and {acceptance} accepted", layout.tokens_per_step());
        rows.insert(3, ("tokens per decode step", tokens, "(1 - a^(drafts + 1)) / (1 - a), a the acceptance rate"));
        rows.insert(
            3,
            (
                "of which drafting",
                seconds(drafting(&reading, &machine, &layout, batch, args.prompt + args.answer / 2)),
                "drafts x (layer of the prediction module and output projection, per op as above)",
            ),
        );
    }
    if let Some(gpus) = gpus {
        rows.push((
            "GPUs for the rate",
            gpus.to_string(),
            "rate / requests/s of a replica, rounded up to whole replicas",
        ));
    }
    if let Some(dollars) = dollars {
        rows.push(match gpus {
            Some(_) => (
                "dollars per million output tokens",
                format!("{dollars:.3}"),
                "price x GPUs for the rate / 3600 / (rate x response length) x 1e6",
            ),
            None => (
                "dollars per million output tokens",
                format!("{dollars:.3} at full load"),
                "price x GPUs / 3600 / tokens/s x 1e6; with --rate, the price of the GPUs that the rate needs",
            ),
        });
    }
    let mut table = PageTable::default();
    for (what, figure, formula) in rows {
        table.push([what.to_owned(), figure], formula);
    }
    let title = format!(
        "{} on {}: {batch} sequences of {} + {} tokens{each}{}",
        reading.family,
        machine.name,
        args.prompt,
        args.answer,
        if args.disaggregate.is_some() { ", disaggregated prefill" } else { "" }
    );
    let mut ledger = ledger_table("memory per GPU", &fit.ledger.entries);
    ledger.detail = true;
    let mut page = Page {
        title,
        blocks: vec![PageBlock::Table(table), PageBlock::Table(ledger)],
        sources: sources(&machine),
        json,
        ..Page::default()
    };
    if args.page.draws() {
        page.panels = args.panels(&reading, &machine, &layout, batch);
        page.panels.push(
            Bars {
                title: "Memory per GPU".into(),
                axis: Axis::linear("memory", Unit::Bytes),
                bars: vec![ledger_bar("a GPU", &fit.ledger)],
                limit: Some((machine.name.clone(), machine.memory)),
            }
            .into(),
        );
    }
    page.lead = format!(
        "TTFT {}, TPOT {}; {:.0} output tokens/s on {} GPUs",
        seconds(point.ttft),
        seconds(point.tpot),
        point.tokens_per_second,
        point.gpus
    );
    if let Some(gpus) = gpus {
        page.lead += &format!("\n{gpus} GPUs for the rate");
    }
    if let Some(dollars) = dollars {
        let load = if gpus.is_some() { "the rate" } else { "full load" };
        page.lead += &format!("\n{dollars:.3} dollars per million output tokens at {load}");
    }
    // Disaggregated prefill is not simulated, and there are no measurements to compare with.
    if args.disaggregate.is_none() {
        let experts = usize::from(reading.experts > 0);
        for (figure, errors) in ERRORS {
            let error = format!("{} %", errors[experts]);
            page.given(&format!("median error of the {figure}"), error, "held-out runs of `cargo xtask accuracy`");
        }
        page.given("serving software", &args.software.name, "--software");
    }
    page.given("format of matrices", format!("{}, {} bits", weights.name(), weights.bits_shown()[0]), "--weights");
    page.given("cache element", format!("{} bits", args.cache_bits), "--cache-bits");
    page.given("usable share of the device's memory", memory.utilisation, "set: the rest is margin");
    page.given("maximum prompt tokens per step", memory.step_tokens, "set");
    page.assume(&machine);
    args.page.show(&page)
}

/// Batches of a sweep: powers of 2 and midpoints between them, up to and including `most`.
fn batches(most: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1_usize), |n| n.checked_mul(2)).take_while(|n| *n < most);
    let mut all: Vec<usize> = powers.flat_map(|n| [n, n + n / 2]).filter(|n| *n < most).collect();
    all.push(most);
    all.dedup();
    all
}

impl PlanServeArgs {
    /// The formula of a latency: `simulated`, unless prefill is disaggregated.
    fn latency(&self, simulated: &'static str) -> &'static str {
        match self.disaggregate {
            None => simulated,
            Some(_) => "prefill, transfer of the cache to a decode replica, and decode steps without prefill",
        }
    }

    /// The formula of output tokens per second.
    fn throughput(&self) -> &'static str {
        match self.disaggregate {
            None => "from the same simulation, in which steps mix prefill and decoding",
            Some(_) => {
                "attention-dp x batch x response / (TTFT + TPOT x (response - 1)), \
                 or response x the prompts per second of the prefill replicas, whichever is less"
            }
        }
    }

    /// The requested layout, with `tp` tensor-parallel ranks.
    fn layout(&self, tp: usize, weights: Quantisation) -> ServeLayout {
        ServeLayout {
            tp,
            pp: self.pp,
            attention_dp: self.attention_dp,
            ep: self.ep,
            weights,
            cache_bytes: self.cache_bits as f64 / 8.0,
            speculation: self
                .acceptance
                .filter(|_| self.speculate.drafts() > 0)
                .map(|acceptance| Speculation { drafts: self.speculate.drafts(), acceptance }),
        }
    }

    fn memory(&self, reading: &Reading, layout: &ServeLayout) -> ServingMemory {
        ServingMemory {
            tp: layout.tp,
            pp: self.pp,
            // Within an expert-parallel group, tensor parallelism also shards the experts.
            ep: if reading.experts > 0 { self.attention_dp } else { self.ep },
            weights: layout.weights,
            cache_bytes: layout.cache_bytes,
            step_tokens: 8192,
            utilisation: 0.94,
        }
    }

    fn point(
        &self,
        reading: &Reading,
        machine: &Machine,
        layout: &ServeLayout,
        traffic: &Traffic,
        cache_tokens: f64,
    ) -> OperatingPoint {
        match self.disaggregate {
            None => simulated(reading, machine, layout, traffic, (cache_tokens, self.software)),
            Some(replicas) => disaggregated(reading, machine, layout, traffic, replicas),
        }
    }

    /// Batches that fit `layout`, with their operating points; none if the weights alone do not fit.
    fn sweep(&self, reading: &Reading, machine: &Machine, layout: &ServeLayout) -> Vec<(usize, OperatingPoint)> {
        let memory = self.memory(reading, layout);
        let context = self.prompt + self.answer;
        let Ok(fit) = serving(reading, Bytes(machine.memory as u64), &memory, context) else { return Vec::new() };
        let most = (fit.sequences as usize).min(4096);
        if most == 0 {
            return Vec::new();
        }
        let cached = cache_tokens(reading, &memory, fit.room, context);
        let traffic = |batch| Traffic { prompt: self.prompt, answer: self.answer, batch };
        batches(most).into_iter().map(|b| (b, self.point(reading, machine, layout, &traffic(b), cached))).collect()
    }

    /// Latency and throughput over the batch, and the trade-off between rate per user and per GPU for several tensor-parallel
    /// degrees.
    fn panels(&self, reading: &Reading, machine: &Machine, layout: &ServeLayout, batch: usize) -> Vec<Panel> {
        let found = self.sweep(reading, machine, layout);
        let over =
            |of: fn(&OperatingPoint) -> f64| found.iter().map(move |(b, p)| (*b as f64, of(p))).collect::<Vec<_>>();
        let sequences = || Axis::log("concurrent sequences", Unit::Number);
        let mark = Mark { name: "requested".into(), x: batch as f64 };
        let mut latency = Chart::new("Latency over the batch", sequences(), Axis::log("time", Unit::Seconds))
            .with(Series::new("time to first token", Style::Both, over(|p| p.ttft)))
            .with(Series::new("time per output token", Style::Both, over(|p| p.tpot)));
        latency.marks.push(mark.clone());
        let rate = Axis::linear("output tokens/s per GPU", Unit::Number);
        let mut throughput = Chart::new("Throughput over the batch", sequences(), rate).with(Series::new(
            "tokens/s",
            Style::Both,
            over(|p| p.tokens_per_second / p.gpus as f64),
        ));
        throughput.marks.push(mark);
        let title = format!("Rate per user and per GPU: {} + {} tokens", self.prompt, self.answer);
        let user = Axis::linear("output tokens/s per user", Unit::Number);
        let mut front = Chart { height: 340.0, ..Chart::new(title, user, throughput.y.clone()) };
        for tp in [1, 2, 4, 8, 16].into_iter().filter(|tp| (tp * self.attention_dp).is_multiple_of(self.ep)) {
            let points = self.sweep(reading, machine, &ServeLayout { tp, ..*layout }).into_iter();
            let points: Vec<ChartPoint> = points
                .map(|(b, p)| ChartPoint {
                    x: 1.0 / p.tpot,
                    y: p.tokens_per_second / p.gpus as f64,
                    label: grouped(b as u64),
                })
                .collect();
            if !points.is_empty() {
                front.series.push(Series { name: format!("tp {tp}, by batch"), points, style: Style::Both });
            }
        }
        vec![latency.into(), throughput.into(), front.into()]
    }
}
