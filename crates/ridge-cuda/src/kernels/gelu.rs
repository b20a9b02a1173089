//! GELU of a linear's result, and the gradient of GELU of a linear's input: in the epilogue of the product where cuBLASLt makes it, else by a
//! pass of `kernels/gelu.cu`.

use ridge_graph::ops::{Gelu, GeluBackward};
use ridge_graph::{DType, Function};

use super::entry::CudaKernelEntry;
use super::linear_call::ALIGN;
use super::{linear, training};
use crate::cublaslt::{GemmActivation, GemmShape};
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, DeviceAction, KernelText, LaunchArg, OperandSlot, SlotOffset, blocks,
    composite, name, numbers,
};

pub(super) const GELU: KernelText<'_> = KernelText::new(include_str!("../../kernels/gelu.cu")).early_launch();

/// Elements that a thread takes at a time, if they divide all, and threads of a block.
const WIDE: usize = 8;
const THREADS: usize = 256;

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    let forward = [
        CudaKernelEntry::new("linear_gelu", "gelu(linear(x, w, b))", supports, |spec| activated(spec, false)),
        CudaKernelEntry::new("linear_gelu_aux", "gelu(*linear_forward(x, w, b))", supports, |spec| {
            activated(spec, true)
        }),
    ];
    let backward = CudaKernelEntry::new(
        "linear_input_gradient_gelu",
        "gelu_backward(h, linear_input_gradient(dy, w))",
        supports,
        input_gradient,
    );
    let forward = forward.map(CudaKernelEntry::numerics_by_extents_unless_deterministic);
    forward.into_iter().chain([backward.numerics_by_extents()]).collect()
}

/// The tanh approximation, and plain operands of one 16-bit dtype.
fn supports(body: &Function) -> bool {
    let tanh = composite::<Gelu>(body).or(composite::<GeluBackward>(body).map(|op| &op.0)) == Some(&Gelu::Tanh);
    let dtype = body.args[0].ty.dtype;
    tanh && matches!(dtype, DType::BF16 | DType::F16)
        && body.args.iter().all(|arg| arg.ty.format.is_none() && arg.ty.dtype == dtype)
}

/// A pass over all elements: GELU of the matrix at `x`, or the result times its derivative there.
fn pass(spec: &CudaKernelSpec<'_>, x: SlotOffset, backward: bool) -> CudaKernel {
    let out = &spec.outputs[0];
    let wide = if out.len().is_multiple_of(WIDE) { WIDE } else { 1 };
    let wide_text = wide.to_string();
    let defines = [("D", name(out.dtype)), ("WIDE", &*wide_text), ("BACKWARD", if backward { "1" } else { "0" })];
    let args = [x, (OperandSlot::Output(0), 0)].map(|(slot, offset)| LaunchArg::Pointer(slot, offset));
    let args = args.into_iter().chain([numbers(&[out.len() / wide])]).collect();
    let source = CudaSource::new("gelu", &defines, &GELU);
    blocks(source, (out.len() / wide).div_ceil(THREADS), THREADS as u32, args)
}

/// A linear and GELU of its result, which is an output too if it is `kept`.
fn activated(spec: &CudaKernelSpec<'_>, kept: bool) -> Result<CudaKernel, String> {
    let mut plain = linear::alone(spec)?;
    let aux = if kept {
        (OperandSlot::Output(1), 0)
    } else {
        let from = plain.scratch.next_multiple_of(ALIGN);
        plain.scratch = from + spec.outputs[0].bytes;
        (OperandSlot::Scratch, from)
    };
    // Looked for before the product's result gets another place, since an epilogue gives GELU itself.
    let with_epilogue = match plain.actions.as_slice() {
        [DeviceAction::Product { shape, x, w, r: None, bias: bias @ Some(_), y, scales: None, .. }] => {
            let activation = if kept { GemmActivation::GeluAux } else { GemmActivation::Gelu };
            Some((GemmShape { activation, ..*shape }, *x, *w, *bias, *y))
        }
        _ => None,
    };
    let place = |slot| if slot == OperandSlot::Output(0) { aux } else { (slot, 0) };
    let moved = plain.actions.into_iter().map(|action| action.placed(&place)).collect::<Result<Vec<_>, _>>()?;
    let otherwise: Vec<DeviceAction> = moved.into_iter().chain(pass(spec, aux, false).actions).collect();
    let actions = match with_epilogue {
        Some((shape, x, w, bias, y)) => {
            let aux = kept.then_some(aux);
            vec![DeviceAction::Product { shape, x, w, r: None, bias, aux, y, scales: None, otherwise }]
        }
        None => otherwise,
    };
    Ok(CudaKernel { actions, scratch: plain.scratch })
}

/// The cotangent of a linear's input, by the derivative of GELU at the pre-activations that this input was made of.
fn input_gradient(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let h = (OperandSlot::Input(0), 0);
    let CudaKernel { actions, scratch } = training::input_gradient_of(spec, 1)?;
    let with_epilogue = match actions.as_slice() {
        [DeviceAction::Product { shape, x, w, r: None, bias: None, y, scales: None, .. }] => {
            Some((GemmShape { activation: GemmActivation::GeluBackward, ..*shape }, *x, *w, *y))
        }
        _ => None,
    };
    let otherwise: Vec<DeviceAction> = actions.into_iter().chain(pass(spec, h, true).actions).collect();
    let actions = match with_epilogue {
        Some((shape, x, w, y)) => {
            let (r, bias, aux, scales) = (None, None, Some(h), None);
            vec![DeviceAction::Product { shape, x, w, r, bias, aux, y, scales, otherwise }]
        }
        None => otherwise,
    };
    Ok(CudaKernel { actions, scratch })
}
