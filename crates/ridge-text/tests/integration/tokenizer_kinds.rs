//! A tokenizer.json of every kind beside the Python library (`fixtures/tokenizer_kinds.py`): ids, text, and text that comes
//! token by token.

use std::cell::Cell;
use std::path::Path;

use ridge_text::Tokenizer;
use serde_json::Value;

const KINDS: [&str; 5] = ["byte_level", "byte_fallback", "unigram", "word_piece", "word_level"];

struct Case {
    text: String,
    /// With what the post-processor adds, and without.
    ids: Vec<u32>,
    bare: Vec<u32>,
    /// Text of `ids` without special tokens, and with them.
    decoded: String,
    kept: String,
}

fn read(kind: &str) -> (Tokenizer, Vec<Case>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tokenizers/kinds");
    let text = std::fs::read_to_string(folder.join(format!("{kind}.json"))).expect("a fixture");
    let value: Value = serde_json::from_str(&text).expect("JSON");
    let tokenizer = Tokenizer::from_bytes(kind, value["tokenizer"].to_string().as_bytes()).expect("a tokenizer");
    let ids = |v: &Value| v.as_array().expect("a list").iter().map(|id| id.as_u64().expect("an id") as u32).collect();
    let text = |v: &Value| v.as_str().expect("a text").to_owned();
    let case = |c: &Value| Case {
        text: text(&c["text"]),
        ids: ids(&c["ids"]),
        bare: ids(&c["bare"]),
        decoded: text(&c["decoded"]),
        kept: text(&c["kept"]),
    };
    (tokenizer, value["cases"].as_array().expect("a list").iter().map(case).collect())
}

#[test]
fn ids_and_text_are_those_of_the_python_library() {
    for kind in KINDS {
        let (tokenizer, cases) = read(kind);
        for case in cases {
            let what = format!("{kind}: {:?}", case.text);
            assert_eq!(tokenizer.encode(&case.text, true).expect("encodes"), case.ids, "{what}");
            assert_eq!(tokenizer.encode(&case.text, false).expect("encodes"), case.bare, "{what}");
            assert_eq!(tokenizer.decode(&case.ids, true).expect("decodes"), case.decoded, "{what}");
            assert_eq!(tokenizer.decode(&case.ids, false).expect("decodes"), case.kept, "{what}");
        }
    }
}

#[test]
fn text_that_comes_token_by_token_is_the_whole_text_without_half_a_character() {
    for kind in KINDS {
        let (tokenizer, cases) = read(kind);
        for case in cases {
            for (skip, want) in [(true, &case.decoded), (false, &case.kept)] {
                let mut decoder = tokenizer.stream_decoder(skip);
                let mut pieces: Vec<String> = case.ids.iter().map(|id| decoder.push(*id).expect("decodes")).collect();
                let last = decoder.finish().expect("decodes");
                let what = format!("{kind}: {:?}, special tokens skipped: {skip}", case.text);
                if !want.contains('\u{fffd}') {
                    assert!(
                        pieces.iter().chain([&last]).all(|piece| !piece.contains('\u{fffd}')),
                        "{what}: {pieces:?}"
                    );
                }
                pieces.push(last);
                assert_eq!(&pieces.concat(), want, "{what}: {pieces:?}");
            }
        }
    }
}

/// Cutting keeps what the post-processor adds on either side.
#[test]
fn a_cut_text_keeps_its_begin_and_end_tokens() {
    for kind in KINDS {
        let (tokenizer, cases) = read(kind);
        for case in cases {
            let added = case.ids.len() - case.bare.len();
            let before = case.ids.windows(case.bare.len().max(1)).position(|w| w == case.bare).unwrap_or(added.min(1));
            for most in added + 1..case.ids.len() + 2 {
                let cut = tokenizer.encode_truncated(&case.text, most).expect("fits");
                let kept = case.bare.len().min(most - added);
                let want = [&case.ids[..before], &case.bare[..kept], &case.ids[before + case.bare.len()..]].concat();
                assert_eq!(cut, want, "{kind}: {:?} cut to {most}", case.text);
            }
        }
    }
    let (tokenizer, _) = read("word_piece");
    let error = tokenizer.encode_truncated("the cat sat", 2).expect_err("no room").to_string();
    assert!(error.contains("cannot be cut to 2 tokens, of which 2 are added to any"), "{error}");
}

#[test]
fn the_longest_text_that_fits_is_found_in_a_few_attempts() {
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": { "x": 0, "a": 1, "|": 2 }, "unk_token": "x" },
    });
    let tokenizer = Tokenizer::from_bytes("test", tokenizer.to_string().as_bytes()).expect("a tokenizer");
    let calls = Cell::new(0);
    // A prompt that says of a text of less than 2,000 tokens that it was cut, in 500 tokens, beside 3 of its own.
    let prompt = |text: &str| {
        calls.set(calls.get() + 1);
        let cut = if text.split_whitespace().count() < 2000 { " |".repeat(500) } else { String::new() };
        Ok(format!("| | {text} |{cut}"))
    };
    let ids = |max: usize| tokenizer.encode_within("a ".repeat(2000).trim(), max, prompt);
    assert_eq!(ids(2003).expect("fits").len(), 2003);
    calls.set(0);
    let cut = ids(1503).expect("is cut");
    assert_eq!((cut.len(), cut.iter().filter(|id| **id == 1).count()), (1503, 1000));
    assert!(calls.get() <= 13, "{}", calls.get());
    assert!(ids(503).is_err());
    assert_eq!(ids(504).expect("is cut").len(), 504);
}
