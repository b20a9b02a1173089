//! The families, a line each, and what is found by their names.

use serde_json::{Map, Value};

use super::definition::{FamilyDefinition, FamilyKind, ModelConfig, ReadConfig};
use super::encoder::EncoderConfig;
use super::gguf_mapping::GgufMetadata;
use super::image_classifier::VitConfig;
use super::planned_config::{PlannedConfig, read_latent};
use super::text_classifier::{CLASS as CLASSIFIER, ClassifierHead, TextClassifier};
use super::{
    bamba, bert, bloom, cohere, deepseek, deepseek_v32, exaone4, falcon, falcon_h1, gemma, gemma3n, gemma4,
    glm_moe_dsa, glm4, glm4_moe, gpt_neox, gpt_oss, gpt2, granite, granite_hybrid, granite_moe, hyena, jamba, lfm2,
    linear_attention, llama, llama4, long_bert, mamba, mamba2, minimax_m2, mistral, mixtral, modernbert, mpt,
    nemotron_h, nomic_bert, olmo2, olmoe, phi3, qwen, qwen3_moe, qwen3_next, rwkv4, rwkv6, rwkv7, smollm3, stablelm,
    starcoder2, vit, zamba2,
};
use crate::config::Fields;
use crate::error::Result;
use ridge_files::json;

/// Every family, in the order in which messages list them.
static FAMILIES: &[&FamilyDefinition] = &[
    &bamba::BAMBA,
    &bert::BERT,
    &long_bert::BIG_BIRD,
    &bloom::BLOOM,
    &cohere::COHERE,
    &cohere::COHERE2,
    &deepseek::DEEPSEEK_V2,
    &deepseek::DEEPSEEK_V3,
    &deepseek_v32::DEEPSEEK_V32,
    &bert::DISTILBERT,
    &exaone4::EXAONE4,
    &falcon::FALCON,
    &falcon_h1::FALCON_H1,
    &mamba::FALCON_MAMBA,
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &gemma3n::GEMMA3N,
    &gemma4::GEMMA4,
    &linear_attention::GLA,
    &glm4::GLM,
    &glm4::GLM4,
    &glm4_moe::GLM4_MOE,
    &glm_moe_dsa::GLM_MOE_DSA,
    &gpt2::GPT2,
    &gpt_neox::GPT_NEOX,
    &gpt_oss::GPT_OSS,
    &granite::GRANITE,
    &granite_moe::GRANITE_MOE,
    &granite_hybrid::GRANITE_HYBRID,
    &granite_moe::GRANITE_MOE_SHARED,
    &hyena::HYENA,
    &jamba::JAMBA,
    &deepseek::KIMI_K2,
    &lfm2::LFM2,
    &linear_attention::LINEAR_ATTENTION,
    &llama::LLAMA,
    &llama4::LLAMA4,
    &long_bert::LONGFORMER,
    &mamba::MAMBA,
    &mamba2::MAMBA2,
    &minimax_m2::MINIMAX_M2,
    &mistral::MISTRAL,
    &mixtral::MIXTRAL,
    &modernbert::MODERNBERT,
    &mpt::MPT,
    &nemotron_h::NEMOTRON_H,
    &nomic_bert::NOMIC_BERT,
    &olmo2::OLMO2,
    &olmo2::OLMO3,
    &olmoe::OLMOE,
    &phi3::PHI3,
    &qwen::QWEN2,
    &qwen3_moe::QWEN2_MOE,
    &qwen::QWEN3,
    &qwen3_next::QWEN35_MOE,
    &qwen3_next::QWEN35,
    &qwen3_moe::QWEN3_MOE,
    &qwen3_next::QWEN3_NEXT,
    &linear_attention::RETNET,
    &bert::ROBERTA,
    &rwkv4::RWKV4,
    &rwkv6::RWKV6,
    &rwkv7::RWKV7,
    &smollm3::SMOLLM3,
    &stablelm::STABLELM,
    &starcoder2::STARCODER2,
    &vit::VIT,
    &bert::XLM_ROBERTA,
    &zamba2::ZAMBA2,
];

