//! Which weights `quantization_config` says are published as codes of 8 or 4 bits, for plans of models whose weights are not at hand: a
//! checkpoint shows itself which of its tensors are codes.

use ridge_files::checkpoint::{ZeroPoints, matches};
use ridge_graph::FormatRef;
use ridge_graph::format::{CodeType, Q4_0, Q4_1, ScaleLayout, ScaledFormat};
use serde_json::Value;

/// Modules of layers with a matrix that no published quantisation converts, whether or not the file lists them: routers, which
/// are not linears in the published code, convolutions, the weights of an indexer's heads, and what joins the inputs of a
/// prediction module.
const NEVER: [&str; 7] = ["gate", "shared_expert_gate", "router", "layer", "conv1d", "weights_proj", "eh_proj"];

/// A format, and the modules that are published without it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PublishedCodes {
    format: FormatRef,
    /// Where the zero of codes of 4 bits is.
    pub(crate) zeros: ZeroPoints,
    /// Names, with `*` for any characters.
    plain: Vec<String>,
}

impl PublishedCodes {
    /// Codes of `codes` with scales laid out as `scales`, but for the modules in the lists `plain`: names, or after `re:`
    /// regular expressions, of which `.*`, `\.` and anchors are understood.
    pub(super) fn new<'a>(
        codes: CodeType,
        scales: ScaleLayout,
        plain: impl IntoIterator<Item = Option<&'a Value>>,
    ) -> Self {
        let format = FormatRef::new(ScaledFormat::new(codes, scales));
        Self { format, zeros: ZeroPoints::Centre, plain: patterns(plain) }
    }

    /// Integers of 4 bits with a scale for each group, as [`Checkpoint::in_int4`](ridge_files::Checkpoint::in_int4) reads them.
    pub(super) fn int4<'a>(zeros: ZeroPoints, plain: impl IntoIterator<Item = Option<&'a Value>>) -> Self {
        let format = if zeros == ZeroPoints::Centre { FormatRef::new(Q4_0) } else { FormatRef::new(Q4_1) };
        Self { format, zeros, plain: patterns(plain) }
    }

    /// The format of the weight called `name`, if it is a matrix of a layer that is converted.
    pub(crate) fn format_of(&self, name: &str) -> Option<FormatRef> {
        let module = name.strip_suffix(".weight")?;
        let of_layer = module.split('.').any(|part| part.parse::<usize>().is_ok());
        let last = module.rsplit('.').next().unwrap_or_default();
        let converted = of_layer && !NEVER.contains(&last) && !is_listed(&self.plain, module);
        converted.then(|| self.format.clone())
    }
}

/// Is the module in the list, by the beginning of its name, up to a dot, or by its end? So does transformers
/// (`should_convert_module`).
pub(super) fn is_listed(names: &[String], module: &str) -> bool {
    let begins = |name: &str| {
        let ends = module.match_indices('.').map(|(at, _)| at).chain([module.len()]);
        ends.into_iter().any(|end| matches(name, &module[..end]))
    };
    names.iter().any(|name| match name.strip_suffix('$') {
        Some(whole) => matches(whole, module),
        None => begins(name) || module.ends_with(name.as_str()),
    })
}

/// The entries of the lists that there are.
fn patterns<'a>(lists: impl IntoIterator<Item = Option<&'a Value>>) -> Vec<String> {
    let names = lists.into_iter().flatten().filter_map(Value::as_array).flatten().filter_map(Value::as_str);
    names.map(pattern).collect()
}

/// An entry of a list as a name with `*` for any characters, and `$` behind it if it is to be a whole one. A regular expression is matched from
/// the beginning.
fn pattern(entry: &str) -> String {
    let Some(expression) = entry.strip_prefix("re:") else { return entry.to_owned() };
    let name = expression.trim_start_matches('^').replace(".*", "*").replace("\\.", ".");
    if name.ends_with(['*', '$']) { name } else { name + "*" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(plain: serde_json::Value) -> PublishedCodes {
        PublishedCodes::new(CodeType::F8E4M3, ScaleLayout::Block, [None, Some(&plain)])
    }

    #[test]
    fn matrices_of_layers_are_codes_but_for_routers() {
        let codes = codes(serde_json::json!([]));
        let format = |name: &str| codes.format_of(name).map(|format| format.name());
        for name in ["self_attn.q_proj", "mlp.gate_proj", "mlp.experts.up_proj", "mlp.shared_experts.down_proj"] {
            assert_eq!(format(&format!("model.layers.3.{name}.weight")), Some("f8e4m3_b128"), "{name}");
        }
        for name in [
            "model.layers.3.mlp.gate.weight",
            "model.layers.3.mlp.gate.e_score_correction_bias",
            "model.layers.3.self_attn.indexer.weights_proj.weight",
            "model.layers.61.eh_proj.weight",
            "model.embed_tokens.weight",
            "lm_head.weight",
        ] {
            assert_eq!(format(name), None, "{name}");
        }
    }

    #[test]
    fn listed_modules_are_plain() {
        let is_plain = |list: serde_json::Value, module: &str| {
            codes(list).format_of(&format!("model.layers.3.{module}.weight")).is_none()
        };
        let list = serde_json::json!(["lm_head", "model.layers.3.mlp", "o_proj", "re:.*q_proj$", "re:.*\\.indexer\\."]);
        for module in ["mlp.up_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.indexer.wk"] {
            assert!(is_plain(list.clone(), module), "{module}");
        }
        for module in ["mlp2.up_proj", "self_attn.k_proj", "self_attn.q_proj.base"] {
            assert!(!is_plain(list.clone(), module), "{module}");
        }
    }
}
