//! How long a step takes: each op by its roofline and efficiency, sums over tensor-parallel ranks, the pipeline's
//! bubble, what of data parallelism is not hidden, and the optimiser.

use ridge_hw::spec::Precision;
use serde::Serialize;

use super::layout::{Layout, Recompute};
use super::workload::Workload;
use crate::comm::{self, Collective};
use crate::efficiency::Machine;
use crate::ledger::rank_parameters;
use crate::pipeline;
use crate::reading::{ACTIVATION, Class, LayerWork, OpWork, Reading};

/// A step's time and its parts, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepTime {
    /// The whole step.
    pub total: f64,
    /// Arithmetic and memory of all micro-batches on the slowest stage.
    pub compute: f64,
    /// What of that is computed a second time.
    pub recompute: f64,
    /// Sums over tensor-parallel ranks, exchange between experts and of contexts.
    pub exposed_model: f64,
    /// The pipeline's bubble and its messages.
    pub pipeline: f64,
    /// Data parallelism that is not hidden.
    pub data: f64,
    /// The optimiser.
    pub optimiser: f64,
    /// Model FLOPs of the step (6 a parameter that a token multiplies, and attention), over all GPUs.
    pub model_flops: f64,
    /// Those with what is computed again.
    pub hardware_flops: f64,
    /// Model FLOPs utilisation of the sheet's rate.
    pub mfu: f64,
    /// Hardware FLOPs utilisation.
    pub hfu: f64,
    /// Tokens of all GPUs in a second.
    pub tokens_per_second: f64,
}

/// Forward times and FLOPs of a micro-batch through a layer.
#[derive(Clone, Copy, Default)]
struct LayerPass {
    /// Products.
    products: f64,
    /// Attention.
    attention: f64,
    /// What memory limits.
    memory: f64,
    /// Of the products, those that [`Recompute::Products`] keeps.
    communication: f64,
    flops: f64,
    attention_flops: f64,
}

struct RankStep<'a> {
    machine: &'a Machine,
    layout: &'a Layout,
    work: &'a Workload,
    /// Tokens of a micro-batch on a rank.
    tokens: f64,
    tp: f64,
}

