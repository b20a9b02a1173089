//! Models with modules of sentence-transformers beside that library (fixtures/sentences): what lies behind pooling.

use std::path::Path;

use crate::common::modules::{ModuleFixture, Step};
use crate::common::{cpu, fixtures, relative};
use crate::encoders::{ALONE, BATCH, Bert};
use ridge_graph::{Bindings, DType, Tensor};
use ridge_models::{DenseActivation, ModelFiles, Network, NetworkConfig, Pooling, SentenceConfig, WordScore, symbols};

/// Each with its way of pooling, whether a norm is at the end, and the last layer's width.
const MODELS: [(&str, Pooling, bool, usize); 2] =
    [("bert", Pooling::Cls, false, 12), ("gemma3_encoder", Pooling::Mean, true, 16)];

/// A copy of the model with its modules.
fn folder(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "model.safetensors"] {
        let from = fixtures().join("families").join(name).join(file);
        std::fs::copy(from, folder.path().join(file)).expect("copies");
    }
    copy(&fixtures().join("sentences").join(name), folder.path());
    folder
}

fn copy(from: &Path, to: &Path) {
    for entry in from.read_dir().expect("is there") {
        let (path, to) = entry.map(|e| (e.path(), to.join(e.file_name()))).expect("is listed");
        if path.is_dir() {
            std::fs::create_dir(&to).expect("makes the folder");
            copy(&path, &to);
        } else {
            std::fs::copy(&path, &to).expect("copies");
        }
    }
}

fn files(folder: &tempfile::TempDir) -> ModelFiles {
    ModelFiles::open(Some(folder.path())).expect("a model")
}

/// The message of the refusal of modules that `change` changes in file `name`.
fn refusal(name: &str, change: impl Fn(&str) -> String) -> String {
    let folder = folder("bert");
    let path = folder.path().join(name);
    let text = std::fs::read_to_string(&path).expect("a file");
    let changed = change(&text);
    assert_ne!(text, changed);
    std::fs::write(&path, changed).expect("writes");
    let files = files(&folder);
    let made = files.sentence_config().and_then(|said| files.embedding_config(&said.expect("has modules")));
    made.expect_err("is refused").to_string()
}

/// A step of texts of these tokens and lengths.
fn step_of(ids: Vec<i64>, lengths: &[usize]) -> Step {
    let int = |values: Vec<i64>| Tensor::int(DType::I32, &[values.len()], values);
    let total = ids.len();
    let rows = lengths.iter().enumerate().flat_map(|(i, n)| std::iter::repeat_n(i as i64, *n)).collect();
    let starts = (0..=lengths.len()).map(|i| lengths[..i].iter().sum::<usize>() as i64).collect();
    let inputs = vec![
        ("token_ids", int(ids)),
        ("token_type_ids", int(vec![0; total])),
        ("seq_ids", int(rows)),
        ("query_start", int(starts)),
    ];
    (inputs, Bindings::new().with(symbols::TOKENS, total).with(symbols::SEQS, lengths.len()))
}

#[test]
fn vectors_are_those_of_the_library() {
    for (name, pooling, normalize, width) in MODELS {
        let folder = folder(name);
        let files = files(&folder);
        let sentence = files.sentence_config().expect("reads").expect("has modules");
        assert_eq!((sentence.pooling, sentence.normalize), (pooling, normalize), "{name}");
        assert_eq!(sentence.dense.last().map(|layer| layer.to), Some(width), "{name}");
        let config = files.embedding_config(&sentence).expect("is supported");
        let expected = format!("sentences/{name}/expected.safetensors");
        let fixture = ModuleFixture::of(&files, &config, &expected, DType::F32);
        let output = pooling.output(normalize);
        // The texts are of the family's own fixture.
        let texts = Bert::named(name);
        let [alone, batch] = [ALONE, BATCH].map(|(prefix, lengths)| texts.step(prefix, lengths));
        let exact =
            [&alone, &batch].map(|step| fixture.exact(fixture.graph(), step, &output).floats().to_vec()).concat();
        let want = fixture.expected.tensor("sentence_f64");
        let off = relative(&exact, want.floats());
        assert!(off < 1e-12, "{name}: off by {off:e}");
        for (step, rows) in [(&alone, 0..1), (&batch, 1..3)] {
            let got = fixture.on(cpu(2), step, &output);
            let off = relative(got.floats(), &exact[rows.start * width..rows.end * width]);
            assert!(off < 1e-5, "{name} on the CPU: off by {off:e}");
        }
    }
}

