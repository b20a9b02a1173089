//! Encoders beside transformers (fixtures/families): hidden states and pooled vectors, exactly and on the CPU, of a text
//! alone and in a batch without padding.

use crate::common::modules::{ModuleFixture, Step};
use crate::common::{cpu, fixtures, relative};
use ridge_graph::{Bindings, DType, Tensor};
use ridge_models::{BuildOptions, EncoderConfig, symbols};
use ridge_runtime::lower;

/// Every encoder.
const ENCODERS: [&str; 9] = [
    "bert",
    "big_bird",
    "distilbert",
    "gemma3_encoder",
    "longformer",
    "modernbert",
    "nomic_bert",
    "roberta",
    "xlm_roberta",
];

/// Every classifier: is its score a sigmoid?
const CLASSIFIERS: [(&str, bool); 7] = [
    ("bert_reranker", true),
    ("big_bird_reranker", true),
    ("distilbert_classifier", false),
    ("longformer_classifier", false),
    ("modernbert_reranker", true),
    ("qwen3_reranker", true),
    ("xlm_roberta_reranker", true),
];

/// The fixture, and texts of it.
pub(crate) struct Bert(pub(crate) ModuleFixture);

impl std::ops::Deref for Bert {
    type Target = ModuleFixture;

    fn deref(&self) -> &ModuleFixture {
        &self.0
    }
}

impl Bert {
    pub(crate) fn open() -> Self {
        Self::named("bert")
    }

    pub(crate) fn named(name: &str) -> Self {
        Self(ModuleFixture::open(&format!("families/{name}"), DType::F32))
    }

    /// Texts that the fixture calls `prefix`, of these lengths: the step's inputs.
    pub(crate) fn step(&self, prefix: &str, lengths: &[usize]) -> Step {
        let int = |values: Vec<i64>| Tensor::int(DType::I32, &[values.len()], values);
        let tokens = |name: &str| int(self.expected.tokens(&format!("{prefix}{name}")));
        let rows = lengths.iter().enumerate();
        let ids = rows.flat_map(|(i, n)| std::iter::repeat_n(i as i64, *n)).collect();
        let starts = (0..=lengths.len()).map(|i| lengths[..i].iter().sum::<usize>() as i64).collect();
        let (words, types) =
            if prefix.is_empty() { ("input_ids", "token_type_ids") } else { ("ids", "token_type_ids") };
        let inputs = vec![
            ("token_ids", tokens(words)),
            ("token_type_ids", tokens(types)),
            ("seq_ids", int(ids)),
            ("query_start", int(starts)),
        ];
        let total: usize = lengths.iter().sum();
        (inputs, Bindings::new().with(symbols::TOKENS, total).with(symbols::SEQS, lengths.len()))
    }
}

pub(crate) const ALONE: (&str, &[usize]) = ("", &[24]);
pub(crate) const BATCH: (&str, &[usize]) = ("batch_", &[13, 7]);

#[test]
fn the_graph_means_what_a_forward_pass_in_doubles_computes() {
    for name in ENCODERS {
        let fixture = Bert::named(name);
        let lowered = lower(fixture.graph(), &["hidden"], &[]).expect("lowers");
        for (prefix, lengths) in [ALONE, BATCH] {
            let step = fixture.step(prefix, lengths);
            let want = fixture.expected.tensor(&format!("{prefix}hidden_f64"));
            for graph in [fixture.graph(), &lowered] {
                let off = relative(fixture.exact(graph, &step, "hidden").floats(), want.floats());
                assert!(off < 1e-12, "{name} {prefix}: off by {off:e}");
            }
        }
    }
}

#[test]
fn hidden_states_are_as_near_to_exact_as_those_of_transformers() {
    for name in ENCODERS {
        let fixture = Bert::named(name);
        for (prefix, lengths) in [ALONE, BATCH] {
            let step = fixture.step(prefix, lengths);
            let got = fixture.judge(cpu(1), &step, "hidden", &format!("{prefix}hidden"));
            assert_eq!(fixture.on_cpu(&step, "hidden", 3).to_bytes(), got.to_bytes(), "{name} {prefix}: three threads");
        }
    }
}

#[test]
fn a_text_has_the_same_bits_alone_and_in_a_batch() {
    for name in ENCODERS {
        let fixture = Bert::named(name);
        let (inputs, bindings) = fixture.step(BATCH.0, BATCH.1);
        let together = fixture.on_cpu(&(inputs.clone(), bindings), "hidden", 2);
        let first = BATCH.1[0];
        let alone = inputs.iter().map(|(name, tensor)| {
            let values = match *name {
                "query_start" => vec![0, first as i64],
                _ => tensor.ints()[..first].to_vec(),
            };
            (*name, Tensor::int(DType::I32, &[values.len()], values))
        });
        let bindings = Bindings::new().with(symbols::TOKENS, first).with(symbols::SEQS, 1usize);
        let alone = fixture.on_cpu(&(alone.collect(), bindings), "hidden", 1);
        assert_eq!(alone.floats(), &together.floats()[..alone.len()], "{name}");
    }
}

