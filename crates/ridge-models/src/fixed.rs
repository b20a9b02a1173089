//! State of a fixed size per sequence, as recurrences and convolutions keep.
//!
//! Each tensor of such a group is one state of `[state_lines, width]`. A line is never updated in place by the sequence
//! that reads it: a step reads the state behind the tokens before it from one line and writes the state behind its own
//! tokens to another ([`fixed_lines`]; [`read_fixed`] and [`write_fixed`] for ops that take states by rows). Only where a step has the
//! tokens of a sequence in two parts, the second reads and writes the line that the first wrote. To commit is then to say which line is a sequence's from now on,
//! which the engine does without a copy: a line that stays is a snapshot, and a step that is taken back or fails leaves the
//! state before it as it was.

use ridge_graph::{Arg, Builder, DType, Dim, Graph, Result as GraphResult, Role, Shape, Type, Var};

use crate::model::symbols;

/// The step input with the lines of each row of the step, i32 `[seqs, 2]`: the line that it reads, negative for a sequence
/// that begins with zeros, and the line that it writes, negative for padding.
pub const STATE_LINES: &str = "state_lines";

/// Does a decoder's graph keep states of a fixed size?
pub fn has_fixed_state(graph: &Graph) -> bool {
    graph.args(Role::StepInput).any(|arg: &Arg| *arg.name == *STATE_LINES)
}

/// One tensor of a fixed-size group in a step.
#[derive(Clone, Copy, Debug)]
pub struct FixedState {
    /// The state behind the tokens before this step: `[seqs, width]`, zeros where a sequence begins.
    pub before: Var,
    state: Var,
    to: Var,
}

/// Asks for the state `name` of `width` elements of `dtype` a sequence, `[state_lines, width]`, and the lines of this step, i32
/// `[seqs, 2]`: see [`STATE_LINES`]. A step writes no line that another row
/// of it reads or writes.
///
/// # Errors
/// When the state or the step input was asked for before with another type.
pub fn fixed_lines(g: &mut Builder, name: &str, dtype: DType, width: usize) -> GraphResult<[Var; 2]> {
    let lines = Type::tensor(DType::I32, Shape(vec![Dim::sym(symbols::SEQS), 2.into()]));
    let lines = g.step_input(STATE_LINES, lines)?;
    let state = Type::state(dtype, Shape(vec![Dim::sym(symbols::STATE_LINES), width.into()]));
    Ok([g.state(name, state)?, lines])
}

/// Asks for the state `name` of `width` elements of `dtype` a sequence, and reads its lines of this step.
///
/// # Errors
/// When the state or the step input was asked for before with another type.
pub fn read_fixed(g: &mut Builder, name: &str, dtype: DType, width: usize) -> GraphResult<FixedState> {
    let seqs = Dim::sym(symbols::SEQS);
    let [state, lines] = fixed_lines(g, name, dtype, width)?;
    let from = g.slice(lines, 1, 0, 1)?;
    let from = g.reshape(from, [&seqs])?;
    let to = g.slice(lines, 1, 1, 1)?;
    let all = g.state_read(state)?;
    let before = g.gather(all, from, 0)?;
    Ok(FixedState { before, state, to })
}

/// Writes the state behind the step's tokens, `after`: `[seqs, width]`.
///
/// # Errors
/// When `after` has another type than the state's lines.
pub fn write_fixed(g: &mut Builder, fixed: &FixedState, after: Var) -> GraphResult<()> {
    // Those of a line below 0 are dropped.
    let lines = g.reshape(fixed.to, Shape(vec![Dim::sym(symbols::SEQS)]))?;
    g.table_write(fixed.state, after, lines).map(|_| ())
}

/// The sum of each sequence's tokens, in which what came before decays: `h[t] = decay * h[t - 1] + x[t]`. A recurrence with
/// the least arithmetic, which shows what a family with fixed-size states does.
///
/// `x`: f32 `[tokens, width]`; `before`: f32 `[seqs, width]`, `h` before the step; `seq_ids` and `query_start` as in
/// [`StepInputs`](crate::StepInputs); `decay` above 0. Gives `h` of every token, `[tokens, width]`, and that of the last
/// token of each row, `[seqs, width]`. Products within the step are one triangular matrix of `[tokens, tokens]`.
///
/// # Errors
/// When an input has another type.
pub fn decaying_sum(
    g: &mut Builder,
    [x, before]: [Var; 2],
    [seq_ids, query_start]: [Var; 2],
    decay: f64,
) -> GraphResult<[Var; 2]> {
    let (tokens, seqs) = (Dim::sym(symbols::TOKENS), Dim::sym(symbols::SEQS));
    let square = Shape(vec![tokens.clone(), tokens.clone()]);
    let rate = g.constant(DType::F32, decay.ln())?;
    let zero = g.constant(DType::F32, 0.0)?;
    let one = g.constant(DType::I32, 1.0)?;
    let power = |g: &mut Builder, steps: Var| {
        let steps = g.cast(steps, DType::F32)?;
        let exponent = g.mul(steps, rate)?;
        g.exp(exponent)
    };
    let (to, from) = (g.iota(square.clone(), 0, DType::I32)?, g.iota(square, 1, DType::I32)?);
    let factor = g.sub(to, from)?;
    let factor = power(g, factor)?;
    let causal = g.ge(to, from)?;
    let factor = g.select(causal, factor, zero)?;
    let column = g.reshape(seq_ids, Shape(vec![tokens.clone(), 1.into()]))?;
    let row = g.reshape(seq_ids, Shape(vec![1.into(), tokens.clone()]))?;
    let same = g.eq(column, row)?;
    let factor = g.select(same, factor, zero)?;
    let within = g.matmul(factor, x, false, false, DType::F32)?;

    let starts = g.slice(query_start, 0, 0, &seqs)?;
    let start = g.gather(starts, seq_ids, 0)?;
    let number = g.iota(Shape(vec![tokens.clone()]), 0, DType::I32)?;
    let steps = g.sub(number, start)?;
    let steps = g.add(steps, one)?;
    let decayed = power(g, steps)?;
    let decayed = g.reshape(decayed, Shape(vec![tokens, 1.into()]))?;
    let carried = g.gather(before, seq_ids, 0)?;
    let carried = g.mul(carried, decayed)?;
    let sums = g.add(within, carried)?;

    let ends = g.slice(query_start, 0, 1, &seqs)?;
    let last = g.sub(ends, one)?;
    let after = g.gather(sums, last, 0)?;
    Ok([sums, after])
}

