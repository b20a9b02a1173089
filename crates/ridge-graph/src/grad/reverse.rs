//! The reverse sweep: from the cotangents of a function's outputs to those of its arguments, last node first.

use super::prim;
use super::sweep::{ReverseSweep, SweptNode};
use super::tape::{BackwardRule, Derivative, ResidualSource};
use crate::error::Result;
use crate::graph::{CompositeRef, Op, Saved, Var};

impl ReverseSweep<'_> {
    /// Takes every cotangent back to the arguments.
    pub(super) fn run(&mut self) -> Result<()> {
        let forward = self.forward;
        for (index, node) in forward.nodes.iter().enumerate().rev() {
            let cotangents: Vec<Option<Var>> =
                (0..node.outputs.len()).map(|out| self.cotangent(forward.var(index, out))).collect();
            if cotangents.iter().all(Option::is_none) {
                continue;
            }
            self.g.set_scope(&node.scope);
            let tape = self.tape;
            let mut at = SweptNode { sweep: self, node, index };
            match (&node.op, tape.rules.get(&index)) {
                (Op::Prim(p), _) => prim::backward(&mut at, p, &cotangents)?,
                (_, Some(BackwardRule::Call(derivative))) => at.call(derivative, &cotangents)?,
                (_, Some(BackwardRule::Explicit { saved, backward, wrt, outputs })) => {
                    at.explicit(saved, backward, wrt, &cotangents[..*outputs])?;
                }
                // An argument, or an op that no cotangent passes.
                _ => {}
            }
        }
        self.g.set_scope("");
        Ok(())
    }
}

impl SweptNode<'_, '_> {
    fn explicit(
        &mut self,
        saved: &[Saved],
        backward: &CompositeRef,
        wrt: &[usize],
        cotangents: &[Option<Var>],
    ) -> Result<()> {
        let mut inputs = Vec::with_capacity(saved.len() + cotangents.len());
        for s in saved {
            let var = match s {
                Saved::Input(i) => self.node.inputs[*i],
                Saved::Output(out) => self.sweep.forward.var(self.index, *out),
            };
            if self.sweep.forward.ty(var).state {
                return Err(self.error(format!("its gradient saves {s:?}, a state; save what the state holds instead")));
            }
            inputs.push(self.sweep.value(var)?);
        }
        let floats = (0..cotangents.len()).filter(|i| self.node.outputs[*i].dtype.is_float());
        inputs.extend(self.filled(cotangents, floats)?);
        let given = match backward.is_shorthand() {
            true => backward.decompose(self.g(), &inputs)?,
            false => self.g().emit(Op::Composite(backward.clone()), &inputs)?,
        };
        if given.len() != wrt.len() {
            return Err(self.error(format!("its gradient gives {} cotangents, not {}", given.len(), wrt.len())));
        }
        wrt.iter().zip(given).try_for_each(|(i, cotangent)| self.give(*i, cotangent))
    }

    fn call(&mut self, derivative: &Derivative, cotangents: &[Option<Var>]) -> Result<()> {
        let mut inputs = Vec::with_capacity(derivative.residuals.len() + derivative.cotangents.len());
        for source in &derivative.residuals {
            inputs.push(match source {
                ResidualSource::Arg(i) => self.input(*i)?,
                ResidualSource::Output(out) => self.output(*out)?,
            });
        }
        let taken = derivative.cotangents.iter().map(|i| derivative.outputs[*i]);
        inputs.extend(self.filled(cotangents, taken)?);
        let given = self.g().emit(Op::Call(derivative.backward), &inputs)?;
        derivative.wrt.iter().zip(given).try_for_each(|(i, cotangent)| self.give(*i, cotangent))
    }
}
