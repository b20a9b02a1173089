//! Any bytes as a GGUF file, and as the rest of one after a valid beginning; and as an importance matrix. Whatever is
//! accepted is also asked for its configuration, tokenizer and weights.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ridge_models::Gguf;
use ridge_models::gguf::Importance;

fn check(bytes: Vec<u8>) {
    let Ok(gguf) = Gguf::from_bytes("x.gguf", bytes) else {
        return;
    };
    for value in gguf.metadata().values() {
        if let ridge_models::gguf::Value::Array(array) = value {
            assert_eq!(gguf.elements(array).len(), array.len);
        }
    }
    for tensor in gguf.tensors() {
        let _ = gguf.data(tensor).len();
    }
    let _ = (gguf.config_json(), gguf.pooling());
    if let Ok(checkpoint) = gguf.checkpoint() {
        for tensor in checkpoint.tensors() {
            let _ = tensor.data.len();
        }
    }
    if let Ok((tokenizer, config)) = gguf.tokenizer_json() {
        if let Ok(tokenizer) = ridge_models::Tokenizer::from_bytes("x.gguf", tokenizer.as_bytes()) {
            let _ = tokenizer.with_config("x.gguf", &config).and_then(|t| t.encode("Hello, y'all 3 😀", true));
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let _ = Importance::from_list("x.dat", bytes);
    check(bytes.to_vec());
    // A mutation seldom hits the first words.
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend(bytes);
    check(file);
});
