//! Any bytes as `tokenizer.json`, then a text there and back, whole and streamed.
#![no_main]

use std::sync::Once;

use libfuzzer_sys::fuzz_target;
use ridge_text::Tokenizer;

static QUIET: Once = Once::new();

fuzz_target!(|bytes: &[u8]| {
    // The fuzzer's panic hook aborts even where a panic is caught, and catching those of the tokenizer library is what
    // is tested. A panic that is not caught still ends the run.
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| ())));
    let Ok(tokenizer) = Tokenizer::from_bytes("tokenizer.json", bytes) else {
        return;
    };
    let Ok(ids) = tokenizer.encode("Once upon 中 <s> a\u{301} 😀", true) else {
        return;
    };
    let _ = tokenizer.decode(&ids, true);
    let mut stream = tokenizer.stream_decoder(false);
    for id in ids.into_iter().chain(0..8) {
        if stream.push(id).is_err() {
            return;
        }
    }
    let _ = stream.finish();
});