#[test]
fn older_spellings_of_configurations_mean_the_same() {
    for name in ENCODERS.iter().chain(&CLASSIFIERS.map(|(name, _)| name)) {
        let graph = |file: &str| {
            let text = std::fs::read_to_string(fixtures().join("families").join(name).join(file)).expect("a file");
            let config = EncoderConfig::from_json(file, &text).unwrap_or_else(|e| panic!("{name}: {e}"));
            config.build(&BuildOptions::default()).expect("builds").module.graph
        };
        assert_eq!(graph("config.json"), graph("config_v4.json"), "{name}");
    }
}

/// The keys of the code that nomic-embed-text-v1.5 was published with.
#[test]
fn nomic_bert_is_read_with_the_keys_of_its_own_code() {
    let read = |changes: &[(&str, serde_json::Value)]| {
        let text = r#"{
            "activation_function": "swiglu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0, "bos_token_id": null,
            "causal": false, "dense_seq_output": true, "embd_pdrop": 0.0, "eos_token_id": null, "fused_bias_fc": true,
            "fused_dropout_add_ln": true, "initializer_range": 0.02, "layer_norm_epsilon": 1e-12,
            "max_trained_positions": 2048, "mlp_fc1_bias": false, "mlp_fc2_bias": false, "model_type": "nomic_bert",
            "n_embd": 32, "n_head": 4, "n_inner": 24, "n_layer": 2, "n_positions": 40, "pad_vocab_size_multiple": 64,
            "parallel_block": false, "parallel_block_tied_norm": false, "prenorm": false, "qkv_proj_bias": false,
            "reorder_and_upcast_attn": false, "resid_pdrop": 0.0, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
            "rotary_emb_interleaved": false, "rotary_emb_scale_base": null, "rotary_scaling_factor": null,
            "scale_attn_by_inverse_layer_idx": false, "scale_attn_weights": true, "torch_dtype": "float32",
            "transformers_version": "4.34.0", "type_vocab_size": 2, "use_cache": true, "use_flash_attn": true,
            "use_rms_norm": false, "use_xentropy": true, "vocab_size": 48
        }"#;
        let mut config: serde_json::Value = serde_json::from_str(text).expect("JSON");
        changes.iter().for_each(|(key, value)| config[*key] = value.clone());
        EncoderConfig::from_json("config.json", &config.to_string())
    };
    let text = std::fs::read_to_string(fixtures().join("families/nomic_bert/config.json")).expect("a file");
    let of_transformers = EncoderConfig::from_json("config.json", &text).expect("reads");
    let graph = |config: EncoderConfig| config.build(&BuildOptions::default()).expect("builds").module.graph;
    assert!(graph(read(&[]).expect("reads")) == graph(of_transformers), "the graphs differ");
    for (key, value) in
        [("rotary_scaling_factor", 2.0.into()), ("prenorm", true.into()), ("qkv_proj_bias", true.into())]
    {
        let error = read(&[(key, value)]).expect_err("is refused").to_string();
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn pooled_vectors_are_those_of_torch() {
    let fixture = Bert::open();
    for (output, name) in [
        ("mean", "pooled_mean_f64"),
        ("cls", "pooled_cls_f64"),
        ("mean_normalized", "pooled_mean_l2_f64"),
        ("cls_normalized", "pooled_cls_l2_f64"),
    ] {
        let want = fixture.expected.tensor(name);
        let rows = [ALONE, BATCH].map(|(prefix, lengths)| {
            let step = fixture.step(prefix, lengths);
            let exact = fixture.exact(fixture.graph(), &step, output);
            let off = relative(fixture.on_cpu(&step, output, 2).floats(), exact.floats());
            assert!(off < 1e-5, "{output} on the CPU is off by {off:e}");
            exact.floats().to_vec()
        });
        let off = relative(&rows.concat(), want.floats());
        assert!(off < 1e-12, "{output}: off by {off:e}");
    }
    // The last token's, and the largest of each element, by hand.
    let step = fixture.step(BATCH.0, BATCH.1);
    let hidden = fixture.exact(fixture.graph(), &step, "hidden");
    let width = hidden.shape[1];
    let row = |i: usize| &hidden.floats()[i * width..(i + 1) * width];
    assert_eq!(fixture.exact(fixture.graph(), &step, "last").floats(), [row(12), row(19)].concat());
    let largest = |rows: std::ops::Range<usize>| {
        (0..width).map(|i| rows.clone().map(|r| row(r)[i]).fold(f64::MIN, f64::max)).collect::<Vec<_>>()
    };
    assert_eq!(fixture.exact(fixture.graph(), &step, "max").floats(), [largest(0..13), largest(13..20)].concat());
}

#[test]
fn parameters_are_counted() {
    // Of 96 words, 48 positions and 2 segments of 32, and two layers.
    let layer = 4 * (32 * 32 + 32) + 2 * 32 * 48 + 48 + 32 + 4 * 32;
    assert_eq!(Bert::open().network.module().parameter_count(), (96 + 48 + 2) * 32 + 2 * 32 + 2 * layer);
}

#[test]
fn classifiers_give_the_logits_of_transformers() {
    for (name, sigmoid) in CLASSIFIERS {
        let fixture = Bert::named(name);
        for (prefix, lengths) in [ALONE, BATCH] {
            let step = fixture.step(prefix, lengths);
            let want = fixture.expected.tensor(&format!("{prefix}class_logits_f64"));
            let exact = fixture.exact(fixture.graph(), &step, "class_logits");
            let off = relative(exact.floats(), want.floats());
            assert!(off < 1e-12, "{name} {prefix}: off by {off:e}");
            fixture.judge(cpu(1), &step, "class_logits", &format!("{prefix}class_logits"));
            // A single label is scored by its sigmoid.
            let scores = fixture.exact(fixture.graph(), &step, "scores");
            let score = |logit: &f64| if sigmoid { 1.0 / (1.0 + (-logit).exp()) } else { *logit };
            let wanted: Vec<f64> = want.floats().iter().map(score).collect();
            assert!(relative(scores.floats(), &wanted) < 1e-12, "{name} {prefix}");
        }
    }
}

#[test]
fn a_summary_counts_the_pairs_within_windows() {
    let fixture = Bert::named("modernbert");
    let ridge_models::Network::Encoder(encoder) = &fixture.network else { panic!("it is an encoder") };
    let flops = |tokens| {
        ridge_models::summary::EncoderSummary::new(encoder, tokens).expect("binds all symbols").text.matrix_flops
    };
    // Two layers of windows of 5 to each side and one without: from 20 tokens to 21 two times 9 pairs and 41, of 4 operations for
    // each of 32 elements, beside what each token multiplies.
    let (a, b, c) = (flops(20), flops(21), flops(22));
    assert_eq!((c - b) - (b - a), 2 * 4 * 32);
}

#[test]
fn texts_of_block_sparse_models_are_as_long_as_their_positions() {
    let read = |changes: &str| {
        let text = std::fs::read_to_string(fixtures().join("families/big_bird/config.json")).expect("a file");
        let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let changes: serde_json::Value = serde_json::from_str(changes).expect("JSON");
        changes.as_object().expect("an object").iter().for_each(|(key, value)| config[key] = value.clone());
        EncoderConfig::from_json("config.json", &config.to_string())
    };
    // Where all texts are so short that every token is seen, no blocks are computed.
    for (changes, blocks) in [
        ("{}", true),
        (r#"{"block_size": 5}"#, true),
        (r#"{"block_size": 64, "num_random_blocks": 3}"#, false),
        (r#"{"attention_type": "original_full"}"#, false),
    ] {
        let encoder = read(changes).expect("reads").build(&BuildOptions::default()).expect("builds");
        assert_eq!(encoder.max_context, 40, "{changes}");
        assert_eq!(encoder.graph.to_string().contains("block_sparse_attention"), blocks, "{changes}");
    }
    let error = read(r#"{"attention_type": "sparse"}"#).expect_err("is refused").to_string();
    assert!(error.contains("attention_type") && error.contains("original_full"), "{error}");
}

#[test]
fn windows_of_longformer_are_those_of_its_layers() {
    let text = std::fs::read_to_string(fixtures().join("families/longformer/config.json")).expect("a file");
    for windows in ["[4]", "[4, 5]", "[4, 0]", "7"] {
        let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        config["attention_window"] = serde_json::from_str(windows).expect("JSON");
        let error = EncoderConfig::from_json("config.json", &config.to_string()).expect_err("is refused").to_string();
        assert!(error.contains("attention_window"), "{windows}: {error}");
    }
}

#[test]
fn classes_of_decoders_read_as_encoders_have_the_stem_of_the_class_with_a_head() {
    for (family, stem, head) in [("gpt2", "GPT2", "GPT2LMHeadModel"), ("qwen3", "Qwen3", "Qwen3ForCausalLM")] {
        let path = fixtures().join("families").join(family).join("config.json");
        let text = std::fs::read_to_string(path).expect("a fixture");
        let read = |class: &str| {
            let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            config["architectures"] = serde_json::json!([class]);
            EncoderConfig::from_json("config.json", &config.to_string())
        };
        for class in [head.to_owned(), format!("{stem}Model"), format!("{stem}ForSequenceClassification")] {
            let config = read(&class).unwrap_or_else(|e| panic!("{class}: {e}"));
            assert_eq!(config.classifier.is_some(), class.ends_with("Classification"), "{class}");
        }
        assert!(read(&format!("{head}ForSequenceClassification")).is_err());
    }
}
