//! What nodes, functions and graphs cost.

use super::{FuncId, Function, Graph, Group, GroupKind, Op, Var};
use crate::cost::Cost;
use crate::prim::Prim;
use crate::types::Type;

impl Group {
    /// Arithmetic of all nodes, and their traffic less what stays between them in registers or cache.
    pub(crate) fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        if self.kind == GroupKind::Fused {
            let moved = Cost::moving(inputs, outputs);
            let total = self.body.cost_apart();
            return Cost { bytes_read: moved.bytes_read, bytes_written: moved.bytes_written, ..total };
        }
        self.body.cost_together()
    }
}

impl Function {
    /// Work of the primitives and composites, each on its own.
    fn cost_apart(&self) -> Cost {
        let mut total = Cost::default();
        for node in &self.nodes {
            let types = self.types(&node.inputs);
            match &node.op {
                Op::Prim(p) => total += &p.cost(&types, &node.outputs),
                Op::Composite(c) => total += &c.cost(&types, &node.outputs),
                Op::Arg(_) | Op::Call(_) | Op::Group(_) => {}
            }
        }
        total
    }

    /// Work of the primitives and composites, less the traffic of values that stay between them.
    pub(crate) fn cost_together(&self) -> Cost {
        let mut total = self.cost_apart();
        let is_view = |node: usize| matches!(self.nodes[node].op, Op::Prim(Prim::Reshape(_)));
        let viewed = |mut v: Var| {
            while is_view(v.index()) {
                v = self.nodes[v.index()].inputs[0];
            }
            v
        };
        let is_arg = |v: &Var| matches!(self.nodes[v.index()].op, Op::Arg(_));
        for (index, node) in self.nodes.iter().enumerate() {
            // A view moves nothing, so nothing is saved of it.
            if is_view(index) {
                continue;
            }
            for inner in node.inputs.iter().filter(|v| !is_arg(&viewed(**v))) {
                total.bytes_read += &(self.ty(*inner).bytes() * -1);
            }
            for out in 0..node.outputs.len() {
                let var = self.var(index, out);
                if !is_arg(&var) && self.outputs.iter().all(|o| viewed(o.var) != var) {
                    total.bytes_written += &(node.outputs[out].bytes() * -1);
                }
            }
        }
        total
    }
}

impl Graph {
    /// Cost of one node, calls included.
    pub fn node_cost(&self, func: FuncId, node: usize) -> Cost {
        self.node_cost_with(func, node, &self.function_costs())
    }

    /// Cost of every function, indexed like the functions; each is walked once however often it is called.
    pub fn function_costs(&self) -> Vec<Cost> {
        let mut costs = Vec::with_capacity(self.functions.len());
        // Callees come before their callers.
        for (id, function) in self.functions.iter().enumerate() {
            let mut total = Cost::default();
            for node in 0..function.nodes.len() {
                total += &self.node_cost_with(FuncId(id as u32), node, &costs);
            }
            costs.push(total);
        }
        costs
    }

    /// Cost of the whole graph.
    pub fn cost(&self) -> Cost {
        self.function_costs().swap_remove(self.main.index())
    }

    fn node_cost_with(&self, func: FuncId, node: usize, costs: &[Cost]) -> Cost {
        let function = self.function(func);
        let node = &function.nodes[node];
        let inputs = function.types(&node.inputs);
        match &node.op {
            Op::Arg(_) => Cost::default(),
            Op::Prim(p) => p.cost(&inputs, &node.outputs),
            Op::Composite(c) => c.cost(&inputs, &node.outputs),
            Op::Call(callee) => costs[callee.index()].clone(),
            Op::Group(group) => group.cost(&inputs, &node.outputs),
        }
    }
}
