//! Which weights `quantization_config` says are published as codes of 8 or 4 bits, for plans of models whose weights are not at hand: a
//! checkpoint shows itself which of its tensors are codes.

use ridge_files::checkpoint::{Int4Scheme, matches};
use ridge_graph::FormatRef;
use ridge_graph::format::{CodeType, Q4_0, Q4_1, ScaleLayout, ScaledFormat};
use serde_json::Value;

/// Modules of layers with a matrix that no published quantisation converts, whether or not the file lists them: routers, which
/// are not linears in the published code, convolutions, the weights of an indexer's heads, and what joins the inputs of a
/// prediction module.
const NEVER: [&str; 7] = ["gate", "shared_expert_gate", "router", "layer", "conv1d", "weights_proj", "eh_proj"];

/// The formats of a checkpoint's modules, and the modules that are published without one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PublishedCodes {
    groups: Vec<CodeGroup>,
    /// How codes of 4 bits are published, if there are such.
    pub(crate) int4: Option<Int4Scheme>,
    /// Names, with `*` for any characters.
    plain: Vec<String>,
}

/// Modules that are published in one format.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CodeGroup {
    format: FormatRef,
    /// Names, with `*` for any characters; `None` for all modules that no other group names.
    targets: Option<Vec<String>>,
}

impl CodeGroup {
    /// The modules in the list `targets`: names, regular expressions after `re:`, or the class `Linear` for all.
    pub(super) fn new(format: FormatRef, targets: Option<&Value>) -> Self {
        let names: Vec<&str> = strings(targets).collect();
        let all = names.is_empty() || names.contains(&"Linear");
        let targets = (!all).then(|| names.into_iter().flat_map(patterns).collect());
        Self { format, targets }
    }
}

/// Codes of `codes` with scales laid out as `scales`.
pub(super) fn scaled(codes: CodeType, scales: ScaleLayout) -> FormatRef {
    FormatRef::new(ScaledFormat::new(codes, scales))
}

/// What integers of 4 bits become where [`Checkpoint::in_int4`](ridge_files::Checkpoint::in_int4) reads them.
pub(super) fn of_4_bits(symmetric: bool) -> FormatRef {
    if symmetric { FormatRef::new(Q4_0) } else { FormatRef::new(Q4_1) }
}

impl PublishedCodes {
    /// Modules of these groups, but for those in the lists `plain`: names, or after `re:` regular expressions, of which `.*`, `\d+`,
    /// `\.`, alternatives, classes of listed characters and anchors are understood.
    pub(super) fn new<'a>(groups: Vec<CodeGroup>, plain: impl IntoIterator<Item = Option<&'a Value>>) -> Self {
        Self { groups, int4: None, plain: plain.into_iter().flat_map(strings).flat_map(patterns).collect() }
    }

    /// The same with codes of 4 bits.
    pub(super) fn with(self, scheme: Int4Scheme) -> Self {
        Self { int4: Some(scheme), ..self }
    }

    /// The format of the weight called `name`, of `rank` axes, if it is a matrix of a layer, or a stack of them, that is
    /// converted. `published` is the name of a tensor that it is a part of, or of one that it is stacked from.
    pub(crate) fn format_of(&self, name: &str, published: Option<&str>, rank: usize) -> Option<FormatRef> {
        let module = name.strip_suffix(".weight")?;
        let published = published.map(|name| name.strip_suffix(".weight").unwrap_or(name));
        let is_in = |list: &[String]| is_listed(list, module) || published.is_some_and(|name| is_listed(list, name));
        let of_layer = module.split('.').any(|part| part.parse::<usize>().is_ok());
        let last = module.rsplit('.').next().unwrap_or_default();
        if !matches!(rank, 2 | 3) || !of_layer || NEVER.contains(&last) || is_in(&self.plain) {
            return None;
        }
        let named = self.groups.iter().find(|group| group.targets.as_deref().is_some_and(is_in));
        let group = named.or_else(|| self.groups.iter().find(|group| group.targets.is_none()))?;
        Some(group.format.clone())
    }
}

