//! Single rows, and a few, by weights in block formats, at whose sizes blocks of `blocks_row.cu` and `blocks_rows.cu` have several tiles,
//! formats and groups.

use ridge_graph::ops::ClampedSwiglu;
use ridge_graph::{Builder, DType, FormatRef, Sym, Tensor, Type, format};

use super::cases::{KernelCase, case};

fn named(name: &str) -> FormatRef {
    format::all().into_iter().find(|format| format.name() == name).expect("is there")
}

/// Linears of more tiles than there are blocks, by weights of one format and of two.
pub(crate) fn several_tiles() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for (dtype, first, second) in [
        (DType::BF16, "q4_0", "q8_0"),
        (DType::F16, "q5_1", "q5_1"),
        (DType::BF16, "mxfp4", "mxfp4"),
        (DType::BF16, "mxfp4", "q8_0"),
    ] {
        const DEPTH: usize = 2048;
        let what = format!("{dtype}, 1 x {DEPTH}, {first} and {second}");
        let weight = |g: &mut Builder, name: &str, columns: usize, format: &str| {
            g.weight(name, Type::tensor(DType::F32, [columns, DEPTH]).stored_as(named(format)))
        };
        cases.push(case("linear_blocks_group", &what, |g| {
            let x = g.step_input("x", Type::tensor(dtype, [1, DEPTH]))?;
            let (q, k) = (weight(g, "q", 3000, first)?, weight(g, "k", 2900, second)?);
            Ok(vec![g.linear(x, q)?, g.linear(x, k)?])
        }));
    }
    cases
}

/// Linears of a few rows, by weights of two formats: of several tiles for each cluster of blocks.
pub(crate) fn few_rows() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for (dtype, rows, depth, [q, k]) in
        [(DType::BF16, 16, 512, [6000, 1300]), (DType::F16, 8, 768, [2500, 2200]), (DType::BF16, 9, 2048, [3300, 1000])]
    {
        let what = format!("{dtype}, {rows} x {depth}, q4_k and q5_k");
        cases.push(case("linear_blocks_group", &what, |g| {
            let x = g.step_input("x", Type::tensor(dtype, [rows, depth]))?;
            let mut weight = |name: &str, columns: usize, format: &str| {
                let w = g.weight(name, Type::tensor(DType::F32, [columns, depth]).stored_as(named(format)))?;
                g.linear(x, w)
            };
            Ok(vec![weight("q", q, "q4_k")?, weight("k", k, "q5_k")?])
        }));
    }
    cases
}

/// Products of groups most of which have no row, some one, and one has two; gated, gathered, and of rows as they are.
pub(crate) fn rows_of_groups() -> Vec<KernelCase> {
    // More than a warp has lanes; each is decoded for its meaning.
    const GROUPS: usize = 40;
    let mut cases = Vec::new();
    for (dtype, name) in [
        (DType::BF16, "mxfp4"),
        (DType::F16, "mxfp4"),
        (DType::BF16, "q8_0"),
        (DType::F16, "q4_1"),
        (DType::BF16, "q5_0"),
        (DType::BF16, "q4_k"),
        (DType::F16, "q5_k"),
        (DType::BF16, "q6_k"),
    ] {
        let format = named(name);
        for (depth, columns) in [(96, 33), (288, 130), (512, 40), (256, 700), (320, 48), (256, 2128)] {
            if depth % format.granularity(3)[2] != 0 {
                continue;
            }
            // Two rows behind the last group.
            let of_groups = [3, 17, 17, 30, 39];
            let rows = of_groups.len() + 2;
            let what = |kind: &str| format!("{kind}, {dtype}, {name}, {rows} x {depth} x {columns}");
            let weight = |g: &mut Builder, name: &str| {
                g.weight(name, Type::tensor(DType::F32, [GROUPS, columns, depth]).stored_as(format.clone()))
            };
            let offsets: Vec<i64> =
                (0..=GROUPS).map(|group| of_groups.iter().filter(|of| **of < group).count() as i64).collect();
            // A row that is none, and others that are met twice.
            let index: Vec<i64> = (0..rows as i64).map(|row| if row == 2 { -1 } else { row * 3 % 4 }).collect();
            let given = || {
                vec![
                    ("offsets", Tensor::int(DType::I32, &[GROUPS + 1], offsets.clone())),
                    ("rows", Tensor::int(DType::I32, &[rows], index.clone())),
                ]
            };
            let reached = Sym::new("reached");
            for gated in [true, false] {
                let kernel = if gated { "grouped_linear_swiglu" } else { "grouped_linear_rows" };
                let mut gathered = case(kernel, &what("gathered"), |g| {
                    let x = g.step_input("x", Type::tensor(dtype, [4, depth]))?;
                    let offsets = g.step_input("offsets", Type::tensor(DType::I32, [GROUPS + 1]))?;
                    let index = g.step_input("rows", Type::tensor(DType::I32, [rows]))?;
                    let (up, gate) = (weight(g, "up")?, if gated { Some(weight(g, "gate")?) } else { None });
                    let up = g.grouped_linear(x, up, offsets, Some(index), &reached)?;
                    let Some(gate) = gate else { return Ok(vec![up]) };
                    let gate = g.grouped_linear(x, gate, offsets, Some(index), &reached)?;
                    Ok(vec![g.swiglu(gate, up)?])
                });
                gathered.given = given();
                cases.push(gathered);
            }
            let mut in_order = case("grouped_linear", &what("in order"), |g| {
                let x = g.step_input("x", Type::tensor(dtype, [rows, depth]))?;
                let offsets = g.step_input("offsets", Type::tensor(DType::I32, [GROUPS + 1]))?;
                let w = weight(g, "w")?;
                Ok(vec![g.grouped_linear(x, w, offsets, None, &reached)?])
            });
            in_order.given = given().drain(..1).collect();
            cases.push(in_order);
        }
    }
    cases
}

