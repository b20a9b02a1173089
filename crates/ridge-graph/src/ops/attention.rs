//! Causal attention over a paged cache (Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1; query groups
//! of Ainslie et al. 2023, "GQA"; pages of Kwon et al. 2023, "Efficient Memory Management for Large Language Model
//! Serving with PagedAttention").

use super::paged_rows::{SequenceRows, attention_shares, query_groups};
use super::require::{takes, want, want_floats};
use crate::cost::Cost;
use crate::dim::{Dim, Sym};
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Composite, CompositeRef, Var};
use crate::poly::Poly;
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;
use crate::work::{AttentionWork, Work};

/// Attention of each token to positions `0..=positions[t]` of its own sequence, computed in f32.
///
/// `q`: `[tokens, heads, dim]` of any float dtype; `kv`: the state of [`KvWrite`](super::KvWrite),
/// `[blocks, 2, kv_heads, block_size, dim]`, which is read and not replaced; `block_table`: i32
/// `[sequences, blocks of a sequence]`; `seq_ids`: i32 `[tokens]`, the row of the table, negative for padding;
/// `positions`: i32 `[tokens]`. Behind them a cache of codes has its scales, then come `slopes` and `sinks`, f32 `[heads]` each, and
/// `prompt_lengths`, i32 `[sequences]`, where the op has them. Gives the type of `q`.
///
/// Where the cache has one side, `[blocks, 1, kv_heads, block_size, dim]`, keys are the values too (DeepSeek-AI 2024,
/// "DeepSeek-V2", section 2.1.2: the latents of all heads).
///
/// Query head `h` uses key and value head `h / (heads / kv_heads)`. Position `p` of a sequence is at offset
/// `p % block_size` of block `block_table[seq, p / block_size]`; entries that no token reaches may be -1. The output of
/// padding is zero.
///
/// With a window the token at position `p` attends to positions above `p - window` alone, its own included (Beltagy et
/// al. 2020, "Longformer", section 3.1). With a soft cap each score `s` is `softcap * tanh(s / softcap)` (Gemma Team
/// 2024, "Gemma 2", section 2). If `chunked`, windows do not slide: the token at `p` attends to positions from
/// `p / window * window` on (Llama 4's released code).
///
/// With slopes the score of a key `d` positions back is less by `d` times the slope of the head (Press et al. 2022, "Train
/// Short, Test Long", section 3: ALiBi). A sink is one more score of the softmax, whose value is zero (OpenAI 2025, "gpt-oss
/// Model Card", section 2).
///
/// Prompt lengths change no value but its rounding: they tell a kernel which tokens are of a prompt, those at positions below
/// the length, so that how a token is computed can follow from its position, and not from how many tokens of its sequence the
/// step has.
#[derive(Clone, Debug)]
pub struct PagedAttention {
    /// Factor of the scores, usually `1 / sqrt(dim)`.
    pub scale: f64,
    /// How many positions a token sees, its own included; 1 or more. All before it if `None`.
    pub window: Option<usize>,
    /// Are windows chunks that begin at multiples of their length?
    pub chunked: bool,
    /// Scores stay within this; above 0.
    pub softcap: Option<f64>,
    /// Is there an input `slopes`?
    pub slopes: bool,
    /// Is there an input `sinks`?
    pub sinks: bool,
    /// Is there an input `prompt_lengths`?
    pub prompt_lengths: bool,
    /// The step's number of (query, key) pairs, for the cost alone.
    pub pairs: Sym,
    /// Tokens of the cache that the step reads, summed over sequences, for the cost alone.
    pub cached: Sym,
}

eq_by_bits!(PagedAttention { scale, softcap; window, chunked, slopes, sinks, prompt_lengths, pairs, cached });

impl PagedAttention {
    /// Attention to all positions before, without a cap.
    pub fn new(scale: f64, pairs: Sym, cached: Sym) -> Self {
        Self {
            scale,
            window: None,
            chunked: false,
            softcap: None,
            slopes: false,
            sinks: false,
            prompt_lengths: false,
            pairs,
            cached,
        }
    }

