//! Families whose GGUF files are read and not written, against files of llama.cpp's own converter
//! (`fixtures/gguf_families.py`).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::common::{Evaluated, Fixture, OnCpu, SHUFFLED, Sequence, fixtures, judge, plain_logits, relative};
use ridge_files::gguf::{Gguf, GgufWriter, TensorStorage};
use ridge_graph::{DType, Precision, Role};
use ridge_models::ModelFiles;
use ridge_models::gguf::{Quantisation, checkpoint, config_json, to_folder, to_gguf};

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
        let files = ModelFiles::open(Some(&file(name))).expect("opens");
        to_folder(&files, &to, DType::F32, false, |_, _| Ok(())).unwrap_or_else(|e| panic!("{name}: {e}"));
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
        assert!(refused.contains("files of its family are only read"), "{name}: {refused}");
        assert!(!to.exists(), "{name}");
    }
}

/// A file at `to` with the metadata of the model `name`, without `key`, and with what `add` adds; its only tensors are `tensors`.
fn made(
    name: &str,
    to: &Path,
    key: &str,
    add: impl Fn(&mut GgufWriter),
    tensors: &[(&str, &[usize], TensorStorage, Vec<u8>)],
) -> Gguf {
    let gguf = Gguf::open(file(name)).expect("opens");
    let mut writer = GgufWriter::default();
    gguf.metadata().iter().filter(|(own, _)| *own != key).for_each(|(own, value)| writer.copy(own, value, &gguf));
    add(&mut writer);
    for (tensor, shape, storage, _) in tensors {
        writer.tensor(tensor, shape, storage).expect("fits");
    }
    let mut out = std::io::BufWriter::new(std::fs::File::create(to).expect("can be made"));
    writer.write::<std::io::Error>(&mut out, |index| Ok(tensors[index].3.clone())).expect("writes");
    drop(out);
    Gguf::open(to).expect("opens")
}

#[test]
fn stacks_and_joined_rows_of_blocks_are_divided_between_rows() {
    let to = folder("blocks");
    let storage = TensorStorage::from_name("q8_0").expect("a format");
    let row = storage.bytes(&[1, 32]).expect("a block");
    let bytes = |rows: usize| (0..rows * row).map(|i| (i % 251) as u8).collect::<Vec<u8>>();
    let rows =
        |all: &[u8], rows: &[usize]| rows.iter().flat_map(|i| all[i * row..][..row].to_vec()).collect::<Vec<u8>>();

    let (joined, all) = ("blk.0.ffn_gate_up_exps.weight", bytes(12));
    let gguf = made(
        "gemma4_moe",
        &to.join("joined.gguf"),
        "",
        |to| to.u32("gemma4.vocab_size", 48),
        &[(joined, &[3, 4, 32], storage.clone(), all.clone())],
    );
    let weights = checkpoint(&gguf).expect("weights");
    for (name, own) in [("gate_proj", [0, 1, 4, 5, 8, 9]), ("up_proj", [2, 3, 6, 7, 10, 11])] {
        let weight = weights.tensor(&format!("model.layers.0.experts.{name}.weight")).expect("has it");
        assert_eq!((weight.shape, weight.format.map(|f| f.name())), (&[3, 2, 32][..], Some("q8_0")), "{name}");
        assert_eq!(weight.data, rows(&all, &own), "{name}");
    }

    let (stacked, all) = ("altup_proj.weight", bytes(6));
    let gguf = made(
        "gemma3n_four",
        &to.join("stacked.gguf"),
        "",
        |to| to.u32("gemma3n.vocab_size", 48),
        &[(stacked, &[3, 2, 32], storage.clone(), all.clone())],
    );
    let weights = checkpoint(&gguf).expect("weights");
    for nth in 0..3 {
        let weight = weights.tensor(&format!("model.altup_projections.{nth}.weight")).expect("has it");
        assert_eq!((weight.shape, weight.data), (&[2, 32][..], &rows(&all, &[2 * nth, 2 * nth + 1])[..]), "{nth}");
    }
    let gguf = made(
        "gemma3n_four",
        &to.join("short.gguf"),
        "",
        |to| to.u32("gemma3n.vocab_size", 48),
        &[(stacked, &[2, 3, 32], storage, all)],
    );
    let refused = checkpoint(&gguf).expect_err("is two and not three").to_string();
    assert!(refused.contains("altup_proj.weight has the shape [2, 3, 32], which does not hold 3 weights"), "{refused}");
}

#[test]
fn metadata_that_no_model_has_is_refused_by_its_key() {
    let to = folder("wrong").join("x.gguf");
    let refused = |name: &str, key: &str, add: &dyn Fn(&mut GgufWriter), problem: &str| {
        let error = config_json(&made(name, &to, key, add, &[])).expect_err(key).to_string();
        assert!(error.contains(key) && error.contains(problem), "{name} {key}: {error}");
    };
    const PATTERN: &str = "attention.sliding_window_pattern";
    for name in ["gemma3n", "gemma4"] {
        let (key, fixture) = (format!("{name}.{PATTERN}"), if name == "gemma4" { name } else { "gemma3n_four" });
        refused(fixture, &key, &|to| to.i32s(&key, &[1, 0]), "has 2 values for 5 layers");
        refused(fixture, &key, &|_| {}, "has 0 values for 5 layers");
    }
    const KV_HEADS: &str = "gemma4.attention.head_count_kv";
    refused("gemma4", KV_HEADS, &|to| to.i32s(KV_HEADS, &[2, 4, 2, 2, 2]), "differs between layers with windows");
    refused("gemma4", KV_HEADS, &|to| to.i32s(KV_HEADS, &[2, 2]), "is not one whole number for each of 5 layers");
    refused("gemma4", KV_HEADS, &|to| to.text(KV_HEADS, "2"), "is neither a number nor an array of them");
    const INNER: &str = "gemma4.feed_forward_length";
    refused("gemma4", INNER, &|to| to.i32s(INNER, &[20, 40, 20, 40, 40]), "is neither one width nor a doubled one");
    const ROTATED: &str = "gemma4.rope.dimension_count_swa";
    refused("gemma4", ROTATED, &|to| to.u32(ROTATED, 4), "= 4 differs from the 8 elements of a head");
    const UNKNOWN: &str = "rwkv7.token_shift_count";
    refused("rwkv7", UNKNOWN, &|to| to.u32(UNKNOWN, 1), "");
    let factors = |values: &[f32]| {
        let tensor = (
            "rope_freqs.weight",
            &[values.len()][..],
            TensorStorage::plain(DType::F32),
            DType::F32.encode(values.iter().map(|v| f64::from(*v))),
        );
        config_json(&made("gemma4", &to, "", |_| {}, &[tensor]))
    };
    assert!(factors(&[1.0, 1.0, 1e30]).is_ok());
    for wrong in [&[1.0, 2.0, 1e30][..], &[1e30, 1e30], &[1.0, 1e30, 1.0]] {
        let error = factors(wrong).expect_err("is refused").to_string();
        assert!(error.contains("rope_freqs.weight") && error.contains("has factors other than 1"), "{error}");
    }
}
