//! What an update does to each weight: which op, with which settings and states.

use ridge_graph::ops::{Adafactor, AdamW, AdamW8, Lion, Muon, Sgd};
use ridge_graph::{Builder, DType, Result as GraphResult, Shape, Type, Var};
use ridge_models::WeightRole;

use crate::error::{Result, TrainError};
use crate::mup::WidthScaling;
use crate::settings::{OptimizerName, OptimizerSettings};

/// Elements from which moments of 8 bits are worth their scales; smaller weights have whole ones.
const LARGE: usize = 4096;

/// One weight's update.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightUpdate {
    /// The weight.
    pub name: String,
    /// Its shape.
    pub shape: Shape,
    /// Factor of the learning rate; 0 leaves it as it is.
    pub rate_scale: f64,
    /// The op.
    pub op: UpdateOp,
}

/// The op of an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpdateOp {
    /// See [`AdamW`].
    AdamW(AdamW),
    /// See [`AdamW8`].
    AdamW8(AdamW8),
    /// See [`Sgd`].
    Sgd(Sgd),
    /// See [`Adafactor`].
    Adafactor(Adafactor),
    /// See [`Lion`].
    Lion(Lion),
    /// See [`Muon`].
    Muon(Muon),
    /// Adds `speed` to elements whose gradient is below 0 and takes it from those above, whatever the learning rate. Its
    /// gradient is how many more tokens chose each expert of the layer with experts of this number than the mean
    /// (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2; Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing", algorithm 1).
    FollowLoad {
        /// Among the layers with experts.
        layer: usize,
        /// The change of a step.
        speed: f64,
    },
}

/// A state of an update: what its name ends with, its type, and the byte that it is filled with at first.
#[derive(Clone, Debug, PartialEq)]
pub struct UpdateState {
    /// `optimizer.<kind>.<weight>`.
    pub name: String,
    /// Its type, of constant shape.
    pub ty: Type,
    /// What every byte is at first.
    pub fill: u8,
}

/// The updates of weights, each a name and a shape, in their order. `role` says what a weight of a name and a rank is for:
/// norms, biases and other vectors do not decay, and Muon takes the matrices of layers. `width` scales learning rates, and
/// decay by the inverse, so that it stays what it is each step.
///
/// # Errors
/// When a group matches no weight.
pub fn weight_updates(
    weights: &[(String, Shape)],
    settings: &OptimizerSettings,
    width: WidthScaling,
    role: impl Fn(&str, usize) -> WeightRole,
) -> Result<Vec<WeightUpdate>> {
    let mut used = vec![false; settings.groups.len()];
    let mut updates = Vec::with_capacity(weights.len());
    for (name, shape) in weights {
        let at = settings.groups.iter().position(|group| matches(&group.pattern, name));
        if let Some(at) = at {
            used[at] = true;
        }
        let group = at.map(|at| &settings.groups[at]);
        let role = role(name, shape.rank());
        let is_matrix = !matches!(role, WeightRole::Bias | WeightRole::Vector);
        let is_hidden = matches!(role, WeightRole::Hidden { .. } | WeightRole::Residual { .. });
        let usual = if is_matrix { settings.weight_decay } else { 0.0 };
        let by_width = width.rate(role, settings.name);
        let weight_decay = group.and_then(|group| group.weight_decay).unwrap_or(usual) / by_width;
        updates.push(WeightUpdate {
            name: name.clone(),
            shape: shape.clone(),
            rate_scale: group.map_or(1.0, |group| group.learning_rate_scale) * by_width,
            op: UpdateOp::of(settings, shape, weight_decay, is_hidden),
        });
    }
    match used.iter().position(|used| !used) {
        Some(at) => {
            let known: Vec<&str> = weights.iter().take(4).map(|(name, _)| name.as_str()).collect();
            let why = format!(
                "matches no weight that another group before it does not; weights are {}, ..",
                known.join(", ")
            );
            Err(TrainError::setting("optimizer.groups", &settings.groups[at].pattern, why))
        }
        None => Ok(updates),
    }
}

/// Does `name` match `pattern`, in which `*` stands for any characters?
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

impl UpdateOp {
    fn of(settings: &OptimizerSettings, shape: &Shape, weight_decay: f64, is_hidden: bool) -> Self {
        let OptimizerSettings { beta1, beta2, epsilon: eps, momentum, nesterov, .. } = *settings;
        let adamw = AdamW { beta1, beta2, eps, weight_decay };
        let elements = shape.as_const().map_or(0, |shape| shape.iter().product::<usize>());
        match settings.name {
            OptimizerName::AdamW8Bit if elements >= LARGE && AdamW8::blocks(shape).is_some() => {
                Self::AdamW8(AdamW8 { adamw })
            }
            OptimizerName::Sgd => Self::Sgd(Sgd { momentum, nesterov, weight_decay }),
            OptimizerName::Adafactor => Self::Adafactor(Adafactor { weight_decay, ..Adafactor::USUAL }),
            OptimizerName::Lion => Self::Lion(Lion { beta1, beta2, weight_decay }),
            OptimizerName::Muon if is_hidden && shape.rank() == 2 => {
                Self::Muon(Muon { momentum, nesterov, weight_decay })
            }
            // What they do not take, and all weights of AdamW.
            OptimizerName::AdamW | OptimizerName::AdamW8Bit | OptimizerName::Muon => Self::AdamW(adamw),
        }
    }

