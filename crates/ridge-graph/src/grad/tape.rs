//! What the forward half of a function records for its backward half.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use crate::graph::{CompositeRef, FuncId, Saved, Var};

/// A function differentiated for some of its arguments, given cotangents of some of its outputs.
#[derive(Debug)]
pub(super) struct Derivative {
    /// The function with residuals among its outputs.
    pub(super) forward: FuncId,
    /// Where the function's own outputs stand among those of `forward`.
    pub(super) outputs: Vec<usize>,
    /// Takes residuals, then cotangents; gives cotangents.
    pub(super) backward: FuncId,
    /// What `backward` takes first.
    pub(super) residuals: Vec<ResidualSource>,
    /// The function's outputs whose cotangents `backward` takes.
    pub(super) cotangents: Vec<usize>,
    /// The function's arguments whose cotangents `backward` gives.
    pub(super) wrt: Vec<usize>,
}

/// Where a caller finds a residual.
#[derive(Clone, Copy, Debug)]
pub(super) enum ResidualSource {
    /// It passed it as this argument.
    Arg(usize),
    /// It got it as this output of the forward half.
    Output(usize),
}

/// How the cotangents of a node that is no primitive are found.
#[derive(Clone, Debug)]
pub(super) enum BackwardRule {
    /// By the op's own backward op.
    Explicit {
        /// Values of the forward op that it takes.
        saved: Vec<Saved>,
        /// The op.
        backward: CompositeRef,
        /// Inputs that it gives cotangents for.
        wrt: Vec<usize>,
        /// Number of the op's outputs before residuals.
        outputs: usize,
    },
    /// By the callee's backward half.
    Call(Rc<Derivative>),
}

/// What the reverse sweep needs to know of a forward half besides its nodes.
#[derive(Debug, Default)]
pub(super) struct Tape {
    /// By index of node.
    pub(super) rules: HashMap<usize, BackwardRule>,
    /// The values whose cotangents are wanted.
    pub(super) active: HashSet<Var>,
}
