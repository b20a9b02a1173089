//! The state-space scan of Mamba-2 with its short convolution (Dao and Gu 2024, "Transformers are SSMs", sections 6
//! and 7).

use super::refusal::planned_only;
use crate::cost::Cost;
use crate::dim::Dim;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::ops::require::{takes, want_floats, want_weight};
use crate::shape::Shape;
use crate::types::Type;
use crate::why::Why;

/// One pass over a step's tokens, sequence by sequence.
///
/// `xbc`: `[tokens, heads * dim + 2 groups * state]`; `dt`: `[tokens, heads]`; `conv_w`: `[channels, kernel]`; `conv_b`:
/// `[channels]`; `a`, `d`, `dt_bias`: `[heads]`; `conv`: the state `[seqs, channels, kernel - 1]`; `ssm`: the state
/// `[seqs, heads, dim, state]`. Gives `[tokens, heads * dim]` and both states.
///
/// The cost is that of the recurrence: 2 FLOPs for each element of the state to update it and 2 to read it out, for
/// every token. The chunked form does more arithmetic on the matrix units to do it in parallel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mamba2 {
    /// Heads of the scan.
    pub heads: usize,
    /// Channels of a head.
    pub dim: usize,
    /// Groups of heads that share their input and output vectors.
    pub groups: usize,
    /// Elements of the state of a channel.
    pub state: usize,
    /// Tokens that the convolution sees.
    pub kernel: usize,
}

impl Mamba2 {
    /// Channels of the convolution.
    pub fn channels(&self) -> usize {
        self.heads * self.dim + 2 * self.groups * self.state
    }
}

impl Composite for Mamba2 {
    fn name(&self) -> &'static str {
        "mamba2"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [xbc, dt, conv_w, conv_b, a, d, dt_bias, conv, ssm] = inputs else {
            return Err(takes("xbc, dt, conv_w, conv_b, a, d, dt_bias, conv and ssm", inputs));
        };
        let channels = self.channels();
        want_floats("xbc", xbc, 2, "[tokens, channels]")?;
        want_floats("dt", dt, 2, "[tokens, heads]")?;
        want_weight("conv_w", conv_w, 2, "[channels, kernel]")?;
        for (name, ty) in [("a", a), ("d", d), ("dt_bias", dt_bias)] {
            want_weight(name, ty, 1, "[heads]")?;
            if ty.shape.last() != Dim::from(self.heads) {
                return Err(format!("{name} must be [{}], got {ty}", self.heads));
            }
        }
        let widths = [
            ("xbc", xbc, channels),
            ("dt", dt, self.heads),
            ("conv_w", conv_w, self.kernel),
            ("conv_b", conv_b, channels),
            ("ssm", ssm, self.state),
        ];
        if let Some((name, ty, width)) = widths.into_iter().find(|(_, ty, w)| ty.shape.last() != Dim::from(*w)) {
            return Err(format!("{name} must be {width} wide, got {ty}"));
        }
        if !conv.state || !ssm.state {
            return Err(format!("conv and ssm must be states, got {conv} and {ssm}"));
        }
        let y = xbc.with_shape(Shape(vec![xbc.shape.0[0].clone(), (self.heads * self.dim).into()]));
        Ok(vec![y, conv.clone(), ssm.clone()])
    }

    fn decompose(&self, g: &mut Builder, _inputs: &[Var]) -> Result<Vec<Var>> {
        planned_only(g, self.name())
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let tokens = crate::Poly::from(&inputs[0].shape.0[0]);
        let state = (self.heads * self.dim * self.state) as i128;
        Cost {
            matrix_flops: tokens.clone() * (4 * state),
            vector_flops: tokens.clone() * (state + (2 * self.kernel * self.channels()) as i128),
            special_flops: tokens * (self.heads + self.channels()) as i128,
            ..Cost::moving(inputs, outputs)
        }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }
}
