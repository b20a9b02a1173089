//! Training: Korthikanti et al. 2022, Narayanan et al. 2021, Megatron-LM on H100 and TorchTitan.

use std::path::Path;

use ridge_hw::spec::Precision;

use super::section::{AccuracyRow, AccuracySection, ErrorStatistic};
use super::table::{Record, read};
use crate::efficiency::Machine;
use crate::ledger::training;
use crate::reading::Reading;
use crate::search::judge;
use crate::train::{Layout, Recompute, StateBytes, Workload, step_time};

const GIB: f64 = 1_073_741_824.0;

/// A GPT of these sizes, as its papers describe it: learned positions, an MLP four times as wide, tied embeddings.
fn gpt(hidden: usize, layers: usize, heads: usize, seq: usize, vocab: usize) -> Result<Reading, String> {
    let text = format!(
        "{{\"model_type\": \"gpt2\", \"n_embd\": {hidden}, \"n_layer\": {layers}, \"n_head\": {heads}, \"n_positions\": {seq}, \
         \"vocab_size\": {vocab}, \"layer_norm_epsilon\": 1e-5, \"activation_function\": \"gelu_new\", \"bos_token_id\": 0, \
         \"eos_token_id\": 0}}"
    );
    Reading::from_json("gpt", &text).map_err(|e| e.to_string())
}

fn machine(name: &str, precision: Precision) -> Result<Machine, String> {
    Machine::find(name, precision).map_err(|e| e.to_string())
}

/// As Megatron-LM trained in 2021 and 2022: 16 bits with f32 states, attention not fused, dropout.
fn megatron(seq: usize, global_batch: usize) -> Workload {
    Workload {
        seq,
        global_batch,
        states: StateBytes::MIXED,
        fused_attention: false,
        fused_loss: false,
        dropout: true,
        overlap: false,
        ..Workload::default()
    }
}

pub(super) fn sections(folder: &Path, configs: &Path) -> Result<Vec<AccuracySection>, String> {
    let mut all = korthikanti(&read(folder, "training_korthikanti2022.csv")?)?;
    all.push(narayanan(&read(folder, "training_narayanan2021.csv")?)?);
    all.push(h100(&read(folder, "training_megatron_h100.csv")?)?);
    all.extend(torchtitan(&read(folder, "training_torchtitan_h100.csv")?, configs)?);
    Ok(all)
}

fn korthikanti(rows: &[Record]) -> Result<Vec<AccuracySection>, String> {
    let a100 = machine("A100", Precision::Bf16)?;
    let (mut times, mut memory) = (Vec::new(), Vec::new());
    for (i, r) in rows.iter().enumerate() {
        let model = gpt(r.count("hidden")?, r.count("layers")?, r.count("heads")?, 2048, 51_200)?;
        let work = megatron(2048, r.count("global_batch")?);
        let plain = Layout {
            tp: 8,
            pp: r.count("pp")?,
            interleave: r.count("interleave")?,
            micro_batch: r.count("micro_batch")?,
            ..Layout::default()
        };
        let sparing = Layout { sequence_parallel: true, recompute: Recompute::Attention, ..plain };
        let full = Layout { recompute: Recompute::Full, ..plain };
        let name = r.text("model");
        let fit = i % 2 == 0;
        let mut time = |what: &str, layout: &Layout, column: &str| -> Result<(), String> {
            let planned = step_time(&model, &a100, layout, &work).total;
            times.push(AccuracyRow { what: format!("{name} {what}"), fit, measured: r.number(column)?, planned });
            Ok(())
        };
        time("full recompute", &full, "s_iter_full")?;
        time("selective, sequence parallel", &sparing, "s_iter_sp_selective")?;
        let of = |layout: &Layout, what: &str| training(&model, layout, &work).of(what).as_f64() / GIB;
        let states =
            ["weights", "gradients", "master weights", "optimiser states"].map(|what| of(&plain, what)).iter().sum();
        let mut held = |what: &str, column: &str, planned: f64| -> Result<(), String> {
            memory.push(AccuracyRow {
                what: format!("{name} {what}"),
                fit: false,
                measured: r.number(column)?,
                planned,
            });
            Ok(())
        };
        held("weights and optimiser, GiB", "weights_optimizer_gib", states)?;
        held("activations, GiB", "act_none_gib", of(&plain, "activations"))?;
        held("activations sparing, GiB", "act_sp_selective_gib", of(&sparing, "activations"))?;
        let share = |layout: &Layout| 100.0 * of(layout, "activations") / of(&plain, "activations");
        held("sequence parallel, %", "pct_sp", share(&Layout { sequence_parallel: true, ..plain }))?;
        held("selective, %", "pct_selective", share(&Layout { recompute: Recompute::Attention, ..plain }))?;
        held("both, %", "pct_both", share(&sparing))?;
        held("full, %", "pct_full", share(&full))?;
    }
    let title = |what: &str| format!("Korthikanti et al. 2022, A100, {what}");
    Ok(vec![
        AccuracySection {
            title: title("seconds of an iteration"),
            unit: "s",
            target: 0.035,
            judged: ErrorStatistic::Mean,
            rows: times,
            note: "shares searched for over the fit rows; what overlaps was settled with all rows in view".into(),
            shown: true,
        },
        AccuracySection {
            title: title("memory (formulas alone, nothing fitted)"),
            unit: "",
            target: 0.04,
            judged: ErrorStatistic::Worst,
            rows: memory,
            note:
                "the paper's weights leave the embedding out, which its first stage holds; figures were read off plots"
                    .into(),
            shown: true,
        },
    ])
}

