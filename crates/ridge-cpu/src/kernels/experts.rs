//! Around the products of experts: the router's choice, the order by expert, and the sum of what experts gave.
//!
//! Floor: a launch each for a few tokens; the rows read once and written once for many.

use std::ops::Range;

use ridge_graph::ops::{ExpertGroups, ExpertPermutation, MoeRouter};
use ridge_graph::{DType, Function};

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;
use crate::simd;

pub(super) fn entries() -> [KernelEntry; 4] {
    [
        KernelEntry::new("moe_router", "moe_router(logits)", chooses, router),
        KernelEntry::new("moe_router_biased", "moe_router(logits, bias)", chooses, router),
        KernelEntry::new("expert_permutation", "expert_permutation(ids, seq_ids)", |_| true, permutation),
        KernelEntry::new("expert_combine", "expert_combine(y, places, weights)", |_| true, combine),
    ]
}

/// What is added to scores for the choice is read in f32.
fn chooses(body: &Function) -> bool {
    body.args.get(1).is_none_or(|bias| bias.ty.dtype == DType::F32)
}

struct Router {
    op: MoeRouter,
    tokens: usize,
    experts: usize,
    dtype: DType,
}

fn router(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = *spec.composite::<MoeRouter>().ok_or("no moe_router in the group")?;
    let logits = &spec.inputs[0];
    Ok(Box::new(Router { op, tokens: logits.shape[0], experts: logits.shape[1], dtype: logits.dtype }))
}

impl CpuKernel for Router {
    fn pieces(&self) -> usize {
        self.tokens
    }

    fn nanos_per_piece(&self) -> f64 {
        20.0 + (self.op.top_k + 1) as f64 * self.experts as f64 * 0.6
    }

    fn run(&self, io: &KernelIo<'_>, tokens: Range<usize>, scratch: &mut Scratch) {
        let [scores, order, spare] = scratch.slices::<f32, 3>([self.experts; 3]);
        let k = self.op.top_k;
        for token in tokens {
            // SAFETY: these rows are this piece's alone.
            let (ids, weights) = unsafe {
                let row = token * k..(token + 1) * k;
                (io.output::<i32>(0).part(row.clone()), io.output::<f32>(1).part(row))
            };
            simd::load(io, 0, self.dtype, token * self.experts, scores);
            order.copy_from_slice(scores);
            if self.op.sigmoid {
                scores.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp()));
                order.copy_from_slice(scores);
            } else {
                let total = simd::exp_sum(scores, simd::max(order));
                simd::scale(scores, 1.0 / total);
                if self.op.bias {
                    order.copy_from_slice(scores);
                }
            }
            if self.op.bias {
                simd::add(order, &io.input::<f32>(1)[..self.experts]);
            }
            if let Some(groups) = self.op.groups {
                keep_groups(order, groups, spare);
            }
            choose(order, ids);
            for (weight, id) in weights.iter_mut().zip(ids.iter()) {
                *weight = scores[*id as usize];
            }
            let total = if self.op.normalise { weights.iter().sum() } else { 1.0 };
            for weight in weights {
                *weight = *weight / total * self.op.scale as f32;
            }
        }
    }
}

/// The indices of the largest elements, the first of equals first and NaN last. What was chosen is NaN afterwards, and of
/// NaN alone the first that was not chosen is next.
fn choose(order: &mut [f32], ids: &mut [i32]) {
    for i in 0..ids.len() {
        let mut best: Option<usize> = None;
        for (at, x) in order.iter().enumerate() {
            if !x.is_nan() && best.is_none_or(|best| *x > order[best]) {
                best = Some(at);
            }
        }
        let best = best.or_else(|| (0..order.len()).find(|at| !ids[..i].contains(&(*at as i32)))).unwrap_or(0);
        order[best] = f32::NAN;
        ids[i] = best as i32;
    }
}

/// Puts experts outside of the groups that are kept below all others: of equal groups the first are kept, and those of a NaN last.
fn keep_groups(order: &mut [f32], by: ExpertGroups, spare: &mut [f32]) {
    let size = order.len() / by.count;
    spare.copy_from_slice(order);
    for group in spare.chunks_mut(size) {
        let mut sum = 0.0;
        for _ in 0..by.best.min(size) {
            let best = group.iter_mut().filter(|x| !x.is_nan()).reduce(|best, x| if *x > *best { x } else { best });
            sum += best.map_or(f32::NAN, |best| std::mem::replace(best, f32::NAN));
        }
        group[0] = sum;
    }
    let of_group = |group: usize| spare[group * size];
    for (own, scores) in order.chunks_mut(size).enumerate() {
        let is_before = |other: usize| match of_group(other).partial_cmp(&of_group(own)) {
            Some(order) => order.is_gt() || (order.is_eq() && other < own),
            None => !of_group(other).is_nan() || (of_group(own).is_nan() && other < own),
        };
        if (0..by.count).filter(|other| is_before(*other)).count() >= by.kept {
            scores.fill(LOWEST);
        }
    }
}

