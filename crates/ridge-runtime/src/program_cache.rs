//! Compiled programs of one backend, each compiled once, with the reason of its compilation.
//!
//! A program is determined by the graph, the outputs, the device with its kernels and choices, and the version of Ridge. The last two
//! cannot change during the lifetime of a backend, to which a cache belongs, so graph and outputs are the key. Graphs are compared
//! completely, because a hash collision would run the wrong program.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ridge_graph::Graph;

use crate::backend::{Backend, Program};
use crate::error::Result;
use crate::lower::lower;

/// Why a program was compiled rather than taken from the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CompileReason {
    /// It is the first.
    FirstUse,
    /// The graph is known, and was compiled for other outputs only.
    NewOutputs,
    /// The graph differs from the one that was compiled last; this is its first function that does.
    OtherGraph {
        /// The function's name.
        function: String,
    },
}

impl fmt::Display for CompileReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FirstUse => f.write_str("first use"),
            Self::NewOutputs => f.write_str("new outputs"),
            Self::OtherGraph { function } => write!(f, "other graph, from function `{function}` on"),
        }
    }
}

/// A graph compiled for outputs.
pub struct CachedProgram {
    /// The graph as it was written.
    source: Graph,
    outputs: Vec<String>,
    pub(crate) lowered: Arc<Graph>,
    pub(crate) program: Box<dyn Program>,
    reason: CompileReason,
    took: Duration,
}

impl CachedProgram {
    /// The graph as the device runs it.
    pub fn graph(&self) -> &Graph {
        &self.lowered
    }

    /// The outputs that it was compiled for.
    pub fn outputs(&self) -> &[String] {
        &self.outputs
    }

    /// Why it was compiled.
    pub fn reason(&self) -> &CompileReason {
        &self.reason
    }

    /// What lowering and compiling took. Kernels are compiled when buckets are bound.
    pub fn took(&self) -> Duration {
        self.took
    }
}

impl fmt::Debug for CachedProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedProgram")
            .field("outputs", &self.outputs)
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

/// The compiled programs of one backend.
pub struct ProgramCache {
    backend: Arc<dyn Backend>,
    programs: Mutex<Vec<Arc<CachedProgram>>>,
}

impl ProgramCache {
    /// A cache for `backend`, empty.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self { backend, programs: Mutex::default() }
    }

    /// The device that it compiles for.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The program of `graph` for these outputs, compiled if it is not there.
    ///
    /// # Errors
    /// Names an output that does not exist, or an op without a kernel.
    pub fn get(&self, graph: &Graph, outputs: &[&str]) -> Result<Arc<CachedProgram>> {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut of_graph = programs.iter().filter(|known| known.source == *graph).peekable();
        let reason = match (of_graph.peek(), programs.last()) {
            (Some(_), _) => CompileReason::NewOutputs,
            (None, Some(last)) => CompileReason::OtherGraph { function: first_difference(graph, &last.source) },
            (None, None) => CompileReason::FirstUse,
        };
        if let Some(known) = of_graph.find(|known| known.outputs.iter().eq(outputs.iter())) {
            return Ok(Arc::clone(known));
        }
        let began = Instant::now();
        let lowered = Arc::new(lower(graph, outputs, self.backend.kernels())?);
        let program = self.backend.compile(Arc::clone(&lowered))?;
        let made = Arc::new(CachedProgram {
            source: graph.clone(),
            outputs: outputs.iter().map(|name| (*name).to_owned()).collect(),
            lowered,
            program,
            reason,
            took: began.elapsed(),
        });
        programs.push(Arc::clone(&made));
        Ok(made)
    }

    /// All programs, in the order in which they were compiled.
    pub fn programs(&self) -> Vec<Arc<CachedProgram>> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The name of the first function of `graph` that `other` does not have at its place; of main where all agree.
fn first_difference(graph: &Graph, other: &Graph) -> String {
    let differs = |(i, function): &(usize, &ridge_graph::Function)| other.functions.get(*i) != Some(*function);
    let found = graph.functions.iter().enumerate().find(differs);
    found.map_or(&graph.main().name, |(_, function)| &function.name).to_string()
}
