//! One point of a server: a step by rooflines, then prompts and answers together or apart.

use ridge_models::StateGroup;
use serde::Serialize;

use super::speculated::speculated_tokens;
use crate::comm::Collective;
use crate::efficiency::Machine;
use crate::ledger::Quantisation;
use crate::reading::{Class, OpWork, Reading};

/// How a replica is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ServeLayout {
    /// Tensor parallel ranks.
    pub tp: usize,
    /// Pipeline stages.
    pub pp: usize,
    /// Replicas of attention, each with sequences of its own, whose experts are shared.
    pub attention_dp: usize,
    /// Ranks that share the experts; within each, they are cut by what is left of `tp * attention_dp`.
    pub ep: usize,
    /// Format of matrices.
    pub weights: Quantisation,
    /// Bytes of an element of the cache; scales are those of the reading's dtype of caches.
    pub cache_bytes: f64,
    /// Speculation by the model's prediction module, which the reading has then.
    pub speculation: Option<Speculation>,
}

/// Speculation by a model's prediction module.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speculation {
    /// Tokens that are drafted for a sequence in each step.
    pub drafts: usize,
    /// The chance of a draft to be accepted, given that those before it were.
    pub acceptance: f64,
}

impl ServeLayout {
    /// GPUs of a replica.
    pub fn gpus(&self) -> usize {
        self.tp * self.pp * self.attention_dp
    }

    /// Tokens that a step gives a sequence on average.
    pub fn tokens_per_step(&self) -> f64 {
        self.speculation.map_or(1.0, |s| speculated_tokens(s.acceptance, s.drafts))
    }
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Traffic {
    /// Tokens per prompt.
    pub prompt: usize,
    /// Tokens per response.
    pub answer: usize,
    /// Sequences under way on each replica of attention.
    pub batch: usize,
}

/// What a server does at one point.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OperatingPoint {
    /// Seconds to the first token.
    pub ttft: f64,
    /// Seconds for each token behind it.
    pub tpot: f64,
    /// Output tokens a second of the replica.
    pub tokens_per_second: f64,
    /// Requests a second of the replica.
    pub requests_per_second: f64,
    /// GPUs of the replica.
    pub gpus: usize,
    /// Seconds of a decode step alone.
    pub decode_step: f64,
    /// Seconds of a prompt alone.
    pub prefill: f64,
}

/// Seconds between kernels of a captured graph.
const KERNEL: f64 = 1.95e-6;
/// Seconds of the kernels that choose experts, sort tokens by them and add what they return, of a layer.
const ROUTING: f64 = 35e-6;
/// Tokens of a batch choose similar experts: a batch activates as many experts as this power of its size would with independent choices.
const ALIKE: f64 = 0.6;
/// Kernels that an op of the graph becomes, casts and tables included.
const KERNELS_PER_OP: f64 = 1.0;
/// Seconds of scheduler, sampling and detokenising that a step does not hide.
pub(super) const HOST: f64 = 0.7e-3;
/// Maximum prompt tokens per step.
const CHUNK: usize = 8192;

/// Tokens with the same kind of attention: prompt tokens, or decode tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepTokens {
    /// StepTokens.
    pub tokens: f64,
    /// Sequences.
    pub sequences: f64,
    /// (query, key) pairs, of all sequences.
    pub pairs: f64,
    /// Cached tokens of all sequences, including these.
    pub cached: f64,
}

impl StepTokens {
    /// A token of each of `sequences` answers, which see `context` tokens each.
    pub(super) fn answers(sequences: f64, context: f64) -> Self {
        let seen = sequences * context;
        Self { tokens: sequences, sequences, pairs: seen, cached: seen }
    }

    /// With `tokens` of one prompt that has `before` in the cache.
    pub(super) fn and_prompt(self, tokens: f64, before: f64) -> Self {
        Self {
            tokens: self.tokens + tokens,
            sequences: self.sequences + 1.0,
            pairs: self.pairs + tokens * before + 0.5 * tokens * (tokens + 1.0),
            cached: self.cached + before + tokens,
        }
    }
}

/// What one step computes on the busiest replica of attention.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ServerStep {
    /// Prompt tokens.
    pub prompts: StepTokens,
    /// Decode tokens, whose attention is bound by reading their caches.
    pub answers: StepTokens,
    /// Prompts that end, whose logits are needed.
    pub ends: f64,
    /// Tokens of all attention replicas, which share the experts.
    pub all: f64,
}

impl ServerStep {
    fn tokens(&self) -> f64 {
        self.prompts.tokens + self.answers.tokens
    }

    /// The same step where each token of an answer has `drafts` drafts behind it.
    fn verifying(self, drafts: usize, replicas: usize) -> Self {
        let more = drafts as f64 * self.answers.tokens;
        let answers = StepTokens {
            tokens: self.answers.tokens + more,
            pairs: self.answers.pairs * (1.0 + drafts as f64) + more * drafts as f64 / 2.0,
            cached: self.answers.cached + more,
            ..self.answers
        };
        Self { answers, all: self.all + more * replicas as f64, ..self }
    }
}

