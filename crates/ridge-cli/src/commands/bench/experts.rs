//! `ridge bench --experts`: how evenly batches use experts, and what grouped products gain over padded ones.

use ridge::train::LayerUse;
use ridge::{DispatchTime, ExpertBench, ExpertBenchSettings};
use ridge_hw::units::{Bytes, Seconds};
use ridge_models::ModelFiles;
use serde_json::{Value, json};

use super::args::BenchSettings;
use super::work::median;
use crate::error::Result;
use crate::output::{LoadProgress, Spinner, columns, count, grouped, print, print_json};

pub(super) fn run(settings: &BenchSettings) -> Result<()> {
    let files = ModelFiles::open(settings.model.path.as_deref())?;
    let config = files.config()?;
    let bench = ExpertBenchSettings {
        placement: settings.place.placement(),
        random_weights: settings.random_weights,
        repeat: settings.repeat,
    };
    let mut progress = LoadProgress::new(!settings.json);
    let bench = ExpertBench::load(&files, &config, &settings.model.numbers, &bench, &mut progress)?;
    let spinner = Spinner::new();
    let mut results = Vec::with_capacity(settings.batch.len());
    for tokens in &settings.batch {
        spinner.now("running the layers");
        results.push(bench.measure(*tokens)?);
    }
    drop(spinner);
    if settings.json {
        print_json(&object(settings, &files, &bench, &results))
    } else {
        print(&text(settings, &files, &bench, &results))
    }
}

fn mean(layers: &[LayerUse], of: impl Fn(&LayerUse) -> f64) -> f64 {
    layers.iter().map(of).sum::<f64>() / layers.len().max(1) as f64
}

fn text(settings: &BenchSettings, files: &ModelFiles, bench: &ExpertBench, results: &[DispatchTime]) -> String {
    let (experts, top_k) = bench.experts();
    let mut text = format!(
        "{files}: {} parameters, {} of weights; {}; {}, {top_k} of {experts} experts a token\n\n",
        grouped(bench.parameters),
        Bytes(bench.weight_bytes),
        bench.threads.map_or_else(|| bench.device.clone(), |threads| count(threads, "thread")),
        count(bench.layers(), "layer"),
    );
    let head =
        ["tokens", "reached", "entropy", "max load", "grouped tok/s", "time", "padded tok/s", "time", "rows", "gain"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for result in results {
        let (grouped, padded) = (median(&result.grouped), median(&result.padded));
        let rate = |seconds: f64| format!("{:.1}", result.tokens as f64 / seconds);
        rows.push(vec![
            result.tokens.to_string(),
            format!("{:.1}", result.reached),
            format!("{:.3}", mean(&result.layers, |used| used.entropy)),
            format!("{:.2}", mean(&result.layers, |used| used.max_load)),
            rate(grouped),
            Seconds(grouped).to_string(),
            rate(padded),
            Seconds(padded).to_string(),
            format!("x {:.2}", result.padding),
            format!("x {:.2}", padded / grouped),
        ]);
    }
    text += &columns(&rows);
    text += &format!(
        "\nall layers without cache and output projection, random tokens that each attend to themselves; medians of {}\n\
         reached: experts of a layer with tokens; entropy: of their shares, 1 if equal; max load: the largest over the mean; \
         means over layers\n\
         padded: every expert has as many rows as the largest load of any; rows: those of padded over those of grouped \
         products\n",
        count(settings.repeat, "run")
    );
    text
}

fn object(settings: &BenchSettings, files: &ModelFiles, bench: &ExpertBench, results: &[DispatchTime]) -> Value {
    let (experts, top_k) = bench.experts();
    let timed = |tokens: usize, times: &[f64]| {
        let median = median(times);
        json!({ "seconds": times, "median_seconds": median, "tokens_per_second": tokens as f64 / median })
    };
    let result = |r: &DispatchTime| {
        json!({
            "tokens": r.tokens,
            "experts_reached": r.reached,
            "entropy": mean(&r.layers, |used| used.entropy),
            "max_load": mean(&r.layers, |used| used.max_load),
            "grouped": timed(r.tokens, &r.grouped),
            "padded": timed(r.tokens, &r.padded),
            "padded_rows_of_expert": r.padded_rows,
            "padded_rows_over_grouped": r.padding,
            "layers": r.layers.iter().map(|used| json!({
                "layer": used.layer, "entropy": used.entropy, "max_load": used.max_load, "without_tokens": used.dead,
            })).collect::<Vec<_>>(),
        })
    };
    json!({
        "model": files.to_string(),
        "parameters": bench.parameters,
        "weight_bytes": bench.weight_bytes,
        "experts": experts,
        "experts_of_token": top_k,
        "results": results.iter().map(result).collect::<Vec<_>>(),
        "settings": {
            "random_weights": settings.random_weights,
            "batch": settings.batch,
            "repeat": settings.repeat,
            "device": bench.device,
            "threads": bench.threads,
            "format": settings.model.numbers.format.as_ref().map(|f| f.name()),
        },
    })
}
