//! Snapshots of memory, as JSON or as a figure.

use std::path::Path;

use ridge_hw::units::Bytes;
use ridge_plan::plot::{Axis, Block, Blocks, Mark, Unit, draw};
use ridge_runtime::{LiveValue, MemorySnapshot, NamedBytes};
use serde_json::{Value, json};

use crate::error::Result;
use crate::output::write_file;

/// Writes the snapshot of a step of these extents to `file`: a figure where its name ends in `.svg`, else JSON. `of` is what the
/// step is of, such as `128 tokens`.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write(snapshot: &MemorySnapshot, extents: &Value, of: &str, file: &Path) -> Result<()> {
    let is_svg = file.extension().is_some_and(|e| e.eq_ignore_ascii_case("svg"));
    let text = if is_svg { figure(snapshot, of) } else { object(snapshot, extents).to_string() };
    write_file(file, &text)
}

fn object(snapshot: &MemorySnapshot, extents: &Value) -> Value {
    let mut step = extents.clone();
    step["launches"] = snapshot.launches.into();
    let named = |all: &[NamedBytes]| -> Vec<Value> {
        all.iter().map(|NamedBytes { name, bytes }| json!({ "name": name, "bytes": bytes })).collect()
    };
    let values = |all: &[LiveValue]| -> Vec<Value> {
        let value = |v: &LiveValue| {
            json!({
                "place": v.place, "op": v.op, "offset": v.offset, "bytes": v.bytes, "first": v.first, "last": v.last,
            })
        };
        all.iter().map(value).collect()
    };
    json!({
        "step": step,
        "workspace": {
            "bytes": snapshot.arena_bytes,
            "peak": { "launch": snapshot.peak, "op": snapshot.peak_op, "bytes": snapshot.peak_bytes },
            "values": values(&snapshot.values),
        },
        "host": {
            "bytes": snapshot.host_bytes,
            "peak": { "bytes": snapshot.host_peak_bytes },
            "values": values(&snapshot.host_values),
        },
        "weights": named(&snapshot.weights),
        "states": named(&snapshot.states),
        "inputs": named(&snapshot.inputs),
        "outputs": named(&snapshot.outputs),
        "sources": { "bytes": "exact: the plan of the step as the device runs it, without scratch memory of kernels" },
    })
}

/// Number of ops with their own colour; smaller ones share the last colour.
const KINDS: usize = 7;

fn figure(snapshot: &MemorySnapshot, of: &str) -> String {
    // By op, in decreasing order of memory over the step.
    let mut ops: Vec<(String, usize)> = Vec::new();
    for value in &snapshot.values {
        let area = value.bytes * (value.last - value.first + 1);
        match ops.iter_mut().find(|(op, _)| *op == value.op) {
            Some((_, sum)) => *sum += area,
            None => ops.push((value.op.clone(), area)),
        }
    }
    ops.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    let mut kinds: Vec<String> = ops.into_iter().map(|(op, _)| op).collect();
    if kinds.len() > KINDS {
        kinds.truncate(KINDS);
        kinds.push("others".to_owned());
    }
    let last = kinds.len().saturating_sub(1);
    let blocks = snapshot.values.iter().map(|v| Block {
        x: (v.first as f64, v.last as f64 + 1.0),
        y: (v.offset as f64, (v.offset + v.bytes) as f64),
        kind: kinds.iter().position(|kind| *kind == v.op).unwrap_or(last),
        tip: format!("{} {}: {}, launches {} to {}", v.op, v.place, Bytes(v.bytes as u64), v.first, v.last),
    });
    let peak = format!("peak {}: {}", Bytes(snapshot.peak_bytes as u64), snapshot.peak_op);
    let title =
        format!("Workspace of a step of {of}: {}, by the op that computes a value", Bytes(snapshot.arena_bytes as u64));
    let chart = Blocks {
        title,
        x: Axis::linear("launch", Unit::Number),
        y: Axis::linear("address in the workspace", Unit::Bytes),
        blocks: blocks.collect(),
        kinds,
        marks: vec![Mark { name: peak, x: snapshot.peak as f64 + 0.5 }],
    };
    draw(&[chart.into()])
}
