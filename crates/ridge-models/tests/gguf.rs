//! GGUF files: what Ridge writes beside llama.cpp's own converter (`fixtures/gguf_models.py`), what it reads of its own files,
//! tokenizers beside the Python library (`fixtures/gguf_tokenizers.py`), and files that are broken.

mod common;

use std::path::{Path, PathBuf};

use common::fixtures;
use ridge_graph::{DType, format};
use ridge_models::gguf::{Gguf, Quantisation, Storage, Value, to_folder, to_gguf};
use ridge_models::{Checkpoint, ModelConfig, ModelFiles, Pooling};
use serde_json::Value as Json;

/// A folder of this test, empty.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gguf").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("can be made");
    folder
}

fn fnv(bytes: &[u8]) -> String {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

fn models() -> Vec<String> {
    let mut all = Vec::new();
    for kind in ["families", "llama"] {
        for entry in fixtures().join(kind).read_dir().expect("is there") {
            let name = entry.expect("is listed").file_name().into_string().expect("a name");
            // An encoder; and frequencies that GGUF cannot tell.
            if !["bert", "llama_dynamic", "llama_yarn_mscale"].contains(&name.as_str()) {
                all.push(format!("{kind}/{name}"));
            }
        }
    }
    all.sort();
    assert!(all.len() >= 19, "{all:?}");
    all
}

/// Runs `check` for each of `names`, and tells of all that fail.
fn each(names: &[String], check: impl Fn(&str)) {
    let fails = |name: &&String| std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(name))).is_err();
    let failed: Vec<&String> = names.iter().filter(fails).collect();
    assert!(failed.is_empty(), "of {} models these fail, as told above: {failed:?}", names.len());
}

