//! Chooses a rule for each node, brings its inputs to it, and emits the node for one rank's share.

use std::cell::RefCell;
use std::collections::HashMap;

use super::convert::{self, Conversion, convert, same};
use super::local::{local_op, local_type, share};
use super::placement::{MeshAxis, Placement, ShardingRule, list};
use super::rules::rules;
use crate::error::{GraphError, Result, place};
use crate::graph::{Arg, Builder, Node, Op, Output, Role, Var};
use crate::passes::respecialise::{Frame, Rewrite};
use crate::prim::{Binary, Prim};
use crate::types::Type;
use crate::why::Why;

type Places<'g> = Frame<'g, Placement>;

/// The rewrite of one mesh axis.
pub(super) struct Sharder<'a> {
    pub(super) axis: &'a MeshAxis,
    /// Which outputs of the main function are gathered if they come out cut.
    pub(super) gather: &'a dyn Fn(&Output) -> bool,
    /// Where values of the graph that is sharded are, of the first form of each function.
    pub(super) seen: Option<&'a RefCell<HashMap<Var, Placement>>>,
}

impl Rewrite for Sharder<'_> {
    type Tag = Placement;

    fn arg(&self, arg: &Arg, tag: &Placement) -> Result<Type, Why> {
        local_type(&arg.ty, *tag, self.axis)
    }

    fn node(&self, g: &mut Builder, frame: &mut Places<'_>, node: &Node) -> Result<Vec<(Var, Placement)>> {
        self.check_axis(frame, node)?;
        let whole = node.inputs.iter().all(|v| frame.value(*v).1 == Placement::Replicate);
        let (rule, steps) = if whole {
            // Nothing is cut, so nothing is to choose.
            let steps = vec![Conversion::Keep(0); node.inputs.len()];
            (ShardingRule::replicated(node.inputs.len(), node.outputs.len()), steps)
        } else {
            self.choose(frame, node)?
        };
        let mut inputs = Vec::with_capacity(steps.len());
        let mut actual = Vec::with_capacity(steps.len());
        for ((var, want), step) in node.inputs.iter().zip(&rule.inputs).zip(steps) {
            let (var, placement) = convert(g, frame, *var, *want, step, self.axis)?;
            inputs.push(var);
            actual.push(placement);
        }
        let op = local_op(&node.op, &rule, self.axis.ranks)
            .ok_or_else(|| self.refuse(frame, node, format!("its attributes cannot be cut by the rule {rule}")))?;
        let vars = g.emit(op, &inputs)?;
        let places = self.output_places(node, &rule, &actual);
        for ((var, placement), ty) in vars.iter().zip(&places).zip(&node.outputs) {
            let (is, should) = (g.ty(*var)?, local_type(ty, *placement, self.axis));
            if should.as_ref() != Ok(is) {
                let why = format!("the rule {rule} promises {should:?}, but a share of it gives {is}");
                return Err(self.refuse(frame, node, why));
            }
        }
        if let Some(seen) = self.seen {
            let mut seen = seen.borrow_mut();
            for (out, placement) in places.iter().enumerate() {
                seen.entry(frame.function.var(frame.at, out)).or_insert(*placement);
            }
        }
        Ok(vars.into_iter().zip(places).collect())
    }

    /// Sums are finished before a call, so that a layer called on sums and on values is one function; weights that are
    /// placed as summands stay so.
    fn passed(&self, g: &mut Builder, frame: &mut Places<'_>, var: Var) -> Result<(Var, Placement)> {
        let weight = frame.arg_of(var).is_some_and(|a| a.role == Role::Weight);
        match frame.value(var).1 {
            Placement::Partial if !weight && frame.function.ty(var).is_plain() => self.whole(g, frame, var),
            _ => Ok(*frame.value(var)),
        }
    }

    fn returned(&self, g: &mut Builder, frame: &mut Places<'_>, output: &Output) -> Result<(Var, Placement)> {
        let placement = frame.value(output.var).1;
        if output.role == Role::State {
            check_state(frame, output, placement)?;
            return Ok(*frame.value(output.var));
        }
        let finish = match placement {
            Placement::Replicate => false,
            Placement::Partial => frame.is_main,
            Placement::Shard { .. } => frame.is_main && (self.gather)(output),
        };
        if finish { self.whole(g, frame, output.var) } else { Ok(*frame.value(output.var)) }
    }
}