    /// Of the inputs behind the positions the scales, the slopes, the sinks and the prompt lengths.
    fn rest<'a, T>(&self, rest: &'a [T]) -> Rest<'a, T> {
        let [slopes, sinks, prompts] = [self.slopes, self.sinks, self.prompt_lengths].map(usize::from);
        let (scales, others) = rest.split_at(rest.len().saturating_sub(slopes + sinks + prompts));
        let (slopes, others) = others.split_at(others.len().min(slopes));
        let (sinks, prompts) = others.split_at(others.len().min(sinks));
        Rest { scales, slopes: slopes.first(), sinks: sinks.first(), prompt_lengths: prompts.first() }
    }
}

/// The inputs behind the positions.
struct Rest<'a, T> {
    scales: &'a [T],
    slopes: Option<&'a T>,
    sinks: Option<&'a T>,
    prompt_lengths: Option<&'a T>,
}

impl Composite for PagedAttention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [q, kv, table, ids, positions, rest @ ..] = inputs else {
            return Err(takes("q, kv, block_table, seq_ids and positions", inputs));
        };
        want_floats("q", q, 3, "[tokens, heads, dim]")?;
        let cache = super::kv_write::want_cache(kv)?;
        if cache[4] != q.shape.0[2] {
            return Err(format!("kv must have heads of {} elements as q has, got {kv}", q.shape.0[2]));
        }
        query_groups(q, kv)?;
        if table.shape.rank() != 2 || table.dtype != DType::I32 || !table.is_plain() {
            return Err(format!("block_table must be i32[sequences, blocks], got {table}"));
        }
        want("seq_ids", ids, DType::I32, [&q.shape.0[0]])?;
        want("positions", positions, DType::I32, [&q.shape.0[0]])?;
        let Rest { scales, slopes, sinks, prompt_lengths } = self.rest(rest);
        super::kv_write::want_scales(kv, scales)?;
        let (heads, sequences) = (&q.shape.0[1], &table.shape.0[0]);
        for (name, given, there, dtype, extent) in [
            ("slopes", self.slopes, slopes, DType::F32, heads),
            ("sinks", self.sinks, sinks, DType::F32, heads),
            ("prompt_lengths", self.prompt_lengths, prompt_lengths, DType::I32, sequences),
        ] {
            match there {
                Some(ty) if given => want(name, ty, dtype, [extent])?,
                None if !given => {}
                _ => return Err(takes(if given { name } else { "no more inputs" }, inputs)),
            }
        }
        if self.chunked && self.window.is_none() {
            return Err("chunks need their length, a window".into());
        }
        if self.window == Some(0) {
            return Err("a window must have 1 position or more".into());
        }
        if self.softcap.is_some_and(|cap| !(cap.is_finite() && cap > 0.0)) {
            return Err(format!("softcap must be above 0, got {}", self.softcap.unwrap_or_default()));
        }
        Ok(vec![q.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [q, kv, table, ids, positions, rest @ ..] = inputs else { unreachable!("infer has counted the inputs") };
        let (qt, kt) = (g.ty(*q)?.clone(), g.ty(*kv)?.clone());
        let Rest { scales, slopes, sinks, .. } = self.rest(rest);
        let fail = |g: &Builder, why: Why| GraphError::usage(g.scope(), why);
        let (group, heads) = query_groups(&qt, &kt).map_err(|why| fail(g, why))?;
        let (tokens, dim) = (&qt.shape.0[0], &qt.shape.0[2]);
        let (heads, group, one) = (Dim::from(heads), Dim::from(group), Dim::from(1));
        let SequenceRows { sides, keys } = SequenceRows::read(g, *kv, scales, *table, *ids)?;
        let (k, v) = (sides[0], sides[sides.len() - 1]);

        let grouped = Shape::new([tokens, &heads, &group, dim]);
        let x = g.cast(*q, DType::F32)?;
        let x = g.reshape(x, grouped)?;
        let scores = g.matmul(x, k, false, true, DType::F32)?;
        let scale = g.constant(DType::F32, self.scale)?;
        let mut scores = g.mul(scores, scale)?;
        if let Some(cap) = self.softcap {
            let inverse = g.constant(DType::F32, 1.0 / cap)?;
            let bent = g.mul(scores, inverse)?;
            let bent = g.tanh(bent)?;
            let cap = g.constant(DType::F32, cap)?;
            scores = g.mul(bent, cap)?;
        }

        let per_token = Shape::new([tokens, &one, &one, &one]);
        let position = g.reshape(*positions, per_token.clone())?;
        let id = g.reshape(*ids, per_token)?;
        let key = g.iota(Shape::new([tokens, &one, &one, &keys]), 3, DType::I32)?;
        // A number of each head.
        let per_head = Shape::new([&one, &heads, &group, &one]);
        if let Some(slopes) = slopes {
            let slopes = g.reshape(*slopes, per_head.clone())?;
            let ahead = g.sub(key, position)?;
            let ahead = g.cast(ahead, DType::F32)?;
            let bias = g.mul(ahead, slopes)?;
            scores = g.add(scores, bias)?;
        }
        let causal = g.le(key, position)?;
        let zero = g.constant(DType::I32, 0.0)?;
        let real = g.ge(id, zero)?;
        let mut seen = g.and(causal, real)?;
        if let Some(window) = self.window {
            let window = g.constant(DType::I32, window as f64)?;
            let near = if self.chunked {
                let chunk = g.div(position, window)?;
                let start = g.mul(chunk, window)?;
                g.ge(key, start)?
            } else {
                let end = g.add(key, window)?;
                g.gt(end, position)?
            };
            seen = g.and(seen, near)?;
        }

        let sinks = match sinks {
            Some(sinks) => Some(g.reshape(*sinks, per_head)?),
            None => None,
        };
        let share = attention_shares(g, scores, seen, sinks)?;
        let y = g.matmul(share, v, false, false, DType::F32)?;
        let y = g.reshape(y, qt.shape.clone())?;
        Ok(vec![g.cast(y, qt.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let (q, kv) = (&inputs[0], &inputs[1]);
        let symbol = |s: &Sym| Poly::from(&Dim::from(s.clone()));
        let scores = &Poly::from(&q.shape.0[1]) * &symbol(&self.pairs);
        let sides = super::kv_write::sides(kv);
        let mut token = Poly::product([&kv.shape.0[2], &kv.shape.0[4]]) * ((sides * kv.dtype.size_bytes()) as i128);
        let Rest { scales, .. } = self.rest(&inputs[5..]);
        if let Some(scales) = scales.first() {
            token += &(Poly::from(&kv.shape.0[2]) * ((sides * scales.dtype.size_bytes()) as i128));
        }
        let tables = Cost::moving(&[&inputs[2..5], &inputs[5 + scales.len()..]].concat(), &[]).bytes_read;
        Cost {
            matrix_flops: &scores * &(Poly::from(&q.shape.0[2]) * 4),
            // Scaling, maximum, difference and sum; two products more and a tangent with a cap.
            vector_flops: scores.clone() * if self.softcap.is_some() { 6 } else { 4 },
            special_flops: scores * if self.softcap.is_some() { 2 } else { 1 },
            bytes_read: q.bytes() + &(&token * &symbol(&self.cached)) + &tables,
            ..Cost::moving(&[], outputs)
        }
    }

    fn work(&self) -> Work {
        Work::Attention(AttentionWork {
            pairs: vec![self.pairs.clone()],
            cached: vec![self.cached.clone()],
            window: self.window,
            ..AttentionWork::default()
        })
    }

    fn of_single_rows(&self) -> Option<CompositeRef> {
        let (pairs, cached) = (self.pairs.of_taken_rows(), self.cached.of_taken_rows());
        Some(CompositeRef::new(Self { pairs, cached, ..self.clone() }))
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        let (cut, whole) = (Placement::shard, Placement::Replicate);
        let scales = self.rest(&inputs[5..]).scales.len();
        let rule = |places: [Placement; 5], of_scales, of_heads, output| {
            let mut inputs_at = places.to_vec();
            inputs_at.resize(5 + scales, of_scales);
            inputs_at.resize(inputs.len() - usize::from(self.prompt_lengths), of_heads);
            inputs_at.resize(inputs.len(), whole);
            ShardingRule { inputs: inputs_at, outputs: vec![output] }
        };
        vec![
            // By heads, whole groups to a rank.
            rule([cut(1), cut(2), whole, whole, whole], cut(2), cut(0), cut(1)),
            rule([cut(0), whole, whole, cut(0), cut(0)], whole, whole, cut(0)),
        ]
    }
}

impl Builder {
    /// Causal attention of a step's tokens over a paged cache; see [`PagedAttention`].
    ///
    /// # Errors
    /// When `kv` is not a paged cache, `q` does not fit it, or a table has another shape than described there.
    pub fn attention(
        &mut self,
        q: Var,
        kv: Var,
        block_table: Var,
        seq_ids: Var,
        positions: Var,
        op: PagedAttention,
    ) -> Result<Var> {
        Ok(self.composite(op, &[q, kv, block_table, seq_ids, positions])?[0])
    }

    /// As [`Builder::attention`], with further inputs: the scales of a cache of codes, slopes, sinks and prompt lengths, in this order.
    ///
    /// # Errors
    /// As there, and when they are not those that `kv` and `op` ask for.
    pub fn attention_with(
        &mut self,
        [q, kv, block_table, seq_ids, positions]: [Var; 5],
        more: &[Var],
        op: PagedAttention,
    ) -> Result<Var> {
        Ok(self.composite(op, &[&[q, kv, block_table, seq_ids, positions], more].concat())?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (sequences as (cached, new), padding, block size, spare columns, heads, kv heads, dim, dtype of the cache, window,
    // softcap)
    type Case<'a> = (&'a [(usize, usize)], usize, usize, usize, usize, usize, usize, DType, Option<usize>, Option<f64>);
    const PLAIN: [bool; 3] = [false; 3];
    const CHUNKED: [bool; 3] = [true, false, false];
    const SLOPES: [bool; 3] = [false, true, false];
    const SINKS: [bool; 3] = [false, false, true];
    // With one side.
    let one_sided: [Case<'_>; 5] = [
        (&[(0, 20), (7, 1)], 2, 4, 1, 4, 1, 16, dtype, None, None),
        (&[(33, 1), (63, 1), (64, 1), (0, 5)], 1, 16, 0, 16, 1, 36, dtype, None, None),
        (&[(5, 2), (0, 9)], 0, 16, 0, 4, 2, 8, dtype, None, None),
        (&[(33, 12), (530, 1)], 1, 16, 0, 16, 1, 96, DType::BF16, None, None),
        (&[(33, 2), (20, 17)], 0, 16, 0, 8, 1, 32, DType::I8, None, None),
    ];
    // The same, and whether there are chunks, slopes and sinks.
    let more: [(Case<'_>, [bool; 3]); 9] = [
        ((&[(0, 20), (7, 1)], 2, 4, 1, 4, 2, 16, dtype, None, None), SLOPES),
        ((&[(600, 3), (0, 0), (5, 2)], 0, 16, 1, 3, 3, 8, dtype, None, None), SLOPES),
        ((&[(33, 4), (3, 1)], 1, 16, 0, 4, 2, 33, DType::I8, Some(9), None), SLOPES),
        ((&[(0, 20), (7, 1)], 2, 4, 1, 4, 2, 16, dtype, Some(5), None), SINKS),
        ((&[(530, 2), (0, 9)], 0, 16, 0, 4, 4, 8, dtype, None, Some(4.0)), SINKS),
        ((&[(33, 4)], 1, 16, 0, 4, 2, 33, DType::I8, None, None), SINKS),
        ((&[(0, 20), (7, 6)], 1, 4, 1, 4, 2, 16, dtype, Some(8), None), CHUNKED),
        ((&[(510, 30)], 0, 16, 0, 2, 1, 8, dtype, Some(520), None), CHUNKED),
        ((&[(5, 9)], 0, 4, 0, 2, 2, 33, DType::I8, Some(4), None), CHUNKED),
    ];
    let cases: [Case<'_>; 19] = [
        (&[], 0, 4, 0, 2, 1, 8, dtype, None, None),
        (&[], 3, 4, 1, 2, 1, 8, dtype, None, None),
        (&[(0, 1)], 0, 1, 0, 1, 1, 1, dtype, None, None),
        (&[(7, 1), (16, 1), (0, 1)], 2, 8, 1, 8, 1, 16, dtype, None, None),
        (&[(0, 17), (5, 0), (3, 6)], 0, 16, 2, 4, 2, 33, dtype, None, None),
        (&[(33, 1), (63, 1), (64, 1)], 1, 16, 0, 16, 2, 64, dtype, None, None),
        (&[(0, 20)], 4, 3, 0, 3, 3, 10, dtype, None, None),
        (&[(4, 2), (9, 1)], 0, 4, 1, 4, 2, 16, DType::BF16, None, None),
        (&[(4, 2), (9, 1)], 0, 4, 1, 4, 4, 16, DType::F8E4M3, None, None),
        (&[(0, 20), (7, 1)], 3, 4, 1, 4, 2, 16, dtype, Some(1), None),
        (&[(30, 12), (3, 1), (4, 1), (5, 1)], 2, 4, 0, 4, 2, 16, dtype, Some(5), None),
        (&[(0, 9), (40, 1)], 0, 16, 1, 2, 1, 33, dtype, Some(100), Some(1.5)),
        (&[(0, 17), (5, 0), (3, 6)], 1, 16, 0, 4, 2, 8, dtype, None, Some(0.5)),
        (&[(33, 2), (64, 1)], 0, 16, 0, 4, 4, 16, DType::BF16, Some(16), Some(50.0)),
        (&[(1030, 3)], 0, 64, 0, 2, 1, 8, dtype, Some(520), None),
        (&[(0, 17), (5, 0), (3, 6)], 1, 16, 1, 4, 2, 8, DType::I8, None, None),
        (&[(33, 1), (63, 1), (140, 1)], 1, 16, 0, 8, 2, 64, DType::I8, None, Some(5.0)),
        (&[(0, 20), (7, 1)], 3, 4, 1, 4, 2, 33, DType::I8, Some(5), None),
        (&[(120, 30)], 0, 32, 0, 4, 1, 32, DType::I8, None, None),
    ];
    // Wide heads, of random numbers of their own, so that those of the others stay.
    let wide: [(Case<'_>, [bool; 3], usize); 4] = [
        ((&[(0, 40), (70, 1)], 1, 16, 0, 8, 1, 64, dtype, Some(30), None), SINKS, 2),
        ((&[(600, 1), (130, 1)], 0, 16, 0, 8, 2, 64, dtype, None, None), SINKS, 2),
        ((&[(70, 3), (0, 9), (530, 1)], 1, 16, 0, 20, 1, 64, dtype, None, None), PLAIN, 1),
        ((&[(130, 1)], 0, 8, 1, 8, 2, 192, dtype, None, None), PLAIN, 1),
    ];
    // Caches of codes, with scales: single tokens and prompts, of random numbers of their own too.
    let of_codes: [(Case<'_>, [bool; 3], usize); 10] = [
        ((&[(33, 1), (63, 1), (300, 1)], 1, 16, 0, 8, 2, 128, DType::I8, None, None), PLAIN, 2),
        ((&[(33, 1), (63, 1), (300, 1)], 1, 16, 0, 8, 2, 128, DType::F8E4M3, None, None), PLAIN, 2),
        ((&[(530, 1), (0, 1)], 0, 16, 0, 20, 1, 64, DType::F8E4M3, Some(100), Some(4.0)), SINKS, 2),
        ((&[(40, 90), (0, 33)], 3, 16, 0, 4, 2, 128, DType::I8, None, None), PLAIN, 2),
        ((&[(40, 90), (0, 33)], 3, 16, 0, 4, 2, 64, DType::F8E4M3, Some(40), None), SINKS, 2),
        ((&[(70, 1), (130, 1)], 0, 8, 1, 8, 2, 192, DType::I8, None, None), PLAIN, 2),
        ((&[(33, 2), (20, 17)], 0, 16, 0, 8, 1, 36, DType::F8E4M3, None, None), PLAIN, 1),
        ((&[(200, 1), (31, 1), (40, 90)], 0, 16, 0, 4, 2, 128, DType::I8, None, None), PLAIN, 2),
        ((&[(200, 1), (31, 1), (40, 90)], 2, 16, 0, 8, 1, 64, DType::F8E4M3, None, None), PLAIN, 2),
        ((&[(70, 1), (130, 1)], 0, 16, 1, 4, 2, 256, DType::F8E4M3, None, None), PLAIN, 2),
    ];
    let mut samples = Vec::new();
    let all = cases.into_iter().map(|case| (case, PLAIN)).chain(more).map(|(case, kinds)| (case, kinds, 2));
    let all: Vec<_> = all.chain(one_sided.into_iter().map(|case| (case, PLAIN, 1))).collect();
    let (before, unscaled) = (all.len(), all.len() + wide.len());
    let (mut of_wide, mut of_scaled) = (Rng::new(23), Rng::new(31));
    let all = all.into_iter().chain(wide).chain(of_codes);
    for (nth, (case, [chunked, slopes, sinks], sides)) in all.enumerate() {
        let rng = match nth {
            nth if nth < before => &mut *rng,
            nth if nth < unscaled => &mut of_wide,
            _ => &mut of_scaled,
        };
        let (sequences, padding, block_size, spare, heads, kv_heads, dim, stored, window, softcap) = case;
        let step = super::paging::PagedStep::new(rng, sequences, padding, block_size, spare);
        let op = PagedAttention::new(1.0 / (dim as f64).sqrt(), Sym::new("pairs"), Sym::new("cached"));
        let tokens = step.seq_ids.len();
        let cache = [step.blocks, sides, kv_heads, block_size, dim];
        let mut sample = Sample::new(PagedAttention { window, chunked, softcap, slopes, sinks, ..op })
            .input(rng.normal(dtype, &[tokens, heads, dim]))
            .state(match nth >= unscaled {
                true => super::paging::codes(rng, stored, &cache),
                false => super::paging::cache(rng, stored, &cache),
            })
            .input(step.block_table)
            .input(step.seq_ids)
            .input(step.positions);
        if stored == DType::I8 || nth >= unscaled {
            sample = sample.state(super::paging::scales(rng, &cache[..4]));
        }
        if slopes {
            let slopes = (0..heads).map(|head| 0.5f64.powi(head as i32 + 2)).collect();
            sample = sample.input(Tensor::float(DType::F32, &[heads], slopes));
        }
        if sinks {
            sample = sample.input(rng.normal(DType::F32, &[heads]));
        }
        samples.push(sample);
    }
    samples.extend(samples_with_prompts(&mut Rng::new(41), dtype));
    samples
}

/// Prompts in parts beside generated tokens, one by one and several of a sequence at a time.
fn samples_with_prompts(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (sequences as (cached, new), their prompts, padding, block size, heads, kv heads, dim, window, softcap, sinks)
    type Case<'a> =
        (&'a [(usize, usize)], &'a [i64], usize, usize, usize, usize, usize, Option<usize>, Option<f64>, bool);
    let cases: [Case<'_>; 6] = [
        (&[(0, 20), (7, 1), (9, 3)], &[20, 3, 10], 2, 4, 4, 2, 16, None, None, false),
        (&[(40, 90), (0, 33), (200, 1), (31, 5)], &[130, 10, 200, 32], 3, 16, 8, 2, 128, None, None, false),
        (&[(150, 3), (260, 1), (513, 2), (700, 1)], &[200, 20, 514, 700], 1, 16, 8, 2, 128, None, None, true),
        (&[(300, 40), (515, 1)], &[320, 100], 0, 16, 4, 4, 64, Some(130), None, false),
        (&[(300, 4), (515, 1)], &[0, 600], 0, 32, 4, 1, 64, None, Some(20.0), false),
        (&[(129, 2), (530, 1)], &[130, 1], 0, 16, 20, 1, 64, Some(300), None, true),
    ];
    let sample = |(sequences, prompts, padding, block_size, heads, kv_heads, dim, window, softcap, sinks): Case<'_>| {
        let step = super::paging::PagedStep::new(rng, sequences, padding, block_size, 0);
        let op = PagedAttention::new(1.0 / (dim as f64).sqrt(), Sym::new("pairs"), Sym::new("cached"));
        let tokens = step.seq_ids.len();
        let mut sample = Sample::new(PagedAttention { window, softcap, sinks, prompt_lengths: true, ..op })
            .input(rng.normal(dtype, &[tokens, heads, dim]))
            .state(super::paging::cache(rng, dtype, &[step.blocks, 2, kv_heads, block_size, dim]))
            .input(step.block_table)
            .input(step.seq_ids)
            .input(step.positions);
        if sinks {
            sample = sample.input(rng.normal(DType::F32, &[heads]));
        }
        sample.input(Tensor::int(DType::I32, &[prompts.len()], prompts.to_vec()))
    };
    cases.map(sample).into()
}
