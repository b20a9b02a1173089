//! Tokenizers: text survives the way there and back, whole or in a stream, and hostile files give errors.

use proptest::prelude::*;
use ridge_text::{TextError, Tokenizer};
use serde_json::{Value, json};

/// The text of a file of the embedded model.
fn stories_file(name: &str) -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/stories260K/");
    std::fs::read_to_string(format!("{path}{name}")).unwrap()
}

fn stories() -> Tokenizer {
    let tokenizer = Tokenizer::from_bytes("tokenizer.json", stories_file("tokenizer.json").as_bytes()).unwrap();
    tokenizer.with_config("tokenizer_config.json", &stories_file("tokenizer_config.json")).unwrap()
}

fn stories_json() -> Value {
    serde_json::from_str(&stories_file("tokenizer.json")).unwrap()
}

fn read(json: &Value) -> Result<Tokenizer, TextError> {
    Tokenizer::from_bytes("tokenizer.json", json.to_string().as_bytes())
}

/// A byte-level tokenizer in the manner of GPT-2, whose tokens are these byte strings.
fn byte_level(tokens: &[&[u8]]) -> Tokenizer {
    // The printable stand-ins that byte-level tokenizers use for the 256 bytes.
    let printable = |b: &u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let stand_in = |byte: u8| {
        if printable(&byte) {
            char::from(byte)
        } else {
            let before = (0..byte).filter(|b| !printable(b)).count() as u32;
            char::from_u32(256 + before).unwrap()
        }
    };
    let vocab: serde_json::Map<String, Value> = tokens
        .iter()
        .enumerate()
        .map(|(id, bytes)| (bytes.iter().map(|&b| stand_in(b)).collect(), json!(id)))
        .collect();
    read(&json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []}
    }))
    .unwrap()
}

/// The pieces that streaming gives, `finish` included.
fn stream(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut decoder = tokenizer.stream_decoder(skip_special);
    let mut pieces: Vec<String> = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
    pieces.push(decoder.finish().unwrap());
    pieces
}

const TEXTS: &[&str] = &[
    "",
    " ",
    "   ",
    "Once upon a time, there was a little girl named Lily.",
    "  leading and trailing spaces  ",
    "line\nbreaks\n\n\tand tabs\r\n",
    "naïve café, Zürich, Ελλάδα, Привет",
    "你好,世界。我们去公园玩吧!",
    "日本語テキスト、カタカナ",
    "😀😃 👩‍👩‍👧‍👦 🇩🇪 e\u{301}",
    "mixed 中 text 😀 with é words",
    "a literal \u{fffd} replacement \u{fffd}\u{fffd}",
    "\u{fffd}",
    "null \0 and \u{7f} and \u{200b}",
    "مرحبا بالعالم שלום",
    "<s> </s> <unk> <0x41> ▁",
];

#[test]
fn offsets_go_with_the_same_ids_and_cover_the_text() {
    let tokenizer = stories();
    for text in ["", "Once upon a timé 😀\n\tx", "</s> a  b"] {
        for special in [true, false] {
            let placed = tokenizer.encode_with_offsets(text, special).unwrap();
            let ids: Vec<u32> = placed.iter().map(|(id, _)| *id).collect();
            assert_eq!(ids, tokenizer.encode(text, special).unwrap(), "{text:?}");
            let end = placed.iter().fold(0, |end, (id, bytes)| {
                assert!(bytes.start <= end && bytes.end >= end, "{id} at {bytes:?} of {text:?}");
                assert!(text.get(bytes.clone()).is_some());
                bytes.end
            });
            assert_eq!(end, text.len(), "{text:?}");
        }
    }
}

#[test]
fn text_survives_the_way_there_and_back() {
    let tokenizer = stories();
    for text in TEXTS.iter().filter(|t| !t.contains(['▁', '<'])) {
        let ids = tokenizer.encode(text, true).unwrap();
        assert_eq!(&tokenizer.decode(&ids, true).unwrap(), text);
    }
}

