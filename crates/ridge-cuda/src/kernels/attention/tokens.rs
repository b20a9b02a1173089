//! Attention of each token for itself, in spans of positions: `kernels/attention.cu`, which also puts spans together.

use super::super::rope;
use super::{ATTENTION, AttentionCall, FEW, SPANS, source, spans};
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, LaunchArg, OperandSlot, grid, input, name, numbers, output,
};

impl AttentionCall<'_> {
    /// Positions that a token sees at most.
    pub(super) fn visible(&self) -> usize {
        (self.columns * self.block).min(self.op.window.unwrap_or(usize::MAX)).min(self.selected.unwrap_or(usize::MAX))
    }

    /// `source` over `across` blocks in each of `spans` spans of the positions, which leave what they make in scratch memory
    /// behind the first `used` bytes.
    pub(super) fn in_spans(
        &self,
        source: std::sync::Arc<CudaSource>,
        q: OperandSlot,
        used: usize,
        across: [usize; 2],
        spans: usize,
    ) -> Result<CudaKernel, String> {
        let n = numbers(&[self.tokens, self.heads, self.columns, self.blocks, spans]);
        let mut args = self.inputs(q);
        args.extend([
            output(0),
            LaunchArg::Pointer(OperandSlot::Scratch, used),
            LaunchArg::Float(self.op.scale as f32),
            n,
        ]);
        grid(source, [across[0], across[1], spans], 256, args)
    }

    /// `kernel`, and what puts its spans together if there are several.
    pub(super) fn join(
        &self,
        mut kernel: CudaKernel,
        used: usize,
        spans: usize,
        defines: &[(&'static str, String)],
    ) -> Result<CudaKernel, String> {
        if spans > 1 {
            let rows = self.tokens * self.heads;
            let numbers = numbers(&[self.tokens, self.heads, spans]);
            let mut args = vec![LaunchArg::Pointer(OperandSlot::Scratch, used), output(0)];
            args.extend(self.op.sinks.then(|| input(self.first + 3 + self.more())));
            args.push(numbers);
            let threads = self.dim.next_multiple_of(32).min(1024) as u32;
            let source = source("attention_join", &[defines, &self.of_spans(1)].concat(), &ATTENTION);
            kernel.actions.extend(grid(source, [rows, 1, 1], threads, args)?.actions);
            kernel.scratch = used + rows * spans * (self.dim + 2) * 4;
        }
        Ok(kernel)
    }

    /// What [`ATTENTION`] defines besides: whether it joins, and how it reads.
    fn of_spans(&self, joins: u8) -> Vec<(&'static str, String)> {
        let [wide, lanes] = self.lanes();
        vec![
            ("CACHE", name(self.cache).into()),
            ("SIDES", self.sides.to_string()),
            ("WIDE", wide.to_string()),
            ("LANES", lanes.to_string()),
            ("SPANS", SPANS.to_string()),
            ("JOIN", joins.to_string()),
        ]
    }

    /// Elements of a load of a lane of [`ATTENTION`], and lanes of a position.
    fn lanes(&self) -> [usize; 2] {
        let size = self.cache.size_bytes();
        let wide = [8, 4, 2, 1].into_iter().find(|w| self.dim.is_multiple_of(*w) && w * size <= 16).unwrap_or(1);
        [wide, self.dim.div_ceil(wide).next_power_of_two().min(32)]
    }

    /// Each token for itself, in any dtype.
    pub(super) fn tokens(&self, spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
        // Neither a norm nor a product is made on the way.
        let (mut kernel, q, rope) = match self.rope.filter(|_| !self.normed && self.of_latents.is_none()) {
            Some(rope) => (CudaKernel::default(), OperandSlot::Input(0), Some(rope)),
            None => self.rotated(spec).map(|(kernel, q)| (kernel, q, None))?,
        };
        let share = self.heads / self.keys;
        let [_, lanes] = self.lanes();
        // Shared memory holds the values of all groups: 36 kB at most.
        let most = 36_864 / (256 / lanes * (self.dim + 2) * 4);
        // A block for each head while there are few; then heads that share a key share its reading.
        let alone = self.tokens * self.heads <= FEW;
        let held = [4, 2].into_iter().filter(|_| !alone).find(|n| *n <= most && *n <= share).unwrap_or(1);
        let parts = share.div_ceil(held);
        // As many as fill the GPU, whatever the table's width: each token's positions are shared out on the device.
        let spans = spans(self.tokens * self.keys * parts, self.visible());
        let mut defines = self.defines();
        defines.extend(rope::rotation(rope));
        defines.extend(rope::no_norm().0.map(|(name, value)| (name, value.to_owned())));
        defines.push(("HEADS", held.to_string()));
        let source = source("attention", &[&defines[..], &self.of_spans(0)].concat(), &ATTENTION);
        let across = [self.tokens, self.keys * parts];
        let used = kernel.scratch.next_multiple_of(16);
        kernel.actions.extend(self.in_spans(source, q, used, across, spans)?.actions);
        self.join(kernel, used, spans, &defines)
    }
}
