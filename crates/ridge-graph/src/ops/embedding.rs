//! Rows of a table by token id.

use super::require::{takes, want_weight};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::format;
use crate::graph::{Builder, Composite, Var};
use crate::sample::{Rng, Sample};
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;

/// Row `ids[t]` of `table`; an id out of range gives zeros.
///
/// `table`: `[vocab, hidden]` of any float dtype or stored in a format, `ids`: i32 `[tokens]`; gives
/// `[tokens, hidden]` of `dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embedding {
    /// Of the result.
    pub dtype: DType,
}

impl Composite for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [table, ids] = inputs else { return Err(takes("table and ids", inputs)) };
        want_weight("table", table, 2, "[vocab, hidden]")?;
        if ids.shape.rank() != 1 || ids.dtype != DType::I32 || !ids.is_plain() {
            return Err(format!("ids must be i32[tokens], got {ids}"));
        }
        if !self.dtype.is_float() {
            return Err(format!("the result's dtype must be float, got {}", self.dtype));
        }
        Ok(vec![Type::tensor(self.dtype, [&ids.shape.0[0], &table.shape.0[1]])])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        Ok(vec![g.decoded_rows(inputs[0], inputs[1], self.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        // Only the rows asked for are read, in the table's own storage.
        let rows = inputs[0].with_shape(outputs[0].shape.clone());
        Cost { bytes_read: rows.bytes() + &inputs[1].bytes(), ..Cost::moving(&[], outputs) }
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        vec![
            ShardingRule {
                inputs: vec![Placement::shard(1), Placement::Replicate],
                outputs: vec![Placement::shard(1)],
            },
            ShardingRule {
                inputs: vec![Placement::Replicate, Placement::shard(0)],
                outputs: vec![Placement::shard(0)],
            },
        ]
    }
}

impl Builder {
    /// Rows of `table` by `ids`, as `dtype`; see [`Embedding`].
    ///
    /// # Errors
    /// When `table` is not a float matrix, or `ids` is not an i32 vector.
    pub fn embedding(&mut self, table: Var, ids: Var, dtype: DType) -> Result<Var> {
        Ok(self.composite(Embedding { dtype }, &[table, ids])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    // (vocab, hidden, tokens)
    let cases = [(5, 8, 0), (1, 1, 1), (0, 4, 2), (10, 7, 20), (100, 33, 17), (1000, 64, 65)];
    let mut samples = Vec::new();
    for (vocab, hidden, tokens) in cases {
        // One id beyond each end of the table.
        let ids = rng.integers(DType::I32, &[tokens], -1, vocab as i64 + 1);
        samples.push(Sample::new(Embedding { dtype }).input(rng.normal(dtype, &[vocab, hidden])).input(ids));
    }
    let ids = rng.integers(DType::I32, &[9], 0, 40);
    let table = rng.normal(DType::BF16, &[40, 64]);
    samples.push(Sample::new(Embedding { dtype }).input(table).input(ids));
    for format in format::all() {
        let table = rng.normal(DType::BF16, &[10, format.granularity(1)[0] * 2]);
        let ids = rng.integers(DType::I32, &[5], -1, 11);
        samples.push(Sample::new(Embedding { dtype }).stored(&table, &format).input(ids));
    }
    samples
}
