//! Maximal update parametrisation (muP): initial weights and learning rates of a wide model from those that were found on a
//! narrow one (Yang et al. 2022, "Tensor Programs V", table 3).
//!
//! With `r` the width over the base width, initial standard deviations and learning rates are multiplied by
//!
//! | weights | standard deviation | Adam and Lion | SGD |
//! |---|---|---|---|
//! | embeddings, biases, norms | 1 | 1 | r |
//! | matrices of layers | r^-1/2 | 1/r | 1 |
//! | output projection | 1/r | 1/r | 1/r |
//!
//! Table 8 of the paper says the same with a factor of the logits, which tied embeddings would need and few architectures
//! have. Heads are to be of one size at both widths, so that the factor of scores is the same, and all else in proportion.

use ridge_graph::Shape;
use ridge_models::{ModelConfig, WeightRole};

use crate::error::{Result, TrainError};
use crate::settings::{OptimizerName, Settings};

/// What the width of a model changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WidthScaling {
    /// The model's width over the base width.
    ratio: f64,
}

impl WidthScaling {
    /// Nothing is scaled.
    pub const NONE: Self = Self { ratio: 1.0 };

    /// From the base width, 0 for none, to `width`.
    pub fn between(base: usize, width: usize) -> Self {
        if base == 0 { Self::NONE } else { Self { ratio: width as f64 / base as f64 } }
    }

    /// What the settings ask for.
    ///
    /// # Errors
    /// When the optimiser has no rule, or the model's output projection is its embedding.
    pub fn new(settings: &Settings, config: &ModelConfig, weights: &[(String, Shape)]) -> Result<Self> {
        let base = settings.model.mup_base_width;
        if base == 0 {
            return Ok(Self::NONE);
        }
        let refuse = |why: &str| Err(TrainError::setting("model.mup_base_width", base, why));
        if matches!(settings.optimizer.name, OptimizerName::Adafactor | OptimizerName::Muon) {
            return refuse(
                "needs optimizer.name adamw, adamw8bit, lion or sgd; the others scale updates in ways of their own",
            );
        }
        if !weights.iter().any(|(name, shape)| config.weight_role(name, shape.rank()) == WeightRole::Head) {
            return refuse("needs an output projection of its own; set tie_word_embeddings to false in config.json");
        }
        Ok(Self::between(base, config.hidden_size))
    }

    /// Factor of the initial standard deviation.
    pub fn initial(self, role: WeightRole) -> f64 {
        match role {
            WeightRole::Embedding | WeightRole::Bias | WeightRole::Vector => 1.0,
            WeightRole::Hidden { .. } | WeightRole::Residual { .. } => self.ratio.powf(-0.5),
            WeightRole::Head => self.ratio.recip(),
        }
    }

    /// Factor of the learning rate.
    pub fn rate(self, role: WeightRole, optimizer: OptimizerName) -> f64 {
        let is_sgd = optimizer == OptimizerName::Sgd;
        match role {
            WeightRole::Embedding | WeightRole::Bias | WeightRole::Vector if is_sgd => self.ratio,
            WeightRole::Embedding | WeightRole::Bias | WeightRole::Vector => 1.0,
            WeightRole::Hidden { .. } | WeightRole::Residual { .. } if is_sgd => 1.0,
            WeightRole::Hidden { .. } | WeightRole::Residual { .. } | WeightRole::Head => self.ratio.recip(),
        }
    }
}
