//! Gradients of recurrences: rows of many tokens in chunks, all at once, by `kernels/recurrence_gradient_keys.cu` and the launches of
//! `kernels/recurrence_parallel.cu`, forwards and mirrored; the others token by token, by `kernels/recurrence_gradient.cu`.

use super::chunks::{CHUNK, ChunkOperands, Chunked};
use super::extents::{Extents, LEAST, SHARED_OF_ALL, THREADS};
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, blocks, flag, input,
    numbers, output,
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

/// Values of a head up to which chunks would mostly be padding, and err more than tokens one by one.
const FEW_VALUES: usize = 8;

/// Bytes of shared memory of `recurrence_gradient_keys`: products of tokens, those of a block of 16 again, and four matrices in three parts of 16
/// bits.
const SHARED: usize = CHUNK * (CHUNK + 4 + 20) * size_of::<f32>() + 4 * 3 * CHUNK * (COLUMNS + 8) * size_of::<u16>();

/// Bytes that scratch is divided by.
pub(super) const ALIGNMENT: usize = 256;

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
    let long = rows > 0 && tokens + 1 >= rows + LEAST && value > FEW_VALUES;
    let chunks = long && (!low_rank || decays == 1);
    if !chunks {
        return Ok(all.gradient_by_token(decays, i32::MAX as usize));
    }
    let (mut kernel, shared) = if low_rank { all.gradient_with_rank()? } else { all.gradient_at_once(decays)? };
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

/// The operands of a gradient without a part of low rank.
pub(super) struct GradientOperands {
    pub(super) q: LaunchArg,
    pub(super) k: LaunchArg,
    pub(super) v: LaunchArg,
    pub(super) decay: LaunchArg,
    pub(super) before: LaunchArg,
    pub(super) starts: LaunchArg,
    pub(super) dy: LaunchArg,
    pub(super) dafter: LaunchArg,
    pub(super) dq: LaunchArg,
    pub(super) dk: LaunchArg,
    pub(super) dv: LaunchArg,
    pub(super) ddecay: LaunchArg,
    pub(super) dbefore: LaunchArg,
}

impl Chunked<'_> {
    /// The launches of the gradient, the most bytes of shared memory that one takes, and the end of the scratch that they take from `from` on.
    pub(super) fn gradient(
        &self,
        of: &GradientOperands,
        from: usize,
    ) -> Result<(Vec<DeviceAction>, u32, usize), String> {
        let bytes = self.bytes().next_multiple_of(ALIGNMENT);
        let scratch = |nth| LaunchArg::Pointer(OperandSlot::Scratch, from + nth * bytes);
        // Without lines and weights any address will do for them. The states behind rows are not wanted; what is wanted there
        // overwrites them.
        let operands = |mirrored: bool| ChunkOperands {
            q: if mirrored { &of.k } else { &of.q }.clone(),
            k: if mirrored { &of.q } else { &of.k }.clone(),
            v: if mirrored { &of.dy } else { &of.v }.clone(),
            weight: of.q.clone(),
            decay: of.decay.clone(),
            before: if mirrored { &of.dafter } else { &of.before }.clone(),
            starts: of.starts.clone(),
            lines: of.q.clone(),
            states: scratch(usize::from(mirrored)),
            y: of.dv.clone(),
            after: of.dbefore.clone(),
            mirrored,
        };
        let (forwards, mirrored) = (operands(false), operands(true));
        let (states, shared) = self.states(&forwards)?;
        let (cotangents, _) = self.states(&mirrored)?;
        let [q, k, v, decay, starts, dy] = [&of.q, &of.k, &of.v, &of.decay, &of.starts, &of.dy];
        let keys = self.launch(
            ("recurrence_gradient_keys", &RECURRENCE_GRADIENT_KEYS),
            [self.chunks * self.all.heads, 32 * WARPS],
            [WARPS, COLUMNS],
            (false, SHARED),
            &[q, k, v, decay, starts, dy, &forwards.states, &mirrored.states, &of.dq, &of.dk, &of.ddecay],
        )?;
        let (values, shared_for_values) = self.outputs(&mirrored)?;
        let shared = shared.max(shared_for_values).max(SHARED as u32);
        Ok(([states, cotangents, keys, values].concat(), shared, from + 2 * bytes))
    }
}

impl Extents {
    /// The launches that take rows of at least [`LEAST`] tokens in chunks, all at once, and the most bytes of shared memory that one takes.
    fn gradient_at_once(&self, decays: usize) -> Result<(CudaKernel, u32), String> {
        let [q, k, v, decay, before, starts, dy, dafter] = [0, 1, 2, 3, 4, 5, 6, 7].map(input);
        let [dq, dk, dv, ddecay, dbefore] = [0, 1, 2, 3, 4].map(output);
        let of = GradientOperands { q, k, v, decay, before, starts, dy, dafter, dq, dk, dv, ddecay, dbefore };
        let (actions, shared, scratch) = Chunked::new(self, decays).gradient(&of, 0)?;
        Ok((CudaKernel { actions, scratch }, shared))
    }

    /// The launch that takes the rows of fewer than `least` tokens, token by token.
    fn gradient_by_token(&self, decays: usize, least: usize) -> CudaKernel {
        let [key, decays, below] = [self.key, decays, least].map(|n| n.to_string());
        let low_rank = flag(self.low_rank);
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
