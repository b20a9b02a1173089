//! A step, simulated: passes with their times, and what devices did.

use serde::Serialize;

use super::stages::{Pass, PassKind, Pipeline};

/// A pass with its times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PassEvent {
    /// Where.
    pub device: usize,
    /// What.
    #[serde(flatten)]
    pub pass: Pass,
    /// Seconds from the beginning of the step.
    pub start: f64,
    /// Seconds from the beginning of the step.
    pub end: f64,
}

/// What a device did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DeviceUse {
    /// Seconds of passes; of a pair, the time of both together.
    pub busy: f64,
    /// Seconds that it waited between its first pass and its last.
    pub waits: f64,
    /// Most bytes of activations alive.
    pub peak_bytes: f64,
    /// Most forward passes whose weight gradients were still to come.
    pub peak_alive: usize,
}

/// A step, simulated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timeline {
    /// All passes, by device and start.
    pub events: Vec<PassEvent>,
    /// Devices.
    pub devices: Vec<DeviceUse>,
    /// Seconds of the step.
    pub makespan: f64,
    /// Share of all devices' time in which nothing is computed.
    pub bubble: f64,
    /// The same between a device's first and last pass alone: what is lost where no barrier ends the step.
    pub waiting: f64,
}

impl Timeline {
    pub(super) fn new(pipeline: &Pipeline, mut events: Vec<PassEvent>) -> Self {
        events.sort_by(|a, b| a.device.cmp(&b.device).then(a.start.total_cmp(&b.start)));
        let makespan = events.iter().map(|e| e.end).fold(0.0, f64::max);
        let devices: Vec<DeviceUse> = (0..pipeline.devices)
            .map(|d| {
                let of: Vec<&PassEvent> = events.iter().filter(|e| e.device == d).collect();
                device_use(pipeline, &of)
            })
            .collect();
        let busy: f64 = devices.iter().map(|d| d.busy).sum();
        let waits: f64 = devices.iter().map(|d| d.waits).sum();
        let share = |part: f64, all: f64| if all > 0.0 { part / all } else { 0.0 };
        let bubble = share(makespan * devices.len() as f64 - busy, makespan * devices.len() as f64);
        Self { events, makespan, bubble, waiting: share(waits, busy + waits), devices }
    }
}

fn device_use(pipeline: &Pipeline, events: &[&PassEvent]) -> DeviceUse {
    let (mut busy, mut until) = (0.0, 0.0f64);
    for e in events {
        // Both of a pair count once.
        busy += e.end - e.start.max(until).min(e.end);
        until = until.max(e.end);
    }
    let first = events.first().map_or(0.0, |e| e.start);
    let mut changes: Vec<(f64, isize, f64)> = Vec::new();
    for e in events {
        let bytes = pipeline.stage(e.pass.stage).activations;
        match e.pass.kind {
            PassKind::Forward => changes.push((e.start, 1, bytes)),
            PassKind::Backward | PassKind::Weight => changes.push((e.end, -1, -bytes)),
            PassKind::Input => {}
        }
    }
    // What ends makes room for what starts at once.
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let (mut alive, mut bytes, mut peak_alive, mut peak_bytes) = (0isize, 0.0f64, 0isize, 0.0f64);
    for (_, n, b) in changes {
        alive += n;
        bytes += b;
        peak_alive = peak_alive.max(alive);
        peak_bytes = peak_bytes.max(bytes);
    }
    // Sums of times are exact to rounding alone.
    let waits = until - first - busy;
    let waits = if waits > 1e-9 * until { waits } else { 0.0 };
    DeviceUse { busy, waits, peak_bytes, peak_alive: peak_alive.max(0) as usize }
}
