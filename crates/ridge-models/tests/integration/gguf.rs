//! GGUF files: what Ridge writes beside llama.cpp's own converter (`fixtures/gguf_models.py`), what it reads of its own
//! files.

use std::path::{Path, PathBuf};

use crate::common::fixtures;
use ridge_files::Checkpoint;
use ridge_files::gguf::{Gguf, GgufValue, TensorStorage};
use ridge_graph::{DType, format};
use ridge_models::gguf::{Quantisation, checkpoint, to_folder, to_gguf};
use ridge_models::{BuildOptions, ModelConfig, ModelError, ModelFiles, Pooling};
use serde_json::Value as Json;

/// A folder of this test, empty.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gguf").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("can be made");
    folder
}

fn fnv(bytes: &[u8]) -> String {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

fn models() -> Vec<String> {
    let mut all = Vec::new();
    for kind in ["families", "llama"] {
        for entry in fixtures().join(kind).read_dir().expect("is there") {
            let name = entry.expect("is listed").file_name().into_string().expect("a name");
            // An encoder and a classifier of images; frequencies and windows that GGUF cannot tell, a layer without experts
            // among others, and families that GGUF does not have or has in another form.
            let without = [
                "bamba",
                "bert",
                "bert_reranker",
                "deepseek_v2",
                "deepseek_v2_groups",
                "deepseek_v3",
                "deepseek_v32",
                "distilbert",
                "distilbert_classifier",
                "falcon_h1",
                "falcon_h1_plain",
                "falcon_mamba",
                "falcon_rw",
                "gemma3_encoder",
                "gemma3n",
                "gemma3n_four",
                "gemma4",
                "gemma4_dense",
                "gemma4_moe",
                "gla",
                "glm",
                "glm4_moe",
                "glm_moe_dsa",
                "granitemoehybrid",
                "granitemoehybrid_dense",
                "hyena",
                "jamba",
                "lfm2",
                "linear_attn",
                "linear_attn_elu",
                "llama4",
                "longformer",
                "longformer_classifier",
                "qwen3_reranker",
                "big_bird",
                "big_bird_reranker",
                "llama_dynamic",
                "llama_yarn_mscale",
                "mamba",
                "mamba2",
                "minimax_m2",
                "modernbert",
                "modernbert_reranker",
                "nomic_bert",
                "mpt",
                "nemotron_h",
                "qwen3_moe",
                "qwen3_5",
                "qwen3_5_moe",
                "qwen3_next",
                "retnet",
                "roberta",
                "rwkv4",
                "rwkv6",
                "rwkv7",
                "starcoder2",
                "vit",
                "xlm_roberta",
                "zamba2",
                "zamba2_plain",
                "xlm_roberta_reranker",
            ];
            if !without.contains(&name.as_str()) {
                all.push(format!("{kind}/{name}"));
            }
        }
    }
    all.sort();
    assert!(all.len() >= 19, "{all:?}");
    all
}

/// Runs `check` for each of `names`, and tells of all that fail.
fn each(names: &[String], check: impl Fn(&str)) {
    let fails = |name: &&String| std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(name))).is_err();
    let failed: Vec<&String> = names.iter().filter(fails).collect();
    assert!(failed.is_empty(), "of {} models these fail, as told above: {failed:?}", names.len());
}

