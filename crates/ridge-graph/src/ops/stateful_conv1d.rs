//! The short causal convolution of recurrent models with what follows it, whose states are lines of a table, as a server keeps those
//! of its sequences.

use super::causal_conv1d::CausalConv1d;
use super::require::{takes, want, want_weight};
use crate::cost::Cost;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// [`CausalConv1d`] over rows whose states before the step are lines of `table` and are written to other lines, with a bias and an
/// activation behind it, as `causal_conv1d_fn` and `causal_conv1d_update` of the package of that name have them.
///
/// `x`: `[tokens, channels]` of any float dtype; `w`: `[channels, K]`; `table`: state `[lines, (K - 1) * channels]` of the dtype of
/// `x`, in each line the inputs before the step, the last one last; `lines`: i32 `[rows, 2]`, the line that a row reads, zeros where there is none
/// of that number, and the line that it writes, none where there is none; `seq_ids`: i32 `[tokens]`, negative for padding; `query_start`: i32
/// `[rows + 1]`; `bias`: `[channels]` of any float dtype, if there is one. A row may write the line that it reads; no line is written that
/// another row reads or writes, so a kernel need not keep states apart. Computed in f32; gives `y`, f32 `[tokens, channels]`, for padding that of a
/// sum of 0, and the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatefulConv1d {
    /// Is a bias added?
    pub bias: bool,
    /// Is the sum `s` followed by SiLU, `s * sigmoid(s)`?
    pub silu: bool,
}

/// The inputs `x`, `w`, `table`, `lines`, `seq_ids` and `query_start`, before the bias.
const INPUTS: usize = 6;
const TABLE: usize = 2;
const LINES: usize = 3;

impl StatefulConv1d {
    /// The inputs of the convolution itself, if they are as many as they must be.
    fn of_convolution(inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, w, _, lines, ids, starts, ..] = inputs else {
            return Err(takes("x, w, table, lines, seq_ids and query_start", inputs));
        };
        let (Some(rows), Some(taps)) = (lines.shape.0.first(), w.shape.last().as_const().filter(|taps| *taps >= 2))
        else {
            return Err(format!("lines must be i32[rows, 2] and w have 2 taps or more, got {lines} and {w}"));
        };
        let [_, channels] = &x.shape.0[..] else { return Err(format!("x must have two axes, got {x}")) };
        let state = Type::tensor(x.dtype, Shape(vec![rows.clone(), (taps - 1).into(), channels.clone()]));
        Ok([x, w, &state, ids, starts].into_iter().cloned().collect())
    }
}