#[test]
fn the_layers_are_parameters_of_the_network() {
    let folder = folder("bert");
    let files = files(&folder);
    let sentence = files.sentence_config().expect("reads").expect("has modules");
    let activations: Vec<DenseActivation> = sentence.dense.iter().map(|layer| layer.activation).collect();
    use DenseActivation::{Gelu, Relu, Sigmoid, Silu, Tanh};
    assert_eq!(activations, [Tanh, Gelu, Silu, Relu, Sigmoid]);
    let count = |network: Network| network.module().parameter_count();
    let options = ridge_models::BuildOptions::default();
    let [plain, with] = [files.network_config(), files.embedding_config(&sentence)]
        .map(|config| count(config.expect("reads").build(&options).expect("builds")));
    let layers = (32 + 1) * 24 + (24 + 1) * 20 + 20 * 28 + (28 + 1) * 18 + (18 + 1) * 12;
    assert_eq!(with - plain, layers);
}

#[test]
fn modules_that_ridge_does_not_run_are_refused_by_key() {
    let said = refusal("2_Dense/config.json", |text| text.replace("Tanh", "Softmax"));
    assert!(said.contains("activation_function") && said.contains("Sigmoid"), "{said}");
    let said = refusal("2_Dense/config.json", |text| text.replace('{', "{\"use_residual\": true,"));
    assert!(said.contains("use_residual"), "{said}");
    let said = refusal("3_Dense/config.json", |text| text.replace("\"in_features\": 24", "\"in_features\": 25"));
    assert!(said.contains("3_Dense") && said.contains("in_features = 25") && said.contains("24"), "{said}");
    let said = refusal("2_Dense/config.json", |text| {
        text.replace("\"module_input_name\": \"sentence_embedding\"", "\"module_input_name\": \"token_embeddings\"")
    });
    assert!(said.contains("module_input_name"), "{said}");
    // A module behind the norm, and pooling behind a layer.
    let said = refusal("modules.json", |text| text.replace("models.Pooling", "models.Normalize"));
    assert!(said.contains("out of order"), "{said}");
    let behind = r#"[{"path": "2_Dense", "type": "x.Dense"}, {"path": "1_Pooling", "type": "x.Pooling"}]"#;
    let said = refusal("modules.json", |_| behind.to_owned());
    assert!(said.contains("out of order"), "{said}");
    let said = refusal("1_Pooling/config.json", |text| text.replace("\"cls\"", "\"weightedmean\""));
    assert!(said.contains("pooling_mode"), "{said}");
    let said = refusal("modules.json", |text| text.replace("2_Dense", "../2_Dense"));
    assert!(said.contains("path"), "{said}");
}

