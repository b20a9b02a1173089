//! What an op costs wherever it runs: arithmetic by unit, and bytes if each input is read and each output written
//! once. Symbolic, so one walk of a graph serves every batch and context length.

use std::ops::AddAssign;

use crate::graph::{FuncId, Graph, Op};
use crate::poly::Poly;
use crate::types::Type;

/// Work of an op, a function or a graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Multiplies and adds of matrix products, counted as 2 a pair.
    pub matrix_flops: Poly,
    /// Elementwise and reduction arithmetic.
    pub vector_flops: Poly,
    /// Exponentials, roots, divisions and trigonometry.
    pub special_flops: Poly,
    /// Bytes read from memory.
    pub bytes_read: Poly,
    /// Bytes written to memory.
    pub bytes_written: Poly,
    /// Bytes each rank sends to others (ring algorithms).
    pub bytes_sent: Poly,
}

impl Cost {
    /// Each input read once, each output written once, no arithmetic.
    pub fn moving(inputs: &[Type], outputs: &[Type]) -> Self {
        let sum = |types: &[Type]| types.iter().fold(Poly::zero(), |s, t| s + &t.bytes());
        Self { bytes_read: sum(inputs), bytes_written: sum(outputs), ..Self::default() }
    }

    /// All arithmetic together.
    pub fn flops(&self) -> Poly {
        self.matrix_flops.clone() + &self.vector_flops + &self.special_flops
    }

    /// All memory traffic together.
    pub fn bytes(&self) -> Poly {
        self.bytes_read.clone() + &self.bytes_written
    }
}

impl AddAssign<&Self> for Cost {
    fn add_assign(&mut self, other: &Self) {
        self.matrix_flops += &other.matrix_flops;
        self.vector_flops += &other.vector_flops;
        self.special_flops += &other.special_flops;
        self.bytes_read += &other.bytes_read;
        self.bytes_written += &other.bytes_written;
        self.bytes_sent += &other.bytes_sent;
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
