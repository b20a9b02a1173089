//! Where each token of a step belongs, derived on the device from tables that change little between steps, so that a
//! step can start before the host knows what the last one sampled.

use super::require::{takes, want};
use crate::cost::Cost;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Check, Rng, Sample};
use crate::shape::Shape;
use crate::types::Type;
use crate::why::Why;

/// Position of each token in its sequence and its slot in the cache.
///
/// `seq_ids`: i32 `[tokens]`, negative for padding; `query_start`: i32 `[sequences + 1]`, the first token of each
/// sequence; `lengths`: i32 `[sequences]`, tokens that are in the cache already; `block_table`: i32
/// `[sequences, blocks]`. Gives `(positions, slots)`, i32 `[tokens]` both:
///
/// ```text
/// position = lengths[seq] + t - query_start[seq]
/// slot = block_table[seq, position / block_size] * block_size + position % block_size
/// ```
///
/// Padding has position 0 and slot -1; a token whose block is -1 or beyond the table has slot -1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenLayout {
    /// Tokens of one block of the cache.
    pub block_size: usize,
}

impl Composite for TokenLayout {
    fn name(&self) -> &'static str {
        "token_layout"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [ids, starts, lengths, table] = inputs else {
            return Err(takes("seq_ids, query_start, lengths and block_table", inputs));
        };
        let (tokens, [sequences, blocks]) = (ids.shape.last(), &table.shape.0[..]) else {
            return Err(format!("block_table must be i32[sequences, blocks], got {table}"));
        };
        want("seq_ids", ids, DType::I32, [&tokens])?;
        want("query_start", starts, DType::I32, [sequences.clone() + 1])?;
        want("lengths", lengths, DType::I32, [sequences])?;
        want("block_table", table, DType::I32, [sequences, blocks])?;
        if self.block_size == 0 {
            return Err("block_size must be 1 or more, got 0".into());
        }
        Ok(vec![Type::tensor(DType::I32, [tokens]); 2])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [ids, starts, lengths, table] = inputs else { unreachable!("infer has counted the inputs") };
        let (tokens, blocks) = (g.ty(*ids)?.shape.last(), g.ty(*table)?.shape.last());
        let column = Shape(vec![tokens.clone(), Dim::from(1)]);
        let int = |g: &mut Builder, value: usize| g.constant(DType::I32, value as f64);
        let zero = int(g, 0)?;
        let size = int(g, self.block_size)?;
        let real = g.ge(*ids, zero)?;

        let length = g.gather(*lengths, *ids, 0)?;
        let start = g.gather(*starts, *ids, 0)?;
        let token = g.iota([&tokens], 0, DType::I32)?;
        let into = g.sub(token, start)?;
        let position = g.add(length, into)?;
        let position = g.select(real, position, zero)?;

        // The entry of the table row at position / block_size, plus one, so that none found is 0.
        let row = g.gather(*table, *ids, 0)?;
        let one = int(g, 1)?;
        let row = g.add(row, one)?;
        let nth = g.div(position, size)?;
        let nth = g.reshape(nth, column)?;
        let index = g.iota([&tokens, &blocks], 1, DType::I32)?;
        let hit = g.eq(index, nth)?;
        let found = g.select(hit, row, zero)?;
        let found = g.reduce_sum(found, 1)?;
        let found = g.reshape(found, [&tokens])?;

        let block = g.sub(found, one)?;
        let offset = g.rem(position, size)?;
        let first = g.mul(block, size)?;
        let slot = g.add(first, offset)?;
        let has_block = g.gt(found, zero)?;
        let kept = g.and(real, has_block)?;
        let none = g.constant(DType::I32, -1.0)?;
        Ok(vec![position, g.select(kept, slot, none)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        // One entry of each table a token.
        let tokens = outputs[0].bytes();
        Cost {
            vector_flops: outputs[0].shape.elements() * 6,
            bytes_read: inputs[0].bytes() + &(tokens.clone() * 3),
            bytes_written: tokens * 2,
            ..Cost::default()
        }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }
}

impl Builder {
    /// `(positions, slots)` of a step's tokens; see [`TokenLayout`].
    ///
    /// # Errors
    /// When a table is not i32 of the shape described there, or `block_size` is 0.
    pub fn token_layout(
        &mut self,
        seq_ids: Var,
        query_start: Var,
        lengths: Var,
        block_table: Var,
        block_size: usize,
    ) -> Result<(Var, Var)> {
        let out = self.composite(TokenLayout { block_size }, &[seq_ids, query_start, lengths, block_table])?;
        Ok((out[0], out[1]))
    }
}

pub(super) fn samples(rng: &mut Rng, _dtype: DType) -> Vec<Sample> {
    // (sequences as (cached, new), padding, block size, spare columns)
    type Case<'a> = (&'a [(usize, usize)], usize, usize, usize);
    let cases: [Case<'_>; 7] = [
        (&[], 0, 4, 0),
        (&[], 3, 4, 2),
        (&[(0, 1)], 0, 1, 0),
        (&[(7, 1), (16, 1), (0, 1)], 5, 8, 1),
        (&[(0, 17), (5, 0), (3, 30)], 2, 16, 3),
        (&[(0, 5), (100, 1), (15, 1), (16, 1), (31, 2)], 0, 16, 0),
        (&[(3, 3), (1, 64)], 0, 3, 2),
    ];
    let mut samples = Vec::new();
    for (sequences, padding, block_size, spare) in cases {
        let mut step = super::paging::PagedStep::new(rng, sequences, padding, block_size, spare);
        if let (crate::Data::Int(entries), true) = (&mut step.block_table.data, sequences.len() > 3) {
            // A block that is missing although a token needs it.
            entries[0] = -1;
        }
        samples.push(
            Sample::new(TokenLayout { block_size })
                .input(step.seq_ids)
                .input(step.query_start)
                .input(step.lengths)
                .input(step.block_table)
                .judged(Check::Exact),
        );
    }
    samples
}
