//! What a step knows of its tokens: `kernels/tokens.cu`.

use ridge_graph::Function;
use ridge_graph::ops::{AcceptCandidates, TokenLayout};

use super::entry::CudaKernelEntry;
use crate::kernel::{CudaKernel, CudaKernelSpec, CudaSource, KernelText, grid, input, name, numbers, output};

pub(super) const TOKENS: KernelText<'_> = KernelText::new(include_str!("../../kernels/tokens.cu")).early_launch();

pub(super) const TABLE: KernelText<'_> =
    KernelText::new(concat!(include_str!("../../kernels/latest.cuh"), include_str!("../../kernels/tokens.cu")))
        .early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![
        CudaKernelEntry::new(
            "token_layout",
            "token_layout(seq_ids, query_start, lengths, block_table)",
            |_| true,
            layout,
        ),
        CudaKernelEntry::new(
            "accept_candidates",
            "accept_candidates(next, tokens, parents)",
            |_| true,
            accept_candidates,
        ),
        CudaKernelEntry::new("table_write", "table_write(table, values, places)", |_| true, table_write),
        CudaKernelEntry::new("embedding", "embedding(table, ids)", plain, embedding),
    ]
}

fn plain(body: &Function) -> bool {
    body.args[0].ty.format.is_none()
}

fn layout(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<TokenLayout>().ok_or("no token_layout in the group")?;
    let (tokens, table) = (spec.inputs[0].len(), &spec.inputs[3]);
    let source = CudaSource::new("token_layout", &[("LAYOUT", "1"), ("BLOCK", &op.block_size.to_string())], &TOKENS);
    let n = numbers(&[tokens, table.shape[0], table.shape[1]]);
    let args = vec![input(0), input(1), input(2), input(3), output(0), output(1), n];
    grid(source, [tokens.div_ceil(256), 1, 1], 256, args)
}

fn accept_candidates(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let op = spec.composite::<AcceptCandidates>().ok_or("no accept_candidates in the group")?;
    let source = CudaSource::new("accept_candidates", &[("ACCEPT", "1"), ("DEPTH", &op.depth.to_string())], &TOKENS);
    let lines = spec.inputs[0].len();
    // One block, since the path of a line may cross all others.
    let args = vec![input(0), input(1), input(2), output(0), numbers(&[lines])];
    grid(source, [usize::from(lines > 0), 1, 1], 256, args)
}

fn table_write(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    /// Threads of a block, and changes that it takes at most.
    const OWN: usize = 256;
    /// Elements that a block takes.
    const OF_BLOCK: usize = 2048;
    let (table, values) = (&spec.inputs[0], &spec.inputs[1]);
    let row = if values.shape.len() == 2 { table.shape[1] } else { 1 };
    let (places, changes) = (table.len() / row.max(1), values.shape[0]);
    let element = match spec.inputs[0].dtype.size_bytes() {
        8 => "unsigned long long",
        4 => "unsigned",
        2 => "unsigned short",
        _ => "unsigned char",
    };
    let of_block = (OF_BLOCK / row.max(1)).clamp(1, OWN);
    let args = vec![input(1), input(2), output(0), numbers(&[changes, places, row, of_block])];
    let defines = [("TABLE_WRITE", "1"), ("ELEMENT", element), ("OWN", &*OWN.to_string())];
    let source = CudaSource::new("table_write", &defines, &TABLE);
    grid(source, [changes.div_ceil(of_block), row.div_ceil(OF_BLOCK).max(1), 1], OWN as u32, args)
}

fn embedding(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let (table, ids, out) = (&spec.inputs[0], &spec.inputs[1], &spec.outputs[0]);
    let defines = [("TABLE", name(table.dtype)), ("D", name(out.dtype))];
    let args = vec![input(0), input(1), output(0), numbers(&table.shape)];
    grid(CudaSource::new("embedding", &defines, &TOKENS), [ids.len(), 1, 1], 256, args)
}
