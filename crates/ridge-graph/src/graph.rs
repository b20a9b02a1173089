//! The graph: functions of nodes, the trait of the ops that nodes apply, and the builder that ops decompose with.
//!
//! These types refer to one another, so they are defined together: a node applies a composite op, an op decomposes
//! through a [`Builder`], and a builder holds functions of nodes. What they do is in files above this one: `graph/cost.rs`
//! costs a graph, `graph/uncalled.rs` drops functions, `builder.rs` has the builder's methods and `ops/` the ops.

mod cost;
mod uncalled;
mod values;

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use crate::cost::Cost;
use crate::dyn_eq::DynEq;
use crate::error::Result;
use crate::prim::Prim;
use crate::shard::ShardingRule;
use crate::types::Type;
use crate::why::Why;
use crate::work::Work;

pub use values::{Arg, FuncId, Output, Role, Var};

/// An op of a node.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Argument of the function.
    Arg(usize),
    /// A primitive.
    Prim(Prim),
    /// An op of `ops/`.
    Composite(CompositeRef),
    /// A call of another function.
    Call(FuncId),
    /// Nodes that one kernel computes together, made by passes.
    Group(Arc<Group>),
}

/// Why nodes are computed together.
#[derive(Clone, Debug, PartialEq)]
pub enum GroupKind {
    /// A backend's kernel claimed them; the name is the kernel's.
    Kernel(Arc<str>),
    /// A fused chain of elementwise ops and reductions over the last axis.
    Fused,
}

/// A set of nodes computed together. The body keeps their meaning.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Who computes it.
    pub kind: GroupKind,
    /// The nodes, as a function of the group's inputs.
    pub body: Function,
}

impl Group {
    /// The kernel's name, or `fused`.
    pub fn name(&self) -> &str {
        match &self.kind {
            GroupKind::Kernel(name) => name,
            GroupKind::Fused => "fused",
        }
    }
}

/// One op applied.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What is done.
    pub op: Op,
    /// To which values.
    pub inputs: Vec<Var>,
    /// Types of the outputs.
    pub outputs: Vec<Type>,
    /// Where in the model, such as `self_attn.q_proj`, relative to the function.
    pub scope: Arc<str>,
}

impl Node {
    /// What kind of work it is; a view, of what is none.
    pub fn work(&self) -> Work {
        match &self.op {
            Op::Prim(p) => p.work(),
            Op::Composite(c) => c.work(),
            Op::Arg(_) | Op::Call(_) | Op::Group(_) => Work::View,
        }
    }

    /// The op's name as errors and the text form show it.
    pub fn op_name(&self) -> &str {
        match &self.op {
            Op::Arg(_) => "arg",
            Op::Prim(p) => p.name(),
            Op::Composite(c) => c.name(),
            Op::Call(_) => "call",
            Op::Group(g) => g.name(),
        }
    }
}

/// A function: nodes in an order where inputs come before uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Function {
    /// Name, such as `decoder_layer`.
    pub name: Arc<str>,
    /// Arguments; node `Op::Arg(i)` is argument `i`.
    pub args: Vec<Arg>,
    /// The nodes.
    pub nodes: Vec<Node>,
    /// The outputs.
    pub outputs: Vec<Output>,
    pub(crate) owner: u32,
}

impl Function {
    /// Type of `var`.
    pub fn ty(&self, var: Var) -> &Type {
        &self.nodes[var.index()].outputs[var.out as usize]
    }

    /// Types of several values.
    pub fn types(&self, vars: &[Var]) -> Vec<Type> {
        vars.iter().map(|v| self.ty(*v).clone()).collect()
    }

    /// Position of the argument called `name`.
    pub fn arg_index(&self, name: &str) -> Option<usize> {
        self.args.iter().position(|a| &*a.name == name)
    }

    /// Output `out` of node `node`.
    pub fn var(&self, node: usize, out: usize) -> Var {
        Var { owner: self.owner, node: node as u32, out: out as u32 }
    }

    /// How many nodes and outputs use each output of each node.
    pub fn uses(&self) -> Vec<Vec<u32>> {
        let mut uses: Vec<Vec<u32>> = self.nodes.iter().map(|n| vec![0; n.outputs.len()]).collect();
        let outputs = self.outputs.iter().map(|o| &o.var);
        for var in self.nodes.iter().flat_map(|n| &n.inputs).chain(outputs) {
            uses[var.index()][var.out as usize] += 1;
        }
        uses
    }
}

/// A model, a training step or any other computation.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    /// All functions, callees before callers.
    pub functions: Vec<Function>,
    /// The one that is run.
    pub main: FuncId,
}

impl Graph {
    /// The function of this id.
    pub fn function(&self, id: FuncId) -> &Function {
        &self.functions[id.index()]
    }

    /// The main function.
    pub fn main(&self) -> &Function {
        self.function(self.main)
    }

    /// Arguments of the main function that have `role`.
    pub fn args(&self, role: Role) -> impl Iterator<Item = &Arg> {
        self.main().args.iter().filter(move |a| a.role == role)
    }
}

/// An op with a decomposition into primitives. Values are small and immutable; two are equal when they have one type and
/// are equal by its `PartialEq`, which the trait asks for through [`DynEq`]. `Debug` is the attributes' text form.
pub trait Composite: fmt::Debug + Send + Sync + DynEq {
    /// Name in the text form, in patterns and in errors.
    fn name(&self) -> &str;

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

    /// What kind of work it is, for those who plan; by default a pass over its operands.
    fn work(&self) -> Work {
        Work::Pass
    }

    /// The op as it computes one row of each sequence, and not all tokens of a step, where its cost is told in other symbols
    /// then; `None` where it is the same.
    fn of_single_rows(&self) -> Option<CompositeRef> {
        None
    }

    /// How its gradient is found; by default through the decomposition.
    fn gradient(&self) -> Gradient {
        Gradient::Derived
    }

    /// Is it only a name for its decomposition, which takes its place wherever a gradient is built with it?
    fn is_shorthand(&self) -> bool {
        false
    }

    /// Which placements of inputs over one mesh axis give which placements of outputs, besides all replicated.
    /// Rules are tried in order. The default allows replication only.
    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
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
        wrt: Vec<usize>,
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

/// A shared composite, compared by type and attributes.
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
        let other: &dyn Any = &*other.0;
        self.0.dyn_eq(other)
    }
}

/// A function being built.
#[derive(Debug, Default)]
pub(crate) struct OpenFunction {
    pub(crate) function: Function,
    pub(crate) scope: String,
    /// Versions of states that have been replaced.
    pub(crate) stale: HashSet<Var>,
    /// The last version of each state argument, by argument index.
    pub(crate) states: Vec<(usize, Var)>,
    /// Index and value of each argument that is asked for by name.
    pub(crate) named: HashMap<(Role, Arc<str>), (usize, Var)>,
}

/// Builds a [`Graph`]. Its methods check their inputs and name op, types and scope when they do not fit.
///
/// A model is written with `scoped`, `function` and `call`; weights, states and step inputs are asked for by name
/// where they are used, and the builder carries them through calls: a function that asks for the weight
/// `q_proj.weight` inside scope `self_attn`, called within scope `model.layers.3`, makes the main function take the
/// weight `model.layers.3.self_attn.q_proj.weight`. There is a method for each primitive and for each op of `ops/`.
#[derive(Debug)]
pub struct Builder {
    pub(crate) functions: Vec<Function>,
    pub(crate) open: Vec<OpenFunction>,
    /// How many functions were begun: each has a number of its own, which its values carry.
    pub(crate) owners: u32,
}
