//! GGUF files as llama.cpp's tools write them (`fixtures/gguf_files.sh`): a model in parts, and importance matrices.

use std::path::{Path, PathBuf};

use crate::common::fixtures;
use ridge_files::gguf::{Gguf, GgufWriter, ImportanceMatrix, TensorStorage};
use ridge_graph::DType;
use ridge_models::ModelFiles;
use ridge_models::gguf::{Mix, Quantisation, checkpoint, to_folder, to_gguf};

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gguf_parts").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("can be made");
    folder
}

fn part(i: usize) -> String {
    format!("model-{i:05}-of-00003.gguf")
}

/// The parts in a folder of this test's own.
fn copied(name: &str) -> PathBuf {
    let to = folder(name);
    for i in 1..=3 {
        std::fs::copy(fixtures().join("gguf_files").join(part(i)), to.join(part(i))).expect("is there");
    }
    to
}

#[test]
fn every_part_of_a_model_opens_all_of_it() {
    let (whole, to) = (fixtures().join("llama/gqa2_tied"), folder("whole").join("x.gguf"));
    let how = Quantisation { matrices: Some(TensorStorage::plain(DType::BF16)), ..Quantisation::default() };
    to_gguf(&ModelFiles::open(Some(&whole)).expect("opens"), &to, &how, |_, _| Ok(())).expect("writes");
    let whole = checkpoint(&Gguf::open(&to).expect("opens")).expect("a model");
    for i in 1..=3 {
        let files = ModelFiles::open(Some(&fixtures().join("gguf_files").join(part(i)))).expect("opens");
        assert_eq!(files.config().expect("reads").hidden_size, 32);
        let weights = files.checkpoint().expect("weights");
        assert_eq!(weights.len(), whole.len());
        for tensor in weights.tensors() {
            let same = whole.tensor(tensor.name).expect("has it");
            assert_eq!(
                (tensor.shape, tensor.dtype, tensor.data),
                (same.shape, same.dtype, same.data),
                "{}",
                tensor.name
            );
        }
        // Written again it is one file, which says nothing of parts.
        let joined = to.with_file_name("joined.gguf");
        to_gguf(&files, &joined, &Quantisation::default(), |_, _| Ok(())).expect("writes");
        let joined = Gguf::open(&joined).expect("opens");
        assert_eq!(joined.tensors().len(), 20);
        assert!(joined.metadata().keys().all(|key| !key.starts_with("split.")));
    }
}

#[test]
fn a_part_of_the_model_may_be_written_over_while_it_is_read() {
    let to = copied("over");
    let files = ModelFiles::open(Some(&to.join(part(1)))).expect("opens");
    to_gguf(&files, &to.join("x.gguf"), &Quantisation::default(), |_, _| Ok(())).expect("writes");
    to_gguf(&files, &to.join(part(2)), &Quantisation::default(), |_, _| Ok(())).expect("writes");
    let read = |name: &str| std::fs::read(to.join(name)).expect("is there");
    assert!(read(&part(2)) == read("x.gguf"));
}

/// A model of one matrix of 1 row of 32 numbers, of which the last is `value`.
fn with_number(value: f32) -> Vec<u8> {
    let mut writer = GgufWriter::default();
    writer.text("general.architecture", "llama");
    writer.tensor("blk.0.ffn_up.weight", &[1, 32], &TensorStorage::plain(DType::F32)).expect("fits");
    let mut values = [0.0f32; 32];
    values[31] = value;
    let mut out = Vec::new();
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    writer.write::<std::io::Error>(&mut out, |_| Ok(bytes.clone())).expect("writes");
    out
}

