//! Autotuning: the choice among candidates of one result, by time.

use std::sync::Arc;

use ridge_graph::DType;
use ridge_runtime::{Result, RuntimeError};

use super::{CudaDevice, DeviceMemory, LoadedKernel, lock};
use crate::args;
use crate::cublaslt::{CublasProduct, GemmOperands};
use crate::driver::Address;
use crate::error::device as failed;
use crate::kernel::{CudaSource, DeviceAction, KernelCandidate, LaunchArg, OperandSlot, SlotOffset};

/// An action with its operands, ready to be queued many times.
enum TimedAction<'a> {
    Launch {
        kernel: Arc<LoadedKernel>,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        args: &'a [LaunchArg],
        words: Vec<u64>,
    },
    Product(CublasProduct, GemmOperands),
}

impl CudaDevice {
    /// The index of the fastest of `candidates` on this GPU, or on that of the first rank of several; see
    /// [`DeviceAction::Autotuned`].
    ///
    /// # Errors
    /// When ranks choose among different things.
    pub(crate) fn fastest(
        &self,
        key: &str,
        operands: &[(SlotOffset, DType, usize)],
        candidates: &[KernelCandidate],
    ) -> Result<usize> {
        let mine = || self.own_fastest(key, operands, candidates);
        let agreed = self.of_first_rank(key, || mine().to_le_bytes())?;
        Ok(agreed.map_or_else(mine, usize::from_le_bytes).min(candidates.len() - 1))
    }

    fn own_fastest(&self, key: &str, operands: &[(SlotOffset, DType, usize)], candidates: &[KernelCandidate]) -> usize {
        let mut chosen = lock(&self.chosen);
        if let Some(choice) = chosen.get(key) {
            return *choice;
        }
        let runs = |c: &KernelCandidate| c.arch.is_none_or(|arch| arch == self.context.arch);
        let all: Vec<usize> = (0..candidates.len()).filter(|index| runs(&candidates[*index])).collect();
        let choice = match all[..] {
            [only] => only,
            _ => {
                let names: Vec<&str> = all.iter().map(|index| &*candidates[*index].name).collect();
                let fastest = self.choices.choose(key, &names, || {
                    let (index, seconds) = self.time(operands, candidates, &all)?;
                    Ok::<_, RuntimeError>((all.iter().position(|i| *i == index).unwrap_or(0), seconds))
                });
                match fastest {
                    Ok(nth) => all[nth],
                    // Without memory to time anything, a guess has to do.
                    Err(_) => all.into_iter().find(|i| *i > 0 || self.products_file.is_some()).unwrap_or(0),
                }
            }
        };
        chosen.insert(key.to_owned(), choice);
        choice
    }

    /// The one of `all` that takes least time, with operands that are in no cache, and its seconds.
    fn time(
        &self,
        operands: &[(SlotOffset, DType, usize)],
        candidates: &[KernelCandidate],
        all: &[usize],
    ) -> Result<(usize, f64)> {
        const ROUNDS: usize = 5;
        /// More than any cache.
        const COLD: usize = 128 << 20;
        self.count_timed();
        let cold = self.allocate_to_time(COLD)?;
        let mut memory: Vec<(OperandSlot, DeviceMemory)> = Vec::new();
        for ((slot, _), dtype, _) in operands {
            // What shares a slot lies in it one behind another.
            let of = operands.iter().filter(|((s, _), ..)| s == slot);
            let bytes = of.map(|((_, at), dtype, elements)| at + elements * dtype.size_bytes()).max().unwrap_or(0);
            if memory.iter().all(|(s, _)| s != slot) {
                let held = self.allocate_to_time(bytes)?;
                self.fill_random(&held, *dtype, bytes / dtype.size_bytes(), 7, 1e-3)?;
                memory.push((*slot, held));
            }
        }
        let address = |slot: OperandSlot| memory.iter().find(|(s, _)| *s == slot).map_or(0, |(_, m)| m.address());
        let (start, end) = (self.timed_event()?, self.timed_event()?);
        let mut best = None;
        for index in all {
            let mut ready = Vec::new();
            self.prepare(&candidates[*index].actions, &address, &mut ready)?;
            for round in 0..ROUNDS {
                self.queue()?.fill(&cold, 0, COLD)?;
                start.record()?;
                for action in &mut ready {
                    self.queue_ready(action)?;
                }
                end.record()?;
                end.wait()?;
                let seconds = end.since(&start)?;
                // The first round loads code.
                if round > 0 && best.is_none_or(|(least, _)| seconds < least) {
                    best = Some((seconds, *index));
                }
            }
        }
        best.map(|(seconds, index)| (index, seconds)).ok_or_else(|| failed("no candidate runs on this GPU"))
    }