/// The model `name` as a GGUF file with matrices stored so.
fn written(name: &str, to: &Path, matrices: Option<Storage>) -> Gguf {
    let files = ModelFiles::open(Some(&fixtures().join(name))).expect("opens");
    let how = Quantisation { matrices, ..Quantisation::default() };
    to_gguf(&files, to, &how, |_, _| {}).unwrap_or_else(|e| panic!("{name}: {e}"));
    Gguf::open(to).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn weights(files: &ModelFiles, config: &ModelConfig) -> Checkpoint {
    config.arrange(files.checkpoint().expect("weights")).expect("divides")
}

#[test]
fn files_hold_what_llama_cpps_converter_writes() {
    let text = std::fs::read_to_string(fixtures().join("gguf.json")).expect("the fixture");
    let expected: Json = serde_json::from_str(&text).expect("JSON");
    let to = folder("beside");
    let expected = expected.as_object().expect("models");
    let told = |name: &&String| models().contains(name) || *name == "families/bert";
    let names: Vec<String> = expected.keys().filter(told).cloned().collect();
    assert!(names.len() >= 18, "{names:?}");
    each(&names, |name| {
        let theirs = &expected[name];
        let gguf = written(name, &to.join("x.gguf"), Some(Storage::plain(DType::F32)));
        let tensors = theirs["tensors"].as_object().expect("tensors");
        assert_eq!(gguf.tensors().len(), tensors.len(), "{name}");
        for tensor in gguf.tensors() {
            let is = serde_json::json!([tensor.storage.name(), tensor.shape, fnv(gguf.data(tensor))]);
            // Factors are computed, here in doubles.
            if tensor.name == "rope_freqs.weight" {
                assert_eq!(is[1], tensors[&tensor.name][1]);
                continue;
            }
            assert_eq!(is, tensors[&tensor.name], "{name} {}", tensor.name);
        }
        for (key, should) in theirs["metadata"].as_object().expect("metadata") {
            // The converter takes the context of the first Falcon, and the usual widths of these MLPs, for granted.
            if ["falcon.context_length", "falcon.feed_forward_length", "gpt2.feed_forward_length"]
                .contains(&key.as_str())
            {
                continue;
            }
            let is = match gguf.metadata().get(key) {
                Some(Value::String(text)) => Json::from(text.as_str()),
                Some(Value::Bool(flag)) => Json::from(*flag),
                Some(value) => Json::from(value.as_f64().expect("a number")),
                None => {
                    // What says that there is nothing.
                    let nothing = *should == 0 || key == "phi3.rope.scaling.original_context_length";
                    assert!(nothing, "{name}: {key} = {should} is missing");
                    continue;
                }
            };
            match (is.as_f64(), should.as_f64()) {
                (Some(is), Some(should)) => {
                    assert!((is - should).abs() <= should.abs() * 1e-6, "{name} {key}: {is} {should}");
                }
                _ => assert_eq!(is, *should, "{name} {key}"),
            }
        }
    });
}

#[test]
fn a_model_comes_back_from_a_file_as_it_was() {
    let to = folder("back");
    each(&models(), |name| {
        let path = to.join("x.gguf");
        written(name, &path, None);
        let (before, after) = (
            ModelFiles::open(Some(&fixtures().join(name))).expect("opens"),
            ModelFiles::open(Some(&path)).expect("opens"),
        );
        let (mut was, mut is) =
            (before.config().expect("reads"), after.config().unwrap_or_else(|e| panic!("{name}: {e}")));
        for config in [&mut was, &mut is] {
            config.torch_dtype = None;
            config.bos_token_id = None;
            config.eos_token_ids = Vec::new();
            config.attention_dropout = 0.0;
        }
        // The factors of Llama 3 come back as a list, and numbers were f32 in between.
        let scaled = was.rope.as_ref().is_some_and(|rope| rope.scaling.is_some());
        if !scaled && !name.contains("gemma") {
            assert_eq!(format!("{was:?}"), format!("{is:?}"), "{name}");
        }
        let (was, is) = (weights(&before, &was), weights(&after, &is));
        for tensor in is.tensors() {
            let old = was.tensor(tensor.name).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(tensor.shape, old.shape, "{name} {}", tensor.name);
            let (new, old) = (tensor.dtype.decode(tensor.data), old.dtype.decode(old.data));
            // One was added to the norms of Gemma, and taken away again.
            let near = new.iter().zip(&old).all(|(a, b)| a == b || name.contains("gemma") && (a - b).abs() < 1e-6);
            assert!(near, "{name} {}", tensor.name);
        }
        let tied = was.len() - is.len();
        assert!(tied <= 1, "{name}: {tied} tensors are lost");
    });
}

#[test]
fn a_folder_comes_back_from_a_file_as_it_was() {
    let to = folder("folders");
    for name in
        ["families/gpt2", "families/phi3", "families/falcon", "families/gpt_neox", "families/qwen3", "llama/biased"]
    {
        let (file, back) = (to.join("x.gguf"), to.join("back"));
        let gguf = written(name, &file, None);
        to_folder(&gguf, &back, DType::F32, false, |_, _| {}).unwrap_or_else(|e| panic!("{name}: {e}"));
        let was = Checkpoint::open(fixtures().join(name)).expect("opens");
        let is = Checkpoint::open(&back).expect("opens");
        for tensor in is.tensors() {
            let old = was.tensor(tensor.name).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!((tensor.shape, tensor.data), (old.shape, old.data), "{name} {}", tensor.name);
        }
        assert!(is.len() + 1 >= was.len(), "{name}");
        assert!(ModelFiles::open(Some(&back)).and_then(|files| files.config()).is_ok(), "{name}");
    }
}

#[test]
fn a_folder_in_half_precision_comes_back_bit_for_bit() {
    let to = folder("half");
    let (file, before, after) = (to.join("x.gguf"), to.join("before"), to.join("after"));
    // One is added to the norms of Gemma in f32, which small numbers do not survive.
    let names: Vec<String> = models().into_iter().filter(|name| !name.contains("gemma")).collect();
    for dtype in [DType::BF16, DType::F16] {
        each(&names, |name| {
            let gguf = written(name, &file, None);
            to_folder(&gguf, &before, dtype, true, |_, _| {}).unwrap_or_else(|e| panic!("{name}: {e}"));
            let files = ModelFiles::open(Some(&before)).expect("opens");
            to_gguf(&files, &file, &Quantisation::default(), |_, _| {}).unwrap_or_else(|e| panic!("{name}: {e}"));
            let gguf = Gguf::open(&file).expect("opens");
            to_folder(&gguf, &after, DType::F32, false, |_, _| {}).unwrap_or_else(|e| panic!("{name}: {e}"));
            let read = |folder: &Path| std::fs::read(folder.join("model.safetensors")).expect("is there");
            assert!(read(&before) == read(&after), "{name}");
            let config = ModelFiles::open(Some(&after)).and_then(|files| files.config()).expect("reads");
            assert_eq!(config.torch_dtype, Some(dtype), "{name}");
        });
    }
}

#[test]
fn an_encoder_comes_back_from_a_file_and_a_folder_as_it_was() {
    let to = folder("encoder");
    let (file, back) = (to.join("x.gguf"), to.join("back"));
    let gguf = written("families/bert", &file, None);
    to_folder(&gguf, &back, DType::F32, false, |_, _| {}).expect("writes");
    let open = |path: &Path| {
        let files = ModelFiles::open(Some(path)).expect("opens");
        let mut config = files.encoder_config().expect("reads").expect("is an encoder");
        let checkpoint = config.arrange(files.checkpoint().expect("weights"));
        config.torch_dtype = None;
        (config, checkpoint)
    };
    let (config, was) = open(&fixtures().join("families/bert"));
    for path in [&file, &back] {
        let (same, is) = open(path);
        assert_eq!(config, same, "{}", path.display());
        assert_eq!(is.len(), was.len(), "{}", path.display());
        for tensor in is.tensors() {
            let old = was.tensor(tensor.name).expect("has it");
            assert_eq!((tensor.shape, tensor.dtype, tensor.data), (old.shape, old.dtype, old.data), "{}", tensor.name);
        }
    }
    // A decoder's reader says what to do with it.
    let refused = ModelFiles::open(Some(&file)).expect("opens").config().expect_err("is an encoder").to_string();
    assert!(refused.contains("ridge embed"), "{refused}");
}

#[test]
fn how_an_encoder_pools_goes_into_a_file_and_back() {
    let to = folder("pooling");
    let from = to.join("from");
    std::fs::create_dir_all(from.join("1_Pooling")).expect("can be made");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixtures().join("families/bert").join(name), from.join(name)).expect("is there");
    }
    let modules = r#"[{"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]"#;
    std::fs::write(from.join("modules.json"), modules).expect("can be written");
    for (mode, pooling) in [("cls_token", Pooling::Cls), ("mean_tokens", Pooling::Mean), ("lasttoken", Pooling::Last)] {
        let said = format!("{{\"pooling_mode_{mode}\": true}}");
        std::fs::write(from.join("1_Pooling/config.json"), said).expect("can be written");
        let file = to.join("x.gguf");
        to_gguf(&ModelFiles::open(Some(&from)).expect("opens"), &file, &Quantisation::default(), |_, _| {})
            .expect("writes");
        let gguf = Gguf::open(&file).expect("opens");
        let back = to.join("back");
        to_folder(&gguf, &back, DType::F32, false, |_, _| {}).expect("writes");
        for path in [&file, &back] {
            let said = ModelFiles::open(Some(path)).and_then(|files| files.sentence_config()).expect("reads");
            assert_eq!(said.map(|said| said.pooling), Some(pooling), "{}", path.display());
        }
    }
    std::fs::write(from.join("1_Pooling/config.json"), r#"{"pooling_mode_max_tokens": true}"#).expect("can be written");
    let files = ModelFiles::open(Some(&from)).expect("opens");
    let refused = to_gguf(&files, &to.join("x.gguf"), &Quantisation::default(), |_, _| {}).expect_err("has no number");
    assert!(refused.to_string().contains("it pools by max; GGUF has no words for it"), "{refused}");
}

