//! Published files that disagree with themselves, or spell things otherwise: read as transformers reads them, or refused.

use std::path::{Path, PathBuf};

use ridge_files::Checkpoint;
use ridge_models::families::GemmaConfig;
use ridge_models::{BuildOptions, ModelConfig, ModelFiles, RopeScaling, WeightSource};
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::common::fixtures;

/// A tensor: name, shape, and f32 elements in bytes.
type Named = (String, Vec<usize>, Vec<u8>);

/// A copy of a fixture in a folder of its own, with changes to its configuration and its tensors.
struct Copy {
    folder: tempfile::TempDir,
}

impl Copy {
    fn of(fixture: &str, config: impl FnOnce(&mut Value), tensors: impl FnOnce(&mut Vec<Named>)) -> Self {
        let (from, folder) = (fixtures().join(fixture), tempfile::tempdir().expect("a folder"));
        let text = std::fs::read_to_string(from.join("config.json")).expect("a configuration");
        let mut json: Value = serde_json::from_str(&text).expect("JSON");
        config(&mut json);
        std::fs::write(folder.path().join("config.json"), json.to_string()).expect("writes");
        let checkpoint = Checkpoint::open(&from).expect("weights");
        let mut all: Vec<Named> =
            checkpoint.tensors().map(|t| (t.name.to_owned(), t.shape.to_vec(), t.data.to_vec())).collect();
        tensors(&mut all);
        let views = all.iter().map(|(name, shape, data)| {
            (name, TensorView::new(safetensors::Dtype::F32, shape.clone(), data).expect("fits"))
        });
        let bytes = safetensors::serialize(views, None).expect("serialises");
        std::fs::write(folder.path().join("model.safetensors"), bytes).expect("writes");
        Self { folder }
    }

    fn files(&self) -> ModelFiles {
        ModelFiles::open(Some(self.folder.path())).expect("opens")
    }

    /// The checkpoint as the graph names its weights, after a check that these are all there.
    fn weights(&self) -> Result<Checkpoint, String> {
        let files = self.files();
        let config = files.config().map_err(|e| e.to_string())?;
        let checkpoint = files.checkpoint().and_then(|c| config.arrange(c)).map_err(|e| e.to_string())?;
        let graph = config.build(&BuildOptions::default()).expect("builds").module.graph;
        let source = WeightSource::Checkpoint(std::sync::Arc::new(checkpoint));
        source.retype(&graph, None).map_err(|e| e.to_string())?;
        let WeightSource::Checkpoint(checkpoint) = source else { unreachable!("it is one") };
        Ok(std::sync::Arc::into_inner(checkpoint).expect("one owner"))
    }
}

fn family(name: &str) -> PathBuf {
    Path::new("families").join(name)
}

fn read(name: &str, change: impl FnOnce(&mut Value)) -> Result<ModelConfig, String> {
    let text = std::fs::read_to_string(fixtures().join(family(name)).join("config.json")).expect("a configuration");
    let mut json: Value = serde_json::from_str(&text).expect("JSON");
    change(&mut json);
    ModelConfig::from_json("config.json", &json.to_string()).map_err(|e| e.to_string())
}

#[test]
fn fused_tensors_of_another_number_of_heads_are_refused() {
    // Of Falcon the heads become narrower, so that queries, keys and values need fewer rows.
    for (name, key, value) in [
        ("falcon", "num_attention_heads", json!(8)),
        ("falcon", "multi_query", json!(false)),
        ("phi3", "num_key_value_heads", json!(1)),
        ("phi3", "intermediate_size", json!(32)),
    ] {
        let copy = Copy::of(&format!("families/{name}"), |config| config[key] = value.clone(), |_| ());
        let error = copy.weights().map(|_| ()).expect_err(&format!("{name} with {key} = {value}"));
        assert!(error.contains(" rows"), "{name} {key} {value}: {error}");
    }
    // Two heads of keys and values, of which the configuration has one.
    let groups = |all: &mut Vec<Named>| {
        for (_, shape, data) in all.iter_mut().filter(|t| t.0.ends_with("query_key_value.weight")) {
            data.extend_from_within(..16 * shape[1] * 4);
            shape[0] += 16;
        }
    };
    let error = Copy::of("families/falcon", |_| (), groups).weights().map(|_| ()).expect_err("rows that nobody reads");
    assert!(error.contains("query_key_value.weight has 64 rows, but the configuration requires 48"), "{error}");
    let message = Copy::of("families/phi3", |config| config["num_key_value_heads"] = 1.into(), |_| ()).weights();
    let message = message.map(|_| ()).expect_err("fewer heads of keys and values");
    assert!(message.contains("qkv_proj.weight has") && message.contains("the configuration requires"), "{message}");
}