#[test]
fn begin_token_is_added_when_asked() {
    let tokenizer = stories();
    let with = tokenizer.encode("Once", true).unwrap();
    let without = tokenizer.encode("Once", false).unwrap();
    assert_eq!(with[0], 1);
    assert_eq!(with[1..], without);
    assert_eq!(tokenizer.token_to_id("<s>"), Some(1));
    assert_eq!(tokenizer.id_to_token(1).as_deref(), Some("<s>"));
    assert!(tokenizer.is_special(1) && !tokenizer.is_special(300));
}

#[test]
fn stream_of_a_text_equals_its_whole_decode() {
    let tokenizer = stories();
    for text in TEXTS {
        for skip_special in [false, true] {
            let ids = tokenizer.encode(text, true).unwrap();
            let pieces = stream(&tokenizer, &ids, skip_special);
            let whole = tokenizer.decode(&ids, skip_special).unwrap();
            assert_eq!(pieces.concat(), whole, "{text:?} {skip_special}");
        }
    }
}

#[test]
fn stream_never_shows_half_a_character() {
    let tokenizer = stories();
    for text in TEXTS.iter().filter(|t| !t.contains('\u{fffd}')) {
        let ids = tokenizer.encode(text, false).unwrap();
        for piece in stream(&tokenizer, &ids, true) {
            assert!(!piece.contains('\u{fffd}'), "{text:?} gave {piece:?}");
        }
    }
}

#[test]
fn stream_gives_each_character_with_its_last_byte() {
    let tokenizer = stories();
    let ids: Vec<u32> = "😀é".bytes().map(|b| tokenizer.token_to_id(&format!("<0x{b:02X}>")).unwrap()).collect();
    assert_eq!(stream(&tokenizer, &ids, true), ["", "", "", "😀", "", "é", ""]);
}

#[test]
fn special_tokens_do_not_swallow_the_space_behind_them() {
    let tokenizer = stories();
    let mut ids = tokenizer.encode("once", true).unwrap();
    ids.extend([2, 1, 9999]);
    ids.extend(tokenizer.encode("upon", false).unwrap());
    let whole = tokenizer.decode(&ids, true).unwrap();
    assert_eq!(whole, "once upon");
    assert_eq!(stream(&tokenizer, &ids, true).concat(), whole);
}

#[test]
fn incomplete_character_is_flushed_by_finish() {
    let tokenizer = stories();
    let id = tokenizer.token_to_id("<0xF0>").unwrap();
    let mut decoder = tokenizer.stream_decoder(true);
    assert_eq!(decoder.push(id).unwrap(), "");
    assert_eq!(decoder.finish().unwrap(), "\u{fffd}");
    assert_eq!(decoder.finish().unwrap(), "");
    let once = tokenizer.encode("Once", false).unwrap();
    let text: String = once.iter().map(|&id| decoder.push(id).unwrap()).collect();
    assert_eq!(text, "Once", "a finished decoder starts again");
}

#[test]
fn bytes_that_never_become_text_are_not_held_back_forever() {
    let tokenizer = stories();
    let id = tokenizer.token_to_id("<0xFF>").unwrap();
    let pieces = stream(&tokenizer, &vec![id; 500], true);
    let longest_silence = pieces.split(|p| !p.is_empty()).map(<[_]>::len).max();
    assert!(longest_silence < Some(64), "{longest_silence:?}");
}

#[test]
fn tokens_that_all_end_within_a_character_still_stream() {
    // 中 is E4 B8 AD: after the first token, each one completes a character and begins the next.
    let tokenizer = byte_level(&[b"a\xE4", b"\xB8\xAD\xE4", b"\xB8\xAD", b"b"]);
    let mut ids = vec![0];
    ids.extend([1; 300]);
    ids.extend([2, 3]);
    let pieces = stream(&tokenizer, &ids, true);
    assert_eq!(pieces.concat(), tokenizer.decode(&ids, true).unwrap());
    assert_eq!(pieces.concat(), format!("a{}b", "中".repeat(301)));
    assert!(pieces[1..301].iter().all(|p| p == "中"));
}