/// Reads a configuration for plans.
type ReadPlanned = fn(&mut Fields<'_>) -> Result<PlannedConfig>;

/// Families that are planned by a graph of their own: what serves latent attention elsewhere expands the cache for prompts
/// and cuts the heads over ranks.
static PLANNED: &[(&FamilyDefinition, ReadPlanned)] = &[
    (&deepseek::DEEPSEEK_V3, |f| read_latent(f, deepseek::DEEPSEEK_V3.model_type, deepseek::DeepseekConfig::read_v3)),
    (&deepseek::KIMI_K2, |f| read_latent(f, deepseek::KIMI_K2.model_type, deepseek::DeepseekConfig::read_v3)),
    (&deepseek_v32::DEEPSEEK_V32, |f| read_latent(f, deepseek_v32::DEEPSEEK_V32.model_type, deepseek_v32::read)),
    (&glm_moe_dsa::GLM_MOE_DSA, |f| read_latent(f, glm_moe_dsa::GLM_MOE_DSA.model_type, glm_moe_dsa::read)),
];

/// How a configuration of `family` is read for plans, if it has a graph of its own for them.
fn planned_reader(family: &FamilyDefinition) -> Option<ReadPlanned> {
    PLANNED.iter().find(|(known, _)| std::ptr::eq(*known, family)).map(|(_, read)| *read)
}

/// Every family.
pub(crate) fn families() -> impl Iterator<Item = &'static FamilyDefinition> {
    FAMILIES.iter().copied()
}

/// The key of decoders whose tokens see those behind them too.
const BOTH_WAYS: &str = "use_bidirectional_attention";

/// The family of this `model_type`.
pub(crate) fn by_model_type(model_type: &str) -> Option<&'static FamilyDefinition> {
    families().find(|family| family.model_type == model_type)
}

/// The family of a GGUF file of this architecture.
pub(crate) fn by_gguf(architecture: &str, file: &dyn GgufMetadata) -> Option<&'static FamilyDefinition> {
    families().find(|family| family.gguf.as_ref().is_some_and(|g| g.architecture == architecture && (g.applies)(file)))
}

/// The `model_type` of `config`, the object that a `config.json` holds: that of the object itself, whatever objects within
/// it say. `None` if there is none or it is not a text.
pub fn model_type(config: &Map<String, Value>) -> Option<&str> {
    config.get("model_type")?.as_str()
}

/// What Ridge can do with the model whose `config.json` has this `text`, by its `model_type`; `None` if that is missing
/// or of no family that Ridge knows. `file` names the text in errors.
///
/// # Errors
/// [`FilesError::Json`](ridge_files::FilesError::Json) if the text is not a JSON object.
pub fn family_kind(file: &str, text: &str) -> Result<Option<FamilyKind>> {
    Ok(kind_of(&json::object(file, text.as_bytes())?))
}

/// As [`family_kind`], of the object that the file holds: by its `model_type`, and of decoders by whether they write text.
fn kind_of(config: &Map<String, Value>) -> Option<FamilyKind> {
    let kind = model_type(config).and_then(by_model_type)?.kind();
    let both_ways = config.get(BOTH_WAYS).is_some_and(|value| *value == true);
    let classes = config.get("architectures").and_then(Value::as_array);
    let classifies = classes.into_iter().flatten().filter_map(Value::as_str).any(|class| class.ends_with(CLASSIFIER));
    Some(if kind == FamilyKind::Decoder && (both_ways || classifies) { FamilyKind::Encoder } else { kind })
}

fn model_types(kind: FamilyKind) -> Vec<&'static str> {
    families().filter(|family| family.kind() == kind).map(|family| family.model_type).collect()
}

impl ModelConfig {
    /// Reads the text of a `config.json`, of the family that its `model_type` names. `file` names it in errors.
    ///
    /// # Errors
    ///
    /// An error that names file, key, value and remedy if the text is not JSON, a needed key is missing, a value is
    /// impossible or contradicts another, the model is of a family or asks for something that Ridge does not do, or
    /// there is a key that Ridge does not know.
    pub fn from_json(file: &str, text: &str) -> Result<Self> {
        Self::from_object(file, &json::object(file, text.as_bytes())?)
    }