#[cfg(test)]
mod tests {
    use ridge_graph::{Bindings, Precision, Tensor, Value, evaluate};

    use super::*;
    use crate::StepInputs;

    #[test]
    fn a_ragged_step_gives_what_a_loop_over_tokens_gives() {
        let (lines, width) = (7, 3);
        // Three rows of 4, 1 and 2 tokens, one of padding, and two tokens of padding behind them.
        let seqs: [i64; 9] = [0, 0, 0, 0, 1, 2, 2, -1, -1];
        let moves: [[i64; 2]; 4] = [[3, 5], [-1, 0], [2, 2], [-1, -1]];
        let mut g = Builder::new();
        let step = StepInputs::ask(&mut g).expect("asks");
        let x = g.step_input("x", Type::tensor(DType::F32, Shape(vec![Dim::sym(symbols::TOKENS), width.into()])));
        let fixed = read_fixed(&mut g, "sum", DType::F32, width).expect("reads");
        let sums = decaying_sum(&mut g, [x.expect("asks"), fixed.before], [step.seq_ids, step.query_start], 0.5);
        let [sums, after] = sums.expect("has types");
        write_fixed(&mut g, &fixed, after).expect("writes");
        let graph = g.finish(vec![("sums".into(), sums)]).expect("builds");
        let xs: Vec<f64> = (0..9 * width).map(|i| ((i * 5) % 11) as f64 - 4.0).collect();
        let old: Vec<f64> = (0..lines * width).map(|i| (i as f64) / 4.0).collect();
        let i32s = |shape: &[usize], values: Vec<i64>| Some(Value::from(Tensor::int(DType::I32, shape, values)));
        let value = |arg: &Arg| match &*arg.name {
            "x" => Some(Value::from(Tensor::float(DType::F32, &[9, width], xs.clone()))),
            "sum" => Some(Value::from(Tensor::float(DType::F32, &[lines, width], old.clone()))),
            "seq_ids" => i32s(&[9], seqs.to_vec()),
            "query_start" => i32s(&[5], vec![0, 4, 5, 7, 7]),
            STATE_LINES => i32s(&[4, 2], moves.concat()),
            "token_ids" => i32s(&[9], vec![0; 9]),
            "lengths" => i32s(&[4], vec![0; 4]),
            "block_table" => i32s(&[4, 1], vec![-1; 4]),
            _ => None,
        };
        let bindings =
            Bindings::new().with(symbols::TOKENS, 9).with(symbols::SEQS, 4).with(symbols::STATE_LINES, lines);
        let bindings = bindings.with(symbols::TABLE, 1);
        let outputs = evaluate(&graph, &value, &bindings, Precision::Exact).expect("evaluates");
        let output =
            |of: &str| outputs.iter().find(|(name, _)| name == of).expect("is given").1.tensor().floats().to_vec();
        let found = output("sums");
        let mut state = vec![vec![0.0; width]; 3];
        for (row, [from, _]) in moves.iter().take(3).enumerate() {
            if let Ok(from) = usize::try_from(*from) {
                state[row].copy_from_slice(&old[from * width..][..width]);
            }
        }
        for (token, seq) in seqs.iter().enumerate().filter(|(_, seq)| **seq >= 0) {
            for column in 0..width {
                let h = &mut state[*seq as usize][column];
                *h = 0.5 * *h + xs[token * width + column];
                assert!((found[token * width + column] - *h).abs() < 1e-9, "token {token}, column {column}");
            }
        }
        // The rows' lines have the state behind their last tokens, and others are as they were.
        let mut expected = old;
        for (state, [_, to]) in state.iter().zip(&moves) {
            expected[*to as usize * width..][..width].copy_from_slice(state);
        }
        let written = output("sum");
        assert!(written.iter().zip(&expected).all(|(w, e)| (w - e).abs() < 1e-9), "{written:?}, not {expected:?}");
    }
}
