//! Memory of a training step on the rank that holds most: the first stage of the pipeline, and where the logits are,
//! the last.

use super::entries::Ledger;
use crate::reading::{ACTIVATION, LayerWork, Reading};
use crate::train::{Layout, Recompute, Workload};

/// Parameters of a rank: those of all its data-parallel group, and those of experts, which are cut further.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankParameters {
    /// Not of experts.
    pub dense: f64,
    /// Of experts.
    pub experts: f64,
    /// The most that one unit of gathering (a layer, or embedding and head) has before ZeRO cuts it.
    pub largest_unit: f64,
}

/// Parameters of the fullest stage: an even share of the layers, and the larger of embedding and head, or both where one
/// stage has both. Norms after the last layer count with the embedding.
pub fn rank_parameters(reading: &Reading, layout: &Layout) -> RankParameters {
    // A tied head that is apart from its embedding is held a second time.
    let ends = if layout.pp == 1 { reading.embedding + reading.head } else { reading.embedding.max(reading.head) };
    with_ends(reading, layout, ends)
}

/// Those of stage `stage`: the first has the embedding, the last the head, or the embedding again where they are one.
fn stage_parameters(reading: &Reading, layout: &Layout, stage: usize) -> RankParameters {
    let head = if reading.head > 0.0 { reading.head } else { reading.embedding };
    let ends = match (stage, layout.pp) {
        (_, 1) => reading.embedding + reading.head,
        (0, _) => reading.embedding,
        (s, pp) if s + 1 == pp => head,
        _ => 0.0,
    };
    with_ends(reading, layout, ends)
}

/// An even share of the layers, and `ends`.
fn with_ends(reading: &Reading, layout: &Layout, ends: f64) -> RankParameters {
    let (tp, pp) = (layout.tp as f64, layout.pp as f64);
    let (mut dense, mut experts, mut largest) = (0.0, 0.0, 0.0f64);
    for kind in 0..reading.kinds.len() {
        let layer = &reading.kinds[kind];
        let count = reading.layers.iter().filter(|k| **k == kind).count() as f64;
        let (own, of_experts) = (layer.cut / tp + layer.whole, layer.experts / (tp * layout.ep as f64));
        dense += own * count / pp;
        experts += of_experts * count / pp;
        largest = largest.max(own + of_experts);
    }
    RankParameters { dense: dense + ends / tp, experts, largest_unit: largest.max(ends / tp) }
}

/// What one layer keeps of one micro-batch on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerActivations {
    /// What is kept until the backward pass.
    pub kept: f64,
    /// What the layer keeps in addition while it is computed again.
    pub transient: f64,
}

/// Bytes of activations of `layer` (Korthikanti et al. 2022, equations 1 to 4, for any layer): values that the backward
/// pass needs, `2` bytes each, those outside tensor parallelism divided with sequence parallelism alone; a byte a mask
/// with dropout; and `2` (with dropout `5`) bytes a score where attention is not fused.
///
/// Of Ridge's own training they are what its gradient takes, and the layer's input.
pub fn activations_of_layer(layer: &LayerWork, hidden: usize, layout: &Layout, work: &Workload) -> LayerActivations {
    if let Some(own) = &layer.own {
        let input = ACTIVATION * (layout.micro_batch * work.seq * hidden) as f64;
        return LayerActivations { kept: own.bytes(layout.micro_batch, work.seq, layout.tp) + input, transient: 0.0 };
    }
    let tokens = (layout.micro_batch * work.seq) as f64 / layout.cp as f64;
    let tp = layout.tp as f64;
    let outside = if layout.sequence_parallel { tp } else { 1.0 };
    let s = &layer.saved;
    let masks = if work.dropout { s.residuals / outside } else { 0.0 };
    let values = tokens * (ACTIVATION * (s.whole / outside + s.cut / tp) + masks);
    let score_bytes = match (work.fused_attention, work.dropout) {
        (true, _) => 0.0,
        (false, false) => 2.0,
        (false, true) => 5.0,
    };
    // Fused attention keeps a maximum and a sum a row instead.
    let rows = if work.fused_attention { 4.0 * tokens * s.score_heads / tp } else { 0.0 };
    let scores = score_bytes * tokens * work.seq as f64 * s.score_heads / tp;
    let all = values + rows + scores;
    let input = tokens * ACTIVATION * hidden as f64 / outside;
    let products = tokens * ACTIVATION * (s.products_whole / outside + s.products_cut / tp) + input + rows;
    match layout.recompute {
        Recompute::None => LayerActivations { kept: all, transient: 0.0 },
        Recompute::Attention => LayerActivations { kept: values + rows, transient: scores },
        Recompute::Products => LayerActivations { kept: products.min(all), transient: all },
        Recompute::Full => LayerActivations { kept: input, transient: all },
    }
}