#[test]
fn numbers_that_are_not_finite_are_not_quantised_and_leave_no_file() {
    let to = folder("infinite");
    let (from, out) = (to.join("x.gguf"), to.join("y.gguf"));
    for (value, fails) in [(1.0, false), (f32::NAN, true), (f32::INFINITY, true), (f32::NEG_INFINITY, true)] {
        std::fs::write(&from, with_number(value)).expect("can be written");
        let files = ModelFiles::open(Some(&from)).expect("opens");
        let write = |storage: &str| {
            let how = Quantisation { matrices: TensorStorage::from_name(storage), ..Quantisation::default() };
            to_gguf(&files, &out, &how, |_, _| Ok(())).map_err(|e| e.to_string())
        };
        let quantised = write("q8_0");
        assert_eq!(quantised.is_err(), fails, "{value}");
        if let Err(says) = quantised {
            let should = "the tensor blk.0.ffn_up.weight has in row 0 a number that is ";
            let should = format!("{should}{value}, which q8_0 cannot hold");
            assert!(says.contains(&should), "{says}");
        }
        // Plain numbers keep them. What is left is the input, and the output where there was one.
        assert_eq!(to.read_dir().expect("is there").count(), 2 - usize::from(fails), "{value}");
        write("bf16").expect("writes");
        std::fs::remove_file(&out).expect("is there");
    }
}

#[test]
fn numbers_that_are_too_large_for_a_storage_are_refused_and_leave_no_file() {
    let to = folder("large");
    let (from, out) = (to.join("x.gguf"), to.join("y.gguf"));
    // Of f16 the largest is 65504, and it is the scale of a block's values.
    for (storage, largest) in [
        ("f16", 65504.0),
        ("q8_0", 8e6),
        ("q4_0", 5e5),
        ("q4_1", 6e4),
        ("q5_0", 1e6),
        ("q5_1", 6e4),
        ("iq4_nl", 7e6),
        ("bf16", 3e38),
        ("mxfp4", 3e38),
    ] {
        for value in [largest, 1e30] {
            std::fs::write(&from, with_number(value)).expect("can be written");
            let files = ModelFiles::open(Some(&from)).expect("opens");
            let how = Quantisation { matrices: TensorStorage::from_name(storage), ..Quantisation::default() };
            let done = to_gguf(&files, &out, &how, |_, _| Ok(())).map_err(|e| e.to_string());
            if value <= largest {
                done.unwrap_or_else(|e| panic!("{storage} {value}: {e}"));
                std::fs::remove_file(&out).expect("is there");
                continue;
            }
            let says = done.expect_err(storage);
            let should = "the tensor blk.0.ffn_up.weight has in row 0 a number that is ";
            assert!(says.contains(&format!("{should}{value}, which {storage} cannot hold")), "{says}");
            assert_eq!(to.read_dir().expect("is there").count(), 1, "{storage}");
        }
    }
}

/// The model in `from` with these layers in its configuration.
fn with_layers(from: &Path, to: &Path, layers: usize) -> ModelFiles {
    std::fs::create_dir_all(to).expect("can be made");
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(from.join("config.json")).expect("is there")).expect("JSON");
    let key = if config.get("n_layer").is_some() { "n_layer" } else { "num_hidden_layers" };
    config[key] = layers.into();
    std::fs::write(to.join("config.json"), config.to_string()).expect("can be written");
    std::fs::copy(from.join("model.safetensors"), to.join("model.safetensors")).expect("is there");
    ModelFiles::open(Some(to)).expect("opens")
}

#[test]
fn a_folder_with_more_or_fewer_layers_than_its_configuration_names_is_refused() {
    let to = folder("layers");
    for (name, layers, tensor) in
        [("llama/gqa2_tied", 2, "layers.2."), ("families/gpt2", 2, "h.2."), ("families/bert", 2, "layer.2.")]
    {
        let from = fixtures().join(name);
        for (asked, should) in [(layers + 1, tensor.to_owned()), (layers - 1, tensor.replace('2', "1"))] {
            let files = with_layers(&from, &to.join("model"), asked);
            let out = to.join("x.gguf");
            let refused = to_gguf(&files, &out, &Quantisation::default(), |_, _| Ok(()));
            let says = refused.expect_err(name).to_string();
            assert!(says.contains(&should), "{name} with {asked} layers: {says}");
            assert!(!out.exists(), "{name}");
        }
    }
}

