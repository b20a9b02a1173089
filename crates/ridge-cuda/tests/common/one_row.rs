//! Single rows by weights in block formats, at whose sizes blocks of `blocks_row.cu` have several tiles, formats and groups.

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

/// Products of groups most of which have no row, some one, and one has two; gated, gathered, and of rows as they are.
pub(crate) fn rows_of_groups() -> Vec<KernelCase> {
    const GROUPS: usize = 64;
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
        for (depth, columns) in [(96, 33), (288, 130), (512, 40), (256, 700)] {
            if depth % format.granularity(3)[2] != 0 {
                continue;
            }
            // Two rows behind the last group.
            let of_groups = [3, 17, 17, 30, 63];
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
