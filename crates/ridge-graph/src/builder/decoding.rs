//! Nodes that decode a stored parameter.

use crate::dtype::DType;
use crate::error::Result;
use crate::format::{Decoding, DecodingValue, FormatRef};
use crate::graph::{Builder, Var};
use crate::prim::Prim;
use crate::shape::Shape;

impl Builder {
    /// The logical tensor of a parameter as `dtype`: decoded if it is stored in a format.
    pub fn decoded(&mut self, x: Var, dtype: DType) -> Result<Var> {
        let ty = self.ty(x)?.clone();
        let plain = match &ty.format {
            None => x,
            Some(format) => self.decode(x, format, &ty.shape)?,
        };
        self.cast(plain, dtype)
    }

    fn decode(&mut self, x: Var, format: &FormatRef, shape: &Shape) -> Result<Var> {
        let mut decoding = Decoding::default();
        let result = format.decode(&mut decoding, shape);
        let count = format.components(shape).len();
        let components = (0..count).map(|i| self.one(Prim::Component(i), &[x])).collect::<Result<Vec<_>>>()?;
        let mut steps: Vec<Var> = Vec::with_capacity(decoding.steps.len());
        let value = |steps: &[Var], value: DecodingValue| match value {
            DecodingValue::Component(i) => components[i],
            DecodingValue::Step(i) => steps[i],
        };
        for step in decoding.steps {
            let inputs: Vec<Var> = step.inputs.iter().map(|v| value(&steps, *v)).collect();
            steps.push(match (step.prim, &inputs[..]) {
                (prim @ (Prim::Binary(_) | Prim::Compare(_)), [a, b]) => self.broadcast_one(prim, *a, *b)?,
                (Prim::Select, [cond, a, b]) => self.select(*cond, *a, *b)?,
                (Prim::Cast(dtype), [x]) => self.cast(*x, dtype)?,
                (Prim::Reshape(shape), [x]) => self.reshape(*x, shape)?,
                (prim, inputs) => self.one(prim, inputs)?,
            });
        }
        Ok(value(&steps, result))
    }
}