/// Below every score.
const LOWEST: f32 = -3.0e38;

struct Permutation {
    experts: usize,
    tokens: usize,
    top_k: usize,
}

fn permutation(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<ExpertPermutation>().ok_or("no expert_permutation in the group")?;
    let ids = &spec.inputs[0];
    Ok(Box::new(Permutation { experts: op.experts, tokens: ids.shape[0], top_k: ids.shape[1] }))
}

impl CpuKernel for Permutation {
    fn pieces(&self) -> usize {
        1
    }

    fn nanos_per_piece(&self) -> f64 {
        20.0 + self.experts as f64 + 3.0 * (self.tokens * self.top_k) as f64
    }

    fn run(&self, io: &KernelIo<'_>, _pieces: Range<usize>, scratch: &mut Scratch) {
        let pairs = self.tokens * self.top_k;
        let (ids, seq_ids) = (&io.input::<i32>(0)[..pairs], io.input::<i32>(1));
        // SAFETY: the only piece.
        let (rows, places, offsets) = unsafe {
            let whole = |i, len| io.output::<i32>(i).part(0..len);
            (whole(0, pairs), whole(1, pairs), whole(2, self.experts + 1))
        };
        let expert = |pair: usize| {
            let id = usize::try_from(ids[pair]).ok().filter(|id| *id < self.experts);
            id.filter(|_| seq_ids[pair / self.top_k] >= 0)
        };
        offsets.fill(0);
        for expert in (0..pairs).filter_map(expert) {
            offsets[expert + 1] += 1;
        }
        for expert in 0..self.experts {
            offsets[expert + 1] += offsets[expert];
        }
        let [next] = scratch.slices::<i32, 1>([self.experts]);
        next.copy_from_slice(&offsets[..self.experts]);
        rows.fill(-1);
        for (pair, place) in places.iter_mut().enumerate() {
            *place = -1;
            if let Some(expert) = expert(pair) {
                *place = next[expert];
                rows[next[expert] as usize] = (pair / self.top_k) as i32;
                next[expert] += 1;
            }
        }
    }
}

struct Combine {
    tokens: usize,
    top_k: usize,
    rows: usize,
    hidden: usize,
    dtype: DType,
}

fn combine(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let (y, places) = (&spec.inputs[0], &spec.inputs[1]);
    let [rows, hidden] = [y.shape[0], y.shape[1]];
    Ok(Box::new(Combine { tokens: places.shape[0], top_k: places.shape[1], rows, hidden, dtype: y.dtype }))
}

impl CpuKernel for Combine {
    fn pieces(&self) -> usize {
        self.tokens
    }

    fn nanos_per_piece(&self) -> f64 {
        20.0 + (self.top_k * self.hidden) as f64 * 0.3
    }

    fn run(&self, io: &KernelIo<'_>, tokens: Range<usize>, scratch: &mut Scratch) {
        let [sum, line] = scratch.slices::<f32, 2>([self.hidden; 2]);
        for token in tokens {
            let pairs = token * self.top_k..(token + 1) * self.top_k;
            sum.fill(0.0);
            for (place, weight) in io.input::<i32>(1)[pairs.clone()].iter().zip(&io.input::<f32>(2)[pairs]) {
                let Some(row) = usize::try_from(*place).ok().filter(|row| *row < self.rows) else { continue };
                let row = simd::view(io, 0, self.dtype, row * self.hidden, line);
                add_scaled(sum, row, *weight);
            }
            // SAFETY: this row is this piece's alone.
            unsafe { simd::store(io, 0, self.dtype, token * self.hidden, sum) };
        }
    }
}

simd::vectorised! {
    fn add_scaled(sum: &mut [f32], row: &[f32], weight: f32) {
        for (sum, x) in sum.iter_mut().zip(row) {
            *sum += *x * weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::choose;

    #[test]
    fn experts_are_chosen_once_each_in_order_and_nan_last() {
        let chosen = |order: &[f32]| {
            let mut ids = [0; 4];
            choose(&mut order.to_vec(), &mut ids);
            ids
        };
        assert_eq!(chosen(&[1.0, 3.0, 3.0, 2.0, 0.0]), [1, 2, 3, 0]);
        assert_eq!(chosen(&[f32::NAN, 1.0, f32::NEG_INFINITY, f32::NAN]), [1, 2, 0, 3]);
        assert_eq!(chosen(&[f32::NAN; 5]), [0, 1, 2, 3]);
    }
}
