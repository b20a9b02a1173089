//! Serving: aggregated runs of TensorRT-LLM, vLLM and SGLang.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use ridge_hw::spec::Precision;
use ridge_hw::units::Bytes;

use super::section::{AccuracyRow, AccuracySection, ErrorStatistic};
use super::table::{Record, read};
use crate::efficiency::Machine;
use crate::ledger::{self, Quantisation, ServingMemory, serving};
use crate::reading::Reading;
use crate::serve::{ClosedLoop, PromptHold, ServeLayout, Software, Traffic, benchmark};

/// The configuration of a published model.
fn config_of(model: &str) -> Option<&'static str> {
    Some(match model.rsplit('/').next()? {
        "Llama-3.1-8B-Instruct" | "Llama-3.1-8B-Instruct-FP8" => "Meta-Llama-3.1-8B",
        "Llama-3.1-70B" => "Meta-Llama-3.1-70B",
        "Qwen3-32B" | "Qwen3-32B-NVFP4" => "Qwen3-32B",
        "Qwen3-235B-A22B-FP8" => "Qwen3-235B-A22B",
        "DeepSeek-V3" | "DeepSeek-R1" | "DeepSeek-V3.1-NVFP4" => "DeepSeek-V3",
        _ => return None,
    })
}

/// StepTokens that the cache of a replica of attention holds; `None` if its weights do not fit.
fn cache_tokens(reading: &Reading, machine: &Machine, l: &ServeLayout, t: &Traffic) -> Option<f64> {
    let memory = ServingMemory {
        tp: l.tp,
        pp: l.pp,
        ep: if reading.experts > 0 { l.attention_dp } else { 1 },
        weights: l.weights,
        cache_bytes: l.cache_bytes,
        step_tokens: 8192,
        utilisation: 0.9,
    };
    let context = t.prompt + t.answer;
    let fit = serving(reading, Bytes(machine.memory as u64), &memory, context).ok()?;
    Some(ledger::cache_tokens(reading, &memory, fit.room, context))
}

/// How the source's load was put on, as far as it tells. Rows whose lengths are powers of two from 1024 up and whose prompt
/// or answer has 1024 tokens are those of InferenceMAX, whose scripts are public (`benchmarks/*.sh` there): ten requests
/// of a client, all clients at once, lengths drawn from 0.8 to 1 of the longest.
fn load(software: &Software, model: &str, l: &ServeLayout, traffic: Traffic, cache_tokens: f64) -> ClosedLoop {
    let of_inferencemax = matches!((traffic.prompt, traffic.answer), (1024 | 8192, 1024) | (1024, 8192));
    let latent = model == "DeepSeek-V3";
    let clients = traffic.batch * l.attention_dp;
    let program = software.name.as_str();
    let step_tokens = match program {
        // `--max_num_tokens` of the scripts: one prompt beside all answers.
        "trtllm" if of_inferencemax && latent => clients + traffic.prompt + 64,
        "trtllm" if of_inferencemax => 16_384,
        _ => 8192,
    };
    let hold = match program {
        // `batch_wait_timeout_iters` and `batch_wait_max_tokens_ratio`, for 1024 + 1024 tokens on fewer than 8 GPUs.
        "trtllm" if !latent && traffic.prompt == 1024 && traffic.answer == 1024 && l.tp < 8 => {
            Some(PromptHold { steps: 20, tokens: Some(step_tokens * 9 / 10) })
        }
        // `attention_dp_config`.
        "trtllm" if l.attention_dp > 1 => Some(PromptHold { steps: 60, tokens: None }),
        _ => None,
    };
    let (shortest, rounds) = if of_inferencemax { (0.8, 10) } else { (1.0, software.rounds) };
    ClosedLoop { traffic, shortest, rounds, step_tokens, cache_tokens, hold }
}

/// What the source shows of experts that no plan can follow.
const SHOWN: &str = "; the source contradicts itself on H200: TensorRT-LLM 1.1.0rc2.post2 at 1024 + 8192 tokens and 64 clients has \
    32.2 and 19.4 ms a token, and 378 and 1201 ms to the first, in rows whose columns are equal, so some of its rows were measured \
    with something that is not told (speculation would do it); its rows without a version take 308 ms for 1024 tokens and 447 for 8192";

