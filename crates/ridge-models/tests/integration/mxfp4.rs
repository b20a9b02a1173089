//! A gpt-oss whose experts are published in MXFP4, as codes and exponents (`fixtures/mxfp4.py`). Its logits are held to those of
//! transformers with the other families'.

use std::path::Path;
use std::sync::Arc;

use ridge_files::{Checkpoint, Gguf};
use ridge_graph::{DType, Role};
use ridge_models::gguf::{Quantisation, to_gguf};
use ridge_models::summary::ModuleSummary;
use ridge_models::{BuildOptions, ModelConfig, ModelFiles, WeightSource};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use crate::common::{Expected, fixtures};

const NAME: &str = "families/gpt_oss_mxfp4";

/// A tensor: name, dtype, shape and bytes.
type Named = (String, Dtype, Vec<usize>, Vec<u8>);

/// A copy of the fixture with changes to its configuration and tensors.
fn copy(config: impl FnOnce(&mut Value), tensors: impl FnOnce(&mut Vec<Named>)) -> tempfile::TempDir {
    let (from, folder) = (fixtures().join(NAME), tempfile::tempdir().expect("a folder"));
    let text = std::fs::read_to_string(from.join("config_v4.json")).expect("a configuration");
    let mut json: Value = serde_json::from_str(&text).expect("JSON");
    config(&mut json);
    std::fs::write(folder.path().join("config.json"), json.to_string()).expect("writes");
    let named = |t: ridge_files::TensorView<'_>| {
        let dtype = if t.dtype == DType::U8 { Dtype::U8 } else { Dtype::F32 };
        (t.name.to_owned(), dtype, t.shape.to_vec(), t.data.to_vec())
    };
    let mut all: Vec<Named> = Checkpoint::open(&from).expect("weights").tensors().map(named).collect();
    tensors(&mut all);
    let views = all
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).expect("fits")));
    let bytes = safetensors::serialize(views, None).expect("serialises");
    std::fs::write(folder.path().join("model.safetensors"), bytes).expect("writes");
    folder
}

fn arranged(folder: &Path) -> Result<Checkpoint, String> {
    let files = ModelFiles::open(Some(folder)).expect("opens");
    let config = files.config().map_err(|e| e.to_string())?;
    files.checkpoint().and_then(|c| config.arrange(c)).map_err(|e| e.to_string())
}

/// The values of a weight that is in a format.
fn values(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let parts = checkpoint.components(name).expect("is there");
    let shape = checkpoint.shape(name).expect("is there").to_vec();
    let format = checkpoint.format(name).unwrap_or_else(|| panic!("{name} is in a format"));
    format.values(&parts.iter().map(AsRef::as_ref).collect::<Vec<_>>(), &shape)
}

#[test]
fn codes_and_exponents_mean_what_transformers_takes_them_for() {
    let checkpoint = arranged(&fixtures().join(NAME)).expect("arranges");
    let expected = Expected::open(&format!("{NAME}/expected.safetensors"));
    let gate_up = expected.tensor("experts.gate_up_proj");
    let down = expected.tensor("experts.down_proj");
    let mut compared = 0;
    for (projection, want, first, step) in
        [("gate_proj", &gate_up, 0, 2), ("up_proj", &gate_up, 1, 2), ("down_proj", &down, 0, 1)]
    {
        let name = format!("model.layers.0.mlp.experts.{projection}.weight");
        assert_eq!(checkpoint.format(&name).map(|f| f.name()), Some("mxfp4"), "{name}");
        let [experts, rows, inputs] = checkpoint.shape(&name).expect("is there")[..] else { panic!("{name}") };
        assert_eq!((experts, rows, inputs), (4, 64, 64), "{name}");
        let got = values(&checkpoint, &name);
        for (slot, expert) in [1, 3].into_iter().enumerate() {
            for row in 0..rows {
                for input in 0..inputs {
                    // transformers has them as [experts, in, out], the rows of gates and of what they open in turns.
                    let want = want.floats()[(slot * inputs + input) * rows * step + first + step * row];
                    let got = got[(expert * rows + row) * inputs + input];
                    assert_eq!(f64::from(got), want, "{name} of expert {expert} at {row}, {input}");
                    compared += usize::from(want != 0.0);
                }
            }
        }
    }
    assert!(compared > 15_000, "{compared}");
}

