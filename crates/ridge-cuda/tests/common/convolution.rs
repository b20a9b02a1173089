//! Short convolutions over lines of a table: rows of no token, of few and of many, whose inputs are columns of a wider value.

use ridge_graph::{DType, Tensor, Type};

use crate::cases::{KernelCase, case};

/// Tokens of each row, and those of none.
const STEPS: [(&[usize], usize); 5] =
    [(&[1], 0), (&[1, 1, 1, 1, 1], 3), (&[3, 0, 2, 5], 1), (&[70, 1, 33, 4, 16], 5), (&[300], 0)];

pub(crate) fn convolutions() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for (nth, (rows, padding)) in STEPS.into_iter().enumerate() {
        for (dtype, of_weight, channels, taps) in
            [(DType::BF16, DType::BF16, 262, 4), (DType::F16, DType::F32, 33, 3), (DType::F32, DType::BF16, 260, 2)]
        {
            for product in [false, true] {
                cases.push(convolution(rows, padding, [dtype, of_weight], (channels, taps), product, nth % 2 == 0));
            }
        }
    }
    cases
}

/// Of the columns of `all`, or of a product of two parts of them; with a bias and SiLU if `more`.
fn convolution(
    rows: &[usize],
    padding: usize,
    [dtype, of_weight]: [DType; 2],
    (channels, taps): (usize, usize),
    product: bool,
    more: bool,
) -> KernelCase {
    let (tokens, count) = (rows.iter().sum::<usize>() + padding, rows.len());
    let (lines, width) = (2 * count + 1, (taps - 1) * channels);
    let kernel = if product { "mul_stateful_conv1d" } else { "stateful_conv1d" };
    let what = format!("{dtype} by {of_weight}, {rows:?} and {padding} x {channels}, {taps} taps, more: {more}");
    let mut case = case(kernel, &what, |g| {
        let ints = |shape: &[usize]| Type::tensor(DType::I32, ridge_graph::Shape::new(shape.iter().copied()));
        let all = g.step_input("all", Type::tensor(dtype, [tokens, 2 * channels + 6]))?;
        let mut x = g.slice(all, 1, 4, channels)?;
        if product {
            let factor = g.slice(all, 1, channels + 5, channels)?;
            x = g.mul(x, factor)?;
        }
        let w = g.weight("w", Type::tensor(of_weight, [channels, taps]))?;
        let bias = if more { Some(g.weight("bias", Type::tensor(of_weight, [channels]))?) } else { None };
        let table = g.state("table", Type::state(dtype, [lines, width]))?;
        let places = g.step_input("lines", ints(&[count, 2]))?;
        let (ids, starts) = (g.step_input("ids", ints(&[tokens]))?, g.step_input("starts", ints(&[count + 1]))?);
        let [y, table] = g.stateful_conv1d([x, w, table, places], [ids, starts], bias, more)?;
        Ok(vec![y, g.state_read(table)?])
    });
    let mut ids: Vec<i64> = rows.iter().enumerate().flat_map(|(row, n)| vec![row as i64; *n]).collect();
    let mut starts = vec![0];
    rows.iter().for_each(|n| starts.push(starts.last().copied().unwrap_or(0) + *n as i64));
    ids.resize(tokens, -1);
    // Some rows stay in their place, one begins with zeros, one is not kept, others move.
    let moves = (0..count as i64).flat_map(|row| match row % 4 {
        0 => [2 * row, 2 * row],
        1 => [-1, 2 * row],
        2 => [2 * row, lines as i64],
        _ => [2 * row + 1, 2 * row],
    });
    case.given = vec![
        ("lines", Tensor::int(DType::I32, &[count, 2], moves.collect())),
        ("ids", Tensor::int(DType::I32, &[tokens], ids)),
        ("starts", Tensor::int(DType::I32, &[count + 1], starts)),
    ];
    case
}
