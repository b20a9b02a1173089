//! The groups of ranks that this rank communicates with.

use std::collections::HashMap;
use std::sync::Arc;

use ridge_runtime::Collectives;

/// This rank's groups, by the name of the mesh axis.
pub(crate) type MeshGroups = HashMap<String, Arc<dyn Collectives>>;
