//! The rule of each primitive for values with a first axis more.

use super::{Batcher, Row};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::graph::Var;
use crate::prim::Prim;
use crate::shape::Shape;
use crate::types::Type;

impl Batcher<'_> {
    /// `prim` of all rows, where an input or more is batched; `None` of those that have no rule. `types` and `outputs` are
    /// those of one row.
    pub(super) fn prim(
        &mut self,
        prim: &Prim,
        inputs: &[Row],
        types: &[Type],
        outputs: &[Type],
    ) -> Result<Option<Vec<Var>>> {
        let behind = |axis: &usize| axis + 1;
        let all = match prim {
            Prim::Unary(_)
            | Prim::Binary(_)
            | Prim::Compare(_)
            | Prim::Select
            | Prim::Cast(_)
            | Prim::Move(_)
            | Prim::Fetch(_)
            | Prim::Random { .. } => prim.clone(),
            Prim::Reduce { op, axis } => Prim::Reduce { op: *op, axis: behind(axis) },
            Prim::ArgMax { axis } => Prim::ArgMax { axis: behind(axis) },
            Prim::Scan { op, axis } => Prim::Scan { op: *op, axis: behind(axis) },
            Prim::Slice { axis, start, len } => {
                Prim::Slice { axis: behind(axis), start: start.clone(), len: len.clone() }
            }
            Prim::Concat { axis } => Prim::Concat { axis: behind(axis) },
            Prim::Pad { axis, before, after, value } => {
                Prim::Pad { axis: behind(axis), before: before.clone(), after: after.clone(), value: *value }
            }
            Prim::Sort { axis, descending, keep } => {
                Prim::Sort { axis: behind(axis), descending: *descending, keep: keep.clone() }
            }
            Prim::Reshape(_) => Prim::Reshape(self.batched(&outputs[0]).shape),
            Prim::Transpose(perm) => Prim::Transpose(std::iter::once(0).chain(perm.iter().map(behind)).collect()),
            Prim::Broadcast(shape) => {
                // Axes that are missing in front of a row are missing behind the first axis.
                let missing = shape.rank() - types[0].shape.rank();
                let mut aligned = vec![self.size.clone()];
                aligned.extend((0..missing).map(|_| Dim::from(1)));
                aligned.extend(types[0].shape.0.iter().cloned());
                let x = self.g.reshape(inputs[0].var, Shape(aligned))?;
                let shape = self.batched(&outputs[0]).shape;
                return Ok(Some(vec![self.g.broadcast(x, shape)?]));
            }
            Prim::MatMul { trans_a, .. } => {
                if !trans_a && types[0].shape.rank() == 2 && !inputs[1].is_batched {
                    return self.product_of_rows(prim, inputs, types, outputs).map(Some);
                }
                prim.clone()
            }
            Prim::Gather { axis } => return self.gather(*axis, inputs, types, outputs).map(Some),
            Prim::Scatter { axis, add } => return self.scatter([*axis, usize::from(*add)], inputs, types).map(Some),
            // No inputs, or inputs that are never batched, or no meaning for rows.
            Prim::Const(_)
            | Prim::Iota { .. }
            | Prim::LinearRecurrence { .. }
            | Prim::LinearRecurrenceGradient { .. }
            | Prim::StateRead
            | Prim::StateWrite
            | Prim::Component(_)
            | Prim::Assemble { .. }
            | Prim::Collective { .. } => return Ok(None),
        };
        let mut vars = Vec::with_capacity(inputs.len());
        for (input, ty) in inputs.iter().zip(types) {
            vars.push(self.wide(*input, ty)?);
        }
        Ok(Some(self.g.prim(all, &vars)?))
    }

    /// The rows of matrices, all multiplied by one.
    fn product_of_rows(&mut self, prim: &Prim, inputs: &[Row], types: &[Type], outputs: &[Type]) -> Result<Vec<Var>> {
        let [rows, inner] = [0, 1].map(|axis| types[0].shape.0[axis].clone());
        let Some(all) = self.size.times(&rows) else {
            let vars = [inputs[0].var, self.wide(inputs[1], &types[1])?];
            return self.g.prim(prim.clone(), &vars);
        };
        let x = self.g.reshape(inputs[0].var, Shape(vec![all, inner]))?;
        let y = self.g.prim(prim.clone(), &[x, inputs[1].var])?[0];
        let shape = self.batched(&outputs[0]).shape;
        Ok(vec![self.g.reshape(y, shape)?])
    }

    fn gather(&mut self, axis: usize, inputs: &[Row], types: &[Type], outputs: &[Type]) -> Result<Vec<Var>> {
        let [data, indices] = [inputs[0], inputs[1]];
        if !indices.is_batched {
            return self.g.prim(Prim::Gather { axis: axis + 1 }, &[data.var, indices.var]);
        }
        let index_shape = types[1].shape.clone();
        let count = self.flat_indices(&index_shape)?;
        let rank = types[0].shape.rank();
        let (table, flat) = if data.is_batched {
            // One table of the rows of all, and indices into it.
            let (table, _) = self.joined(data.var, axis, &types[0].shape)?;
            (table, self.offset(indices.var, &types[1], &types[0].shape.0[axis])?)
        } else {
            let perm: Vec<usize> = std::iter::once(axis).chain((0..rank).filter(|a| *a != axis)).collect();
            (self.g.transpose(data.var, &perm)?, indices.var)
        };
        let flat = self.g.reshape(flat, Shape(vec![count]))?;
        let taken = self.g.gather(table, flat, 0)?;
        // [size, indices.., axes before, axes behind], of which the indices go to their place.
        let mut shape = vec![self.size.clone()];
        shape.extend(index_shape.0.iter().cloned());
        shape.extend((0..rank).filter(|a| *a != axis).map(|a| types[0].shape.0[a].clone()));
        let taken = self.g.reshape(taken, Shape(shape))?;
        let width = index_shape.rank();
        let mut perm = vec![0];
        perm.extend((0..axis).map(|a| 1 + width + a));
        perm.extend((0..width).map(|a| 1 + a));
        perm.extend((axis..rank - 1).map(|a| 1 + width + a));
        let y = self.g.transpose(taken, &perm)?;
        let shape = self.batched(&outputs[0]).shape;
        Ok(vec![self.g.reshape(y, shape)?])
    }

    fn scatter(&mut self, [axis, add]: [usize; 2], inputs: &[Row], types: &[Type]) -> Result<Vec<Var>> {
        let add = add == 1;
        let data = self.wide(inputs[0], &types[0])?;
        let updates = self.wide(inputs[2], &types[2])?;
        if !inputs[1].is_batched {
            return self.g.prim(Prim::Scatter { axis: axis + 1, add }, &[data, inputs[1].var, updates]);
        }
        let (rank, width) = (types[0].shape.rank(), types[1].shape.rank());
        let (table, whole) = self.joined(data, axis, &types[0].shape)?;
        let flat = self.offset(inputs[1].var, &types[1], &types[0].shape.0[axis])?;
        let count = self.flat_indices(&types[1].shape)?;
        let flat = self.g.reshape(flat, Shape(vec![count.clone()]))?;
        // Updates are [size, axes before, indices.., axes behind].
        let mut perm = vec![0];
        perm.extend((0..width).map(|a| 1 + axis + a));
        perm.extend((0..axis).map(|a| 1 + a));
        perm.extend((axis..rank - 1).map(|a| 1 + width + a));
        let updates = self.g.transpose(updates, &perm)?;
        let mut shape = vec![count];
        shape.extend((0..rank).filter(|a| *a != axis).map(|a| types[0].shape.0[a].clone()));
        let updates = self.g.reshape(updates, Shape(shape))?;
        let made = self.g.prim(Prim::Scatter { axis: 0, add }, &[table, flat, updates])?[0];
        let made = self.g.reshape(made, whole)?;
        let mut back = vec![0];
        back.extend((0..axis).map(|a| 2 + a));
        back.push(1);
        back.extend((axis..rank - 1).map(|a| 2 + a));
        Ok(vec![self.g.transpose(made, &back)?])
    }

    /// `data`, `[size, ..]`, as `[size * extent, ..]` with `axis` of a row first, and its shape before the first two were one.
    fn joined(&mut self, data: Var, axis: usize, shape: &Shape) -> Result<(Var, Shape)> {
        let rank = shape.rank();
        let mut perm = vec![0, axis + 1];
        perm.extend((0..rank).filter(|a| *a != axis).map(|a| a + 1));
        let moved = self.g.transpose(data, &perm)?;
        let whole = self.g.ty(moved)?.shape.clone();
        let mut joined = vec![self.flat_indices(&Shape(vec![shape.0[axis].clone()]))?];
        joined.extend(whole.0[2..].iter().cloned());
        Ok((self.g.reshape(moved, Shape(joined))?, whole))
    }

    /// The number of all indices of this shape of one row.
    fn flat_indices(&self, shape: &Shape) -> Result<Dim> {
        let count = shape.0.iter().try_fold(self.size.clone(), |count, dim| count.times(dim));
        count.ok_or_else(|| GraphError::usage(self.g.scope(), format!("indices of shape {shape} cannot be counted")))
    }

    /// Indices into `extent` rows of each as indices into the rows of all; out of range they stay.
    fn offset(&mut self, indices: Var, ty: &Type, extent: &Dim) -> Result<Var> {
        let shape = self.batched(ty).shape;
        let g = &mut self.g;
        let indices = g.cast(indices, DType::I64)?;
        let extent = g.dim_value(extent)?;
        let row = g.iota(shape, 0, DType::I64)?;
        let first = g.mul(row, extent)?;
        let moved = g.add(indices, first)?;
        let zero = g.constant(DType::I64, 0.0)?;
        let (from, to) = (g.ge(indices, zero)?, g.lt(indices, extent)?);
        let is_within = g.and(from, to)?;
        let none = g.constant(DType::I64, -1.0)?;
        g.select(is_within, moved, none)
    }
}
