//! Every op of a model's step under the roof.

use serde::Serialize;

use super::roof::{Roof, RooflineRow, RooflineWork};
use crate::ledger::Quantisation;
use crate::reading::{ACTIVATION, Class, LayerWork, OpWork, Reading};

/// What a step of a model computes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ModelStep {
    /// Ranks of tensor parallelism, of which one is looked at.
    pub tp: usize,
    /// Sequences.
    pub batch: usize,
    /// Tokens that each adds: 1 for an answer, all for a prompt.
    pub new: usize,
    /// Tokens that each then has.
    pub context: usize,
    /// Format of matrices.
    pub weights: Quantisation,
    /// Bytes of an element of the cache; scales are those of the reading's dtype of caches.
    pub cache_bytes: f64,
}

impl Roof {
    /// Every op on one rank of a step of `reading` in which each of `batch` sequences adds `new` tokens and then has `context`: one
    /// list a kind of layer, and the logits.
    pub fn model(&self, reading: &Reading, step: &ModelStep) -> Vec<(String, Vec<RooflineRow>)> {
        let mut found = Vec::new();
        for (kind, layer) in reading.kinds.iter().enumerate() {
            let at: Vec<usize> = (0..reading.layers.len()).filter(|i| reading.layers[*i] == kind).collect();
            let rows = self.layer(layer, at.len(), step, reading.cache_share(step.cache_bytes));
            found.push((format!("{} layers, such as {}", at.len(), at.first().unwrap_or(&0)), rows));
        }
        let (rows, h) = (step.batch as f64, reading.hidden as f64);
        let v = reading.vocab as f64 / step.tp as f64;
        let logits = RooflineWork {
            scope: "lm_head".into(),
            op: "linear".into(),
            class: Class::Matmul,
            calls: 1,
            matrix: 2.0 * rows * v * h,
            vector: 0.0,
            bytes: 2.0 * (v * h + rows * (v + h)),
            peak: self.machine.peak_16,
            expected: self.machine.matmul_16(rows, v, h),
        };
        found.push(("logits".into(), vec![self.under(&logits)]));
        found
    }

    /// The ops of a kind of layer, all of one name and scope together.
    fn layer(&self, layer: &LayerWork, count: usize, step: &ModelStep, cache: f64) -> Vec<RooflineRow> {
        let mut works: Vec<RooflineWork> = Vec::new();
        for op in &layer.ops {
            let mut work = self.op(op, step, cache);
            let times = count as f64;
            for figure in [&mut work.matrix, &mut work.vector, &mut work.bytes, &mut work.expected] {
                *figure *= times;
            }
            work.calls = count;
            match works.iter_mut().find(|w| w.scope == work.scope && w.op == work.op) {
                Some(same) => {
                    same.calls += count;
                    same.matrix += work.matrix;
                    same.vector += work.vector;
                    same.bytes += work.bytes;
                    same.expected += work.expected;
                }
                None => works.push(work),
            }
        }
        works.iter().map(|w| self.under(w)).collect()
    }

    /// `cache` is what bytes of the reading's cache are multiplied by.
    fn op(&self, op: &OpWork, step: &ModelStep, cache: f64) -> RooflineWork {
        let m = &self.machine;
        let cut = match (op.cut, op.class) {
            (false, _) => 1.0,
            (true, Class::Attention) => op.heads.min(step.tp).max(1) as f64,
            (true, _) => step.tp as f64,
        };
        let (batch, new, context) = (step.batch as f64, step.new as f64, step.context as f64);
        let tokens = batch * new;
        let element = step.weights.bits_of_op(op) / 8.0;
        let mut work = RooflineWork {
            scope: op.scope.clone(),
            op: op.name.clone(),
            class: op.class,
            calls: 1,
            matrix: tokens * op.flops_token / cut,
            vector: tokens * op.vector_token / cut,
            bytes: tokens * op.bytes_token / cut,
            peak: m.peak,
            expected: 0.0,
        };
        // Of a product that ends in a sum the inputs are cut, of others the outputs.
        let (n, k) = if op.reduced { (op.n as f64, op.k as f64 / cut) } else { (op.n as f64 / cut, op.k as f64) };
        match op.class {
            Class::Matmul => {
                let weight = element * op.weight / cut;
                work.vector = 0.0;
                work.bytes = ACTIVATION * tokens * (n + k) + weight;
                work.expected = m.matmul(Class::Matmul, tokens, n, k, weight);
            }
            Class::Experts => {
                work.vector = 0.0;
                // Experts that any token chose, each choosing for itself.
                let all = op.experts as f64;
                let reached = all * (1.0 - (1.0 - op.top_k as f64 / all).powf(tokens));
                let rows = tokens * op.top_k as f64;
                work.bytes = ACTIVATION * rows * (n + k) + element * reached * n * k;
                let share = m.matmul_share(Class::Experts, (rows / reached).max(1.0), n * reached, k);
                let moving = element * reached * n * k / m.stream_experts + 2.0 * rows * (n + k) / m.bandwidth;
                work.expected = (work.matrix / (m.peak * share)).max(moving);
            }
            Class::Attention => {
                let seen = new * (context - new) + 0.5 * new * (new + 1.0);
                let (seen, cached) = match op.window {
                    Some(w) => (seen.min(new * w as f64), context.min(w as f64 + new)),
                    None => (seen, context),
                };
                // What all heads share is read by each rank.
                let shared = if op.weight > 0.0 { 1.0 } else { cut };
                work.matrix += batch * seen * op.flops_pair / cut;
                work.vector = 0.0;
                work.bytes += batch * cached * op.bytes_cached * cache / shared;
                work.bytes += ACTIVATION * op.weight / cut;
                work.peak = m.peak_16;
                // Single rows fill half of a tile at best.
                let share = m.efficiency.attention * if step.new == 1 { 0.5 } else { 1.0 };
                work.expected = (work.matrix / (m.peak_16 * share)).max(work.bytes / m.stream);
            }
            Class::Memory => {
                work.peak = m.peak_16;
                work.bytes += batch * op.bytes_seq;
                work.expected = m.moving(work.bytes);
            }
        }
        work
    }
}
