//! Mixtures of experts: what a configuration says of them, their tensors, and the block that takes the place of an MLP
//! (Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2). The weights of a projection's experts are one
//! tensor, `[experts, out, in]`, where checkpoints have one for each expert.

use ridge_files::checkpoint::Stack;
use ridge_graph::ops::{ClampedSwiglu, ExpertGroups, MoeRouter};
use ridge_graph::{Builder, DType, Dim, Result as GraphResult, Type, Var};
use serde_json::{Map, Value as Json};

use super::blocks::{MlpGate, gated_mlp, linear, open, squared, weight};
use super::gguf_mapping::{GgufEntry, GgufMetadata};
use super::tensors::{Cut, TensorName};
use crate::config::{Fields, REMEDY};
use crate::error::Result;
use crate::model::{reached_symbol, symbols};

/// Experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// How many there are.
    pub experts: usize,
    /// How many a token takes.
    pub top_k: usize,
    /// Width of one.
    pub intermediate_size: usize,
    /// Width of those that all tokens take, together; 0 without.
    pub shared_size: usize,
    /// Is their output multiplied by the sigmoid of a number of each token?
    pub shared_gate: bool,
    /// Are they gated, or squared?
    pub gated: bool,
    /// Scores are sigmoids with a bias for the choice; else their softmax.
    pub sigmoid: bool,
    /// Are inputs multiplied by the weights, rather than outputs? Of tokens that take one expert.
    pub weighs_inputs: bool,
    /// Are the weights divided by their sum?
    pub normalise: bool,
    /// Factor of the weights.
    pub scale: f64,
    /// Experts are in so many groups, and a token takes them from so many: those whose two best sigmoids, or whose best
    /// softmax, are largest. See [`ridge_graph::ops::ExpertGroups`].
    pub groups: Option<(usize, usize)>,
    /// The gate of gpt-oss, whose router and experts have biases.
    pub clamped: Option<ClampedSwiglu>,
}

impl ExpertsConfig {
    /// Gated experts, `top_k` of `experts`, weighed by their softmax divided by the sum of those taken.
    pub(super) fn softmax(experts: usize, top_k: usize, intermediate_size: usize) -> Self {
        Self {
            experts,
            top_k,
            intermediate_size,
            shared_size: 0,
            shared_gate: false,
            gated: true,
            sigmoid: false,
            weighs_inputs: false,
            normalise: true,
            scale: 1.0,
            groups: None,
            clamped: None,
        }
    }
}

/// The largest size that a configuration may have.
pub(super) const MAX_SIZE: usize = 1 << 22;

/// Keys of routing that training alone has.
pub(super) const ROUTER_TRAINING: &[&str] = &["router_aux_loss_coef", "output_router_logits", "ep_size"];

/// The router and the experts of a layer.
pub(super) const EXPERTS: &[TensorName] = &[
    TensorName::whole("mlp.gate", "ffn_gate_inp"),
    TensorName::cut("mlp.experts.gate_proj", Cut::Columns, "ffn_gate_exps"),
    TensorName::cut("mlp.experts.up_proj", Cut::Columns, "ffn_up_exps"),
    TensorName::cut("mlp.experts.down_proj", Cut::Terms, "ffn_down_exps"),
];

/// Experts that all tokens take. GGUF files of these families are not read.
pub(super) const SHARED_EXPERTS: &[TensorName] = &[
    TensorName::planned("mlp.shared_experts.gate_proj", Cut::Columns),
    TensorName::planned("mlp.shared_experts.up_proj", Cut::Columns),
    TensorName::planned("mlp.shared_experts.down_proj", Cut::Terms),
];