    fn prepare<'a>(
        &self,
        actions: &'a [DeviceAction],
        address: &dyn Fn(OperandSlot) -> Address,
        ready: &mut Vec<TimedAction<'a>>,
    ) -> Result<()> {
        for action in actions {
            match action {
                DeviceAction::Launch { source, grid, threads, shared, args: of, .. } => {
                    let kernel = self.kernel(source)?;
                    kernel.reserve(*shared)?;
                    let mut words = vec![0; of.iter().map(args::words).sum()];
                    args::write(self, of, &mut words, address)?;
                    let (grid, threads, shared) = (self.grid(source, *grid), *threads, *shared);
                    ready.push(TimedAction::Launch { kernel, grid, threads, shared, args: of, words });
                }
                DeviceAction::Product { shape, x, w, r, bias, aux, y, scales, otherwise } => {
                    match self.product(*shape)? {
                        Some(product) => {
                            let workspace = self.products().map_or(0, |(_, memory)| memory.address());
                            let [xs, ws] = scales.unwrap_or([*x, *w]);
                            let [r, bias, aux] = [r, bias, aux].map(|at| at.unwrap_or(*y));
                            let operands = [*x, *w, r, *y, bias, aux, xs, ws];
                            let [x, w, r, y, bias, aux, xs, ws] = operands.map(|(slot, at)| address(slot) + at as u64);
                            let operands = GemmOperands { x, w, r, y, bias, aux, scales: [xs, ws], workspace };
                            ready.push(TimedAction::Product(product, operands));
                        }
                        None => self.prepare(otherwise, address, ready)?,
                    }
                }
                DeviceAction::ByArch { arch, actions, otherwise } => {
                    self.prepare(if self.arch() == *arch { actions } else { otherwise }, address, ready)?;
                }
                DeviceAction::Autotuned { .. }
                | DeviceAction::Copy { .. }
                | DeviceAction::Constant { .. }
                | DeviceAction::Collective(_) => {
                    return Err(failed("a candidate is made of launches and products"));
                }
            }
        }
        Ok(())
    }

    fn queue_ready(&self, ready: &mut TimedAction<'_>) -> Result<()> {
        let queue = self.queue()?;
        match ready {
            TimedAction::Launch { kernel, grid, threads, shared, args: of, words } => {
                let mut params = Vec::new();
                args::point(of, words, &mut params);
                // SAFETY: the arguments are what the kernel's text declares, and operands as large as it takes them for.
                unsafe { queue.launch(kernel, *grid, *threads, *shared, false, &mut params) }
            }
            TimedAction::Product(product, operands) => {
                let (library, _) = self.products().ok_or_else(|| failed("cuBLASLt is gone"))?;
                // SAFETY: operands of the shape's sizes, in memory of their own, aligned as allocations are.
                unsafe { product.queue(library, *operands, queue.stream()) }
            }
        }
    }

    /// Queues actions with operands at the addresses given.
    #[cfg(test)]
    pub(crate) fn run(&self, actions: &[DeviceAction], address: &dyn Fn(OperandSlot) -> Address) -> Result<()> {
        let mut ready = Vec::new();
        self.prepare(actions, address, &mut ready)?;
        ready.iter_mut().try_for_each(|action| self.queue_ready(action))
    }

    /// The architecture that kernels are compiled for.
    pub(crate) fn arch(&self) -> &str {
        &self.context.arch
    }

    /// Blocks of a launch: along x no more than run at once, where they take their work in turn.
    pub(crate) fn grid(&self, source: &CudaSource, grid: [u32; 3]) -> [u32; 3] {
        match source.persistent {
            0 => grid,
            cluster => [grid[0].min(self.context.processors / cluster * cluster), grid[1], grid[2]],
        }
    }
}
