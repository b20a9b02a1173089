//! Models with experts: what settings ask of routing, and how evenly experts are used.

use ridge_graph::Graph;
use ridge_graph::passes::{Dispatch, RoutedLayer, RoutingTerms, routed_layers, with_routing};
use serde::Serialize;

use crate::error::{Result, TrainError};
use crate::optimizer::{UpdateOp, WeightUpdate};
use crate::settings::{ExpertsSettings, RoutingName};

/// The training graph `graph` with the routing of `settings`, and its layers with experts. `tokens` are those of a
/// micro-batch.
///
/// # Errors
/// When a setting asks for what the model lacks.
pub(crate) fn routed(
    graph: Graph,
    settings: &ExpertsSettings,
    model_type: &str,
    tokens: usize,
) -> Result<(Graph, Vec<RoutedLayer>)> {
    let layers = routed_layers(&graph)?;
    let Some(RoutedLayer { experts, top_k, .. }) = layers.first() else {
        return match settings.asked() {
            Some((key, value)) => {
                let why = format!("is for models with routed experts, and this {model_type} has none; remove the key");
                Err(TrainError::setting(key, value, why))
            }
            None => Ok((graph, layers)),
        };
    };
    if settings.bias_update_speed > 0.0
        && let Some(layer) = layers.iter().find(|layer| layer.bias.is_none())
    {
        let why = format!(
            "needs a router with a bias for the choice, and {} of this {model_type} has none; use \
             experts.router_aux_loss_coef",
            layer.scope
        );
        return Err(TrainError::setting("experts.bias_update_speed", settings.bias_update_speed, why));
    }
    let share = settings.capacity_factor * (tokens * top_k) as f64 / *experts as f64;
    let capacity = (share.ceil() as usize).min(tokens);
    let dispatch = match settings.routing {
        RoutingName::TopK => Dispatch::Dropless,
        RoutingName::Capacity => Dispatch::Capacity(capacity),
        RoutingName::ExpertChoice => Dispatch::ExpertChoice(capacity),
    };
    let terms = RoutingTerms { balance: settings.router_aux_loss_coef, z: settings.router_z_loss_coef, dispatch };
    let graph = with_routing(&graph, &terms)?;
    Ok((graph, layers))
}

/// Makes the biases of `layers` follow the load at `speed`, if that is above 0.
pub(crate) fn balance_biases(updates: &mut [WeightUpdate], layers: &[RoutedLayer], speed: f64) {
    if speed == 0.0 {
        return;
    }
    for (layer, routed) in layers.iter().enumerate() {
        let of = |update: &&mut WeightUpdate| Some(&update.name) == routed.bias.as_ref();
        if let Some(update) = updates.iter_mut().find(of) {
            update.rate_scale = 1.0;
            update.op = UpdateOp::FollowLoad { layer, speed };
        }
    }
}

/// How evenly the experts of a layer were used since the last report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerUse {
    /// The layer, such as `model.layers.3`.
    pub layer: String,
    /// Entropy of the shares of experts in the load, over its largest value, the logarithm of their number: 1 for equal
    /// shares, 0 if one expert has all.
    pub entropy: f64,
    /// The largest load over the mean.
    pub max_load: f64,
    /// Experts that no token chose.
    pub dead: usize,
    /// The share of choices that were dropped; where experts choose, of tokens that none took.
    pub dropped: f64,
    /// Has the layer collapsed, by `experts.collapse`?
    pub collapsed: bool,
}

/// Loads of experts, summed over steps.
#[derive(Clone, Debug)]
pub struct ExpertLoads {
    layers: Vec<RoutedLayer>,
    /// Of each layer and expert.
    load: Vec<f64>,
    /// Of each layer.
    dropped: Vec<f64>,
    /// Tokens that passed through each layer.
    tokens: f64,
}

impl ExpertLoads {
    /// None yet.
    pub fn new(layers: &[RoutedLayer]) -> Self {
        let experts: usize = layers.iter().map(|layer| layer.experts).sum();
        Self { layers: layers.to_vec(), load: vec![0.0; experts], dropped: vec![0.0; layers.len()], tokens: 0.0 }
    }

