//! GELU behind a linear, and its slope behind what comes to a linear's input: by cuBLASLt on the way, else by `kernels/gelu.cu`.

use ridge_graph::ops::{Gelu, GeluBackward};
use ridge_graph::{DType, Function};

use super::entry::CudaKernelEntry;
use super::linear_call::ALIGN;
use super::{linear, training};
use crate::cublaslt::{GemmActivation, GemmShape};
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, SlotOffset, composite,
    each, name, numbers,
};

pub(super) const GELU: KernelText<'_> = KernelText::new(include_str!("../../kernels/gelu.cu")).early_launch();

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let entries = [
        CudaKernelEntry::new("linear_gelu", "gelu(linear(x, w, b))", supports, |spec| activated(spec, false)),
        CudaKernelEntry::new("linear_gelu_keeping", "gelu(*linear_forward(x, w, b))", supports, |spec| {
            activated(spec, true)
        }),
        CudaKernelEntry::new(
            "linear_input_gradient_gelu",
            "gelu_backward(h, linear_input_gradient(dy, w))",
            supports,
            input_gradient,
        ),
    ];
    entries.map(CudaKernelEntry::numerics_by_extents_unless_deterministic).into()
}

/// By the tangent, and plain operands of one 16-bit dtype.
fn supports(body: &Function) -> bool {
    let tanh = composite::<Gelu>(body).or(composite::<GeluBackward>(body).map(|op| &op.0)) == Some(&Gelu::Tanh);
    let dtype = body.args[0].ty.dtype;
    tanh && matches!(dtype, DType::BF16 | DType::F16)
        && body.args.iter().all(|arg| arg.ty.format.is_none() && arg.ty.dtype == dtype)
}

/// A pass over all elements: GELU of what is at `x`, or its slope there by what is in the result.
fn pass(spec: &CudaKernelSpec<'_>, x: SlotOffset, slope: bool) -> CudaKernel {
    let out = &spec.outputs[0];
    let defines = [("D", name(out.dtype)), ("SLOPE", if slope { "1" } else { "0" })];
    let args = [x, (OperandSlot::Output(0), 0)].map(|(slot, offset)| LaunchArg::Pointer(slot, offset));
    let args = args.into_iter().chain([numbers(&[out.len()])]).collect();
    each(CudaSource::new("gelu", &defines, &GELU), out.len(), args)
}

/// A linear and GELU of its result, which is an output too if it is `kept`.
fn activated(spec: &CudaKernelSpec<'_>, kept: bool) -> Result<CudaKernel, String> {
    let mut plain = linear::alone(spec)?;
    let before =
        if kept { (OperandSlot::Output(1), 0) } else { (OperandSlot::Scratch, plain.scratch.next_multiple_of(ALIGN)) };
    if !kept {
        plain.scratch = before.1 + spec.outputs[0].bytes;
    }
    // What follows the product replaces the pass, so it is looked for before its result has another place.
    let on_the_way = match plain.actions.as_slice() {
        [DeviceAction::Product { shape, x, w, r: None, bias: bias @ Some(_), y, scales: None, .. }] => {
            let shape = GemmShape { activation: GemmActivation::Gelu, ..*shape };
            Some((shape, *x, *w, *bias, *y))
        }
        _ => None,
    };
    let place = |slot| if slot == OperandSlot::Output(0) { before } else { (slot, 0) };
    let moved = plain.actions.into_iter().map(|action| action.placed(&place)).collect::<Result<Vec<_>, _>>()?;
    let apart: Vec<DeviceAction> = moved.into_iter().chain(pass(spec, before, false).actions).collect();
    let actions = match on_the_way {
        Some((shape, x, w, bias, y)) => {
            let before = Some(before);
            vec![DeviceAction::Product { shape, x, w, r: None, bias, before, y, scales: None, otherwise: apart }]
        }
        None => apart,
    };
    Ok(CudaKernel { actions, scratch: plain.scratch })
}

/// What comes to the input of a linear, by the slope of GELU at what that input was made of.
fn input_gradient(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let h = (OperandSlot::Input(0), 0);
    let CudaKernel { actions, scratch } = training::input_gradient_of(spec, 1)?;
    let on_the_way = match actions.as_slice() {
        [DeviceAction::Product { shape, x, w, r: None, bias: None, y, scales: None, .. }] => {
            Some((GemmShape { activation: GemmActivation::GeluSlope, ..*shape }, *x, *w, *y))
        }
        _ => None,
    };
    let apart: Vec<DeviceAction> = actions.into_iter().chain(pass(spec, h, true).actions).collect();
    let actions = match on_the_way {
        Some((shape, x, w, y)) => {
            let before = Some(h);
            vec![DeviceAction::Product { shape, x, w, r: None, bias: None, before, y, scales: None, otherwise: apart }]
        }
        None => apart,
    };
    Ok(CudaKernel { actions, scratch })
}
