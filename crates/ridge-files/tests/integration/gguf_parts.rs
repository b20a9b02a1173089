//! Models in several GGUF files, as llama.cpp's tools write them (`fixtures/gguf_files.sh`).

use std::path::{Path, PathBuf};

use ridge_files::gguf::{Gguf, GgufWriter, TensorStorage};
use ridge_graph::DType;

use crate::common::fixtures;

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
fn parts_that_are_missing_renamed_or_anothers_are_refused() {
    let refusal = |path: PathBuf| Gguf::open(path).expect_err("is broken").to_string();
    let to = copied("missing");
    std::fs::remove_file(to.join(part(2))).expect("can be removed");
    let says = refusal(to.join(part(3)));
    assert!(
        says.contains("it has 3 parts, but") && says.contains("model-00002-of-00003.gguf does not exist"),
        "{says}"
    );
    std::fs::copy(to.join(part(3)), to.join(part(2))).expect("can be written");
    let says = refusal(to.join(part(1)));
    assert!(says.contains("its name says part 2 of 3, but its metadata do not"), "{says}");
    std::fs::rename(to.join(part(1)), to.join("model.gguf")).expect("can be renamed");
    let says = refusal(to.join("model.gguf"));
    assert!(says.contains("it is part 1 of 3, but its name is not NAME-00001-of-00003.gguf"), "{says}");
    // A part alone in memory has no neighbours.
    let bytes = std::fs::read(to.join("model.gguf")).expect("is there");
    let says = Gguf::from_bytes("x.gguf", bytes).expect_err("is a part").to_string();
    assert!(says.contains("x.gguf: it is one of 3 parts"), "{says}");
}

/// A part with one tensor.
fn written(folder: &Path, no: u16, count: u16, tensors: i32, name: &str) -> PathBuf {
    let mut writer = GgufWriter::default();
    writer.u16("split.no", no);
    writer.u16("split.count", count);
    writer.i32("split.tensors.count", tensors);
    writer.tensor(name, &[2], &TensorStorage::plain(DType::F32)).expect("fits");
    let path = folder.join(format!("x-{:05}-of-{count:05}.gguf", no + 1));
    let mut out = Vec::new();
    writer.write::<std::io::Error>(&mut out, |_| Ok(vec![0; 8])).expect("writes");
    std::fs::write(&path, out).expect("can be written");
    path
}

#[test]
fn parts_with_the_same_tensor_or_too_few_are_refused() {
    let to = folder("tensors");
    written(&to, 1, 2, 2, "a");
    let says = Gguf::open(written(&to, 0, 2, 2, "a")).expect_err("twice").to_string();
    assert!(says.contains("with its parts it has the tensor a twice"), "{says}");
    let says = Gguf::open(written(&to, 0, 2, 3, "b")).expect_err("too few").to_string();
    assert!(says.contains("its 2 parts have 2 tensors, but split.tensors.count = 3"), "{says}");
    let says = Gguf::open(written(&to, 2, 2, 3, "b")).expect_err("no such part").to_string();
    assert!(says.contains("split.no = 2, but there are 2 parts"), "{says}");
}
