//! Where values are, whatever the number of ranks.

use std::cell::RefCell;
use std::collections::HashMap;

use super::placement::{MeshAxis, Placement};
use super::propagate::Sharder;
use crate::error::Result;
use crate::graph::{Arg, Graph, Var};
use crate::passes::respecialise::respecialise;

/// Where each value of the functions of `graph` is when the main function's arguments are placed by `place`: cut, whole, or
/// a summand that has yet to be summed. A function that is called with several placements is told of by the first.
///
/// What has to divide over a number of ranks is not asked: this holds for any number that [`shard`](super::shard) takes.
///
/// # Errors
/// As [`shard`](super::shard), of ops that have no rule.
pub fn placements(graph: &Graph, place: &dyn Fn(&Arg) -> Placement) -> Result<HashMap<Var, Placement>> {
    // One rank has all of everything, whatever is cut.
    let axis = MeshAxis::new("any", 1);
    let seen = RefCell::default();
    let sharder = Sharder { axis: &axis, gather: &|_| false, seen: Some(&seen) };
    let args = graph.main().args.iter().map(place).collect();
    respecialise(graph, args, &sharder)?;
    Ok(seen.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::graph::{Builder, Role};
    use crate::types::Type;

    #[test]
    fn columns_cut_what_follows_until_terms_sum_it_whatever_their_number() {
        let mut g = Builder::new();
        let x = g.step_input("x", Type::tensor(DType::F32, [5, 7])).expect("fresh");
        let up = g.weight("up", Type::tensor(DType::F32, [11, 7])).expect("fresh");
        let down = g.weight("down", Type::tensor(DType::F32, [7, 11])).expect("fresh");
        let h = g.linear(x, up).expect("types");
        let a = g.tanh(h).expect("types");
        let s = g.linear(a, down).expect("types");
        let y = g.tanh(s).expect("types");
        let graph = g.finish(vec![("y".into(), y)]).expect("finishes");
        let place = |arg: &Arg| match (&*arg.name, arg.role) {
            ("up", Role::Weight) => Placement::shard(0),
            ("down", Role::Weight) => Placement::shard(1),
            _ => Placement::Replicate,
        };
        // 11 divides over no number of ranks below it.
        let of = placements(&graph, &place).expect("has rules");
        let placed: Vec<Placement> = [h, a, s, y].iter().map(|var| of[var]).collect();
        assert_eq!(placed, [Placement::shard(1), Placement::shard(1), Placement::Partial, Placement::Replicate]);
    }
}
