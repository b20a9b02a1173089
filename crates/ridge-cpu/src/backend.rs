//! The CPU as a device.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ridge_graph::passes::{self, Pattern};
use ridge_graph::{Bindings, Graph, Type};
use ridge_runtime::{Backend, Buffer, Collectives, Program, Result, RuntimeError, WeightData, component_offsets};

use crate::buffer::{Memory, Storage, storage};
use crate::kernel::{Block, Scratch};
use crate::kernels;
use crate::pool::{Job, Pool, Steps};
use crate::program::CpuProgram;
use crate::weight::{Weight, copy};

/// This rank's groups, by the name of the mesh axis.
pub(crate) type Mesh = HashMap<String, Arc<dyn Collectives>>;

/// How the CPU is used.
#[derive(Clone, Default)]
pub struct CpuOptions {
    /// Threads that compute, the caller's included; the machine's usable cores if `None`.
    pub threads: Option<usize>,
    /// This rank's groups, by the name of the mesh axis, for graphs that communicate.
    pub mesh: HashMap<String, Arc<dyn Collectives>>,
    /// For tests: fills workspace, outputs and scratch memory with NaN before each step, and inputs after it, so that
    /// a kernel that reads what nobody wrote, or leaves a part unwritten, is found out.
    pub poison: bool,
}

/// The CPU backend.
pub struct Cpu {
    device: Arc<Device>,
    kernels: Vec<passes::Kernel>,
}

/// What programs of one backend share.
pub(crate) struct Device {
    pub(crate) pool: Pool,
    pub(crate) mesh: Mesh,
    /// See [`CpuOptions::poison`].
    pub(crate) poison: bool,
    arena: Mutex<Arc<Memory>>,
    /// Counts the workspaces that there have been, so that a step can see without a lock that its own is the present.
    arenas: AtomicUsize,
}

impl Cpu {
    /// Starts the threads.
    ///
    /// # Errors
    /// When the operating system gives no threads, or `RIDGE_CPU_ISA` names an instruction set that this machine lacks.
    pub fn new(options: CpuOptions) -> Result<Self> {
        let threads = options.threads.unwrap_or_else(|| ridge_hw::cpu::Cpu::detect().usable_cores()).max(1);
        let failed = |e: std::io::Error| RuntimeError::Device {
            backend: "cpu",
            why: format!("cannot start {threads} threads: {e}"),
        };
        crate::simd::check_isa().map_err(|why| RuntimeError::Device { backend: "cpu", why })?;
        let device = Device {
            pool: Pool::new(threads).map_err(failed)?,
            mesh: options.mesh,
            poison: options.poison,
            arena: Mutex::new(Arc::new(Memory::zeroed(0, "workspace")?)),
            arenas: AtomicUsize::new(0),
        };
        let kernels = kernels::all()
            .map(|e| passes::Kernel { name: e.name.into(), pattern: Pattern::parse(e.pattern), supports: e.supports })
            .collect();
        Ok(Self { device: Arc::new(device), kernels })
    }

    /// Threads that compute, the caller's included.
    pub fn threads(&self) -> usize {
        self.device.pool.threads()
    }
}

impl Device {
    /// The workspace, at least this large, and its number. Steps that were bound to a smaller one, under another
    /// number, look for it again when they are submitted.
    pub(crate) fn arena(&self, bytes: usize) -> Result<(Arc<Memory>, usize)> {
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        if arena.block().bytes < bytes {
            *arena = Arc::new(Memory::zeroed(bytes, "workspace")?);
            self.arenas.fetch_add(1, Ordering::Release);
        }
        Ok((Arc::clone(&arena), self.arena_number()))
    }

    /// Copies as many bytes as both have, after all steps submitted so far and before any later one.
    fn copy(&self, from: Block, to: Block) {
        let job = Arc::new(Job::new(Box::new(Copy { from, to })));
        self.pool.submit(&job);
        self.pool.wait(&job);
    }

    /// The number of the present workspace.
    pub(crate) fn arena_number(&self) -> usize {
        self.arenas.load(Ordering::Acquire)
    }
}

/// A copy between the host and memory of steps, which takes its turn among them.
struct Copy {
    from: Block,
    to: Block,
}

// SAFETY: `Device::copy` waits until the copy has been made, so both blocks outlive it.
unsafe impl Send for Copy {}
// SAFETY: as above; the one chunk is run by one thread.
unsafe impl Sync for Copy {}

