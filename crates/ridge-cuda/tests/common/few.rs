//! Graphs of which kernels for few rows claim more than those for many.

use ridge_graph::ops::{ExpertGroups, MoeRouter};
use ridge_graph::sample::Rng;
use ridge_graph::{DType, Sym, Tensor, Type};

use crate::cases::{KernelCase, case};

/// Routers from the residual addition to the order of the pairs, in one launch for few tokens and in four for many.
pub(crate) fn routers() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    // Of sigmoids or not, with a bias for the choice, with something added to the logits; how many of a group's best scores are summed.
    let kinds = [
        ("expert_route", [false, false, false], None),
        ("expert_route", [true, false, false], None),
        ("expert_route_biased", [true, true, false], None),
        ("expert_route_biased", [false, true, false], None),
        ("expert_route_offset", [false, false, true], None),
        ("expert_route", [false, false, false], Some(1)),
        ("expert_route_biased", [true, true, false], Some(2)),
    ];
    let shapes =
        [(1, 2048, 128, 8), (3, 264, 40, 6), (16, 2880, 32, 4), (2, 72, 5, 5), (1, 7168, 256, 8), (21, 264, 40, 6)];
    for (kernel, [sigmoid, bias, offset], best) in kinds {
        for (i, (tokens, hidden, experts, top_k)) in shapes.into_iter().enumerate() {
            let dtype = if i % 2 == 0 { DType::BF16 } else { DType::F16 };
            let normalise = i % 3 != 1;
            // Groups of as many as 32 and of one.
            let count = [4, 8, 16, 5, 8, 20][i];
            let groups =
                best.map(|best| ExpertGroups { count, kept: count.div_ceil(2).max(top_k * count / experts), best });
            let mut case = case(kernel, &format!("{dtype}, {tokens} x {hidden}, {top_k} of {experts}"), |g| {
                let row = Type::tensor(dtype, [tokens, hidden]);
                let (x, r) = (g.step_input("x", row.clone())?, g.step_input("r", row)?);
                let gain = g.weight("gain", Type::tensor(DType::F32, [hidden]))?;
                let w = g.weight("w", Type::tensor(dtype, [experts, hidden]))?;
                let b = if offset { Some(g.weight("b", Type::tensor(dtype, [experts]))?) } else { None };
                let more = if bias { Some(g.weight("more", Type::tensor(DType::F32, [experts]))?) } else { None };
                let seq_ids = g.step_input("seq_ids", Type::tensor(DType::I32, [tokens]))?;
                let sum = g.add(x, r)?;
                let y = g.rms_norm(sum, gain, 1e-5)?;
                let logits = g.linear_bias(y, w, b)?;
                let router = MoeRouter { top_k, sigmoid, normalise, scale: 1.5, bias, groups };
                let (ids, shares) = g.moe_router(logits, more, router)?;
                let (rows, places, offsets) = g.expert_permutation(ids, seq_ids, experts)?;
                Ok(vec![rows, places, offsets, ids, shares, y, sum])
            });
            // Some tokens are padding.
            let seq_ids = (0..tokens as i64).map(|t| if t % 5 == 2 { -1 } else { t / 3 }).collect();
            // The first token's logits are equal.
            let rows = |salt| {
                let normal = Rng::new(salt).normal(dtype, &[tokens, hidden]);
                let values = normal.floats().iter().enumerate();
                let values = values.map(|(at, x)| if at < hidden && tokens > 1 { 0.0 } else { *x }).collect();
                Tensor::float(dtype, &[tokens, hidden], values)
            };
            let seq_ids = Tensor::int(DType::I32, &[tokens], seq_ids);
            // Logits of about 1, which sigmoids tell from each other in f32.
            let w = Rng::new(8).normal(dtype, &[experts, hidden]);
            let small = (hidden as f64).sqrt().recip();
            let w = Tensor::float(dtype, &[experts, hidden], w.floats().iter().map(|x| x * small).collect()).rounded();
            case.given = vec![("seq_ids", seq_ids), ("x", rows(5)), ("r", rows(6)), ("w", w)];
            cases.push(case);
        }
    }
    cases
}

