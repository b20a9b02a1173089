//! What the values of a group are made of.

use ridge_graph::{Function, Node, Op, Prim, Var};

/// The op that makes `var`.
pub(super) fn maker(body: &Function, var: Var) -> &Node {
    &body.nodes[var.index()]
}

/// Past a cast, if it is one.
pub(super) fn uncast(body: &Function, var: Var) -> Var {
    match &maker(body, var).op {
        Op::Prim(Prim::Cast(_)) => maker(body, var).inputs[0],
        _ => var,
    }
}

/// `(first, len, of)`, where `var` is a slice of the argument `of` along `axis`.
pub(super) fn slice_of_arg(body: &Function, var: Var, axis: usize) -> Option<(usize, usize, usize)> {
    let node = maker(body, var);
    match (&node.op, &maker(body, *node.inputs.first()?).op) {
        (Op::Prim(Prim::Slice { axis: at, start, len }), Op::Arg(of)) if *at == axis => {
            Some((start.as_const()?, len.as_const()?, *of))
        }
        _ => None,
    }
}

/// What `var` is a transpose of, with its first two of three axes swapped.
pub(super) fn swapped(body: &Function, var: Var) -> Option<Var> {
    let node = maker(body, var);
    matches!(&node.op, Op::Prim(Prim::Transpose(perm)) if **perm == [1, 0, 2]).then(|| node.inputs[0])
}