/// The strings of a list.
fn strings(list: Option<&Value>) -> impl Iterator<Item = &str> {
    list.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
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

/// An entry of a list as names with `*` for any characters, and `$` behind those that are to be whole ones. A regular expression is
/// matched from the beginning.
fn patterns(entry: &str) -> Vec<String> {
    let Some(expression) = entry.strip_prefix("re:") else { return vec![entry.to_owned()] };
    let names = expression.trim_start_matches('^').replace(".*", "*").replace("\\d+", "*").replace("\\.", ".");
    let ended = |name: String| if name.ends_with(['*', '$']) { name } else { name + "*" };
    alternatives(&names).into_iter().map(ended).collect()
}

/// Names that an expression may stand for, and steps to find them, at most: published ones need a few.
const MOST_NAMES: usize = 64;
const MOST_STEPS: usize = 1024;

/// The names that an expression with groups of alternatives and classes of listed characters stands for. What else brackets hold,
/// and what is repeated, stands for any characters, and so does all behind the first bracket where there are too many names.
fn alternatives(expression: &str) -> Vec<String> {
    let (mut names, mut left) = (Vec::new(), vec![expression.to_owned()]);
    for _ in 0..MOST_STEPS {
        let Some(next) = left.pop() else { return names };
        match choices(&next) {
            Some(choices) => left.extend(choices.into_iter().rev()),
            None => names.push(next),
        }
        if names.len() + left.len() > MOST_NAMES {
            break;
        }
    }
    let before = expression.find(['(', '[']).unwrap_or(expression.len());
    vec![format!("{}*", &expression[..before])]
}

/// The expression with each of the choices of its first bracket in the place of that, if there is one.
fn choices(expression: &str) -> Option<Vec<String>> {
    let open = expression.find(['(', '['])?;
    let closing = if expression[open..].starts_with('(') { ')' } else { ']' };
    let mut depth = 0_usize;
    let (length, _) = expression[open..].char_indices().find(|(_, c)| {
        match c {
            '(' if closing == ')' => depth += 1,
            ')' if closing == ')' => depth -= 1,
            _ => {}
        }
        *c == closing && depth == 0
    })?;
    let (before, inner) = (&expression[..open], &expression[open + 1..open + length]);
    let rest = &expression[open + length + 1..];
    let choices = match rest.chars().next() {
        Some(c @ ('+' | '*' | '?')) => return Some(vec![format!("{before}*{}", &rest[c.len_utf8()..])]),
        _ if closing == ')' => split_at_depth_0(inner.strip_prefix("?:").unwrap_or(inner)),
        _ if inner.contains(['-', '^', '\\']) => vec!["*".to_owned()],
        _ => inner.chars().map(String::from).collect(),
    };
    Some(choices.iter().map(|choice| format!("{before}{choice}{rest}")).collect())
}

/// The parts between the `|` that stand in no group.
fn split_at_depth_0(inner: &str) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0_usize);
    for c in inner.chars() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            '|' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().expect("has one").push(c);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(plain: serde_json::Value) -> PublishedCodes {
        PublishedCodes::new(
            vec![CodeGroup::new(scaled(CodeType::F8E4M3, ScaleLayout::Block), None)],
            [None, Some(&plain)],
        )
    }

    #[test]
    fn matrices_of_layers_are_codes_but_for_routers() {
        let codes = codes(serde_json::json!([]));
        let format = |name: &str| codes.format_of(name, None, 2).map(|format| format.name());
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
        for (rank, wanted) in [(0, false), (1, false), (2, true), (3, true)] {
            let norm = codes.format_of("model.layers.3.input_layernorm.weight", None, rank);
            assert_eq!(norm.is_some(), wanted, "only matrices and stacks of them: {rank}");
        }
    }

    #[test]
    fn modules_have_the_format_of_the_group_that_names_them() {
        let group = |codes, scales, targets| CodeGroup::new(scaled(codes, scales), Some(&targets));
        let rest = group(CodeType::F8E4M3, ScaleLayout::Row, serde_json::json!(["Linear"]));
        let experts = group(
            CodeType::F8E4M3,
            ScaleLayout::Block,
            serde_json::json!([r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$", r"re:.*self_attn\.[qk]_proj$"]),
        );
        let named = |codes: &PublishedCodes, name: &str, published: Option<&str>| {
            let format = codes.format_of(&format!("model.layers.3.{name}.weight"), published, 2);
            format.map(|format| format.name())
        };
        let both = PublishedCodes::new(vec![rest, experts.clone()], []);
        let of_expert = Some("model.layers.3.mlp.experts.0.up_proj.weight");
        assert_eq!(named(&both, "mlp.experts.up_proj", of_expert), Some("f8e4m3_b128"));
        assert_eq!(named(&both, "self_attn.k_proj", None), Some("f8e4m3_b128"));
        assert_eq!(named(&both, "self_attn.v_proj", None), Some("f8e4m3_row"));
        let alone = PublishedCodes::new(vec![experts], []);
        assert_eq!(named(&alone, "self_attn.q_proj", None), Some("f8e4m3_b128"));
        assert_eq!(named(&alone, "self_attn.v_proj", None), None);
    }

    #[test]
    fn an_expression_of_too_many_names_stands_for_any_behind_its_beginning() {
        assert_eq!(patterns("re:a(b|c)[de]$"), ["abd$", "abe$", "acd$", "ace$"]);
        assert_eq!(patterns("re:a(b|(c|d))"), ["ab*", "ac*", "ad*"]);
        let many = format!("re:x{}$", "(a|b)".repeat(50));
        let deep = format!("re:x{}a{}", "(".repeat(100_000), ")".repeat(100_000));
        for expression in [many, deep] {
            assert_eq!(patterns(&expression), ["x*"]);
        }
    }

    #[test]
    fn parts_of_listed_tensors_are_plain() {
        let codes = codes(serde_json::json!(["model.layers.3.self_attn.qkv_proj"]));
        let (part, of) = ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.qkv_proj.weight");
        assert!(codes.format_of(part, Some(of), 2).is_none() && codes.format_of(part, None, 2).is_some());
    }

    #[test]
    fn listed_modules_are_plain() {
        let is_plain = |list: serde_json::Value, module: &str| {
            codes(list).format_of(&format!("model.layers.3.{module}.weight"), None, 2).is_none()
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
