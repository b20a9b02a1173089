//! Where models come from: the embedded one works whole, and a wrong path says what would be right.

use std::path::Path;

use ridge_graph::DType;
use ridge_models::{ModelFiles, embedded};

fn refusal(path: &Path) -> String {
    ModelFiles::open(Some(path)).unwrap_err().to_string()
}

/// The embedded model written out as a folder.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let model = &embedded::STORIES_260K;
    for (name, bytes) in [
        ("config.json", model.config.as_bytes()),
        ("model.safetensors", model.weights),
        ("tokenizer.json", model.tokenizer.as_bytes()),
        ("tokenizer_config.json", model.tokenizer_config.as_bytes()),
    ] {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

#[test]
fn embedded_model_is_whole() {
    let files = ModelFiles::open(None).unwrap();
    assert!(files.is_embedded());
    assert_eq!(files.to_string(), "stories260K (embedded)");
    let config = files.llama_config().unwrap();
    assert_eq!((config.hidden_size, config.num_hidden_layers), (64, 5));
    assert_eq!((config.bos_token_id, config.eos_token_ids.as_slice()), (Some(1), &[2][..]));
    let checkpoint = files.checkpoint().unwrap();
    let embedding = checkpoint.tensor("model.embed_tokens.weight").unwrap();
    assert_eq!(embedding.shape, [config.vocab_size, config.hidden_size]);
    assert_eq!(embedding.dtype, DType::F32);
    let tokenizer = files.tokenizer().unwrap();
    assert_eq!(tokenizer.vocab_size(), config.vocab_size);
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
}

#[test]
fn folder_reads_as_the_embedded_model_does() {
    let dir = folder();
    let (a, b) = (ModelFiles::open(Some(dir.path())).unwrap(), ModelFiles::open(None).unwrap());
    assert!(!a.is_embedded());
    assert_eq!(a.llama_config().unwrap(), b.llama_config().unwrap());
    let (ca, cb) = (a.checkpoint().unwrap(), b.checkpoint().unwrap());
    assert_eq!(ca.len(), cb.len());
    for tensor in ca.tensors() {
        assert_eq!(tensor.data, cb.tensor(tensor.name).unwrap().data);
    }
    let text = "Once upon a time";
    assert_eq!(a.tokenizer().unwrap().encode(text, true).unwrap(), b.tokenizer().unwrap().encode(text, true).unwrap());
}

#[test]
fn config_alone_is_enough_to_open() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), embedded::STORIES_260K.config).unwrap();
    let files = ModelFiles::open(Some(dir.path())).unwrap();
    files.llama_config().unwrap();
    let message = files.checkpoint().unwrap_err().to_string();
    assert!(message.contains("contains no *.safetensors file; download"), "{message}");
    let message = files.tokenizer().unwrap_err().to_string();
    assert!(message.contains("holds no tokenizer.json; download"), "{message}");
    std::fs::write(dir.path().join("tokenizer.model"), "").unwrap();
    let message = files.tokenizer().unwrap_err().to_string();
    assert!(message.contains("SentencePiece"), "{message}");
}

#[test]
fn configuration_file_alone_has_neither_weights_nor_tokenizer() {
    let dir = folder();
    let whole = ModelFiles::open(Some(dir.path())).unwrap();
    assert!(whole.has_weights() && whole.has_tokenizer());
    let path = dir.path().join("config.json");
    let files = ModelFiles::from_config(&path).unwrap();
    assert_eq!(files.llama_config().unwrap(), whole.llama_config().unwrap());
    assert!(!files.has_weights() && !files.has_tokenizer());
    let message = files.checkpoint().unwrap_err().to_string();
    assert!(message.starts_with(&path.display().to_string()) && message.contains("has no weights"), "{message}");
    let message = files.tokenizer().unwrap_err().to_string();
    assert!(message.contains("give a folder that holds a tokenizer too"), "{message}");
}

#[test]
fn generation_config_overrides_the_end_tokens() {
    let dir = folder();
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [2, 5]}"#).unwrap();
    let files = ModelFiles::open(Some(dir.path())).unwrap();
    assert_eq!(files.llama_config().unwrap().eos_token_ids, [2, 5]);
}

#[test]
fn repository_name_in_place_of_a_folder_says_how_to_download() {
    let message = refusal(Path::new("meta-llama/Llama-3.1-8B"));
    assert!(message.contains("this folder does not exist"), "{message}");
    assert!(message.contains("run `ridge pull meta-llama/Llama-3.1-8B`"), "{message}");
}

#[test]
fn wrong_paths_say_what_would_be_right() {
    let dir = folder();
    let message = refusal(&dir.path().join("config.json"));
    assert!(message.contains("it is a file, and a model is a folder"), "{message}");
    assert!(message.contains(&dir.path().display().to_string()), "{message}");
    let message = refusal(&dir.path().join("none"));
    assert!(message.contains("there is no such folder"), "{message}");
    let message = refusal(&dir.path().join("none.gguf"));
    assert!(message.contains("there is no such file"), "{message}");
    std::fs::remove_file(dir.path().join("config.json")).unwrap();
    assert!(refusal(dir.path()).contains("holds no config.json"));
    std::fs::write(dir.path().join("params.json"), "{}").unwrap();
    assert!(refusal(dir.path()).contains("Meta's own layout"));
}

#[test]
fn errors_name_the_file_in_the_folder() {
    let dir = folder();
    let path = dir.path().join("config.json");
    std::fs::write(&path, r#"{"model_type": "mixtral"}"#).unwrap();
    let message = ModelFiles::open(Some(dir.path())).unwrap().llama_config().unwrap_err().to_string();
    assert!(message.starts_with(&format!("{}: model_type", path.display())), "{message}");
}
