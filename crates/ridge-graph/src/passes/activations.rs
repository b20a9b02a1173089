//! Says how products by weights in formats take their activations.

use crate::graph::{CompositeRef, Graph, Op};
use crate::ops::{Activations, Linear, LinearGroup};

/// Makes the linears whose weights are all stored in formats take `activations`, where K is a number.
pub fn round_activations(graph: &mut Graph, activations: Activations) {
    for function in &mut graph.functions {
        for i in 0..function.nodes.len() {
            let Op::Composite(op) = &function.nodes[i].op else { continue };
            let (count, changed) = match (op.downcast::<Linear>(), op.downcast::<LinearGroup>()) {
                (Some(one), _) => (1, CompositeRef::new(Linear { activations, ..*one })),
                (_, Some(group)) => (group.count, CompositeRef::new(LinearGroup { activations, ..*group })),
                _ => continue,
            };
            let inputs = &function.nodes[i].inputs;
            let of_number = function.ty(inputs[0]).shape.last().as_const().is_some();
            if of_number && inputs[1..=count].iter().all(|w| function.ty(*w).format.is_some()) {
                function.nodes[i].op = Op::Composite(changed);
            }
        }
    }
}
