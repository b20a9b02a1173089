//! GPT-2's tokenizer: ids as published, added tokens as in the Python library, and streaming of bytes.

use std::path::PathBuf;

use ridge_text::Tokenizer;
use serde_json::Value;

fn fixture(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tokenizers").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn json(name: &str) -> Value {
    serde_json::from_str(&fixture(name)).unwrap()
}

fn gpt2() -> Tokenizer {
    Tokenizer::from_bytes("gpt2", fixture("gpt2_reduced.json").as_bytes()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The published texts with their ids.
fn published() -> Vec<(String, Vec<u32>)> {
    let pairs = json("gpt2_texts.json");
    let pairs: Vec<_> =
        pairs.as_array().unwrap().iter().map(|pair| (pair[0].as_str().unwrap().to_owned(), ids(&pair[1]))).collect();
    assert_eq!(pairs.len(), 46);
    pairs
}

/// The pieces that streaming gives, `finish` included.
fn stream(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut decoder = tokenizer.stream_decoder(skip_special);
    let mut pieces: Vec<String> = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
    pieces.push(decoder.finish().unwrap());
    pieces
}

#[test]
fn ids_of_gpt2_are_the_published_ones() {
    let tokenizer = gpt2();
    for (text, ids) in published() {
        assert_eq!(tokenizer.encode(&text, false).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.encode(&text, true).unwrap(), ids, "{text:?}: GPT-2 adds nothing");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    }
}

#[test]
fn added_tokens_are_found_and_decoded_as_in_the_python_library() {
    let reduced = json("gpt2_reduced.json");
    let mut seen = 0;
    for case in json("added_tokens.json")["cases"].as_array().unwrap() {
        let mut file = reduced.clone();
        file["normalizer"] = case["normalizer"].clone();
        for token in case["added_tokens"].as_array().unwrap() {
            file["added_tokens"].as_array_mut().unwrap().push(token.clone());
            file["model"]["vocab"][token["content"].as_str().unwrap()] = token["id"].clone();
        }
        let tokenizer = Tokenizer::from_bytes("tokenizer.json", file.to_string().as_bytes()).unwrap();
        for result in case["results"].as_array().unwrap() {
            let (text, ids) = (result["text"].as_str().unwrap(), ids(&result["ids"]));
            let context = format!("{text:?} with {} {}", case["added_tokens"], case["normalizer"]);
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{context}");
            for (key, skip_special) in [("decoded", false), ("without_special", true)] {
                let want = result[key].as_str().unwrap();
                assert_eq!(tokenizer.decode(&ids, skip_special).unwrap(), want, "{context}");
                assert_eq!(stream(&tokenizer, &ids, skip_special).concat(), want, "{context}");
            }
            seen += 1;
        }
    }
    assert_eq!(seen, 156);
}

#[test]
fn only_tokens_that_are_marked_so_are_special() {
    let tokenizer = gpt2();
    assert!(tokenizer.is_special(50256));
    assert_eq!(tokenizer.token_to_id("<|endoftext|>"), Some(50256));
    assert!((0..50256).all(|id| !tokenizer.is_special(id)));
}

#[test]
fn streamed_emoji_and_cjk_come_out_whole_and_on_time() {
    let tokenizer = gpt2();
    let texts: Vec<String> = json("added_tokens.json")["streamed"]
        .as_array()
        .unwrap()
        .iter()
        .map(|text| text.as_str().unwrap().to_owned())
        .chain(published().into_iter().map(|(text, _)| text))
        .collect();
    let mut split_characters = 0;
    for text in texts {
        let ids = tokenizer.encode(&text, false).unwrap();
        let pieces = stream(&tokenizer, &ids, false);
        assert_eq!(pieces.concat(), text);
        let mut out = String::new();
        for (at, piece) in pieces.iter().enumerate().take(ids.len()) {
            assert!(!piece.contains('\u{fffd}'), "{text:?} gave {piece:?}");
            out.push_str(piece);
            // What is held back is the beginning of one character, and nothing once it is complete.
            let so_far = tokenizer.decode(&ids[..=at], false).unwrap();
            assert_eq!(out, so_far.trim_end_matches('\u{fffd}'), "{text:?} after {at}");
            split_characters += usize::from(so_far.ends_with('\u{fffd}'));
        }
    }
    assert!(split_characters > 50, "{split_characters} tokens ended within a character");
}
