//! Gradients of recurrences: rows of many tokens in chunks, all at once, by `kernels/recurrence_gradient_keys.cu` and the launches of
//! `kernels/recurrence_parallel.cu`, forwards and mirrored; the others, and those with a part of low rank, token by token, by
//! `kernels/recurrence_gradient.cu`.

use super::chunks::{CHUNK, ChunkOperands, Chunked};
use super::extents::{Extents, LEAST, SHARED_OF_ALL, THREADS};
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, blocks, input, numbers,
    output,
};

pub(in crate::prims) const RECURRENCE_GRADIENT: KernelText<'_> =
    KernelText::new(include_str!("../../../kernels/recurrence_gradient.cu"));
pub(in crate::prims) const RECURRENCE_GRADIENT_KEYS: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../../kernels/compensated.cuh"),
    include_str!("../../../kernels/chunk_numbers.cuh"),
    include_str!("../../../kernels/recurrence_blocks.cuh"),
    include_str!("../../../kernels/recurrence_gradient_keys.cu")
))
.with_tiles()
.early_launch();

/// Keys of a head at most: a thread of the kernel that goes token by token keeps a quarter of a column of two states in registers.
const MAX_KEY: usize = 256;

/// Blocks at most, each of which has states in scratch.
const MAX_BLOCKS_WITH_STATES: usize = 264;

/// Warps of a block of `recurrence_gradient_keys`, and values that it takes at once.
const WARPS: usize = 8;
const COLUMNS: usize = 32;

/// Bytes of shared memory of `recurrence_gradient_keys`: products of tokens, those of a block of 16 again, and four matrices in three parts of 16
/// bits.
const SHARED: usize = CHUNK * (CHUNK + 4 + 20) * size_of::<f32>() + 4 * 3 * CHUNK * (COLUMNS + 8) * size_of::<u16>();

/// Bytes that scratch is divided by.
const ALIGNMENT: usize = 256;

pub(in crate::prims) fn recurrence_gradient(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let [q, _, v, decay, state, ..] = &spec.inputs[..] else { return Err("takes eight inputs or ten".into()) };
    let (tokens, groups, key) = (q.shape[0], q.shape[1], q.shape[2]);
    let (rows, heads, value) = (state.shape[0], v.shape[1], v.shape[2]);
    if key > MAX_KEY {
        return Err(format!("has {key} keys a head, at most {MAX_KEY} for its gradient"));
    }
    if key * heads * value == 0 {
        return Ok(CudaKernel::default());
    }
    let low_rank = spec.inputs.len() == 10;
    let all = Extents { tokens, rows, groups, heads, key, value, low_rank, lines: None, gated: false };
    let decays = decay.shape[2];
    // Where all rows have a token or more, one may have enough of them.
    if low_rank || rows == 0 || tokens + 1 < rows + LEAST {
        return Ok(all.gradient_by_token(decays, i32::MAX as usize));
    }
    let (mut kernel, shared) = all.gradient_at_once(decays)?;
    let few = all.gradient_by_token(decays, LEAST);
    kernel.actions.extend(few.actions);
    kernel.scratch = kernel.scratch.max(few.scratch);
    if shared > SHARED_OF_ALL {
        let otherwise = all.gradient_by_token(decays, i32::MAX as usize);
        kernel.scratch = kernel.scratch.max(otherwise.scratch);
        let actions = DeviceAction::ByArch { arch: "sm_90a", actions: kernel.actions, otherwise: otherwise.actions };
        kernel.actions = vec![actions];
    }
    Ok(kernel)
}

impl Extents {
    /// The launches that take rows of at least [`LEAST`] tokens in chunks, all at once, and the most bytes of shared memory that one takes.
    fn gradient_at_once(&self, decays: usize) -> Result<(CudaKernel, u32), String> {
        let chunked = Chunked::new(self, decays);
        let bytes = chunked.bytes().next_multiple_of(ALIGNMENT);
        let [q, k, v, decay, before, starts, _, _] = self.inputs().map(input);
        let [dy, dafter] = [6, 7].map(input);
        let lines = self.of_lines().1;
        let [states, cotangents] = [0, bytes].map(|offset| LaunchArg::Pointer(OperandSlot::Scratch, offset));
        // Without lines and weights any address will do for them.
        let forwards = ChunkOperands {
            q: q.clone(),
            k: k.clone(),
            v: v.clone(),
            weight: q.clone(),
            decay: decay.clone(),
            before,
            starts: starts.clone(),
            lines: lines.clone(),
            states: states.clone(),
            y: output(2),
            // The states behind rows are not wanted; what is wanted there overwrites them.
            after: output(4),
            mirrored: false,
        };
        let mirrored = ChunkOperands {
            q: k.clone(),
            k: q.clone(),
            v: dy.clone(),
            weight: q.clone(),
            decay: decay.clone(),
            before: dafter,
            starts: starts.clone(),
            lines,
            states: cotangents.clone(),
            y: output(2),
            after: output(4),
            mirrored: true,
        };
        let [dq, dk, ddecay] = [0, 1, 3].map(output);
        let (of_states, shared) = chunked.states(&forwards)?;
        let (of_cotangents, _) = chunked.states(&mirrored)?;
        let keys = chunked.launch(
            ("recurrence_gradient_keys", &RECURRENCE_GRADIENT_KEYS),
            [chunked.chunks * self.heads, 32 * WARPS],
            [WARPS, COLUMNS],
            (false, SHARED),
            &[&q, &k, &v, &decay, &starts, &dy, &states, &cotangents, &dq, &dk, &ddecay],
        )?;
        let (of_values, shared_for_values) = chunked.outputs(&mirrored)?;
        let actions = [of_states, of_cotangents, keys, of_values].concat();
        let shared = shared.max(shared_for_values).max(SHARED as u32);
        Ok((CudaKernel { actions, scratch: 2 * bytes }, shared))
    }

    /// The launch that takes the rows of fewer than `least` tokens, token by token.
    fn gradient_by_token(&self, decays: usize, least: usize) -> CudaKernel {
        let [key, decays, below] = [self.key, decays, least].map(|n| n.to_string());
        let low_rank = if self.low_rank { "1" } else { "0" };
        let defines = [("KEY", &*key), ("DECAYS", &*decays), ("LOW_RANK", low_rank), ("LEAST", &*below)];
        // Without a part of low rank its operands are neither read nor written.
        let (of_rank, to_rank, dy) = if self.low_rank { ([6, 7], [5, 6], 8) } else { ([0, 0], [0, 0], 6) };
        let inputs = (0..6).chain(of_rank).chain([dy, dy + 1]).map(input);
        let longest = self.tokens.min(least);
        let stretch = (1..).find(|n| n * n >= longest).unwrap_or(1).max(1);
        let grid = (self.rows * self.heads + 1).min(MAX_BLOCKS_WITH_STATES);
        let scratch = grid * 2 * stretch * self.key.div_ceil(4) * THREADS as usize * size_of::<f32>();
        let args = inputs.chain((0..5).chain(to_rank).map(output)).chain([LaunchArg::Pointer(OperandSlot::Scratch, 0)]);
        let extents = [self.tokens, self.rows, self.groups, self.heads, self.value, stretch];
        let args = args.chain([numbers(&extents)]).collect();
        let source = CudaSource::new("recurrence_gradient", &defines, &RECURRENCE_GRADIENT);
        CudaKernel { scratch, ..blocks(source, grid, THREADS, args) }
    }
}
