//! Extents of a recurrence, and the launch that takes its rows token by token: `kernels/recurrence.cu`.

use crate::kernel::{CudaKernel, CudaSource, KernelText, LaunchArg, blocks, flag, input, numbers, output};

pub(in crate::prims) const RECURRENCE: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../../kernels/lines.cuh"),
    include_str!("../../../kernels/compensated.cuh"),
    include_str!("../../../kernels/recurrence.cu")
))
.early_launch();

/// Columns of the state and threads of a block, as the kernel has them.
pub(super) const COLUMNS: usize = 32;
pub(super) const THREADS: u32 = 128;

/// Tokens of a row from which on they are taken in chunks, as the kernels have it.
pub(crate) const LEAST: usize = 16;

/// Bytes of shared memory that a block may take on every GPU from Ampere on, less what sources declare.
pub(super) const SHARED_OF_ALL: u32 = 98 << 10;

/// A recurrence's extents.
#[derive(Clone, Copy)]
pub(super) struct Extents {
    pub(super) tokens: usize,
    pub(super) rows: usize,
    pub(super) groups: usize,
    pub(super) heads: usize,
    pub(super) key: usize,
    pub(super) value: usize,
    pub(super) low_rank: bool,
    /// The lines of the table that the states are in, if they are not in the order of rows.
    pub(super) lines: Option<usize>,
    /// Are operands those of `gated_recurrence` in bf16, over lines of a table?
    pub(super) gated: bool,
}

impl Extents {
    pub(super) fn numbers(&self) -> LaunchArg {
        let lines = self.lines.unwrap_or(0);
        numbers(&[self.tokens, self.rows, self.groups, self.heads, self.value, lines])
    }

    /// Whether states are lines of a table, as texts have it; and the input that says which. Where they are not, any address will
    /// do.
    pub(super) fn of_lines(&self) -> ((&'static str, &'static str), LaunchArg) {
        let nth = if self.gated { 6 } else { 5 };
        (("LINES", flag(self.lines.is_some())), input(if self.lines.is_some() { nth } else { 0 }))
    }

    /// The inputs as the kernels take them: without a part of low rank its operands are not read, and weights of tokens are in place of the
    /// first of them.
    pub(super) fn inputs(&self) -> [usize; 8] {
        if self.gated {
            return [0, 1, 2, 4, 5, 7, 3, 3];
        }
        let starts = if self.lines.is_some() { 6 } else { 5 };
        let of_rank = if self.low_rank { [starts + 1, starts + 2] } else { [0, 0] };
        [0, 1, 2, 3, 4, starts, of_rank[0], of_rank[1]]
    }

    /// The launch that takes the rows of fewer than `least` tokens, token by token.
    pub(super) fn token_by_token(&self, decays: usize, least: usize) -> CudaKernel {
        let [key, decays, least] = [self.key, decays, least].map(|n| n.to_string());
        let low_rank = flag(self.low_rank);
        let (of_lines, lines) = self.of_lines();
        let mut defines =
            vec![("KEY", &*key), ("DECAYS", &*decays), ("LOW_RANK", low_rank), ("LEAST", &*least), of_lines];
        if self.gated {
            defines.extend([("GATED", "1"), ("OPERAND", "BF16")]);
        }
        let args = self.inputs().map(input).into_iter().chain([lines, output(0), output(1), self.numbers()]).collect();
        let pieces = self.rows * self.heads * self.value.div_ceil(COLUMNS) + 1;
        blocks(CudaSource::new("recurrence", &defines, &RECURRENCE), pieces, THREADS, args)
    }
}
