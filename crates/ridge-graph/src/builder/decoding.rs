//! Nodes that decode a value stored in a format.

use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::format::{Decoding, DecodingOp, DecodingValue, FormatRef};
use crate::graph::{Builder, Var};
use crate::prim::Prim;
use crate::shape::Shape;

impl Builder {
    /// The logical tensor of a value as `dtype`: decoded if it is stored in a format.
    pub fn decoded(&mut self, x: Var, dtype: DType) -> Result<Var> {
        let ty = self.ty(x)?.clone();
        let plain = match &ty.format {
            None => x,
            Some(format) => {
                let count = format.components(&ty.shape).len();
                let components = (0..count).map(|i| self.one(Prim::Component(i), &[x])).collect::<Result<Vec<_>>>()?;
                self.decode(&components, format, &ty.shape)?
            }
        };
        self.cast(plain, dtype)
    }

    /// Rows `ids` (i32 `[n]`) of the logical matrix `table` as `dtype`, zeros for an id out of range. Where each row has components
    /// of its own, as all formats of blocks have it, only the rows asked for are decoded.
    pub fn decoded_rows(&mut self, table: Var, ids: Var, dtype: DType) -> Result<Var> {
        let ty = self.ty(table)?.clone();
        let rows = Shape::new([&self.ty(ids)?.shape.last(), &ty.shape.last()]);
        let Some(format) = ty.format.as_ref().filter(|format| has_rows(format, [&ty.shape, &rows])) else {
            let table = self.decoded(table, if ty.format.is_some() { DType::F32 } else { ty.dtype })?;
            let rows = self.gather(table, ids, 0)?;
            return self.cast(rows, dtype);
        };
        let count = format.components(&rows).len();
        let components = (0..count).map(|i| {
            let component = self.one(Prim::Component(i), &[table])?;
            self.gather(component, ids, 0)
        });
        let components = components.collect::<Result<Vec<_>>>()?;
        let values = self.decode(&components, format, &rows)?;
        self.cast(values, dtype)
    }

    fn decode(&mut self, components: &[Var], format: &FormatRef, shape: &Shape) -> Result<Var> {
        let mut decoding = Decoding::default();
        let result = format.decode(&mut decoding, shape);
        let mut steps: Vec<Var> = Vec::with_capacity(decoding.steps.len());
        let value = |steps: &[Var], value: DecodingValue| match value {
            DecodingValue::Component(i) => components[i],
            DecodingValue::Step(i) => steps[i],
        };
        for step in decoding.steps {
            let inputs: Vec<Var> = step.inputs.iter().map(|v| value(&steps, *v)).collect();
            steps.push(match (step.op, &inputs[..]) {
                (DecodingOp::Binary(op), [a, b]) => self.broadcast_one(Prim::Binary(op), *a, *b)?,
                (DecodingOp::Compare(op), [a, b]) => self.broadcast_one(Prim::Compare(op), *a, *b)?,
                (DecodingOp::Select, [cond, a, b]) => self.select(*cond, *a, *b)?,
                (DecodingOp::Cast(dtype), [x]) => self.cast(*x, dtype)?,
                (DecodingOp::Reshape(shape), [x]) => self.reshape(*x, shape)?,
                (DecodingOp::Slice { axis, start, len }, [x]) => self.slice(*x, axis, start, len)?,
                (DecodingOp::Pad { axis, after }, [x]) => self.pad(*x, axis, 0, after, 0.0)?,
                (DecodingOp::Concat { axis }, parts) => self.concat(parts, axis)?,
                (DecodingOp::Gather, [table, indices]) => self.gather(*table, *indices, 0)?,
                (DecodingOp::Const(literal), []) => self.one(Prim::Const(literal), &[])?,
                (op, inputs) => {
                    let why = format!("{op:?} of a decoding is given {} values", inputs.len());
                    return Err(GraphError::usage(format.name(), why));
                }
            });
        }
        Ok(value(&steps, result))
    }
}

/// Are the components of `some` rows the same rows of those of `all`?
fn has_rows(format: &FormatRef, [all, some]: [&Shape; 2]) -> bool {
    let (all_rows, some_rows) = (&all.0[0], &some.0[0]);
    format.components(all).iter().zip(format.components(some)).all(|(all, some)| {
        all.shape.0.first() == Some(all_rows)
            && some.shape.0.first() == Some(some_rows)
            && all.shape.0[1..] == some.shape.0[1..]
    })
}