/// `cache` is what bytes of the reading's cache are multiplied by.
fn attention_seconds(m: &Machine, (l, cache): (&ServeLayout, f64), op: &OpWork, of: &StepTokens, decode: bool) -> f64 {
    if of.tokens == 0.0 {
        return 0.0;
    }
    let heads = op.heads.min(l.tp).max(1) as f64;
    let cut = if op.cut { heads } else { 1.0 };
    let window = op.window.map(|w| w as f64);
    let pairs = window.map_or(of.pairs, |w| of.pairs.min(w * of.tokens));
    let cached = window.map_or(of.cached, |w| of.cached.min(w * of.sequences));
    let mut flops = pairs * op.flops_pair + of.tokens * op.flops_token;
    if op.expanded_pair > 0.0 {
        flops = flops.min(pairs * op.expanded_pair + cached * op.flops_token);
    }
    // What all heads share is read by each rank.
    let kv = if op.weight > 0.0 { 1.0 } else { cut };
    let bytes = cached * op.bytes_cached * cache / kv + 2.0 * op.weight / cut;
    let share = if decode { 0.5 * m.efficiency.attention } else { m.efficiency.attention };
    (flops / cut / (m.peak_16 * share)).max(bytes / m.stream)
}

fn op_seconds(m: &Machine, (l, cache): (&ServeLayout, f64), op: &OpWork, step: &ServerStep) -> f64 {
    let tp = if op.cut { l.tp as f64 } else { 1.0 };
    let bytes = l.weights.bits_of_op(op) / 8.0;
    match op.class {
        Class::Matmul => {
            let (n, k) = if op.reduced { (op.n as f64, op.k as f64 / tp) } else { (op.n as f64 / tp, op.k as f64) };
            m.matmul(Class::Matmul, step.tokens(), n, k, bytes * n * k)
        }
        Class::Experts => {
            // All replicas of attention send their tokens to the shared experts.
            let tokens = step.all;
            let inner = ((l.tp * l.attention_dp) as f64 / l.ep as f64).max(1.0);
            let held = op.experts as f64 / l.ep as f64;
            let missed = (1.0 - op.top_k as f64 / op.experts as f64).powf(tokens.powf(ALIKE));
            let reached = held * (1.0 - missed);
            let rows = tokens * op.top_k as f64 / l.ep as f64;
            let (n, k) =
                if op.reduced { (op.n as f64, op.k as f64 / inner) } else { (op.n as f64 / inner, op.k as f64) };
            let share = m.matmul_share(Class::Experts, (rows / reached.max(1.0)).max(1.0), n * reached.max(1.0), k);
            let compute = 2.0 * rows * n * k / (m.peak * share);
            compute.max(bytes * reached * n * k / m.stream_experts + 2.0 * rows * (n + k) / m.bandwidth)
        }
        Class::Attention => {
            let of = |tokens, decode| attention_seconds(m, (l, cache), op, tokens, decode);
            of(&step.prompts, false) + of(&step.answers, true)
        }
        Class::Memory => {
            let sequences = step.prompts.sequences + step.answers.sequences;
            m.moving(op.bytes_token * step.tokens() / tp + op.bytes_seq * sequences)
        }
    }
}

/// Seconds of a step on the device, drafts for the next one included.
pub(super) fn seconds(reading: &Reading, m: &Machine, l: &ServeLayout, step: &ServerStep) -> f64 {
    let Some(s) = l.speculation else { return plain_seconds(reading, m, l, step) };
    // Drafts stand behind each sequence that gets a token, one after another.
    let sequences = step.answers.sequences + step.ends;
    let cached = step.answers.cached + step.prompts.cached * step.ends / step.prompts.sequences.max(1.0);
    let verifying = plain_seconds(reading, m, l, &step.verifying(s.drafts, l.attention_dp));
    verifying + drafting_seconds(reading, m, l, sequences, cached)
}

/// Seconds of drafting for the next step behind each of `batch` sequences of `context` tokens; 0 without speculation.
pub fn drafting(reading: &Reading, m: &Machine, l: &ServeLayout, batch: usize, context: usize) -> f64 {
    drafting_seconds(reading, m, l, batch as f64, (batch * context) as f64)
}

fn drafting_seconds(reading: &Reading, m: &Machine, l: &ServeLayout, sequences: f64, cached: f64) -> f64 {
    let (Some(s), Some(module)) = (l.speculation, &reading.prediction) else { return 0.0 };
    let answers = StepTokens { tokens: sequences, sequences, pairs: cached, cached };
    let step = ServerStep { answers, all: sequences * l.attention_dp as f64, ..ServerStep::default() };
    s.drafts as f64 * plain_seconds(module, m, &ServeLayout { pp: 1, ..*l }, &step)
}

