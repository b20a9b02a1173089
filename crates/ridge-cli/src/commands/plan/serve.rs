//! `ridge plan serve`: latencies, throughput and money of a server at one point.

use clap::Args;
use ridge_hw::units::Bytes;
use ridge_plan::PlanError;
use ridge_plan::efficiency::Machine;
use ridge_plan::ledger::{Quantisation, ServingMemory, cache_tokens, holding_one, serving};
use ridge_plan::plot::{Axis, Bars, Chart, ChartPoint, Mark, Panel, Series, Style, Unit};
use ridge_plan::reading::Reading;
use ridge_plan::serve::{
    OperatingPoint, ServeLayout, Software, Traffic, disaggregated, dollars_per_million, gpus_for, simulated,
};
use serde_json::json;

use super::page::{Page, PageArgs, PageBlock, PageTable, ledger_bar, ledger_table, seconds};
use super::parsers::{amount, quantisation};
use super::target::{TargetArgs, sources, sources_json};
use crate::args::whole;
use crate::error::{Result, refused};
use crate::output::grouped;

/// Estimate serving latency, throughput and cost
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge plan serve Llama-3.1-70B --device H200 --weights fp8 --tp 4 --prompt 2048 --answer 512 --batch 64
  ridge plan serve DeepSeek-V3 --device H200 --weights fp8 --tp 8 --ep 8 --rate 20 --price 3 --disaggregate 2

Exit codes: 0 it fits, 1 failed, 2 usage error, 3 does not fit.")]
pub(crate) struct PlanServeArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// Format of matrices: bf16, fp8, q8, int4, nvfp4, mxfp4, or one of GGUF such as q4_k [default: that of a GGUF file, else
    /// bf16]
    #[arg(long, value_name = "FORMAT", value_parser = quantisation)]
    weights: Option<Quantisation>,

    /// Bits of an element of the cache
    #[arg(long, value_name = "BITS", default_value_t = 16, value_parser = whole::<usize, 2, 32>)]
    cache_bits: usize,

    /// Tensor parallel ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    tp: usize,

    /// Pipeline stages
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    pp: usize,

    /// Replicas of attention that share the experts, each of tp x pp GPUs and with sequences of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    attention_dp: usize,

    /// Ranks that share the experts, among those of tp x attention-dp: it adds no GPUs, as `plan fit --ep` does
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<usize, 1, 4096>)]
    ep: usize,

    /// Tokens of a prompt
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = whole::<usize, 1, 100_000_000>)]
    prompt: usize,

    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = whole::<usize, 1, 100_000_000>)]
    answer: usize,

    /// Concurrent sequences per attention replica [default: as many as fit, 256 at most]
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1_000_000>)]
    batch: Option<usize>,

    /// Required requests per second
    #[arg(long, value_name = "N", value_parser = amount::<1_000_000_000>)]
    rate: Option<f64>,

    /// Price of a GPU hour, USD
    #[arg(long, value_name = "USD", value_parser = amount::<1_000_000>)]
    price: Option<f64>,

    /// Disaggregated serving: prefill replicas per decode replica
    #[arg(long, value_name = "N", value_parser = whole::<usize, 1, 1024>)]
    disaggregate: Option<usize>,

    /// The program whose overhead a step and a request have: vllm, trtllm or sglang
    #[arg(long, value_name = "NAME", default_value = "vllm", value_parser = software, conflicts_with = "disaggregate")]
    software: &'static Software,

    #[command(flatten)]
    page: PageArgs,
}

/// A program of the table.
fn software(name: &str) -> std::result::Result<&'static Software, String> {
    Software::find(name, "").ok_or_else(|| format!("is none of {}", Software::names().join(", ")))
}

/// How far these figures are from measurements that were not used to choose any constant: the median error of `cargo xtask
/// accuracy`, in percent, for dense models and for those with experts.
const ERRORS: [(&str, [f64; 2]); 2] = [("time to first token", [12.1, 48.2]), ("time per output token", [8.1, 14.7])];

