//! Names of what a graph's functions compute: functions, values, arguments and outputs.

use std::fmt;
use std::sync::Arc;

use crate::types::Type;

/// Index of a function. A function calls only functions of smaller index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FuncId(pub u32);

impl FuncId {
    /// As an index into [`Graph::functions`](super::Graph::functions).
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
    /// The node's index into [`Function::nodes`](super::Function::nodes).
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

/// What an argument or output of a function is. Weights and states of the graph's main function are parameters, memory
/// that outlives a step, and their roles say what this graph does with it: the weight of one program may be the state of
/// another, by the same name. Step inputs are given again at each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// An ordinary value passed by the caller.
    Data,
    /// A parameter that is read, bound by name.
    Weight,
    /// A parameter that is read and updated in place, bound by name. It is linear: an update gives the next version.
    State,
    /// A named input of the step, the same for every function.
    StepInput,
    /// The key that a function derives its random numbers from, which each call gives again; main has none.
    Key,
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
    /// Of a step input: may it be given after the step was submitted? What does not depend on it runs meanwhile.
    pub late: bool,
}

impl Arg {
    /// An argument that is not late.
    pub fn new(name: impl Into<Arc<str>>, ty: Type, role: Role) -> Self {
        Self { name: name.into(), ty, role, late: false }
    }
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
