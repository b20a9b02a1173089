//! What each op takes of a step.

use std::collections::HashMap;

use ridge_engine::costs::StepCost;
use ridge_engine::{Engine, Sampling, SequenceId};
use ridge_graph::sample::Rng;
use ridge_hw::roofline::{Bound, Roofline};
use ridge_hw::units::{Bytes, Flops, Seconds};
use ridge_models::Model;
use serde_json::{Value, json};

use super::{BenchSettings, Test};
use crate::error::Result;
use crate::output::columns;

/// All launches of one kernel in a step.
pub(super) struct OpTime {
    pub(super) name: String,
    pub(super) launches: usize,
    /// Median over the runs.
    pub(super) seconds: f64,
    /// Of the time of all of them.
    share: f64,
    pub(super) flops: f64,
    pub(super) bytes: u64,
    /// The launches' floors one after another.
    floor: f64,
    bound: Bound,
}

/// Times the launches of the test's last step, which begins at the same depth each time, and adds them up by kernel;
/// those that take longest come first.
pub(super) fn measure(
    engine: &mut Engine,
    model: &Model,
    cost: &StepCost,
    roofline: &Roofline,
    test: Test,
    settings: &BenchSettings,
) -> Result<Vec<OpTime>> {
    let steps = test.steps(settings.chunk);
    let last = steps.last().copied().unwrap_or(1);
    let depth = settings.context + steps.iter().sum::<usize>() - last;
    let mut rng = Rng::new(0);
    let ids: Vec<SequenceId> = (0..settings.batch).filter_map(|_| engine.start(Sampling::GREEDY, usize::MAX)).collect();
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
    let mut runs = Vec::with_capacity(settings.repeat);
    for run in 0..=settings.repeat {
        let times = engine.step_timed(&work, true, &mut next)?;
        ids.iter().for_each(|id| engine.truncate(*id, depth));
        if run > 0 {
            runs.push(times);
        }
    }
    ids.iter().for_each(|id| engine.end(*id));
    let (Some(graph), Some(first)) = (engine.lowered(true), runs.first()) else { return Ok(Vec::new()) };

    let sequences = vec![(depth, last); ids.len()];
    let mut ops: Vec<OpTime> = Vec::new();
    let mut of_name: HashMap<&str, usize> = HashMap::new();
    let mut times: Vec<Vec<f64>> = Vec::new();
    for (i, launch) in first.iter().enumerate() {
        let name = graph.function(launch.func).nodes[launch.node].op_name();
        let work = cost.of_node(graph, (launch.func, launch.node), &sequences)?;
        let op = *of_name.entry(name).or_insert_with(|| {
            times.push(vec![0.0; runs.len()]);
            let name = name.to_owned();
            ops.push(OpTime {
                name,
                launches: 0,
                seconds: 0.0,
                share: 0.0,
                flops: 0.0,
                bytes: 0,
                floor: 0.0,
                bound: Bound::Memory,
            });
            ops.len() - 1
        });
        ops[op].launches += 1;
        ops[op].flops += work.flops;
        ops[op].bytes += work.bytes;
        ops[op].floor += roofline.floor(Flops(work.flops), Bytes(work.bytes)).as_f64();
        for (sum, run) in times[op].iter_mut().zip(&runs) {
            *sum += run[i].seconds;
        }
    }
    for (op, mut times) in ops.iter_mut().zip(times) {
        times.sort_by(f64::total_cmp);
        op.seconds = times[times.len() / 2];
        op.bound = roofline.bound(Flops(op.flops), Bytes(op.bytes));
    }
    let total: f64 = ops.iter().map(|op| op.seconds).sum();
    ops.iter_mut().for_each(|op| op.share = op.seconds / total.max(f64::MIN_POSITIVE));
    ops.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    Ok(ops)
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
