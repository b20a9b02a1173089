//! What a step knows of its tokens: `kernels/tokens.cu`.

use ridge_graph::Function;
use ridge_graph::ops::TokenLayout;

use super::Entry;
use crate::kernel::{Kernel, Source, Spec, grid, input, name, numbers, output};

const TOKENS: &str = include_str!("../../kernels/tokens.cu");

pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "token_layout",
        pattern: "token_layout(seq_ids, query_start, lengths, block_table)",
        supports: |_| true,
        make: layout,
    },
    Entry { name: "history_write", pattern: "history_write(history, ids, slots)", supports: |_| true, make: history },
    Entry { name: "embedding", pattern: "embedding(table, ids)", supports: plain, make: embedding },
];

fn plain(body: &Function) -> bool {
    body.args[0].ty.format.is_none()
}

fn layout(spec: &Spec<'_>) -> Result<Kernel, String> {
    let op = spec.composite::<TokenLayout>().ok_or("no token_layout in the group")?;
    let (tokens, table) = (spec.inputs[0].len(), &spec.inputs[3]);
    let source = Source::new("token_layout", &[("LAYOUT", "1"), ("BLOCK", &op.block_size.to_string())], TOKENS);
    let n = numbers(&[tokens, table.shape[0], table.shape[1]]);
    let args = vec![input(0), input(1), input(2), input(3), output(0), output(1), n];
    grid(source, [tokens.div_ceil(256), 1, 1], 256, args)
}

fn history(spec: &Spec<'_>) -> Result<Kernel, String> {
    let (slots, tokens) = (spec.inputs[0].len(), spec.inputs[1].len());
    let args = vec![input(1), input(2), output(0), numbers(&[tokens, slots])];
    grid(Source::new("history_write", &[("HISTORY", "1")], TOKENS), [tokens, 1, 1], 256, args)
}

fn embedding(spec: &Spec<'_>) -> Result<Kernel, String> {
    let (table, ids, out) = (&spec.inputs[0], &spec.inputs[1], &spec.outputs[0]);
    let defines = [("TABLE", name(table.dtype)), ("D", name(out.dtype))];
    let args = vec![input(0), input(1), output(0), numbers(&table.shape)];
    grid(Source::new("embedding", &defines, TOKENS), [ids.len(), 1, 1], 256, args)
}