    /// As [`ModelConfig::from_json`], of the model before it was quantised: for plans that do not depend on how the weights were
    /// published.
    ///
    /// # Errors
    ///
    /// As there, but for what `quantization_config` says.
    pub fn unquantised(file: &str, text: &str) -> Result<Self> {
        let mut map = json::object(file, text.as_bytes())?;
        map.remove("quantization_config");
        Self::from_object(file, &map)
    }

    fn from_object(file: &str, map: &Map<String, Value>) -> Result<Self> {
        let mut f = Fields::new(file, map);
        let family = by_model_type(f.required("model_type")?);
        let config = match family.map(|family| (family, family.read)) {
            Some((_, ReadConfig::Decoder(_))) if kind_of(map) == Some(FamilyKind::Encoder) => {
                let key =
                    if f.raw(BOTH_WAYS).is_some_and(|value| *value == true) { BOTH_WAYS } else { "architectures" };
                return Err(f.wrong(
                    key,
                    "makes it an encoder, which writes no text",
                    "make vectors with `ridge embed`, or rank documents with `ridge serve`",
                ));
            }
            Some((family, ReadConfig::Decoder(read))) => {
                family.begin(&mut f)?;
                Self::new(family, read(&mut f)?)
            }
            Some((_, ReadConfig::Encoder(_))) => {
                return Err(f.wrong(
                    "model_type",
                    "is an encoder, which writes no text",
                    "make vectors with `ridge embed`",
                ));
            }
            Some((_, ReadConfig::ImageClassifier(_))) => {
                return Err(f.wrong(
                    "model_type",
                    "is a classifier of images, which writes no text",
                    "name images with `ridge classify`",
                ));
            }
            None => {
                let decoders = model_types(FamilyKind::Decoder);
                let (last, others) = decoders.split_last().unwrap_or((&"", &[]));
                let remedy = format!("choose a checkpoint of {} or {last}", others.join(", "));
                return Err(f.wrong("model_type", "is not a family that Ridge reads", remedy));
            }
        };
        f.finish()?;
        Ok(config)
    }
}

impl EncoderConfig {
    /// Is `text`, a `config.json`, one of an encoder?
    ///
    /// # Errors
    /// When the text is not a JSON object. `file` names it in errors.
    pub fn is_one(file: &str, text: &str) -> Result<bool> {
        Ok(family_kind(file, text)? == Some(FamilyKind::Encoder))
    }

    /// Reads the text of a `config.json`; a decoder's, if it writes text, as that of an encoder of the same layers. `file`
    /// names it in errors.
    ///
    /// # Errors
    /// As for [`ModelConfig::from_json`].
    pub fn from_json(file: &str, text: &str) -> Result<Self> {
        let map = json::object(file, text.as_bytes())?;
        let mut f = Fields::new(file, &map);
        let family = by_model_type(f.required("model_type")?);
        let config = match family.map(|family| (family, family.read)) {
            Some((family, ReadConfig::Encoder(read))) => {
                family.begin(&mut f)?;
                read(&mut f)?
            }
            Some((family, ReadConfig::Decoder(read))) => {
                family.begin_encoder(&mut f)?;
                let classifier = TextClassifier::read(&mut f, ClassifierHead::Last)?;
                Self::of_decoder(family.model_type, &family.tensors, read(&mut f)?.into(), classifier)
            }
            _ => {
                let remedy = format!("choose a checkpoint of {}", model_types(FamilyKind::Encoder).join(", "));
                return Err(f.wrong("model_type", "is not an encoder that Ridge reads", remedy));
            }
        };
        f.finish()?;
        Ok(config)
    }

    /// Its family.
    pub(crate) fn family(&self) -> Option<&'static FamilyDefinition> {
        by_model_type(self.family)
    }
}

