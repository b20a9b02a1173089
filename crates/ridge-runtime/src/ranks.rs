//! Several ranks of one process as one backend: each operation is applied to every rank, in the same order.

use std::sync::Arc;

use ridge_graph::passes::Kernel;
use ridge_graph::{Bindings, Graph, Type};

use crate::backend::{Backend, Buffer, LaunchTime, Program, Run, SLOTS, Staged, WeightData};
use crate::error::{Result, RuntimeError};
use crate::memory::{MemoryBytes, MemoryUse};
use crate::mesh::Collectives;

/// Ranks of one mesh axis, each a backend that runs its steps on threads or a device of its own. Programs are graphs of
/// one rank, as `ridge_graph::shard` makes them, whose step inputs and outputs are the same on every rank.
///
/// What is told of memory is of the first rank: all are alike.
pub struct Ranks {
    ranks: Vec<Arc<dyn Backend>>,
    /// Their ends of the groups that they communicate in.
    groups: Arc<[Arc<dyn Collectives>]>,
}

/// A buffer of each rank.
struct RankBuffers(Vec<Buffer>);

impl Ranks {
    /// These ranks, in rank order. `groups` are aborted when one rank cannot continue.
    ///
    /// # Panics
    /// When there are none.
    pub fn new(ranks: Vec<Arc<dyn Backend>>, groups: Vec<Arc<dyn Collectives>>) -> Self {
        assert!(!ranks.is_empty(), "at least one rank");
        Self { ranks, groups: groups.into() }
    }

    fn first(&self) -> &dyn Backend {
        &*self.ranks[0]
    }

    fn buffer(&self, bytes: usize, of: impl FnMut(&Arc<dyn Backend>) -> Result<Buffer>) -> Result<Buffer> {
        let buffers = self.ranks.iter().map(of).collect::<Result<Vec<_>>>()?;
        Ok(Buffer::new(buffers.first().map_or(bytes, Buffer::bytes), RankBuffers(buffers)))
    }

    /// Each rank with its part of `buffer`.
    fn parts<'a>(&'a self, buffer: &'a Buffer) -> Result<impl Iterator<Item = (&'a Arc<dyn Backend>, &'a Buffer)>> {
        Ok(self.ranks.iter().zip(rank_buffers(buffer)?))
    }
}

fn rank_buffers(buffer: &Buffer) -> Result<&[Buffer]> {
    let why = || RuntimeError::Device { backend: "ranks", why: "a buffer of another backend".into() };
    buffer.inner::<RankBuffers>().map(|buffers| &*buffers.0).ok_or_else(why)
}

impl Backend for Ranks {
    fn name(&self) -> &'static str {
        self.first().name()
    }

    fn kernels(&self) -> &[Kernel] {
        self.first().kernels()
    }

    fn ranks(&self) -> usize {
        self.ranks.len()
    }

    fn upload(&self, ty: &Type, parts: Vec<WeightData>) -> Result<Buffer> {
        self.buffer(0, |rank| rank.upload(ty, parts.clone()))
    }

    fn upload_shares(&self, ty: &Type, shares: Vec<Vec<WeightData>>) -> Result<Buffer> {
        if shares.len() != self.ranks.len() {
            let why = format!("{} shards of a weight for {} ranks", shares.len(), self.ranks.len());
            return Err(RuntimeError::Device { backend: "ranks", why });
        }
        let mut shares = shares.into_iter();
        self.buffer(0, |rank| rank.upload(ty, shares.next().unwrap_or_default()))
    }

    fn set_layout(&self, buffer: &Buffer, ty: &Type, layout: &str) -> Result<()> {
        self.parts(buffer)?.try_for_each(|(rank, buffer)| rank.set_layout(buffer, ty, layout))
    }

    fn random(&self, ty: &Type, state: u64, scale: f64) -> Result<Option<Buffer>> {
        let buffers =
            self.ranks.iter().map(|rank| rank.random(ty, state, scale)).collect::<Result<Option<Vec<_>>>>()?;
        Ok(buffers.map(|buffers| Buffer::new(buffers[0].bytes(), RankBuffers(buffers))))
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.buffer(bytes, |rank| rank.allocate(bytes))
    }

    fn allocate_on_host(&self, bytes: usize) -> Result<Buffer> {
        self.buffer(bytes, |rank| rank.allocate_on_host(bytes))
    }

    fn moved_to_host(&self, buffer: &Buffer) -> Result<Buffer> {
        let buffers = self.parts(buffer)?.map(|(rank, buffer)| rank.moved_to_host(buffer)).collect::<Result<_>>()?;
        Ok(Buffer::new(buffer.bytes(), RankBuffers(buffers)))
    }

    fn is_writable(&self, buffer: &Buffer) -> bool {
        self.parts(buffer).is_ok_and(|mut parts| parts.all(|(rank, buffer)| rank.is_writable(buffer)))
    }

    /// What the first rank has.
    fn read(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        self.parts(buffer)?.next().map_or_else(|| Ok(Vec::new()), |(rank, buffer)| rank.read(buffer))
    }

    /// The same bytes to every rank.
    fn write(&self, buffer: &Buffer, bytes: &[u8]) -> Result<()> {
        self.parts(buffer)?.try_for_each(|(rank, buffer)| rank.write(buffer, bytes))
    }

    fn memory(&self) -> MemoryUse {
        self.first().memory()
    }

    fn choices_timed(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.choices_timed()).sum()
    }

    fn padded_bytes(&self, bytes: usize) -> usize {
        self.first().padded_bytes(bytes)
    }

    fn compile(&self, graph: Arc<Graph>) -> Result<Box<dyn Program>> {
        let programs = self.ranks.iter().map(|rank| rank.compile(Arc::clone(&graph))).collect::<Result<_>>()?;
        Ok(Box::new(RanksProgram { programs, groups: Arc::clone(&self.groups) }))
    }
}

