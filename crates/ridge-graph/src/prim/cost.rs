//! What each primitive costs.

use super::{CollectiveKind, Prim, Unary};
use crate::cost::Cost;
use crate::poly::Poly;
use crate::types::Type;

impl Prim {
    /// Work of one application; see [`Cost`].
    pub fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let mut cost = match self {
            // Nothing moves: another view of the same bytes, or made where it is used.
            Self::Const(_)
            | Self::Iota { .. }
            | Self::Reshape(_)
            | Self::Broadcast(_)
            | Self::Component(_)
            | Self::StateRead
            // Whether it copies depends on the step's extents: `passes::host_traffic` counts what the link carries.
            | Self::Fetch(_) => return Cost::default(),
            _ => Cost::moving(inputs, outputs),
        };
        let elements = || outputs[0].shape.elements();
        match self {
            Self::Unary(Unary::Neg | Unary::Abs | Unary::Floor | Unary::Not)
            | Self::Binary(_)
            | Self::Compare(_)
            | Self::Select
            | Self::Cast(_) => cost.vector_flops = elements(),
            Self::Unary(_) => cost.special_flops = elements(),
            Self::Reduce { .. } | Self::ArgMax { .. } | Self::Scan { .. } => {
                cost.vector_flops = inputs[0].shape.elements();
            }
            Self::MatMul { trans_a, .. } => {
                let a = &inputs[0].shape;
                let k = &a.0[a.rank() - if *trans_a { 2 } else { 1 }];
                cost.matrix_flops = &elements() * &(Poly::from(k) * 2);
            }
            Self::Gather { .. } => {
                cost.bytes_read = outputs[0].bytes() + &inputs[1].bytes();
            }
            Self::Scatter { add, .. } => {
                let rows = inputs[2].bytes();
                cost.bytes_read = rows.clone() * if *add { 2 } else { 1 } + &inputs[1].bytes();
                cost.bytes_written = rows;
            }
            Self::LinearRecurrence { low_rank } => {
                // Of each element of a head's state for each token: the product that is added and that with q, and as many
                // for the part of low rank. Forms that take many tokens at once do more, on matrix units.
                let key = &inputs[0].shape.0[2];
                let elements = &elements() * &Poly::from(key);
                cost.matrix_flops = elements.clone() * if *low_rank { 8 } else { 4 };
                cost.vector_flops = elements;
                cost.special_flops = inputs[3].shape.elements();
            }
            Self::LinearRecurrenceGradient { low_rank } => {
                // The recurrence again; the cotangent of its state, and a product for each cotangent of an operand.
                let elements = &inputs[2].shape.elements() * &Poly::from(&inputs[0].shape.0[2]);
                cost.matrix_flops = elements.clone() * if *low_rank { 26 } else { 12 };
                cost.vector_flops = elements * 4;
                cost.special_flops = inputs[3].shape.elements();
            }
            Self::Collective { ranks, kind, .. } => {
                // Ring algorithms: each rank sends (n-1)/n of the whole tensor, twice for an all-reduce. What only some ranks
                // send is counted as if each did: a step takes as long as its slowest rank.
                let (n, whole) = match kind {
                    CollectiveKind::AllGather(_) => (*ranks as i128, outputs[0].bytes()),
                    _ => (*ranks as i128, inputs[0].bytes()),
                };
                cost.bytes_sent = match kind {
                    CollectiveKind::AllReduce => whole.div_floor(n) * ((n - 1) * 2),
                    CollectiveKind::AllGather(_)
                    | CollectiveKind::ReduceScatter(_)
                    | CollectiveKind::AllToAll { .. }
                    | CollectiveKind::Reduce(_)
                    | CollectiveKind::Broadcast(_) => whole.div_floor(n) * (n - 1),
                    CollectiveKind::Send { from, to } if from != to => whole,
                    CollectiveKind::Send { .. } => Poly::zero(),
                    CollectiveKind::Split(_) => {
                        cost.bytes_read = outputs[0].bytes();
                        Poly::zero()
                    }
                };
            }
            _ => {}
        }
        cost
    }
}