/// The model `name` as a GGUF file with matrices stored so.
fn written(name: &str, to: &Path, matrices: Option<TensorStorage>) -> Gguf {
    let files = ModelFiles::open(Some(&fixtures().join(name))).expect("opens");
    let how = Quantisation { matrices, ..Quantisation::default() };
    to_gguf(&files, to, &how, |_, _| Ok(())).unwrap_or_else(|e| panic!("{name}: {e}"));
    Gguf::open(to).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// The file as a folder.
fn unpacked(file: &Path, to: &Path, dtype: DType, all: bool) -> Result<(), ModelError> {
    to_folder(&ModelFiles::open(Some(file))?, to, dtype, all, |_, _| Ok(()))
}

fn weights(files: &ModelFiles, config: &ModelConfig) -> Checkpoint {
    config.arrange(files.checkpoint().expect("weights")).expect("divides")
}

#[test]
fn files_hold_what_llama_cpps_converter_writes() {
    let text = std::fs::read_to_string(fixtures().join("gguf.json")).expect("the fixture");
    let expected: Json = serde_json::from_str(&text).expect("JSON");
    let to = folder("beside");
    let expected = expected.as_object().expect("models");
    let told = |name: &&String| models().contains(name) || *name == "families/bert";
    let names: Vec<String> = expected.keys().filter(told).cloned().collect();
    assert!(names.len() >= 18, "{names:?}");
    each(&names, |name| {
        let theirs = &expected[name];
        let gguf = written(name, &to.join("x.gguf"), Some(TensorStorage::plain(DType::F32)));
        let tensors = theirs["tensors"].as_object().expect("tensors");
        assert_eq!(gguf.tensors().len(), tensors.len(), "{name}");
        for tensor in gguf.tensors() {
            let is = serde_json::json!([tensor.storage.name(), tensor.shape, fnv(gguf.data(tensor))]);
            // Factors are computed, here in doubles.
            if tensor.name == "rope_freqs.weight" {
                assert_eq!(is[1], tensors[&tensor.name][1]);
                continue;
            }
            assert_eq!(is, tensors[&tensor.name], "{name} {}", tensor.name);
        }
        for (key, should) in theirs["metadata"].as_object().expect("metadata") {
            // The converter takes the context of the first Falcon, and the usual widths of these MLPs, for granted.
            if ["falcon.context_length", "falcon.feed_forward_length", "gpt2.feed_forward_length"]
                .contains(&key.as_str())
            {
                continue;
            }
            let is = match gguf.metadata().get(key) {
                Some(GgufValue::String(text)) => Json::from(text.as_str()),
                Some(GgufValue::Bool(flag)) => Json::from(*flag),
                Some(value) => Json::from(value.as_f64().expect("a number")),
                None => {
                    // What says that there is nothing.
                    let nothing = *should == 0 || key == "phi3.rope.scaling.original_context_length";
                    assert!(nothing, "{name}: {key} = {should} is missing");
                    continue;
                }
            };
            match (is.as_f64(), should.as_f64()) {
                (Some(is), Some(should)) => {
                    assert!((is - should).abs() <= should.abs() * 1e-6, "{name} {key}: {is} {should}");
                }
                _ => assert_eq!(is, *should, "{name} {key}"),
            }
        }
    });
}

#[test]
fn a_model_comes_back_from_a_file_as_it_was() {
    let to = folder("back");
    each(&models(), |name| {
        let path = to.join("x.gguf");
        written(name, &path, None);
        let (before, after) = (
            ModelFiles::open(Some(&fixtures().join(name))).expect("opens"),
            ModelFiles::open(Some(&path)).expect("opens"),
        );
        let (mut was, mut is) =
            (before.config().expect("reads"), after.config().unwrap_or_else(|e| panic!("{name}: {e}")));
        for config in [&mut was, &mut is] {
            config.torch_dtype = None;
            config.bos_token_id = None;
            config.eos_token_ids = Vec::new();
            config.attention_dropout = 0.0;
        }
        // The factors of Llama 3 come back as a list, and numbers were f32 in between.
        let scaled = was.rope.as_ref().is_some_and(|rope| rope.scaling.is_some());
        if !scaled && !name.contains("gemma") {
            assert_eq!(format!("{was:?}"), format!("{is:?}"), "{name}");
        }
        let (was, is) = (weights(&before, &was), weights(&after, &is));
        for tensor in is.tensors() {
            let old = was.tensor(tensor.name).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!((tensor.shape, tensor.format), (old.shape, old.format), "{name} {}", tensor.name);
            if tensor.format.is_some() {
                assert_eq!(tensor.data, old.data, "{name} {}", tensor.name);
                continue;
            }
            let (new, old) = (tensor.dtype.decode(tensor.data), old.dtype.decode(old.data));
            // One was added to the norms of Gemma, and taken away again.
            let near = new.iter().zip(&old).all(|(a, b)| a == b || name.contains("gemma") && (a - b).abs() < 1e-6);
            assert!(near, "{name} {}", tensor.name);
        }
        let tied = was.len() - is.len();
        assert!(tied <= 1, "{name}: {tied} tensors are lost");
    });
}

#[test]
fn a_folder_comes_back_from_a_file_as_it_was() {
    let to = folder("folders");
    for name in
        ["families/gpt2", "families/phi3", "families/falcon", "families/gpt_neox", "families/qwen3", "llama/biased"]
    {
        let (file, back) = (to.join("x.gguf"), to.join("back"));
        written(name, &file, None);
        unpacked(&file, &back, DType::F32, false).unwrap_or_else(|e| panic!("{name}: {e}"));
        let was = Checkpoint::open(fixtures().join(name)).expect("opens");
        let is = Checkpoint::open(&back).expect("opens");
        for tensor in is.tensors() {
            let old = was.tensor(tensor.name).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!((tensor.shape, tensor.data), (old.shape, old.data), "{name} {}", tensor.name);
        }
        assert!(is.len() + 1 >= was.len(), "{name}");
        assert!(ModelFiles::open(Some(&back)).and_then(|files| files.config()).is_ok(), "{name}");
    }
}

#[test]
fn a_folder_in_half_precision_comes_back_bit_for_bit() {
    let to = folder("half");
    let (file, before, after) = (to.join("x.gguf"), to.join("before"), to.join("after"));
    // One is added to the norms of Gemma in f32, which small numbers do not survive.
    let names: Vec<String> = models().into_iter().filter(|name| !name.contains("gemma")).collect();
    for dtype in [DType::BF16, DType::F16] {
        each(&names, |name| {
            written(name, &file, None);
            unpacked(&file, &before, dtype, true).unwrap_or_else(|e| panic!("{name}: {e}"));
            let files = ModelFiles::open(Some(&before)).expect("opens");
            to_gguf(&files, &file, &Quantisation::default(), |_, _| Ok(())).unwrap_or_else(|e| panic!("{name}: {e}"));
            unpacked(&file, &after, DType::F32, false).unwrap_or_else(|e| panic!("{name}: {e}"));
            let read = |folder: &Path| std::fs::read(folder.join("model.safetensors")).expect("is there");
            assert!(read(&before) == read(&after), "{name}");
            let config = ModelFiles::open(Some(&after)).and_then(|files| files.config()).expect("reads");
            assert_eq!(config.torch_dtype, Some(dtype), "{name}");
        });
    }
}

#[test]
fn an_encoder_comes_back_from_a_file_and_a_folder_as_it_was() {
    for name in ["bert", "nomic_bert"] {
        encoder_comes_back(name);
    }
}

fn encoder_comes_back(name: &str) {
    let to = folder(&format!("encoder_{name}"));
    let (file, back) = (to.join("x.gguf"), to.join("back"));
    written(&format!("families/{name}"), &file, None);
    unpacked(&file, &back, DType::F32, false).expect("writes");
    let open = |path: &Path| {
        let files = ModelFiles::open(Some(path)).expect("opens");
        let config = files.encoder_config().expect("reads").expect("is an encoder");
        let checkpoint = config.arrange(files.checkpoint().expect("weights")).expect("arranges");
        (config.build(&BuildOptions::default()).expect("builds").module.graph, checkpoint)
    };
    let (graph, was) = open(&fixtures().join(format!("families/{name}")));
    for path in [&file, &back] {
        let (same, is) = open(path);
        assert_eq!(graph, same, "{}", path.display());
        assert_eq!(is.len(), was.len(), "{}", path.display());
        for tensor in is.tensors() {
            let old = was.tensor(tensor.name).expect("has it");
            assert_eq!((tensor.shape, tensor.dtype, tensor.data), (old.shape, old.dtype, old.data), "{}", tensor.name);
        }
    }
    // A decoder's reader says what to do with it.
    let refused = ModelFiles::open(Some(&file)).expect("opens").config().expect_err("is an encoder").to_string();
    assert!(refused.contains("ridge embed"), "{refused}");
}

#[test]
fn how_an_encoder_pools_goes_into_a_file_and_back() {
    let to = folder("pooling");
    let from = to.join("from");
    std::fs::create_dir_all(from.join("1_Pooling")).expect("can be made");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixtures().join("families/bert").join(name), from.join(name)).expect("is there");
    }
    let modules = r#"[{"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]"#;
    std::fs::write(from.join("modules.json"), modules).expect("can be written");
    for (mode, pooling) in [("cls_token", Pooling::Cls), ("mean_tokens", Pooling::Mean), ("lasttoken", Pooling::Last)] {
        let said = format!("{{\"pooling_mode_{mode}\": true}}");
        std::fs::write(from.join("1_Pooling/config.json"), said).expect("can be written");
        let file = to.join("x.gguf");
        to_gguf(&ModelFiles::open(Some(&from)).expect("opens"), &file, &Quantisation::default(), |_, _| Ok(()))
            .expect("writes");
        let back = to.join("back");
        unpacked(&file, &back, DType::F32, false).expect("writes");
        for path in [&file, &back] {
            let said = ModelFiles::open(Some(path)).and_then(|files| files.sentence_config()).expect("reads");
            assert_eq!(said.map(|said| said.pooling), Some(pooling), "{}", path.display());
        }
    }
    std::fs::write(from.join("1_Pooling/config.json"), r#"{"pooling_mode_max_tokens": true}"#).expect("can be written");
    let files = ModelFiles::open(Some(&from)).expect("opens");
    let refused =
        to_gguf(&files, &to.join("x.gguf"), &Quantisation::default(), |_, _| Ok(())).expect_err("has no number");
    assert!(
        refused.to_string().contains("it cannot be written as GGUF: it pools by max; run the model from its folder"),
        "{refused}"
    );
}