pub(super) fn run(args: &PlanServeArgs) -> Result<()> {
    let reading = args.target.reading()?;
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
            "not one sequence of {context} tokens fits beside the weights: it takes {} of a GPU and {} are left; {}",
            fit.per_sequence,
            fit.room,
            holding_one(&reading, device, &memory, context)
        ));
    }
    let batch = args.batch.unwrap_or(most.min(256));
    if batch > most {
        return no_room(&format!("--batch {batch}: {most} sequences of {context} tokens fit beside the weights"));
    }
    let traffic = Traffic { prompt: args.prompt, answer: args.answer, batch };
    let cached = cache_tokens(&reading, &memory, fit.room, context);
    let point = args.point(&reading, &machine, &layout, &traffic, cached);
    let gpus = args.rate.map(|rate| gpus_for(rate, point.requests_per_second, point.gpus));
    // Of the GPUs that the rate needs, some of which may idle; without a rate, of a replica that never does.
    let (paid, yielded) = match args.rate.zip(gpus) {
        Some((rate, gpus)) => (gpus, rate * args.answer as f64),
        None => (point.gpus, point.tokens_per_second),
    };
    let dollars = args.price.map(|price| dollars_per_million(price, paid, yielded));
    let each = if args.attention_dp > 1 { " for each replica of attention" } else { "" };
    let json = json!({
        "model": reading.family, "device": machine.name, "layout": layout, "traffic": traffic, "point": point,
        "most_sequences": most, "gpus_for_rate": gpus, "dollars_per_million_output_tokens": dollars,
        "dollars_are_at": dollars.map(|_| if gpus.is_some() { "the rate" } else { "full load" }),
        "ledger": fit.ledger, "sources": sources_json(&machine),
    });
    let mut rows = vec![
        (
            "time to first token",
            seconds(point.ttft),
            args.latency("simulated: clients begin at once and ask again when they are answered"),
        ),
        (
            "time per output token",
            seconds(point.tpot),
            args.latency("the same: decode steps, and those that take tokens of prompts too"),
        ),
        (
            "a decode step alone",
            seconds(point.decode_step),
            "per op max(FLOPs / rate, weights and cache / bandwidth), sums, host",
        ),
        ("a prompt alone", seconds(point.prefill), "the same for the prompt's tokens, in chunks of 8192"),
        ("output tokens/s", format!("{:.0}", point.tokens_per_second), args.throughput()),
        ("requests/s", format!("{:.2}", point.requests_per_second), "tokens/s / answer"),
        ("GPUs of a replica", point.gpus.to_string(), "tp x pp x attention-dp, and those for prompts"),
        ("sequences that fit", format!("{most}{each}"), "room / bytes of a sequence, see ridge plan fit"),
    ];
    if let Some(gpus) = gpus {
        rows.push(("GPUs for the rate", gpus.to_string(), "rate / requests of a replica, rounded up to replicas"));
    }
    if let Some(dollars) = dollars {
        rows.push(match gpus {
            Some(_) => (
                "dollars per million output tokens",
                format!("{dollars:.3}"),
                "price x GPUs for the rate / 3600 / (rate x answer) x 1e6",
            ),
            None => (
                "dollars per million output tokens",
                format!("{dollars:.3} at full load"),
                "price x GPUs / 3600 / tokens/s x 1e6; --rate prices the GPUs that a rate needs",
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
        if args.disaggregate.is_some() { ", prompts apart" } else { "" }
    );
    let mut ledger = ledger_table("memory of a GPU", &fit.ledger.entries);
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
                title: "Memory of a GPU".into(),
                axis: Axis::linear("memory", Unit::Bytes),
                bars: vec![ledger_bar("a GPU", &fit.ledger)],
                limit: Some((machine.name.clone(), machine.memory)),
            }
            .into(),
        );
    }
    page.lead = format!(
        "first token after {}, then one every {}; {:.0} output tokens/s on {} GPUs",
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
        page.lead += &format!("\n{dollars:.3} dollars for a million output tokens at {load}");
    }
    // Prompts on replicas of their own are not simulated, and no measurements of them are at hand.
    if args.disaggregate.is_none() {
        let experts = usize::from(reading.experts > 0);
        for (figure, errors) in ERRORS {
            let error = format!("{} %", errors[experts]);
            page.given(&format!("median error of the {figure}"), error, "held-out runs of `cargo xtask accuracy`");
        }
        page.given("program", &args.software.name, "--software");
    }
    page.given("format of matrices", format!("{}, {} bits", weights.name(), weights.bits_shown()[0]), "--weights");
    page.given("element of the cache", format!("{} bits", args.cache_bits), "--cache-bits");
    page.given("share of the device's memory that may be used", memory.utilisation, "set: the rest is margin");
    page.given("tokens of a prompt that a step takes at most", memory.step_tokens, "set");
    page.assume(&machine);
    args.page.show(&page)
}