impl Steps for Copy {
    fn launches(&self) -> usize {
        1
    }

    fn chunks(&self, _launch: usize) -> u16 {
        1
    }

    fn run(&self, _launch: usize, _chunk: u16, _scratch: &mut Scratch) {
        // SAFETY: `from` is readable and `to` writable for that many bytes. One of them is the caller's own memory, the
        // other belongs to steps, none of which runs while this one does.
        unsafe { std::ptr::copy_nonoverlapping(self.from.ptr, self.to.ptr, self.from.bytes.min(self.to.bytes)) }
    }
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn kernels(&self) -> &[passes::Kernel] {
        &self.kernels
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
        if ty.format.is_none() {
            let weight = Weight::new(parts.swap_remove(0), self.threads())?;
            return Ok(Buffer::new(bytes, Arc::new(Storage::Weight(weight))));
        }
        let memory = Memory::zeroed(bytes, "a weight")?;
        // SAFETY: just allocated; no step knows it.
        let to = unsafe { memory.bytes_mut() };
        for (offset, part) in offsets.into_iter().zip(&parts) {
            copy(part.bytes(), &mut to[offset..offset + part.bytes().len()], self.threads());
        }
        Ok(Buffer::new(bytes, Arc::new(Storage::Own(Arc::new(memory)))))
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        Ok(Buffer::new(bytes, Arc::new(Storage::Own(Arc::new(Memory::zeroed(bytes, "state")?)))))
    }

    fn read(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        Ok(match &**storage(buffer)? {
            Storage::Own(memory) => {
                let mut bytes = vec![0; memory.block().bytes];
                self.device.copy(memory.block(), Block { ptr: bytes.as_mut_ptr(), bytes: bytes.len() });
                bytes
            }
            Storage::Weight(weight) => {
                let rows = weight.rows()?;
                let block = rows.block();
                // SAFETY: a weight's rows, which are not written, and stay while they are held.
                unsafe { std::slice::from_raw_parts(block.ptr, block.bytes) }.to_vec()
            }
        })
    }

    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()> {
        let refused = |why: &str| RuntimeError::Device { backend: "cpu", why: why.into() };
        let Storage::Own(memory) = &**storage(buffer)? else { return Err(refused("a weight cannot be overwritten")) };
        if bytes.len() > memory.block().bytes {
            return Err(refused("more bytes than the buffer holds"));
        }
        self.device.copy(Block { ptr: bytes.as_ptr().cast_mut(), bytes: bytes.len() }, memory.block());
        Ok(())
    }

    fn compile(&self, graph: Arc<Graph>) -> Result<Box<dyn Program>> {
        Ok(Box::new(CpuProgram::new(Arc::clone(&self.device), graph)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::ALIGN;

    #[test]
    fn workspace_is_one_for_all_who_ask_for_no_more() {
        let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        let (first, number) = cpu.device.arena(3000).unwrap();
        for bytes in [3000, 0, 2999] {
            let (again, of) = cpu.device.arena(bytes).unwrap();
            assert!(Arc::ptr_eq(&first, &again) && of == number);
        }
        let (larger, next) = cpu.device.arena(3001).unwrap();
        assert!(!Arc::ptr_eq(&first, &larger) && next != number);
    }

    #[test]
    fn small_weights_are_copied_to_lines_of_their_own() {
        // A file has its tensors where it likes.
        let file: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new((0..=255u8).cycle().take(5000).collect::<Vec<u8>>());
        let cpu = Cpu::new(CpuOptions { threads: Some(1), ..CpuOptions::default() }).unwrap();
        let ty = Type::tensor(ridge_graph::DType::F32, [300]);
        let buffers: Vec<Buffer> = [3, 1203, 2500]
            .map(|at| cpu.upload(&ty, vec![WeightData::Shared(Arc::clone(&file), at..at + 1200)]).unwrap())
            .into();
        for (buffer, at) in buffers.iter().zip([3, 1203, 2500]) {
            let Storage::Weight(weight) = &**storage(buffer).unwrap() else { panic!("it is a weight") };
            assert!((weight.rows().unwrap().block().ptr as usize).is_multiple_of(ALIGN));
            assert_eq!(cpu.read(buffer).unwrap(), (*file).as_ref()[at..at + 1200]);
        }
    }
}
