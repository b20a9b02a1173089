//! The CPU as a device.

use std::collections::HashMap;
use std::sync::Arc;

use ridge_graph::{Bindings, Graph, Type, passes};
use ridge_runtime::{
    Backend, Buffer, Collectives, MemoryOwner, MemoryUse, Program, Result, RuntimeError, WeightData, component_offsets,
};

use crate::bytes::MemoryBlock;
use crate::device::CpuDevice;
use crate::kernel::KernelEntry;
use crate::kernels;
use crate::memory::{AlignedMemory, padded};
use crate::packing::Packing;
use crate::placement::Placement;
use crate::pool::ThreadPool;
use crate::program::CpuProgram;
use crate::storage::{CpuStorage, storage};
use crate::weight::{StoredWeight, copy};

/// How the CPU is used.
#[derive(Clone, Default)]
pub struct CpuOptions {
    /// Threads that compute, the caller's included; the machine's usable cores if `None`.
    pub threads: Option<usize>,
    /// Are all of the threads the backend's own? Its steps then run whether or not anybody waits for them, as ranks that
    /// one thread drives must.
    pub own_threads: bool,
    /// This rank's groups, by the name of the mesh axis, for graphs that communicate.
    pub mesh: HashMap<String, Arc<dyn Collectives>>,
    /// For tests: fills workspace, outputs and scratch memory with NaN before each step, and inputs after it, so that
    /// a kernel that reads what nobody wrote, or leaves a part unwritten, is found out.
    pub poison: bool,
    /// Kernels in addition to the built-in ones. Where one of them and a built-in kernel are predicted to save the same
    /// time, it is preferred; names must be unique.
    pub kernels: Vec<KernelEntry>,
}

/// The CPU backend.
pub struct Cpu {
    device: Arc<CpuDevice>,
    /// All kernels, in the order in which they may claim.
    registry: Arc<[KernelEntry]>,
    /// The same as compilation sees them.
    claims: Vec<passes::Kernel>,
}

impl Cpu {
    /// Starts the threads.
    ///
    /// # Errors
    /// When the operating system gives no threads, `RIDGE_CPU_ISA` names an instruction set that this machine lacks,
    /// or `RIDGE_CPU_PLACEMENT` means nothing.
    pub fn new(options: CpuOptions) -> Result<Self> {
        let threads = options.threads.unwrap_or_else(|| ridge_hw::cpu::Cpu::detect().usable_cores()).max(1);
        let failed = |e: std::io::Error| RuntimeError::Device {
            backend: "cpu",
            why: format!("cannot start {threads} threads: {e}"),
        };
        crate::simd::check_isa().map_err(|why| RuntimeError::Device { backend: "cpu", why })?;
        let registry: Arc<[KernelEntry]> = options.kernels.into_iter().chain(kernels::builtin()).collect();
        for (nth, entry) in registry.iter().enumerate() {
            if registry[..nth].iter().any(|other| other.name() == entry.name()) {
                let why = format!("two kernels are called `{}`; register them under different names", entry.name());
                return Err(RuntimeError::Device { backend: "cpu", why });
            }
        }
        // One row has the bits of many. Bandwidth and peak are not known without measuring, so they stay nominal.
        let target = Arc::new(passes::Target {
            architecture: crate::simd::isa().name().into(),
            threads,
            deterministic: true,
            ..passes::Target::default()
        });
        let claims = registry.iter().map(|entry| entry.claim(&target)).collect();
        let placement = Placement::detect(threads).map_err(|why| RuntimeError::Device { backend: "cpu", why })?;
        // Ranks of one process do not know of each other, and would share the first CPUs of each node.
        let placement = if options.own_threads { Placement::anywhere(threads) } else { placement };
        let pool = ThreadPool::new(placement, options.own_threads).map_err(failed)?;
        let device = Arc::new(CpuDevice::new(pool, options.mesh, options.poison)?);
        Ok(Self { device, registry, claims })
    }

    /// Threads that compute, the caller's included.
    pub fn threads(&self) -> usize {
        self.device.pool.threads()
    }
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn kernels(&self) -> &[passes::Kernel] {
        &self.claims
    }