/// The projections of one expert that all tokens take, with the gate of its output.
pub(super) const SHARED_EXPERT: &[TensorName] = &[
    TensorName::whole("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    TensorName::cut("mlp.shared_expert.gate_proj", Cut::Columns, "ffn_gate_shexp"),
    TensorName::cut("mlp.shared_expert.up_proj", Cut::Columns, "ffn_up_shexp"),
    TensorName::cut("mlp.shared_expert.down_proj", Cut::Terms, "ffn_down_shexp"),
];

/// Checks that a token can choose its experts.
pub(super) fn check_experts(f: &Fields<'_>, e: &ExpertsConfig) -> Result<()> {
    let (groups, kept) = e.groups.unwrap_or((1, 1));
    if !e.experts.is_multiple_of(groups) || kept > groups {
        return Err(f.wrong("n_group", format!("does not divide {} experts with {kept} kept", e.experts), REMEDY));
    }
    if e.top_k > e.experts / groups * kept {
        let problem = format!("is above the {} experts that a token chooses from", e.experts / groups * kept);
        return Err(f.wrong("num_experts_per_tok", problem, REMEDY));
    }
    Ok(())
}

/// The experts' projections as stacks of published tensors: within `scope` of a layer, experts have their number and
/// projections these names, those of gate, up and down.
pub(super) fn stacks(scope: &str, names: [&str; 3], experts: usize) -> Vec<Stack> {
    let stack = |(published, name): (&str, &str)| Stack {
        of: format!("model.layers.*.{scope}.*.{published}.weight"),
        name: format!("model.layers.*.mlp.experts.{name}.weight"),
        count: experts,
    };
    names.into_iter().zip(["gate_proj", "up_proj", "down_proj"]).map(stack).collect()
}

/// What GGUF calls the number of experts, and that which a token takes.
const GGUF_COUNTS: [&str; 2] = ["expert_count", "expert_used_count"];

/// Adds the number of experts, as `name`, and how many of them a token takes.
pub(super) fn read_experts(file: &dyn GgufMetadata, to: &mut Map<String, Json>, name: &str) -> Result<()> {
    to.insert(name.into(), file.int(GGUF_COUNTS[0])?.into());
    to.insert("num_experts_per_tok".into(), file.int(GGUF_COUNTS[1])?.into());
    Ok(())
}

/// The entries of both.
pub(super) fn experts_metadata(e: &ExpertsConfig) -> Vec<(&'static str, GgufEntry)> {
    GGUF_COUNTS.into_iter().zip([e.experts, e.top_k].map(|n| GgufEntry::U32(n as u32))).collect()
}

/// The experts' share of each token of `x`, `[tokens, hidden]`: it goes to those that the router chooses, and their
/// outputs are added by the router's weights. Padding goes to none.
pub(super) fn experts(g: &mut Builder, x: Var, e: &ExpertsConfig) -> GraphResult<Var> {
    let hidden = g.ty(x)?.shape.last().as_const().unwrap_or_default();
    let (ids, share) = g.scoped("gate", |g| {
        let w = weight(g, "weight", [e.experts, hidden])?;
        let offset = if e.clamped.is_some() { Some(weight(g, "bias", [e.experts])?) } else { None };
        let logits = g.linear_bias(x, w, offset)?;
        let bias =
            if e.sigmoid && !e.weighs_inputs { Some(weight(g, "e_score_correction_bias", [e.experts])?) } else { None };
        g.moe_router(logits, bias, router(e))
    })?;
    let (x, share) = match e.weighs_inputs {
        true => {
            let (narrow, one) = (g.cast(share, g.ty(x)?.dtype)?, g.constant_like(share, 1.0)?);
            (g.mul(x, narrow)?, g.broadcast(one, g.ty(share)?.shape.clone())?)
        }
        false => (x, share),
    };
    dispatch(g, x, e, [ids, share], MlpGate::Silu)
}

/// How scores choose experts.
pub(super) fn router(e: &ExpertsConfig) -> MoeRouter {
    MoeRouter {
        top_k: e.top_k,
        sigmoid: e.sigmoid,
        normalise: e.normalise,
        scale: e.scale,
        bias: false,
        groups: e.groups.filter(|(groups, _)| *groups > 1).map(|(count, kept)| ExpertGroups {
            count,
            kept,
            best: if e.sigmoid { 2 } else { 1 },
        }),
    }
}

/// The outputs for `x`, `[tokens, hidden]`, of the experts `ids`, i32 `[tokens, top_k]`, added by their f32 shares of the
/// same shape.
pub(super) fn dispatch(
    g: &mut Builder,
    x: Var,
    e: &ExpertsConfig,
    [ids, share]: [Var; 2],
    gate: MlpGate,
) -> GraphResult<Var> {
    let hidden = g.ty(x)?.shape.last().as_const().unwrap_or_default();
    let seq_ids = g.step_input("seq_ids", Type::tensor(DType::I32, [Dim::sym(symbols::TOKENS)]))?;
    let (rows, places, offsets) = g.expert_permutation(ids, seq_ids, e.experts)?;
    let (inner, reached) = (e.intermediate_size, reached_symbol(e.experts, e.top_k));
    let project = |g: &mut Builder, name: &str, [out, inner]: [usize; 2], x: Var, rows: Option<Var>| {
        g.scoped(name, |g| {
            let w = weight(g, "weight", [e.experts, out, inner])?;
            let y = g.grouped_linear(x, w, offsets, rows, &reached)?;
            if e.clamped.is_none() {
                return Ok(y);
            }
            let b = weight(g, "bias", [e.experts, out])?;
            g.grouped_bias(y, b, offsets)
        })
    };
    g.scoped("experts", |g| {
        let up = project(g, "up_proj", [inner, hidden], x, Some(rows))?;
        let h = if e.gated {
            let opened = project(g, "gate_proj", [inner, hidden], x, Some(rows))?;
            match e.clamped {
                Some(clamped) => g.clamped_swiglu(opened, up, clamped)?,
                None => open(g, opened, up, gate)?,
            }
        } else {
            squared(g, up)?
        };
        let y = project(g, "down_proj", [hidden, inner], h, None)?;
        g.expert_combine(y, places, share)
    })
}

/// As [`experts`], and those that all tokens take, in scope `shared`.
pub(super) fn experts_and_shared(g: &mut Builder, x: Var, e: &ExpertsConfig, shared: &str) -> GraphResult<Var> {
    let y = experts(g, x, e)?;
    if e.shared_size == 0 {
        return Ok(y);
    }
    let all = g.scoped(shared, |g| gated_mlp(g, x, e.shared_size, MlpGate::Silu, false))?;
    let all = match e.shared_gate {
        true => {
            let open = linear(g, "shared_expert_gate", x, 1, false)?;
            let open = g.sigmoid(open)?;
            g.mul(all, open)?
        }
        false => all,
    };
    g.add(y, all)
}
