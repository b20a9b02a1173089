//! The weights that training begins with.

use ridge_graph::sample::Rng;
use ridge_models::{ModelConfig, WeightRole};

use crate::data::order::mix;
use crate::mup::WidthScaling;
use crate::settings::{Initialization, ModelSettings};

/// The standard deviation of the weight `name`, or the value of all its elements.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Start {
    Normal(f64),
    Constant(f64),
}

/// How the weights of `config` begin, by its family: GPT-2 and its like with layer norms as GPT-2, others as Llama.
pub fn usual_initialization(config: &ModelConfig) -> Initialization {
    match config.model_type() {
        "gpt2" | "gpt_neox" | "falcon" => Initialization::Gpt2,
        _ => Initialization::Llama,
    }
}

/// The elements of the weight `name` of this shape before the first step: a function of `seed` and its name.
pub fn initial_weight(
    config: &ModelConfig,
    settings: &ModelSettings,
    seed: u64,
    name: &str,
    shape: &[usize],
) -> Vec<f32> {
    let initialization = settings.initialization.unwrap_or_else(|| usual_initialization(config));
    let elements = shape.iter().product();
    match start(config, initialization, settings, name, shape.len()) {
        Start::Constant(value) => vec![value as f32; elements],
        Start::Normal(std) => {
            let width = WidthScaling::between(settings.mup_base_width, config.hidden_size);
            let std = std * width.initial(config.weight_role(name, shape.len()));
            let key = name.bytes().fold(mix(seed), |hash, byte| mix(hash ^ u64::from(byte)));
            let mut rng = Rng::new(key);
            (0..elements).map(|_| (rng.gauss() * std) as f32).collect()
        }
    }
}

fn start(config: &ModelConfig, how: Initialization, settings: &ModelSettings, name: &str, rank: usize) -> Start {
    let ModelSettings { initialization_std: std, mup_base_width: base_width, .. } = *settings;
    let layers = config.num_hidden_layers as f64;
    match (config.weight_role(name, rank), how) {
        (WeightRole::Bias, _) => Start::Constant(0.0),
        (WeightRole::Vector, _) => Start::Constant(config.initial_norm()),
        (WeightRole::Residual { .. }, Initialization::Gpt2) => Start::Normal(std / (2.0 * layers).sqrt()),
        (WeightRole::Residual { layer }, Initialization::Llama) => {
            Start::Normal(std / (2.0 * (layer + 1) as f64).sqrt())
        }
        (WeightRole::Head, Initialization::Llama) => {
            let width = if base_width == 0 { config.hidden_size } else { base_width };
            Start::Normal((width as f64).powf(-0.5))
        }
        (WeightRole::Embedding | WeightRole::Hidden { .. } | WeightRole::Head, _) => Start::Normal(std),
    }
}