impl VitConfig {
    /// Reads the text of a `config.json`. `file` names it in errors.
    ///
    /// # Errors
    /// As for [`ModelConfig::from_json`].
    pub fn from_json(file: &str, text: &str) -> Result<Self> {
        let map = json::object(file, text.as_bytes())?;
        let mut f = Fields::new(file, &map);
        let family = by_model_type(f.required("model_type")?);
        let Some((family, ReadConfig::ImageClassifier(read))) = family.map(|family| (family, family.read)) else {
            let remedy = format!("choose a checkpoint of {}", model_types(FamilyKind::ImageClassifier).join(", "));
            return Err(f.wrong("model_type", "is not a classifier of images that Ridge reads", remedy));
        };
        family.begin(&mut f)?;
        let config = read(&mut f)?;
        f.finish()?;
        Ok(config)
    }
}

impl PlannedConfig {
    /// Is the model whose `config.json` has this `text` planned by a graph of its own? `file` names the text in errors.
    ///
    /// # Errors
    /// When the text is not a JSON object.
    pub fn plans(file: &str, text: &str) -> Result<bool> {
        let map = json::object(file, text.as_bytes())?;
        Ok(model_type(&map).and_then(by_model_type).and_then(planned_reader).is_some())
    }

    /// Reads the text of a `config.json` that [`PlannedConfig::plans`]. `file` names it in errors. How the published weights
    /// are quantised is not read: [`ModelConfig`] has it, and a plan may store them otherwise.
    ///
    /// # Errors
    /// As for [`ModelConfig::from_json`].
    pub fn from_json(file: &str, text: &str) -> Result<Self> {
        let mut map = json::object(file, text.as_bytes())?;
        map.remove("quantization_config");
        let mut f = Fields::new(file, &map);
        let family = by_model_type(f.required("model_type")?);
        let Some((family, read)) = family.and_then(|family| Some((family, planned_reader(family)?))) else {
            let families: Vec<&str> = PLANNED.iter().map(|(family, _)| family.model_type).collect();
            let remedy = format!("such graphs are those of {}", families.join(", "));
            return Err(f.wrong("model_type", "is not a family with a graph for plans alone", remedy));
        };
        family.begin(&mut f)?;
        let config = read(&mut f)?;
        f.finish()?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    use ridge_graph::Role;

    use super::*;
    use crate::families::tensors::TensorName;
    use crate::model::BuildOptions;

    fn fixtures() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
    }

    /// The text of each configuration in the fixtures.
    fn configs() -> Vec<String> {
        let entries =
            |folder: &str| fixtures().join(folder).read_dir().expect("is there").map(|e| e.expect("is listed"));
        let families = entries("families").map(|folder| folder.path().join("config.json"));
        let published = entries("configs").map(|file| file.path());
        families.chain(published).map(|path| std::fs::read_to_string(path).expect("a file")).collect()
    }

    /// A configuration's family and the weights of its graph.
    fn weights(text: &str) -> (&'static FamilyDefinition, Vec<String>, Vec<TensorName>) {
        let map = json::object("config.json", text.as_bytes()).expect("JSON");
        let family = model_type(&map).and_then(by_model_type).expect("a registered family");
        let options = BuildOptions::default();
        let usual: Vec<TensorName> = family.tensors.all().copied().collect();
        let (graph, tensors) = match kind_of(&map).expect("a registered family") {
            FamilyKind::Decoder => {
                let config = ModelConfig::from_json("config.json", text).expect("reads");
                let tensors = usual.into_iter().chain(config.layer_tensors()).collect();
                (config.build(&options).expect("builds").module.graph, tensors)
            }
            FamilyKind::Encoder => {
                let config = EncoderConfig::from_json("config.json", text).expect("reads");
                (config.build(&options).expect("builds").module.graph, usual)
            }
            FamilyKind::ImageClassifier => {
                let config = VitConfig::from_json("config.json", text).expect("reads");
                (config.build(&options).expect("builds").module.graph, usual)
            }
        };
        (family, graph.args(Role::Weight).map(|arg| arg.name.to_string()).collect(), tensors)
    }

    #[test]
    fn names_are_listed_once_and_in_order() {
        let listed: Vec<&str> = families().map(|family| family.model_type).collect();
        let mut sorted: Vec<&str> = listed.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
        sorted.sort_unstable();
        assert_eq!(listed, sorted);
    }