    fn upload(&self, ty: &Type, mut parts: Vec<WeightData>) -> Result<Buffer> {
        let (offsets, bytes) = component_offsets(ty, &Bindings::new())?;
        let wanted: Vec<usize> = match &ty.format {
            None => vec![bytes],
            Some(format) => {
                let sizes =
                    format.components(&ty.shape).into_iter().map(|c| component_offsets(&c.ty(), &Bindings::new()));
                sizes.map(|s| Ok(s?.1)).collect::<Result<_>>()?
            }
        };
        let given: Vec<usize> = parts.iter().map(|p| p.bytes().len()).collect();
        if wanted != given {
            return Err(RuntimeError::Device {
                backend: "cpu",
                why: format!("{ty} is stored in parts of {wanted:?} bytes, given are {given:?}"),
            });
        }
        let packing = Packing::of(ty);
        if parts.len() == 1 && (ty.format.is_none() || packing.is_some()) {
            let weight = StoredWeight::new(
                parts.swap_remove(0),
                packing,
                self.device.pool.placement().clone(),
                &self.device.ledger,
            )?;
            return Ok(Buffer::new(bytes, Arc::new(CpuStorage::Weight(weight))));
        }
        let memory = AlignedMemory::zeroed(&self.device.ledger, MemoryOwner::Weights, bytes)?;
        // SAFETY: just allocated; no step knows it.
        let to = unsafe { memory.bytes_mut() };
        for (offset, part) in offsets.iter().copied().zip(&parts) {
            copy(part.bytes(), &mut to[offset..offset + part.bytes().len()], self.device.pool.placement());
        }
        if let (Some(packing), &[_, behind]) = (packing, &offsets[..]) {
            let placement = self.device.pool.placement().clone();
            let places = [given[0], behind];
            let weight = StoredWeight::with_scales(memory, places, Some(packing), placement, &self.device.ledger);
            return Ok(Buffer::new(bytes, Arc::new(CpuStorage::Weight(weight))));
        }
        Ok(Buffer::new(bytes, Arc::new(CpuStorage::Own(Arc::new(memory)))))
    }

    fn set_layout(&self, buffer: &Buffer, ty: &Type, layout: &str) -> Result<()> {
        let CpuStorage::Weight(weight) = &**storage(buffer)? else { return Ok(()) };
        let inner = ty.shape.0.last().and_then(ridge_graph::Dim::as_const).filter(|inner| *inner > 0);
        match (inner, weight.layout()) {
            (Some(inner), Some(name)) if name == layout => weight.panels(inner).map(drop),
            (_, name) => {
                let why = format!("{ty} has no layout `{layout}` here, but {}", name.unwrap_or("rows alone"));
                Err(RuntimeError::Device { backend: "cpu", why })
            }
        }
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let memory = AlignedMemory::zeroed(&self.device.ledger, MemoryOwner::States, bytes)?;
        Ok(Buffer::new(bytes, Arc::new(CpuStorage::Own(Arc::new(memory)))))
    }

    fn allocate_on_host(&self, bytes: usize) -> Result<Buffer> {
        let memory = AlignedMemory::zeroed(&self.device.ledger, MemoryOwner::HostStates, bytes)?;
        Ok(Buffer::new(bytes, Arc::new(CpuStorage::Own(Arc::new(memory)))))
    }

    fn is_writable(&self, buffer: &Buffer) -> bool {
        matches!(storage(buffer).map(|s| &**s), Ok(CpuStorage::Own(_)))
    }

    fn read(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        Ok(match &**storage(buffer)? {
            CpuStorage::Own(memory) => {
                let mut bytes = vec![0; memory.block().bytes];
                self.device.copy(memory.block(), MemoryBlock { ptr: bytes.as_mut_ptr(), bytes: bytes.len() })?;
                bytes
            }
            CpuStorage::Weight(weight) => {
                let rows = weight.rows()?;
                let block = rows.block();
                // SAFETY: a weight's rows, which are not written, and stay while they are held.
                unsafe { std::slice::from_raw_parts(block.ptr, block.bytes) }.to_vec()
            }
        })
    }

    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()> {
        let refused = |why: &str| RuntimeError::Device { backend: "cpu", why: why.into() };
        let CpuStorage::Own(memory) = &**storage(buffer)? else {
            return Err(refused("a weight cannot be overwritten"));
        };
        if bytes.len() > memory.block().bytes {
            return Err(refused("more bytes than the buffer holds"));
        }
        self.device.copy(MemoryBlock { ptr: bytes.as_ptr().cast_mut(), bytes: bytes.len() }, memory.block())
    }