/// Micro-batches' worth of its layers that are alive at once on stage `stage`: `p - stage` of `m` in 1F1B; interleaved, the
/// chunks of its warm-up and one more, which on the first is `p (1 + (p - 1) / (p v))` (Korthikanti et al. 2022, section
/// 4.2.3).
fn in_flight(layout: &Layout, stage: usize, micro_batches: f64) -> f64 {
    let (behind, p, v) = ((layout.pp - 1 - stage) as f64, layout.pp as f64, layout.interleave as f64);
    let most = if layout.interleave > 1 { (2.0 * behind + (v - 1.0) * p + 1.0) / v } else { behind + 1.0 };
    most.min(micro_batches)
}

/// Shares of the group over which ZeRO cuts.
struct Shares {
    weight: f64,
    gradient: f64,
    optimiser: f64,
}

fn shares(zero: u8, ranks: f64) -> Shares {
    let of = |from: u8| if zero >= from { ranks } else { 1.0 };
    Shares { weight: of(3), gradient: of(2), optimiser: of(1) }
}

/// Amounts of a step, in bytes. Cheap: a search takes millions.
struct Amounts {
    weights: f64,
    gradients: f64,
    master: f64,
    moments: f64,
    activations: f64,
    transient: f64,
    logits: f64,
    buckets: f64,
    alive: f64,
    parameters: RankParameters,
}

/// Those of a stage, or of the fullest rank.
fn amounts(reading: &Reading, layout: &Layout, work: &Workload, stage: Option<usize>) -> Amounts {
    let p = match stage {
        None => rank_parameters(reading, layout),
        Some(stage) => stage_parameters(reading, layout, stage),
    };
    let ranks = (layout.dp * layout.cp) as f64;
    let (dense, experts) = (shares(layout.zero, ranks), shares(layout.zero, ranks / layout.ep as f64));
    let bytes = |each: f64, share: fn(&Shares) -> f64| each * (p.dense / share(&dense) + p.experts / share(&experts));
    let micro_batches = work.global_batch as f64 / (layout.dp * layout.micro_batch) as f64;
    let (mut kept, mut transient) = (0.0, 0.0f64);
    for kind in 0..reading.kinds.len() {
        let count = reading.layers.iter().filter(|k| **k == kind).count() as f64;
        let of = activations_of_layer(&reading.kinds[kind], reading.hidden, layout, work);
        kept += of.kept * count / layout.pp as f64;
        transient = transient.max(of.transient);
    }
    let tokens = (layout.micro_batch * work.seq) as f64 / layout.cp as f64;
    // In 16 bits and as f32, and the f32 gradient; their logarithms too where the loss is not fused.
    let per_logit = if work.fused_loss { 10.0 } else { 14.0 };
    let logits = per_logit * tokens * reading.vocab as f64 / layout.tp as f64;
    // The first stage has most micro-batches in flight, the last the logits: whichever is more.
    let stage = stage.unwrap_or_else(|| {
        let [first, last] = [0, layout.pp - 1].map(|stage| in_flight(layout, stage, micro_batches));
        if kept * last + logits > kept * first { layout.pp - 1 } else { 0 }
    });
    let alive = in_flight(layout, stage, micro_batches);
    let logits = if stage + 1 == layout.pp { logits } else { 0.0 };
    let buckets = match layout.zero {
        // A unit's gradients are whole until they are scattered; below, they are slices of all gradients.
        2 if ranks > 1.0 => work.states.gradient * p.largest_unit,
        // A unit is gathered in 16 bits and its gradient made there; the next layer is fetched meanwhile.
        3 if ranks > 1.0 => 4.0 * p.largest_unit,
        _ => 0.0,
    };
    Amounts {
        weights: bytes(work.states.weight, |s| s.weight),
        gradients: bytes(work.states.gradient, |s| s.gradient),
        master: bytes(work.states.master, |s| s.optimiser),
        moments: bytes(work.states.moments, |s| s.optimiser),
        activations: kept * alive,
        transient: 2.0 * transient,
        logits,
        buckets,
        alive,
        parameters: p,
    }
}

/// Bytes of the fullest rank, all entries of [`training`] together.
pub fn training_total(reading: &Reading, layout: &Layout, work: &Workload) -> f64 {
    let a = amounts(reading, layout, work, None);
    a.weights + a.gradients + a.master + a.moments + a.activations + a.transient + a.logits + a.buckets
}

/// What the fullest rank holds at the end of its first forward pass. The logits are an entry where that rank is of the
/// last stage.
pub fn training(reading: &Reading, layout: &Layout, work: &Workload) -> Ledger {
    entries(reading, layout, work, &amounts(reading, layout, work, None))
}

/// What a rank of each stage of the pipeline holds when most is alive on it.
pub fn training_stages(reading: &Reading, layout: &Layout, work: &Workload) -> Vec<Ledger> {
    (0..layout.pp).map(|stage| entries(reading, layout, work, &amounts(reading, layout, work, Some(stage)))).collect()
}