/// Decoders whose files say how texts become vectors are read without a cache: the hidden states are the same.
#[test]
fn a_decoder_with_modules_has_the_hidden_states_of_its_cached_graph() {
    let folder = tempfile::tempdir().expect("a folder");
    copy(&fixtures().join("families/qwen3"), folder.path());
    std::fs::create_dir(folder.path().join("1_Pooling")).expect("makes the folder");
    let modules = r#"[{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]"#;
    std::fs::write(folder.path().join("modules.json"), modules).expect("writes");
    let pooling = r#"{"pooling_mode_lasttoken": true, "word_embedding_dimension": 32}"#;
    std::fs::write(folder.path().join("1_Pooling/config.json"), pooling).expect("writes");
    let files = files(&folder);
    let sentence = files.sentence_config().expect("reads").expect("has modules");
    assert_eq!(sentence.pooling, Pooling::Last);
    let config = files.embedding_config(&sentence).expect("is supported");
    let fixture = ModuleFixture::of(&files, &config, "families/qwen3/expected.safetensors", DType::F32);
    let Network::Encoder(encoder) = &fixture.network else { panic!("is read as an encoder") };
    assert!(encoder.causal);
    // The output projection gives the logits of transformers from them.
    let ids = fixture.expected.tokens("input_ids");
    let lengths = [ids.len()];
    let step = step_of(ids, &lengths);
    let hidden = fixture.exact(fixture.graph(), &step, "hidden");
    let checkpoint = ridge_files::Checkpoint::open(folder.path()).expect("opens");
    let table = checkpoint.tensor("model.embed_tokens.weight").expect("is tied");
    let table = Tensor::from_bytes(DType::F32, table.shape, table.data);
    let width = hidden.shape[1];
    let rows = |of: &Tensor| of.floats().chunks(width).map(<[f64]>::to_vec).collect::<Vec<_>>();
    let (hidden, table) = (rows(&hidden), rows(&table));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let logits: Vec<f64> = hidden.iter().flat_map(|h| table.iter().map(|word| dot(h, word))).collect();
    let off = relative(&logits, fixture.expected.tensor("logits_f64").floats());
    assert!(off < 1e-12, "off by {off:e}");
}

/// The probability of one token after a text rather than another, of decoders with and without an output projection of their own,
/// factors and caps of logits.
#[test]
fn decoders_score_texts_by_the_words_that_they_would_write() {
    for name in ["qwen3", "mistral", "gemma2", "granite"] {
        let files = ModelFiles::open(Some(&fixtures().join("families").join(name))).expect("a model");
        let (yes, no) = (7, 11);
        for (no, sigmoid) in [(Some(no), true), (Some(no), false), (None, false)] {
            let words = Some(WordScore { yes, no, sigmoid });
            let sentence = SentenceConfig { words, ..SentenceConfig::default() };
            let config = files.embedding_config(&sentence).expect("is supported");
            let expected = format!("families/{name}/expected.safetensors");
            let fixture = ModuleFixture::of(&files, &config, &expected, DType::F32);
            let (ids, lengths) = (fixture.expected.tokens("batch_ids"), fixture.expected.tokens("batch_lens"));
            let lengths: Vec<usize> = lengths.iter().map(|n| *n as usize).collect();
            let step = step_of(ids, &lengths);
            let logits = fixture.expected.tensor("batch_logits_f64");
            let vocab = logits.shape[1];
            let ends = lengths.iter().scan(0, |end, n| {
                *end += n;
                Some(*end - 1)
            });
            let score = |row: usize| {
                let logit = |word: u32| logits.floats()[row * vocab + word as usize];
                let score = logit(yes) - no.map_or(0.0, logit);
                if sigmoid { 1.0 / (1.0 + (-score).exp()) } else { score }
            };
            let want: Vec<f64> = ends.map(score).collect();
            let exact = fixture.exact(fixture.graph(), &step, "scores");
            let off = relative(exact.floats(), &want);
            assert!(off < 1e-11, "{name}: off by {off:e}");
            let off = relative(fixture.on_cpu(&step, "scores", 2).floats(), &want);
            assert!(off < 1e-4, "{name} on the CPU: off by {off:e}");
        }
        let words = Some(WordScore { yes: 7, no: Some(1 << 20), sigmoid: true });
        let error = files.embedding_config(&SentenceConfig { words, ..SentenceConfig::default() });
        let error = error.expect_err("is refused").to_string();
        assert!(error.contains("vocab_size"), "{error}");
    }
}

