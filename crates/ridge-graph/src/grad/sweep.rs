//! The state of a reverse sweep: cotangents so far, and what a node's backward rule sees. `grad/reverse.rs` runs it.

use std::collections::HashMap;

use super::tape::Tape;
use crate::error::{GraphError, Result, place};
use crate::graph::{Arg, Builder, Function, Node, Role, Var};
use crate::types::Type;

/// A sweep over `forward`, building into the function that is open in `g`.
pub(super) struct ReverseSweep<'a> {
    pub(super) g: &'a mut Builder,
    pub(super) forward: &'a Function,
    pub(super) tape: &'a Tape,
    cotangents: HashMap<Var, Var>,
    /// Arguments that stand for values of `forward`, in the order they were asked for; `None` where `forward` is the
    /// function that is open, so that its values are at hand.
    requested: Option<Vec<(Var, Var)>>,
}

/// One node in the sweep.
pub(super) struct SweptNode<'s, 'a> {
    pub(super) sweep: &'s mut ReverseSweep<'a>,
    pub(super) node: &'a Node,
    pub(super) index: usize,
}

impl<'a> ReverseSweep<'a> {
    /// A sweep within the function that `forward` is a copy of.
    pub(super) fn within(g: &'a mut Builder, forward: &'a Function, tape: &'a Tape) -> Self {
        Self { g, forward, tape, cotangents: HashMap::new(), requested: None }
    }

    /// A sweep into a function of its own, which takes forward values as arguments.
    pub(super) fn with_residuals(g: &'a mut Builder, forward: &'a Function, tape: &'a Tape) -> Self {
        Self { requested: Some(Vec::new()), ..Self::within(g, forward, tape) }
    }

    /// Adds to the cotangent of a forward value.
    pub(super) fn add(&mut self, value: Var, cotangent: Var) -> Result<()> {
        let sum = match self.cotangents.get(&value) {
            Some(earlier) => self.g.add(*earlier, cotangent)?,
            None => cotangent,
        };
        self.cotangents.insert(value, sum);
        Ok(())
    }

    /// The cotangent of a forward value, if any came.
    pub(super) fn cotangent(&self, value: Var) -> Option<Var> {
        self.cotangents.get(&value).copied()
    }

    /// The forward values asked for, each with the argument that stands for it.
    pub(super) fn into_requested(self) -> Vec<(Var, Var)> {
        self.requested.unwrap_or_default()
    }

    /// A forward value, as the backward half sees it.
    pub(super) fn value(&mut self, value: Var) -> Result<Var> {
        let Some(requested) = &mut self.requested else { return Ok(value) };
        if let Some((_, arg)) = requested.iter().find(|(v, _)| *v == value) {
            return Ok(*arg);
        }
        let ty = self.forward.ty(value).clone();
        let arg = self.g.push_arg(Arg::new(format!("{value:?}"), ty, Role::Data));
        requested.push((value, arg));
        Ok(arg)
    }

    /// Zeros of the plain type of `ty`.
    pub(super) fn zeros(&mut self, ty: &Type) -> Result<Var> {
        let zero = self.g.constant(ty.dtype, 0.0)?;
        self.g.broadcast(zero, ty.shape.clone())
    }
}

impl SweptNode<'_, '_> {
    /// Is the cotangent of input `i` wanted?
    pub(super) fn wants(&self, i: usize) -> bool {
        self.sweep.tape.active.contains(&self.node.inputs[i])
    }

    /// Type of input `i`.
    pub(super) fn ty(&self, i: usize) -> &Type {
        self.sweep.forward.ty(self.node.inputs[i])
    }

    /// Value of input `i`.
    pub(super) fn input(&mut self, i: usize) -> Result<Var> {
        self.sweep.value(self.node.inputs[i])
    }

    /// Value of output `out`.
    pub(super) fn output(&mut self, out: usize) -> Result<Var> {
        self.sweep.value(self.sweep.forward.var(self.index, out))
    }

    /// The builder of the backward half.
    pub(super) fn g(&mut self) -> &mut Builder {
        self.sweep.g
    }

    /// Adds to the cotangent of input `i`.
    pub(super) fn give(&mut self, i: usize, cotangent: Var) -> Result<()> {
        if !self.wants(i) {
            return Ok(());
        }
        let (wanted, got) = (self.ty(i).plain(), self.sweep.g.ty(cotangent)?);
        if *got != wanted {
            return Err(self.error(format!("its gradient gives {got} for input {i}, which must be {wanted}")));
        }
        self.sweep.add(self.node.inputs[i], cotangent)
    }

    /// An error of this node.
    pub(super) fn error(&self, why: impl Into<String>) -> GraphError {
        GraphError::Op {
            at: place(&self.node.scope),
            op: self.node.op_name().into(),
            inputs: self.sweep.forward.types(&self.node.inputs),
            why: why.into(),
        }
    }

    /// The cotangents, zero where none came.
    pub(super) fn filled(
        &mut self,
        cotangents: &[Option<Var>],
        outputs: impl Iterator<Item = usize>,
    ) -> Result<Vec<Var>> {
        outputs.map(|i| cotangents[i].map_or_else(|| self.sweep.zeros(&self.node.outputs[i]), Ok)).collect()
    }
}
