//! How tokens are sent to experts in training.

use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};

/// Routing in training, of models with experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExpertsSettings {
    /// Who chooses, and whether tokens are dropped.
    pub routing: RoutingName,
    /// Tokens that an expert takes, over its share if all took the same; for `capacity` and `expert_choice`.
    pub capacity_factor: f64,
    /// Factor of the loss that balances experts; 0 for none.
    pub router_aux_loss_coef: f64,
    /// Factor of the mean squared logarithm of the sum of exponentials of router logits; 0 for none.
    pub router_z_loss_coef: f64,
    /// What is added to the bias of an expert's choice behind a step in which fewer tokens chose it than the mean, and taken
    /// from it if more did; 0 leaves biases as they are.
    pub bias_update_speed: f64,
    /// Entropy of a layer's load, over that of equal loads, at or below which a run warns of collapse; 0 never.
    pub collapse: f64,
}

impl Default for ExpertsSettings {
    fn default() -> Self {
        Self {
            routing: RoutingName::TopK,
            capacity_factor: CAPACITY_FACTOR,
            router_aux_loss_coef: 0.0,
            router_z_loss_coef: 0.0,
            bias_update_speed: 0.0,
            collapse: 0.5,
        }
    }
}

/// That of Fedus et al. 2022, section 2.2.
const CAPACITY_FACTOR: f64 = 1.25;

/// Who chooses, and whether tokens are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RoutingName {
    /// Tokens choose, and experts take all that chose them.
    TopK,
    /// Tokens choose, and experts take the first of them up to their capacity.
    Capacity,
    /// Experts choose tokens, as many as their capacity.
    ExpertChoice,
}

impl ExpertsSettings {
    pub(super) fn check(&self) -> Result<()> {
        let numbers = [
            ("experts.router_aux_loss_coef", self.router_aux_loss_coef),
            ("experts.router_z_loss_coef", self.router_z_loss_coef),
            ("experts.bias_update_speed", self.bias_update_speed),
        ];
        if let Some((key, value)) = numbers.into_iter().find(|(_, value)| !(*value >= 0.0 && value.is_finite())) {
            return Err(TrainError::setting(key, value, "must be 0 or more"));
        }
        let factor = self.capacity_factor;
        if !(factor > 0.0 && factor.is_finite()) {
            return Err(TrainError::setting("experts.capacity_factor", factor, "must be above 0"));
        }
        if !(0.0..1.0).contains(&self.collapse) {
            return Err(TrainError::setting("experts.collapse", self.collapse, "must be at least 0 and below 1"));
        }
        if self.routing == RoutingName::TopK && factor != CAPACITY_FACTOR {
            let why = "has no effect on routing = top_k, which drops no tokens; set experts.routing to capacity or \
                       expert_choice";
            return Err(TrainError::setting("experts.capacity_factor", factor, why));
        }
        if self.routing == RoutingName::ExpertChoice {
            let of_choice = [
                ("experts.router_aux_loss_coef", self.router_aux_loss_coef),
                ("experts.bias_update_speed", self.bias_update_speed),
            ];
            if let Some((key, value)) = of_choice.into_iter().find(|(_, value)| *value > 0.0) {
                let why = "cannot go with routing = expert_choice, whose experts all take the same number of tokens";
                return Err(TrainError::setting(key, value, why));
            }
        }
        Ok(())
    }

    /// The first key that asks for what a model without experts does not have, with its value.
    pub(crate) fn asked(&self) -> Option<(&'static str, String)> {
        let routing = (self.routing != RoutingName::TopK).then(|| ("experts.routing", self.routing.to_string()));
        let numbers = [
            ("experts.router_aux_loss_coef", self.router_aux_loss_coef),
            ("experts.router_z_loss_coef", self.router_z_loss_coef),
            ("experts.bias_update_speed", self.bias_update_speed),
        ];
        let number = numbers.into_iter().find(|(_, value)| *value > 0.0);
        routing.or_else(|| number.map(|(key, value)| (key, value.to_string())))
    }
}

impl std::fmt::Display for RoutingName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::TopK => "top_k",
            Self::Capacity => "capacity",
            Self::ExpertChoice => "expert_choice",
        })
    }
}