#[test]
fn every_format_is_written_and_used_in_place() {
    let to = folder("formats");
    for format in format::all() {
        let storage = Storage::in_format(format.clone());
        let gguf = written("llama/gqa2_tied", &to.join("x.gguf"), Some(storage.clone()));
        let embedding = gguf.tensors().iter().find(|t| t.name == "token_embd.weight").expect("has it");
        // Rows of 32 hold no block of 256; the nearest formats do.
        let instead = match format.name() {
            "q2_k" | "q3_k" | "iq4_xs" => "iq4_nl",
            "q4_k" => "q5_0",
            "q5_k" => "q5_1",
            "q6_k" => "q8_0",
            own => own,
        };
        assert_eq!(embedding.storage.name(), instead);
        let checkpoint = gguf.checkpoint().expect("weights");
        let weight = checkpoint.tensor("model.embed_tokens.weight").expect("has it");
        assert_eq!(weight.format.map(|f| f.name()), Some(instead));
        assert_eq!(weight.data, gguf.data(embedding));
        // Rows of queries are in another order, whole.
        let q = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight").expect("has it");
        let plain = Checkpoint::open(fixtures().join("llama/gqa2_tied")).expect("opens");
        let exact = plain.tensor("model.layers.0.self_attn.q_proj.weight").expect("has it");
        let (read, exact) = (q.format.expect("quantised").values(&[q.data]), DType::F32.decode(exact.data));
        let error: f64 = read.iter().zip(&exact).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
        let whole: f64 = exact.iter().map(|b| b * b).sum();
        assert!((error / whole).sqrt() < 0.2, "{}: {}", format.name(), (error / whole).sqrt());
    }
}