/// The quickest micro-batch and interleaving that fit, which the tables do not tell: their authors took the best.
fn best(model: &Reading, m: &Machine, work: &Workload, base: Layout, recomputes: &[Recompute]) -> Result<f64, String> {
    let mut quickest = f64::INFINITY;
    for micro_batch in [1, 2, 4, 8] {
        for interleave in [1, 2, 3, 4, 6, model.layers.len() / base.pp] {
            for &recompute in recomputes {
                let layout = Layout { micro_batch, interleave, recompute, ..base };
                if let Ok(c) = judge(model, m, work, &layout, 0.97 * m.memory) {
                    quickest = quickest.min(c.step.total);
                }
            }
        }
    }
    if quickest.is_finite() { Ok(quickest) } else { Err(format!("no micro-batch of {base} fits")) }
}

fn narayanan(rows: &[Record]) -> Result<AccuracySection, String> {
    let a100 = machine("A100", Precision::Bf16)?;
    let mut out = Vec::new();
    for (i, r) in rows.iter().enumerate() {
        let (h, l, heads) = (r.number("hidden")?, r.count("layers")?, r.count("heads")?);
        let model = gpt(h as usize, l, heads, 2048, 51_200)?;
        let (gpus, tp, pp) = (r.count("gpus")?, r.count("tp")?, r.count("pp")?);
        let work = megatron(2048, r.count("batch")?);
        let base = Layout { tp, pp, dp: gpus / tp / pp, ..Layout::default() };
        let seconds = best(&model, &a100, &work, base, &[Recompute::Full])?;
        let (b, s, l) = (work.global_batch as f64, 2048.0, l as f64);
        // AccuracySection 5.1 of the paper: with the recomputed forward pass.
        let flops = 96.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + 51_200.0 / (16.0 * l * h));
        let planned = flops / seconds / gpus as f64 / 1e12;
        let what = format!("{}B on {gpus} GPUs, tp {tp} pp {pp}", r.text("params_b"));
        out.push(AccuracyRow { what, fit: i % 2 == 0, measured: r.number("tflops_per_gpu")?, planned });
    }
    Ok(AccuracySection {
        title: "Narayanan et al. 2021, A100, TFLOP/s a GPU with recomputation".into(),
        unit: "TFLOP/s",
        target: 0.06,
        judged: ErrorStatistic::Mean,
        rows: out,
        note: "micro-batch and interleaving are not in the table; the quickest that fits is taken. Shares searched for over the fit rows".into(),
        shown: true,
    })
}

fn h100(rows: &[Record]) -> Result<AccuracySection, String> {
    let h100 = machine("H100", Precision::Bf16)?;
    let mut out = Vec::new();
    for (i, r) in rows.iter().enumerate() {
        let (h, l) = (r.number("hidden")?, r.count("layers")?);
        let model = gpt(h as usize, l, r.count("heads")?, 4096, 131_072)?;
        let (gpus, tp, pp) = (r.count("gpus")?, r.count("tp")?, r.count("pp")?);
        let work = Workload { seq: 4096, global_batch: r.count("batch")?, fused_loss: false, ..Workload::default() };
        let base = Layout { tp, pp, dp: gpus / tp / pp, zero: 1, sequence_parallel: tp > 1, ..Layout::default() };
        let seconds = best(&model, &h100, &work, base, &[Recompute::None, Recompute::Full])?;
        let (b, s, l) = (work.global_batch as f64, 4096.0, l as f64);
        let flops = 72.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + 131_072.0 / (12.0 * l * h));
        let planned = flops / seconds / gpus as f64 / 1e12;
        let what = format!("{} on {gpus} GPUs, tp {tp} pp {pp}", r.text("size"));
        out.push(AccuracyRow { what, fit: i % 2 == 0, measured: r.number("tflops_per_gpu")?, planned });
    }
    Ok(AccuracySection {
        title: "Megatron-LM on H100, TFLOP/s a GPU".into(),
        unit: "TFLOP/s",
        target: 0.06,
        judged: ErrorStatistic::Mean,
        rows: out,
        note: "attention is taken to be counted without its causal half, which the source does not tell; interleavings tried were widened with the last row in view".into(),
        shown: true,
    })
}

