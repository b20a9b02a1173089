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
/// them.
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
) -> Result<HostWeights> {
    let all = host_weights(&model.graph);
    let whole = Bytes(model.weight_bytes()) + cache;
    // Workspace only grows with what is kept, so each round keeps more and none keeps too much.
    let mut needed = workspace(model)?;
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
        return Ok(kept);
    }
}
