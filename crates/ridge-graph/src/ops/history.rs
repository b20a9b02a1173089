//! The tokens of running sequences, kept in the cache's blocks beside their keys and values: whoever needs to know what
//! a sequence said finds it on the device, under the same block table, however it came there.

use super::require::{flat, want, want_floats};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::graph::{Builder, Var};
use crate::sample::Rng;
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// Requires a history and gives `[blocks, block_size]`.
pub(super) fn want_history(history: &Type) -> Result<[&Dim; 2], Why> {
    match &history.shape.0[..] {
        [blocks, block_size] if history.state && history.dtype == DType::I32 && block_size.as_const() != Some(0) => {
            Ok([blocks, block_size])
        }
        _ => Err(format!("history must be an i32 state [blocks, block_size], got {history}")),
    }
}

/// Requires logits `[sequences, vocab]` and what finds their rows' history: a history, an i32 `[sequences, blocks]` table
/// and i32 `[sequences]` lengths. Gives the extents of the logits.
pub(super) fn want_rows<'a>(
    logits: &'a Type,
    history: &Type,
    table: &Type,
    lengths: &Type,
) -> Result<(&'a Dim, Dim), Why> {
    want_floats("logits", logits, 2, "[sequences, vocab]")?;
    let rows = &logits.shape.0[0];
    want_history(history)?;
    want("block_table", table, DType::I32, [rows.clone(), table.shape.last()])?;
    want("lengths", lengths, DType::I32, [rows])?;
    Ok((rows, logits.shape.last()))
}

/// The tokens of each row, for decompositions.
pub(super) struct History {
    /// I32 `[sequences, blocks * block_size]`: the tokens in order, -1 behind the last.
    pub(super) ids: Var,
    /// I32 of that shape: the position of each.
    pub(super) positions: Var,
    /// That shape.
    pub(super) shape: Shape,
    /// The lengths as i32 `[sequences, 1]`.
    pub(super) lengths: Var,
}

impl History {
    /// Reads the first `lengths` tokens of each row of `table`.
    pub(super) fn read(g: &mut Builder, history: Var, table: Var, lengths: Var) -> Result<Self> {
        let block_size = g.ty(history)?.shape.last();
        let [rows, blocks] = &g.ty(table)?.shape.0.clone()[..] else { unreachable!("a table has two axes") };
        let wide = flat(&[blocks.clone(), block_size]).map_err(|why| GraphError::usage(g.scope(), why))?;
        let shape = Shape(vec![rows.clone(), wide]);
        let history = g.state_read(history)?;
        let ids = g.gather(history, table, 0)?;
        let ids = g.reshape(ids, shape.clone())?;
        let positions = g.iota(shape.clone(), 1, DType::I32)?;
        let lengths = g.reshape(lengths, Shape(vec![rows.clone(), 1.into()]))?;
        let there = g.lt(positions, lengths)?;
        let none = g.constant(DType::I32, -1.0)?;
        let ids = g.select(there, ids, none)?;
        Ok(Self { ids, positions, shape, lengths })
    }
}

/// Where each of `ids`, of `shape` `[sequences, ..]`, lies among rows of `vocab` one after another; -1 where `keep` does
/// not hold or there is no such token.
pub(super) fn places(g: &mut Builder, ids: Var, keep: Option<Var>, shape: &Shape, vocab: &Dim) -> Result<Var> {
    let vocab = g.dim_value(vocab)?;
    let vocab = g.cast(vocab, DType::I32)?;
    let zero = g.constant(DType::I32, 0.0)?;
    let none = g.constant(DType::I32, -1.0)?;
    let row = g.iota(shape.clone(), 0, DType::I32)?;
    let begin = g.mul(row, vocab)?;
    let place = g.add(begin, ids)?;
    let (above, below) = (g.ge(ids, zero)?, g.lt(ids, vocab)?);
    let mut keep_all = g.and(above, below)?;
    if let Some(keep) = keep {
        keep_all = g.and(keep_all, keep)?;
    }
    g.select(keep_all, place, none)
}

/// `sequences * vocab`, by which rows lie one after another.
pub(super) fn flat_logits(g: &Builder, rows: &Dim, vocab: &Dim) -> Result<Dim> {
    flat(&[rows.clone(), vocab.clone()]).map_err(|why| GraphError::usage(g.scope(), why))
}

impl Builder {
    /// The history with a step's tokens: see [`super::TableWrite`].
    ///
    /// # Errors
    /// When `history` is not one, or `token_ids` and `slots` are not i32 vectors of one length.
    pub fn history_write(&mut self, history: Var, token_ids: Var, slots: Var) -> Result<Var> {
        want_history(self.ty(history)?).map_err(|why| GraphError::usage(self.scope(), why))?;
        self.table_write(history, token_ids, slots)
    }
}

/// A history of `sequences` tokens each, of a small vocabulary so that they repeat; what the ops over it take after the
/// logits: history, table, lengths.
pub(super) fn sampled(rng: &mut Rng, sequences: &[usize], vocab: usize) -> [Tensor; 3] {
    let block_size = 8;
    let new: Vec<(usize, usize)> = sequences.iter().map(|n| (0, *n)).collect();
    let step = super::paging::PagedStep::new(rng, &new, 0, block_size, 1);
    let lengths = sequences.iter().map(|n| *n as i64).collect();
    // Words of a few tokens said again and again, with slips.
    let period = 1 + vocab.min(5);
    let word = rng.integers(DType::I32, &[period], 0, vocab as i64);
    let mut history = rng.integers(DType::I32, &[step.blocks, block_size], 0, vocab as i64);
    for (row, length) in sequences.iter().enumerate() {
        for position in 0..*length {
            let block = step.block_table.ints()[row * step.block_table.shape[1] + position / block_size] as usize;
            if rng.below(6) > 0 {
                let said = word.ints()[position % period];
                if let crate::Data::Int(ids) = &mut history.data {
                    ids[block * block_size + position % block_size] = said;
                }
            }
        }
    }
    [history, step.block_table, Tensor::int(DType::I32, &[sequences.len()], lengths)]
}