/// Experts with biases: a gate that is clamped, and the last product with the sum; of few tokens in one launch each, of many in parts.
pub(crate) fn biased_experts() -> Vec<KernelCase> {
    // Tokens, experts of one, experts, depth, columns. Blocks of the third have more tiles than are on their way at a time.
    let shapes =
        [(1, 4, 32, 320, 48), (1, 4, 32, 96, 33), (4, 4, 64, 192, 720), (2, 3, 40, 256, 130), (21, 2, 9, 64, 40)];
    let mut cases = Vec::new();
    for (i, (tokens, top_k, experts, depth, columns)) in shapes.into_iter().enumerate() {
        for format in ["mxfp4", "q8_0"] {
            let dtype = if i % 2 == 0 { DType::BF16 } else { DType::F16 };
            let bias = if i % 3 == 1 { DType::F32 } else { dtype };
            let pairs = tokens * top_k;
            let what = format!("{dtype}, {format}, {tokens} of {top_k} of {experts}, {depth} x {columns}");
            // A token's experts differ; every seventh pair is padding's.
            let expert = |pair: usize| (pair / top_k * 5 + pair % top_k * 11 + 1) % experts;
            let mut order: Vec<usize> = (0..pairs).filter(|pair| pair % 7 != 6).collect();
            order.sort_by_key(|pair| expert(*pair));
            let mut places = vec![-1; pairs];
            order.iter().enumerate().for_each(|(place, pair)| places[*pair] = place as i64);
            let mut rows = vec![-1; pairs];
            order.iter().enumerate().for_each(|(place, pair)| rows[place] = (pair / top_k) as i64);
            let begins = |e: usize| order.iter().filter(|pair| expert(**pair) < e).count() as i64;
            let offsets = Tensor::int(DType::I32, &[experts + 1], (0..=experts).map(begins).collect());
            let weight = |g: &mut Builder, name: &str| {
                g.weight(name, Type::tensor(DType::F32, [experts, columns, depth]).stored_as(named(format)))
            };
            let of_bias = |g: &mut Builder, name: &str| g.weight(name, Type::tensor(bias, [experts, columns]));
            let reached = Sym::new("reached");
            let mut gate = case("expert_gate_clamped", &what, |g| {
                let x = g.step_input("x", Type::tensor(dtype, [tokens, depth]))?;
                let offsets = g.step_input("offsets", Type::tensor(DType::I32, [experts + 1]))?;
                let index = g.step_input("rows", Type::tensor(DType::I32, [pairs]))?;
                let mut side = |name: &str| {
                    let (w, b) = (weight(g, name)?, of_bias(g, &format!("{name}_bias"))?);
                    let y = g.grouped_linear(x, w, offsets, Some(index), &reached)?;
                    g.grouped_bias(y, b, offsets)
                };
                let (up, gate) = (side("up")?, side("gate")?);
                Ok(vec![g.clamped_swiglu(gate, up, ClampedSwiglu { alpha: 1.702, limit: 7.0 })?])
            });
            gate.given = vec![("offsets", offsets.clone()), ("rows", Tensor::int(DType::I32, &[pairs], rows))];
            cases.push(gate);
            for added in [false, true] {
                let name = if added { "expert_sum_biased_add" } else { "expert_sum_biased" };
                let mut sum = case(name, &what, |g| {
                    let x = g.step_input("x", Type::tensor(dtype, [pairs, depth]))?;
                    let (w, b) = (weight(g, "w")?, of_bias(g, "b")?);
                    let offsets = g.step_input("offsets", Type::tensor(DType::I32, [experts + 1]))?;
                    let places = g.step_input("places", Type::tensor(DType::I32, [tokens, top_k]))?;
                    let weights = g.step_input("weights", Type::tensor(DType::F32, [tokens, top_k]))?;
                    let y = g.grouped_linear(x, w, offsets, None, &reached)?;
                    let y = g.grouped_bias(y, b, offsets)?;
                    let mut sum = g.expert_combine(y, places, weights)?;
                    if added {
                        let r = g.step_input("r", Type::tensor(dtype, [tokens, columns]))?;
                        sum = g.add(r, sum)?;
                    }
                    Ok(vec![sum])
                });
                let places = Tensor::int(DType::I32, &[tokens, top_k], places.clone());
                sum.given = vec![("places", places), ("offsets", offsets.clone())];
                cases.push(sum);
            }
        }
    }
    cases
}
