//! Memory of a server's rank: weights in their format, workspace, and what is left for the cache of sequences.

use ridge_hw::units::Bytes;
use serde::Serialize;

use super::entries::{Ledger, LedgerEntry};
use super::quantisation::Quantisation;
use crate::error::PlanError;
use crate::reading::Reading;

/// What a rank holds and who fits beside it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ServingLedger {
    /// Weights, workspace and margin.
    pub ledger: Ledger,
    /// What is left for states of sequences.
    pub room: Bytes,
    /// Bytes of a sequence at the context asked for, on this rank.
    pub per_sequence: Bytes,
    /// Bytes that one token more takes, without windows.
    pub per_token: Bytes,
    /// Sequences of that context that fit.
    pub sequences: u64,
    /// Tokens of cache that fit, of sequences without end.
    pub tokens: u64,
}

/// How a server is laid out and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ServingMemory {
    /// Tensor parallel ranks.
    pub tp: usize,
    /// Pipeline stages.
    pub pp: usize,
    /// Ranks that share the experts.
    pub ep: usize,
    /// Format of matrices.
    pub weights: Quantisation,
    /// Bytes of an element of the cache; scales are those of the reading's dtype of caches.
    pub cache_bytes: f64,
    /// Tokens of a step at most.
    pub step_tokens: usize,
    /// Share of the device that may be used.
    pub utilisation: f64,
}

/// What a sequence keeps in the layers of one kind, on a rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SequenceState {
    /// What it is: keys and values, a latent, a recurrence.
    pub kind: &'static str,
    /// Layers that keep it.
    pub layers: usize,
    /// Ranks that it is cut over at most.
    pub heads: usize,
    /// Tokens that are kept at most.
    pub window: Option<usize>,
    /// Bytes of a token.
    pub per_token: Bytes,
    /// Bytes of a sequence of the context asked for.
    pub per_sequence: Bytes,
}

/// What a sequence of `context` tokens keeps on a rank, by kind of layer: each cut over as many ranks as it has heads,
/// windows holding no more than themselves.
pub fn sequence_states(reading: &Reading, memory: &ServingMemory, context: usize) -> Vec<SequenceState> {
    let of = |g: &ridge_models::StateGroup| {
        let (token, sequence) = group_bytes(reading, g, memory, context);
        SequenceState {
            kind: match last(g.states.first()) {
                "kv" => "keys and values",
                "latent" => "latent of keys and values",
                _ => "recurrence",
            },
            // Of several states a layer, one counts it.
            layers: g.states.iter().filter(|s| last(Some(s)) == last(g.states.first())).count(),
            heads: g.heads,
            window: g.window,
            per_token: Bytes(token.ceil() as u64),
            per_sequence: Bytes(sequence.ceil() as u64),
        }
    };
    let of_module = |prediction: &Reading| {
        let states = sequence_states(prediction, memory, context);
        states.into_iter().map(|state| SequenceState { kind: "cache of the prediction module", ..state })
    };
    reading.states.iter().map(of).chain(reading.prediction.iter().flat_map(|of| of_module(of))).collect()
}

/// What is to be said of tensor parallelism of a model with latent attention, behind its degree; nothing of others.
pub fn of_latents(reading: &Reading) -> &'static str {
    let latent = reading.states.iter().any(|group| last(group.states.first()) == "latent");
    if latent { " (of servers that copy the latent to each rank; Ridge runs latent attention on one rank)" } else { "" }
}

/// The last part of a state's name.
fn last(name: Option<&String>) -> &str {
    name.and_then(|n| n.rsplit('.').next()).unwrap_or_default()
}

/// Bytes of a token and of a sequence of `context` tokens on a rank.
fn group_bytes(reading: &Reading, g: &ridge_models::StateGroup, memory: &ServingMemory, context: usize) -> (f64, f64) {
    let share = memory.tp.min(g.heads).max(1) as f64 / share_of_stage(reading, memory.pp);
    let tokens = g.window.map_or(context, |w| w.min(context)) as f64;
    let token = g.bytes_per_token as f64 * reading.cache_share(memory.cache_bytes);
    (token / share, (token * tokens + g.bytes_per_sequence as f64) / share)
}

