//! Rebuilding a function from replaced nodes: dependency order, with readers of a state before its update.

use std::collections::HashMap;

use crate::graph::{Function, Node, Op, Var};

/// A function taken apart: nodes at their old indices, some removed, and where each value is found now.
pub(super) struct Draft {
    function: Function,
    /// The nodes; `None` where removed.
    pub(super) nodes: Vec<Option<Node>>,
    replaced: HashMap<Var, Var>,
}

impl Draft {
    pub(super) fn new(mut function: Function) -> Self {
        let nodes = std::mem::take(&mut function.nodes).into_iter().map(Some).collect();
        Self { function, nodes, replaced: HashMap::new() }
    }

    /// From here on `old` is read as `new`.
    pub(super) fn replace(&mut self, old: Var, new: Var) {
        if old != new {
            self.replaced.insert(old, new);
        }
    }

    /// What `var` is read as now.
    pub(super) fn resolve(&self, mut var: Var) -> Var {
        while let Some(next) = self.replaced.get(&var) {
            var = *next;
        }
        var
    }

    /// Output `out` of node `node`.
    pub(super) fn var(&self, node: usize, out: usize) -> Var {
        self.function.var(node, out)
    }

    /// Adds a node and returns its outputs.
    pub(super) fn push(&mut self, node: Node) -> Vec<Var> {
        let index = self.nodes.len();
        let outputs = node.outputs.len();
        self.nodes.push(Some(node));
        (0..outputs).map(|out| self.function.var(index, out)).collect()
    }

    /// The function again: inputs resolved, arguments first, every node after what it depends on, otherwise in the
    /// order that they had; a node that was pushed comes where its `place` (an old index) says.
    pub(super) fn finish(self, place: impl Fn(usize) -> usize) -> Function {
        let name = self.function.name.clone();
        let finished = self.try_finish(place);
        finished.unwrap_or_else(|| panic!("nodes of `{name}` depend on each other in a circle"))
    }

    /// [`Self::finish`], or `None` where nodes depend on each other in a circle.
    pub(super) fn try_finish(mut self, place: impl Fn(usize) -> usize) -> Option<Function> {
        for i in 0..self.nodes.len() {
            if let Some(mut node) = self.nodes[i].take() {
                node.inputs = node.inputs.iter().map(|v| self.resolve(*v)).collect();
                self.nodes[i] = Some(node);
            }
        }
        for i in 0..self.function.outputs.len() {
            self.function.outputs[i].var = self.resolve(self.function.outputs[i].var);
        }
        let order = self.order_by(place)?;
        let mut moved = vec![u32::MAX; self.nodes.len()];
        for (new, old) in order.iter().enumerate() {
            moved[*old] = new as u32;
        }
        let renamed = |v: &Var| Var { node: moved[v.index()], ..*v };
        for old in order {
            let mut node = self.nodes[old].take().expect("ordered nodes exist");
            node.inputs = node.inputs.iter().map(renamed).collect();
            self.function.nodes.push(node);
        }
        for output in &mut self.function.outputs {
            output.var = renamed(&output.var);
        }
        Some(self.function)
    }

    /// The nodes in the order of [`Self::finish`]; `None` where they depend on each other in a circle.
    pub(super) fn order_by(&self, place: impl Fn(usize) -> usize) -> Option<Vec<usize>> {
        // Readers of each state version, which must run before the node that replaces it.
        let mut readers: HashMap<Var, Vec<usize>> = HashMap::new();
        for (i, node) in self.nodes.iter().enumerate() {
            for var in node.iter().flat_map(|n| &n.inputs) {
                if self.is_state(*var) {
                    readers.entry(*var).or_default().push(i);
                }
            }
        }
        let mut before: Vec<Vec<usize>> = vec![Vec::new(); self.nodes.len()];
        for (i, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            before[i].extend(node.inputs.iter().map(|v| v.index()));
            if node.outputs.iter().any(|t| t.state) {
                for var in node.inputs.iter().filter(|v| self.is_state(**v)) {
                    before[i].extend(readers[var].iter().copied().filter(|r| *r != i));
                }
            }
        }
        let mut wanted: Vec<usize> = (0..self.nodes.len()).filter(|i| self.nodes[*i].is_some()).collect();
        wanted.sort_by_key(|i| {
            let is_arg = self.nodes[*i].as_ref().is_some_and(|n| matches!(n.op, Op::Arg(_)));
            (!is_arg, place(*i), *i)
        });
        let (mut open, mut done) = (vec![false; self.nodes.len()], vec![false; self.nodes.len()]);
        let mut order = Vec::with_capacity(wanted.len());
        let mut stack = Vec::new();
        for root in wanted {
            stack.push((root, 0));
            while let Some((node, next)) = stack.pop() {
                if done[node] {
                    continue;
                }
                if next == 0 && open[node] {
                    return None;
                }
                open[node] = true;
                if let Some(dep) = before[node].get(next) {
                    stack.push((node, next + 1));
                    if !done[*dep] {
                        stack.push((*dep, 0));
                    }
                } else {
                    done[node] = true;
                    order.push(node);
                }
            }
        }
        Some(order)
    }

    fn is_state(&self, var: Var) -> bool {
        self.nodes[var.index()].as_ref().is_some_and(|n| n.outputs[var.out as usize].state)
    }
}