#[test]
fn tokenizers_of_every_kind_give_the_ids_of_the_python_library() {
    let folder = fixtures().join("tokenizers/gguf");
    let cases: Json =
        serde_json::from_str(&std::fs::read_to_string(folder.join("cases.json")).expect("is there")).expect("JSON");
    for (kind, cases) in cases.as_object().expect("kinds") {
        let gguf = Gguf::open(folder.join(format!("{kind}.gguf"))).expect("opens");
        let (tokenizer, config) = gguf.tokenizer_json().expect("a tokenizer");
        let tokenizer = ridge_models::Tokenizer::from_bytes(kind, tokenizer.as_bytes()).expect("reads");
        let tokenizer = tokenizer.with_config(kind, &config).expect("reads");
        let cases = cases.as_array().expect("cases");
        assert!(cases.len() > 3, "{kind}");
        for case in cases {
            let text = case["text"].as_str().expect("a text");
            for (special, ids) in [(true, &case["ids"]), (false, &case["bare"])] {
                let is = tokenizer.encode(text, special).expect("encodes");
                assert_eq!(serde_json::json!(is), *ids, "{kind}: {text:?}");
            }
        }
        let config: Json = serde_json::from_str(&config).expect("JSON");
        assert!(config["chat_template"].as_str().is_some_and(|t| t.ends_with(&format!("({kind})"))), "{kind}");
    }
}