#[test]
fn a_module_says_by_which_words_texts_are_scored() {
    let folder = tempfile::tempdir().expect("a folder");
    copy(&fixtures().join("families/qwen3"), folder.path());
    std::fs::create_dir(folder.path().join("1_LogitScore")).expect("makes the folder");
    let modules =
        r#"[{"path": "", "type": "x.Transformer"}, {"path": "1_LogitScore", "type": "x.logit_score.LogitScore"}]"#;
    std::fs::write(folder.path().join("modules.json"), modules).expect("writes");
    let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("writes");
    let words = || files(&folder).sentence_config().map(|said| said.expect("has modules").words.expect("has words"));
    put("1_LogitScore/config.json", r#"{"true_token_id": 9, "false_token_id": null}"#);
    assert_eq!(words().expect("reads"), WordScore { yes: 9, no: None, sigmoid: true });
    put("1_LogitScore/config.json", r#"{"true_token_id": 9, "false_token_id": 4}"#);
    put("config_sentence_transformers.json", r#"{"activation_fn": "torch.nn.modules.linear.Identity"}"#);
    assert_eq!(words().expect("reads"), WordScore { yes: 9, no: Some(4), sigmoid: false });
    put("config_sentence_transformers.json", r#"{"activation_fn": "torch.nn.modules.activation.Tanh"}"#);
    assert!(words().expect_err("is refused").to_string().contains("activation_fn"));
}

#[test]
fn the_default_prompt_is_read_or_refused_by_key() {
    const LIBRARY: &str = "config_sentence_transformers.json";
    let folder = folder("gemma3_encoder");
    let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("writes");
    let sentence = || files(&folder).sentence_config().map(|said| said.expect("has modules"));
    let refusal = |text: &str| {
        put(LIBRARY, text);
        sentence().expect_err("is refused").to_string()
    };
    // Prompts that are not the default are those of calls which name them.
    put(
        LIBRARY,
        r#"{"__version__": {"pytorch": "2.9"}, "model_type": "SentenceTransformer", "similarity_fn_name": "cosine",
            "prompts": {"query": "w5 w6 ", "document": ""}, "default_prompt_name": null}"#,
    );
    assert_eq!(sentence().expect("reads").prompted("w7"), "w7");
    put(LIBRARY, r#"{"prompts": {"query": "w5 w6 ", "document": ""}, "default_prompt_name": "document"}"#);
    assert_eq!(sentence().expect("reads").prompt, None);
    let query = r#"{"prompts": {"query": "w5 w6 ", "document": ""}, "default_prompt_name": "query"}"#;
    put(LIBRARY, query);
    assert_eq!(sentence().expect("reads").prompted("w7"), "w5 w6 w7");
    let said = refusal(r#"{"prompts": {"query": "w5 "}, "default_prompt_name": "other"}"#);
    assert!(said.contains("default_prompt_name"), "{said}");
    assert!(refusal(r#"{"prompts": {}, "more": 1}"#).contains("more"));
    // Ridge pools the tokens of the prompt as well.
    put("1_Pooling/config.json", r#"{"pooling_mode": "mean", "include_prompt": false}"#);
    let said = refusal(query);
    assert!(said.contains("default_prompt_name") && said.contains("include_prompt"), "{said}");
}

#[test]
fn the_librarys_file_says_what_becomes_of_a_classifiers_logits() {
    let folder = tempfile::tempdir().expect("a folder");
    copy(&fixtures().join("families/bert_reranker"), folder.path());
    let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("writes");
    put("modules.json", r#"[{"path": "", "type": "x.Transformer"}]"#);
    for (name, sigmoid) in [("linear.Identity", false), ("activation.Sigmoid", true)] {
        put("config_sentence_transformers.json", &format!(r#"{{"activation_fn": "torch.nn.modules.{name}"}}"#));
        let files = files(&folder);
        let sentence = files.sentence_config().expect("reads").expect("has modules");
        let config = files.embedding_config(&sentence).expect("is supported");
        let NetworkConfig::Encoder(config) = config else { panic!("is an encoder") };
        assert_eq!(config.classifier.expect("is a classifier").sigmoid, sigmoid, "{name}");
    }
}