    fn memory(&self) -> MemoryUse {
        self.device.ledger.usage()
    }

    fn padded_bytes(&self, bytes: usize) -> usize {
        padded(bytes)
    }

    fn compile(&self, graph: Arc<Graph>) -> Result<Box<dyn Program>> {
        Ok(Box::new(CpuProgram::new(Arc::clone(&self.device), Arc::clone(&self.registry), graph)))
    }
}

#[cfg(test)]
mod tests {
    use ridge_graph::passes::{Activations, round_activations};
    use ridge_graph::{Builder, DType, Dim, FormatRef};
    use ridge_runtime::{Bucket, Session};

    use super::*;
    use crate::memory::ALIGN;

    #[test]
    fn workspace_is_one_for_all_who_ask_for_no_more() {
        let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        let (first, number) = cpu.device.arena([3000, 0]).unwrap();
        for bytes in [3000, 0, 2999] {
            let (again, of) = cpu.device.arena([bytes, 0]).unwrap();
            assert!(Arc::ptr_eq(&first, &again) && of == number);
        }
        let (larger, next) = cpu.device.arena([3001, 0]).unwrap();
        assert!(!Arc::ptr_eq(&first, &larger) && next != number);
    }

    #[test]
    fn replaced_workspace_is_freed_although_an_idle_bucket_has_used_it() {
        let cpu = Arc::new(Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap());
        let mut session = Session::new(Arc::clone(&cpu) as Arc<dyn Backend>);
        let mut g = Builder::new();
        let x = g.step_input("x", Type::tensor(DType::F32, [Dim::sym("rows"), 2.into()])).unwrap();
        let ty = Type::tensor(DType::F32, [2, 2]);
        let w = g.weight("w", ty.clone()).unwrap();
        let hidden = g.linear(x, w).unwrap();
        let y = g.linear(hidden, w).unwrap();
        let graph = g.finish(vec![("y".into(), y)]).unwrap();
        let ones: Vec<u8> = [1f32; 4].iter().flat_map(|x| x.to_le_bytes()).collect();
        session.load("w", &ty, vec![WeightData::Owned(ones)]).unwrap();
        let compiled = session.compile(&graph, &["y"]).unwrap();
        let bucket = |rows: usize| compiled.bucket(&Bindings::new().with("rows", rows)).unwrap();
        let submit = |bucket: &mut Bucket| {
            bucket.input(0).as_chunks_mut::<4>().0.fill(1f32.to_le_bytes());
            bucket.submit().unwrap();
        };
        let is_right = |bucket: &Bucket| bucket.output(0).as_chunks::<4>().0.iter().all(|y| *y == 4f32.to_le_bytes());
        let current = || Arc::downgrade(&cpu.device.arena([0, 0]).unwrap().0);

        let mut first = bucket(1);
        submit(&mut first);
        first.wait().unwrap();
        let of_first = current();
        let mut second = bucket(100);
        assert!(of_first.upgrade().is_none(), "the first workspace is freed while its bucket is idle");

        // A step that is under way keeps its workspace. With one thread it runs when it is waited for.
        submit(&mut second);
        let of_second = current();
        let mut third = bucket(10_000);
        assert!(of_second.upgrade().is_some(), "a submitted step has its workspace");
        second.wait().unwrap();
        assert!(of_second.upgrade().is_none(), "the second workspace is freed after its last step");

        for bucket in [&mut first, &mut second, &mut third] {
            submit(bucket);
            bucket.wait().unwrap();
            assert!(is_right(bucket));
        }
    }

