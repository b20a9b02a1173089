//! Numbers that other libraries read without a copy, by DLPack (<https://dmlc.github.io/dlpack/latest/>).
#![allow(unsafe_code, reason = "a DLPack capsule is a C structure that its consumer frees")]

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi::{PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New, PyObject};
use pyo3::prelude::*;

/// A row-major f32 matrix in host memory.
#[pyclass(frozen)]
pub(crate) struct Tensor {
    values: Arc<[f32]>,
    shape: [i64; 2],
}

impl Tensor {
    /// From rows of equal length.
    pub(crate) fn of_rows(rows: Vec<Vec<f32>>) -> Self {
        let shape = [rows.len() as i64, rows.first().map_or(0, Vec::len) as i64];
        Self { values: rows.into_iter().flatten().collect(), shape }
    }
}

/// `DLDevice`: a kind of device and its number; 1 is the CPU.
#[repr(C)]
struct DlDevice {
    kind: i32,
    index: i32,
}

/// `DLDataType`: code 2 is floating point.
#[repr(C)]
struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    rank: i32,
    dtype: DlDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`: the reader calls `deleter` when it is done.
#[repr(C)]
struct DlManagedTensor {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

/// The target of a capsule; the C structure must be its first field.
#[repr(C)]
struct Shared {
    managed: DlManagedTensor,
    shape: [i64; 2],
    strides: [i64; 2],
    _values: Arc<[f32]>,
}

/// The name of a capsule until it is consumed.
const NAME: &CStr = c"dltensor";

/// Frees an allocation of [`Tensor::__dlpack__`].
///
/// # Safety
/// `managed` was allocated there and is no longer used.
unsafe extern "C" fn free(managed: *mut DlManagedTensor) {
    // SAFETY: it is the first field of a `Shared` that was leaked from a box.
    drop(unsafe { Box::from_raw(managed.cast::<Shared>()) });
}

/// Frees a capsule that was not consumed.
///
/// # Safety
/// Python calls it with a capsule of [`Tensor::__dlpack__`].
unsafe extern "C" fn free_capsule(capsule: *mut PyObject) {
    // SAFETY: Python holds the capsule and the lock while it calls this; a reader that took the tensor renamed the capsule.
    unsafe {
        if PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            free(PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}

#[pymethods]
impl Tensor {
    /// Rows and columns.
    #[getter]
    fn shape(&self) -> (i64, i64) {
        (self.shape[0], self.shape[1])
    }

    /// Nested lists.
    fn tolist(&self) -> Vec<Vec<f32>> {
        match self.shape[1] {
            0 => vec![Vec::new(); self.shape[0] as usize],
            columns => self.values.chunks_exact(columns as usize).map(<[f32]>::to_vec).collect(),
        }
    }

    fn __len__(&self) -> usize {
        self.shape[0] as usize
    }

    #[expect(clippy::unused_self, reason = "Python calls it as a method")]
    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<Py<PyAny>>,
        max_version: Option<Py<PyAny>>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        let _ = max_version; // The capsule is one of version 0, which every reader takes.
        if stream.is_some() || dl_device.is_some_and(|device| device != (1, 0)) {
            return Err(PyBufferError::new_err(
                "the tensor is in host memory and supports neither streams nor other devices",
            ));
        }
        let values: Arc<[f32]> =
            if copy == Some(true) { Arc::from(&self.values[..]) } else { Arc::clone(&self.values) };
        let data = values.as_ptr().cast_mut().cast();
        let shared = Box::into_raw(Box::new(Shared {
            managed: DlManagedTensor {
                tensor: DlTensor {
                    data,
                    device: DlDevice { kind: 1, index: 0 },
                    rank: 2,
                    dtype: DlDataType { code: 2, bits: 32, lanes: 1 },
                    shape: std::ptr::null_mut(),
                    strides: std::ptr::null_mut(),
                    byte_offset: 0,
                },
                context: std::ptr::null_mut(),
                deleter: Some(free),
            },
            shape: self.shape,
            strides: [self.shape[1], 1],
            _values: values,
        }));
        // SAFETY: `shared` was just made and is nobody else's; its arrays stay where they are until `free`.
        unsafe {
            (*shared).managed.tensor.shape = (&raw mut (*shared).shape).cast();
            (*shared).managed.tensor.strides = (&raw mut (*shared).strides).cast();
        }
        // SAFETY: the pointer stays valid until the deleter or the capsule's destructor frees it, whichever is called.
        let capsule = unsafe {
            let capsule = PyCapsule_New(shared.cast(), NAME.as_ptr(), Some(free_capsule));
            Bound::from_owned_ptr_or_err(py, capsule)
        };
        if capsule.is_err() {
            // SAFETY: no capsule has it.
            unsafe { free(shared.cast()) };
        }
        Ok(capsule?.unbind())
    }

    fn __repr__(&self) -> String {
        format!("ridge.Tensor(shape={:?}, dtype=float32)", self.shape())
    }
}
