//! Weights made into codes or blocks on the GPU, while they are loaded.

use std::sync::Arc;

use ridge_graph::format::{ScaleLayout, ScaledFormat};
use ridge_graph::{Bindings, Type};
use ridge_runtime::{Buffer, MemoryOwner, Result, component_offsets};

use crate::device::{CudaDevice, DeviceMemory};
use crate::driver::Address;
use crate::kernels::{ENCODER_THREADS, block_encoder, encoded_group, quantize_rows};

/// The format of `ty` if it is of codes with a scale for each row.
fn rows(ty: &Type) -> Option<ScaledFormat> {
    let format = ty.format.as_ref()?.downcast::<ScaledFormat>()?;
    (format.scales == ScaleLayout::Row).then_some(*format)
}

/// Is `ty` a weight in a format that the GPU makes: codes with a scale for each row, or blocks?
pub(crate) fn encodes(ty: &Type) -> bool {
    let counted = ty.shape.as_const().is_some_and(|shape| shape.iter().all(|n| *n > 0));
    counted && (rows(ty).is_some() || ty.format.as_ref().is_some_and(|format| encoded_group(format).is_some()))
}

/// The elements at `plain`, of the dtype of `ty`, in its format, for which [`encodes`] holds.
///
/// # Errors
/// When memory runs out, or the GPU failed.
pub(crate) fn encoded(device: &CudaDevice, ty: &Type, plain: &DeviceMemory) -> Result<Buffer> {
    let (offsets, bytes) = component_offsets(ty, &Bindings::new())?;
    let memory = device.allocate(bytes, MemoryOwner::Weights)?;
    let shape = ty.shape.as_const().unwrap_or_default();
    let elements = shape.iter().product::<usize>();
    assert!(plain.bytes() >= elements * ty.dtype.size_bytes(), "{ty} in {} bytes", plain.bytes());
    match rows(ty) {
        Some(format) => {
            let inner = shape.last().copied().unwrap_or(1);
            let to = [memory.address(), memory.address() + offsets[1] as u64];
            to_rows(device, format, ty, [elements / inner, inner], plain.address(), to)?;
        }
        None => to_blocks(device, ty, elements, plain.address(), memory.address())?,
    }
    device.synchronize()?;
    Ok(Buffer::new(bytes, Arc::new(memory)))
}

/// Queues the making of codes and scales at `to` of the rows at `from`.
fn to_rows(
    device: &CudaDevice,
    format: ScaledFormat,
    ty: &Type,
    [rows, inner]: [usize; 2],
    mut from: Address,
    [mut codes, mut scales]: [Address; 2],
) -> Result<()> {
    let (source, threads) = quantize_rows(format, ty.dtype, inner);
    let kernel = device.kernel(&source)?;
    // There is neither a norm nor a sum: their addresses are not read.
    let (mut beside, mut eps, mut numbers) = (from, 0f32, [inner as i64, inner as i64]);
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
    // SAFETY: the arguments are what the kernel's text declares, and both sides hold as many elements. The caller keeps the
    // elements until the launch has ended.
    unsafe { device.queue()?.launch(&kernel, [rows as u32, 1, 1], threads, 0, false, &mut params) }
}

/// Queues the making of blocks at `to` of the elements at `from`.
fn to_blocks(device: &CudaDevice, ty: &Type, elements: usize, mut from: Address, mut to: Address) -> Result<()> {
    let Some((format, group)) = ty.format.as_ref().and_then(|format| Some((format, encoded_group(format)?))) else {
        unreachable!("the caller asked whether the GPU makes {ty}");
    };
    let kernel = device.kernel(&block_encoder(format, ty.dtype))?;
    let groups = elements / group;
    let mut numbers = [groups as i64];
    let mut params = [(&raw mut from).cast(), (&raw mut to).cast(), (&raw mut numbers).cast()];
    let grid = [groups.div_ceil(ENCODER_THREADS) as u32, 1, 1];
    // SAFETY: the arguments are what the kernel's text declares. The format divides the innermost axis into whole blocks, so the
    // elements are whole groups, and `to` holds their blocks. The caller keeps the elements until the launch has ended.
    unsafe { device.queue()?.launch(&kernel, grid, ENCODER_THREADS as u32, 0, false, &mut params) }
}
