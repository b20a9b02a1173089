//! Any bytes as a GGUF file, and as the rest of one after a valid beginning; and as an importance matrix. Whatever is
//! accepted is also asked for its configuration, tokenizer and weights.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ridge_files::Gguf;
use ridge_files::gguf::{GgufValue, ImportanceMatrix};
use ridge_models::gguf::{checkpoint, config_json, pooling};
use ridge_text::Tokenizer;
use ridge_text::gguf::tokenizer_json;

fn check(bytes: Vec<u8>) {
    let Ok(gguf) = Gguf::from_bytes("x.gguf", bytes) else {
        return;
    };
    for value in gguf.metadata().values() {
        if let GgufValue::Array(array) = value {
            assert_eq!(gguf.elements(array).count(), array.len);
        }
    }
    for tensor in gguf.tensors() {
        let _ = gguf.data(tensor).len();
    }
    let _ = (config_json(&gguf), pooling(&gguf));
    if let Ok(checkpoint) = checkpoint(&gguf) {
        for tensor in checkpoint.tensors() {
            let _ = tensor.data.len();
        }
    }
    if let Ok((tokenizer, config)) = tokenizer_json(&gguf) {
        if let Ok(tokenizer) = Tokenizer::from_bytes("x.gguf", tokenizer.as_bytes()) {
            let _ = tokenizer.with_config("x.gguf", &config).and_then(|t| t.encode("Hello, y'all 3 😀", true));
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let _ = ImportanceMatrix::from_list("x.dat", bytes);
    check(bytes.to_vec());
    // A mutation seldom hits the first words.
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend(bytes);
    check(file);
});
