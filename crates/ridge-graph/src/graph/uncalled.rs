//! Leaves out functions that are not called.

use super::{FuncId, Graph, Op};

impl Graph {
    /// Removes functions that main does not reach, keeping callees before callers.
    pub(crate) fn drop_uncalled(&mut self) {
        let mut called = vec![false; self.functions.len()];
        called[self.main.index()] = true;
        for i in (0..self.functions.len()).rev().filter(|i| *i <= self.main.index()) {
            if called[i] {
                for node in &self.functions[i].nodes {
                    if let Op::Call(f) = node.op {
                        called[f.index()] = true;
                    }
                }
            }
        }
        let mut next = 0;
        let moved: Vec<u32> = called
            .iter()
            .map(|c| {
                next += u32::from(*c);
                next.saturating_sub(1)
            })
            .collect();
        let mut index = 0..;
        self.functions.retain(|_| called[index.next().unwrap_or_default()]);
        self.main = FuncId(moved[self.main.index()]);
        for node in self.functions.iter_mut().flat_map(|f| &mut f.nodes) {
            if let Op::Call(f) = &mut node.op {
                *f = FuncId(moved[f.index()]);
            }
        }
    }
}
