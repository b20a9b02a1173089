//! Which experts each token goes to, and how much each counts (Shazeer et al. 2017, "Outrageously Large Neural
//! Networks", section 2.1; sigmoid scores, biases and groups of DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2).

use super::require::{takes, want, want_floats};
use crate::cost::Cost;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::Result;
use crate::graph::{Builder, Composite, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{ShardingRule, rowwise_rules};
use crate::types::Type;
use crate::why::Why;

/// The `top_k` experts of each token, best first, and their weights.
///
/// `logits`: `[tokens, experts]` of any float dtype; `bias`, if there is one: `[experts]` of any float dtype, added to the scores for
/// the choice alone. Gives i32 `[tokens, top_k]` and f32 `[tokens, top_k]`. Of equal scores the lower expert is first.
#[derive(Clone, Copy, Debug)]
pub struct MoeRouter {
    /// Experts of a token.
    pub top_k: usize,
    /// Scores are sigmoids of the logits; else their softmax over the experts.
    pub sigmoid: bool,
    /// Are the weights divided by their sum?
    pub normalise: bool,
    /// Factor of the weights.
    pub scale: f64,
    /// Is there a second input to choose by?
    pub bias: bool,
    /// Experts are in groups, of which some are chosen first.
    pub groups: Option<ExpertGroups>,
}

/// Neighbouring experts in groups of one size: a token takes its experts from the groups whose best scores have the largest sums. Scores
/// are those that experts are chosen by: sigmoids, with the bias where there is one, or the logits of a softmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// How many there are.
    pub count: usize,
    /// Of how many a token takes experts.
    pub kept: usize,
    /// How many of a group's best scores are summed: 2 in DeepSeek V3, 1 in V2 (`group_limited_greedy`).
    pub best: usize,
}

eq_by_bits!(MoeRouter { scale; top_k, sigmoid, normalise, bias, groups });

/// Below every score.
const LOWEST: f64 = -3.0e38;

impl MoeRouter {
    /// Where `ids`, i32 `[tokens, k]`, name each of `n`: bool `[tokens, k, n]`.
    fn named(g: &mut Builder, ids: Var, n: usize) -> Result<Var> {
        let shape = g.ty(ids)?.shape.clone();
        let (tokens, k) = (&shape.0[0], &shape.0[1]);
        let ids = g.reshape(ids, Shape::new([tokens.clone(), k.clone(), 1.into()]))?;
        let each = g.iota(Shape(vec![tokens.clone(), k.clone(), n.into()]), 2, DType::I32)?;
        g.eq(each, ids)
    }

    /// `scores` with those outside the kept groups below all others.
    fn within_groups(g: &mut Builder, scores: Var, by: ExpertGroups) -> Result<Var> {
        let ExpertGroups { count: groups, kept, best } = by;
        let shape = g.ty(scores)?.shape.clone();
        let (tokens, size) = (shape.0[0].clone(), shape.last().as_const().unwrap_or_default() / groups);
        let apart = Shape(vec![tokens.clone(), groups.into(), size.into()]);
        let grouped = g.reshape(scores, apart.clone())?;
        let (best, _) = g.sort(grouped, 2, true, size.min(best))?;
        let of_group = g.reduce_sum(best, 2)?;
        let of_group = g.reshape(of_group, Shape(vec![tokens.clone(), groups.into()]))?;
        let (_, chosen) = g.sort(of_group, 1, true, kept)?;
        let hit = Self::named(g, chosen, groups)?;
        let hit = g.cast(hit, DType::F32)?;
        let hit = g.reduce_sum(hit, 1)?;
        let hit = g.reshape(hit, Shape(vec![tokens, groups.into(), 1.into()]))?;
        let zero = g.constant(DType::F32, 0.0)?;
        let open = g.gt(hit, zero)?;
        let lowest = g.constant(DType::F32, LOWEST)?;
        let open = g.broadcast(open, apart)?;
        let grouped = g.select(open, grouped, lowest)?;
        g.reshape(grouped, shape)
    }
}

