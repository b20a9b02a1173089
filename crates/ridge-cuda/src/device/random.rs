//! Random numbers made on the GPU.

use ridge_graph::DType;
use ridge_runtime::Result;

use super::{CudaDevice, DeviceMemory};
use crate::kernel::{CudaSource, KernelText, name};

pub(crate) const RANDOM: KernelText<'_> = KernelText::new(include_str!("../../kernels/random.cu"));

impl CudaDevice {
    /// Fills the first `elements` elements of `memory`, of `dtype`, as [`ridge_runtime::Backend::random`] says.
    ///
    /// # Errors
    /// When the GPU failed.
    pub(crate) fn fill_random(
        &self,
        memory: &DeviceMemory,
        dtype: DType,
        elements: usize,
        state: u64,
        scale: f64,
    ) -> Result<()> {
        assert!(elements * dtype.size_bytes() <= memory.bytes(), "{elements} of {dtype} in {} bytes", memory.bytes());
        let defines = [("D", name(dtype)), ("SCALE", &*format!("{scale:e}"))];
        let kernel = self.kernel(&CudaSource::new("random_weight", &defines, &RANDOM))?;
        let (mut to, mut numbers) = (memory.address(), [elements as u64, state]);
        let mut params = [(&raw mut to).cast(), (&raw mut numbers).cast()];
        let grid = [elements.div_ceil(4 * 256).clamp(1, 1 << 16) as u32, 1, 1];
        // SAFETY: the arguments are what the kernel's text declares, and the memory holds as many elements.
        unsafe { self.queue()?.launch(&kernel, grid, 256, 0, false, &mut params) }
    }
}