pub(super) fn sections(folder: &Path, configs: &Path) -> Result<Vec<AccuracySection>, String> {
    let mut readings: BTreeMap<&str, Reading> = BTreeMap::new();
    // Every second pair of device and model is in view, in alphabetic order.
    let mut pairs: BTreeMap<(String, &str), Vec<(AccuracyRow, AccuracyRow)>> = BTreeMap::new();
    let (mut seen, mut left_out) = (BTreeSet::new(), 0);
    let mut records = read(folder, "serving_aggregated.csv")?;
    // Of rows with equal times the one with fewer ranks is taken.
    records.sort_by_key(|r| r.degree("tp_size") * r.degree("attention_dp_size"));
    // Ranks of some series are GPUs of several servers together, whose layouts are not told: 12, 36 or 52 cut nothing.
    let series =
        |r: &Record| [r.text("backend"), r.text("backend_version"), r.text("model_path"), r.text("system")].join(" ");
    let untold: BTreeSet<String> =
        records.iter().filter(|r| !r.degree("tp_size").is_power_of_two()).map(series).collect();
    for r in records {
        let Some(name) = config_of(r.text("model_path")) else { continue };
        if untold.contains(&series(&r)) {
            left_out += 1;
            continue;
        }
        if !readings.contains_key(name) {
            let path = configs.join(format!("{name}.json"));
            let text = std::fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
            readings.insert(name, Reading::from_json(name, &text).map_err(|e| e.to_string())?);
        }
        let device = match r.text("system") {
            "h100_sxm" => "H100",
            "h200_sxm" => "H200",
            "b200_sxm" => "B200",
            "gb200" => "GB200-NVL72",
            other => return Err(format!("system {other:?} has no sheet")),
        };
        let quant = r.text("gemm_quant_mode");
        let (precision, weights) = match quant {
            "" => (Precision::Bf16, Quantisation::Bf16),
            "nvfp4" => (Precision::Fp8, Quantisation::Nvfp4),
            _ => (Precision::Fp8, Quantisation::Fp8),
        };
        let machine = Machine::find(device, precision).map_err(|e| e.to_string())?.in_a_server();
        let machine = if weights == Quantisation::Nvfp4 { machine.in_four_bits() } else { machine };
        // Rows of k^2 ranks that cut experts k by k repeat those of k ranks: they count them twice.
        let (tp, dp, ep) = (r.degree("tp_size"), r.degree("attention_dp_size"), r.degree("moe_ep_size"));
        let twice = ep > 1 && r.degree("moe_tp_size") == ep && tp * dp == ep * ep;
        let of_rank = |degree: usize| if twice && degree > 1 { ep } else { degree };
        let layout = ServeLayout {
            tp: of_rank(tp),
            pp: r.degree("pp_size"),
            attention_dp: of_rank(dp),
            ep,
            weights,
            cache_bytes: if weights == Quantisation::Bf16 { 2.0 } else { 1.0 },
            speculation: None,
        };
        let batch = r.count("batch_size")? * dp / layout.attention_dp;
        // Some rows repeat the times of others under another layout, and some name layouts that cannot be.
        let same =
            [r.text("model_path"), r.text("system"), r.text("silicon_ttft_ms"), r.text("silicon_tpot_ms")].join(" ");
        if !seen.insert(same) || !readings[name].heads.is_multiple_of(layout.tp) {
            left_out += 1;
            continue;
        }
        let ep = layout.ep.min(layout.tp * layout.attention_dp);
        let traffic = Traffic { prompt: r.count("isl")?, answer: r.count("osl")?, batch };
        let reading = &readings[name];
        let layout = ServeLayout { ep, ..layout };
        let Some(tokens) = cache_tokens(reading, &machine, &layout, &traffic) else {
            left_out += 1;
            continue;
        };
        let software = Software::find(r.text("backend"), r.text("backend_version"))
            .ok_or_else(|| format!("backend {:?} is not in software.toml", r.text("backend")))?;
        let load = load(software, name, &layout, traffic, tokens);
        let point = benchmark(reading, &machine, &layout, &load, software);
        let what = format!(
            "{name} {} {device} {quant} tp{} dp{} ep{ep} {}/{} x{}",
            r.text("backend"),
            layout.tp,
            layout.attention_dp,
            traffic.prompt,
            traffic.answer,
            traffic.batch
        );
        let row = |measured, planned| AccuracyRow { what: what.clone(), fit: false, measured, planned: planned * 1e3 };
        let rows = (row(r.number("silicon_tpot_ms")?, point.tpot), row(r.number("silicon_ttft_ms")?, point.ttft));
        pairs.entry((device.to_owned(), name)).or_default().push(rows);
    }
    let mut all = Vec::new();
    for (kind, experts) in [("dense", false), ("experts", true)] {
        let (mut tpot, mut ttft) = (Vec::new(), Vec::new());
        let has_experts = |name: &str| readings[name].experts > 0;
        for (i, (_, rows)) in pairs.iter().filter(|((_, name), _)| has_experts(name) == experts).enumerate() {
            for (a, b) in rows {
                tpot.push(AccuracyRow { fit: i % 2 == 0, ..a.clone() });
                ttft.push(AccuracyRow { fit: i % 2 == 0, ..b.clone() });
            }
        }
        for (what, target, rows, note) in [
            ("time per output token", 0.12, tpot, ""),
            (
                "time to first token",
                0.25,
                ttft,
                "; clients begin at once and ask again when they are answered, as the public scripts of InferenceMAX have it",
            ),
        ] {
            all.push(AccuracySection {
                title: format!("Serving, {kind}: {what} of aggregated runs"),
                unit: "ms",
                target,
                judged: ErrorStatistic::Median,
                rows,
                note: format!("{left_out} rows left out: they repeat the times of another layout, their ranks do not divide the heads, their weights do not fit, or they belong to a series whose ranks are those of several servers together; shares of H100 and B200, and what serving programs add, were searched for over the fit rows; halves were drawn again (by device, then model) when programs came in, so that each program has rows to be fitted on{note}{}", if experts { SHOWN } else { "" }),
                shown: false,
            });
        }
    }
    Ok(all)
}