/// Gate and up of few tokens and many experts, which have no row, one or several.
pub(crate) fn gates_of_few() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for (i, (tokens, experts, depth, columns)) in
        [(1, 64, 264, 33), (1, 40, 2048, 16), (16, 40, 136, 70), (5, 70, 768, 6)].into_iter().enumerate()
    {
        let dtype = if i % 2 == 0 { DType::BF16 } else { DType::F16 };
        let counts = (0..experts).map(|e| if e == 7 && tokens > 5 { 5 } else { i64::from(e % 3 == 1) });
        let ends = counts.scan(0, |end, n| {
            *end += n;
            Some(*end)
        });
        let offsets: Vec<i64> = std::iter::once(0).chain(ends).collect();
        let rows = offsets[experts] as usize + 2;
        let mut case =
            case("grouped_linear_swiglu", &format!("{dtype}, {tokens} by {experts} of {depth} x {columns}"), |g| {
                let x = g.step_input("x", Type::tensor(dtype, [tokens, depth]))?;
                let offsets = g.step_input("offsets", Type::tensor(DType::I32, [experts + 1]))?;
                let index = g.step_input("rows", Type::tensor(DType::I32, [rows]))?;
                let ty = Type::tensor(dtype, [experts, columns, depth]);
                let (up, gate) = (g.weight("up", ty.clone())?, g.weight("gate", ty)?);
                let reached = Sym::new("reached");
                let up = g.grouped_linear(x, up, offsets, Some(index), &reached)?;
                let gate = g.grouped_linear(x, gate, offsets, Some(index), &reached)?;
                Ok(vec![g.swiglu(gate, up)?])
            });
        let index = (0..rows as i64).map(|row| if row % 11 == 5 { -1 } else { row * 7 % tokens as i64 }).collect();
        case.given = vec![
            ("offsets", Tensor::int(DType::I32, &[experts + 1], offsets)),
            ("rows", Tensor::int(DType::I32, &[rows], index)),
        ];
        cases.push(case);
    }
    cases
}

/// The last product of experts with the sum of what they give: of few tokens in one launch.
pub(crate) fn sums_of_experts() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    let shapes = [
        (1, 8, 768, 96, 32),
        (1, 6, 1408, 33, 64),
        (5, 3, 40, 130, 9),
        (16, 4, 264, 8, 32),
        (40, 2, 96, 66, 4),
        (7, 4, 520, 9, 5),
    ];
    for (i, (tokens, top_k, depth, columns, experts)) in shapes.into_iter().enumerate() {
        for added in 0..3 {
            let dtype = if i % 2 == 0 { DType::BF16 } else { DType::F16 };
            let pairs = tokens * top_k;
            let name = ["expert_sum", "expert_sum_add", "expert_sum_add_twice"][added];
            let what = format!("{dtype}, {tokens} of {top_k} of {experts}, {depth} x {columns}");
            let mut case = case(name, &what, |g| {
                let x = g.step_input("x", Type::tensor(dtype, [pairs, depth]))?;
                let w = g.weight("w", Type::tensor(dtype, [experts, columns, depth]))?;
                let offsets = g.step_input("offsets", Type::tensor(DType::I32, [experts + 1]))?;
                let places = g.step_input("places", Type::tensor(DType::I32, [tokens, top_k]))?;
                let weights = g.step_input("weights", Type::tensor(DType::F32, [tokens, top_k]))?;
                let y = g.grouped_linear(x, w, offsets, None, &Sym::new("reached"))?;
                let mut sum = g.expert_combine(y, places, weights)?;
                for name in ["s", "r"].into_iter().take(added) {
                    let other = g.step_input(name, Type::tensor(dtype, [tokens, columns]))?;
                    sum = g.add(other, sum)?;
                }
                Ok(vec![sum])
            });
            // A token's experts differ; every seventh pair is padding's.
            let expert = |pair: usize| (pair / top_k * 5 + pair % top_k * 11 + 1) % experts;
            let mut order: Vec<usize> = (0..pairs).filter(|pair| pair % 7 != 6).collect();
            order.sort_by_key(|pair| expert(*pair));
            let mut places = vec![-1; pairs];
            order.iter().enumerate().for_each(|(place, pair)| places[*pair] = place as i64);
            let begins = |e: usize| order.iter().filter(|pair| expert(**pair) < e).count() as i64;
            case.given = vec![
                ("places", Tensor::int(DType::I32, &[tokens, top_k], places)),
                ("offsets", Tensor::int(DType::I32, &[experts + 1], (0..=experts).map(begins).collect())),
            ];
            cases.push(case);
        }
    }
    cases
}

/// Products by parts of the matrices of a stack: of few rows in place, of many by parts that are copied.
pub(crate) fn products_of_heads() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for (dtype, x_dtype) in [(DType::BF16, DType::F32), (DType::F16, DType::F16)] {
        // Matrices; their rows, and first and last of the part; what lies within a row; rows of x.
        for (heads, all, [first, end], inner, rows) in
            [(16, 256, [0, 128], 512, 1), (3, 40, [8, 40], 72, 5), (2, 20, [3, 20], 136, 16), (4, 24, [8, 16], 40, 17)]
        {
            for transposed in [false, true] {
                let what = format!("{dtype}, {heads} x {all} x {inner}, {first} to {end} of {rows}, {transposed}");
                cases.push(case("head_products", &what, |g| {
                    let depth = if transposed { inner } else { end - first };
                    let x = g.step_input("x", Type::tensor(x_dtype, [heads, rows, depth]))?;
                    let w = g.weight("w", Type::tensor(dtype, [heads, all, inner]))?;
                    let w = g.slice(w, 1, first, end - first)?;
                    Ok(vec![g.matmul(x, w, false, transposed, x_dtype)?])
                }));
            }
        }
    }
    cases
}
