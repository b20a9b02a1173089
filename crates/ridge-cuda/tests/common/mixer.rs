//! What lies between the products of a Mamba-2 layer, from its convolution to the recurrence or its gate: rows of no token, of few and of many.

use ridge_graph::{DType, Tensor, Type};

use crate::cases::{KernelCase, case};

/// Tokens of each row, and those of none.
const STEPS: [(&[usize], usize); 4] = [(&[1], 0), (&[1, 1, 1, 1, 1], 3), (&[3, 0, 2, 5], 1), (&[70, 1, 33], 2)];

/// Heads, their values, groups, keys and taps.
const SIZES: [[usize; 5]; 3] = [[4, 64, 1, 128, 4], [6, 40, 2, 24, 2], [4, 8, 4, 200, 3]];

/// How the recurrence comes by its steps and decays.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Steps {
    Given,
    Made,
    Bounded,
}

pub(crate) fn mixers() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for (nth, (rows, padding)) in STEPS.into_iter().enumerate() {
        for (size, of_weight) in SIZES.into_iter().zip([DType::BF16, DType::F32, DType::F16]) {
            for (steps, more) in [(Steps::Given, ""), (Steps::Made, "_steps"), (Steps::Bounded, "_bounded_steps")] {
                for (gated, gate) in [(false, ""), (true, "_swiglu")] {
                    let mut made = mixer(rows, padding, of_weight, size, (steps, gated, nth % 2 == 0));
                    made.kernel = kernel_name(more, gate);
                    cases.push(made);
                }
            }
        }
    }
    cases
}

fn kernel_name(steps: &str, gate: &str) -> &'static str {
    match (steps, gate) {
        ("", "") => "conv_recurrence",
        ("", _) => "conv_recurrence_swiglu",
        ("_steps", "") => "conv_recurrence_steps",
        ("_steps", _) => "conv_recurrence_steps_swiglu",
        (_, "") => "conv_recurrence_bounded_steps",
        _ => "conv_recurrence_bounded_steps_swiglu",
    }
}

fn mixer(
    rows: &[usize],
    padding: usize,
    of_weight: DType,
    [heads, value, groups, key, taps]: [usize; 5],
    (steps, gated, bias): (Steps, bool, bool),
) -> KernelCase {
    const D: DType = DType::BF16;
    let (tokens, count) = (rows.iter().sum::<usize>() + padding, rows.len());
    let (inner, of_groups, lines) = (heads * value, groups * key, 2 * count + 1);
    let channels = inner + 2 * of_groups;
    let what = format!(
        "weights of {of_weight}, {rows:?} and {padding} x {heads} x {value}, {groups} x {key}, {taps} taps, bias: {bias}"
    );
    let mut case = case("conv_recurrence", &what, |g| {
        let ints = |shape: &[usize]| Type::tensor(DType::I32, ridge_graph::Shape::new(shape.iter().copied()));
        let all = g.step_input("all", Type::tensor(D, [tokens, inner + channels + heads]))?;
        let xbc = g.slice(all, 1, inner, channels)?;
        let w = g.weight("w", Type::tensor(of_weight, [channels, taps]))?;
        let of_conv = if bias { Some(g.weight("bias", Type::tensor(of_weight, [channels]))?) } else { None };
        let kept = g.state("kept", Type::state(D, [lines, (taps - 1) * channels]))?;
        let places = g.step_input("lines", ints(&[count, 2]))?;
        let (ids, starts) = (g.step_input("ids", ints(&[tokens]))?, g.step_input("starts", ints(&[count + 1]))?);
        let [y, kept] = g.stateful_conv1d([xbc, w, kept, places], [ids, starts], of_conv, true)?;
        let y = g.cast(y, D)?;
        let x = g.slice(y, 1, 0, inner)?;
        let x = g.reshape(x, [tokens, heads, value])?;
        let b = g.slice(y, 1, inner, of_groups)?;
        let b = g.reshape(b, [tokens, groups, key])?;
        let c = g.slice(y, 1, inner + of_groups, of_groups)?;
        let c = g.reshape(c, [tokens, groups, key])?;
        let [step, decay] = if steps == Steps::Given {
            let ty = Type::tensor(DType::F32, [tokens, heads, 1]);
            [g.step_input("step", ty.clone())?, g.step_input("decay", ty)?]
        } else {
            let offset = g.weight("offset", Type::tensor(of_weight, [heads]))?;
            let offset = g.broadcast(offset, [tokens, heads])?;
            let offset = g.cast(offset, DType::F32)?;
            let dt = g.slice(all, 1, inner + channels, heads)?;
            let dt = g.cast(dt, DType::F32)?;
            let dt = g.add(dt, offset)?;
            let mut dt = g.softplus(dt)?;
            if steps == Steps::Bounded {
                let least = g.constant(DType::F32, 0.5)?;
                dt = g.max(dt, least)?;
            }
            let rate = g.weight("rate", Type::tensor(of_weight, [heads]))?;
            let rate = g.cast(rate, DType::F32)?;
            let rate = g.exp(rate)?;
            let less = g.constant(DType::F32, -1.0)?;
            let less = g.broadcast(less, [heads])?;
            let rate = g.mul(rate, less)?;
            let decay = g.mul(dt, rate)?;
            [g.reshape(dt, [tokens, heads, 1])?, g.reshape(decay, [tokens, heads, 1])?]
        };
        let table = g.state("table", Type::state(DType::F32, [lines, heads * key * value]))?;
        let [y, table] = g.gated_recurrence([c, b, x, step, decay, table, places, starts], false)?;
        let states = [g.state_read(kept)?, g.state_read(table)?];
        if !gated {
            return Ok([&[y, x][..], &states].concat());
        }
        let skip = g.weight("skip", Type::tensor(of_weight, [heads]))?;
        let skip = g.reshape(skip, [heads, 1])?;
        let skip = g.broadcast(skip, [tokens, heads, value])?;
        let skip = g.cast(skip, DType::F32)?;
        let (x, y) = (g.cast(x, DType::F32)?, g.cast(y, DType::F32)?);
        let skip = g.mul(x, skip)?;
        let y = g.add(y, skip)?;
        let y = g.reshape(y, [tokens, inner])?;
        let z = g.slice(all, 1, 0, inner)?;
        let z = g.cast(z, DType::F32)?;
        Ok([&[g.swiglu(z, y)?][..], &states].concat())
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
    let decays = (0..tokens * heads).map(|i| -0.05 * (i % 23) as f64).collect();
    case.given = vec![
        ("lines", Tensor::int(DType::I32, &[count, 2], moves.collect())),
        ("ids", Tensor::int(DType::I32, &[tokens], ids)),
        ("starts", Tensor::int(DType::I32, &[count + 1], starts)),
        ("decay", Tensor::float(DType::F32, &[tokens, heads, 1], decays).rounded()),
    ];
    case
}