/// Bytes that a sequence of `context` tokens holds on a rank.
pub fn sequence_bytes(reading: &Reading, memory: &ServingMemory, context: usize) -> f64 {
    let of_module = reading.prediction.as_ref().map_or(0.0, |of| sequence_bytes(of, memory, context));
    reading.states.iter().map(|g| group_bytes(reading, g, memory, context).1).sum::<f64>() + of_module
}

/// Tokens that `room` bytes of cache on a rank hold, of sequences of `context` tokens.
pub fn cache_tokens(reading: &Reading, memory: &ServingMemory, room: Bytes, context: usize) -> f64 {
    room.as_f64() / sequence_bytes(reading, memory, context).max(1.0) * context as f64
}

/// Share of the layers that the fullest of `pp` stages has.
fn share_of_stage(reading: &Reading, pp: usize) -> f64 {
    let layers = reading.layers.len().max(1);
    layers.div_ceil(pp.max(1)) as f64 / layers as f64
}

/// Bytes of a rank's weights.
fn weight_bytes(reading: &Reading, tp: usize, pp: usize, ep: usize, weights: Quantisation) -> (f64, f64) {
    let (tp, share) = (tp as f64, share_of_stage(reading, pp));
    let (mut matrices, mut experts, mut plain) = (0.0, 0.0, 0.0);
    for layer in reading.each_layer() {
        matrices += layer.cut / tp * share;
        experts += layer.experts / (tp * ep as f64) * share;
        plain += layer.whole * share;
    }
    let of_layers = matrices * weights.bits() + experts * weights.bits_of_experts();
    let ends = if pp == 1 { reading.embedding + reading.head } else { reading.embedding.max(reading.head) };
    (
        of_layers / 8.0 + plain * weights.bits_of_whole() / 8.0 + ends / tp * weights.bits_of_ends() / 8.0,
        matrices + experts,
    )
}

