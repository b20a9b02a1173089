//! The paged cache: where tokens go, what is written, what attention reads.

use ridge_graph::ops::{IndexTopK, PagedAttention, SelectedAttention, TokenLayout};
use ridge_graph::sample::Sample;
use ridge_graph::{Composite, DType, Work};

use super::{holds, input, op, samples, shape};

#[test]
fn token_layout_counts_on_from_the_cached_length() {
    for sample in samples("token_layout") {
        let TokenLayout { block_size } = *op(&sample);
        let [ids, starts, lengths, table] = [0, 1, 2, 3].map(|i| input(&sample, i));
        let width = shape(&sample, 3)[1];
        let (mut positions, mut slots) = (Vec::new(), Vec::new());
        for (token, id) in ids.iter().enumerate() {
            if *id < 0.0 {
                positions.push(0.0);
                slots.push(-1.0);
                continue;
            }
            let seq = *id as usize;
            let position = lengths[seq] as usize + token - starts[seq] as usize;
            positions.push(position as f64);
            let nth = position / block_size;
            let block = if nth < width { table[seq * width + nth] } else { -1.0 };
            slots.push(if block < 0.0 { -1.0 } else { block * block_size as f64 + (position % block_size) as f64 });
        }
        holds(&sample, &[positions, slots]);
    }
}

#[test]
fn kv_write_puts_each_token_at_its_slot_and_leaves_the_rest() {
    for sample in samples("kv_write") {
        let [blocks, sides, heads, block_size, dim] = shape(&sample, 0)[..] else { panic!("a cache has five axes") };
        let [mut kv, slots] = [0, 1 + sides].map(|i| input(&sample, i));
        let rows: Vec<Vec<f64>> = (1..=sides).map(|i| input(&sample, i)).collect();
        let mut scales = (sample.inputs.len() > 2 + sides).then(|| input(&sample, 2 + sides));
        let of_floats = sample.inputs[0].ty().dtype == DType::F8E4M3;
        for (token, slot) in slots.iter().enumerate() {
            if *slot < 0.0 || *slot >= (blocks * block_size) as f64 {
                continue;
            }
            let (block, offset) = (*slot as usize / block_size, *slot as usize % block_size);
            for (side, new) in rows.iter().enumerate() {
                for head in 0..heads {
                    let to = (((block * sides + side) * heads + head) * block_size + offset) * dim;
                    let from = (token * heads + head) * dim;
                    kv[to..to + dim].copy_from_slice(&new[from..from + dim]);
                    if let Some(scales) = &mut scales {
                        let most = if of_floats { 448.0 } else { 127.0 };
                        let code = |x: f64| if of_floats { DType::F8E4M3.round(x) } else { (x + 0.5).floor() };
                        let scale = kv[to..to + dim].iter().fold(0.0, |m: f64, x| m.max(x.abs())) / most;
                        kv[to..to + dim].iter_mut().for_each(|x| *x = code(*x / scale));
                        scales[((block * sides + side) * heads + head) * block_size + offset] = scale;
                    }
                }
            }
        }
        holds(&sample, &[vec![kv], scales.into_iter().collect()].concat());
    }
}

#[test]
fn attention_averages_the_values_of_the_positions_it_sees() {
    for sample in samples("attention") {
        let PagedAttention { scale, window, chunked, softcap, slopes, sinks, prompt_lengths, .. } = op(&sample);
        let [q, kv, table, ids, positions] = [0, 1, 2, 3, 4].map(|i| input(&sample, i));
        let [tokens, heads, dim] = shape(&sample, 0)[..] else { panic!("q has three axes") };
        let [_, sides, kv_heads, block_size, _] = shape(&sample, 1)[..] else { panic!("a cache has five axes") };
        let width = shape(&sample, 2)[1];
        // Of codes what they stand for.
        let per_head = usize::from(*slopes) + usize::from(*sinks);
        // Lengths of prompts come last, and change nothing.
        let inputs = sample.inputs.len() - usize::from(*prompt_lengths);
        let scales = (inputs > 5 + per_head).then(|| input(&sample, 5));
        let of_heads = (inputs - per_head..inputs).map(|i| input(&sample, i));
        let of_heads: Vec<Vec<f64>> = of_heads.collect();
        let of_head = |there: bool, nth: usize, head: usize| there.then(|| of_heads[nth][head]);
        let number = |i: usize| kv[i] * scales.as_ref().map_or(1.0, |scales| scales[i / dim]);
        let numbers: Vec<f64> = (0..kv.len()).map(number).collect();
        let mut y = vec![0.0; tokens * heads * dim];
        for token in (0..tokens).filter(|t| ids[*t] >= 0.0) {
            for head in 0..heads {
                let kv_head = head * kv_heads / heads;
                let query = &q[(token * heads + head) * dim..][..dim];
                let row = |side: usize, position: usize| {
                    let block = table[ids[token] as usize * width + position / block_size];
                    assert!(block >= 0.0, "sample: position {position} of token {token} has no block");
                    let side = side.min(sides - 1);
                    let at =
                        ((block as usize * sides + side) * kv_heads + kv_head) * block_size + position % block_size;
                    &numbers[at * dim..][..dim]
                };
                let position = positions[token] as usize;
                let first =
                    |w: usize| if *chunked { position - position % w } else { (position + 1).saturating_sub(w) };
                let seen = window.map_or(0, first)..=position;
                let capped = |score: f64| softcap.map_or(score, |cap| cap * (score / cap).tanh());
                let dot = |key: &[f64]| key.iter().zip(query).map(|(a, b)| a * b).sum::<f64>();
                let slope = of_head(*slopes, 0, head).unwrap_or(0.0);
                let score = |p: usize| capped(scale * dot(row(0, p))) - slope * (position - p) as f64;
                let weights: Vec<f64> = seen.clone().map(|p| score(p).exp()).collect();
                let sink = of_head(*sinks, usize::from(*slopes), head).map_or(0.0, f64::exp);
                let total = weights.iter().sum::<f64>() + sink;
                let out = &mut y[(token * heads + head) * dim..][..dim];
                for (position, weight) in seen.zip(weights) {
                    for (to, value) in out.iter_mut().zip(row(1, position)) {
                        *to += weight / total * value;
                    }
                }
            }
        }
        // The cache is read, and continues as it was.
        holds(&sample, &[vec![y, kv], scales.into_iter().collect()].concat());
    }
}