struct RanksProgram {
    programs: Vec<Box<dyn Program>>,
    groups: Arc<[Arc<dyn Collectives>]>,
}

impl Program for RanksProgram {
    fn bind(&self, bindings: &Bindings, weights: &[Buffer], states: &[Buffer]) -> Result<Box<dyn Run>> {
        let of = |buffers: &[Buffer], rank: usize| -> Result<Vec<Buffer>> {
            buffers.iter().map(|buffer| Ok(rank_buffers(buffer)?[rank].clone())).collect()
        };
        let programs = self.programs.iter().enumerate();
        let runs = programs
            .map(|(rank, program)| program.bind(bindings, &of(weights, rank)?, &of(states, rank)?))
            .collect::<Result<_>>()?;
        Ok(Box::new(RanksRun { runs, groups: Arc::clone(&self.groups) }))
    }

    fn memory(&self, bindings: &Bindings) -> Result<MemoryBytes> {
        self.programs[0].memory(bindings)
    }
}

struct RanksRun {
    runs: Vec<Box<dyn Run>>,
    groups: Arc<[Arc<dyn Collectives>]>,
}

impl RanksRun {
    /// Does something to each rank. One that fails fails the others, which would wait for it.
    fn each<T>(&mut self, mut what: impl FnMut(&mut dyn Run) -> Result<T>) -> Result<Vec<T>> {
        let mut done = Vec::with_capacity(self.runs.len());
        let mut failure = None;
        for run in &mut self.runs {
            match what(&mut **run) {
                Ok(value) => done.push(value),
                Err(error) => {
                    self.groups.iter().for_each(|group| group.abort(&error.to_string()));
                    failure.get_or_insert(error);
                }
            }
        }
        failure.map_or(Ok(done), Err)
    }

    /// Copies what the first rank was given to the others.
    fn share(&mut self, slot: usize, staged: &[Staged]) {
        let Some((first, others)) = self.runs.split_first_mut() else { return };
        for input in staged {
            let bytes = &first.input(slot, input.input)[..input.bytes];
            for other in &mut *others {
                other.input(slot, input.input)[..input.bytes].copy_from_slice(bytes);
            }
        }
    }
}

impl Run for RanksRun {
    fn input(&mut self, slot: usize, index: usize) -> &mut [u8] {
        self.runs[0].input(slot, index)
    }

    fn submit(&mut self, slot: usize, staged: &[Staged], held: bool) -> Result<()> {
        self.share(slot, staged);
        // A step that the first rank refuses is refused by all, and nothing was queued.
        self.runs[0].submit(slot, staged, held)?;
        let mut first = true;
        self.each(|run| if std::mem::take(&mut first) { Ok(()) } else { run.submit(slot, staged, held) }).map(drop)
    }

    fn release(&mut self, slot: usize, staged: &[Staged]) -> Result<()> {
        self.share(slot, staged);
        self.each(|run| run.release(slot, staged)).map(drop)
    }

    fn poll(&mut self, slot: usize) -> Result<bool> {
        Ok(self.each(|run| run.poll(slot))?.into_iter().all(|done| done))
    }

    fn wait(&mut self, slot: usize) -> Result<()> {
        self.each(|run| run.wait(slot)).map(drop)
    }

    fn output(&self, slot: usize, index: usize) -> &[u8] {
        self.runs[0].output(slot, index)
    }

    fn memory(&self) -> MemoryBytes {
        self.runs[0].memory()
    }

    fn steps_to_learn(&self) -> usize {
        self.runs.iter().map(|run| run.steps_to_learn()).max().unwrap_or(0)
    }

    fn timed(&mut self, slot: usize, staged: &[Staged]) -> Result<Vec<LaunchTime>> {
        // The first rank is timed while the others run: it waits for them as it always does.
        for slot in 0..SLOTS {
            self.wait(slot)?;
        }
        self.share(slot, staged);
        let Some((first, others)) = self.runs.split_first_mut() else { return Ok(Vec::new()) };
        others.iter_mut().try_for_each(|run| run.submit(slot, staged, false))?;
        let times = first.timed(slot, staged);
        if let Err(error) = &times {
            self.groups.iter().for_each(|group| group.abort(&error.to_string()));
        }
        let outcome = others.iter_mut().try_for_each(|run| run.wait(slot));
        let times = times?;
        outcome.map(|()| times)
    }
}