#[test]
fn weights_that_do_not_fit_their_configuration_are_refused_before_a_file_is_made() {
    let to = folder("misfits");
    let from = fixtures().join("llama/gqa2_tied");
    std::fs::copy(from.join("config.json"), to.join("config.json")).expect("is there");
    let (name, norm) = ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight");
    for (tensor, shape, says) in [
        (norm, "[]", "is [], expected [32]"),
        (name, "[1,1]", "is [1, 1], expected [32, 32]"),
        (name, "[0,1]", "is [0, 1], expected [32, 32]"),
    ] {
        let end = if shape.contains('0') { 0 } else { 4 };
        let header = format!(r#"{{"{tensor}":{{"dtype":"F32","shape":{shape},"data_offsets":[0,{end}]}}}}"#);
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(&[0; 4][..end]);
        std::fs::write(to.join("model.safetensors"), file).expect("can be written");
        let files = ModelFiles::open(Some(&to)).expect("opens");
        let refused = to_gguf(&files, &to.join("x.gguf"), &Quantisation::default(), |_, _| Ok(()));
        let refused = refused.expect_err("does not fit").to_string();
        assert!(refused.contains(&format!("{tensor} {says}")), "{refused}");
        assert_eq!(to.read_dir().expect("is there").count(), 2, "{tensor}");
    }
}

#[test]
fn an_importance_matrix_of_another_model_is_refused() {
    let to = folder("importance").join("x.gguf");
    let files = ModelFiles::open(Some(&fixtures().join("llama/gqa2_tied"))).expect("opens");
    let words = |words: [i32; 2]| words.into_iter().flat_map(i32::to_le_bytes).collect::<Vec<u8>>();
    let unknown = [words([1, 1]), b"x".to_vec(), words([1, 1]), 1f32.to_le_bytes().to_vec()].concat();
    let wider = ImportanceMatrix::open(fixtures().join("gguf_files/imatrix.dat"));
    for (importance, says) in [
        (wider, "it has 64 inputs for blk.0."),
        (ImportanceMatrix::from_list("x.dat", &unknown), "it says nothing of the matrices of this model"),
    ] {
        let matrices = TensorStorage::from_name("q4_0");
        let how = Quantisation { matrices, importance: Some(importance.expect("reads")), ..Quantisation::default() };
        let refused = to_gguf(&files, &to, &how, |_, _| Ok(())).expect_err("is of another model").to_string();
        assert!(refused.contains(says) && refused.contains("make one of this model"), "{refused}");
        assert!(!to.exists());
    }
}

#[test]
fn a_progress_that_fails_ends_the_writing_and_leaves_no_file() {
    let to = folder("ended");
    let (file, back) = (to.join("x.gguf"), to.join("back"));
    let files = ModelFiles::open(Some(&fixtures().join("llama/gqa2_tied"))).expect("opens");
    let ended = |done, total| if done * 2 > total { Err(std::io::ErrorKind::Interrupted.into()) } else { Ok(()) };
    assert!(to_gguf(&files, &file, &Quantisation::default(), ended).is_err());
    assert_eq!(to.read_dir().expect("is there").count(), 0);
    to_gguf(&files, &file, &Quantisation::default(), |_, _| Ok(())).expect("writes");
    let files = ModelFiles::open(Some(&file)).expect("opens");
    assert!(to_folder(&files, &back, DType::F32, false, ended).is_err());
    assert!(!back.exists());
}

/// The squared error of what the model `files` has as `name` in a file, each input weighed by `importance`.
fn error(file: &Gguf, exact: &Gguf, name: &str, importance: &[f32]) -> f64 {
    let values = |gguf: &Gguf| {
        let tensor = gguf.tensors().iter().find(|t| t.name == name).expect("has it");
        tensor.storage.decode(gguf.data(tensor))
    };
    let squares = values(file).into_iter().zip(values(exact)).map(|(a, b)| f64::from(a - b).powi(2));
    squares.enumerate().map(|(i, square)| square * f64::from(importance[i % importance.len()])).sum()
}

#[test]
fn an_importance_matrix_lowers_the_error_that_it_weighs() {
    let to = folder("weighed");
    let files = ModelFiles::open(None).expect("the small model");
    let importance = ImportanceMatrix::open(fixtures().join("gguf_files/imatrix.gguf")).expect("reads");
    let write = |name: &str, matrices: Option<TensorStorage>, importance: Option<ImportanceMatrix>| {
        let path = to.join(name);
        let how = Quantisation { matrices, importance, ..Quantisation::default() };
        let written = to_gguf(&files, &path, &how, |_, _| Ok(())).expect("writes");
        (Gguf::open(path).expect("opens"), written.unweighed)
    };
    let (exact, _) = write("exact.gguf", None, None);
    for format in ["q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"] {
        let storage = TensorStorage::from_name(format);
        let (plain, _) = write("plain.gguf", storage.clone(), None);
        let (weighed, unweighed) = write("weighed.gguf", storage, Some(importance.clone()));
        // The embedding is told nothing of, and rows of 172 are in f16.
        assert_eq!(unweighed, 1, "{format}");
        let (mut before, mut after) = (0.0, 0.0);
        for layer in 0..5 {
            for name in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up"] {
                let name = format!("blk.{layer}.{name}.weight");
                let weights = importance.of(&name, 64).expect("has it");
                before += error(&plain, &exact, &name, weights);
                after += error(&weighed, &exact, &name, weights);
            }
        }
        assert!(after < 0.95 * before, "{format}: {after} and {before} without");
    }
}