/// Batches of a sweep: powers of 2 and those between, up to `most`, which is the last.
fn batches(most: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1_usize), |n| n.checked_mul(2)).take_while(|n| *n < most);
    let mut all: Vec<usize> = powers.flat_map(|n| [n, n + n / 2]).filter(|n| *n < most).collect();
    all.push(most);
    all.dedup();
    all
}

impl PlanServeArgs {
    /// How a latency is found, which is `simulated` unless prompts have replicas of their own.
    fn latency(&self, simulated: &'static str) -> &'static str {
        match self.disaggregate {
            None => simulated,
            Some(_) => {
                "a prompt alone, its cache sent to a replica that answers, and decode steps that nothing disturbs"
            }
        }
    }

    /// How the output tokens a second are found.
    fn throughput(&self) -> &'static str {
        match self.disaggregate {
            None => "of the same simulation, where prompts and answers share the steps",
            Some(_) => {
                "attention-dp x batch x answer / (first token + time per output token x (answer - 1)), \
                 or answer x the prompts a second that their replicas take, whichever is less"
            }
        }
    }

    /// The layout asked for, with `tp` ranks of tensor parallelism.
    fn layout(&self, tp: usize, weights: Quantisation) -> ServeLayout {
        ServeLayout {
            tp,
            pp: self.pp,
            attention_dp: self.attention_dp,
            ep: self.ep,
            weights,
            cache_bytes: self.cache_bits as f64 / 8.0,
        }
    }

    fn memory(&self, reading: &Reading, layout: &ServeLayout) -> ServingMemory {
        ServingMemory {
            tp: layout.tp,
            pp: self.pp,
            // Within a group of experts tensor parallelism cuts them too.
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

    /// Batches that fit `layout` with their points; none if its weights alone do not.
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

    /// Latencies and throughput over the batch, and what users and GPUs get in layouts of more and fewer ranks.
    fn panels(&self, reading: &Reading, machine: &Machine, layout: &ServeLayout, batch: usize) -> Vec<Panel> {
        let found = self.sweep(reading, machine, layout);
        let over =
            |of: fn(&OperatingPoint) -> f64| found.iter().map(move |(b, p)| (*b as f64, of(p))).collect::<Vec<_>>();
        let sequences = || Axis::log("sequences under way", Unit::Number);
        let mark = Mark { name: "asked for".into(), x: batch as f64 };
        let mut latency = Chart::new("Latency over the batch", sequences(), Axis::log("time", Unit::Seconds))
            .with(Series::new("to the first token", Style::Both, over(|p| p.ttft)))
            .with(Series::new("per output token", Style::Both, over(|p| p.tpot)));
        latency.marks.push(mark.clone());
        let rate = Axis::linear("output tokens/s of a GPU", Unit::Number);
        let mut throughput = Chart::new("Throughput over the batch", sequences(), rate).with(Series::new(
            "tokens/s",
            Style::Both,
            over(|p| p.tokens_per_second / p.gpus as f64),
        ));
        throughput.marks.push(mark);
        let title = format!("What a user gets and what a GPU gives: {} + {} tokens", self.prompt, self.answer);
        let user = Axis::linear("output tokens/s of a user", Unit::Number);
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