impl Composite for StatefulConv1d {
    fn name(&self) -> &'static str {
        "stateful_conv1d"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        if inputs.len() != INPUTS + usize::from(self.bias) {
            return Err(takes("x, w, table, lines, seq_ids, query_start, and a bias if it has one", inputs));
        }
        let of_convolution = Self::of_convolution(inputs)?;
        let made = CausalConv1d.infer(&of_convolution)?;
        let (x, table, lines) = (&inputs[0], &inputs[TABLE], &inputs[LINES]);
        want("lines", lines, DType::I32, Shape(vec![lines.shape.0[0].clone(), 2.into()]))?;
        let width = made[1].shape.0[1..].iter().map(Dim::as_const).product::<Option<usize>>();
        let fits = table.state && table.dtype == x.dtype && table.format.is_none() && table.shape.rank() == 2;
        if !fits || width.is_none() || table.shape.0[1].as_const() != width {
            let width = width.unwrap_or_default();
            return Err(format!("table must be a state {:?}[lines, {width}], got {table}", x.dtype));
        }
        if let Some(bias) = inputs.get(INPUTS) {
            want_weight("bias", bias, 1, "[channels]")?;
            want("bias", bias, bias.dtype, [&x.shape.0[1]])?;
        }
        Ok(vec![made[0].clone(), table.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [x, w, table, lines, ids, starts, bias @ ..] = inputs else { unreachable!("infer has counted the inputs") };
        let (rows, width) = (g.ty(*lines)?.shape.0[0].clone(), g.ty(*table)?.shape.0[1].clone());
        let (channels, taps) = (g.ty(*x)?.shape.0[1].clone(), g.ty(*w)?.shape.last().as_const().unwrap_or_default());
        let line = |g: &mut Builder, which: usize| {
            let column = g.slice(*lines, 1, which, 1)?;
            g.reshape(column, [&rows])
        };
        let (from, to) = (line(g, 0)?, line(g, 1)?);
        let all = g.state_read(*table)?;
        let before = g.gather(all, from, 0)?;
        let before = g.reshape(before, Shape(vec![rows.clone(), taps.saturating_sub(1).into(), channels]))?;
        let [mut y, after] = g.causal_conv1d([*x, *w, before], [*ids, *starts])?;
        let after = g.reshape(after, [&rows, &width])?;
        let table = g.table_write(*table, after, to)?;
        if let [bias] = bias {
            let bias = g.cast(*bias, DType::F32)?;
            y = g.add(y, bias)?;
        }
        if self.silu {
            let open = g.sigmoid(y)?;
            y = g.mul(y, open)?;
        }
        Ok(vec![y, table])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let of_convolution = Self::of_convolution(inputs).unwrap_or_default();
        // The states of the rows, and not the table, are read and written.
        let state = of_convolution.get(2).cloned().unwrap_or_else(|| outputs[1].clone());
        let mut cost = CausalConv1d.cost(&of_convolution, &[outputs[0].clone(), state]);
        let further: Vec<Type> = inputs[LINES..=LINES].iter().chain(&inputs[INPUTS..]).cloned().collect();
        cost.bytes_read += &Cost::moving(&further, &[]).bytes_read;
        let elements = outputs[0].shape.elements();
        if self.bias {
            cost.vector_flops += &elements;
        }
        if self.silu {
            cost.vector_flops += &(elements.clone() * 2);
            cost.special_flops += &elements;
        }
        cost
    }

    // No sharding rule: channels are the inner part of a line, which is flat.
}

impl Builder {
    /// `(y, table)` of a causal convolution over lines of a table, from `[x, w, table, lines]`, `[seq_ids, query_start]` and perhaps a bias,
    /// followed by SiLU if `silu`; see [`StatefulConv1d`].
    ///
    /// # Errors
    /// When an input does not have the type described there.
    pub fn stateful_conv1d(
        &mut self,
        [x, w, table, lines]: [Var; 4],
        [ids, starts]: [Var; 2],
        bias: Option<Var>,
        silu: bool,
    ) -> Result<[Var; 2]> {
        let inputs: Vec<Var> = [x, w, table, lines, ids, starts].into_iter().chain(bias).collect();
        let out = self.composite(StatefulConv1d { bias: bias.is_some(), silu }, &inputs)?;
        Ok([out[0], out[1]])
    }
}

/// Those of the convolution, with states in lines of a table, one that begins with zeros, and one that is not kept.
pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples = Vec::new();
    for (nth, of) in super::causal_conv1d::samples(&mut Rng::new(37), dtype).into_iter().enumerate() {
        let inputs: Vec<Tensor> = of.inputs.iter().map(|value| value.tensor().clone()).collect();
        let [x, w, state, ids, starts] = &inputs[..] else { continue };
        let (rows, width) = (state.shape[0], state.shape[1] * state.shape[2]);
        let op = StatefulConv1d { bias: nth % 2 == 0, silu: nth % 3 != 1 };
        let mut places = super::paging::shuffled(rng, 2 * rows + 1);
        if rows > 1 {
            places[nth % rows] = -1;
            places[rows + (nth + 1) % rows] = if nth % 2 == 0 { -1 } else { 2 * rows as i64 + 1 };
            // In its own place.
            let same = (nth + 2) % rows;
            if places[same] >= 0 && places[rows + same] >= 0 {
                places[rows + same] = places[same];
            }
        } else if rows == 1 {
            places[1] = places[0];
        }
        let lines = (0..rows).flat_map(|row| [places[row], places[rows + row]]).collect();
        let mut sample = Sample::new(op).input(x.clone()).input(w.clone());
        sample = sample.state(rng.normal(dtype, &[2 * rows + 1, width]));
        sample = sample.input(Tensor::int(DType::I32, &[rows, 2], lines)).input(ids.clone()).input(starts.clone());
        if op.bias {
            sample = sample.input(rng.normal(dtype, &[x.shape[1]]));
        }
        samples.push(sample);
    }
    samples
}
