//! Quantisation to codes with scales: `kernels/quantize.cu`.

use ridge_graph::format::{CodeType, ScaleLayout, ScaledFormat};
use ridge_graph::ops::{Quantize, RmsNorm};
use ridge_graph::{Function, Type};

use super::entry::CudaKernelEntry;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, blocks, grid, input,
    name, numbers, output,
};

pub(super) const QUANTIZE: KernelText<'_> = KernelText::new(include_str!("../../kernels/quantize.cu"));

/// Threads of a block.
const THREADS: usize = 256;

/// What is quantised: `SOURCE` of the text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    Plain,
    Norm,
    Sum,
    Gate,
}

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    vec![
        CudaKernelEntry::new("quantize", "quantize(x)", supports, |s| make(s, Source::Plain)),
        CudaKernelEntry::new("rms_norm_quantize", "quantize(rms_norm(x, w))", by_rows, |s| make(s, Source::Norm)),
        CudaKernelEntry::new("add_rms_norm_quantize", "quantize(rms_norm(*add(x, r), w))", sums_by_rows, |s| {
            make(s, Source::Sum)
        }),
        CudaKernelEntry::new("swiglu_quantize", "quantize(swiglu(gate, up))", by_rows, |s| make(s, Source::Gate)),
    ]
}

/// The format of a value.
pub(super) fn scaled(ty: &Type) -> Option<ScaledFormat> {
    ty.format.as_ref().and_then(|format| format.downcast::<ScaledFormat>().copied())
}

fn supports(body: &Function) -> bool {
    scaled(body.ty(body.outputs[0].var)).is_some_and(|format| format.scales != ScaleLayout::Block)
}

/// Scales of rows, or of groups of them.
fn by_rows(body: &Function) -> bool {
    let format = scaled(body.ty(body.outputs[0].var));
    format.is_some_and(|format| matches!(format.scales, ScaleLayout::Row | ScaleLayout::Group(_)))
}

fn sums_by_rows(body: &Function) -> bool {
    by_rows(body) && body.args[0].ty == body.args[1].ty
}

fn make(spec: &CudaKernelSpec<'_>, source: Source) -> Result<CudaKernel, String> {
    let format = spec.composite::<Quantize>().ok_or("no quantize in the group")?.format;
    let (x, out) = (&spec.inputs[0], &spec.outputs[0]);
    let offsets = out.component_offsets()?;
    let (codes, scales) = (output(0), LaunchArg::Pointer(OperandSlot::Output(0), offsets[1]));
    let weight = spec.inputs.last().map_or(x.dtype, |weight| weight.dtype);
    let number = (source as usize).to_string();
    let flag = |on: bool| if on { "1" } else { "0" };
    let defines = [
        ("D", name(x.dtype)),
        ("W", name(weight)),
        ("SOURCE", &*number),
        ("INT8", flag(format.codes == CodeType::Int8)),
        ("WHOLE", flag(format.scales == ScaleLayout::Row)),
        ("TENSOR", flag(format.scales == ScaleLayout::Tensor)),
    ];
    if format.scales == ScaleLayout::Tensor {
        // The largest magnitude is found in scratch memory, which begins as 0.
        let amax = || LaunchArg::Pointer(OperandSlot::Scratch, 0);
        let text = |entry: &str| CudaSource::new(entry, &defines, &QUANTIZE);
        let zero = DeviceAction::Constant { bytes: vec![0; 4], to: OperandSlot::Scratch };
        let groups = x.len().div_ceil(THREADS * 8).max(1);
        let mut kernel = CudaKernel::from(zero);
        for (entry, args) in [
            ("amax_of", vec![input(0), amax(), numbers(&[x.len()])]),
            ("quantize_all", vec![input(0), amax(), codes, scales, numbers(&[x.len()])]),
        ] {
            kernel.actions.extend(blocks(text(entry), groups, THREADS as u32, args).actions);
        }
        kernel.scratch = 4;
        return Ok(kernel);
    }
    let inner = out.shape.last().copied().unwrap_or(1);
    let rows = out.len().checked_div(inner).unwrap_or(0);
    let group = format.group(inner).ok_or("scales are not of rows")?;
    // Where there is no residual, weight or sum, any address will do.
    let (r, weight) = match source {
        Source::Plain => (input(0), input(0)),
        Source::Norm => (input(0), input(1)),
        Source::Sum => (input(1), input(2)),
        Source::Gate => (input(1), input(0)),
    };
    let sum = output(usize::from(source == Source::Sum));
    let eps = spec.composite::<RmsNorm>().map_or(0.0, |norm| norm.eps as f32);
    let args = vec![input(0), r, weight, codes, scales, sum, LaunchArg::Float(eps), numbers(&[inner, group])];
    let threads = inner.next_multiple_of(32).clamp(32, THREADS);
    grid(CudaSource::new("quantize", &defines, &QUANTIZE), [rows, 1, 1], threads as u32, args)
}