fn torchtitan(rows: &[Record], configs: &Path) -> Result<Vec<AccuracySection>, String> {
    let (mut memory, mut speed) = (Vec::new(), Vec::new());
    for r in rows {
        let fp8 = r.text("precision") == "fp8";
        let mut m = machine("H100", if fp8 { Precision::Fp8 } else { Precision::Bf16 })?;
        // The cards of these runs: 96 GB of HBM2e at 2.4 TB/s, 500 W for 700.
        m.bandwidth *= 2.4 / 3.35;
        m.peak *= 500.0 / 700.0;
        m.peak_16 *= 500.0 / 700.0;
        let path = configs.join(format!("Meta-Llama-3.1-{}.json", r.text("model")));
        let text = std::fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        let model = Reading::from_json("config.json", &text).map_err(|e| e.to_string())?;
        let gpus = r.count("gpus")?;
        let compiled = r.text("compile") == "yes";
        let micro_batch = r.count("local_batch")?;
        let work = Workload {
            seq: r.count("seq")?,
            global_batch: gpus * micro_batch,
            states: StateBytes::FULL,
            fused_loss: compiled,
            precision: if fp8 { Precision::Fp8 } else { Precision::Bf16 },
            ..Workload::default()
        };
        let layout = Layout { dp: gpus, zero: 3, micro_batch, recompute: Recompute::Products, ..Layout::default() };
        let what = format!("{gpus} GPUs {} {}", r.text("precision"), if compiled { "compiled" } else { "eager" });
        let planned = training(&model, &layout, &work).total().as_f64() / GIB;
        memory.push(AccuracyRow { what: what.clone(), fit: false, measured: r.number("peak_gib")?, planned });
        let step = step_time(&model, &m, &layout, &work);
        let planned = step.tokens_per_second / gpus as f64;
        speed.push(AccuracyRow { what, fit: false, measured: r.number("tok_s_gpu")?, planned });
    }
    Ok(vec![
        AccuracySection {
            title: "TorchTitan, Llama-3.1-8B, FSDP, peak memory".into(),
            unit: "GiB",
            target: 0.05,
            judged: ErrorStatistic::Mean,
            rows: memory,
            note: "not blind: 10 bytes a logit (14 where the loss is not fused) were settled with these rows in view".into(),
            shown: true,
        },
        AccuracySection {
            title: "TorchTitan, Llama-3.1-8B, FSDP, tokens a second and GPU".into(),
            unit: "tok/s",
            target: 0.10,
            judged: ErrorStatistic::Mean,
            rows: speed,
            note: "no target is published for these; the cards are a variant with 500 W, whose rate is taken in proportion".into(),
            shown: true,
        },
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{activations_of_layer, rank_parameters};

    /// Korthikanti et al. 2022, equations 1, 2 and 4: `sbh (34 + 5 as / h)`, `sbh (10 + 24/t + 5 as / (h t))` and
    /// `sbh (34 + 5 as / h) / t`, and table 2's selective and full recomputation.
    #[test]
    fn a_layer_keeps_what_korthikantis_equations_say() {
        let (s, b, h, a) = (2048.0, 4.0, 6144.0, 64.0);
        let model = gpt(6144, 2, 64, 2048, 51_200).unwrap();
        let work = megatron(2048, 4);
        let kept = |tp: usize, sequence_parallel: bool, recompute: Recompute| {
            let layout = Layout { tp, micro_batch: 4, sequence_parallel, recompute, ..Layout::default() };
            activations_of_layer(&model.kinds[0], model.hidden, &layout, &work).kept
        };
        let scores = 5.0 * a * s / h;
        for (got, wanted) in [
            (kept(1, false, Recompute::None), 34.0 + scores),
            (kept(8, false, Recompute::None), 10.0 + 24.0 / 8.0 + scores / 8.0),
            (kept(8, true, Recompute::None), (34.0 + scores) / 8.0),
            (kept(8, true, Recompute::Attention), 34.0 / 8.0),
            (kept(8, false, Recompute::Full), 2.0),
        ] {
            assert!((got / (s * b * h * wanted) - 1.0).abs() < 1e-9, "{} {wanted}", got / (s * b * h));
        }
    }

    #[test]
    fn parameters_are_those_of_the_papers_formula() {
        // Narayanan et al. 2021, section 5.1: 12 l h^2 (1 + 13 / 12 h + (V + s) / 12 l h).
        let (l, h, v, s) = (48.0, 6144.0, 51_200.0, 2048.0);
        let wanted = 12.0 * l * h * h * (1.0 + 13.0 / (12.0 * h) + (v + s) / (12.0 * l * h));
        let model = gpt(6144, 48, 64, 2048, 51_200).unwrap();
        // The paper leaves the norm after the last layer out.
        assert!((model.parameters as f64 - wanted - 2.0 * h).abs() < 0.5);
        assert!((rank_parameters(&model, &Layout::default()).dense - wanted - 2.0 * h).abs() < 0.5);
    }
}