/// Seconds of a step without drafts.
fn plain_seconds(reading: &Reading, m: &Machine, l: &ServeLayout, step: &ServerStep) -> f64 {
    let hidden = reading.hidden as f64;
    let tokens = step.tokens();
    let mut total = 0.0;
    for (kind, layer) in reading.kinds.iter().enumerate() {
        let count = reading.layers.iter().filter(|k| **k == kind).count() as f64;
        let mut of = 0.0;
        for op in &layer.ops {
            of += op_seconds(m, (l, reading.cache_share(l.cache_bytes)), op, step) + KERNEL * KERNELS_PER_OP;
            if op.reduced && l.tp > 1 && op.class == Class::Matmul {
                of += m.communicate_in_a_server(Collective::AllReduce, 2.0 * tokens * hidden, l.tp, 1);
            }
            if op.reduced && op.class == Class::Experts {
                of += ROUTING;
                let ranks = l.tp * l.attention_dp;
                if l.ep > 1 && l.attention_dp > 1 {
                    let bytes = 2.0 * tokens * op.top_k as f64 * hidden;
                    of += 2.0 * m.communicate_in_a_server(Collective::AllToAll, bytes, l.ep, 1);
                } else if ranks > 1 {
                    let bytes = 2.0 * tokens * hidden;
                    of += m.communicate_in_a_server(Collective::AllReduce, bytes, ranks, 1);
                }
            }
        }
        total += count * of;
    }
    // Stages work one after another on a step; the messages between them are of its tokens.
    let message = m.communicate_in_a_server(Collective::SendRecv, 2.0 * tokens * hidden, l.pp, l.tp);
    total += (l.pp as f64 - 1.0) * message;
    total + m.matmul_16(step.ends + step.answers.tokens, reading.vocab as f64 / l.tp as f64, hidden)
}

/// Seconds of a step that adds a token, or those that are accepted, to each of `batch` sequences of `context` tokens.
pub fn decode_step(reading: &Reading, m: &Machine, l: &ServeLayout, batch: usize, context: usize) -> f64 {
    let answers = StepTokens::answers(batch as f64, context as f64);
    let all = (batch * l.attention_dp) as f64;
    seconds(reading, m, l, &ServerStep { answers, all, ..ServerStep::default() }) + HOST
}

/// Seconds of a prompt of `prompt` tokens alone.
pub fn prefill(reading: &Reading, m: &Machine, l: &ServeLayout, prompt: usize) -> f64 {
    let (mut total, mut done) = (0.0, 0);
    while done < prompt {
        let chunk = CHUNK.min(prompt - done);
        let prompts = StepTokens::default().and_prompt(chunk as f64, done as f64);
        // Each replica of attention takes in a prompt of its own.
        let all = (chunk * l.attention_dp) as f64;
        total += seconds(reading, m, l, &ServerStep { prompts, ends: 1.0, all, ..ServerStep::default() });
        done += chunk;
    }
    total + HOST
}

/// Prompts on GPUs of their own, whose caches are sent to those that answer. `prefill_gpus` replicas of `l` take prompts
/// for one that answers; the slower side bounds the throughput.
pub fn disaggregated(
    reading: &Reading,
    m: &Machine,
    l: &ServeLayout,
    t: &Traffic,
    prefill_replicas: usize,
) -> OperatingPoint {
    let step = decode_step(reading, m, l, t.batch, t.prompt + t.answer / 2);
    let alone = prefill(reading, m, l, t.prompt);
    let share = reading.cache_share(l.cache_bytes);
    let of_group = |g: &StateGroup| (g.bytes_per_token * t.prompt) as f64 * share + g.bytes_per_sequence as f64;
    let cache: f64 = reading.states.iter().map(of_group).sum();
    let sent = cache / (l.tp as f64 * m.efficiency.scale_out);
    let gpus = l.gpus() * (1 + prefill_replicas);
    let mut point = finish(t, l, alone + sent + step, step / l.tokens_per_step(), step, alone, gpus);
    let most = prefill_replicas as f64 * l.attention_dp as f64 / alone;
    if point.requests_per_second > most {
        point.requests_per_second = most;
        point.tokens_per_second = most * t.answer as f64;
    }
    point
}

fn finish(
    t: &Traffic,
    l: &ServeLayout,
    ttft: f64,
    tpot: f64,
    decode_step: f64,
    prefill: f64,
    gpus: usize,
) -> OperatingPoint {
    let request = ttft + tpot * (t.answer as f64 - 1.0);
    let requests_per_second = (t.batch * l.attention_dp) as f64 / request;
    let tokens_per_second = requests_per_second * t.answer as f64;
    OperatingPoint { ttft, tpot, tokens_per_second, requests_per_second, gpus, decode_step, prefill }
}
