//! Horizontal fusion: the parts of a norm's gradient and the sums over its rows become one op, for which rows are read once.

#[cfg(test)]
mod tests;

use super::claim::reaches;
use super::offer::Kernel;
use super::order::Draft;
use crate::dtype::DType;
use crate::graph::{CompositeRef, Function, Graph, Node, Op, Var};
use crate::ops::{NormGradients, NormInputGradient, NormWeightGradient, SumRows};
use crate::prim::{Binary, Prim};

/// Joins the gradients to the input and to the weight of each norm with the addition to another cotangent and the sums over
/// rows of `dy`, of the result and of what it is added to, within each function. Does nothing where no kernel's pattern has the joint
/// op as its root; a joint op that is not claimed is decomposed into its parts again.
pub fn group_norm_gradients(graph: &mut Graph, kernels: &[Kernel]) {
    let [layer, rms] = ["layer_norm_gradients", "rms_norm_gradients"]
        .map(|name| kernels.iter().any(|kernel| kernel.pattern.root_op() == name));
    if !layer && !rms {
        return;
    }
    for function in &mut graph.functions {
        // In their order, so that where a result is added to another, the sum of the other goes with what computes it.
        let mut at = 0;
        while let Some(offset) = function.nodes[at..].iter().position(|node| {
            composite::<NormInputGradient>(node).is_some_and(|op| if op.centred { layer } else { rms })
        }) {
            at += offset;
            match Parts::of(function, at) {
                // Nodes move, so begin again.
                Some(parts) => (*function, at) = (parts.join(std::mem::take(function)), 0),
                None => at += 1,
            }
        }
    }
}

fn composite<T: crate::graph::Composite>(node: &Node) -> Option<&T> {
    match &node.op {
        Op::Composite(op) => op.downcast::<T>(),
        _ => None,
    }
}

/// What is joined: nodes by their indices.
struct Parts {
    op: NormGradients,
    /// x, the weight and dy, and what the result is added to.
    inputs: Vec<Var>,
    /// In the order of the op's outputs, of which they give the first ones each.
    outputs: Vec<usize>,
    /// All of them.
    nodes: Vec<usize>,
}

impl Parts {
    /// The parts of the gradient whose first is node `first`; `None` where the weight gets no gradient.
    fn of(function: &Function, first: usize) -> Option<Self> {
        let NormInputGradient { eps, centred } = *composite::<NormInputGradient>(&function.nodes[first])?;
        let [x, _, dy] = function.nodes[first].inputs[..] else { return None };
        let is_weight = |node: &Node| {
            composite::<NormWeightGradient>(node).is_some_and(|op| {
                let same = NormWeightGradient { eps, centred, dtype: op.dtype };
                *op == same && node.inputs == [x, dy]
            })
        };
        let weight = function.nodes.iter().position(is_weight)?;
        let dtype = composite::<NormWeightGradient>(&function.nodes[weight])?.dtype;
        let mut parts = Self {
            op: NormGradients { eps, centred, added: false, weight: dtype, bias: None, sum: None, sum_added: None },
            inputs: function.nodes[first].inputs.clone(),
            outputs: vec![first, weight],
            nodes: vec![first, weight],
        };
        if reaches(function, &parts.nodes, &parts.inputs) {
            return None;
        }
        parts.add(function);
        parts.op.bias = parts.sum(function, dy);
        parts.op.sum = parts.sum(function, function.var(parts.outputs[0], 0));
        if let Some(r) = parts.inputs.get(3).copied() {
            parts.op.sum_added = parts.sum(function, r);
        }
        Some(parts)
    }

    /// Takes the addition of the result to another value, if that is its only reader.
    fn add(&mut self, function: &Function) {
        let dx = function.var(self.outputs[0], 0);
        let reads = |(i, node): (usize, &Node)| node.inputs.iter().filter(|v| **v == dx).map(move |_| i).next();
        let mut readers = function.nodes.iter().enumerate().filter_map(reads);
        let (Some(reader), None) = (readers.next(), readers.next()) else { return };
        let node = &function.nodes[reader];
        let is_add = matches!(node.op, Op::Prim(Prim::Binary(Binary::Add)));
        let [a, b] = node.inputs[..] else { return };
        let r = if a == dx { b } else { a };
        if !is_add || r == dx || function.ty(r) != function.ty(dx) || function.outputs.iter().any(|o| o.var == dx) {
            return;
        }
        let mut inputs = self.inputs.clone();
        inputs.push(r);
        let nodes = [&self.nodes[..], &[reader]].concat();
        if !reaches(function, &nodes, &inputs) && !nodes.contains(&r.index()) {
            (self.inputs, self.nodes) = (inputs, nodes);
            self.outputs[0] = reader;
            self.op.added = true;
        }
    }

    /// Takes the sum over the rows of `of`, if it is there; gives its dtype.
    fn sum(&mut self, function: &Function, of: Var) -> Option<DType> {
        let is_sum = |node: &Node| composite::<SumRows>(node).is_some() && node.inputs == [of];
        let sum = (0..function.nodes.len()).find(|i| is_sum(&function.nodes[*i]) && !self.nodes.contains(i))?;
        let nodes = [&self.nodes[..], &[sum]].concat();
        if reaches(function, &nodes, &self.inputs) {
            return None;
        }
        self.nodes = nodes;
        self.outputs.push(sum);
        composite::<SumRows>(&function.nodes[sum]).map(|op| op.dtype)
    }

    /// The function with the op in place of its parts.
    fn join(self, function: Function) -> Function {
        let (last, place) = (function.nodes.len(), self.nodes.iter().copied().max().unwrap_or_default());
        let types = self.outputs.iter().map(|node| function.nodes[*node].outputs[0].clone()).collect();
        let scope = function.nodes[self.nodes[0]].scope.clone();
        let old: Vec<Var> = self.outputs.iter().map(|node| function.var(*node, 0)).collect();
        let mut draft = Draft::new(function);
        for node in self.nodes {
            draft.nodes[node] = None;
        }
        let op = Op::Composite(CompositeRef::new(self.op));
        let new = draft.push(Node { op, inputs: self.inputs, outputs: types, scope });
        for (old, new) in old.into_iter().zip(new) {
            draft.replace(old, new);
        }
        draft.finish(|i| if i == last { place } else { i })
    }
}