impl Sharder<'_> {
    /// The first rule that the inputs fit as they are, or else the one that the cheapest conversions lead to.
    fn choose(&self, frame: &Places<'_>, node: &Node) -> Result<(ShardingRule, Vec<Conversion>)> {
        let types = frame.function.types(&node.inputs);
        let all = rules(&node.op, &types, &node.outputs, self.axis);
        if let Some(wrong) = all.iter().find(|r| (r.inputs.len(), r.outputs.len()) != (types.len(), node.outputs.len()))
        {
            return Err(self.refuse(frame, node, format!("the rule {wrong} is not for its inputs and outputs")));
        }
        let bytes: Vec<i128> = node.inputs.iter().map(|v| convert::nominal_bytes(frame, *v)).collect();
        let mut best: Option<(i128, &ShardingRule, Vec<Conversion>)> = None;
        for rule in &all {
            let Some(steps) = self.steps(frame, node, rule) else { continue };
            let put_off: i128 =
                put_off(frame, node, rule).zip(&bytes).map(|(d, b)| if d { 2 * b + 1 } else { 0 }).sum();
            if put_off == 0 && steps.iter().all(|s| *s == Conversion::Keep(0)) {
                return Ok((rule.clone(), steps));
            }
            let cost = put_off + steps.iter().zip(&bytes).map(|(s, b)| s.cost(*b)).sum::<i128>();
            if best.as_ref().is_none_or(|(least, ..)| cost < *least) {
                best = Some((cost, rule, steps));
            }
        }
        match best {
            Some((_, rule, steps)) => Ok((rule.clone(), steps)),
            None => Err(self.nothing_fits(frame, node, &all)),
        }
    }

    /// What each input takes to fit `rule`, if all can, and the outputs divide as it says.
    fn steps(&self, frame: &Places<'_>, node: &Node, rule: &ShardingRule) -> Option<Vec<Conversion>> {
        let divides = |(p, t): (&Placement, &Type)| match p {
            Placement::Shard { dim, multiple } => {
                t.shape.0.get(*dim).is_some_and(|e| share(e, *multiple, self.axis.ranks).is_some())
            }
            _ => true,
        };
        if !rule.outputs.iter().zip(&node.outputs).all(divides) {
            return None;
        }
        let cut =
            |(v, want): (&Var, &Placement)| matches!(want, Placement::Shard { .. }) && same(frame.value(*v).1, *want);
        let anchored = node.inputs.iter().zip(&rule.inputs).any(cut);
        let pairs = node.inputs.iter().zip(&rule.inputs);
        pairs.map(|(v, want)| convert::step(frame, *v, *want, anchored, self.axis)).collect()
    }

    /// The rule's placements of outputs, with multiples grown as those of the inputs were larger than it asks.
    fn output_places(&self, node: &Node, rule: &ShardingRule, actual: &[Placement]) -> Vec<Placement> {
        let growth = |(is, asked): (&Placement, &Placement)| match (is, asked) {
            (Placement::Shard { multiple: is, .. }, Placement::Shard { multiple: asked, .. }) if is % asked == 0 => {
                is / asked
            }
            _ => 1,
        };
        let factor = actual.iter().zip(&rule.inputs).map(growth).max().unwrap_or(1);
        let grown = |(p, ty): (&Placement, &Type)| match *p {
            Placement::Shard { dim, multiple } => {
                let more = Placement::Shard { dim, multiple: multiple * factor };
                if local_type(ty, more, self.axis).is_ok() { more } else { *p }
            }
            _ => *p,
        };
        rule.outputs.iter().zip(&node.outputs).map(grown).collect()
    }

    /// `var` reduced or gathered.
    fn whole(&self, g: &mut Builder, frame: &mut Places<'_>, var: Var) -> Result<(Var, Placement)> {
        let step = convert::step(frame, var, Placement::Replicate, false, self.axis).ok_or_else(|| {
            GraphError::usage(g.scope(), format!("{} value cannot be made whole", frame.value(var).1))
        })?;
        convert(g, frame, var, Placement::Replicate, step, self.axis)
    }

    fn check_axis(&self, frame: &Places<'_>, node: &Node) -> Result<()> {
        match &node.op {
            Op::Prim(Prim::Collective { mesh, .. }) if *mesh == self.axis.name => {
                Err(self.refuse(frame, node, format!("the graph is sharded over `{mesh}` already")))
            }
            Op::Group(_) => Err(self.refuse(frame, node, "shard a graph before kernels are matched in it".into())),
            _ => Ok(()),
        }
    }

    fn refuse(&self, frame: &Places<'_>, node: &Node, why: Why) -> GraphError {
        let inputs = frame.function.types(&node.inputs);
        let why = format!("over {} ranks of `{}`: {why}", self.axis.ranks, self.axis.name);
        GraphError::Op { at: place(&node.scope), op: node.op_name().into(), inputs, why }
    }

    /// No rule fits: what the inputs are, which of them are the user's to place, and what the op can do.
    fn nothing_fits(&self, frame: &Places<'_>, node: &Node, all: &[ShardingRule]) -> GraphError {
        let places: Vec<Placement> = node.inputs.iter().map(|v| frame.value(*v).1).collect();
        let named: Vec<String> = node
            .inputs
            .iter()
            .zip(&places)
            .filter_map(|(v, p)| {
                let arg = frame.arg_of(*v).filter(|a| matches!(a.role, Role::Weight | Role::State))?;
                Some(format!("`{}` ({p})", frame.full_name(arg)))
            })
            .collect();
        let remedy = if named.is_empty() { String::new() } else { format!("; place {} otherwise", named.join(", ")) };
        let rules: Vec<String> = all.iter().map(ToString::to_string).collect();
        let why =
            format!("no rule fits inputs placed ({}){remedy}. It runs as {}", list(&places), rules.join(", or as "));
        self.refuse(frame, node, why)
    }
}

