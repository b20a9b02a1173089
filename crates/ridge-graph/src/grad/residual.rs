//! What the backward half of a function keeps from the forward half, and what it computes again.
//!
//! Kept: what was costly. Computed again in the backward half, from what is kept anyway: views (the narrower or smaller
//! side of a cast or broadcast is kept instead), whatever elementwise primitives make of values that are kept, and what they make of
//! parameters, step inputs and integers alone, such as masks, rotary tables, and decoded or quantised weights. [`Recompute`] says what
//! counts as costly: recomputation (activation checkpointing, Chen et al. 2016; its selective form, Korthikanti et al.
//! 2022, section 5) is the same decision with another answer.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::error::Result;
use crate::graph::{Arg, Builder, Function, Op, Output, Role, Var};
use crate::prim::Prim;
use crate::work::Work;

/// Which forward values the backward half of a function computes again, beyond those that cost next to nothing. States are
/// never read again, and collectives are not repeated: what they gave is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// No others.
    #[default]
    Cheap,
    /// Whatever takes one pass over memory, such as norms, activation functions and rotary embeddings. Results of products,
    /// of experts and of attention are kept.
    Passes,
    /// Everything: only the function's arguments are kept.
    All,
}

/// A backward half that is complete.
pub(super) struct BackwardHalf {
    /// Takes residuals, then cotangents.
    pub(super) function: Function,
    /// The forward values that are its residuals, in order.
    pub(super) saved: Vec<Var>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Saved,
    Rebuilt,
}

/// Completes `draft`, in which arguments stand for the forward values `requested`.
pub(super) fn settle(
    g: &mut Builder,
    forward: &Function,
    draft: Function,
    requested: &[(Var, Var)],
    recompute: Recompute,
) -> Result<BackwardHalf> {
    let fates = fates(forward, requested.iter().map(|(value, _)| *value), recompute);
    g.begin(&draft.name);
    let mut rebuild = Rebuild { forward, fates: &fates, built: HashMap::new() };
    let mut saved = Vec::new();
    for (value, _) in fates.iter().filter(|(_, fate)| **fate == Fate::Saved) {
        let arg = match &forward.nodes[value.index()].op {
            Op::Arg(i) => forward.args[*i].clone(),
            _ => Arg::new(format!("saved.{}", saved.len()), forward.ty(*value).clone(), Role::Data),
        };
        rebuild.built.insert(*value, g.push_arg(arg));
        saved.push(*value);
    }
    let stands_for: HashMap<Var, Var> = requested.iter().map(|(value, arg)| (*arg, *value)).collect();
    let mut map: Vec<Vec<Option<Var>>> = vec![Vec::new(); draft.nodes.len()];
    // Cotangents come after residuals.
    for (i, node) in draft.nodes.iter().enumerate() {
        if let Op::Arg(arg) = node.op
            && !stands_for.contains_key(&draft.var(i, 0))
        {
            map[i] = vec![Some(g.push_arg(draft.args[arg].clone()))];
        }
    }
    let mut found = |g: &mut Builder, map: &[Vec<Option<Var>>], var: Var| match stands_for.get(&var) {
        Some(value) => rebuild.value(g, *value),
        None => Ok(map[var.index()][var.out as usize].expect("inputs come before uses")),
    };
    for (i, node) in draft.nodes.iter().enumerate() {
        if matches!(node.op, Op::Arg(_)) {
            continue;
        }
        let inputs = node.inputs.iter().map(|v| found(g, &map, *v)).collect::<Result<Vec<_>>>()?;
        g.set_scope(&node.scope);
        map[i] = g.emit(node.op.clone(), &inputs)?.into_iter().map(Some).collect();
    }
    let outputs = draft.outputs.iter().map(|o| Ok(Output { var: found(g, &map, o.var)?, ..o.clone() }));
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    Ok(BackwardHalf { function: g.end(outputs), saved })
}

/// Forward values in a backward half: residuals, and those computed again where they are first used.
struct Rebuild<'a> {
    forward: &'a Function,
    fates: &'a BTreeMap<Var, Fate>,
    built: HashMap<Var, Var>,
}

impl Rebuild<'_> {
    fn value(&mut self, g: &mut Builder, value: Var) -> Result<Var> {
        if let Some(built) = self.built.get(&value) {
            return Ok(*built);
        }
        debug_assert_eq!(self.fates.get(&value), Some(&Fate::Rebuilt), "{value:?} is saved or rebuilt");
        let node = &self.forward.nodes[value.index()];
        let inputs = node.inputs.iter().map(|v| self.value(g, *v)).collect::<Result<Vec<_>>>()?;
        g.set_scope(&node.scope);
        let outputs = g.emit(node.op.clone(), &inputs)?;
        // A node is repeated once, whichever of its outputs are kept.
        for (out, built) in outputs.iter().enumerate() {
            self.built.entry(self.forward.var(value.index(), out)).or_insert(*built);
        }
        Ok(outputs[value.out as usize])
    }
}

