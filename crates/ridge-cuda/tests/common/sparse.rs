//! Sparse attention of few and many tokens over long and ragged contexts: its index and its selection.

use ridge_graph::ops::{IndexTopK, SelectedAttention};
use ridge_graph::sample::Rng;
use ridge_graph::{DType, Sym, Tensor, Type};

use crate::cases::{KernelCase, Step, case};

/// Sequences as `(cached, new)` tokens, tokens of padding and spare columns of the block table.
type StepShape = (&'static [(usize, usize)], usize, usize);

/// Steps of single tokens, and of prompts beside them.
const STEPS: [StepShape; 3] =
    [(&[(1500, 1), (40, 1), (700, 1)], 0, 3), (&[(300, 20), (0, 70)], 3, 1), (&[(2100, 2)], 0, 200)];

/// The best positions of tokens that see more and fewer of them, by many heads and few.
pub(crate) fn indices() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for (dtype, keys) in [(DType::BF16, DType::BF16), (DType::F16, DType::F32), (DType::F32, DType::F32)] {
        for (heads, dim, top_k) in [(64, 128, 256), (32, 128, 61), (5, 33, 300)] {
            for (sequences, padding, spare) in STEPS {
                let step = Step::new(sequences, padding, spare);
                let tokens = step.ids.shape[0];
                let op = IndexTopK { top_k, pairs: Sym::new("pairs"), cached: Sym::new("cached") };
                let what = format!("{dtype} over {keys}, {heads} x {dim}, {top_k} of {sequences:?}");
                let mut case = case("index_topk", &what, |g| {
                    let q = g.step_input("q", Type::tensor(dtype, [tokens, heads, dim]))?;
                    let w = g.step_input("w", Type::tensor(DType::F32, [tokens, heads]))?;
                    let keys = g.state("keys", Type::state(keys, [step.blocks, 1, 1, 16, dim]))?;
                    let table = g.step_input("table", step.table.ty())?;
                    let at =
                        [table, g.step_input("ids", step.ids.ty())?, g.step_input("positions", step.positions.ty())?];
                    Ok(vec![g.index_topk([q, w], &[keys], at, op)?])
                });
                case.given = vec![("table", step.table), ("ids", step.ids), ("positions", step.positions)];
                cases.push(case);
            }
        }
    }
    cases
}

/// Attention to selections that are full, partly empty and without any position, with a whole tile of none between others, and
/// with a position beyond the table.
pub(crate) fn selections() -> Vec<KernelCase> {
    let (mut cases, mut rng) = (Vec::new(), Rng::new(5));
    for (dtype, cache) in [(DType::BF16, DType::BF16), (DType::F16, DType::F16), (DType::BF16, DType::F32)] {
        for (dim, heads, keys, sides, count) in [(576, 20, 1, 1, 300), (64, 16, 1, 1, 64), (96, 6, 2, 2, 130)] {
            for (sequences, padding, spare) in STEPS {
                let step = Step::new(sequences, padding, spare);
                let (tokens, beyond) = (step.ids.shape[0], step.table.shape[1] * 16);
                let mut selected = Vec::with_capacity(tokens * count);
                for (token, position) in step.positions.ints().iter().enumerate() {
                    let seen = *position as usize + 1;
                    // Every so many positions from a random one on, ascending; nothing of every seventh token.
                    let (mut start, stride) = (rng.below(seen), 1 + seen / (2 * count));
                    // Of every third token, from the first on, so that there are some on both sides of the gap.
                    let gap = token % 3 == 0 && count > 128;
                    start *= usize::from(!gap);
                    let of_token = (start..seen).step_by(stride).take(if token % 7 == 6 { 0 } else { count });
                    selected.extend(of_token.map(|position| position as i64));
                    selected.resize((token + 1) * count, -1);
                    let of_token = &mut selected[token * count..];
                    if gap {
                        of_token[64..128].fill(-1);
                    }
                    if token % 2 == 1 {
                        of_token[count / 2] = beyond as i64;
                    }
                }
                let selected = Tensor::int(DType::I32, &[tokens, count], selected);
                let op = SelectedAttention {
                    scale: 1.0 / (dim as f64).sqrt(),
                    top_k: count,
                    pairs: Sym::new("pairs"),
                    cached: Sym::new("cached"),
                };
                let what = format!("{dtype} over {cache}, dim {dim}, {heads} heads, {count} of {sequences:?}");
                let mut case = case("selected_attention", &what, |g| {
                    let q = g.step_input("q", Type::tensor(dtype, [tokens, heads, dim]))?;
                    let kv = g.state("kv", Type::state(cache, [step.blocks, sides, keys, 16, dim]))?;
                    let table = g.step_input("table", step.table.ty())?;
                    let at = [table, g.step_input("ids", step.ids.ty())?, g.step_input("selected", selected.ty())?];
                    Ok(vec![g.selected_attention(q, &[kv], at, op)?])
                });
                case.given = vec![("table", step.table), ("ids", step.ids), ("selected", selected)];
                cases.push(case);
            }
        }
    }
    cases
}