#[test]
fn mixes_are_those_of_llama_quantize() {
    let text = std::fs::read_to_string(fixtures().join("gguf_mixes.json")).expect("the fixture");
    let expected: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let (from, to) = (folder("mixes").join("x.gguf"), folder("mixed").join("y.gguf"));
    let mut mixes = 0;
    for (name, model) in expected.as_object().expect("models") {
        let mut writer = GgufWriter::default();
        writer.text("general.architecture", model["architecture"].as_str().expect("a name"));
        for (key, value) in model["metadata"].as_object().expect("metadata") {
            writer.u32(key, value.as_u64().expect("a number") as u32);
        }
        writer.f32(model["epsilon"].as_str().expect("a key"), 1e-5);
        let roles = model["roles"].as_array().expect("names");
        let of_layer = |i| roles.iter().map(move |role| format!("{i}.{}", role.as_str().expect("a name")));
        let mut short: Vec<String> = (0..model["layers"].as_u64().expect("a number")).flat_map(of_layer).collect();
        let whole =
            |name: &str| if name.contains('.') { format!("blk.{name}.weight") } else { format!("{name}.weight") };
        short.push("token_embd".into());
        short.extend((model["tied"] == false).then(|| "output".to_owned()));
        for name in &short {
            writer.tensor(&whole(name), &[2, 256], &TensorStorage::plain(DType::F32)).expect("fits");
        }
        let mut bytes = Vec::new();
        writer.write::<std::io::Error>(&mut bytes, |_| Ok(vec![0; 2048])).expect("writes");
        std::fs::write(&from, bytes).expect("can be written");
        let files = ModelFiles::open(Some(&from)).expect("opens");
        for (mix, should) in model["mixes"].as_object().expect("mixes") {
            let how = Quantisation { mix: Mix::from_name(mix), ..Quantisation::default() };
            assert!(how.mix.is_some(), "{mix}");
            to_gguf(&files, &to, &how, |_, _| Ok(())).expect("writes");
            let mut expected = std::collections::BTreeMap::new();
            for (format, names) in should["others"].as_object().expect("formats") {
                expected.extend(names.as_str().expect("names").split(' ').map(|n| (whole(n), format.as_str())));
            }
            let usual = should["usual"].as_str().expect("a format");
            for tensor in Gguf::open(&to).expect("opens").tensors() {
                let should = expected.get(&tensor.name).copied().unwrap_or(usual);
                assert_eq!(tensor.storage.name(), should, "{name} {mix} {}", tensor.name);
            }
            mixes += 1;
        }
    }
    assert_eq!(mixes, 7 * 9);
}
