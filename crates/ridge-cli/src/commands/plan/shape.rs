//! A model described by a few numbers, for estimates without a config.json, and modifications of a given config.json.

use serde_json::{Map, Value, json};

/// Sizes of a Llama-style decoder: no biases, SwiGLU, an untied output projection.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ModelShape {
    hidden: u64,
    layers: u64,
    vocab: u64,
    mlp: u64,
    heads: u64,
    kv_heads: u64,
    head: u64,
    context: u64,
}

/// Default maximum context of such a model.
const CONTEXT: u64 = 131_072;

impl ModelShape {
    /// Reads `D=4096,L=32,V=128256,m=3.5,N=32`, with `F` in place of `m`, and `K`, `H` and `T` if need be.
    ///
    /// # Errors
    /// A message about what is expected.
    pub(crate) fn parse(typed: &str) -> Result<Self, String> {
        let mut given: Map<String, Value> = Map::new();
        for part in typed.split(',') {
            let (letter, value) = part.split_once('=').ok_or("must have the form D=4096,L=32,V=128256,m=3.5,N=32")?;
            let letter = letter.trim();
            if !["D", "L", "V", "m", "F", "N", "K", "H", "T"].contains(&letter) {
                return Err(format!("{letter:?} is not one of D, L, V, m, F, N, K, H and T"));
            }
            let value = value.trim();
            let number: f64 = value
                .parse()
                .ok()
                .filter(|n| *n > 0.0 && *n <= 1e9)
                .ok_or_else(|| format!("{letter} = {value} must be a number above 0, at most 10^9"))?;
            if letter != "m" && number.fract() != 0.0 {
                return Err(format!("{letter} = {value} must be a whole number"));
            }
            if given.insert(letter.to_owned(), json!(number)).is_some() {
                return Err(format!("repeats {letter}"));
            }
        }
        let number = |letter: &str| given.get(letter).and_then(Value::as_f64);
        let needed = |letter: &str, what: &str| number(letter).ok_or_else(|| format!("lacks {letter}, {what}"));
        let whole = |letter: &str, what: &str| needed(letter, what).map(|n| n as u64);
        let hidden = whole("D", "the hidden size")?;
        let heads = whole("N", "the number of attention heads")?;
        let mlp = match (number("F"), number("m")) {
            (Some(_), Some(_)) => return Err("has both F and m, of which only one may be given".to_owned()),
            (Some(width), None) => width as u64,
            (None, _) => (needed("m", "the width of the MLP relative to D")? * hidden as f64).round() as u64,
        };
        let shape = Self {
            hidden,
            layers: whole("L", "the number of layers")?,
            vocab: whole("V", "the vocabulary size")?,
            mlp,
            heads,
            kv_heads: number("K").map_or(heads, |n| n as u64),
            head: number("H").map_or(hidden / heads.max(1), |n| n as u64),
            context: number("T").map_or(CONTEXT, |n| n as u64),
        };
        if number("H").is_none() && !hidden.is_multiple_of(heads) {
            return Err(format!("N = {heads} heads do not divide D = {hidden}; give H, the head size"));
        }
        Ok(shape)
    }

    /// The config.json of such a model.
    pub(crate) fn config(&self) -> String {
        json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
            "hidden_size": self.hidden, "num_hidden_layers": self.layers, "vocab_size": self.vocab,
            "intermediate_size": self.mlp, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head, "max_position_embeddings": self.context, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "tie_word_embeddings": false,
        })
        .to_string()
    }
}

/// Reads the JSON object of `--rope-scaling`.
///
/// # Errors
/// A message about what is expected.
pub(crate) fn rope_scaling(typed: &str) -> Result<Value, String> {
    let value: Value = serde_json::from_str(typed).map_err(|e| format!("is not JSON: {e}"))?;
    let factor = |value: &Value| value.get("factor").is_none_or(|f| f.as_f64().is_some_and(|f| f >= 1.0));
    if value.get("rope_type").or(value.get("type")).and_then(Value::as_str).is_none() || !factor(&value) {
        return Err(
            "must have the form {\"rope_type\": \"yarn\", \"factor\": 4.0}, with a factor of at least 1".to_owned()
        );
    }
    Ok(value)
}

/// A config.json with the RoPE scaling `scaling`, and its maximum context multiplied by the factor.
pub(crate) fn with_rope_scaling(config: &str, scaling: &Value) -> Result<String, String> {
    let mut config: Value = serde_json::from_str(config).map_err(|e| e.to_string())?;
    let part = if config.get("text_config").is_some() { &mut config["text_config"] } else { &mut config };
    let context = scaling.get("original_max_position_embeddings").or(part.get("max_position_embeddings"));
    let context = context.and_then(Value::as_u64).ok_or("the config has no maximum context")?;
    if let Some(factor) = scaling.get("factor").and_then(Value::as_f64) {
        part["max_position_embeddings"] = json!((context as f64 * factor) as u64);
    }
    let mut scaling = scaling.clone();
    if let (Some(old), Some(new)) = (part.get("rope_parameters").and_then(Value::as_object), scaling.as_object_mut()) {
        // The newer key, which also contains the base.
        for (key, value) in old {
            if key == "rope_theta" || key == "partial_rotary_factor" {
                new.entry(key).or_insert_with(|| value.clone());
            }
        }
    }
    let key = if part.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    if let Some(new) = scaling.as_object_mut()
        && new.get("rope_type").and_then(Value::as_str) == Some("yarn")
    {
        new.entry("original_max_position_embeddings").or_insert(json!(context));
    }
    part[key] = scaling;
    Ok(config.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read_and_mistakes_in_them_named() {
        let shape = ModelShape::parse("D=4096, L=32,V=128256,m=3.5,N=32,K=8").unwrap();
        assert_eq!((shape.mlp, shape.head, shape.kv_heads, shape.context), (14336, 128, 8, CONTEXT));
        assert_eq!(ModelShape::parse("D=64,L=1,V=10,F=99,N=3,H=7,T=5").unwrap().head, 7);
        for (text, said) in [
            ("", "must have the form D="),
            ("D=4096", "lacks N"),
            ("D=4,L=1,V=9,m=2,N=3", "do not divide"),
            ("D=4,L=1.5,V=9,m=2,N=2", "whole number"),
            ("D=4,L=1,V=9,m=2,F=8,N=2", "only one may be given"),
            ("D=4,D=4", "repeats D"),
            ("X=4", "not one of D"),
            ("D=nan", "above 0"),
            ("D=-1", "above 0"),
        ] {
            let error = ModelShape::parse(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }

    #[test]
    fn scaled_frequencies_make_longer_contexts() {
        let scaling = rope_scaling(r#"{"rope_type": "yarn", "factor": 4.0}"#).unwrap();
        let scaled: Value =
            serde_json::from_str(&with_rope_scaling(r#"{"max_position_embeddings": 32768}"#, &scaling).unwrap())
                .unwrap();
        assert_eq!(scaled["max_position_embeddings"], 131_072);
        assert_eq!(scaled["rope_scaling"]["original_max_position_embeddings"], 32768);
        let newer = r#"{"max_position_embeddings": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}"#;
        let scaled: Value = serde_json::from_str(&with_rope_scaling(newer, &scaling).unwrap()).unwrap();
        assert_eq!(
            (&scaled["rope_parameters"]["rope_theta"], &scaled["max_position_embeddings"]),
            (&json!(5.0), &json!(32))
        );
        for text in ["4", "{}", r#"{"rope_type": "yarn", "factor": 0.5}"#, "{"] {
            assert!(rope_scaling(text).is_err(), "{text}");
        }
    }
}