impl RankStep<'_> {
    /// (query, key) pairs of a micro-batch on a rank of context parallelism. Attention that is not fused multiplies
    /// those above the diagonal too.
    fn pairs(&self, op: &OpWork) -> f64 {
        let (s, b) = (self.work.seq as f64, self.layout.micro_batch as f64);
        let seen = match op.window {
            Some(w) if (w as f64) < s => w as f64 * s - 0.5 * (w as f64) * (w as f64),
            _ if self.work.fused_attention => 0.5 * s * (s + 1.0),
            _ => s * s,
        };
        b * seen / self.layout.cp as f64
    }

    fn op(&self, op: &OpWork, hidden: f64, pass: &mut LayerPass) {
        let m = self.machine;
        let share = if op.cut { self.tp } else { 1.0 };
        match op.class {
            Class::Matmul => {
                let (n, k) =
                    if op.reduced { (op.n as f64, op.k as f64 / share) } else { (op.n as f64 / share, op.k as f64) };
                pass.products += m.matmul(Class::Matmul, self.tokens, n, k, ACTIVATION * n * k);
                pass.flops += op.flops_token * self.tokens / share;
            }
            Class::Experts => {
                // A rank has its share of the experts and, on average, as many rows as it sent.
                let experts = op.experts as f64 / self.layout.ep as f64;
                let rows = self.tokens * op.top_k as f64;
                let (n, k) = if op.reduced {
                    (op.n as f64, op.k as f64 / self.tp)
                } else {
                    (op.n as f64 / self.tp, op.k as f64)
                };
                let each = rows / experts;
                let share = m.matmul_share(Class::Experts, each, n * experts, k);
                let compute = 2.0 * rows * n * k / (m.peak * share);
                pass.products +=
                    compute.max(ACTIVATION * experts * n * k / m.stream_experts + 2.0 * rows * (n + k) / m.bandwidth);
                pass.flops += op.flops_token * self.tokens / self.tp;
            }
            Class::Attention => {
                let pairs = self.pairs(op);
                let pair = if op.expanded_pair > 0.0 { op.expanded_pair } else { op.flops_pair };
                let flops = pair * pairs / share + op.flops_token * self.tokens / share;
                pass.attention_flops += flops;
                if self.work.fused_attention {
                    pass.attention += flops / (m.peak_16 * m.efficiency.attention);
                } else {
                    // Scores written, scaled, masked and normalised, dropped and read: 9 to 13 bytes a pair and head.
                    let bytes = if self.work.dropout { 13.0 } else { 9.0 };
                    pass.attention +=
                        flops / (m.peak_16 * m.efficiency.scores) + m.moving(bytes * pairs * op.heads as f64 / share);
                }
            }
            Class::Memory => {
                let outside = if self.layout.sequence_parallel { self.tp } else { 1.0 };
                let bytes = op.bytes_token * self.tokens / if op.cut { self.tp } else { outside };
                pass.memory += m.moving(bytes);
                pass.memory += m.moving(op.bytes_seq * self.layout.micro_batch as f64);
            }
        }
        if op.reduced {
            // A sum over the ranks, or with sequence parallelism a scatter here and a gather before the next product.
            let bytes =
                ACTIVATION * self.tokens * hidden * if op.class == Class::Experts { op.top_k as f64 } else { 1.0 };
            pass.communication += m.communicate(Collective::AllReduce, bytes, self.layout.tp, 1);
        }
        if op.class == Class::Experts && op.reduced && self.layout.ep > 1 {
            let bytes = ACTIVATION * self.tokens * op.top_k as f64 * hidden;
            pass.communication += 2.0 * m.communicate(Collective::AllToAll, bytes, self.layout.ep, self.layout.tp);
        }
    }

    fn layer(&self, layer: &LayerWork, hidden: f64) -> LayerPass {
        let mut pass = LayerPass::default();
        for op in &layer.ops {
            self.op(op, hidden, &mut pass);
        }
        if in_8_bits(self.work) {
            // Inputs of products are scaled and written in 8 bits, forward and backward.
            let products = layer.ops.iter().filter(|o| o.class == Class::Matmul);
            let width: f64 = products.map(|o| o.k as f64 / if o.reduced { self.tp } else { 1.0 }).sum();
            pass.memory += self.machine.moving(3.0 * width * self.tokens);
        }
        if self.work.dropout {
            let outside = if self.layout.sequence_parallel { self.tp } else { 1.0 };
            pass.memory += self.machine.moving(7.0 * layer.saved.residuals * self.tokens / outside);
        }
        if self.layout.cp > 1 {
            // Keys and values go round the ring; attention hides what it can.
            let kv: f64 = layer.ops.iter().map(|o| o.bytes_cached).sum::<f64>() / self.tp;
            let bytes = kv * self.tokens * self.layout.cp as f64;
            let ring = self.machine.communicate(Collective::AllGather, bytes, self.layout.cp, self.layout.tp);
            pass.communication += (ring - pass.attention).max(0.0);
        }
        pass
    }
}

fn in_8_bits(work: &Workload) -> bool {
    work.precision == Precision::Fp8
}

