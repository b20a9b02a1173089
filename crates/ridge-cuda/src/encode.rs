//! Weights made into codes on the GPU, while they are loaded.

use std::sync::Arc;

use ridge_graph::format::{ScaleLayout, ScaledFormat};
use ridge_graph::{Bindings, Type};
use ridge_runtime::{Buffer, MemoryOwner, Result, component_offsets};

use crate::device::{CudaDevice, DeviceMemory};
use crate::kernels::quantize_rows;

/// Is `ty` a matrix in a format that the GPU makes: codes with a scale for each row?
pub(crate) fn encodes(ty: &Type) -> bool {
    let format = ty.format.as_ref().and_then(|format| format.downcast::<ScaledFormat>());
    let counted = ty.shape.as_const().is_some_and(|shape| shape.iter().all(|n| *n > 0));
    format.is_some_and(|format| format.scales == ScaleLayout::Row) && counted
}

/// The rows of elements at `plain`, of the dtype of `ty`, in its format, for which [`encodes`] holds.
///
/// # Errors
/// When memory runs out, or the GPU failed.
pub(crate) fn encoded(device: &CudaDevice, ty: &Type, plain: &DeviceMemory) -> Result<Buffer> {
    let (offsets, bytes) = component_offsets(ty, &Bindings::new())?;
    let memory = device.allocate(bytes, MemoryOwner::Weights)?;
    let shape = ty.shape.as_const().unwrap_or_default();
    let inner = shape.last().copied().unwrap_or(1);
    let rows = shape.iter().product::<usize>() / inner;
    let format = ty.format.as_ref().and_then(|format| format.downcast::<ScaledFormat>());
    let format = *format.unwrap_or(&ScaledFormat::F8_ROWS);
    assert!(plain.bytes() >= rows * inner * ty.dtype.size_bytes(), "{ty} in {} bytes", plain.bytes());

    let (source, threads) = quantize_rows(format, ty.dtype, inner);
    let kernel = device.kernel(&source)?;
    let (mut from, mut codes) = (plain.address(), memory.address());
    let mut scales = memory.address() + offsets[1] as u64;
    // There is neither a norm nor a sum: their addresses are not read.
    let (mut beside, mut eps, mut numbers) = (plain.address(), 0f32, [inner as i64, inner as i64]);
    let mut params = [
        (&raw mut from).cast(),
        (&raw mut beside).cast(),
        (&raw mut beside).cast(),
        (&raw mut codes).cast(),
        (&raw mut scales).cast(),
        (&raw mut beside).cast(),
        (&raw mut eps).cast(),
        (&raw mut numbers).cast(),
    ];
    // SAFETY: the arguments are what the kernel's text declares, and both sides hold as many elements. The elements outlive
    // the launch, which is waited for.
    unsafe { device.queue()?.launch(&kernel, [rows as u32, 1, 1], threads, 0, false, &mut params)? };
    device.synchronize()?;
    Ok(Buffer::new(bytes, Arc::new(memory)))
}
