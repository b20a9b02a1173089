//! What all ways to compute attention share: its extents, which tokens go together, and where their keys and values lie.

use std::ops::Range;

use ridge_graph::DType;

use crate::io::KernelIo;

/// Runs `$body` with `$t` as the element type of a cache of `$dtype`.
macro_rules! with_stored {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            ridge_graph::DType::I8 => {
                type $t = i8;
                $body
            }
            float => $crate::simd::with_element!(float, $t => $body),
        }
    };
}
pub(in crate::kernels::attention) use with_stored;

/// Positions of a span.
pub(in crate::kernels::attention) const SPAN: usize = 512;

/// Tokens of one sequence that share the reading of keys and values.
pub(in crate::kernels::attention) const TOKENS: usize = 8;

pub(in crate::kernels::attention) struct AttentionKernel {
    pub(in crate::kernels::attention) scale: f32,
    pub(in crate::kernels::attention) window: Option<usize>,
    /// Do windows begin at multiples of their length?
    pub(in crate::kernels::attention) chunked: bool,
    pub(in crate::kernels::attention) softcap: Option<f32>,
    /// The inputs with the slopes and the sinks of heads.
    pub(in crate::kernels::attention) slopes: Option<usize>,
    pub(in crate::kernels::attention) sinks: Option<usize>,
    pub(in crate::kernels::attention) tokens: usize,
    pub(in crate::kernels::attention) heads: usize,
    pub(in crate::kernels::attention) kv_heads: usize,
    /// Sides of the cache: keys and values, or one that is both.
    pub(in crate::kernels::attention) sides: usize,
    pub(in crate::kernels::attention) dim: usize,
    pub(in crate::kernels::attention) dtype: DType,
    pub(in crate::kernels::attention) blocks: usize,
    pub(in crate::kernels::attention) block_size: usize,
    pub(in crate::kernels::attention) cache: DType,
    /// Are there scales of the cache's rows? Those of i8 always have them.
    pub(in crate::kernels::attention) scaled: bool,
    pub(in crate::kernels::attention) sequences: usize,
    /// Columns of the block table.
    pub(in crate::kernels::attention) table: usize,
    /// Tokens of a piece.
    pub(in crate::kernels::attention) together: usize,
    /// Is it computed on matrix tiles?
    #[cfg(target_arch = "x86_64")]
    pub(in crate::kernels::attention) on_tiles: bool,
}

/// Tokens of one sequence at successive positions.
pub(in crate::kernels::attention) struct TokenRows {
    pub(in crate::kernels::attention) tokens: Range<usize>,
    pub(in crate::kernels::attention) sequence: usize,
    /// Where the keys end that the first of them sees; those of each end one later than those of the one before.
    pub(in crate::kernels::attention) seen: usize,
    /// Position of the first of them.
    pub(in crate::kernels::attention) position: usize,
}

impl TokenRows {
    /// Where the keys end that the last of them sees.
    pub(in crate::kernels::attention) fn most(&self) -> usize {
        if self.seen == 0 { 0 } else { self.seen + self.tokens.len() - 1 }
    }
}

impl AttentionKernel {
    /// What a query and a key take.
    pub(in crate::kernels::attention) fn nanos_per_pair(&self) -> f64 {
        #[cfg(target_arch = "x86_64")]
        if self.on_tiles {
            return 1.0 + self.dim as f64 * 0.01;
        }
        1.0 + self.dim as f64 * 0.05
    }

    pub(in crate::kernels::attention) fn group(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(0)
    }

    /// The first of `tokens`, with those after it that follow it in its sequence.
    pub(in crate::kernels::attention) fn rows(&self, io: &KernelIo<'_>, tokens: Range<usize>) -> TokenRows {
        let (ids, positions) = (io.input::<i32>(3), io.input::<i32>(4));
        let first = tokens.start;
        let follows = |t: usize| {
            ids[t] == ids[first] && i64::from(positions[t]) == i64::from(positions[first]) + (t - first) as i64
        };
        let end = (first + 1..tokens.end).find(|t| !follows(*t)).unwrap_or(tokens.end);
        let keys = self.table * self.block_size;
        match (usize::try_from(ids[first]), usize::try_from(positions[first])) {
            // Beyond the table there are no keys, so what is there sees as much as the next, not one more.
            (Ok(sequence), Ok(position)) if sequence < self.sequences && position + (end - first) <= keys => {
                TokenRows { tokens: first..end, sequence, seen: position + 1, position }
            }
            (Ok(sequence), Ok(position)) if sequence < self.sequences => {
                TokenRows { tokens: first..first + 1, sequence, seen: keys.min(position + 1), position }
            }
            _ => TokenRows { tokens: first..first + 1, sequence: 0, seen: 0, position: 0 },
        }
    }

    /// Calls `f` for each run of `span`'s positions that lie together: their indices in the span, and the block and
    /// offset of the first. There is no block where the table has none.
    pub(in crate::kernels::attention) fn runs(
        &self,
        io: &KernelIo<'_>,
        sequence: usize,
        span: &Range<usize>,
        mut f: impl FnMut(Range<usize>, Option<(usize, usize)>),
    ) {
        let table = &io.input::<i32>(2)[sequence * self.table..][..self.table];
        let (mut nth, mut offset) = (span.start / self.block_size, span.start % self.block_size);
        let mut position = span.start;
        while position < span.end {
            let end = (position + self.block_size - offset).min(span.end);
            let block = usize::try_from(table[nth]).ok().filter(|b| *b < self.blocks);
            f(position - span.start..end - span.start, block.map(|b| (b, offset)));
            (position, nth, offset) = (end, nth + 1, 0);
        }
    }

    /// The row of key (side 0) or value (side 1) `offset` of `block`.
    fn row(&self, head: usize, side: usize, (block, offset): (usize, usize)) -> usize {
        ((block * self.sides + side.min(self.sides - 1)) * self.kv_heads + head) * self.block_size + offset
    }

    /// Heads of the cache between a key and its value.
    #[cfg(target_arch = "x86_64")]
    pub(in crate::kernels::attention) fn heads_to_values(&self) -> usize {
        (self.sides - 1) * self.kv_heads
    }

    /// Elements of the cache from key (side 0) or value (side 1) `offset` of `block` on.
    pub(in crate::kernels::attention) fn slab<'a, T>(
        &self,
        cache: &'a [T],
        head: usize,
        side: usize,
        (block, offset): (usize, usize),
    ) -> &'a [T] {
        &cache[self.row(head, side, (block, offset)) * self.dim..]
    }

    /// The scales of keys (side 0) or values (side 1) from `offset` of `block` on, where the cache is of codes.
    pub(in crate::kernels::attention) fn scales<'a>(
        &self,
        io: &KernelIo<'a>,
        head: usize,
        side: usize,
        at: (usize, usize),
    ) -> Option<&'a [f32]> {
        self.scaled.then(|| &io.input::<f32>(5)[self.row(head, side, at)..])
    }

    /// The first position that token `nth` of `rows` sees.
    pub(in crate::kernels::attention) fn start(&self, rows: &TokenRows, nth: usize) -> usize {
        let position = rows.position + nth;
        match self.window {
            None => 0,
            Some(window) if self.chunked => position - position % window,
            Some(window) => (position + 1).saturating_sub(window),
        }
    }
}