/// A state is placed from step to step as it was at first.
fn check_state(frame: &Places<'_>, output: &Output, now: Placement) -> Result<()> {
    let function = frame.function;
    let before = function.nodes.iter().enumerate().find_map(|(i, node)| match node.op {
        Op::Arg(a) if function.args[a].role == Role::State && function.args[a].name == output.name => {
            Some(frame.value(function.var(i, 0)).1)
        }
        _ => None,
    });
    match before {
        Some(before) if !same(before, now) => Err(GraphError::usage(
            &function.nodes[output.var.index()].scope,
            format!("state `{}` is placed {before} but comes back {now}; place it as it comes back", output.name),
        )),
        _ => Ok(()),
    }
}

/// Which inputs `rule` passes on as sums although they have other uses, or are fewer than what they are broadcast to:
/// each use would then finish its own sum, at no less than the one sum that they could share. Sums of sums remain one.
fn put_off<'a>(frame: &'a Places<'_>, node: &'a Node, rule: &'a ShardingRule) -> impl Iterator<Item = bool> + 'a {
    let adds = matches!(node.op, Op::Prim(Prim::Binary(Binary::Add | Binary::Sub)));
    let spreads = matches!(node.op, Op::Prim(Prim::Broadcast(_)));
    node.inputs.iter().zip(&rule.inputs).map(move |(var, want)| {
        let summed = *want == Placement::Partial && frame.value(*var).1 == Placement::Partial;
        summed && !adds && (spreads || frame.uses(*var) > 1)
    })
}
