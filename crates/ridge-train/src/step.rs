//! A training step as a schedule of three programs:
//!
//! - `accumulate`, for each micro-batch: forward and backward; adds the loss and the gradients to parameters of the session;
//! - `reduce`: the loss and the norm of the gradient, which the host sees before it decides on the update. Over several ranks
//!   the gradients are summed here;
//! - `update`: the optimiser, from gradients scaled by what clipping asks for.
//!
//! What passes between them are parameters of the session, in which an engine or a program that measures losses reads the same
//! weights.

use ridge_graph::grad::{Differentiated, float_weights};
use ridge_graph::passes::{self, EXPERT_DROPPED, EXPERT_LOAD, FP8_AMAX};
use ridge_graph::{Binary, Bindings, Builder, DType, Graph, GraphError, Result as GraphResult, Role, Shape, Type, Var};
use ridge_runtime::{Schedule, Stage, Times};

use crate::fp8;
use crate::optimizer::{UpdateOp, WeightUpdate};
use crate::recompute::RecomputeLevel;
use crate::settings::Precision;

/// The stage that runs for each micro-batch.
pub const ACCUMULATE: &str = "accumulate";
/// The stage that gives loss and norm.
pub const REDUCE: &str = "reduce";
/// The stage that changes the weights.
pub const UPDATE: &str = "update";

/// Outputs of [`REDUCE`], f32 scalars: the mean loss over the targets of the step.
pub const LOSS: &str = "loss";
/// The Euclidean norm of the gradient of that mean.
pub const GRADIENT_NORM: &str = "gradient_norm";

/// With experts, also [`EXPERT_LOAD`] and [`EXPERT_DROPPED`] of the step, in states of these names.
const OF_EXPERTS: [(&str, &str); 2] = [(EXPERT_LOAD, "train.expert_load"), (EXPERT_DROPPED, "train.expert_dropped")];

/// Step inputs of [`ACCUMULATE`], f32 scalars: the inverse of the number of targets of the whole step.
pub const LOSS_SCALE: &str = "loss_scale";
/// 1 for the first micro-batch of a step, which replaces what was accumulated, 0 for the others.
pub const FIRST: &str = "first_part";
/// Step inputs of [`UPDATE`], f32 scalars: the learning rate.
pub const LEARNING_RATE: &str = "learning_rate";
/// The update's number, from 1.
pub const UPDATE_NUMBER: &str = "update_number";
/// What gradients are multiplied by.
pub const GRADIENT_SCALE: &str = "gradient_scale";

/// The state that the loss of a step is summed in.
const LOSS_STATE: &str = "train.loss";

/// The name of the f32 master of the weight `name`, where that is a copy of fewer bits.
pub fn master_name(name: &str) -> String {
    format!("master.{name}")
}

/// The name of what rounding took from the weight `name`, where that is kept.
pub fn compensation_name(name: &str) -> String {
    format!("compensation.{name}")
}

/// The name of the running mean of the weight `name`.
pub fn ema_name(name: &str) -> String {
    format!("ema.{name}")
}

fn gradient_name(name: &str) -> String {
    format!("gradient.{name}")
}

/// What the schedule of a step is made from.
pub struct StepPlan<'a> {
    /// A training graph with the outputs `loss_sum` and `target_count`, its weights stored as they are trained: f32, or
    /// bf16 copies of f32 masters.
    pub graph: &'a Graph,
    /// The update of each of its float weights, in their order.
    pub updates: &'a [WeightUpdate],
    /// How weights are stored and rounded.
    pub precision: Precision,
    /// Micro-batches of a step.
    pub parts: usize,
    /// Decay of the running mean of weights; 0 for none.
    pub ema: f64,
    /// Layers with experts, and experts of each, if `graph` has the outputs of
    /// [`with_routing`](ridge_graph::passes::with_routing).
    pub experts: Option<[usize; 2]>,
    /// Steps whose largest magnitudes products in 8 bits go by, if their scaling is delayed.
    pub fp8_history: usize,
    /// What the backward pass computes again.
    pub recompute: RecomputeLevel,
    /// The extents of a micro-batch, if what its layers keep for the backward pass is offloaded.
    pub offload: Option<&'a Bindings>,
}