#[test]
fn every_format_is_written_and_used_in_place() {
    let to = folder("formats");
    for format in format::all() {
        let storage = TensorStorage::in_format(format.clone());
        let gguf = written("llama/gqa2_tied", &to.join("x.gguf"), Some(storage.clone()));
        let embedding = gguf.tensors().iter().find(|t| t.name == "token_embd.weight").expect("has it");
        // Rows of 32 hold no block of 256; the nearest formats do.
        let instead = match format.name() {
            "q2_k" | "q3_k" | "iq4_xs" => "iq4_nl",
            "q4_k" => "q5_0",
            "q5_k" => "q5_1",
            "q6_k" => "q8_0",
            own => own,
        };
        assert_eq!(embedding.storage.name(), instead);
        let weights = checkpoint(&gguf).expect("weights");
        let weight = weights.tensor("model.embed_tokens.weight").expect("has it");
        assert_eq!(weight.format.map(|f| f.name()), Some(instead));
        assert_eq!(weight.data, gguf.data(embedding));
        // Rows of queries are in another order, whole.
        let q = weights.tensor("model.layers.0.self_attn.q_proj.weight").expect("has it");
        let plain = Checkpoint::open(fixtures().join("llama/gqa2_tied")).expect("opens");
        let exact = plain.tensor("model.layers.0.self_attn.q_proj.weight").expect("has it");
        let (read, exact) = (q.format.expect("quantised").values(&[q.data], q.shape), DType::F32.decode(exact.data));
        let error: f64 = read.iter().zip(&exact).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
        let whole: f64 = exact.iter().map(|b| b * b).sum();
        assert!((error / whole).sqrt() < 0.2, "{}: {}", format.name(), (error / whole).sqrt());
    }
}

#[test]
fn a_file_is_run_in_f32_if_its_matrices_are_that_and_in_bf16_otherwise() {
    let to = folder("dtypes");
    for (name, dtype) in [("f32", DType::F32), ("f16", DType::BF16), ("bf16", DType::BF16), ("q8_0", DType::BF16)] {
        written("llama/gqa2_tied", &to.join("x.gguf"), TensorStorage::from_name(name));
        let config = ModelFiles::open(Some(&to.join("x.gguf"))).and_then(|files| files.config()).expect("reads");
        assert_eq!(config.torch_dtype, Some(dtype), "{name}");
    }
}
