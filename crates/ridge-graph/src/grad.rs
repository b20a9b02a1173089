//! Reverse-mode differentiation of a graph, once per distinct function.
//!
//! A function through which the loss depends on a parameter becomes two: a forward half, which gives its outputs and
//! the values that the other needs (`grad/expand.rs`), and a backward half, which takes those and the cotangents of
//! the outputs and gives the cotangents of the arguments (`grad/reverse.rs`). A decoder layer called eighty times is
//! differentiated once; calls with other arguments to differentiate for (the first layer above frozen embeddings) have
//! halves of their own. `grad/activity.rs` finds what takes part at all, `grad/prim.rs` and `grad/rows.rs` hold the
//! rule of each primitive, and `grad/residual.rs` decides what is kept and what is computed again. `jvp.rs` makes
//! derivatives along tangents of two such gradients. A differentiated graph can be differentiated again.
//!
//! The cotangent of a value has its dtype and shape, and of a state it is a plain tensor.

mod activity;
mod expand;
mod prim;
mod recurrence;
mod residual;
mod reverse;
mod rows;
mod sweep;
mod tape;

use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::graph::{Arg, Builder, Function, Graph, Op, Role, Var};
use crate::types::Type;

pub use residual::Recompute;

use activity::is_smooth;
use expand::Differentiator;
use sweep::ReverseSweep;
use tape::Tape;

/// Adds to `graph` an output `grad.<name>` for each argument of main named in `wrt`, of its dtype and shape: the
/// gradient of the output `loss`. Arguments and other outputs stay as they are.
///
/// # Errors
/// When `loss` is no f32 scalar among the outputs, a name is not that of a plain float argument, or an op on the way
/// has no gradient.
pub fn gradient(graph: &Graph, loss: &str, wrt: &[impl AsRef<str>]) -> Result<Graph> {
    let step = Differentiated::new(graph, loss, wrt)?;
    let outputs: Vec<_> = step.parameters.iter().map(|p| (format!("grad.{}", p.name), p.gradient)).collect();
    step.finish(outputs)
}

/// Names of the weights of main that can be trained: plain and float.
pub fn float_weights(graph: &Graph) -> Vec<String> {
    graph.args(Role::Weight).filter(|a| is_smooth(&a.ty)).map(|a| a.name.to_string()).collect()
}

/// `graph` with the weights of main named in `names` turned into states of the same names, read where the weights were
/// used, so that a step can update them.
///
/// # Errors
/// When a name is not that of a plain weight.
pub fn weights_as_states(graph: &Graph, names: &[impl AsRef<str>]) -> Result<Graph> {
    let main = graph.main();
    for name in names {
        let arg = named(main, name.as_ref())?;
        if arg.role != Role::Weight || !arg.ty.is_plain() {
            let why = format!("is {}; only a weight in plain storage can become a state", arg.ty);
            return Err(GraphError::usage(&arg.name, why));
        }
    }
    let mut g = Builder::resume(graph.functions.clone(), &main.name);
    let becomes_state = |arg: &Arg| names.iter().any(|n| n.as_ref() == &*arg.name);
    let mut args = Vec::with_capacity(main.args.len());
    for arg in &main.args {
        let state = Arg::new(arg.name.clone(), Type { state: true, ..arg.ty.clone() }, Role::State);
        args.push(g.push_arg(if becomes_state(arg) { state } else { arg.clone() }));
    }
    for (arg, var) in main.args.iter().zip(&mut args).filter(|(arg, _)| becomes_state(arg)) {
        g.set_scope(&arg.name);
        *var = g.state_read(*var)?;
    }
    let mut map: Vec<Vec<Var>> = Vec::with_capacity(main.nodes.len());
    for node in &main.nodes {
        g.set_scope(&node.scope);
        let inputs: Vec<Var> = node.inputs.iter().map(|v| map[v.index()][v.out as usize]).collect();
        map.push(match &node.op {
            Op::Arg(i) => vec![args[*i]],
            op => g.emit(op.clone(), &inputs)?,
        });
    }
    finished(g, data_outputs(main).map(|(name, var)| (name, map[var.index()][var.out as usize])).collect())
}

/// A parameter in a differentiated graph.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The argument's name.
    pub name: String,
    /// Its value: the weight, or what the state holds after the forward half.
    pub value: Var,
    /// The gradient of the loss, of the value's dtype and shape.
    pub gradient: Var,
}

/// A graph with its gradients, still open: its user continues in [`Differentiated::g`] with what makes a training step of
/// it (clipping, an optimiser, norms), then calls [`Differentiated::finish`].
#[derive(Debug)]
pub struct Differentiated {
    /// The builder, in main after loss and gradients.
    pub g: Builder,
    /// The parameters differentiated for, in the order they were named.
    pub parameters: Vec<Parameter>,
    /// Main's outputs that are no states.
    pub outputs: Vec<(String, Var)>,
}

impl Differentiated {
    /// The gradients of the output `loss` of `graph` with respect to the arguments of main named in `wrt`: weights,
    /// or states, data and step inputs.
    ///
    /// # Errors
    /// As [`gradient`].
    pub fn new(graph: &Graph, loss: &str, wrt: &[impl AsRef<str>]) -> Result<Self> {
        Self::recomputing(graph, loss, wrt, Vec::new())
    }