/// Bytes of the storage called `name`.
fn bytes(summary: &ModuleSummary, name: &str) -> (u64, u64) {
    summary.storage.iter().find(|s| s.name == name).map_or((0, 0), |s| (s.parameters, s.bytes))
}

#[test]
fn experts_take_four_and_a_quarter_bits_by_the_checkpoint_and_by_its_configuration_alone() {
    let folder = fixtures().join(NAME);
    let config = ModelFiles::open(Some(&folder)).expect("opens").config().expect("reads");
    let stored = WeightSource::Checkpoint(Arc::new(arranged(&folder).expect("arranges")));
    for source in [stored, WeightSource::RandomAsPublished(Box::new(config.clone()))] {
        let mut model = config.build(&BuildOptions::default()).expect("builds");
        model.store(&source, None).expect("fits");
        let summary = ModuleSummary::new(&model);
        let experts = 2 * 3 * 4 * 64 * 64;
        assert_eq!(bytes(&summary, "mxfp4"), (experts, experts * 17 / 32), "{source:?}");
        assert_eq!(summary.weight_bytes, experts * 17 / 32 + 4 * (summary.parameters - experts), "{source:?}");
    }
}

/// What the hub has as openai/gpt-oss-20b.
fn published() -> Value {
    let types: Vec<&str> = (0..24).map(|i| if i % 2 == 0 { "sliding_attention" } else { "full_attention" }).collect();
    json!({
        "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": types, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert":
                ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                         "rope_type": "yarn", "truncate": false},
        "rope_theta": 150_000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.55.0.dev0", "use_cache": true,
        "vocab_size": 201_088,
    })
}

fn summary_of(config: &Value) -> ModuleSummary {
    let config = ModelConfig::from_json("config.json", &config.to_string()).unwrap_or_else(|e| panic!("{e}"));
    let options = BuildOptions { activations: DType::BF16, ..BuildOptions::default() };
    let mut model = config.build(&options).expect("builds");
    model.store(&WeightSource::RandomAsPublished(Box::new(config)), None).expect("fits");
    ModuleSummary::new(&model)
}

#[test]
fn published_models_have_their_published_sizes() {
    let small = summary_of(&published());
    assert_eq!(small.parameters, 20_914_757_184);
    let experts = 24 * 3 * 32 * 2880 * 2880;
    assert_eq!(bytes(&small, "mxfp4"), (experts, experts / 32 * 17));
    // The sum of the sizes of the hub's tensors.
    assert_eq!(small.weight_bytes, 13_761_264_768);
    let mut large = published();
    let types: Vec<&str> = (0..36).map(|i| if i % 2 == 0 { "sliding_attention" } else { "full_attention" }).collect();
    for (key, value) in
        [("layer_types", json!(types)), ("num_hidden_layers", 36.into()), ("num_local_experts", 128.into())]
    {
        large[key] = value;
    }
    assert_eq!(summary_of(&large).parameters, 116_829_156_672);
}

#[test]
fn layers_whose_experts_are_not_converted_are_read_plainly() {
    let stays = |config: &mut Value| {
        let names = &mut config["quantization_config"]["modules_to_not_convert"];
        names.as_array_mut().expect("a list").push("model.layers.1.mlp".into());
    };
    let plain = |all: &mut Vec<Named>| {
        all.retain(|(name, ..)| !name.starts_with("model.layers.1.mlp.experts.") || name.ends_with("_bias"));
        for (projection, shape) in [("gate_up_proj", vec![4, 64, 128]), ("down_proj", vec![4, 64, 64])] {
            let name = format!("model.layers.1.mlp.experts.{projection}");
            let bytes = vec![0; 4 * shape.iter().product::<usize>()];
            all.push((name, Dtype::F32, shape, bytes));
        }
    };
    let folder = copy(stays, plain);
    let config = ModelFiles::open(Some(folder.path())).expect("opens").config().expect("reads");
    let graph = config.build(&BuildOptions::default()).expect("builds").module.graph;
    let stored = WeightSource::Checkpoint(Arc::new(arranged(folder.path()).expect("arranges")));
    let sources = [stored, WeightSource::RandomAsPublished(Box::new(config))];
    let typed = sources.map(|source| source.retype(&graph, None).expect("fits"));
    for graph in &typed {
        for arg in graph.args(Role::Weight) {
            let in_blocks = arg.name.starts_with("model.layers.0.mlp.experts.") && arg.name.ends_with(".weight");
            assert_eq!(arg.ty.format.is_some(), in_blocks, "{}", arg.name);
        }
    }
}

