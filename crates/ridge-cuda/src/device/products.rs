//! Matrix products by cuBLASLt on this GPU, their algorithms chosen by time.

use ridge_graph::DType;
use ridge_runtime::{MemoryOwner, Result, RuntimeError};

use super::{CudaDevice, DeviceMemory};
use crate::cublaslt::{self, CublasLt, CublasProduct, GemmOperands, GemmShape};
use crate::driver::Handle;

impl CudaDevice {
    /// cuBLASLt, if it can be had, and its workspace.
    pub(crate) fn products(&self) -> Option<&(CublasLt, DeviceMemory)> {
        let open = || {
            self.context.enter().ok()?;
            let library = CublasLt::open(self.products_file.as_deref()?).ok()?;
            Some((library, self.allocate(cublaslt::WORKSPACE, MemoryOwner::Library).ok()?))
        };
        self.products.get_or_init(open).as_ref()
    }

    /// A product of this shape, by the algorithm that is quickest here, or on the first rank of several; `None` where
    /// cuBLASLt has none.
    ///
    /// # Errors
    /// When ranks ask for different products.
    pub(crate) fn product(&self, shape: GemmShape) -> Result<Option<CublasProduct>> {
        if !shape.is_measured() {
            return Ok(self.own_product(shape));
        }
        let made = |product: Option<CublasProduct>| -> [u8; cublaslt::KEPT] {
            product.and_then(|product| product.kept().try_into().ok()).unwrap_or([0; cublaslt::KEPT])
        };
        let Some(kept) = self.of_first_rank(&shape.key(), || made(self.own_product(shape)))? else {
            return Ok(self.own_product(shape));
        };
        // No algorithm is all zeros.
        let algorithm = kept.iter().any(|byte| *byte != 0).then_some(kept);
        let given = |of: &[u8; cublaslt::KEPT]| {
            let (library, _) = self.products()?;
            library.product(shape, &|_| Some(of.to_vec()), &mut |_| None).ok()
        };
        Ok(algorithm.as_ref().and_then(given))
    }

    fn own_product(&self, shape: GemmShape) -> Option<CublasProduct> {
        let (library, workspace) = self.products()?;
        let key = format!("{} {}", library.version(), shape.key());
        let kept = |chosen: Option<&[u8]>| {
            chosen.map_or_else(
                || self.cache.read(&key),
                |bytes| {
                    self.cache.write(&key, bytes);
                    None
                },
            )
        };
        // Numbers to multiply, made when something is to be timed.
        let mut operands = None;
        let mut time = |run: &dyn Fn(GemmOperands, Handle) -> Result<()>| -> Option<f64> {
            if operands.is_none() {
                self.count_timed();
                operands = Some(self.numbers_for(shape).ok()?);
            }
            let [x, w, y, aux] = operands.as_ref()?;
            let of = GemmOperands {
                x: x.address(),
                w: w.address(),
                r: y.address(),
                y: y.address(),
                bias: w.address(),
                aux: aux.address(),
                // Any numbers will do.
                scales: [x.address(), w.address()],
                workspace: workspace.address(),
            };
            let mut best = f64::INFINITY;
            for _ in 0..4 {
                let (start, end) = (self.timed_event().ok()?, self.timed_event().ok()?);
                start.record().ok()?;
                run(of, self.context.stream).ok()?;
                end.record().ok()?;
                end.wait().ok()?;
                best = best.min(end.since(&start).ok()?);
            }
            Some(best)
        };
        library.product(shape, &kept, &mut time).ok()
    }

    /// Random numbers for the operands of a product.
    fn numbers_for(&self, shape: GemmShape) -> Result<[DeviceMemory; 4]> {
        let make = |elements: usize, dtype: DType| {
            let memory = self.allocate_to_time(elements * dtype.size_bytes())?;
            self.fill_random(&memory, dtype, elements, 7, 1e-3)?;
            Ok::<_, RuntimeError>(memory)
        };
        let GemmShape { rows, columns, depth, operands, result, .. } = shape;
        let aux = if shape.activation.has_aux() { rows * columns } else { 1 };
        Ok([
            make(rows * depth, operands)?,
            make(columns * depth, operands)?,
            make(rows * columns, result)?,
            make(aux, result)?,
        ])
    }
}