impl Composite for MoeRouter {
    fn name(&self) -> &'static str {
        "moe_router"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let (logits, bias) = match (inputs, self.bias) {
            ([logits], false) => (logits, None),
            ([logits, bias], true) => (logits, Some(bias)),
            _ => return Err(takes(if self.bias { "logits and bias" } else { "logits" }, inputs)),
        };
        want_floats("logits", logits, 2, "[tokens, experts]")?;
        let Some(experts) = logits.shape.last().as_const() else {
            return Err(format!("logits must have a number of experts, got {logits}"));
        };
        if let Some(bias) = bias {
            want_floats("bias", bias, 1, "[experts]")?;
            want("bias", bias, bias.dtype, [experts])?;
        }
        let mut among = experts;
        if let Some(ExpertGroups { count: groups, kept, best }) = self.groups {
            if best == 0 {
                return Err("at least one score of a group must count".into());
            }
            if groups == 0 || !experts.is_multiple_of(groups) || !(1..=groups).contains(&kept) {
                return Err(format!("{kept} of {groups} groups cannot be chosen among {experts} experts"));
            }
            among = experts / groups * kept;
        }
        if !(1..=among).contains(&self.top_k) {
            return Err(format!("top_k = {} is outside 1..={among}, the experts to choose from", self.top_k));
        }
        let shape = Shape(vec![logits.shape.0[0].clone(), self.top_k.into()]);
        Ok(vec![Type::tensor(DType::I32, shape.clone()), Type::tensor(DType::F32, shape)])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let shape = g.ty(inputs[0])?.shape.clone();
        let (tokens, experts) = (shape.0[0].clone(), shape.last().as_const().unwrap_or_default());
        let logits = g.cast(inputs[0], DType::F32)?;
        let scores = if self.sigmoid { g.sigmoid(logits)? } else { g.softmax(logits)? };
        // Softmax keeps the order of the logits, and rounding it could not.
        let mut order = if self.sigmoid { scores } else { logits };
        if self.bias {
            let bias = g.cast(inputs[1], DType::F32)?;
            order = g.add(scores, bias)?;
        }
        if let Some(groups) = self.groups {
            order = Self::within_groups(g, order, groups)?;
        }
        let (_, ids) = g.sort(order, 1, true, self.top_k)?;
        let hit = Self::named(g, ids, experts)?;
        let each = g.reshape(scores, Shape(vec![tokens.clone(), 1.into(), experts.into()]))?;
        let each = g.broadcast(each, Shape(vec![tokens.clone(), self.top_k.into(), experts.into()]))?;
        let zero = g.constant(DType::F32, 0.0)?;
        let picked = g.select(hit, each, zero)?;
        let picked = g.reduce_sum(picked, 2)?;
        let mut weights = g.reshape(picked, Shape(vec![tokens, Dim::from(self.top_k)]))?;
        if self.normalise {
            let total = g.reduce_sum(weights, 1)?;
            weights = g.div(weights, total)?;
        }
        let scale = g.constant(DType::F32, self.scale)?;
        Ok(vec![ids, g.mul(weights, scale)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let scores = inputs[0].shape.elements();
        // Maximum, difference, sum, scaling and one pass of comparisons; one exponential.
        Cost { vector_flops: scores.clone() * 5, special_flops: scores, ..Cost::moving(inputs, outputs) }
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        rowwise_rules(&inputs[0].shape, inputs.len(), 2)
    }
}

impl Builder {
    /// Experts and weights of each token; see [`MoeRouter`].
    ///
    /// # Errors
    /// When `logits` is not `[tokens, experts]`, or experts cannot be chosen as `op` says.
    pub fn moe_router(&mut self, logits: Var, bias: Option<Var>, op: MoeRouter) -> Result<(Var, Var)> {
        let inputs: Vec<Var> = [logits].into_iter().chain(bias).collect();
        let out = self.composite(MoeRouter { bias: bias.is_some(), ..op }, &inputs)?;
        Ok((out[0], out[1]))
    }
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let groups = |count, kept, best| Some(ExpertGroups { count, kept, best });
    let plain = MoeRouter { top_k: 2, sigmoid: false, normalise: true, scale: 1.0, bias: false, groups: None };
    let biased = MoeRouter { sigmoid: true, bias: true, ..plain };
    // Tokens, experts, the choice, and what a bias is of: kernels may take those of f32 alone.
    let cases = [
        (0, 4, plain, DType::F32),
        (1, 1, MoeRouter { top_k: 1, ..plain }, DType::F32),
        (7, 8, plain, DType::F32),
        (5, 33, MoeRouter { top_k: 8, normalise: false, ..plain }, DType::F32),
        (6, 16, MoeRouter { top_k: 3, scale: 2.5, groups: groups(4, 2, 2), ..biased }, dtype),
        (3, 64, MoeRouter { top_k: 6, scale: 2.5, groups: groups(8, 3, 2), ..biased }, DType::F32),
        (5, 12, MoeRouter { top_k: 2, scale: 16.0, normalise: false, groups: groups(3, 2, 1), ..plain }, DType::F32),
        (4, 6, MoeRouter { top_k: 2, sigmoid: true, groups: groups(6, 3, 2), ..plain }, DType::F32),
        (3, 8, MoeRouter { top_k: 8, sigmoid: true, ..plain }, DType::F32),
        (5, 12, MoeRouter { top_k: 4, ..biased }, DType::F32),
    ];
    let sample = |(tokens, experts, op, of_bias): (usize, usize, MoeRouter, DType)| {
        let sample = Sample::new(op).input(rng.normal(dtype, &[tokens, experts]));
        if op.bias { sample.input(rng.normal(of_bias, &[experts])) } else { sample }
    };
    cases.into_iter().map(sample).collect()
}