#[test]
fn what_is_no_mxfp4_of_gpt_oss_is_refused() {
    let refused = |config: &Value| {
        let read = ModelConfig::from_json("config.json", &config.to_string());
        read.map(|_| ()).expect_err("is refused").to_string()
    };
    let mut config = published();
    config["quantization_config"]["modules_to_not_convert"] = json!(["lm_(head|tail)"]);
    let why = refused(&config);
    assert!(why.contains("modules_to_not_convert") && why.contains("\"lm_(head|tail)\", which is no name"), "{why}");
    config = published();
    config["quantization_config"]["bits"] = 4.into();
    assert!(refused(&config).contains("unknown key quantization_config.bits = 4"), "{}", refused(&config));
    let llama = std::fs::read_to_string(fixtures().join("llama/gqa2_tied/config.json")).expect("a configuration");
    let mut llama: Value = serde_json::from_str(&llama).expect("JSON");
    llama["quantization_config"] = json!({"quant_method": "mxfp4"});
    let why = refused(&llama);
    assert!(why.contains("quantization_config.quant_method = \"mxfp4\" is not supported"), "{why}");
}

#[test]
fn codes_and_exponents_that_do_not_fit_each_other_are_refused() {
    const OF: &str = "model.layers.0.mlp.experts.down_proj";
    let find =
        |all: &mut Vec<Named>, end: &str| all.iter().position(|t| t.0 == format!("{OF}{end}")).expect("is there");
    let said = |change: &dyn Fn(&mut Vec<Named>)| {
        let folder = copy(|_| (), |all| change(all));
        arranged(folder.path()).map(|_| ()).expect_err("is refused")
    };
    let why = said(&|all| {
        let at = find(all, "_scales");
        all.remove(at);
    });
    assert!(why.contains(&format!("there is no tensor {OF}_scales for {OF}_blocks")), "{why}");
    let why = said(&|all| {
        let at = find(all, "_blocks");
        all.remove(at);
    });
    assert!(why.contains(&format!("there is no tensor {OF}_blocks of codes for {OF}_scales")), "{why}");
    let why = said(&|all| {
        let at = find(all, "_scales");
        all[at].2 = vec![4, 128];
        all[at].3.truncate(512);
    });
    assert!(why.contains("needs exponents u8[4, 64, 2], but has u8[4, 128]"), "{why}");
    let why = said(&|all| {
        let at = find(all, "_blocks");
        all[at].2 = vec![4, 64, 4, 8];
    });
    assert!(why.contains("has the shape [4, 64, 4, 8], but should have rows of blocks of 16 bytes"), "{why}");
    let why = said(&|all| all.push((OF.into(), Dtype::F32, vec![1], vec![0; 4])));
    assert!(why.contains(&format!("{OF} exists both plainly and in MXFP4")), "{why}");
}

#[test]
fn conversion_to_gguf_keeps_the_blocks() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("x.gguf");
    let files = ModelFiles::open(Some(&fixtures().join(NAME))).expect("opens");
    let written = to_gguf(&files, &path, &Quantisation::default(), |_, _| Ok(())).expect("writes");
    assert_eq!((written.tensors.get("mxfp4"), written.again), (Some(&6), 0));
    let checkpoint = arranged(&fixtures().join(NAME)).expect("arranges");
    let gguf = Gguf::open(&path).expect("opens");
    let mut compared = 0;
    for (file, name) in [("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")] {
        for layer in 0..2 {
            let tensor = gguf.tensors().iter().find(|t| t.name == format!("blk.{layer}.ffn_{file}_exps.weight"));
            let tensor = tensor.expect("is there");
            assert_eq!(tensor.storage.name(), "mxfp4");
            let bytes = checkpoint.bytes(&format!("model.layers.{layer}.mlp.experts.{name}.weight")).expect("is there");
            assert!(bytes.as_ref() == gguf.data(tensor), "{file} of {layer}");
            compared += 1;
        }
    }
    assert_eq!(compared, 6);
    let back = ModelFiles::open(Some(&path)).expect("opens");
    let config = back.config().expect("reads");
    let graph = config.build(&BuildOptions::default()).expect("builds").module.graph;
    let source = WeightSource::Checkpoint(Arc::new(back.checkpoint().expect("weights")));
    source.retype(&graph, None).expect("has the weights");
}