#[test]
fn tied_projection_that_differs_from_the_embedding_is_used() {
    let head = |change: u8| {
        move |all: &mut Vec<Named>| {
            let (_, shape, mut data) =
                all.iter().find(|t| t.0 == "model.embed_tokens.weight").expect("an embedding").clone();
            data[2] ^= change;
            all.push(("lm_head.weight".into(), shape, data));
        }
    };
    let differs = Copy::of("llama/gqa2_tied", |_| (), head(1));
    assert!(!differs.files().config().expect("reads").tie_word_embeddings);
    let (weights, file) = (differs.weights().expect("loads"), differs.files().checkpoint().expect("opens"));
    assert_eq!(
        weights.tensor("lm_head.weight").expect("is used").data,
        file.tensor("lm_head.weight").expect("is there").data
    );
    let same = Copy::of("llama/gqa2_tied", |_| (), head(0));
    assert!(same.files().config().expect("reads").tie_word_embeddings);
    same.weights().expect("loads");
}

#[test]
fn soft_caps_have_the_defaults_of_their_family() {
    let caps = |config: ModelConfig| {
        let gemma = config.downcast_ref::<GemmaConfig>().expect("is a Gemma");
        (gemma.attn_logit_softcapping, gemma.final_logit_softcapping)
    };
    let without = read("gemma2", |config| {
        config.as_object_mut().expect("an object").retain(|key, _| !key.ends_with("softcapping"));
    });
    assert_eq!(caps(without.expect("reads")), (Some(50.0), Some(30.0)));
    let null = read("gemma2", |config| {
        config["attn_logit_softcapping"] = Value::Null;
        config["final_logit_softcapping"] = Value::Null;
    });
    assert_eq!(caps(null.expect("reads")), (None, None));
    let third = read("gemma3", |config| {
        config["attn_logit_softcapping"] = 20.0.into();
        config["final_logit_softcapping"] = 10.0.into();
    });
    assert_eq!(caps(third.expect("reads")), (None, Some(10.0)));
}

#[test]
fn context_of_pretraining_outside_the_rotation_has_priority_in_phi3() {
    let original = |change: fn(&mut Value)| {
        let config = read("phi3_longrope", change).expect("reads");
        match config.rope.as_ref().and_then(|rope| rope.scaling.clone()) {
            Some(RopeScaling::LongRope { original_max_position_embeddings: original, attention_factor, .. }) => {
                (original, attention_factor)
            }
            other => panic!("{other:?}"),
        }
    };
    let factor = |growth: f64, original: f64| (1.0 + growth.ln() / original.ln()).sqrt();
    let both = original(|c| c["original_max_position_embeddings"] = 24.into());
    assert_eq!(both, (24, factor(2.0, 24.0)));
    let absent = original(|c| {
        c.as_object_mut().expect("an object").remove("original_max_position_embeddings");
    });
    assert_eq!(absent, (4096, 1.0), "the default of the family");
    let stated = original(|c| c["rope_parameters"]["factor"] = 8.0.into());
    assert_eq!(stated, (12, factor(8.0, 12.0)), "a factor that is stated counts");
}

#[test]
fn decoder_of_berts_build_is_refused() {
    let copy = Copy::of("families/bert", |config| config["is_decoder"] = true.into(), |_| ());
    let error = copy.files().encoder_config().expect_err("masks what comes later").to_string();
    assert!(error.contains("is_decoder = true is not supported"), "{error}");
}