/// Numbers of the cache that is input `cache` of a sample, whose scales, where it is of codes, are input `scales`.
fn cached(sample: &Sample, cache: usize, scales: usize) -> Vec<f64> {
    let dim = shape(sample, cache)[4];
    let scales = (sample.inputs.len() > scales).then(|| input(sample, scales));
    let number = |(i, x): (usize, f64)| x * scales.as_ref().map_or(1.0, |scales| scales[i / dim]);
    input(sample, cache).into_iter().enumerate().map(number).collect()
}

#[test]
fn index_topk_keeps_the_best_positions_and_of_equal_ones_the_first() {
    for sample in samples("index_topk") {
        let top_k = op::<IndexTopK>(&sample).top_k;
        let [q, w, keys, table, ids, positions] = [0, 1, 2, 3, 4, 5].map(|i| input(&sample, i));
        let [tokens, heads, dim] = shape(&sample, 0)[..] else { panic!("q has three axes") };
        let (block_size, width) = (shape(&sample, 2)[3], shape(&sample, 3)[1]);
        let numbers = cached(&sample, 2, 6);
        let mut expected = Vec::new();
        for token in 0..tokens {
            let seen = if ids[token] < 0.0 { 0 } else { positions[token] as usize + 1 };
            let score = |position: usize| -> f64 {
                let block = table[ids[token] as usize * width + position / block_size] as usize;
                let key = &numbers[(block * block_size + position % block_size) * dim..][..dim];
                let of_head = |head: usize| {
                    let query = &q[(token * heads + head) * dim..][..dim];
                    let dot: f64 = query.iter().zip(key).map(|(a, b)| a * b).sum();
                    w[token * heads + head] * dot.max(0.0)
                };
                (0..heads).map(of_head).sum()
            };
            let scores: Vec<f64> = (0..seen).map(score).collect();
            let mut order: Vec<usize> = (0..seen).collect();
            order.sort_by(|a, b| scores[*b].partial_cmp(&scores[*a]).expect("scores are numbers"));
            order.truncate(top_k);
            order.sort_unstable();
            expected.extend(order.iter().map(|position| *position as f64));
            expected.resize((token + 1) * top_k, -1.0);
        }
        // The cache is read, and continues as it was.
        let scales = (sample.inputs.len() > 6).then(|| input(&sample, 6));
        holds(&sample, &[vec![expected, keys], scales.into_iter().collect()].concat());
    }
}

#[test]
fn selected_attention_averages_the_values_of_the_positions_selected() {
    for sample in samples("selected_attention") {
        let op = op::<SelectedAttention>(&sample);
        let Work::Attention(work) = op.work() else { panic!("its work is attention") };
        assert_eq!(work.window, Some(shape(&sample, 4)[1]), "keys that a query sees at most");
        let scale = op.scale;
        let [q, kv, table, ids, selected] = [0, 1, 2, 3, 4].map(|i| input(&sample, i));
        let [tokens, heads, dim] = shape(&sample, 0)[..] else { panic!("q has three axes") };
        let [_, sides, kv_heads, block_size, _] = shape(&sample, 1)[..] else { panic!("a cache has five axes") };
        let (width, count) = (shape(&sample, 2)[1], shape(&sample, 4)[1]);
        let numbers = cached(&sample, 1, 5);
        let mut y = vec![0.0; tokens * heads * dim];
        for token in (0..tokens).filter(|t| ids[*t] >= 0.0) {
            let chosen = &selected[token * count..][..count];
            let chosen: Vec<usize> = chosen.iter().filter(|p| **p >= 0.0).map(|p| *p as usize).collect();
            for head in 0..heads {
                let row = |side: usize, position: usize| {
                    let block = table[ids[token] as usize * width + position / block_size] as usize;
                    let row = (block * sides + side.min(sides - 1)) * kv_heads + head * kv_heads / heads;
                    &numbers[(row * block_size + position % block_size) * dim..][..dim]
                };
                let query = &q[(token * heads + head) * dim..][..dim];
                let dot = |key: &[f64]| key.iter().zip(query).map(|(a, b)| a * b).sum::<f64>();
                let weights: Vec<f64> = chosen.iter().map(|p| (scale * dot(row(0, *p))).exp()).collect();
                let total: f64 = weights.iter().sum();
                let out = &mut y[(token * heads + head) * dim..][..dim];
                for (position, weight) in chosen.iter().zip(weights) {
                    for (to, value) in out.iter_mut().zip(row(1, *position)) {
                        *to += weight / total * value;
                    }
                }
            }
        }
        let scales = (sample.inputs.len() > 5).then(|| input(&sample, 5));
        holds(&sample, &[vec![y, kv], scales.into_iter().collect()].concat());
    }
}
