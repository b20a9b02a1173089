//! Which weights are kept in memory of the host, so that a GPU need not have room for all of them.

use std::collections::BTreeSet;

use ridge_graph::passes::{HostWeight, host_weights};
use ridge_hw::units::Bytes;
use ridge_models::Model;

use crate::error::{Error, Result, Smaller};

/// Weights that are kept in memory of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostWeights {
    /// Their names.
    pub names: BTreeSet<String>,
    /// Bytes of all of them.
    pub bytes: Bytes,
}

impl HostWeights {
    fn of(weights: &[HostWeight]) -> Self {
        let bytes = weights.iter().map(|weight| weight.bytes).sum();
        Self { names: weights.iter().map(|weight| weight.name.to_string()).collect(), bytes: Bytes(bytes) }
    }
}

/// The first weights of `all`, in the order in which they leave the device, that have `bytes` together; `None` where all of them
/// have less.
fn first(all: &[HostWeight], bytes: u64) -> Option<&[HostWeight]> {
    let mut sum = 0;
    let enough = |weight: &HostWeight| {
        sum += weight.bytes;
        sum >= bytes
    };
    match bytes {
        0 => Some(&[]),
        _ => all.iter().position(enough).map(|last| &all[..=last]),
    }
}

/// Keeps as few weights of `model` as possible in memory of the host, so that the others fit into `available` bytes beside a
/// cache of `cache` bytes and what `workspace` says that steps need, slots of fetched weights included; and has its graph fetch
/// them. Gives what is kept, and what steps then need.
///
/// The choice is the smallest prefix of [`host_weights`] that is enough, so less memory never keeps fewer weights on the host.
///
/// # Errors
/// When what cannot leave the device does not fit, or the host has no room for what must.
pub(crate) fn keep_on_host(
    model: &mut Model,
    cache: Bytes,
    workspace: impl Fn(&Model) -> Result<Bytes>,
    available: Bytes,
    host: Option<Bytes>,
) -> Result<(HostWeights, Bytes)> {
    let all = host_weights(&model.graph);
    let whole = Bytes(model.weight_bytes()) + cache;
    // Workspace only grows with what is kept, so each round keeps more and none keeps too much. Where weights and cache alone are
    // too much, the first round tells of the workspace, too, with what is kept in any case.
    let mut needed = if whole > available { Bytes(0) } else { workspace(model)? };
    loop {
        let over = (whole + needed).0.saturating_sub(available.0);
        let Some(kept) = first(&all, over) else {
            let left = HostWeights::of(&all).bytes;
            let needed = Bytes((whole + needed).0.saturating_sub(left.0));
            let what = "what stays on the GPU (cache, workspace, norms, the output projection)";
            return Err(Error::Memory { what, needed, available, smaller: Smaller::Limit, or_on_host: false });
        };
        let kept = HostWeights::of(kept);
        let mut fetching = model.clone();
        fetching.fetch(&kept.names);
        let with_slots = workspace(&fetching)?;
        if (whole + with_slots).0.saturating_sub(kept.bytes.0) > available.0 {
            needed = Bytes(with_slots.0.max(needed.0 + 1));
            continue;
        }
        if let Some(available) = host.filter(|host| host.0 < kept.bytes.0) {
            let (what, needed) = ("the weights in memory of the host", kept.bytes);
            return Err(Error::Memory { what, needed, available, smaller: Smaller::Host, or_on_host: false });
        }
        *model = fetching;
        return Ok((kept, with_slots));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    use ridge_cuda::PlannedGpu;
    use ridge_engine::scoring::ScorerOptions;
    use ridge_graph::sample::Rng;
    use ridge_graph::{DType, Op, Prim};
    use ridge_hw::spec::DeviceSpec;
    use ridge_models::{BuildOptions, ModelConfig};

    use super::*;
    use crate::admission::{CacheSize, EnginePrograms, StepExtents, cache_bytes, engine_bytes};

    const CONTEXT: usize = 128;

    /// A mixture of experts that is larger than the workspace of its steps.
    pub(crate) fn config_text() -> String {
        let json = include_str!("../../../fixtures/families/qwen3_moe/config.json");
        [
            ("hidden_size", 32, 128),
            ("num_hidden_layers", 3, 12),
            ("num_local_experts", 5, 16),
            ("moe_intermediate_size", 8, 64),
        ]
        .iter()
        .fold(json.to_owned(), |text, (key, from, to)| {
            let [from, to] = [from, to].map(|n| format!("\"{key}\": {n},"));
            assert!(text.contains(&from), "{from} is in the fixture");
            text.replace(&from, &to)
        })
    }

    fn model() -> Model {
        let config = ModelConfig::from_json("config.json", &config_text()).unwrap();
        let options = BuildOptions { activations: DType::BF16, cache: DType::BF16, ..BuildOptions::default() };
        config.build(&BuildOptions { context: Some(CONTEXT), ..options }).unwrap()
    }

    fn fetches(model: &Model) -> usize {
        model.graph.main().nodes.iter().filter(|node| matches!(node.op, Op::Prim(Prim::Fetch(_)))).count()
    }

    #[test]
    fn as_few_weights_leave_the_gpu_as_make_the_rest_fit() {
        let whole = model();
        let (cache, total) = (Bytes(1000), whole.weight_bytes());
        let all = host_weights(&whole.graph);
        let movable: u64 = all.iter().map(|weight| weight.bytes).sum();
        // A slot for each weight that is fetched, up to four: more than a step without has.
        let slot = all[1].bytes / 3;
        let workspace = |model: &Model| Ok(Bytes(500 + slot * fetches(model).min(4) as u64));
        let least = total - movable + 1500 + 4 * slot;
        let mut rng = Rng::new(1);
        let mut limits: Vec<u64> = (0..60).map(|_| least + rng.below((total + 1500 - least) as usize) as u64).collect();
        limits.extend([least, total + 1500, total + 1499]);
        limits.sort_unstable();
        let mut before = usize::MAX;
        for limit in limits {
            let mut kept_model = model();
            let (kept, _) = keep_on_host(&mut kept_model, cache, workspace, Bytes(limit), None).unwrap();
            let needed = |kept: u64, fetched: &Model| total - kept + 1000 + workspace(fetched).unwrap().0;
            assert!(needed(kept.bytes.0, &kept_model) <= limit, "{limit} bytes hold the rest");
            assert!(kept.names.len() <= before, "less memory keeps no fewer weights on the host");
            before = kept.names.len();
            // The last of them is needed.
            let count = kept.names.len();
            assert_eq!(kept, HostWeights::of(&all[..count]));
            if let Some(one) = count.checked_sub(1) {
                let fewer = HostWeights::of(&all[..one]);
                let mut other = model();
                other.fetch(&fewer.names);
                assert!(needed(fewer.bytes.0, &other) > limit, "{limit} bytes need all {count} weights on the host");
            }
        }
        assert_eq!(before, 0, "what fits stays on the GPU");
        let refused = keep_on_host(&mut model(), cache, workspace, Bytes(least - 1), None).unwrap_err().to_string();
        assert!(refused.starts_with("what stays on the GPU") && refused.contains("raise the limit"), "{refused}");
    }

    #[test]
    fn memory_of_a_planned_gpu_holds_the_slots_of_fetched_weights() {
        let gpu = PlannedGpu::new(DeviceSpec::find("H100").unwrap()).unwrap();
        let whole = model();
        let calls = Cell::new(0);
        let workspace = |model: &Model| {
            calls.set(calls.get() + 1);
            let largest = StepExtents { tokens: 64, sequences: 2, context: CONTEXT, candidates: 0 };
            engine_bytes(model, &gpu, EnginePrograms::Plain, largest)
        };
        let cache =
            cache_bytes(&whole, CacheSize::Scorer(ScorerOptions { context: 2 * CONTEXT, step: 1, questions: 1 }));
        let without = workspace(&whole).unwrap();
        let limit = Bytes(whole.weight_bytes() / 4 * 3 + cache.0 + without.0);
        let mut fetching = model();
        let (kept, _) = keep_on_host(&mut fetching, cache, workspace, limit, None).unwrap();
        assert!(calls.get() <= 6, "{} rounds", calls.get());
        let with = workspace(&fetching).unwrap();
        assert!(fetches(&fetching) > 0 && with > without, "slots are workspace: {with} beside {without}");
        assert!(whole.weight_bytes() - kept.bytes.0 + cache.0 + with.0 <= limit.0);
        // A host without room for them.
        let refused = keep_on_host(&mut model(), cache, workspace, limit, Some(Bytes(kept.bytes.0 - 1)));
        assert!(refused.unwrap_err().to_string().starts_with("the weights in memory of the host need "));
    }
}
