//! The graph: functions of nodes. Built by [`Builder`](crate::Builder), changed by `passes/`, read by everything.

use std::fmt;
use std::sync::Arc;

use crate::cost::Cost;
use crate::op::CompositeRef;
use crate::prim::Prim;
use crate::types::Type;

/// Index of a function. A function calls only functions of smaller index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FuncId(pub u32);

impl FuncId {
    /// As an index into [`Graph::functions`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Output `out` of node `node` of the function that holds it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Var {
    /// Which building of a function made it: guards the builder against values of another function.
    pub(crate) owner: u32,
    /// Index of the node.
    pub node: u32,
    /// Which of the node's outputs.
    pub out: u32,
}

impl Var {
    /// The node's index into [`Function::nodes`].
    pub fn index(self) -> usize {
        self.node as usize
    }
}

impl fmt::Debug for Var {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.node)?;
        if self.out > 0 { write!(f, ".{}", self.out) } else { Ok(()) }
    }
}

/// What an argument or output of a function is. Of the graph's main function, weights are the parameters, states
/// live from step to step, and step inputs are given anew at each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// An ordinary value passed by the caller.
    Data,
    /// A parameter, bound by name.
    Weight,
    /// Linear state, bound by name.
    State,
    /// A named input of the step, the same for every function.
    StepInput,
}

/// A named argument of a function.
#[derive(Clone, Debug, PartialEq)]
pub struct Arg {
    /// Its name: relative to the function for weights and states.
    pub name: Arc<str>,
    /// Its type.
    pub ty: Type,
    /// What it is.
    pub role: Role,
}

/// A named output of a function.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Its name; a state's output has the state's name.
    pub name: Arc<str>,
    /// The value.
    pub var: Var,
    /// `Data`, or `State` for the last version of a state.
    pub role: Role,
}

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
    Kernel(&'static str),
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
    pub fn name(&self) -> &'static str {
        match self.kind {
            GroupKind::Kernel(name) => name,
            GroupKind::Fused => "fused",
        }
    }

    /// Arithmetic of all nodes, and their traffic less what stays between them in registers or cache.
    pub(crate) fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let mut total = Cost::default();
        for node in &self.body.nodes {
            let types = self.body.types(&node.inputs);
            match &node.op {
                Op::Prim(p) => total += &p.cost(&types, &node.outputs),
                Op::Composite(c) => total += &c.cost(&types, &node.outputs),
                Op::Arg(_) | Op::Call(_) | Op::Group(_) => {}
            }
        }
        if self.kind == GroupKind::Fused {
            let moved = Cost::moving(inputs, outputs);
            return Cost { bytes_read: moved.bytes_read, bytes_written: moved.bytes_written, ..total };
        }
        let is_arg = |v: &Var| matches!(self.body.nodes[v.index()].op, Op::Arg(_));
        for (index, node) in self.body.nodes.iter().enumerate() {
            for inner in node.inputs.iter().filter(|v| !is_arg(v)) {
                total.bytes_read += &(self.body.ty(*inner).bytes() * -1);
            }
            for out in 0..node.outputs.len() {
                let var = self.body.var(index, out);
                if !is_arg(&var) && self.body.outputs.iter().all(|o| o.var != var) {
                    total.bytes_written += &(node.outputs[out].bytes() * -1);
                }
            }
        }
        total
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
    /// The op's name as errors and the text form show it.
    pub fn op_name(&self) -> &'static str {
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
