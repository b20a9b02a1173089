//! The forward half: a function copied with its active composites opened up to what can be differentiated, and calls
//! replaced by calls of the callee's forward half.

use std::collections::HashMap;
use std::rc::Rc;

use super::activity::{Activity, Mask, Values};
use super::residual::{BackwardHalf, Recompute, settle};
use super::sweep::ReverseSweep;
use super::tape::{BackwardRule, Derivative, ResidualSource, Tape};
use crate::error::{GraphError, Result, place};
use crate::graph::{Arg, Builder, CompositeRef, FuncId, Function, Gradient, Node, Op, Output, Role, Var};

/// Builds forward and backward halves, once for each function and set of active arguments and outputs.
#[derive(Debug)]
pub(super) struct Differentiator {
    pub(super) g: Builder,
    pub(super) activity: Activity,
    /// What the calls in the function that is open recompute, in order; of further calls, and in callees, nothing.
    recompute: std::vec::IntoIter<Recompute>,
    made: HashMap<(FuncId, Mask, Mask, Recompute), Rc<Derivative>>,
}

impl Differentiator {
    /// `recompute` is for each call of main through which the loss depends on a parameter.
    pub(super) fn new(g: Builder, recompute: Vec<Recompute>) -> Self {
        Self { g, activity: Activity::default(), recompute: recompute.into_iter(), made: HashMap::new() }
    }

    /// Copies `source` into the function now open, `args` being its arguments there. Returns its outputs.
    pub(super) fn expand(
        &mut self,
        source: &Function,
        args: &[Var],
        active: &Values,
        tape: &mut Tape,
    ) -> Result<Vec<Var>> {
        let mut map: Vec<Vec<Var>> = Vec::with_capacity(source.nodes.len());
        for (node, active_outputs) in source.nodes.iter().zip(active) {
            self.g.set_scope(&node.scope);
            let inputs: Vec<Var> = node.inputs.iter().map(|v| map[v.index()][v.out as usize]).collect();
            let outputs = match &node.op {
                Op::Arg(i) => vec![args[*i]],
                op if !active_outputs.contains(&true) => self.g.emit(op.clone(), &inputs)?,
                Op::Prim(_) => self.g.emit(node.op.clone(), &inputs)?,
                Op::Composite(op) => {
                    let active_inputs = node.inputs.iter().map(|v| active[v.index()][v.out as usize]).collect();
                    self.composite(op, node, &inputs, &active_inputs, active_outputs, tape)?
                }
                Op::Call(callee) => {
                    let active_inputs = node.inputs.iter().map(|v| active[v.index()][v.out as usize]).collect();
                    let recompute = self.recompute.next().unwrap_or_default();
                    let derivative = self.derivative(*callee, active_inputs, active_outputs.clone(), recompute);
                    let derivative = derivative.map_err(|e| e.within(&node.scope))?;
                    self.g.set_scope(&node.scope);
                    let all = self.g.emit(Op::Call(derivative.forward), &inputs)?;
                    let own = derivative.outputs.iter().map(|i| all[*i]).collect();
                    tape.rules.insert(all[0].index(), BackwardRule::Call(derivative));
                    own
                }
                Op::Group(_) => {
                    return Err(GraphError::Op {
                        at: place(&node.scope),
                        op: node.op_name().into(),
                        inputs: source.types(&node.inputs),
                        why: "a group has no gradient; differentiate before kernels are matched".into(),
                    });
                }
            };
            tape.active.extend(outputs.iter().zip(active_outputs).filter(|(_, active)| **active).map(|(v, _)| *v));
            map.push(outputs);
        }
        Ok(source.outputs.iter().map(|o| map[o.var.index()][o.var.out as usize]).collect())
    }

    fn composite(
        &mut self,
        op: &CompositeRef,
        node: &Node,
        inputs: &[Var],
        active_inputs: &Mask,
        active_outputs: &Mask,
        tape: &mut Tape,
    ) -> Result<Vec<Var>> {
        match op.gradient() {
            Gradient::Explicit { forward, saved, backward, wrt } => {
                let mut all = self.g.emit(Op::Composite(forward), inputs)?;
                let outputs = node.outputs.len();
                tape.rules.insert(all[0].index(), BackwardRule::Explicit { saved, backward, wrt, outputs });
                all.truncate(outputs);
                Ok(all)
            }
            Gradient::Derived => {
                let body = self.decomposed(op, inputs, &node.scope)?;
                let active = self.activity.active(self.g.functions(), &body, active_inputs, active_outputs);
                self.expand(&body, inputs, &active, tape)
            }
            Gradient::None => self.g.emit(Op::Composite(op.clone()), inputs),
        }
    }