/// Decides for every value that the backward half refers to, and for those that these are rebuilt from.
fn fates(forward: &Function, requested: impl Iterator<Item = Var>, recompute: Recompute) -> BTreeMap<Var, Fate> {
    let free = free(forward);
    let all = recompute == Recompute::All;
    let mut fates = BTreeMap::new();
    let mut open: BTreeSet<Var> = requested.collect();
    // Later values first: what they are rebuilt from is then decided with what was asked for.
    while let Some(value) = open.pop_last() {
        let node = &forward.nodes[value.index()];
        let rebuilt = !matches!(node.op, Op::Arg(_))
            && (free[value.index()] || is_view(forward, value) || all && is_repeatable(forward, value.index()));
        fates.insert(value, if rebuilt { Fate::Rebuilt } else { Fate::Saved });
        if rebuilt {
            open.extend(&node.inputs);
        }
    }
    // Earlier values first: what can be computed cheaply from values at hand need not be kept.
    let mut at_hand: Vec<Vec<bool>> = Vec::with_capacity(forward.nodes.len());
    for (i, node) in forward.nodes.iter().enumerate() {
        let cheap = is_cheap(&node.op) || recompute == Recompute::Passes && is_pass(forward, i);
        let rebuilt = cheap && node.inputs.iter().all(|v| at_hand[v.index()][v.out as usize]);
        let there = |out| {
            let fate = fates.get_mut(&forward.var(i, out));
            let kept = fate.is_some();
            if let (true, Some(fate)) = (rebuilt, fate) {
                *fate = Fate::Rebuilt;
            }
            kept || rebuilt || free[i]
        };
        at_hand.push((0..node.outputs.len()).map(there).collect());
    }
    // What those are computed from, in turn.
    let mut open: Vec<Var> = fates.iter().filter(|(_, fate)| **fate == Fate::Rebuilt).map(|(v, _)| *v).collect();
    while let Some(value) = open.pop() {
        for input in &forward.nodes[value.index()].inputs {
            if !fates.contains_key(input) {
                let is_arg = matches!(forward.nodes[input.index()].op, Op::Arg(_));
                fates.insert(*input, if is_arg { Fate::Saved } else { Fate::Rebuilt });
                if !is_arg {
                    open.push(*input);
                }
            }
        }
    }
    fates
}

/// Nodes that cost no memory to have again: arguments that outlive the step's forward half anyway or are small, and
/// what is cheap to compute from them.
fn free(forward: &Function) -> Vec<bool> {
    let mut free: Vec<bool> = Vec::with_capacity(forward.nodes.len());
    for (i, node) in forward.nodes.iter().enumerate() {
        free.push(match &node.op {
            Op::Arg(i) => {
                let arg = &forward.args[*i];
                !arg.ty.state && (matches!(arg.role, Role::Weight | Role::StepInput) || !arg.ty.dtype.is_float())
            }
            op => (is_cheap(op) || is_pass(forward, i)) && node.inputs.iter().all(|v| free[v.index()]),
        });
    }
    free
}

/// Is `value` a rearrangement of a value that is no larger?
fn is_view(forward: &Function, value: Var) -> bool {
    let node = &forward.nodes[value.index()];
    match &node.op {
        Op::Prim(Prim::Reshape(_) | Prim::Transpose(_) | Prim::Broadcast(_)) => true,
        Op::Prim(Prim::Cast(to)) => to.size_bytes() >= forward.ty(node.inputs[0]).dtype.size_bytes(),
        _ => false,
    }
}

/// Does node `i` give the same values whenever it is done again, in one rank alone?
fn is_repeatable(forward: &Function, i: usize) -> bool {
    let node = &forward.nodes[i];
    let states = node.inputs.iter().map(|v| forward.ty(*v)).chain(&node.outputs).any(|ty| ty.state);
    !states && !matches!(node.op, Op::Prim(Prim::Collective { .. }))
}

/// Is node `i` a pass over its operands?
fn is_pass(forward: &Function, i: usize) -> bool {
    let node = &forward.nodes[i];
    let pass = match &node.op {
        Op::Prim(Prim::Reduce { .. } | Prim::ArgMax { .. } | Prim::Scan { .. }) => true,
        Op::Composite(op) => matches!(op.work(), Work::Pass | Work::View),
        _ => false,
    };
    pass && is_repeatable(forward, i)
}

/// Is the op bound by memory, and the same whenever it is done again?
fn is_cheap(op: &Op) -> bool {
    let Op::Prim(prim) = op else { return false };
    prim.is_elementwise()
        || matches!(
            prim,
            Prim::Const(_)
                | Prim::Iota { .. }
                | Prim::Gather { .. }
                | Prim::Slice { .. }
                | Prim::Concat { .. }
                | Prim::Pad { .. }
                | Prim::Reshape(_)
                | Prim::Transpose(_)
                | Prim::Broadcast(_)
                | Prim::Component(_)
        )
}
