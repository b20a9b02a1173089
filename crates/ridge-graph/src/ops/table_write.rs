//! Changes of single elements of a table on the device, such as the tokens of a step in the history and what the host and the
//! steps change of the rows of running sequences, and of whole rows, such as states of a fixed size.

use super::require::{flat, takes, want};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Check, Rng, Sample};
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// The next version of a table, with `values[i]` at `places[i]`.
///
/// `table`: state `[rows, columns]` of any dtype, plain; `values`: of the same dtype, elements `[changes]` or whole rows
/// `[changes, columns]`; `places`: i32 `[changes]`, of elements counted through the table row by row, or of rows; gives the
/// state. Places out of range are dropped, and of equal ones the last value stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableWrite;

impl Composite for TableWrite {
    fn name(&self) -> &'static str {
        "table_write"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [table, values, places] = inputs else { return Err(takes("table, values and places", inputs)) };
        if !table.state || table.format.is_some() || table.shape.rank() != 2 {
            return Err(format!("table must be a plain state [rows, columns], got {table}"));
        }
        let changes = places.shape.last();
        let columns = &table.shape.0[1];
        if values.shape.rank() == 2 {
            want("values", values, table.dtype, [&changes, columns])?;
        } else {
            want("values", values, table.dtype, [&changes])?;
        }
        want("places", places, DType::I32, [&changes])?;
        Ok(vec![table.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        if g.ty(inputs[1])?.shape.rank() == 2 {
            let table = g.state_read(inputs[0])?;
            let table = g.scatter(table, inputs[2], inputs[1], 0)?;
            return Ok(vec![g.state_write(inputs[0], table)?]);
        }
        let shape = g.ty(inputs[0])?.shape.clone();
        let elements = flat(&shape.0).map_err(|why| GraphError::usage(g.scope(), why))?;
        let table = g.state_read(inputs[0])?;
        let table = g.reshape(table, Shape(vec![elements]))?;
        let table = g.scatter(table, inputs[2], inputs[1], 0)?;
        let table = g.reshape(table, shape)?;
        Ok(vec![g.state_write(inputs[0], table)?])
    }

    fn cost(&self, inputs: &[Type], _outputs: &[Type]) -> Cost {
        Cost { bytes_written: inputs[1].bytes(), ..Cost::moving(&inputs[1..], &[]) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }
}

impl Builder {
    /// A table with some elements or rows changed; see [`TableWrite`].
    ///
    /// # Errors
    /// When `table` is no plain state of two axes, `values` are not elements or rows of it, or `places` not i32, one for each.
    pub fn table_write(&mut self, table: Var, values: Var, places: Var) -> Result<Var> {
        Ok(self.composite(TableWrite, &[table, values, places])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let mut samples = Vec::new();
    for (rows, columns, changes) in [(3, 4, 0), (1, 1, 1), (5, 16, 17), (9, 8, 60)] {
        let mut places = super::paging::shuffled(rng, rows * columns);
        places.resize(changes, -1);
        if changes > 2 {
            places[changes / 2] = -1;
            places[changes - 1] = (rows * columns) as i64;
        }
        let places = Tensor::int(DType::I32, &[changes], places);
        // Tables of integers whatever the dtype of the registry's samples, and one of floats.
        for kind in [DType::I32, DType::I64] {
            samples.push(
                Sample::new(TableWrite)
                    .state(rng.integers(kind, &[rows, columns], 0, 50_000))
                    .input(rng.integers(kind, &[changes], 0, 50_000))
                    .input(places.clone())
                    .judged(Check::Exact),
            );
        }
        samples.push(
            Sample::new(TableWrite)
                .state(rng.normal(dtype, &[rows, columns]))
                .input(rng.normal(dtype, &[changes]))
                .input(places)
                .judged(Check::Exact),
        );
    }
    // Rows: of none, of a few among which one is not there and one is beyond the table, and wide ones.
    for (rows, columns, mut places) in
        [(3, 4, vec![]), (5, 7, vec![3, -1, 0, 5]), (9, 2056, super::paging::shuffled(rng, 9)[..6].to_vec())]
    {
        places.push(-1);
        let changes = places.len();
        samples.push(
            Sample::new(TableWrite)
                .state(rng.normal(dtype, &[rows, columns]))
                .input(rng.normal(dtype, &[changes, columns]))
                .input(Tensor::int(DType::I32, &[changes], places))
                .judged(Check::Exact),
        );
    }
    samples
}
