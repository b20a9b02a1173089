//! Orders of passes that are fixed beforehand: GPipe, 1F1B, interleaved 1F1B and DualPipe.

use super::schedule::Schedule;
use super::stages::{Pass, PassKind, Pipeline};

/// What a device does at once: one pass, or a forward and a backward pass as a pair.
pub(super) type PassSlot = (Pass, Option<Pass>);

fn pass(kind: PassKind, micro: usize, stage: usize) -> PassSlot {
    (Pass { kind, micro, stage }, None)
}

/// The order of each device.
pub(super) fn orders(pipeline: &Pipeline) -> Vec<Vec<PassSlot>> {
    let (p, m, v) = (pipeline.devices, pipeline.micro_batches, pipeline.chunks);
    let order = |d: usize| match pipeline.schedule {
        Schedule::GPipe => {
            let forward = (0..m).map(|i| pass(PassKind::Forward, i, d));
            forward.chain((0..m).map(|i| pass(PassKind::Backward, i, d))).collect()
        }
        Schedule::DualPipe => dual(p, m, d),
        Schedule::Interleaved => interleaved(p, m, v, d),
        // Those without a fixed order are never asked for.
        Schedule::OneFOneB | Schedule::ZeroBubbleH1 | Schedule::ZeroBubbleV => interleaved(p, m, 1, d),
    };
    (0..p).map(order).collect()
}

/// 1F1B of device `d`: a warm-up, then one of each. With chunks, `p` micro-batches pass each chunk in turn.
fn interleaved(p: usize, m: usize, v: usize, d: usize) -> Vec<PassSlot> {
    let total = m * v;
    let warm_up = if v == 1 { p - 1 - d } else { 2 * (p - 1 - d) + (v - 1) * p }.min(total);
    let at = |kind: PassKind, k: usize| {
        let chunk = if v == 1 { 0 } else { k / p % v };
        let chunk = if kind == PassKind::Forward { chunk } else { v - 1 - chunk };
        let micro = if v == 1 { k } else { k / (p * v) * p + k % p };
        pass(kind, micro, chunk * p + d)
    };
    let mut order: Vec<PassSlot> = (0..warm_up).map(|k| at(PassKind::Forward, k)).collect();
    for k in warm_up..total {
        order.push(at(PassKind::Forward, k));
        order.push(at(PassKind::Backward, k - warm_up));
    }
    order.extend((total - warm_up..total).map(|k| at(PassKind::Backward, k)));
    order
}

/// What a device of DualPipe has begun, by direction as it sees it: 0 is the one whose end is nearer to it.
struct DualPipeOrder {
    /// Devices.
    p: usize,
    /// Micro-batches of a direction.
    half: usize,
    /// The device.
    d: usize,
    forward: [usize; 2],
    backward: [usize; 2],
    /// Weight gradients that are still to come, oldest first.
    weights: std::collections::VecDeque<Pass>,
    order: Vec<PassSlot>,
}

impl DualPipeOrder {
    /// Micro-batch and stage of a direction: that of a device of the second half is the other way round.
    fn lane(&self, phase: usize, k: usize) -> (usize, usize) {
        let reverse = phase ^ usize::from(self.d >= self.p / 2);
        let stage = if reverse == 0 { self.d } else { self.p + (self.p - 1 - self.d) };
        (reverse * self.half + k, stage)
    }

    fn take_forward(&mut self, phase: usize) -> Pass {
        let (micro, stage) = self.lane(phase, self.forward[phase]);
        self.forward[phase] += 1;
        Pass { kind: PassKind::Forward, micro, stage }
    }

    fn take_backward(&mut self, phase: usize, kind: PassKind) -> Pass {
        let (micro, stage) = self.lane(phase, self.backward[phase]);
        self.backward[phase] += 1;
        if kind == PassKind::Input {
            self.weights.push_back(Pass { kind: PassKind::Weight, micro, stage });
        }
        Pass { kind, micro, stage }
    }

    fn f(&mut self, phase: usize) {
        let pass = self.take_forward(phase);
        self.order.push((pass, None));
    }

    fn b(&mut self, phase: usize, split: bool) {
        let pass = self.take_backward(phase, if split { PassKind::Input } else { PassKind::Backward });
        self.order.push((pass, None));
    }

    fn fb(&mut self, forward: usize, backward: usize) {
        let pair = (self.take_forward(forward), Some(self.take_backward(backward, PassKind::Backward)));
        self.order.push(pair);
    }

    fn w(&mut self) {
        if let Some(pass) = self.weights.pop_front() {
            self.order.push((pass, None));
        }
    }
}

/// The eight parts of DualPipe (DeepSeek-AI 2024, figure 5) on device `d`.
fn dual(p: usize, m: usize, d: usize) -> Vec<PassSlot> {
    let (half, near) = (m / 2, d.min(p - 1 - d));
    let outer = p / 2 - 1 - near;
    let mut s = DualPipeOrder {
        p,
        half,
        d,
        forward: [0; 2],
        backward: [0; 2],
        weights: std::collections::VecDeque::new(),
        order: Vec::new(),
    };
    // Warm up with the near direction, then with both.
    for _ in 0..2 * outer {
        s.f(0);
    }
    for _ in 0..=near {
        s.f(0);
        s.f(1);
    }
    // The far direction turns round: its weight gradients wait for a gap.
    for _ in 0..outer {
        s.b(1, true);
        s.w();
        s.f(1);
    }
    for i in 0..half + near + 1 - p {
        if i == 0 && near == p / 2 - 1 {
            // In the middle the first backward pass would wait for its pair.
            s.f(0);
            s.b(1, false);
        } else {
            s.fb(0, 1);
        }
        s.fb(1, 0);
    }
    for _ in 0..outer {
        s.b(1, false);
        s.fb(1, 0);
    }
    // Drain both, from the middle on with weight gradients apart.
    let mut split = false;
    for i in 0..=near {
        split |= i == near.div_ceil(2) && near % 2 == 1;
        s.b(1, split);
        split |= i == near.div_ceil(2) && near.is_multiple_of(2);
        s.b(0, split);
    }
    for _ in 0..outer {
        s.w();
        s.b(0, true);
    }
    while !s.weights.is_empty() {
        s.w();
    }
    s.order
}