#[test]
fn special_tokens_come_from_texts_or_objects() {
    let read = |config: Value| stories().with_config("tokenizer_config.json", &config.to_string());
    let tokenizer = read(json!({
        "bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>",
        "add_bos_token": false, "add_eos_token": true, "chat_template": "..."
    }))
    .unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    let ids = tokenizer.encode("Once", true).unwrap();
    assert_ne!(ids.first(), Some(&1));
    assert_eq!(ids.last(), Some(&2));
    // Without a word from the file, the template of tokenizer.json counts.
    let tokenizer = read(json!({"bos_token": null})).unwrap();
    assert_eq!(tokenizer.bos(), None);
    assert_eq!(tokenizer.encode("Once", true).unwrap()[0], 1);
}

#[test]
fn wrong_tokenizer_config_is_refused_by_key() {
    for (config, part) in [
        (json!({"bos_token": "<none>"}), "bos_token = \"<none>\" is not in the vocabulary"),
        (json!({"eos_token": 2}), "eos_token = 2 is not a token"),
        (json!({"add_bos_token": true}), "add_bos_token = true asks for a token"),
        (json!({"add_bos_token": "yes"}), "is not true or false"),
    ] {
        let message = stories().with_config("tokenizer_config.json", &config.to_string()).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn truncation_and_padding_of_the_file_are_left_out() {
    let mut json = stories_json();
    json["truncation"] = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = json!({
        "strategy": {"Fixed": 4_000_000_000_000u64}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"
    });
    let text = "Once upon a time";
    assert_eq!(read(&json).unwrap().encode(text, true).unwrap(), stories().encode(text, true).unwrap());
}

#[test]
fn files_that_are_not_tokenizers_are_refused() {
    for text in ["", "{}", "[]", "null", "{\"model\": 3}", "\u{0}", &"[".repeat(1_000_000)] {
        let error = Tokenizer::from_bytes("tokenizer.json", text.as_bytes()).unwrap_err();
        assert!(error.to_string().starts_with("tokenizer.json: it is not a tokenizer"));
    }
}

#[test]
fn random_tokenization_is_refused() {
    let mut json = stories_json();
    json["model"]["dropout"] = json!(0.1);
    assert!(read(&json).unwrap_err().to_string().contains("dropout"));
}

#[test]
fn replacements_that_multiply_a_text_are_refused() {
    let replace = |pattern: Value, content: String| json!({"type": "Replace", "pattern": pattern, "content": content});
    let longer = || replace(json!({"String": "a"}), "a".repeat(1000));
    let nested =
        json!({"type": "Sequence", "normalizers": [longer(), {"type": "Sequence", "normalizers": [longer()]}]});
    let decoder = json!({"type": "Sequence", "decoders": [longer(), longer()]});
    let everywhere: Vec<Value> = (0..10).map(|_| replace(json!({"String": ""}), "ab".into())).collect();
    let everywhere = json!({"type": "Sequence", "normalizers": everywhere});
    for (name, step) in [("normalizer", nested), ("decoder", decoder), ("normalizer", everywhere)] {
        let mut json = stories_json();
        json[name] = step;
        let message = read(&json).unwrap_err().to_string();
        assert!(message.contains(&format!("its {name} could make a text")), "{message}");
    }
    // As long as what it replaces, however often.
    let same: Vec<Value> = (0..10).map(|_| replace(json!({"String": "▁"}), " ".into())).collect();
    let mut json = stories_json();
    json["normalizer"] = json!({"type": "Sequence", "normalizers": same});
    assert!(read(&json).is_ok());
}

#[test]
fn continuation_prefix_is_refused_before_it_does_harm() {
    for kind in [json!("BPE"), Value::Null] {
        let mut json = stories_json();
        json["model"] = json!({
            "type": kind, "vocab": {"é": 0, "a": 1, "aé": 2}, "merges": [["a", "é"]],
            "continuing_subword_prefix": "#"
        });
        let message = read(&json).unwrap_err().to_string();
        assert!(message.contains("continuing_subword_prefix"), "{message}");
    }
}

#[test]
fn merge_longer_than_the_vocabulary_is_an_error_and_no_panic() {
    let mut json = stories_json();
    json["model"] = json!({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]});
    assert!(read(&json).is_err());
}

#[test]
fn decoder_that_strips_too_much_is_an_error_and_no_panic() {
    let mut json = stories_json();
    json["decoder"] = json!({"type": "Strip", "content": "e", "start": 0, "stop": 9});
    let tokenizer = read(&json).unwrap();
    let id = tokenizer.token_to_id("e").unwrap();
    assert!(tokenizer.decode(&[id], true).is_err());
    assert!(tokenizer.stream_decoder(true).push(id).is_err());
}

#[test]
fn a_character_is_complete_after_any_number_of_others_that_are_not() {
    let tokenizer = byte_level(&[b"a", b"\xE4", b"\xB8", b"\xAD", b"\xF0\x9F", b"\x98\x80"]);
    for (start, end) in [(1, vec![2, 3]), (4, vec![5])] {
        for starts in 0..100 {
            let ids: Vec<u32> = std::iter::repeat_n(start, starts).chain(end.clone()).chain([0]).collect();
            let pieces = stream(&tokenizer, &ids, true);
            assert_eq!(pieces.concat(), tokenizer.decode(&ids, true).unwrap(), "{starts} of {start}");
        }
    }
}

#[test]
fn replacements_of_bytes_behind_a_character_that_they_spoil_are_not_lost() {
    let tokenizer = stories();
    let byte = |byte: u8| tokenizer.token_to_id(&format!("<0x{byte:02X}>")).unwrap();
    for starts in 1..80 {
        let ids: Vec<u32> =
            [byte(0xC3), byte(0xA9)].into_iter().chain(std::iter::repeat_n(byte(0xE4), starts)).collect();
        let streamed = stream(&tokenizer, &ids, true).concat();
        assert!(streamed.starts_with('é'), "{streamed}");
        assert_eq!(streamed.chars().count(), 1 + starts);
    }
}

proptest! {
    #[test]
    fn stream_of_any_text_equals_its_whole_decode(text in "\\PC{0,40}|[ a-c▁é中😀]{0,60}") {
        let tokenizer = stories();
        let ids = tokenizer.encode(&text, true).unwrap();
        let pieces = stream(&tokenizer, &ids, true);
        prop_assert_eq!(pieces.concat(), tokenizer.decode(&ids, true).unwrap());
    }

    #[test]
    fn stream_of_byte_level_tokens_equals_the_whole_decode(
        ids in proptest::collection::vec(0u32..9, 0..200),
    ) {
        let tokenizer = byte_level(&[
            b"a", b" ", b"\xE4", b"\xB8", b"\xAD", b"\xB8\xAD\xE4", b"\xF0\x9F", b"\x98\x80", b"x\xC3",
        ]);
        let pieces = stream(&tokenizer, &ids, true);
        prop_assert_eq!(pieces.concat(), tokenizer.decode(&ids, true).unwrap());
    }

    #[test]
    fn stream_of_any_ids_keeps_what_is_not_bytes(ids in proptest::collection::vec(0u32..530, 0..80)) {
        let tokenizer = stories();
        let clean = |text: String| text.replace('\u{fffd}', "");
        let is_byte = |id: &u32| tokenizer.id_to_token(*id).is_some_and(|t| t.starts_with("<0x"));
        let streamed = stream(&tokenizer, &ids, true).concat();
        let whole = tokenizer.decode(&ids, true).unwrap();
        if ids.iter().any(is_byte) {
            prop_assert!(clean(streamed).len() >= clean(whole).len());
        } else {
            prop_assert_eq!(streamed, whole);
        }
    }

    #[test]
    fn damaged_tokenizer_never_panics(
        edits in proptest::collection::vec((0usize..20_000, any::<u8>()), 1..4),
    ) {
        let mut bytes = stories_file("tokenizer.json").into_bytes();
        for (at, byte) in edits {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        if let Ok(tokenizer) = Tokenizer::from_bytes("tokenizer.json", &bytes)
            && let Ok(ids) = tokenizer.encode("Once 中 upon", true)
        {
            let _ = tokenizer.decode(&ids, true);
        }
    }
}