    /// Are there layers with experts?
    pub fn has_layers(&self) -> bool {
        !self.layers.is_empty()
    }

    /// Adds those of a step of so many tokens.
    pub fn add(&mut self, load: &[f32], dropped: &[f32], tokens: usize) {
        for (sum, value) in self.load.iter_mut().zip(load) {
            *sum += f64::from(*value);
        }
        for (sum, value) in self.dropped.iter_mut().zip(dropped) {
            *sum += f64::from(*value);
        }
        self.tokens += tokens as f64;
    }

    /// How evenly experts were used, and begins again. Empty without experts or steps.
    pub fn take(&mut self, settings: &ExpertsSettings) -> Vec<LayerUse> {
        let all = std::mem::replace(self, Self::new(&self.layers));
        if all.tokens == 0.0 {
            return Vec::new();
        }
        let mut loads = &all.load[..];
        let mut used = Vec::with_capacity(all.layers.len());
        for (layer, dropped) in all.layers.iter().zip(&all.dropped) {
            let (load, rest) = loads.split_at(layer.experts);
            loads = rest;
            let choices = match settings.routing {
                RoutingName::ExpertChoice => all.tokens,
                RoutingName::TopK | RoutingName::Capacity => all.tokens * layer.top_k as f64,
            };
            let entropy = evenness(load);
            let mean = load.iter().sum::<f64>() / layer.experts as f64;
            used.push(LayerUse {
                layer: layer.scope.clone(),
                entropy,
                max_load: if mean > 0.0 { load.iter().copied().fold(0.0, f64::max) / mean } else { 0.0 },
                dead: load.iter().filter(|load| **load == 0.0).count(),
                dropped: dropped / choices,
                // Where every token takes all experts, or there is one, loads say nothing.
                collapsed: settings.collapse > 0.0 && layer.top_k < layer.experts && entropy <= settings.collapse,
            });
        }
        used
    }
}

/// The entropy of shares over that of equal ones; 1 of one share.
fn evenness(load: &[f64]) -> f64 {
    let total: f64 = load.iter().sum();
    if load.len() < 2 || total == 0.0 {
        return 1.0;
    }
    let shares = load.iter().filter(|load| **load > 0.0).map(|load| load / total);
    let entropy: f64 = shares.map(|share| -share * share.ln()).sum();
    entropy / (load.len() as f64).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(experts: usize, top_k: usize) -> RoutedLayer {
        RoutedLayer { scope: "model.layers.1".into(), experts, top_k, bias: None }
    }

    #[test]
    fn equal_loads_are_even_and_one_expert_with_all_tokens_is_a_collapse() {
        let mut loads = ExpertLoads::new(&[layer(4, 1), layer(4, 1)]);
        loads.add(&[3.0, 3.0, 3.0, 3.0, 6.0, 0.0, 0.0, 0.0], &[0.0, 2.0], 6);
        loads.add(&[3.0, 3.0, 3.0, 3.0, 6.0, 0.0, 0.0, 0.0], &[0.0, 1.0], 6);
        let used = loads.take(&ExpertsSettings::default());
        let of = |layer: &LayerUse| (layer.entropy, layer.max_load, layer.dead, layer.dropped, layer.collapsed);
        assert_eq!(of(&used[0]), (1.0, 1.0, 0, 0.0, false));
        assert_eq!(of(&used[1]), (0.0, 4.0, 3, 0.25, true));
        assert!(loads.take(&ExpertsSettings::default()).is_empty(), "begins again");
    }

    #[test]
    fn half_of_the_experts_have_half_the_entropy_of_four() {
        let mut loads = ExpertLoads::new(&[layer(4, 2)]);
        loads.add(&[5.0, 5.0, 0.0, 0.0], &[0.0], 5);
        let used = &loads.take(&ExpertsSettings { collapse: 0.4, ..ExpertsSettings::default() })[0];
        assert!((used.entropy - 0.5).abs() < 1e-12 && !used.collapsed, "{used:?}");
    }
}
