//! What a composite op is. One file in `ops/` implements this trait for one op and says everything that is true of
//! it on every machine.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::builder::Builder;
use crate::cost::Cost;
use crate::error::{Result, Why};
use crate::graph::Var;
use crate::shard::Rule;
use crate::types::Type;

/// An op with a decomposition into primitives. Values are small, immutable, and equal when their `Debug` texts are.
pub trait Composite: fmt::Debug + Send + Sync + Any {
    /// Name in the text form, in patterns and in errors.
    fn name(&self) -> &'static str;

    /// Types of the outputs.
    ///
    /// # Errors
    /// Says which input is wrong and what would be accepted; the builder adds op, types and scope.
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why>;

    /// The meaning: the same outputs from primitives and other composites.
    ///
    /// # Errors
    /// Those of the ops it builds, which are bugs of this op once [`Composite::infer`] has accepted the inputs.
    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>>;

    /// Work of one application: arithmetic by unit and bytes, symbolic.
    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost;

    /// How its gradient is found; by default through the decomposition.
    fn gradient(&self) -> Gradient {
        Gradient::Derived
    }

    /// Which placements of inputs over one mesh axis give which placements of outputs, besides all replicated.
    /// Rules are tried in order. The default allows replication only.
    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<Rule> {
        Vec::new()
    }
}

/// How an op is differentiated.
#[derive(Clone, Debug)]
pub enum Gradient {
    /// By the chain rule through the decomposition.
    Derived,
    /// By two ordinary ops. `forward` takes the op's inputs and gives its outputs, then residuals of its own if it
    /// needs any; it is often the op itself. `backward` takes the `saved` values, then one cotangent for each float
    /// output of the op (of the output's plain type), and gives one cotangent for each input in `wrt` (of the input's
    /// plain type).
    Explicit {
        /// Outputs and residuals.
        forward: CompositeRef,
        /// What `backward` takes before the cotangents, so that no input is copied into a residual.
        saved: Vec<Saved>,
        /// Saved values and cotangents of outputs to cotangents of inputs.
        backward: CompositeRef,
        /// Inputs that `backward` gives cotangents for; the others have none.
        wrt: &'static [usize],
    },
    /// Outputs do not vary smoothly with inputs: no cotangent passes.
    None,
}

/// A value of the forward op that the backward op of an explicit gradient takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saved {
    /// An input of the op: a tensor, since a version of a state does not outlive its update.
    Input(usize),
    /// An output of `forward`: of the op itself, or after those a residual.
    Output(usize),
}

/// A shared composite, compared by name and attributes.
#[derive(Clone)]
pub struct CompositeRef(Arc<dyn Composite>);

impl CompositeRef {
    /// Shares `op`.
    pub fn new(op: impl Composite) -> Self {
        Self(Arc::new(op))
    }

    /// The op as its own type, if it is a `T`.
    pub fn downcast<T: Composite>(&self) -> Option<&T> {
        let any: &dyn Any = &*self.0;
        any.downcast_ref()
    }
}

impl std::ops::Deref for CompositeRef {
    type Target = dyn Composite;
    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Debug for CompositeRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

impl PartialEq for CompositeRef {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name() && format!("{self:?}") == format!("{other:?}")
    }
}
