//! Arguments of launches as words: addresses and numbers.

use std::ffi::c_void;

use ridge_runtime::Result;

use crate::device::CudaDevice;
use crate::driver::Address;
use crate::kernel::{LaunchArg, OperandSlot};

/// Words of an argument.
pub(crate) fn words(arg: &LaunchArg) -> usize {
    match arg {
        LaunchArg::Pointer(..) | LaunchArg::Float(_) => 1,
        LaunchArg::Pointers(slots) => slots.len(),
        LaunchArg::Numbers(numbers) => numbers.len(),
        LaunchArg::Matrix { .. } | LaunchArg::Groups { .. } | LaunchArg::CodeRows { .. } => 16,
    }
}

/// Writes arguments, with operands at the addresses given.
pub(crate) fn write(
    device: &CudaDevice,
    args: &[LaunchArg],
    to: &mut [u64],
    address: &dyn Fn(OperandSlot) -> Address,
) -> Result<()> {
    let mut rest = to;
    for arg in args {
        let (to, behind) = rest.split_at_mut(words(arg));
        match arg {
            LaunchArg::Pointer(slot, offset) => to[0] = address(*slot) + *offset as u64,
            LaunchArg::Pointers(slots) => {
                to.iter_mut().zip(slots).for_each(|(word, (slot, offset))| *word = address(*slot) + *offset as u64);
            }
            LaunchArg::Float(value) => to[0] = u64::from(value.to_bits()),
            LaunchArg::Numbers(numbers) => to.iter_mut().zip(numbers).for_each(|(word, n)| *word = *n as u64),
            LaunchArg::Matrix { at: (slot, offset), dtype, extents, tile } => {
                let matrix = address(*slot) + *offset as u64;
                to.copy_from_slice(&device.tensor_map(matrix, *dtype, *extents, *tile)?);
            }
            LaunchArg::Groups { at: (slot, offset), dtype, extents, groups } => {
                let matrix = address(*slot) + *offset as u64;
                to.copy_from_slice(&device.tensor_map_of_groups(matrix, *dtype, *extents, *groups)?);
            }
            LaunchArg::CodeRows { at: (slot, offset), dtype, extents, rows } => {
                let matrix = address(*slot) + *offset as u64;
                to.copy_from_slice(&device.tensor_map_of_code_rows(matrix, *dtype, *extents, *rows)?);
            }
        }
        rest = behind;
    }
    Ok(())
}

/// The addresses of the arguments that begin at the front of `of`, as a launch takes them.
pub(crate) fn point(args: &[LaunchArg], of: &mut [u64], params: &mut Vec<*mut c_void>) {
    params.clear();
    let mut at = 0;
    for arg in args {
        params.push((&raw mut of[at]).cast());
        at += words(arg);
    }
}
