//! Logits as rows ask for them: `kernels/adjust.cu`.

use ridge_graph::ops::Dry;

use super::entry::CudaKernelEntry;
use crate::kernel::{CudaKernel, CudaKernelSpec, CudaSource, KernelText, grid, input, name, numbers, output};

pub(super) const ADJUST: KernelText<'_> = KernelText::new(include_str!("../../kernels/adjust.cu"));

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let penalties = "penalties(x, history, table, lengths, prompts, repetition, frequency, presence)";
    let dry = "dry(x, history, table, lengths, multiplier, base, allowed, range, breakers)";
    vec![
        CudaKernelEntry::new("logit_bias", "logit_bias(x, ids, values)", |_| true, |s| listed(s, "BIAS", "logit_bias")),
        CudaKernelEntry::new("penalties", penalties, |_| true, |s| by_history(s, "PENALTIES", "penalties")),
        CudaKernelEntry::new("dry", dry, |_| true, |s| by_history(s, "DRY", "dry")),
        CudaKernelEntry::new(
            "forbid_tokens",
            "forbid_tokens(x, forbidden)",
            |_| true,
            |s| listed(s, "FORBID", "forbid_tokens"),
        ),
    ]
}

/// Logits that a block makes: `SLICE` of the text.
const SLICE: usize = 2048;

/// A kernel over all inputs, whose numbers begin with the elements of a row.
fn kernel(spec: &CudaKernelSpec<'_>, what: &str, entry: &'static str, more: &[usize]) -> Result<CudaKernel, String> {
    let x = &spec.inputs[0];
    let [rows, vocab] = x.shape[..] else { return Err("logits are no matrix".into()) };
    let depth = Dry::LONGEST.to_string();
    let defines = [("D", name(x.dtype)), (what, "1"), ("DEPTH", &*depth)];
    let n = numbers(&[&[vocab], more].concat());
    let args = (0..spec.inputs.len()).map(input).chain([output(0), n]).collect();
    grid(CudaSource::new(entry, &defines, &ADJUST), [vocab.div_ceil(SLICE), rows, 1], 256, args)
}

/// By a list of each row.
fn listed(spec: &CudaKernelSpec<'_>, what: &str, entry: &'static str) -> Result<CudaKernel, String> {
    kernel(spec, what, entry, &[spec.inputs[1].shape[1]])
}

/// By what was said.
fn by_history(spec: &CudaKernelSpec<'_>, what: &str, entry: &'static str) -> Result<CudaKernel, String> {
    let (history, table) = (&spec.inputs[1], &spec.inputs[2]);
    let rows = [history.shape[0], history.shape[1].max(1), table.shape[1]];
    let breakers = (what == "DRY").then(|| spec.inputs[8].shape[1]);
    kernel(spec, what, entry, &rows.into_iter().chain(breakers).collect::<Vec<_>>())
}