#[test]
fn tokenizers_of_sentencepiece_give_its_ids() {
    let folder = fixtures().join("tokenizers/gguf");
    let text = std::fs::read_to_string(folder.join("sentencepiece.json")).expect("is there");
    let kinds: Json = serde_json::from_str(&text).expect("JSON");
    let mut wrong = Vec::new();
    for (kind, cases) in kinds.as_object().expect("kinds") {
        let gguf = Gguf::open(folder.join(format!("{kind}.gguf"))).expect("opens");
        let (tokenizer, config) = gguf.tokenizer_json().expect("a tokenizer");
        let tokenizer = ridge_models::Tokenizer::from_bytes(kind, tokenizer.as_bytes()).expect("reads");
        let tokenizer = tokenizer.with_config(kind, &config).expect("reads");
        for case in cases.as_array().expect("cases") {
            let is = tokenizer.encode(case["text"].as_str().expect("a text"), false).expect("encodes");
            if serde_json::json!(is) != case["ids"] {
                wrong.push(format!("{kind}: {}: {is:?} and not {}", case["text"], case["ids"]));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A small file with metadata of every type, and two tensors.
fn sample() -> Vec<u8> {
    let mut writer = ridge_models::gguf::Writer::default();
    writer.text("general.architecture", "llama");
    writer.u32("a", 7);
    writer.f32("b", 0.5);
    writer.bool("c", true);
    writer.texts("d", ["x", "yz"].into_iter());
    writer.i32s("e", &[-1, 2]);
    writer.tensor("t", &[2, 32], &Storage::from_name("q8_0").expect("known")).expect("fits");
    writer.tensor("u", &[3], &Storage::plain(DType::F32)).expect("fits");
    let mut out = Vec::new();
    writer.write::<std::io::Error>(&mut out, |i| Ok(vec![i as u8; [68, 12][i]])).expect("writes");
    out
}

fn refusal(bytes: Vec<u8>) -> String {
    Gguf::from_bytes("x.gguf", bytes).expect_err("is broken").to_string()
}

#[test]
fn what_was_written_is_read() {
    let gguf = Gguf::from_bytes("x.gguf", sample()).expect("reads");
    assert_eq!(gguf.metadata()["a"], Value::U32(7));
    assert_eq!(gguf.metadata()["c"], Value::Bool(true));
    let Value::Array(texts) = &gguf.metadata()["d"] else { panic!("an array") };
    assert_eq!(gguf.elements(texts), [Value::String("x".into()), Value::String("yz".into())]);
    assert_eq!(gguf.tensors()[0].shape, [2, 32]);
    assert_eq!(gguf.data(&gguf.tensors()[1]), [1; 12]);
}

#[test]
fn a_file_that_ends_anywhere_is_refused() {
    let whole = sample();
    let end = Gguf::from_bytes("x.gguf", whole.clone()).expect("reads").tensors()[1].range.end;
    for len in 0..end {
        let refused = refusal(whole[..len].to_vec());
        assert!(refused.starts_with("x.gguf: it "), "{refused}");
    }
}

#[test]
fn lengths_offsets_and_types_that_cannot_be_are_told_by_name() {
    let whole = sample();
    let find = |what: &[u8]| whole.windows(what.len()).position(|w| w == what).expect("is there");
    let patched = |at: usize, with: &[u8]| {
        let mut bytes = whole.clone();
        bytes[at..at + with.len()].copy_from_slice(with);
        refusal(bytes)
    };
    let huge = u64::MAX.to_le_bytes();
    let (a, d, t) = (find(b"a\x04\0\0\0"), find(b"d\x09\0\0\0"), find(b"t\x02\0\0\0"));
    for (at, with, says) in [
        (0, &b"GGML"[..], "does not begin with GGUF"),
        (4, &[1, 0, 0, 0], "is of version 1"),
        (4, &[0, 0, 0, 3], "is big-endian"),
        (8, &huge, "claims 18446744073709551615 for the number of tensors"),
        (16, &huge, "for the number of keys"),
        (24, &huge, "for the length of a key"),
        (a + 1, &[77], "has a of type 77"),
        (d + 5, &[99], "has d of type 99"),
        (d + 9, &huge, "for the elements of d"),
        (t + 1, &[9], "has the tensor t with 9 axes, and a tensor has 1 to 4"),
        (t + 5, &[31], "which has rows of 31, and q8_0 stores blocks of 32"),
        (t + 5, &huge, "the tensor t"),
        (t + 21, &[200], "type 200, which Ridge does not know"),
        (t + 21, &[16], "type iq2_xxs, which Ridge does not read"),
        (t + 25, &[1], "no multiple of 32"),
        (t + 25, &[0, 0, 0, 0, 0, 0, 0, 64], "outside the"),
        (t + 25, &huge[..7], "t"),
    ] {
        let refused = patched(at, with);
        assert!(refused.contains(says) && refused.contains("; "), "{refused} should say: {says}");
    }
}

#[test]
fn arrays_within_arrays_without_end_are_refused() {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend([0u64, 1].iter().flat_map(|n| n.to_le_bytes()));
    bytes.extend(1u64.to_le_bytes());
    bytes.extend(b"k");
    bytes.extend(9u32.to_le_bytes());
    for _ in 0..100_000 {
        bytes.extend(9u32.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
    }
    let refused = refusal(bytes);
    assert!(refused.contains("has k with arrays nested deeper than 8"), "{refused}");
}

/// A file with these keys and tensors, the data being zeros.
fn made(keys: impl Fn(&mut ridge_models::gguf::Writer), tensors: &[(&str, &[usize])]) -> Vec<u8> {
    let mut writer = ridge_models::gguf::Writer::default();
    keys(&mut writer);
    for (name, shape) in tensors {
        writer.tensor(name, shape, &Storage::plain(DType::F32)).expect("fits");
    }
    let mut out = Vec::new();
    let bytes = |i: usize| tensors[i].1.iter().product::<usize>() * 4;
    writer.write::<std::io::Error>(&mut out, |i| Ok(vec![0; bytes(i)])).expect("writes");
    out
}

#[test]
fn keys_and_tensors_that_are_there_twice_are_refused() {
    let twice = made(|w| ["k", "k"].iter().for_each(|key| w.u32(key, 1)), &[]);
    assert!(refusal(twice).contains("has the key k twice"));
    let twice = made(|_| (), &[("t", &[1]), ("u", &[2]), ("t", &[3])]);
    assert!(refusal(twice).contains("has the tensor t twice"));
    // The second one's offset, which is its last 8 bytes, set to that of the first.
    let mut over = made(|_| (), &[("t", &[16]), ("u", &[16])]);
    let at = over.windows(9).position(|w| w == b"u\x01\0\0\0\x10\0\0\0").expect("is there") + 1 + 4 + 8 + 4;
    over[at..at + 8].fill(0);
    assert!(refusal(over).contains("has the tensors t and u overlapping"));
}

#[test]
fn an_alignment_that_is_none_is_refused_and_others_are_kept_to() {
    for n in [0, 3, 33, 1 << 21, u32::MAX] {
        let refused = refusal(made(|w| w.u32("general.alignment", n), &[("t", &[1])]));
        assert!(refused.contains(&format!("has general.alignment = {n}, which is no power of two")), "{refused}");
    }
    assert!(refusal(made(|w| w.text("general.alignment", "32"), &[])).contains("general.alignment = \"32\""));
    // The data of the one tensor is where 32 and 8 agree, or the file ends before it.
    assert!(Gguf::from_bytes("x.gguf", made(|w| w.u32("general.alignment", 8), &[("t", &[1])])).is_ok());
    assert!(
        refusal(made(|w| w.u32("general.alignment", 1 << 20), &[("t", &[1])])).contains("outside the 0 of the data")
    );
}

#[test]
fn tensors_without_elements_are_read_and_those_without_axes_refused() {
    let gguf = Gguf::from_bytes("x.gguf", made(|_| (), &[("none", &[0, 7])])).expect("reads");
    assert!(gguf.data(&gguf.tensors()[0]).is_empty());
    // As a model they are none.
    assert!(gguf.config_json().is_err() && gguf.checkpoint().is_err());
    let refused = refusal(made(|_| (), &[("one", &[])]));
    assert!(refused.contains("has the tensor one with 0 axes, and a tensor has 1 to 4"), "{refused}");
}

/// Metadata of a model of one layer.
fn small(writer: &mut ridge_models::gguf::Writer, architecture: &str) {
    writer.text("general.architecture", architecture);
    for (key, value) in [
        ("embedding_length", 4),
        ("feed_forward_length", 4),
        ("block_count", 1),
        ("attention.head_count", 1),
        ("context_length", 8),
        ("vocab_size", 4),
    ] {
        writer.u32(&format!("{architecture}.{key}"), value);
    }
    writer.f32(&format!("{architecture}.attention.layer_norm_rms_epsilon"), 1e-5);
}

#[test]
fn extents_whose_product_cannot_be_counted_are_no_panic() {
    let huge: &[usize] = &[0, 1 << 40, 1 << 40];
    let file = made(|w| small(w, "llama"), &[("token_embd.weight", &[4, 4]), ("blk.0.attn_output.weight", huge)]);
    let gguf = Gguf::from_bytes("x.gguf", file).expect("reads");
    let checkpoint = gguf.checkpoint().expect("tensors");
    assert_eq!(checkpoint.tensor("model.layers.0.self_attn.o_proj.weight").expect("has it").shape, huge);
}

#[test]
fn an_array_of_metadata_has_one_value_for_each_layer() {
    let file = |kv: &[i32]| {
        let keys = |w: &mut ridge_models::gguf::Writer| {
            small(w, "llama");
            w.i32s("llama.attention.head_count_kv", kv);
        };
        Gguf::from_bytes("x.gguf", made(keys, &[])).expect("reads").config_json().map_err(|e| e.to_string())
    };
    assert!(file(&[1]).expect("one layer").contains("\"num_key_value_heads\":1"));
    assert!(file(&[1, 1]).expect_err("two").contains("attention.head_count_kv has 2 values for 1 layers"));
    let layers = made(
        |w| {
            w.text("general.architecture", "llama");
            w.i32s("llama.block_count", &[1, 1]);
        },
        &[],
    );
    let refused = Gguf::from_bytes("x.gguf", layers).expect("reads").config_json().expect_err("an array").to_string();
    assert!(refused.contains("llama.block_count = an array of 2 values is not a number"), "{refused}");
}

#[test]
fn a_pattern_of_windows_that_is_no_number_is_refused() {
    let file = |pattern: Option<&str>| {
        let keys = |w: &mut ridge_models::gguf::Writer| {
            small(w, "gemma3");
            pattern.iter().for_each(|text| w.text("gemma3.attention.sliding_window_pattern", text));
        };
        Gguf::from_bytes("x.gguf", made(keys, &[])).expect("reads").config_json().map_err(|e| e.to_string())
    };
    assert!(file(None).expect("reads").contains("\"sliding_window_pattern\":6"));
    let refused = file(Some("x")).expect_err("a text");
    assert!(refused.contains("sliding_window_pattern = \"x\" is not a whole number"), "{refused}");
}

#[test]
fn a_file_is_run_in_f32_if_its_matrices_are_that_and_in_bf16_otherwise() {
    let to = folder("dtypes");
    for (name, dtype) in [("f32", DType::F32), ("f16", DType::BF16), ("bf16", DType::BF16), ("q8_0", DType::BF16)] {
        written("llama/gqa2_tied", &to.join("x.gguf"), Storage::from_name(name));
        let config = ModelFiles::open(Some(&to.join("x.gguf"))).and_then(|files| files.config()).expect("reads");
        assert_eq!(config.torch_dtype, Some(dtype), "{name}");
    }
}

#[test]
fn metadata_that_is_larger_than_the_file_or_no_text_is_refused() {
    let texts = made(|w| w.texts("k", (0..1000).map(|_| "").collect::<Vec<_>>().into_iter()), &[]);
    assert!(Gguf::from_bytes("x.gguf", texts.clone()).is_ok());
    let count = texts.windows(8).position(|w| w == 1000u64.to_le_bytes()).expect("is there");
    for claimed in [1010, 1 << 40, u64::MAX / 8 + 1, u64::MAX] {
        let mut more = texts.clone();
        more[count..count + 8].copy_from_slice(&claimed.to_le_bytes());
        let refused = refusal(more);
        assert!(refused.contains(&format!("claims {claimed} for the elements of k")), "{refused}");
    }
    let mut bytes = made(|w| w.text("k", "abc"), &[]);
    let at = bytes.windows(3).position(|w| w == b"abc").expect("is there");
    bytes[at + 1] = 0xff;
    assert!(refusal(bytes).contains("has k that is no UTF-8 text at byte 1"));
}