    /// As [`Differentiated::new`], with what the backward pass computes again: one entry for each call in main through which
    /// the loss depends on `wrt`, in order (of a decoder, its layers); of calls without an entry, [`Recompute::Cheap`].
    ///
    /// # Errors
    /// As [`gradient`].
    pub fn recomputing(graph: &Graph, loss: &str, wrt: &[impl AsRef<str>], recompute: Vec<Recompute>) -> Result<Self> {
        let main = graph.main();
        let loss = loss_output(main, loss)?;
        let mut marked = vec![false; main.args.len()];
        let mut wanted = Vec::with_capacity(wrt.len());
        for name in wrt {
            let arg = named(main, name.as_ref())?;
            if !is_smooth(&arg.ty) {
                let why = format!("is {}; a gradient needs a float tensor in plain storage", arg.ty);
                return Err(GraphError::usage(&arg.name, why));
            }
            let index = main.arg_index(&arg.name).unwrap_or_default();
            marked[index] = true;
            wanted.push(index);
        }
        let lossy: Vec<bool> = (0..main.outputs.len()).map(|i| i == loss).collect();

        let mut all = Differentiator::new(Builder::resume(graph.functions.clone(), &main.name), recompute);
        let active = all.activity.active(all.g.functions(), main, &marked, &lossy);
        let args: Vec<Var> = main.args.iter().map(|a| all.g.push_arg(a.clone())).collect();
        let mut tape = Tape::default();
        let results = all.expand(main, &args, &active, &mut tape)?;
        let forward = all.g.current().clone();

        let mut g = all.g;
        g.set_scope("");
        let mut sweep = ReverseSweep::within(&mut g, &forward, &tape);
        let one = sweep.g.constant(DType::F32, 1.0)?;
        sweep.add(results[loss], one)?;
        sweep.run()?;
        let mut parameters = Vec::with_capacity(wanted.len());
        for index in wanted {
            let Arg { name, ty, .. } = &main.args[index];
            let gradient = match sweep.cotangent(args[index]) {
                Some(cotangent) => cotangent,
                None => sweep.zeros(ty)?,
            };
            let value = if ty.state {
                let latest = sweep.g.state(name, ty.clone())?;
                sweep.g.state_read(latest)?
            } else {
                args[index]
            };
            parameters.push(Parameter { name: name.to_string(), value, gradient });
        }
        let outputs = main.outputs.iter().zip(&results).filter(|(o, _)| o.role == Role::Data);
        let outputs = outputs.map(|(o, var)| (o.name.to_string(), *var)).collect();
        Ok(Self { g, parameters, outputs })
    }

    /// As [`Differentiated::new`], with the weights named in `wrt` turned into states first, so that
    /// [`Differentiated::update`] can write them.
    ///
    /// # Errors
    /// As [`gradient`] and [`weights_as_states`].
    pub fn training(graph: &Graph, loss: &str, wrt: &[impl AsRef<str>]) -> Result<Self> {
        Self::new(&weights_as_states(graph, wrt)?, loss, wrt)
    }

    /// The output of main called `name`.
    ///
    /// # Errors
    /// When there is none.
    pub fn output(&self, name: &str) -> Result<Var> {
        let known = self.outputs.iter().find(|(n, _)| n == name).map(|(_, var)| *var);
        known.ok_or_else(|| GraphError::usage("", format!("no output `{name}`")))
    }

    /// Writes `value` to the state `name` of main, which has the type of `value`; it is created if there is none.
    ///
    /// # Errors
    /// When the state has another type.
    pub fn update(&mut self, name: &str, value: Var) -> Result<()> {
        let ty = self.g.ty(value)?.clone();
        let state = self.g.state(name, ty)?;
        self.g.state_write(state, value)?;
        Ok(())
    }

    /// The graph: its outputs are those it had, then `added`.
    ///
    /// # Errors
    /// When an output belongs to another function.
    pub fn finish(mut self, added: Vec<(String, Var)>) -> Result<Graph> {
        self.outputs.extend(added);
        finished(self.g, self.outputs)
    }
}

pub(crate) fn finished(g: Builder, outputs: Vec<(String, Var)>) -> Result<Graph> {
    let mut graph = g.finish(outputs)?;
    graph.drop_uncalled();
    Ok(graph)
}

pub(crate) fn data_outputs(main: &Function) -> impl Iterator<Item = (String, Var)> {
    main.outputs.iter().filter(|o| o.role == Role::Data).map(|o| (o.name.to_string(), o.var))
}

pub(crate) fn named<'a>(main: &'a Function, name: &str) -> Result<&'a Arg> {
    const SHOWN: usize = 8;
    main.args.iter().find(|a| &*a.name == name).ok_or_else(|| {
        let known: Vec<&Arg> = main.args.iter().filter(|a| matches!(a.role, Role::Weight | Role::State)).collect();
        let shown: Vec<String> = known.iter().take(SHOWN).map(|a| format!("`{}`", a.name)).collect();
        let rest = if known.len() > SHOWN { format!(" and {} more", known.len() - SHOWN) } else { String::new() };
        let shown = shown.join(", ");
        GraphError::usage(
            "",
            format!("no argument `{name}` to differentiate for; weights and states are {shown}{rest}"),
        )
    })
}

fn loss_output(main: &Function, name: &str) -> Result<usize> {
    let index = main.outputs.iter().position(|o| &*o.name == name && o.role == Role::Data).ok_or_else(|| {
        let known: Vec<String> = data_outputs(main).map(|(name, _)| format!("`{name}`")).collect();
        GraphError::usage("", format!("no output `{name}` to differentiate; the graph has {}", known.join(", ")))
    })?;
    let ty = main.ty(main.outputs[index].var);
    if *ty != Type::tensor(DType::F32, crate::shape::Shape::default()) {
        return Err(GraphError::usage(name, format!("is {ty}; a loss must be f32[], a scalar: sum or average it")));
    }
    Ok(index)
}