    #[test]
    fn small_weights_are_copied_to_lines_of_their_own() {
        // A file has its tensors where it likes.
        let file: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new((0..=255u8).cycle().take(5000).collect::<Vec<u8>>());
        let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        let ty = Type::tensor(DType::F32, [300]);
        let buffers: Vec<Buffer> = [3, 1203, 2500]
            .map(|at| cpu.upload(&ty, vec![WeightData::Shared(Arc::clone(&file), at..at + 1200)]).unwrap())
            .into();
        for (buffer, at) in buffers.iter().zip([3, 1203, 2500]) {
            let CpuStorage::Weight(weight) = &**storage(buffer).unwrap() else { panic!("it is a weight") };
            assert!((weight.rows().unwrap().block().ptr as usize).is_multiple_of(ALIGN));
            assert_eq!(cpu.read(buffer).unwrap(), (*file).as_ref()[at..at + 1200]);
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn weights_packed_when_they_are_loaded_are_those_packed_when_a_program_is_compiled() {
        if crate::simd::isa() != crate::simd::Isa::Amx {
            ridge_testing::skip!("this machine has no AMX");
        }
        let ty = Type::tensor(DType::BF16, [70, 64]);
        let file: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new((0..2 * 70 * 64).map(|i| i as u8).collect::<Vec<_>>());
        let mut g = Builder::new();
        let x = g.step_input("x", Type::tensor(DType::BF16, [Dim::sym("rows"), 64.into()])).unwrap();
        let w = g.weight("w", ty.clone()).unwrap();
        let y = g.linear(x, w).unwrap();
        let graph = g.finish(vec![("y".into(), y)]).unwrap();
        let panels = |declares: bool| {
            let cpu = Arc::new(Cpu::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap());
            let mut session = Session::new(Arc::clone(&cpu) as Arc<dyn Backend>);
            if declares {
                session.declare(&[(&graph, &["y"])]).unwrap();
            }
            session.load("w", &ty, vec![WeightData::Shared(Arc::clone(&file), 0..2 * 70 * 64)]).unwrap();
            let loaded = cpu.memory().live.get(MemoryOwner::Weights);
            let compiled = session.compile(&graph, &["y"]).unwrap();
            let _bucket = compiled.bucket(&Bindings::new().with("rows", 3)).unwrap();
            let bound = cpu.memory().live.get(MemoryOwner::Weights);
            assert!(!declares || loaded == bound);
            let buffer = session.state("w").unwrap();
            let CpuStorage::Weight(weight) = &**storage(&buffer).unwrap() else { panic!("is a weight") };
            let block = weight.panels(64).unwrap().block();
            // Panels alone: rows of a small weight, copied when it was loaded, are given back.
            assert!((block.bytes..2 * block.bytes).contains(&bound), "{bound} bytes of panels of {}", block.bytes);
            // SAFETY: the panels live as long as the session, and are not written.
            let bytes = unsafe { std::slice::from_raw_parts(block.ptr, block.bytes) }.to_vec();
            (bytes, bound)
        };
        assert_eq!(panels(true), panels(false));
    }

    #[test]
    fn weights_multiplied_by_codes_are_bound_in_the_layout_settled_for_them() {
        let stored = FormatRef::from_name("q8_0").unwrap();
        let ty = Type::tensor(DType::F32, [70, 256]).stored_as(stored.clone());
        if crate::simd::isa() == crate::simd::Isa::Portable {
            ridge_testing::skip!("portable code multiplies codes in rows");
        }
        assert!(Packing::of(&ty).is_some());
        let mut g = Builder::new();
        let x = g.step_input("x", Type::tensor(DType::F32, [Dim::sym("rows"), 256.into()])).unwrap();
        let w = g.weight("w", ty.clone()).unwrap();
        let y = g.linear(x, w).unwrap();
        let mut graph = g.finish(vec![("y".into(), y)]).unwrap();
        round_activations(&mut graph, Activations::Int8);
        let cpu = Arc::new(Cpu::new(CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap());
        let mut session = Session::new(Arc::clone(&cpu) as Arc<dyn Backend>);
        let values: Vec<f32> = (0..70 * 256).map(|i| (i % 37) as f32 - 18.0).collect();
        let parts = stored.encode(&values, &[70, 256], None).into_iter().map(WeightData::Owned);
        session.load("w", &ty, parts.collect()).unwrap();
        let compiled = session.compile(&graph, &["y"]).unwrap();
        let _bucket = compiled.bucket(&Bindings::new().with("rows", 1)).unwrap();
        let buffer = session.state("w").unwrap();
        let CpuStorage::Weight(weight) = &**storage(&buffer).unwrap() else { panic!("is a weight") };
        assert!(weight.layout().is_some());
        // The packed weight alone, without rows that a kernel reads beside it.
        let packed = padded(weight.panels(256).unwrap().block().bytes);
        assert_eq!(cpu.memory().live.get(MemoryOwner::Weights), packed);
    }
}
