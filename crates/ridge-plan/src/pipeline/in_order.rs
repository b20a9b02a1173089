//! Running passes in given orders.

use super::orders::PassSlot;
use super::stages::{Pass, PassKind, Pipeline};
use super::timeline::PassEvent;

/// When outputs of passes are there: of forward passes and of gradients of inputs, by micro-batch and stage.
pub(super) struct PassOutputs {
    lanes: usize,
    forward: Vec<f64>,
    input: Vec<f64>,
}

impl PassOutputs {
    pub(super) fn new(pipeline: &Pipeline) -> Self {
        let lanes = pipeline.lanes();
        let n = lanes * pipeline.micro_batches;
        Self { lanes, forward: vec![f64::INFINITY; n], input: vec![f64::INFINITY; n] }
    }

    /// When everything that `pass` reads is there; infinite if that is not known yet.
    pub(super) fn ready(&self, pipeline: &Pipeline, pass: Pass) -> f64 {
        let at = |stage: usize| pass.micro * self.lanes + stage;
        match pass.kind {
            PassKind::Forward => pipeline
                .before(pass.stage)
                .map_or(0.0, |before| self.forward[at(before)] + pipeline.delay(before, pass.stage)),
            PassKind::Backward | PassKind::Input => {
                let own = self.forward[at(pass.stage)];
                let after = pipeline
                    .behind(pass.stage)
                    .map_or(0.0, |behind| self.input[at(behind)] + pipeline.delay(behind, pass.stage));
                own.max(after)
            }
            PassKind::Weight => self.input[at(pass.stage)],
        }
    }

    pub(super) fn set(&mut self, pass: Pass, end: f64) {
        let at = pass.micro * self.lanes + pass.stage;
        match pass.kind {
            PassKind::Forward => self.forward[at] = end,
            PassKind::Backward | PassKind::Input => self.input[at] = end,
            PassKind::Weight => {}
        }
    }
}

/// Runs each device's order, each slot as soon as the device is free and its inputs are there.
pub(super) fn in_order(pipeline: &Pipeline, orders: &[Vec<PassSlot>]) -> Vec<PassEvent> {
    let mut done = PassOutputs::new(pipeline);
    let (mut next, mut free) = (vec![0; orders.len()], vec![0.0f64; orders.len()]);
    let mut events = Vec::new();
    // A device that got on may let its neighbours get on.
    let mut waiting: std::collections::VecDeque<usize> = (0..orders.len()).collect();
    while let Some(d) = waiting.pop_front() {
        let mut got_on = false;
        while let Some(&(first, second)) = orders[d].get(next[d]) {
            let passes = std::iter::once(first).chain(second);
            let ready = passes.clone().map(|p| done.ready(pipeline, p)).fold(free[d], f64::max);
            if ready.is_infinite() {
                break;
            }
            let seconds: f64 = passes.clone().map(|p| pipeline.seconds(p)).sum();
            let end = ready + seconds * if second.is_some() { pipeline.paired } else { 1.0 };
            for pass in passes {
                done.set(pass, end);
                events.push(PassEvent { device: d, pass, start: ready, end });
            }
            free[d] = end;
            next[d] += 1;
            got_on = true;
        }
        if got_on {
            waiting.extend((0..orders.len()).filter(|other| *other != d && next[*other] < orders[*other].len()));
        }
    }
    events
}
