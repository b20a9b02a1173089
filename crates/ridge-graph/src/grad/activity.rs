//! Which values of a function carry derivatives: they depend smoothly on what is differentiated for, and an output
//! that matters depends on them. Everything else is left as it is and costs nothing.

use std::collections::HashMap;
use std::rc::Rc;

use crate::graph::{FuncId, Function, Gradient, Node, Op};
use crate::prim::{Prim, Unary};
use crate::types::Type;

/// A mark for each of a list: arguments, outputs, or a node's outputs.
pub(super) type Mask = Vec<bool>;

/// A mark for each output of each node.
pub(super) type Values = Vec<Mask>;

/// Analyses functions, each once for each way that it is called.
#[derive(Debug, Default)]
pub(super) struct Activity {
    outputs: HashMap<(FuncId, Mask), Rc<Mask>>,
    args: HashMap<(FuncId, Mask, Mask), Rc<Mask>>,
}

/// Is this the type of a value that a derivative can be taken for? Cotangents also pass values in formats that a graph
/// computes, by the gradients of the ops that quantise.
pub(super) fn is_smooth(ty: &Type) -> bool {
    ty.dtype.is_float() && ty.format.is_none()
}

impl Activity {
    /// Values of `function` that depend on the arguments in `args` and lead to the outputs in `outputs`.
    pub(super) fn active(
        &mut self,
        functions: &[Function],
        function: &Function,
        args: &Mask,
        outputs: &Mask,
    ) -> Values {
        let varied = self.varied(functions, function, args);
        let mut active: Values = varied.iter().map(|outs| vec![false; outs.len()]).collect();
        for (output, _) in function.outputs.iter().zip(outputs).filter(|(_, marked)| **marked) {
            let (node, out) = (output.var.index(), output.var.out as usize);
            active[node][out] = varied[node][out];
        }
        for (i, node) in function.nodes.iter().enumerate().rev() {
            if !active[i].contains(&true) {
                continue;
            }
            let inputs: Mask = node.inputs.iter().map(|v| varied[v.index()][v.out as usize]).collect();
            let reached = self.reached(functions, node, &inputs, &active[i]);
            for (var, reached) in node.inputs.iter().zip(reached) {
                active[var.index()][var.out as usize] |= reached;
            }
        }
        active
    }

    /// Values that depend smoothly on the arguments in `args`.
    fn varied(&mut self, functions: &[Function], function: &Function, args: &Mask) -> Values {
        let mut varied: Values = Vec::with_capacity(function.nodes.len());
        for node in &function.nodes {
            let inputs: Mask = node.inputs.iter().map(|v| varied[v.index()][v.out as usize]).collect();
            let from_inputs = match &node.op {
                Op::Arg(i) => vec![args[*i]],
                _ if !inputs.contains(&true) => vec![false; node.outputs.len()],
                Op::Call(callee) => self.call_outputs(functions, *callee, inputs).to_vec(),
                op => vec![relevant(op, &inputs).contains(&true); node.outputs.len()],
            };
            varied.push(from_inputs.into_iter().zip(&node.outputs).map(|(v, ty)| v && ty.dtype.is_float()).collect());
        }
        varied
    }

    /// Which of the varied `inputs` of a node the active `outputs` depend on.
    fn reached(&mut self, functions: &[Function], node: &Node, inputs: &Mask, outputs: &Mask) -> Mask {
        match &node.op {
            Op::Call(callee) => self.call_args(functions, *callee, inputs, outputs).to_vec(),
            op => relevant(op, inputs),
        }
    }

    fn call_outputs(&mut self, functions: &[Function], callee: FuncId, inputs: Mask) -> Rc<Mask> {
        if let Some(known) = self.outputs.get(&(callee, inputs.clone())) {
            return Rc::clone(known);
        }
        let function = &functions[callee.index()];
        let varied = self.varied(functions, function, &inputs);
        let outputs = function.outputs.iter().map(|o| varied[o.var.index()][o.var.out as usize]);
        let outputs = Rc::new(outputs.collect());
        self.outputs.insert((callee, inputs), Rc::clone(&outputs));
        outputs
    }

    fn call_args(&mut self, functions: &[Function], callee: FuncId, inputs: &Mask, outputs: &Mask) -> Rc<Mask> {
        let key = (callee, inputs.clone(), outputs.clone());
        if let Some(known) = self.args.get(&key) {
            return Rc::clone(known);
        }
        let function = &functions[callee.index()];
        let active = self.active(functions, function, inputs, outputs);
        let mut args = vec![false; function.args.len()];
        for (node, active) in function.nodes.iter().zip(&active) {
            if let Op::Arg(i) = node.op {
                args[i] = active[0];
            }
        }
        let args = Rc::new(args);
        self.args.insert(key, Rc::clone(&args));
        args
    }
}

/// Of the varied `inputs`, those through which a cotangent passes.
fn relevant(op: &Op, inputs: &Mask) -> Mask {
    let only = |kept: &[usize]| inputs.iter().enumerate().map(|(i, varied)| *varied && kept.contains(&i)).collect();
    match op {
        // Flat between its jumps; and codes with scales, since ops that quantise have gradients of their own.
        Op::Prim(Prim::Unary(Unary::Floor) | Prim::Component(_) | Prim::Assemble { .. }) => only(&[]),
        // The old version is gone.
        Op::Prim(Prim::StateWrite) => only(&[1]),
        Op::Composite(op) => match op.gradient() {
            Gradient::Derived => inputs.clone(),
            Gradient::Explicit { wrt, .. } => only(&wrt),
            Gradient::None => only(&[]),
        },
        _ => inputs.clone(),
    }
}
