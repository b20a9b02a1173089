//! Gradients of recurrences with a part of low rank and keys that decay alike, as those of recurrences without one, of two tokens for each:
//! `kernels/recurrence_gradient_rank.cu`, between launches of `kernels/recurrence_chunks.cu` and of the gradient without a part of low rank.

use super::chunks::{ChunkOperands, Chunked};
use super::extents::{Extents, LEAST};
use super::gradient::{ALIGNMENT, GradientOperands};
use crate::kernel::{
    CudaKernel, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, grid, input, numbers, output,
};

pub(in crate::prims) const RECURRENCE_GRADIENT_RANK: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../../kernels/compensated.cuh"),
    include_str!("../../../kernels/recurrence_gradient_rank.cu")
))
.early_launch();

/// Threads of a block, as the kernels have them.
const THREADS: u32 = 256;

/// Parts of scratch, one after another.
struct Parts(usize);

impl Parts {
    /// The next part, of so many elements of four bytes.
    fn take(&mut self, elements: usize) -> LaunchArg {
        let from = self.0;
        self.0 = (from + elements * size_of::<f32>()).next_multiple_of(ALIGNMENT);
        LaunchArg::Pointer(OperandSlot::Scratch, from)
    }
}

impl Extents {
    fn rank_launch(&self, entry: &str, args: &[&LaunchArg]) -> Result<Vec<DeviceAction>, String> {
        let [key, least] = [self.key, LEAST].map(|n| n.to_string());
        let source = CudaSource::new(entry, &[("KEY", &*key), ("LEAST", &*least)], &RECURRENCE_GRADIENT_RANK);
        let extents = numbers(&[self.tokens, self.rows, self.groups, self.heads, self.value]);
        let args = args.iter().map(|arg| (*arg).clone()).chain([extents]).collect();
        Ok(grid(source, [self.tokens, 1, 1], THREADS, args)?.actions)
    }

    /// The launches that take rows of at least [`LEAST`] tokens in chunks, and the most bytes of shared memory that one takes.
    pub(super) fn gradient_with_rank(&self) -> Result<(CudaKernel, u32), String> {
        let [q, k, v, decay, before, starts, erase, write] = [0, 1, 2, 3, 4, 5, 6, 7].map(input);
        let [dy, dafter] = [8, 9].map(input);
        let [dq, dk, dv, ddecay, dbefore, derase, dwrite] = [0, 1, 2, 3, 4, 5, 6].map(output);
        let of_heads = self.tokens * self.heads;
        let (keys, values) = (of_heads * self.key, of_heads * self.value);
        let states = self.rows * self.heads * self.key * self.value;

        let mut parts = Parts(0);
        let [u, w] = [(); 2].map(|()| parts.take(values));
        let [both_q, both_k] = [(); 2].map(|()| parts.take(2 * keys));
        let [both_v, both_dy] = [(); 2].map(|()| parts.take(2 * values));
        let (both_decay, both_starts) = (parts.take(2 * of_heads), parts.take(self.rows + 1));
        // What is read by the time that the rest is written.
        let mut first = Parts(parts.0);
        let (back_k, back_v) = (first.take(self.tokens * self.groups * self.key), first.take(values));
        let (back_decay, back_before) = (first.take(of_heads), first.take(states));
        let [back_erase, back_write] = [(); 2].map(|()| first.take(keys));
        let products = first.take(0);
        let [both_dq, both_dk] = [(); 2].map(|()| parts.take(2 * keys));
        let (both_dv, both_ddecay) = (parts.take(2 * values), parts.take(2 * of_heads));

        // States behind rows are not wanted; what is wanted there overwrites them.
        let forwards = ChunkOperands { states: products, y: u.clone(), after: dbefore.clone(), ..self.operands() };
        let (of_u, of_products, shared_in_turn) = self.in_turn(&forwards, [&erase, &write], true)?;
        let backwards = ChunkOperands {
            k: back_k.clone(),
            v: back_v.clone(),
            decay: back_decay.clone(),
            before: back_before.clone(),
            y: w.clone(),
            ..forwards
        };
        let (of_w, _, _) = self.in_turn(&backwards, [&back_erase, &back_write], true)?;
        let turn = self.rank_launch(
            "rank_backwards",
            &[
                &q,
                &decay,
                &starts,
                &erase,
                &write,
                &dy,
                &dafter,
                &back_k,
                &back_v,
                &back_decay,
                &back_before,
                &back_erase,
                &back_write,
            ],
        )?;
        let apart = self.rank_launch(
            "rank_apart",
            &[
                &q,
                &k,
                &v,
                &decay,
                &starts,
                &erase,
                &write,
                &dy,
                &u,
                &w,
                &both_q,
                &both_k,
                &both_v,
                &both_decay,
                &both_starts,
                &both_dy,
            ],
        )?;
        let together = self.rank_launch(
            "rank_together",
            &[
                &q,
                &starts,
                &write,
                &dy,
                &dafter,
                &u,
                &both_dq,
                &both_dk,
                &both_dv,
                &both_ddecay,
                &dq,
                &dk,
                &dv,
                &ddecay,
                &derase,
                &dwrite,
            ],
        )?;
        let of = GradientOperands {
            q: both_q,
            k: both_k,
            v: both_v,
            decay: both_decay,
            before,
            starts: both_starts,
            dy: both_dy,
            dafter,
            dq: both_dq,
            dk: both_dk,
            dv: both_dv,
            ddecay: both_ddecay,
            dbefore,
        };
        let both = Self { tokens: 2 * self.tokens, groups: self.heads, low_rank: false, ..*self };
        let mut chunked = Chunked::new(&both, 1);
        chunked.least = 2 * LEAST;
        let (gradient, shared, end) = chunked.gradient(&of, parts.0)?;
        let actions = [of_u, turn, of_w, apart, gradient, together].concat();
        let scratch = end.max(first.0 + of_products);
        Ok((CudaKernel { actions, scratch }, shared.max(shared_in_turn)))
    }
}
