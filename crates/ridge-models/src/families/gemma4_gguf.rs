//! How GGUF describes Gemma 4: heads and widths of MLPs by layer, and the frequencies of layers that see everything as factors.

use serde_json::{Map, Value as Json, json};

use super::gguf_mapping::{GgufLayout, GgufMapping, GgufMetadata, GgufTensorName, ROTATED_KEY};
use super::per_layer;
use crate::error::Result;

/// The mapping.
pub(super) const GEMMA4: GgufMapping = GgufMapping {
    keys: &[(GLOBAL_DIM, Some("global_head_dim")), (LOCAL_DIM, Some("head_dim")), (KV_HEADS, None), (INNER, None)],
    rope_theta: None,
    tensors: &[
        GgufTensorName::new("blk.*.layer_output_scale.weight", &["model.layers.*.layer_scalar"], GgufLayout::Same),
        GgufTensorName::new("blk.*.ffn_gate_inp.scale", &["model.layers.*.router.scale"], GgufLayout::Same),
        GgufTensorName::new("blk.*.ffn_down_exps.scale", &["model.layers.*.router.per_expert_scale"], GgufLayout::Same),
        GgufTensorName::new(
            "blk.*.ffn_gate_up_exps.weight",
            &["model.layers.*.experts.gate_proj.weight", "model.layers.*.experts.up_proj.weight"],
            GgufLayout::ExpertHalves,
        ),
    ],
    read,
    ..GgufMapping::new("gemma4")
};

const GLOBAL_DIM: &str = "attention.key_length";
const LOCAL_DIM: &str = "attention.key_length_swa";
const KV_HEADS: &str = "attention.head_count_kv";
const INNER: &str = "feed_forward_length";
/// Frequencies that turn have the factor one, and others are divided by more than this.
const STILL: f64 = 1e10;

fn read(file: &dyn GgufMetadata, to: &mut Map<String, Json>) -> Result<()> {
    let windows = per_layer::read_gguf(file, to, 0)?;
    let own = windows.len().saturating_sub(file.int("attention.shared_kv_layers")?.unwrap_or_default() as usize);
    read_heads(file, to, &windows)?;
    read_inner(file, to, own, windows.len())?;
    read_ropes(file, to)?;
    let global = windows.iter().take(own).position(|window| !window);
    let values = global.is_none_or(|layer| file.has(&format!("blk.{layer}.attn_v.weight")));
    to.insert("attention_k_eq_v".into(), (!values).into());
    to.insert("enable_moe_block".into(), (file.experts() > 0).into());
    if file.experts() > 0 {
        to.insert("num_experts".into(), file.experts().into());
        to.insert("top_k_experts".into(), file.int("expert_used_count")?.into());
        to.insert("moe_intermediate_size".into(), file.int("expert_feed_forward_length")?.into());
    }
    Ok(())
}

/// One number for each of `layers` layers, where there may be one for all.
fn by_layer(file: &dyn GgufMetadata, key: &str, layers: usize) -> Result<Vec<u64>> {
    let numbers = file.list(key)?.unwrap_or_default();
    let numbers = if numbers.len() == 1 { vec![numbers[0]; layers] } else { numbers };
    if numbers.len() != layers || numbers.iter().any(|number| *number < 0.0 || number.fract() != 0.0) {
        return Err(file.wrong(key, &format!("is not one whole number for each of {layers} layers")));
    }
    Ok(numbers.into_iter().map(|number| number as u64).collect())
}

/// Key and value heads, which layers that see everything have others of.
fn read_heads(file: &dyn GgufMetadata, to: &mut Map<String, Json>, windows: &[bool]) -> Result<()> {
    let heads = by_layer(file, KV_HEADS, windows.len())?;
    let (local, global) = (file.int(LOCAL_DIM)?, file.int(GLOBAL_DIM)?);
    for (key, dim) in
        [("attention.value_length_swa", local), ("rope.dimension_count_swa", local), (ROTATED_KEY, global)]
    {
        if let Some((value, dim)) = file.int(key)?.zip(dim).filter(|(value, dim)| value != dim) {
            return Err(file.wrong(key, &format!("= {value} differs from the {dim} elements of a head")));
        }
    }
    let mut of_local = heads.iter().zip(windows).filter(|(_, window)| **window).map(|(heads, _)| *heads);
    let usual = of_local.next().or(heads.first().copied());
    if of_local.any(|heads| Some(heads) != usual) {
        return Err(file.wrong(KV_HEADS, "differs between layers with windows, which Ridge does not run"));
    }
    to.insert("num_key_value_heads".into(), usual.into());
    let others = heads.iter().zip(windows).enumerate().filter(|(_, (_, window))| !**window);
    let others: Map<String, Json> = others
        .map(|(layer, (heads, _))| (layer.to_string(), json!({ "num_key_value_heads": heads, "head_dim": global })))
        .collect();
    to.insert("per_layer_config".into(), others.into());
    Ok(())
}

/// The width of MLPs, which may be twice as wide in layers behind the first `own`.
fn read_inner(file: &dyn GgufMetadata, to: &mut Map<String, Json>, own: usize, layers: usize) -> Result<()> {
    let widths = by_layer(file, INNER, layers)?;
    let usual = widths.first().copied().unwrap_or_default();
    let double = widths.get(own).is_some_and(|width| *width == 2 * usual);
    let fits = |(layer, width): (usize, &u64)| *width == if double && layer >= own { 2 * usual } else { usual };
    if !widths.iter().enumerate().all(fits) {
        return Err(file.wrong(INNER, "is neither one width nor a doubled one in layers without keys of their own"));
    }
    to.insert("intermediate_size".into(), usual.into());
    to.insert("use_double_wide_mlp".into(), double.into());
    Ok(())
}

/// Both rotations. In layers that see everything the first pairs of a head turn.
fn read_ropes(file: &dyn GgufMetadata, to: &mut Map<String, Json>) -> Result<()> {
    const FACTORS: &str = "rope_freqs.weight";
    let theta = file.float("rope.freq_base")?.unwrap_or(10_000.0);
    let local = file.float("rope.freq_base_swa")?.unwrap_or(10_000.0);
    let mut share = 1.0;
    if let Some(factors) = file.numbers(FACTORS)? {
        let turned = factors.iter().take_while(|factor| **factor == 1.0).count();
        if turned == 0 || factors[turned..].iter().any(|factor| *factor < STILL) {
            return Err(file.wrong(FACTORS, "has factors other than 1 and, behind them, those that stop a pair"));
        }
        // Above the quotient by one step, so that the number of pairs that it gives is not rounded down.
        share = (turned as f64 / factors.len() as f64).next_up().min(1.0);
    }
    to.insert(
        "rope_parameters".into(),
        json!({
            "full_attention": { "rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": theta },
            "sliding_attention": { "rope_type": "default", "rope_theta": local },
        }),
    );
    Ok(())
}
