//! The module of a model that drafts further tokens, as a model of one layer.

use std::collections::HashSet;

use ridge_graph::shard::placements;
use ridge_graph::{Graph, GraphError, Op, Role};
use ridge_models::{BuildOptions, Model, ModelConfig, StateGroup, parallel};

use super::{LayerWork, Reading, options, read_layer};
use crate::error::PlanError;

impl Reading {
    /// This reading of the config.json `text` with the model's module that drafts further tokens.
    ///
    /// # Errors
    /// [`PlanError::Setting`] when the model has none.
    pub fn with_prediction(mut self, file: &str, text: &str) -> Result<Self, PlanError> {
        let config = ModelConfig::unquantised(file, text)?;
        if !config.predicts() {
            let why = format!("is not possible: {} has no module that drafts tokens", config.model_type());
            return Err(PlanError::setting("--speculate", "mtp", why, "leave it out"));
        }
        let built = |drafts| config.build(&BuildOptions { drafts, ..options(self.cache) });
        let of_ours = |error: GraphError| PlanError::Graph(error.to_string());
        let (base, model) = (built(0).map_err(of_ours)?, built(1).map_err(of_ours)?);
        let drafts = model.drafts.as_ref().ok_or_else(|| PlanError::Graph("the model has no drafting graph".into()))?;
        let layer = read_module(drafts, &base.graph)?;
        self.prediction = Some(Box::new(Self {
            parameters: model.parameter_count() - base.parameter_count(),
            layers: vec![0],
            embedding: 0.0,
            head: 0.0,
            states: added_states(&base, &model),
            heads: layer.ops.iter().map(|op| op.heads).filter(|heads| *heads > 0).min().unwrap_or(0),
            experts: layer.ops.iter().map(|op| op.experts).max().unwrap_or(0),
            kinds: vec![layer],
            prediction: None,
            ..self.clone()
        }));
        Ok(self)
    }
}

/// The layer that the drafting graph calls, with the ops of main in its scope. Sampling and the output projection are left out, as
/// of models.
fn read_module(drafts: &Graph, base: &Graph) -> Result<LayerWork, PlanError> {
    let places = placements(drafts, &parallel::placement).map_err(|error| PlanError::Graph(error.to_string()))?;
    let called = drafts.main().nodes.iter().find_map(|node| match node.op {
        Op::Call(function) => Some((function, node.scope.to_string())),
        _ => None,
    });
    let (function, scope) = called.ok_or_else(|| PlanError::Graph("the drafting graph calls no layer".into()))?;
    let known: HashSet<&str> = base.args(Role::Weight).map(|arg| &*arg.name).collect();
    let added = drafts.args(Role::Weight).filter(|arg| !known.contains(&*arg.name));
    let mut layer = LayerWork::of_weights(&drafts.function(function).name, added);
    let of_main = read_layer(drafts.main(), &places).ops.into_iter().filter(|op| op.scope.starts_with(&scope));
    let of_layer = read_layer(drafts.function(function), &places);
    (layer.saved, layer.ops) = (of_layer.saved, of_main.chain(of_layer.ops).collect());
    Ok(layer)
}

/// What `model` keeps beside `base`, the same model without its module.
fn added_states(base: &Model, model: &Model) -> Vec<StateGroup> {
    let mut groups = model.state_groups.clone();
    for group in &mut groups {
        let same = |before: &&StateGroup| before.states.iter().all(|state| group.states.contains(state));
        if let Some(before) = base.state_groups.iter().find(same) {
            group.states.retain(|state| !before.states.contains(state));
            group.bytes_per_token -= before.bytes_per_token;
            group.bytes_per_sequence -= before.bytes_per_sequence;
        }
    }
    groups.retain(|group| !group.states.is_empty());
    groups
}
