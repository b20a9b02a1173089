//! `ridge inspect --launches`: the launches of a step on a GPU that need not be there.

use std::collections::BTreeMap;

use ridge_cuda::{PlannedGpu, StepLaunch};
use ridge_engine::served;
use ridge_graph::Graph;
use ridge_hw::spec::DeviceSpec;
use ridge_models::{Network, symbols};
use ridge_plan::PlanError;
use ridge_runtime::{Backend as _, lower};
use serde_json::{Value, json};

use super::memory::InspectedStep;
use crate::error::Result;
use crate::output::columns;

/// The launches of a step of the network as `ridge generate` runs it on `gpu`.
///
/// # Errors
/// When there is no such NVIDIA GPU, or it has no kernel for an op.
pub(super) fn of(network: &Network, step: &InspectedStep, gpu: &str) -> Result<Vec<StepLaunch>> {
    let gpu = PlannedGpu::new(DeviceSpec::find(gpu).map_err(PlanError::from)?)?;
    let list = |graph: &Graph| -> Result<Vec<StepLaunch>> {
        let lowered = lower(graph, &[step.output], gpu.kernels())?;
        let rows = step.bindings.clone().with(symbols::ROWS, 1).with(symbols::STATE_LINES, 2);
        Ok(gpu.launches(&lowered, &rows)?)
    };
    match network {
        Network::Decoder(model) => {
            let graph = model.answers.as_ref().filter(|_| step.is_one_token()).unwrap_or(&model.graph);
            list(&served(graph, &[step.output], step.blocks())?)
        }
        _ => list(&network.module().graph),
    }
}

/// Launches with what they compute, those that are alike counted together: `(count, function, kernel, op)`, most frequent first.
fn counted(launches: &[StepLaunch]) -> Vec<(usize, &str, &str, &str)> {
    let mut counts: BTreeMap<(&str, &str, &str), usize> = BTreeMap::new();
    for launch in launches {
        *counts.entry((&launch.function, &launch.kernel, &launch.op)).or_default() += 1;
    }
    let mut rows: Vec<_> = counts.into_iter().map(|((function, kernel, op), n)| (n, function, kernel, op)).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.0));
    rows
}

pub(super) fn text(launches: &[StepLaunch]) -> String {
    let head = ["launches", "function", "kernel", "op"].map(str::to_owned);
    let rows = counted(launches).into_iter().map(|(count, function, kernel, op)| {
        [count.to_string(), function.to_owned(), kernel.to_owned(), op.to_owned()]
    });
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).map(Vec::from).collect();
    format!("{} launches per step (exact: the compiled program)\n\n{}", launches.len(), columns(&rows))
}

pub(super) fn object(launches: &[StepLaunch]) -> Value {
    let listed = launches.iter().map(
        |launch| json!({ "op": launch.op, "function": launch.function, "path": launch.path, "kernel": launch.kernel }),
    );
    json!({ "count": launches.len(), "launches": listed.collect::<Vec<_>>() })
}
