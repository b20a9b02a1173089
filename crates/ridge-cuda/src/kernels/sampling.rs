//! Sampling: `kernels/sample.cu`.

use super::Entry;
use crate::kernel::{Kernel, Source, Spec, grid, input, name, numbers, output};

const SAMPLE: &str = include_str!("../../kernels/sample.cu");

pub(super) const ENTRIES: &[Entry] = &[Entry {
    name: "sample_token",
    pattern: "sample_token(logits, temperature, top_k, top_p, min_p, typical_p, seed, sequence, position)",
    // Sums of weights must fit their integers.
    supports: |body| body.args[0].ty.shape.last().as_const().is_some_and(|vocab| vocab < 1 << 22),
    make,
}];

fn make(spec: &Spec<'_>) -> Result<Kernel, String> {
    let logits = &spec.inputs[0];
    let args = (0..9).map(input).chain([output(0), numbers(&[logits.shape[1]])]).collect();
    grid(Source::new("sample_token", &[("D", name(logits.dtype))], SAMPLE), [logits.shape[0], 1, 1], 1024, args)
}