    /// The states of the update of the weight `name`, in the order of the op's inputs.
    pub fn states(&self, name: &str, shape: &Shape) -> Vec<UpdateState> {
        let state = |kind: &str, dtype: DType, shape: Shape, fill: u8| UpdateState {
            name: format!("optimizer.{kind}.{name}"),
            ty: Type::tensor(dtype, shape),
            fill,
        };
        let alike = |kind: &str| state(kind, DType::F32, shape.clone(), 0);
        match self {
            Self::AdamW(_) => vec![alike("m"), alike("v")],
            Self::AdamW8(_) => {
                let blocks = AdamW8::blocks(shape).unwrap_or_default();
                let both = ["m", "v"].into_iter().zip(AdamW8::ZERO);
                let of = |(kind, zero): (&str, u8)| {
                    let codes = state(&format!("{kind}_codes"), DType::U8, Shape::new([blocks, AdamW8::BLOCK]), zero);
                    [codes, state(&format!("{kind}_scales"), DType::F32, Shape::new([blocks, 1]), 0)]
                };
                both.flat_map(of).collect()
            }
            Self::FollowLoad { .. } => Vec::new(),
            Self::Sgd(_) | Self::Muon(_) => vec![alike("momentum")],
            Self::Lion(_) => vec![alike("m")],
            Self::Adafactor(_) => match Adafactor::factored(shape) {
                Some([rows, columns]) => {
                    vec![state("rows", DType::F32, rows, 0), state("columns", DType::F32, columns, 0)]
                }
                None => vec![alike("v")],
            },
        }
    }

    /// The next parameter and states from the parameter, its gradient and its states.
    ///
    /// `lr` and `step` are f32 scalars, steps counted from 1.
    ///
    /// # Errors
    /// When a value is of another type than [`states`](Self::states) says.
    pub fn apply(
        &self,
        g: &mut Builder,
        [param, grad]: [Var; 2],
        states: &[Var],
        lr: Var,
        step: Var,
    ) -> GraphResult<Vec<Var>> {
        let mut inputs = vec![param, grad];
        inputs.extend(states);
        inputs.push(lr);
        match *self {
            Self::AdamW(op) => {
                inputs.push(step);
                g.composite(op, &inputs)
            }
            Self::AdamW8(op) => {
                inputs.push(step);
                g.composite(op, &inputs)
            }
            Self::Adafactor(op) => {
                inputs.push(step);
                g.composite(op, &inputs)
            }
            Self::FollowLoad { speed, .. } => {
                let [zero, up] = [0.0, speed].map(|value| g.constant(DType::F32, value));
                let (zero, up) = (zero?, up?);
                let down = g.neg(up)?;
                let (above, below) = (g.gt(grad, zero)?, g.lt(grad, zero)?);
                let rise = g.select(below, up, zero)?;
                let change = g.select(above, down, rise)?;
                Ok(vec![g.add(param, change)?])
            }
            Self::Sgd(op) => g.composite(op, &inputs),
            Self::Lion(op) => g.composite(op, &inputs),
            Self::Muon(op) => g.composite(op, &inputs),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::GroupSettings;

    fn weights() -> Vec<(String, Shape)> {
        [
            ("embed.weight", &[64, 64][..]),
            ("layers.0.q.weight", &[64, 64]),
            ("layers.0.q.bias", &[64]),
            ("norm.weight", &[64]),
        ]
        .map(|(name, shape)| (name.to_owned(), Shape::new(shape.iter().copied())))
        .to_vec()
    }

    fn role(name: &str, rank: usize) -> WeightRole {
        match rank {
            2 if name.starts_with("layers") => WeightRole::Hidden { layer: 0 },
            2 => WeightRole::Embedding,
            _ => WeightRole::Vector,
        }
    }

    fn decay(op: &UpdateOp) -> f64 {
        match op {
            UpdateOp::AdamW(op) => op.weight_decay,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn vectors_do_not_decay_and_groups_have_settings_of_their_own() {
        let group = |pattern: &str, rate, weight_decay| GroupSettings {
            pattern: pattern.into(),
            learning_rate_scale: rate,
            weight_decay,
        };
        let groups = vec![group("embed.*", 0.5, Some(0.0)), group("*.bias", 2.0, None)];
        let settings = OptimizerSettings { groups, ..OptimizerSettings::default() };
        let updates = weight_updates(&weights(), &settings, WidthScaling::NONE, role).expect("all match");
        let decays: Vec<f64> = updates.iter().map(|update| decay(&update.op)).collect();
        assert_eq!(decays, [0.0, 0.1, 0.0, 0.0]);
        assert_eq!(updates.iter().map(|update| update.rate_scale).collect::<Vec<_>>(), [0.5, 1.0, 2.0, 1.0]);
        let unused = OptimizerSettings { groups: vec![group("*.gate", 1.0, None)], ..settings };
        let error =
            weight_updates(&weights(), &unused, WidthScaling::NONE, role).expect_err("no such weight").to_string();
        assert!(error.starts_with("optimizer.groups = *.gate: matches no weight"), "{error}");
    }

    #[test]
    fn muon_takes_hidden_matrices_and_adamw_the_rest() {
        let settings = OptimizerSettings { name: OptimizerName::Muon, ..OptimizerSettings::default() };
        let updates = weight_updates(&weights(), &settings, WidthScaling::NONE, role).expect("no groups");
        let is_muon: Vec<bool> = updates.iter().map(|update| matches!(update.op, UpdateOp::Muon(_))).collect();
        assert_eq!(is_muon, [false, true, false, false]);
    }

    #[test]
    fn stars_match_any_characters() {
        for (pattern, name, matched) in [
            ("*", "a.b", true),
            ("a.*", "a.b", true),
            ("*.b", "a.b", true),
            ("a*c*e", "abcde", true),
            ("a*c*e", "abde", false),
            ("a", "ab", false),
            ("ab", "ab", true),
        ] {
            assert_eq!(matches(pattern, name), matched, "{pattern} {name}");
        }
    }
}