#[test]
fn older_names_of_norms_are_read() {
    let renamed = |all: &mut Vec<Named>| {
        for (name, ..) in all {
            *name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
        }
    };
    let (old, new) = (Copy::of("families/bert", |_| (), renamed), Copy::of("families/bert", |_| (), |_| ()));
    let weights = |copy: &Copy| {
        let config = copy.files().encoder_config().expect("reads").expect("an encoder");
        config.arrange(copy.files().checkpoint().expect("opens")).expect("arranges")
    };
    let (old, new) = (weights(&old), weights(&new));
    assert!(new.names().any(|name| name.ends_with("LayerNorm.weight")));
    assert!(old.names().eq(new.names()));
    let both = |all: &mut Vec<Named>| {
        let (name, shape, data) = all.iter().find(|t| t.0.ends_with("LayerNorm.bias")).expect("a norm").clone();
        all.push((name.replace("bias", "beta"), shape, data));
    };
    let both = Copy::of("families/bert", |_| (), both);
    let config = both.files().encoder_config().expect("reads").expect("an encoder");
    let error = config.arrange(both.files().checkpoint().expect("opens")).expect_err("twice").to_string();
    assert!(error.contains("exists under two names"), "{error}");
}

#[test]
fn language_model_of_a_multimodal_checkpoint_is_read() {
    let plain = Copy::of("families/gemma3", |_| (), |_| ());
    let wanted: Vec<String> = plain.weights().expect("loads").names().map(str::to_owned).collect();
    for (model, head) in [("language_model.model.", "language_model."), ("model.language_model.", "")] {
        let wrap = |config: &mut Value| {
            let mut text = config.take();
            let eos = text.as_object_mut().expect("an object").remove("eos_token_id");
            text.as_object_mut().expect("an object").remove("architectures");
            *config = json!({
                "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
                "vision_config": {"model_type": "siglip_vision_model"}, "mm_tokens_per_image": 256,
                "boi_token_index": 5, "eos_token_id": eos,
            });
        };
        let rename = |all: &mut Vec<Named>| {
            for (name, ..) in &mut *all {
                *name = match name.strip_prefix("model.") {
                    Some(rest) => format!("{model}{rest}"),
                    None => format!("{head}{name}"),
                };
            }
            for name in ["vision_tower.a", "multi_modal_projector.b", "model.vision_tower.c"] {
                all.push((name.into(), vec![1], vec![0; 4]));
            }
        };
        let copy = Copy::of("families/gemma3", wrap, rename);
        assert_eq!(copy.files().config().expect("reads"), plain.files().config().expect("reads"));
        assert!(copy.weights().expect("loads").names().eq(wanted.iter().map(String::as_str)));
    }
}

/// The fixture has a tensor for each expert, as transformers saves them; the maker publishes two for all of a layer, within a
/// multimodal model.
#[test]
fn experts_of_qwen3_5_are_read_in_both_published_forms() {
    let apart = Copy::of("families/qwen3_5_moe", |_| (), |_| ()).weights().expect("reads");
    let whole = |config: &mut Value| {
        let text = std::mem::take(config);
        *config = json!({"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}});
    };
    let fuse = |tensors: &mut Vec<Named>| {
        let mut all: Vec<Named> = Vec::new();
        for (name, shape, data) in std::mem::take(tensors) {
            let Some((layer, expert)) = name.split_once(".mlp.experts.") else {
                all.push((name.replace("model.", "model.language_model."), shape, data));
                continue;
            };
            let (number, projection) = expert.split_once('.').expect("a number");
            let number: usize = number.parse().expect("a number");
            let layer = layer.replace("model.", "model.language_model.");
            let (fused, place) = match projection.strip_suffix(".weight").expect("a weight") {
                "gate_proj" => ("gate_up_proj", 2 * number),
                "up_proj" => ("gate_up_proj", 2 * number + 1),
                _ => ("down_proj", number),
            };
            let (of_fused, parts) = if fused == "down_proj" { (5, 1) } else { (5, 2) };
            let name = format!("{layer}.mlp.experts.{fused}");
            let at = all.iter().position(|(known, ..)| *known == name).unwrap_or_else(|| {
                let size = data.len() * of_fused * parts;
                all.push((name.clone(), vec![of_fused, parts * shape[0], shape[1]], vec![0; size]));
                all.len() - 1
            });
            all[at].2[place * data.len()..][..data.len()].copy_from_slice(&data);
        }
        all.push(("model.visual.patch_embed.bias".into(), vec![1], vec![0; 4]));
        *tensors = all;
    };
    let fused = Copy::of("families/qwen3_5_moe", whole, fuse).weights().expect("reads");
    assert_eq!(fused.len(), apart.len());
    for tensor in apart.tensors() {
        let other = fused.tensor(tensor.name).expect("has it");
        assert_eq!((other.shape, other.data), (tensor.shape, tensor.data), "{}", tensor.name);
    }
}
