//! The chat templates among a model's files: which file and which key they are taken from.

use ridge_models::{ModelError, ModelFiles};
use ridge_text::TextError;
use ridge_text::template::{ChatInput, ChatTemplates, Clock, Data};

const NOW: Clock = Clock { year: 2024, month: 7, day: 6, hour: 15, minute: 4, second: 9 };

fn user(content: &str) -> ChatInput {
    let message = [("role".to_owned(), "user".into()), ("content".to_owned(), content.into())];
    ChatInput::new(vec![Data::Map(message.to_vec())], NOW)
}

/// A model's folder with these files.
fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [("config.json", "{}")].iter().chain(files) {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    folder
}

fn templates(files: &[(&str, &str)]) -> Result<ChatTemplates, ModelError> {
    ModelFiles::open(Some(folder(files).path()))?.chat_templates()
}

const CONFIG: &str = r#"{"bos_token": "<b>", "eos_token": {"content": "</b>", "lstrip": false}, "pad_token": null,
    "image_token": "<i>", "extra_special_tokens": {"box": "<x>"}, "chat_template": "config {{ bos_token }}"}"#;

#[test]
fn files_of_their_own_replace_the_template_of_the_config() {
    let text = |files: &[(&str, &str)], name| templates(files).unwrap().render(name, &user("hi")).unwrap().text;
    let config = ("tokenizer_config.json", CONFIG);
    let jinja = ("chat_template.jinja", "file {{ eos_token }}\n");
    let named = ("additional_chat_templates/rag.jinja", "rag");
    let legacy = ("chat_template.json", r#"{"chat_template": "legacy"}"#);
    assert_eq!(text(&[config], None), "config <b>");
    assert_eq!(text(&[config, legacy], None), "config <b>");
    assert_eq!(text(&[legacy], None), "legacy");
    assert_eq!(text(&[config, jinja, legacy], None), "file </b>");
    assert_eq!(text(&[config, jinja, named], None), "file </b>");
    assert_eq!(text(&[config, jinja, named], Some("rag")), "rag");
    let error = templates(&[config, named]).unwrap().select(None, true).unwrap_err().to_string();
    assert_eq!(error, "chat template: there is none named default; choose one of: rag");
    let error = templates(&[]).unwrap().select(None, false).unwrap_err().to_string();
    assert!(error.contains("the model has none"), "{error}");
}

#[test]
fn special_tokens_come_from_texts_objects_and_the_older_file() {
    let tokens = |files: &[(&str, &str)]| {
        let pairs = templates(files).unwrap().special_tokens().to_vec();
        pairs.into_iter().map(|(name, token)| format!("{name}={token}")).collect::<Vec<_>>().join(" ")
    };
    let map = ("special_tokens_map.json", r#"{"bos_token": "<m>", "unk_token": {"content": "<u>"}}"#);
    assert_eq!(tokens(&[("tokenizer_config.json", CONFIG)]), "bos_token=<b> eos_token=</b> image_token=<i> box=<x>");
    assert_eq!(
        tokens(&[("tokenizer_config.json", CONFIG), map]),
        "bos_token=<m> eos_token=</b> image_token=<i> box=<x> unk_token=<u>"
    );
    let newer = r#"{"bos_token": "<b>", "added_tokens_decoder": {}}"#;
    assert_eq!(tokens(&[("tokenizer_config.json", newer), map]), "bos_token=<b>");
}

#[test]
fn broken_template_matters_when_it_is_asked_for() {
    let config =
        r#"{"chat_template": [{"name": "default", "template": "fine"}, {"name": "rag", "template": "{% if %}"}]}"#;
    let set = templates(&[("tokenizer_config.json", config)]).unwrap();
    assert!(set.select(None, true).is_ok());
    let error = set.select(Some("rag"), false).unwrap_err().to_string();
    assert!(error.contains("(chat_template rag) line 1: expected an expression"), "{error}");
    for wrong in ["3", "[3]", r#"[{"name": "default"}]"#, r#"{"default": 3}"#] {
        let config = format!(r#"{{"chat_template": {wrong}}}"#);
        assert!(
            matches!(templates(&[("tokenizer_config.json", &config)]), Err(ModelError::Text(TextError::Value { .. }))),
            "{wrong}"
        );
    }
}

#[test]
fn embedded_model_has_no_chat_template() {
    assert!(ModelFiles::open(None).unwrap().chat_templates().unwrap().is_empty());
}