/// The ledger of a rank of a server whose device has `memory_bytes`, for sequences of `context` tokens.
///
/// # Errors
/// [`PlanError::Room`] when the weights alone do not fit, with how many ranks they need; [`PlanError::Setting`] for a
/// layout that does not divide the model.
pub fn serving(
    reading: &Reading,
    device_bytes: Bytes,
    memory: &ServingMemory,
    context: usize,
) -> Result<ServingLedger, PlanError> {
    let m = memory;
    if m.ep > 1 && reading.experts == 0 {
        return Err(PlanError::setting("ep", m.ep, "is above 1, but the model has no experts", "set ep to 1"));
    }
    for (what, degree, of, name) in [("tp", m.tp, reading.heads, "heads"), ("ep", m.ep, reading.experts, "experts")] {
        if degree == 0 || (of > 0 && !of.is_multiple_of(degree)) {
            let nearest =
                (1..=of.max(1)).filter(|d| of.is_multiple_of(*d)).min_by_key(|d| d.abs_diff(degree)).unwrap_or(1);
            let remedy = format!("the nearest divisor is {nearest}");
            return Err(PlanError::setting(what, degree, format!("does not divide {of} {name}"), remedy));
        }
    }
    if m.pp == 0 || m.pp > reading.layers.len() {
        let remedy = format!("choose 1 to {}", reading.layers.len());
        return Err(PlanError::setting("pp", m.pp, "is not a valid number of stages for this model", remedy));
    }
    if context == 0 || context > reading.max_context {
        let remedy = format!("the longest is {}", reading.max_context);
        return Err(PlanError::setting("context", context, "exceeds the model's context", remedy));
    }
    let mut ledger = Ledger::default();
    let (weights, matrices) = weight_bytes(reading, m.tp, m.pp, m.ep, m.weights);
    let [bits, of_ends, of_whole] = m.weights.bits_shown();
    let rest = match m.weights {
        Quantisation::File { .. } => {
            format!("embedding and head x {of_ends} bits, what is not divided x {of_whole} bits")
        }
        _ => "other weights x 16 bits".to_owned(),
    };
    ledger.add("weights", weights, format!("{matrices:.4e} elements of matrices x {bits} bits, {rest}"));
    let module = reading.prediction.as_ref().map_or(0.0, |of| weight_bytes(of, m.tp, 1, m.ep, m.weights).0);
    if let Some(of) = &reading.prediction {
        let formula = format!("{:.4e} parameters, embedding and output projection left out", of.parameters as f64);
        ledger.add("prediction module", module, formula);
    }
    // The widest live set of a step: what a layer keeps, as if it were kept, and f32 logits of the rows sampled from.
    let widest = reading.kinds.iter().map(|k| k.saved.whole + k.saved.cut / m.tp as f64).fold(0.0, f64::max);
    let workspace = m.step_tokens as f64 * widest * 2.0 + 256.0 * reading.vocab as f64 / m.tp as f64 * 4.0;
    ledger.add(
        "workspace",
        workspace,
        format!("{} tokens x {widest} values x 2 B, and f32 logits of 256 rows", m.step_tokens),
    );
    let margin = device_bytes.as_f64() * (1.0 - m.utilisation);
    ledger.add(
        "margin",
        margin,
        format!("{:.0} % of the device: context, captured graphs, fragmentation", 100.0 * (1.0 - m.utilisation)),
    );
    let per_sequence = sequence_bytes(reading, m, context);
    let Some(room) = device_bytes.checked_sub(ledger.total()) else {
        let fits = |tp: usize| {
            let module = reading.prediction.as_ref().map_or(0.0, |of| weight_bytes(of, tp, 1, m.ep, m.weights).0);
            let weights = weight_bytes(reading, tp, m.pp, m.ep, m.weights).0 + module;
            reading.heads.is_multiple_of(tp) && weights + workspace + margin < device_bytes.as_f64()
        };
        let remedy = match (m.tp + 1..=reading.heads).find(|tp| fits(*tp)) {
            Some(tp) => format!("the smallest sufficient degree is tp {tp}{}; or use fewer bits", of_latents(reading)),
            None => "use fewer bits, more stages, or a device with more memory".to_owned(),
        };
        return Err(PlanError::Room { tp: m.tp, needed: ledger.total(), has: device_bytes, remedy });
    };
    let per_token: f64 = std::iter::once(reading)
        .chain(reading.prediction.as_deref())
        .flat_map(|of| of.states.iter().filter(|g| g.window.is_none()).map(move |g| group_bytes(of, g, m, context).0))
        .sum();
    ledger.entries.push(LedgerEntry { what: "free for sequences", bytes: room, formula: "remaining memory".into() });
    Ok(ServingLedger {
        ledger,
        room,
        per_sequence: Bytes(per_sequence.ceil() as u64),
        per_token: Bytes(per_token.ceil() as u64),
        sequences: (room.as_f64() / per_sequence.max(1.0)).floor() as u64,
        tokens: (room.as_f64() / per_token.max(1.0)).floor() as u64,
    })
}

