//! A registry of ops: names and random instances, which conformance tests of every backend walk. A registry is a value: the
//! built-in ones are [`ops::registry`](crate::ops::registry) and [`prim_registry`](crate::prim_registry), and another crate
//! adds its ops to a copy.

use std::fmt;
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::sample::{Rng, Sample};

/// Makes valid random instances of an op, edge cases included (extents 0 and 1, ragged, off any tile), whose float tensors
/// have the given dtype. Some 2 MFLOP at most each.
pub type SampleFn = dyn Fn(&mut Rng, DType) -> Vec<Sample> + Send + Sync;

/// An op's name and its sample generator.
#[derive(Clone)]
pub struct OpEntry {
    /// The op's name.
    pub name: Arc<str>,
    samples: Arc<SampleFn>,
}

impl OpEntry {
    /// The op called `name`, whose instances `samples` makes; see [`SampleFn`].
    pub fn new(
        name: impl Into<Arc<str>>,
        samples: impl Fn(&mut Rng, DType) -> Vec<Sample> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), samples: Arc::new(samples) }
    }

    /// Random instances whose float tensors have `dtype`.
    pub fn samples(&self, rng: &mut Rng, dtype: DType) -> Vec<Sample> {
        (self.samples)(rng, dtype)
    }
}

impl fmt::Debug for OpEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpEntry").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Ops by name, in the order in which they were added.
#[derive(Clone, Debug, Default)]
pub struct OpRegistry {
    entries: Vec<OpEntry>,
}

impl OpRegistry {
    /// A registry of `entries`, whose names differ.
    pub(crate) fn new(entries: impl IntoIterator<Item = OpEntry>) -> Self {
        Self { entries: entries.into_iter().collect() }
    }

    /// Adds an op.
    ///
    /// # Errors
    /// When an op of that name is registered already.
    pub fn add(&mut self, entry: OpEntry) -> Result<()> {
        if self.get(&entry.name).is_some() {
            let why = format!("op `{}` is registered already; give the new op another name", entry.name);
            return Err(GraphError::usage("registry", why));
        }
        self.entries.push(entry);
        Ok(())
    }

    /// The op called `name`.
    pub fn get(&self, name: &str) -> Option<&OpEntry> {
        self.entries.iter().find(|entry| &*entry.name == name)
    }

    /// All ops.
    pub fn iter(&self) -> std::slice::Iter<'_, OpEntry> {
        self.entries.iter()
    }

    /// Number of ops.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no ops.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<'a> IntoIterator for &'a OpRegistry {
    type Item = &'a OpEntry;
    type IntoIter = std::slice::Iter<'a, OpEntry>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}