impl StepPlan<'_> {
    /// The schedule.
    ///
    /// # Errors
    /// When the graph lacks its outputs, or an op has no gradient.
    pub fn schedule(&self) -> GraphResult<Schedule> {
        let stage =
            |name, graph, outputs: &[&'static str], times| Stage { name, graph, outputs: outputs.to_vec(), times };
        let mut reduced = vec![LOSS, GRADIENT_NORM];
        if self.experts.is_some() {
            reduced.extend(OF_EXPERTS.map(|(name, _)| name));
        }
        Ok(Schedule {
            stages: vec![
                stage(ACCUMULATE, self.accumulate()?, &[], Times::EachPart),
                stage(REDUCE, self.reduce()?, &reduced, Times::Once),
                stage(UPDATE, self.update()?, &[], Times::Once),
            ],
        })
    }

    /// The type of the weight `name` in the graph.
    fn storage(&self, name: &str) -> GraphResult<&Type> {
        let arg = self.graph.args(Role::Weight).find(|arg| *arg.name == *name);
        let why = "is to be updated, and the training graph has no such weight";
        arg.map(|arg| &arg.ty).ok_or_else(|| GraphError::Use { at: name.to_owned(), why: why.to_owned() })
    }

    /// The type of the gradient of the weight `name` between the stages: f32 if several micro-batches are summed.
    fn gradient_type(&self, name: &str) -> GraphResult<Type> {
        let ty = self.storage(name)?.clone();
        Ok(if self.parts > 1 { Type { dtype: DType::F32, ..ty } } else { ty })
    }

    fn accumulate(&self) -> GraphResult<Graph> {
        let (mut g, mut outputs) = Builder::reopen(self.graph.clone());
        let sum = output(&outputs, "loss_sum")?;
        let scale = g.step_input(LOSS_SCALE, scalar())?;
        let loss = g.mul(sum, scale)?;
        outputs.push(("scaled_loss".into(), loss));
        let mut graph = g.finish(outputs)?;
        let mut kept = vec!["scaled_loss"];
        if self.experts.is_some() {
            kept.extend(OF_EXPERTS.map(|(name, _)| name));
        }
        passes::prune(&mut graph, &kept)?;
        // Before the gradient is made, so that it has the gradients of groups.
        passes::group_linears(&mut graph);

        let mut names: Vec<&str> = self.updates.iter().map(|update| update.name.as_str()).collect();
        names.extend(fp8::magnitudes(&graph).map(|arg| &*arg.name));
        let mut step = Differentiated::recomputing(&graph, "scaled_loss", &names, self.recompute.of_layers())?;
        let first = if self.parts > 1 { Some(step.g.step_input(FIRST, scalar())?) } else { None };
        let loss = step.output("scaled_loss")?;
        accumulate(&mut step, LOSS_STATE, loss, first, Binary::Add)?;
        if self.experts.is_some() {
            for (name, state) in OF_EXPERTS {
                let count = step.output(name)?;
                accumulate(&mut step, state, count, first, Binary::Add)?;
            }
        }
        for parameter in step.parameters.clone() {
            let by = if parameter.name.ends_with(FP8_AMAX) { Binary::Max } else { Binary::Add };
            accumulate(&mut step, &gradient_name(&parameter.name), parameter.gradient, first, by)?;
        }
        let mut graph = step.finish(Vec::new())?;
        passes::write_early(&mut graph);
        if let Some(bindings) = self.offload {
            passes::offload(&mut graph, bindings)?;
        }
        Ok(graph)
    }

    fn reduce(&self) -> GraphResult<Graph> {
        let mut g = Builder::new();
        let loss = g.weight(LOSS_STATE, scalar())?;
        let mut total = g.constant(DType::F32, 0.0)?;
        for update in self.updates {
            let gradient = g.weight(&gradient_name(&update.name), self.gradient_type(&update.name)?)?;
            let gradient = g.cast(gradient, DType::F32)?;
            let square = g.mul(gradient, gradient)?;
            let sum = (0..update.shape.rank()).rev().try_fold(square, |sum, axis| g.reduce_sum(sum, axis))?;
            let sum = g.reshape(sum, Shape::default())?;
            total = g.add(total, sum)?;
        }
        let norm = g.sqrt(total)?;
        // A weight that is an output would be copied as it is.
        let zero = g.constant(DType::F32, 0.0)?;
        let loss = g.add(loss, zero)?;
        let mut outputs = vec![(LOSS.into(), loss), (GRADIENT_NORM.into(), norm)];
        if let Some(experts) = self.experts {
            for ((name, state), shape) in OF_EXPERTS.into_iter().zip([&experts[..], &experts[..1]]) {
                let count = g.weight(state, Type::tensor(DType::F32, Shape::new(shape.iter().copied())))?;
                outputs.push((name.into(), g.add(count, zero)?));
            }
        }
        g.finish(outputs)
    }

    /// How many more tokens of the step chose each expert of this layer than the mean: f32 `[experts]`.
    fn load_error(&self, g: &mut Builder, layer: usize) -> GraphResult<Var> {
        let why = "follows the load of experts, which the training graph does not count";
        let experts = self.experts.ok_or_else(|| GraphError::Use { at: "update".into(), why: why.into() })?;
        let load = g.weight(OF_EXPERTS[0].1, Type::tensor(DType::F32, experts))?;
        let load = g.slice(load, 0, layer, 1)?;
        let mean = g.reduce_sum(load, 1)?;
        let count = g.constant(DType::F32, experts[1] as f64)?;
        let mean = g.div(mean, count)?;
        let error = g.sub(load, mean)?;
        g.reshape(error, [experts[1]])
    }

    fn update(&self) -> GraphResult<Graph> {
        let mut g = Builder::new();
        let lr = g.step_input(LEARNING_RATE, scalar())?;
        let step = g.step_input(UPDATE_NUMBER, scalar())?;
        let scale = g.step_input(GRADIENT_SCALE, scalar())?;
        for update in self.updates.iter().filter(|update| update.rate_scale != 0.0) {
            let storage = self.storage(&update.name)?.clone();
            let gradient = match update.op {
                UpdateOp::FollowLoad { layer, .. } => self.load_error(&mut g, layer)?,
                _ => g.weight(&gradient_name(&update.name), self.gradient_type(&update.name)?)?,
            };
            let has_master = self.precision.has_masters();
            let trained = if has_master { master_name(&update.name) } else { update.name.clone() };
            let whole = Type { dtype: DType::F32, ..storage.clone() };
            let states = update.op.states(&update.name, &update.shape);
            let read = |g: &mut Builder, name: &str, ty: &Type| {
                let state = g.state(name, ty.clone())?;
                g.state_read(state)
            };
            let mut rate = lr;
            if update.rate_scale != 1.0 {
                let factor = g.constant(DType::F32, update.rate_scale)?;
                rate = g.mul(lr, factor)?;
            }
            let is_narrow = !has_master && storage.dtype != DType::F32;
            let next = if let (UpdateOp::AdamW(op), false) = (update.op, is_narrow) {
                // One pass over parameter, moments, gradient and copy.
                let [m, v] = [&states[0], &states[1]].map(|state| g.state(&state.name, state.ty.clone()));
                let copy = if has_master { Some(g.state(&update.name, storage)?) } else { None };
                let param = g.state(&trained, whole.clone())?;
                let next = g.adamw_update([param, m?, v?], copy, gradient, [rate, step, scale], op)?[0];
                g.state_read(next)?
            } else {
                let gradient = g.cast(gradient, DType::F32)?;
                let gradient = g.mul(gradient, scale)?;
                let param = if is_narrow {
                    self.narrow(&mut g, &update.name, &storage)?
                } else {
                    read(&mut g, &trained, &whole)?
                };
                let values =
                    states.iter().map(|state| read(&mut g, &state.name, &state.ty)).collect::<GraphResult<Vec<_>>>()?;
                let next = update.op.apply(&mut g, [param, gradient], &values, rate, step)?;
                for (state, value) in states.iter().zip(&next[1..]) {
                    write(&mut g, &state.name, *value)?;
                }
                if is_narrow {
                    self.write_narrow(&mut g, &update.name, next[0])?;
                } else {
                    write(&mut g, &trained, next[0])?;
                }
                if has_master {
                    let copy = g.cast(next[0], storage.dtype)?;
                    write(&mut g, &update.name, copy)?;
                }
                next[0]
            };
            if self.ema > 0.0 {
                let name = ema_name(&update.name);
                let mean = read(&mut g, &name, &whole)?;
                let keep = g.constant(DType::F32, self.ema)?;
                let take = g.constant(DType::F32, 1.0 - self.ema)?;
                let (kept, taken) = (g.mul(mean, keep)?, g.mul(next, take)?);
                let mean = g.add(kept, taken)?;
                write(&mut g, &name, mean)?;
            }
        }
        for arg in fp8::magnitudes(self.graph) {
            fp8::update(&mut g, arg, &gradient_name(&arg.name), self.fp8_history)?;
        }
        g.finish(Vec::new())
    }

    /// The weight `name` without a master in f32, with what rounding took from it.
    fn narrow(&self, g: &mut Builder, name: &str, storage: &Type) -> GraphResult<Var> {
        let wide = |g: &mut Builder, name: &str| {
            let state = g.state(name, storage.clone())?;
            let value = g.state_read(state)?;
            g.cast(value, DType::F32)
        };
        let weight = wide(g, name)?;
        if self.precision != Precision::Bf16Kahan {
            return Ok(weight);
        }
        let lost = wide(g, &compensation_name(name))?;
        g.add(weight, lost)
    }

    /// Rounds the next value of a weight without a master.
    fn write_narrow(&self, g: &mut Builder, name: &str, next: Var) -> GraphResult<()> {
        if self.precision != Precision::Bf16Kahan {
            let rounded = g.scoped(name, |g| g.stochastic_round(next))?;
            return write(g, name, rounded);
        }
        let rounded = g.cast(next, DType::BF16)?;
        let again = g.cast(rounded, DType::F32)?;
        let lost = g.sub(next, again)?;
        let lost = g.cast(lost, DType::BF16)?;
        write(g, name, rounded)?;
        write(g, &compensation_name(name), lost)
    }
}

