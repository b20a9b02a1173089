//! The weights that training begins with.

use ridge_graph::sample::Rng;
use ridge_models::{ModelConfig, WeightRole};

use crate::data::order::mix;
use crate::mup::WidthScaling;
use crate::settings::{Initialization, ModelSettings};

/// How the weights of `config` begin, by its family: GPT-2 and its like with layer norms as GPT-2, others as Llama.
pub fn usual_initialization(config: &ModelConfig) -> Initialization {
    match config.model_type() {
        "gpt2" | "gpt_neox" | "falcon" => Initialization::Gpt2,
        _ => Initialization::Llama,
    }
}

/// The elements of one weight before the first step. Each is a function of the run's seed, the weight's name and its place in
/// it, so any part can be made by itself.
#[derive(Clone, Debug)]
pub struct InitialWeight {
    start: Start,
    rng: Rng,
}

/// What the elements are: normal with this standard deviation, or all of this value.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Start {
    Normal(f64),
    Constant(f64),
}

impl InitialWeight {
    /// Those of the weight `name` of so many axes.
    pub fn new(config: &ModelConfig, settings: &ModelSettings, seed: u64, name: &str, rank: usize) -> Self {
        let initialization = settings.initialization.unwrap_or_else(|| usual_initialization(config));
        let start = match start(config, initialization, settings, name, rank) {
            Start::Normal(std) => {
                let width = WidthScaling::between(settings.mup_base_width, config.hidden_size);
                Start::Normal(std * width.initial(config.weight_role(name, rank)))
            }
            constant @ Start::Constant(_) => constant,
        };
        let key = name.bytes().fold(mix(seed), |hash, byte| mix(hash ^ u64::from(byte)));
        Self { start, rng: Rng::new(key) }
    }

    /// Writes the elements from number `first` on.
    pub fn fill(&self, first: usize, to: &mut [f32]) {
        match self.start {
            Start::Constant(value) => to.fill(value as f32),
            Start::Normal(std) => {
                let mut rng = self.rng.after(Rng::GAUSS_DRAWS.wrapping_mul(first as u64));
                to.iter_mut().for_each(|element| *element = (rng.gauss() * std) as f32);
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = r#"{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": true}"#;

    fn weight(name: &str, rank: usize) -> InitialWeight {
        let config = ModelConfig::from_json("config.json", CONFIG).expect("is a model");
        InitialWeight::new(&config, &ModelSettings::default(), 7, name, rank)
    }

    /// Runs that continue, and those that repeat one of an older version, begin with these.
    #[test]
    fn weights_are_the_same_bits_in_every_version() {
        let weight = weight("model.layers.1.mlp.up_proj.weight", 2);
        for (first, wanted) in [
            (0, [0xbc75_7e6f, 0xbce9_165e, 0x3c92_d175, 0x3c73_08d2]),
            (99_999, [0xbc68_2835, 0x3c3d_d23c, 0x3d0b_982d, 0xbc3a_04d2]),
        ] {
            let mut elements = [0.0; 4];
            weight.fill(first, &mut elements);
            assert_eq!(elements.map(f32::to_bits), wanted, "from {first}: {elements:?}");
        }
    }

    #[test]
    fn parts_of_a_weight_are_those_of_the_whole() {
        let weight = weight("model.embed_tokens.weight", 2);
        let mut whole = vec![0.0; 1000];
        weight.fill(0, &mut whole);
        for (first, count) in [(0, 1), (1, 999), (333, 334), (999, 1), (1000, 0)] {
            let mut part = vec![0.0; count];
            weight.fill(first, &mut part);
            assert_eq!(part, whole[first..first + count]);
        }
        // A generator that draws one number behind the other.
        let mut rng = weight.rng.clone();
        let Start::Normal(std) = weight.start else { panic!("it is normal") };
        assert!(whole.iter().all(|element| *element == (rng.gauss() * std) as f32));
    }
}