fn entries(reading: &Reading, layout: &Layout, work: &Workload, a: &Amounts) -> Ledger {
    let (p, s) = (a.parameters, work.states);
    let mut ledger = Ledger::default();
    let ranks = layout.dp * layout.cp;
    let over = |from: u8| {
        if layout.zero >= from && ranks > 1 {
            format!(" / {ranks} ranks (ZeRO {})", layout.zero)
        } else {
            String::new()
        }
    };
    let held = format!("{:.4e} parameters of the rank", p.dense + p.experts);
    ledger.add("weights", a.weights, format!("{held} x {} B{}", s.weight, over(3)));
    ledger.add("gradients", a.gradients, format!("{held} x {} B{}", s.gradient, over(2)));
    if s.master > 0.0 {
        ledger.add("master weights", a.master, format!("{held} x {} B{}", s.master, over(1)));
    }
    ledger.add("optimiser states", a.moments, format!("{held} x {} B{}", s.moments, over(1)));
    let layers = reading.layers.len() as f64 / layout.pp as f64;
    let tokens = layout.micro_batch * work.seq / layout.cp;
    let each = a.activations / (layers * tokens as f64 * a.alive).max(1.0);
    let kept = format!(
        "{layers} layers x {tokens} tokens x {:.3} micro-batches in flight x {each:.0} B saved for the backward pass (recompute: {})",
        a.alive, layout.recompute
    );
    ledger.add("activations", a.activations, kept);
    if a.transient > 0.0 {
        ledger.add("recomputed layer", a.transient, "one recomputed layer and the gradients of its values");
    }
    if a.logits > 0.0 {
        let per = if work.fused_loss { 10 } else { 14 };
        ledger.add("logits", a.logits, format!("{per} B x tokens x {} / tp", reading.vocab));
    }
    if a.buckets > 0.0 {
        let unit = format!("{:.3e} parameters of the largest unit", p.largest_unit);
        match layout.zero {
            2 => ledger.add(
                "gradient bucket",
                a.buckets,
                format!("{unit} x {} B, before the reduce-scatter", s.gradient),
            ),
            _ => ledger.add("gathered weights", a.buckets, format!("{unit} x (2 + 2) B")),
        }
    }
    ledger
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading() -> Reading {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/configs/Meta-Llama-3.1-70B.json");
        Reading::from_json("config.json", &std::fs::read_to_string(file).unwrap()).unwrap()
    }

    #[test]
    fn stages_hold_all_parameters_once_and_the_fullest_is_one_of_them() {
        let reading = reading();
        let work = Workload { global_batch: 64, ..Workload::default() };
        for interleave in [1, 2] {
            let layout = Layout { tp: 2, pp: 4, dp: 2, interleave, sequence_parallel: true, ..Layout::default() };
            let stages = training_stages(&reading, &layout, &work);
            let weights: f64 = stages.iter().map(|l| l.of("weights").as_f64()).sum();
            // Norms are whole on both ranks of tensor parallelism.
            assert!((weights * 2.0 / (2.0 * reading.parameters as f64) - 1.0).abs() < 1e-3, "{weights}");
            let fullest = stages.iter().map(|l| l.total().as_f64()).fold(0.0, f64::max);
            assert!((fullest / training_total(&reading, &layout, &work) - 1.0).abs() < 1e-6);
            let logits = |stage: usize| stages[stage].of("logits").as_f64();
            assert!(logits(0) == 0.0 && logits(3) > 0.0);
        }
    }

    #[test]
    fn stages_keep_fewer_micro_batches_towards_the_end() {
        let layout = Layout { pp: 4, ..Layout::default() };
        assert_eq!([0, 1, 2, 3].map(|s| in_flight(&layout, s, 16.0)), [4.0, 3.0, 2.0, 1.0]);
        let layout = Layout { interleave: 2, ..layout };
        // p (1 + (p - 1) / (p v)) on the first.
        assert_eq!([0, 3].map(|s| in_flight(&layout, s, 16.0)), [5.5, 2.5]);
        assert!((in_flight(&layout, 0, 2.0) - 2.0).abs() < 1e-12);
    }

    #[test]
    fn each_stage_of_zero_cuts_more_and_holds_what_it_needs_whole() {
        let reading = reading();
        let work = Workload { global_batch: 64, ..Workload::default() };
        let ledger = |zero| {
            let layout = Layout { tp: 8, dp: 8, zero, sequence_parallel: true, ..Layout::default() };
            training(&reading, &layout, &work)
        };
        let of = |zero, what: &str| ledger(zero).of(what).as_f64();
        let eighth = |zero, what: &str| (of(zero, what) * 8.0 / of(0, what) - 1.0).abs() < 1e-6;
        assert!(eighth(1, "optimiser states") && eighth(1, "master weights") && !eighth(1, "gradients"));
        assert!(eighth(2, "gradients") && !eighth(2, "weights") && eighth(3, "weights"));
        // The largest unit, embedding and head, over 8 ranks of tensor parallelism.
        let unit = (reading.embedding + reading.head) / 8.0;
        assert!((of(2, "gradient bucket") / (4.0 * unit) - 1.0).abs() < 1e-6);
        assert!((of(3, "gathered weights") / (4.0 * unit) - 1.0).abs() < 1e-6);
        assert!(of(1, "gradient bucket") == 0.0 && of(1, "gathered weights") == 0.0);
    }
}