fn scalar() -> Type {
    Type::tensor(DType::F32, Shape::default())
}

fn output(outputs: &[(String, Var)], name: &str) -> GraphResult<Var> {
    let found = outputs.iter().find(|(known, _)| known == name).map(|(_, var)| *var);
    let why = format!("the training graph has no output `{name}`");
    found.ok_or_else(|| GraphError::Use { at: String::new(), why })
}

fn write(g: &mut Builder, name: &str, value: Var) -> GraphResult<()> {
    let ty = g.ty(value)?.clone();
    let state = g.state(name, ty)?;
    g.state_write(state, value)?;
    Ok(())
}

/// Combines `value`, which is not below 0 where `by` is a maximum, with the f32 state `name`, or replaces it in the first
/// micro-batch; without `first` replaces it.
fn accumulate(step: &mut Differentiated, name: &str, value: Var, first: Option<Var>, by: Binary) -> GraphResult<()> {
    let Some(first) = first else { return step.update(name, value) };
    let g = &mut step.g;
    let value = g.cast(value, DType::F32)?;
    let ty = g.ty(value)?.clone();
    let state = g.state(name, ty)?;
    let before = g.state_read(state)?;
    let zero = g.constant(DType::F32, 0.0)?;
    let is_first = g.gt(first, zero)?;
    let before = g.select(is_first, zero, before)?;
    let result = if by == Binary::Max { g.max(before, value)? } else { g.add(before, value)? };
    step.update(name, result)
}

/// Names and shapes of the weights of a training graph that can be trained.
pub fn trained_weights(graph: &Graph) -> Vec<(String, Shape)> {
    let names = float_weights(graph);
    let of = |name: String| {
        let arg = graph.args(Role::Weight).find(|arg| *arg.name == *name)?;
        Some((name, arg.ty.shape.clone()))
    };
    names.into_iter().filter_map(of).collect()
}
