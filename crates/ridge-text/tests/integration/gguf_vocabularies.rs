//! Tokenizers made of GGUF metadata, beside the ids that llama.cpp gives for the same vocabularies.
//!
//! The vocabularies are files `ggml-vocab-*.gguf` with texts (`.inp`) and ids (`.out`) beside them, some 20 MB. The
//! folder that has them is named by `RIDGE_GGUF_VOCABULARIES`; without it this test is skipped.

use std::path::{Path, PathBuf};

use ridge_files::Gguf;
use ridge_text::Tokenizer;
use ridge_text::gguf::tokenizer_json;

const VARIABLE: &str = "RIDGE_GGUF_VOCABULARIES";

#[test]
fn every_text_beside_a_vocabulary_has_its_ids() {
    let Some(folder) = std::env::var_os(VARIABLE).map(PathBuf::from) else {
        ridge_testing::skip!("{VARIABLE} names no folder of ggml-vocab-*.gguf files");
    };
    let entries = folder.read_dir().unwrap_or_else(|e| panic!("{VARIABLE} = {}: {e}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("is listed").path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "gguf"));
    assert!(!files.is_empty(), "{VARIABLE} = {} holds no *.gguf file", folder.display());
    for file in files {
        let wrong = compare(&file);
        assert!(wrong.is_empty(), "{}: {} texts differ, such as {}", file.display(), wrong.len(), wrong[0]);
    }
}

fn compare(file: &Path) -> Vec<String> {
    let beside = |suffix: &str| {
        let path = format!("{}.{suffix}", file.display());
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
    };
    let (texts, ids) = (beside("inp"), beside("out"));
    let (json, config) = tokenizer_json(&Gguf::open(file).expect("opens")).expect("a tokenizer");
    let tokenizer = Tokenizer::from_bytes("x.gguf", json.as_bytes()).and_then(|t| t.with_config("x.gguf", &config));
    let tokenizer = tokenizer.expect("reads");
    let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
    let ids: Vec<Vec<u32>> =
        ids.lines().map(|line| line.split_whitespace().map(|id| id.parse().expect("an id")).collect()).collect();
    assert!(texts.len() >= ids.len() && ids.len() > 30, "{} texts, {} lines of ids", texts.len(), ids.len());
    let mut wrong = Vec::new();
    for (text, should) in texts.iter().zip(&ids) {
        let is = tokenizer.encode(text, false).expect("encodes");
        if is != *should {
            wrong.push(format!("{text:?}: {is:?} and not {should:?}"));
        }
    }
    wrong
}
