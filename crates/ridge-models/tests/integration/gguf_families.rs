//! Families whose GGUF files are read and not written, against files of llama.cpp's own converter
//! (`fixtures/gguf_families.py`).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::common::{Evaluated, Fixture, OnCpu, SHUFFLED, Sequence, fixtures, judge, plain_logits, relative};
use ridge_files::gguf::{Gguf, TensorStorage};
use ridge_graph::{DType, Precision, Role};
use ridge_models::ModelFiles;
use ridge_models::gguf::{Quantisation, to_folder, to_gguf};

const NAMES: [&str; 5] = ["gemma3n_four", "gemma4", "gemma4_dense", "gemma4_moe", "rwkv7"];

fn file(name: &str) -> PathBuf {
    fixtures().join(format!("gguf_families/{name}.gguf"))
}

/// An empty folder of this test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gguf_families").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("can be made");
    folder
}

/// The relative distance of a model's logits, evaluated in doubles, from those of transformers in doubles.
fn off(fixture: &Fixture) -> f64 {
    let (tokens, want) = (fixture.prompt(), fixture.expected.tensor("logits_f64"));
    let mut sequence = [Sequence::new(&tokens, &SHUFFLED[0])];
    let got = Evaluated::new(fixture, Precision::Exact).run(&mut sequence, &[tokens.len()]);
    relative(got.floats(), want.floats())
}

#[test]
fn a_file_means_what_its_checkpoint_means() {
    for name in NAMES {
        let fixture = Fixture::family_at(name, &file(name));
        let off = off(&fixture);
        println!("{name}: off by {off:.1e}");
        // Numbers of metadata are f32: epsilons, cutoffs and caps.
        assert!(off < 1e-6, "{name}: off by {off:e}");
    }
}

#[test]
fn a_file_has_the_weights_of_its_checkpoint_and_no_others() {
    for name in NAMES {
        let (is, was) = (Fixture::family_at(name, &file(name)), Fixture::family(name, None));
        let weights = |fixture: &Fixture| {
            fixture.model.graph.args(Role::Weight).map(|arg| arg.name.to_string()).collect::<BTreeSet<_>>()
        };
        assert_eq!(weights(&is), weights(&was), "{name}");
        for weight in weights(&is) {
            let (new, old) = (is.checkpoint.tensor(&weight), was.checkpoint.tensor(&weight));
            let (new, old) = (new.expect("in the file"), old.expect("in the checkpoint"));
            assert_eq!((new.shape, new.dtype, new.data), (old.shape, old.dtype, old.data), "{name} {weight}");
        }
        let left: Vec<&str> =
            is.checkpoint.tensors().map(|tensor| tensor.name).filter(|name| !weights(&is).contains(*name)).collect();
        assert!(left.is_empty(), "{name}: {left:?}");
    }
}

#[test]
fn logits_of_a_file_are_as_near_to_exact_as_those_of_transformers() {
    for name in NAMES {
        let fixture = Fixture::family_at(name, &file(name));
        let tokens = fixture.prompt();
        let got = OnCpu::new(&fixture, 2).run(&mut [Sequence::new(&tokens, &SHUFFLED[0])], &[tokens.len()]);
        let (torch, exact) = (fixture.expected.tensor("logits_f32"), fixture.expected.tensor("logits_f64"));
        judge(name, &got, &torch, &plain_logits(&fixture), &exact);
        let best = |row: &[f64]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]));
        let width = fixture.config.vocab_size;
        let rows = got.floats().chunks(width).zip(exact.floats().chunks(width));
        rows.enumerate().for_each(|(nth, (got, exact))| assert_eq!(best(got), best(exact), "{name} token {nth}"));
    }
}

#[test]
fn a_file_is_quantised_but_for_what_llama_cpp_keeps() {
    let to = folder("formats").join("x.gguf");
    for name in NAMES {
        let files = ModelFiles::open(Some(&file(name))).expect("opens");
        // Rows of 20 become f16.
        let how = Quantisation { matrices: TensorStorage::from_name("q8_0"), ..Quantisation::default() };
        to_gguf(&files, &to, &how, |_, _| Ok(())).unwrap_or_else(|e| panic!("{name}: {e}"));
        let gguf = Gguf::open(&to).expect("opens");
        let kept = |name: &str| {
            let parts = ["altup", "laurel", "per_layer_model_proj", "ffn_gate_inp", "_w1.", "_a2.", "_g1.", "lerp"];
            parts.iter().any(|part| name.contains(part))
        };
        let plain = TensorStorage::plain(DType::F32);
        for tensor in gguf.tensors().iter().filter(|tensor| kept(&tensor.name)) {
            assert_eq!(tensor.storage, plain, "{name} {}", tensor.name);
        }
        let matrices = gguf.tensors().iter().filter(|tensor| tensor.shape.len() > 1);
        assert!(matrices.clone().any(|tensor| tensor.storage != plain), "{name}");
        let off = off(&Fixture::family_at(name, &to));
        assert!((1e-6..5e-2).contains(&off), "{name}: off by {off:e}");
    }
}

#[test]
fn a_file_becomes_a_folder_of_the_same_model() {
    let to = folder("folders");
    for name in NAMES {
        let gguf = Gguf::open(file(name)).expect("opens");
        to_folder(&gguf, &to, DType::F32, false, |_, _| Ok(())).unwrap_or_else(|e| panic!("{name}: {e}"));
        let off = off(&Fixture::family_at(name, &to));
        assert!(off < 1e-6, "{name}: off by {off:e}");
    }
}

#[test]
fn a_checkpoint_is_not_written_as_a_file() {
    let to = folder("refused").join("x.gguf");
    for name in NAMES {
        let files = ModelFiles::open(Some(&fixtures().join("families").join(name))).expect("opens");
        let refused =
            to_gguf(&files, &to, &Quantisation::default(), |_, _| Ok(())).expect_err("is refused").to_string();
        assert!(refused.contains("GGUF files of its family are read, and not written"), "{name}: {refused}");
        assert!(!to.exists(), "{name}");
    }
}