/// Time of a step of `work` on `reading`, divided by `layout`, which must divide it.
pub fn step_time(reading: &Reading, machine: &Machine, layout: &Layout, work: &Workload) -> StepTime {
    let tokens = (layout.micro_batch * work.seq) as f64 / layout.cp as f64;
    let at = RankStep { machine, layout, work, tokens, tp: layout.tp as f64 };
    let hidden = reading.hidden as f64;
    let (mut forward, mut backward, mut again, mut exposed) = (0.0, 0.0, 0.0, 0.0);
    let (mut flops, mut attention_flops, mut flops_again) = (0.0, 0.0, 0.0);
    // The backward pass of fused attention makes the scores again: 5 products for 2.
    let attention_back = if work.fused_attention { 2.5 } else { 2.0 };
    for kind in 0..reading.kinds.len() {
        let count = reading.layers.iter().filter(|k| **k == kind).count() as f64 / layout.pp as f64;
        let p = at.layer(&reading.kinds[kind], hidden);
        forward += count * (p.products + p.attention + p.memory);
        backward += count * (2.0 * p.products + attention_back * p.attention + 2.0 * p.memory);
        let (time, work_again) = match layout.recompute {
            Recompute::None => (0.0, 0.0),
            Recompute::Attention if work.fused_attention => (0.0, 0.0),
            Recompute::Attention => (p.attention, p.attention_flops),
            Recompute::Products => (0.5 * p.products + p.memory, 0.5 * p.flops),
            Recompute::Full => (p.products + p.attention + p.memory, p.flops + p.attention_flops),
        };
        again += count * time;
        flops_again += count * work_again;
        flops += count * p.flops;
        attention_flops += count * p.attention_flops;
        // Sums are in the forward pass, in the backward pass, and again with what is computed again.
        let times = if layout.recompute == Recompute::Full { 3.0 } else { 2.0 };
        // With overlap, products are cut so that sums of one part overlap with the next.
        let bare = if work.overlap {
            (p.communication - 0.5 * p.products).max(0.25 * p.communication)
        } else {
            p.communication
        };
        exposed += count * times * bare;
    }
    let micro_batches = (work.global_batch / (layout.dp * layout.micro_batch)) as f64;
    let (v, tp) = (reading.vocab as f64 / at.tp, at.tp);
    let head = machine.matmul_16(tokens, v, hidden);
    let loss = machine.moving(tokens * v * if work.fused_loss { 14.0 } else { 32.0 });
    let ends = 3.0 * head + loss;
    let stage = forward + backward + again + exposed;
    let p = layout.pp as f64;
    // The last stage has the logits too. The others wait for it while the pipeline is full.
    let slowest = stage + ends;
    // The sender waits for its message.
    let message = if layout.pp > 1 {
        let bytes = ACTIVATION * tokens * hidden / tp;
        machine.communicate(Collective::SendRecv, bytes, layout.pp, layout.tp * layout.dp * layout.cp)
    } else {
        0.0
    };
    let bubble = pipeline::bubble(layout.pp, layout.interleave, micro_batches as usize, stage, message);
    let compute = micro_batches * (slowest - exposed);
    let params = rank_parameters(reading, layout);
    let (data, optimiser) = data_parallel(machine, layout, work, params.dense + params.experts, compute);
    let model = flops * p * at.tp * layout.cp as f64 + 2.0 * tokens * hidden * reading.vocab as f64 * layout.cp as f64;
    let attention = attention_flops * p * at.tp * layout.cp as f64;
    let replicas = micro_batches * layout.dp as f64;
    let model_flops = 3.0 * (model + attention) * replicas;
    let hardware_flops = model_flops + flops_again * p * at.tp * layout.cp as f64 * replicas;
    let total = micro_batches * slowest + bubble + data + optimiser;
    let rate = total * machine.peak * layout.gpus() as f64;
    StepTime {
        total,
        compute,
        recompute: micro_batches * again,
        exposed_model: micro_batches * exposed,
        pipeline: bubble,
        data,
        optimiser,
        model_flops,
        hardware_flops,
        mfu: model_flops / rate,
        hfu: hardware_flops / rate,
        tokens_per_second: (work.global_batch * work.seq) as f64 / total,
    }
}

/// Parts in which gradients are sent as they are computed.
const BUCKETS: usize = 20;

/// Exposed seconds of data parallelism, and of the optimiser.
fn data_parallel(machine: &Machine, layout: &Layout, work: &Workload, params: f64, compute: f64) -> (f64, f64) {
    let ranks = layout.dp * layout.cp;
    let stride = layout.tp;
    let gradient = if layout.zero == 3 { ACTIVATION.max(work.states.gradient.min(4.0)) } else { work.states.gradient };
    let gather = machine.communicate(Collective::AllGather, ACTIVATION * params, ranks, stride);
    let scatter = machine.communicate(Collective::ReduceScatter, gradient * params, ranks, stride);
    let micro_batches = work.global_batch as f64 / (layout.dp * layout.micro_batch) as f64;
    let traffic = match layout.zero {
        // Of every micro-batch weights are gathered for the forward and for the backward pass, gradients scattered.
        3 => micro_batches * (2.0 * gather + scatter),
        // A rank that keeps its part of the gradients alone has no place to add up the others.
        2 => micro_batches * scatter + gather,
        0 => machine.communicate(Collective::AllReduce, gradient * params, ranks, stride),
        _ => scatter + gather,
    };
    // With overlap backward passes hide what they can, of the last micro-batch where gradients are sent once; ZeRO 3 has
    // the whole step.
    let (hidden_by, buckets) = match (work.overlap, layout.zero) {
        (false, _) => (0.0, BUCKETS as f64),
        (true, 3) => (compute, BUCKETS as f64 * micro_batches),
        (true, 2) => (compute * 0.6, BUCKETS as f64 * micro_batches),
        (true, _) => (compute * 0.6 / micro_batches, BUCKETS as f64),
    };
    let exposed = comm::exposed(hidden_by, buckets as usize, traffic / buckets);
    let owned = if layout.zero >= 1 { params / ranks as f64 } else { params };
    let s = work.states;
    // Gradient, master weight and moments are read, the last two and the weight written.
    let bytes = s.gradient + 2.0 * (if s.master > 0.0 { s.master } else { s.weight }) + 2.0 * s.moments + s.weight;
    (exposed, machine.moving(owned * bytes))
}