    /// The decomposition of `op` as a function of its inputs.
    fn decomposed(&mut self, op: &CompositeRef, inputs: &[Var], scope: &str) -> Result<Function> {
        let types = inputs.iter().map(|v| self.g.ty(*v).cloned()).collect::<Result<Vec<_>>>()?;
        self.g.begin(op.name());
        self.g.set_scope(scope);
        let args: Vec<Var> = types.into_iter().enumerate().map(|(i, ty)| self.g.arg(&i.to_string(), ty)).collect();
        let outputs = op.decompose(&mut self.g, &args)?;
        let named = |(i, var): (usize, Var)| Output { name: i.to_string().into(), var, role: Role::Data };
        Ok(self.g.end(outputs.into_iter().enumerate().map(named).collect()))
    }

    /// The halves of `callee` for these active arguments and outputs.
    fn derivative(
        &mut self,
        callee: FuncId,
        args: Mask,
        outputs: Mask,
        recompute: Recompute,
    ) -> Result<Rc<Derivative>> {
        let key = (callee, args, outputs, recompute);
        if let Some(made) = self.made.get(&key) {
            return Ok(Rc::clone(made));
        }
        let (_, args, outputs, _) = &key;
        // Calls within recompute nothing of their own: repeating this function repeats them.
        let of_caller = std::mem::take(&mut self.recompute);
        let source = self.g.functions()[callee.index()].clone();
        let active = self.activity.active(self.g.functions(), &source, args, outputs);

        self.g.begin(&self.unused_name(&source.name, "fwd"));
        let params: Vec<Var> = source.args.iter().map(|a| self.g.push_arg(a.clone())).collect();
        let mut tape = Tape::default();
        let results = self.expand(&source, &params, &active, &mut tape)?;
        let forward = self.g.current().clone();

        self.g.begin(&self.unused_name(&source.name, "bwd"));
        let cotangents: Vec<usize> = (0..results.len()).filter(|i| outputs[*i]).collect();
        let mut sweep = ReverseSweep::with_residuals(&mut self.g, &forward, &tape);
        for i in &cotangents {
            let ty = forward.ty(results[*i]).plain();
            let name = format!("grad.{}", source.outputs[*i].name);
            let cotangent = sweep.g.push_arg(Arg::new(name, ty, Role::Data));
            sweep.add(results[*i], cotangent)?;
        }
        sweep.run()?;
        let mut wrt = Vec::new();
        let mut given = Vec::new();
        for (i, param) in params.iter().enumerate().filter(|(i, _)| args[*i]) {
            if let Some(var) = sweep.cotangent(*param) {
                wrt.push(i);
                given.push(Output { name: format!("grad.{}", source.args[i].name).into(), var, role: Role::Data });
            }
        }
        let requested = sweep.into_requested();
        let draft = self.g.end(given);
        let BackwardHalf { function: backward, saved } = settle(&mut self.g, &forward, draft, &requested, recompute)?;
        self.g.functions_mut().push(backward);
        let backward = FuncId(self.g.functions().len() as u32 - 1);

        let data = (0..results.len()).filter(|i| source.outputs[*i].role == Role::Data);
        let states = (0..results.len()).filter(|i| source.outputs[*i].role != Role::Data);
        let own = |i: usize| Output { var: results[i], ..source.outputs[i].clone() };
        let mut all: Vec<Output> = data.clone().map(own).collect();
        let mut residuals = Vec::with_capacity(saved.len());
        for var in saved {
            let produced = all.iter().position(|o| o.var == var);
            residuals.push(match (&forward.nodes[var.index()].op, produced) {
                (Op::Arg(i), _) => ResidualSource::Arg(*i),
                (_, Some(position)) => ResidualSource::Output(position),
                _ => {
                    all.push(Output { name: format!("saved.{}", residuals.len()).into(), var, role: Role::Data });
                    ResidualSource::Output(all.len() - 1)
                }
            });
        }
        let mut positions = vec![0; results.len()];
        data.clone().enumerate().for_each(|(at, i)| positions[i] = at);
        states.clone().enumerate().for_each(|(at, i)| positions[i] = all.len() + at);
        all.extend(states.map(own));
        let forward = self.g.end(all);
        self.g.functions_mut().push(forward);
        let forward = FuncId(self.g.functions().len() as u32 - 1);
        self.recompute = of_caller;

        let made = Rc::new(Derivative { forward, outputs: positions, backward, residuals, cotangents, wrt });
        self.made.insert(key, Rc::clone(&made));
        Ok(made)
    }

    fn unused_name(&self, function: &str, half: &str) -> String {
        let taken = |name: &str| self.g.functions().iter().any(|f| &*f.name == name);
        let first = format!("{function}_{half}");
        if !taken(&first) {
            return first;
        }
        (2..).map(|n| format!("{first}_{n}")).find(|name| !taken(name)).unwrap_or(first)
    }
}
