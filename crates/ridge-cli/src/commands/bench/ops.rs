//! The time of each op of a step.

use std::collections::HashMap;
use std::time::Instant;

use ridge::DeviceRates;
use ridge_engine::costs::StepCost;
use ridge_engine::{Engine, Sampling, SequenceId};
use ridge_graph::sample::Rng;
use ridge_hw::roofline::Bound;
use ridge_hw::units::{Bytes, Flops, Seconds};
use ridge_models::Model;
use serde_json::{Value, json};

use super::args::BenchSettings;
use super::test::BenchTest;
use crate::error::Result;
use crate::output::columns;

/// All launches of one kernel in a step.
pub(super) struct OpTime {
    pub(super) name: String,
    pub(super) launches: usize,
    /// Median over the runs.
    pub(super) seconds: f64,
    /// Share of the total time.
    share: f64,
    pub(super) flops: f64,
    pub(super) bytes: u64,
    /// Bytes copied from memory of the host.
    host: u64,
    /// Sum of the launches' floors.
    floor: f64,
    bound: Bound,
}

/// A launch of a step.
pub(super) struct LaunchWork {
    pub(super) name: String,
    /// Scope in the model, such as `model.layers.3.self_attn`.
    pub(super) place: String,
    pub(super) flops: f64,
    pub(super) bytes: u64,
    /// Bytes copied from memory of the host.
    host: u64,
}

/// A timed step: its start relative to the first step, its duration, and the seconds of its launches.
pub(super) struct TimedStep {
    pub(super) start: f64,
    pub(super) seconds: f64,
    pub(super) launches: Vec<f64>,
}

/// The launches of one step, run several times.
pub(super) struct StepProfile {
    pub(super) launches: Vec<LaunchWork>,
    pub(super) steps: Vec<TimedStep>,
}

/// Times the launches of the test's last step, which begins at the same depth each time.
pub(super) fn measure(
    engine: &mut Engine,
    model: &Model,
    cost: &StepCost,
    (test, batch): (BenchTest, usize),
    settings: &BenchSettings,
) -> Result<StepProfile> {
    let steps = test.steps(settings.chunk);
    let last = steps.last().copied().unwrap_or(1);
    let depth = settings.context + steps.iter().sum::<usize>() - last;
    let mut rng = Rng::new(0);
    let prompt = test.prompt(settings.context);
    let ids: Vec<SequenceId> = (0..batch).filter_map(|_| engine.start(Sampling::GREEDY, prompt)).collect();
    let mut texts = Vec::with_capacity(ids.len());
    for _ in &ids {
        texts.push((0..depth + last).map(|_| rng.below(model.vocab_size) as u32).collect::<Vec<_>>());
    }
    let mut next = Vec::with_capacity(ids.len());
    let mut at = 0;
    while at < depth {
        let end = (at + settings.chunk).min(depth);
        let work: Vec<_> = ids.iter().zip(&texts).map(|(id, text)| (*id, &text[at..end])).collect();
        engine.step(&work, false, &mut next)?;
        at = end;
    }
    let work: Vec<_> = ids.iter().zip(&texts).map(|(id, text)| (*id, &text[depth..])).collect();
    let (mut of, mut runs) = (Vec::new(), Vec::with_capacity(settings.repeat));
    let mut first = None;
    for run in 0..=settings.repeat {
        let began = Instant::now();
        let times = engine.step_timed(&work, true, &mut next)?;
        let seconds = began.elapsed().as_secs_f64();
        for (id, text) in ids.iter().zip(&texts) {
            engine.truncate(*id, depth);
            // A sliding window may have freed blocks that the step would need at that depth.
            while let Some(at) = engine.length(*id).filter(|at| *at < depth) {
                engine.step(&[(*id, &text[at..(at + settings.chunk).min(depth)])], false, &mut next)?;
            }
        }
        if run > 0 {
            let start = began.duration_since(*first.get_or_insert(began)).as_secs_f64();
            runs.push(TimedStep { start, seconds, launches: times.iter().map(|t| t.seconds).collect() });
            of = times;
        }
    }
    ids.iter().for_each(|id| engine.end(*id));
    let mut launches = Vec::with_capacity(of.len());
    let sequences = vec![(depth, last); ids.len()];
    if let Some(graph) = engine.lowered(true, test.answers()) {
        for launch in &of {
            let name = graph.function(launch.func).nodes[launch.node].op_name().to_owned();
            let work = cost.of_node(graph, (launch.func, launch.node), &sequences)?;
            let (place, host) = (launch.place(graph), work.host.bytes());
            launches.push(LaunchWork { name, place, flops: work.flops, bytes: work.bytes, host });
        }
    }
    Ok(StepProfile { launches, steps: runs })
}

impl StepProfile {
    /// The launches summed by kernel, in decreasing order of time.
    pub(super) fn by_kernel(&self, rates: &DeviceRates) -> Vec<OpTime> {
        let mut ops: Vec<OpTime> = Vec::new();
        let mut of_name: HashMap<&str, usize> = HashMap::new();
        let mut times: Vec<Vec<f64>> = Vec::new();
        for (i, launch) in self.launches.iter().enumerate() {
            let op = *of_name.entry(&launch.name).or_insert_with(|| {
                times.push(vec![0.0; self.steps.len()]);
                ops.push(OpTime {
                    name: launch.name.clone(),
                    launches: 0,
                    seconds: 0.0,
                    share: 0.0,
                    flops: 0.0,
                    bytes: 0,
                    host: 0,
                    floor: 0.0,
                    bound: Bound::Memory,
                });
                ops.len() - 1
            });
            ops[op].launches += 1;
            ops[op].flops += launch.flops;
            ops[op].bytes += launch.bytes;
            ops[op].host += launch.host;
            ops[op].floor += rates.floor(Flops(launch.flops), Bytes(launch.bytes), Bytes(launch.host)).as_f64();
            for (sum, step) in times[op].iter_mut().zip(&self.steps) {
                *sum += step.launches[i];
            }
        }
        for (op, mut times) in ops.iter_mut().zip(times) {
            times.sort_by(f64::total_cmp);
            op.seconds = times[times.len() / 2];
            op.bound = rates.bound(Flops(op.flops), Bytes(op.bytes), Bytes(op.host));
        }
        let total: f64 = ops.iter().map(|op| op.seconds).sum();
        ops.iter_mut().for_each(|op| op.share = op.seconds / total.max(f64::MIN_POSITIVE));
        ops.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        ops
    }
}

pub(super) fn text(ops: &[OpTime]) -> String {
    let head = ["op", "launches", "time", "share", "FLOPs", "bytes", "floor", "of floor", "limit"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for op in ops {
        rows.push(vec![
            op.name.clone(),
            op.launches.to_string(),
            Seconds(op.seconds).to_string(),
            format!("{:.1}%", 100.0 * op.share),
            Flops(op.flops).to_string(),
            Bytes(op.bytes).to_string(),
            Seconds(op.floor).to_string(),
            format!("{:.0}%", 100.0 * op.floor / op.seconds.max(f64::MIN_POSITIVE)),
            op.bound.to_string(),
        ]);
    }
    columns(&rows)
}

pub(super) fn object(ops: &[OpTime]) -> Value {
    let each = |op: &OpTime| {
        json!({
            "op": op.name,
            "launches": op.launches,
            "measured": { "seconds": op.seconds, "share": op.share },
            "modelled": { "flops": op.flops, "bytes": op.bytes, "floor_seconds": op.floor, "limit": op.bound },
        })
    };
    ops.iter().map(each).collect()
}