/// What would hold one sequence of `context` tokens where `memory` does not: the fewest ranks of tensor parallelism and
/// the widest formats of matrices.
pub fn holding_one(reading: &Reading, device_bytes: Bytes, memory: &ServingMemory, context: usize) -> String {
    let holds = |m: &ServingMemory| serving(reading, device_bytes, m, context).is_ok_and(|f| f.sequences > 0);
    let tp = (memory.tp + 1..=reading.heads).find(|tp| holds(&ServingMemory { tp: *tp, ..*memory }));
    let mut narrower: Vec<_> =
        Quantisation::ALL.into_iter().filter(|(_, q)| q.bits() < memory.weights.bits()).collect();
    narrower.sort_by(|a, b| b.1.bits().total_cmp(&a.1.bits()));
    let format = narrower.into_iter().find(|(_, weights)| holds(&ServingMemory { weights: *weights, ..*memory }));
    let ways: Vec<String> = tp
        .map(|tp| format!("tp {tp}{}", of_latents(reading)))
        .into_iter()
        .chain(format.map(|(name, _)| format!("{name} weights")))
        .collect();
    match ways.is_empty() {
        true => "use more stages, a smaller cache dtype or a device with more memory".to_owned(),
        false => format!("use {} to fit one", ways.join(" or ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(name: &str) -> Reading {
        let file = format!("{}/../../fixtures/configs/{name}.json", env!("CARGO_MANIFEST_DIR"));
        Reading::from_json("config.json", &std::fs::read_to_string(file).unwrap()).unwrap()
    }

    fn memory(tp: usize, pp: usize) -> ServingMemory {
        let weights = Quantisation::Bf16;
        ServingMemory { tp, pp, ep: 1, weights, cache_bytes: 2.0, step_tokens: 8192, utilisation: 0.94 }
    }

    #[test]
    fn a_sequence_keeps_what_each_kind_of_layer_does() {
        let of = |name: &str, tp| sequence_states(&reading(name), &memory(tp, 1), 4096);
        // 36 layers of 2 x 8 heads x 128 elements of 2 B; ranks beyond the heads hold copies.
        let gqa = of("Qwen3-8B", 1);
        assert_eq!((gqa[0].kind, gqa[0].layers, gqa[0].per_token), ("keys and values", 36, Bytes(147_456)));
        assert_eq!(of("Qwen3-8B", 16)[0].per_token, Bytes(147_456 / 8));
        // 61 layers of 512 + 64 elements that all heads share: no rank is spared them.
        let latent = of("DeepSeek-V3", 8);
        assert_eq!((latent[0].kind, latent[0].layers), ("latent of keys and values", 61));
        assert_eq!(latent[0].per_token, Bytes(61 * 576 * 2));
        // Recurrences hold the same for any length.
        let hybrid = of("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 1);
        let recurrence = hybrid.iter().find(|s| s.kind == "recurrence").unwrap();
        assert_eq!((recurrence.layers, recurrence.per_token), (23, Bytes(0)));
        let all: u64 = hybrid.iter().map(|s| s.per_sequence.0).sum();
        let model = reading("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16");
        assert!((sequence_bytes(&model, &memory(1, 1), 4096) - all as f64).abs() < 2.0);
    }

    #[test]
    fn a_cache_of_codes_has_a_scale_for_each_key_and_value_of_each_head() {
        let of = |name: &str, tp, bytes| {
            let file = format!("{}/../../fixtures/configs/{name}.json", env!("CARGO_MANIFEST_DIR"));
            let text = std::fs::read_to_string(file).unwrap();
            let reading = Reading::with_cache("config.json", &text, ridge_graph::DType::I8).unwrap();
            sequence_states(&reading, &ServingMemory { cache_bytes: bytes, ..memory(tp, 1) }, 4096)[0].per_token
        };
        assert_eq!(of("Qwen3-8B", 1, 1.0), Bytes(36 * 2 * 8 * (128 + 4)));
        assert_eq!(of("Qwen3-8B", 4, 1.0), Bytes(36 * 2 * 2 * (128 + 4)));
        assert_eq!(of("DeepSeek-V3", 8, 1.0), Bytes(61 * (576 + 4)));
        // As programs store it that have one scale for a whole tensor.
        let unscaled = ServingMemory { cache_bytes: 1.0, ..memory(1, 1) };
        assert_eq!(sequence_states(&reading("Qwen3-8B"), &unscaled, 4096)[0].per_token, Bytes(147_456 / 2));
    }

    #[test]
    fn the_fullest_stage_has_the_layers_that_do_not_divide() {
        let reading = reading("Qwen3-8B");
        let weights = |pp| weight_bytes(&reading, 1, pp, 1, Quantisation::Bf16).1;
        // 8 of 36 layers, not 7.2.
        assert!((weights(5) / weights(1) - 8.0 / 36.0).abs() < 1e-12);
        assert_eq!(sequence_states(&reading, &memory(1, 5), 1)[0].per_token, Bytes(147_456 * 8 / 36));
    }
}