    #[test]
    fn every_family_has_a_fixture_whose_weights_its_table_names() {
        let mut seen = BTreeSet::new();
        for text in configs() {
            let (family, weights, tensors) = weights(&text);
            seen.insert(family.model_type);
            let named = |weight: &str, tensor: &TensorName| {
                let scope = weight.rsplit_once('.').map_or("", |(scope, _)| scope);
                let within = scope.strip_prefix(family.tensors.layers).and_then(|rest| rest.strip_prefix('.'));
                let within = within.and_then(|rest| rest.split_once('.')).map_or(scope, |(_, within)| within);
                within == tensor.scope
            };
            if let Some(mapping) = &family.gguf {
                let of_layers = |pattern: &str| {
                    (0..tensors.len()).map(move |i| pattern.replace('*', &i.to_string())).collect::<Vec<_>>()
                };
                let others: BTreeSet<String> =
                    mapping.tensors.iter().flat_map(|tensor| tensor.weights).flat_map(|name| of_layers(name)).collect();
                // Classifiers are not written as GGUF.
                for weight in weights.iter().filter(|weight| *weight != "score.weight" && !others.contains(*weight)) {
                    assert!(tensors.iter().any(|tensor| named(weight, tensor)), "{}: {weight}", family.name);
                }
            }
        }
        assert_eq!(seen, families().map(|family| family.model_type).collect());
    }

    #[test]
    fn every_tensor_that_is_cut_is_in_a_graph() {
        let mut cut: BTreeSet<(&str, &str)> = BTreeSet::new();
        for family in families() {
            cut.extend(family.tensors.all().filter(|t| t.cut.is_some()).map(|t| (family.model_type, t.scope)));
        }
        for text in configs() {
            let (family, weights, _) = weights(&text);
            for weight in weights {
                let scope = weight.rsplit_once('.').map_or(&*weight, |(scope, _)| scope);
                cut.retain(|(model_type, cut)| *model_type != family.model_type || !scope.ends_with(cut));
            }
        }
        // Output projections that are the embedding in each fixture.
        let tied = [
            "bloom",
            "cohere",
            "cohere2",
            "falcon",
            "gemma2",
            "gemma3_text",
            "gemma3n_text",
            "gemma4_text",
            "gpt2",
            "granite",
            "granitemoehybrid",
            "lfm2",
            "mamba",
            "mamba2",
            "mpt",
            "qwen2",
            "smollm3",
            "starcoder2",
            "zamba2",
        ]
        .map(|family| (family, "lm_head"));
        cut.retain(|cut| !tied.contains(cut));
        assert!(cut.is_empty(), "{cut:?}");
    }

    #[test]
    fn families_agree_on_how_a_tensor_is_cut() {
        for family in families() {
            for tensor in family.tensors.all().filter(|tensor| tensor.cut.is_some()) {
                for other in families().flat_map(|other| other.tensors.all()) {
                    let same = tensor.scope == other.scope || tensor.scope.ends_with(&format!(".{}", other.scope));
                    assert!(!same || other.scope.is_empty() || tensor.cut == other.cut, "{tensor:?} {other:?}");
                }
            }
        }
    }

    #[test]
    fn model_type_is_that_of_the_object_itself() {
        let text = r#"{"text_config": {"model_type": "qwen3"}, "model_type": "llama"}"#;
        assert_eq!(family_kind("config.json", text).expect("JSON"), Some(FamilyKind::Decoder));
        let nested = r#"{"text_config": {"model_type": "qwen3"}}"#;
        assert_eq!(family_kind("config.json", nested).expect("JSON"), None);
        assert_eq!(family_kind("config.json", r#"{"model_type": 3}"#).expect("JSON"), None);
        assert_eq!(
            family_kind("config.json", r#"{"model_type": "deepseek_v32"}"#).expect("JSON"),
            Some(FamilyKind::Decoder)
        );
        assert!(family_kind("config.json", "[]").is_err());
    }
}
