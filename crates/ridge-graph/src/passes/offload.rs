//! Offloading of activations: what main keeps from one call for a much later one waits in memory of the host meanwhile (Rhu et
//! al. 2016, "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design", section 3).
//!
//! A value leaves behind the call that gives or last uses it, and comes back ahead of the call before the one that uses it
//! next: both copies run beside a call. The forward half of a decoder layer leaves its residuals behind so, and its backward
//! half finds them again.

use super::order::Draft;
use crate::dim::Bindings;
use crate::error::Result;
use crate::graph::{Function, Graph, Node, Op, Var};
use crate::prim::{Memory, Prim};

/// Calls between two uses of a value from which on it is moved: one beside which it leaves, one beside which it returns, and
/// one during which it is away.
const MIN_CALLS: usize = 3;

/// Values below this share of the largest one stay: they would free little, and a copy of few bytes costs a launch too.
const LEAST_SHARE: i128 = 64;

/// A value that is moved: it leaves behind node `leaves`, and returns ahead of node `returns` for all nodes behind that.
struct Moved {
    value: Var,
    leaves: usize,
    returns: usize,
}

/// Moves the values that calls of main give to memory of the host while at least three calls in a row do not use them.
/// `bindings` says how large they are.
///
/// # Errors
/// When a symbol of a value's shape is unbound.
pub fn offload(graph: &mut Graph, bindings: &Bindings) -> Result<()> {
    let main = graph.main();
    let candidates: Vec<Moved> = (0..main.nodes.len())
        .filter(|node| matches!(main.nodes[*node].op, Op::Call(_)))
        .flat_map(|node| {
            (0..main.nodes[node].outputs.len()).filter_map(move |out| longest_absence(main, main.var(node, out)))
        })
        .collect();
    let bytes =
        candidates.iter().map(|of| Ok(main.ty(of.value).bytes().eval(bindings)?)).collect::<Result<Vec<i128>>>()?;
    let least = bytes.iter().max().map_or(0, |most| most / LEAST_SHARE);
    let chosen: Vec<Moved> = candidates
        .into_iter()
        .zip(&bytes)
        .filter(|(_, bytes)| **bytes > 0 && **bytes >= least)
        .map(|(of, _)| of)
        .collect();
    if chosen.is_empty() {
        return Ok(());
    }
    let known = main.nodes.len();
    let mut draft = Draft::new(main.clone());
    // The old node that each new one follows.
    let mut places = Vec::with_capacity(2 * chosen.len());
    for Moved { value, leaves, returns } in &chosen {
        let (ty, scope) = (main.ty(*value).clone(), main.nodes[value.index()].scope.clone());
        let moved = |from: Var, to: Memory| {
            let (outputs, scope) = (vec![ty.clone()], scope.clone());
            Node { op: Op::Prim(Prim::Move(to)), inputs: vec![from], outputs, scope }
        };
        let away = draft.push(moved(*value, Memory::Host))[0];
        let back = draft.push(moved(away, Memory::Device))[0];
        places.extend([*leaves, returns.saturating_sub(1)]);
        for node in draft.nodes[*returns..known].iter_mut().flatten() {
            node.inputs.iter_mut().filter(|input| **input == *value).for_each(|input| *input = back);
        }
    }
    let index = graph.main.index();
    graph.functions[index] = draft.finish(|node| if node < known { node } else { places[node - known] });
    Ok(())
}

/// The longest run of calls that do not use `value`, if there are enough of them.
fn longest_absence(main: &Function, value: Var) -> Option<Moved> {
    let ty = main.ty(value);
    if ty.state || !ty.is_plain() || !ty.dtype.is_float() || main.outputs.iter().any(|output| output.var == value) {
        return None;
    }
    let uses = |node: &Node| node.inputs.contains(&value);
    let users: Vec<usize> = (value.index()..main.nodes.len()).filter(|node| uses(&main.nodes[*node])).collect();
    // Through a view, the memory is used where the view is.
    let is_view = |node: &usize| matches!(main.nodes[*node].op, Op::Prim(Prim::Reshape(_) | Prim::Component(_)));
    if users.iter().any(is_view) {
        return None;
    }
    let absence = |from: usize, to: usize| -> Vec<usize> {
        (from + 1..to).filter(|node| matches!(main.nodes[*node].op, Op::Call(_))).collect()
    };
    let before = std::iter::once(value.index()).chain(users.iter().copied());
    let (leaves, calls) =
        before.zip(&users).map(|(from, to)| (from, absence(from, *to))).max_by_key(|(_, c)| c.len())?;
    (calls.len() >= MIN_CALLS).then(|| Moved { value, leaves, returns: calls[calls.len() - 1] })
}
