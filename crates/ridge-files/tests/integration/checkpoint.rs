//! Safetensors: a sound checkpoint gives its bytes, and a hostile one an error that names what is wrong.

use std::path::Path;

use proptest::prelude::*;
use ridge_files::{Checkpoint, FilesError};
use ridge_graph::DType;
use safetensors::SafeTensors;
use serde_json::{Value, json};

/// A safetensors file with this header and this many bytes of data: 0, 1, 2 ...
fn file(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..data_bytes).map(|i| i as u8));
    bytes
}

fn entry(dtype: &str, shape: &[u64], begin: u64, end: u64) -> Value {
    json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]})
}

fn read(bytes: Vec<u8>) -> Result<Checkpoint, FilesError> {
    Checkpoint::from_bytes("x.safetensors", bytes)
}

fn refusal(bytes: Vec<u8>) -> String {
    read(bytes).unwrap_err().to_string()
}

/// The message that refuses a file with these entries over 64 bytes of data.
fn entries_refusal(entries: Value) -> String {
    refusal(file(&entries.to_string(), 64))
}

fn assert_names(message: &str, parts: &[&str]) {
    assert!(message.starts_with("x.safetensors: "), "{message}");
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

/// Two tensors and their metadata.
fn sound() -> Vec<u8> {
    let header = json!({
        "__metadata__": {"format": "pt"},
        "a": entry("F32", &[2, 3], 0, 24),
        "b": entry("BF16", &[4], 24, 32)
    });
    file(&header.to_string(), 32)
}

fn write(dir: &Path, name: &str, bytes: impl AsRef<[u8]>) {
    std::fs::write(dir.join(name), bytes).unwrap();
}

#[test]
fn tensors_give_their_shape_dtype_and_bytes() {
    let checkpoint = read(sound()).unwrap();
    assert_eq!(checkpoint.len(), 2);
    let a = checkpoint.tensor("a").unwrap();
    assert_eq!((a.name, a.dtype, a.shape), ("a", DType::F32, &[2, 3][..]));
    assert_eq!(a.data, (0..24).collect::<Vec<u8>>());
    let b = checkpoint.tensor("b").unwrap();
    assert_eq!((b.dtype, b.shape, b.data.len()), (DType::BF16, &[4][..], 8));
    let names: Vec<&str> = checkpoint.tensors().map(|t| t.name).collect();
    assert_eq!(names, ["a", "b"]);
}

#[test]
fn every_dtype_of_the_graph_can_be_read() {
    for (name, dtype) in [
        ("F32", DType::F32),
        ("BF16", DType::BF16),
        ("F16", DType::F16),
        ("F8_E4M3", DType::F8E4M3),
        ("F8_E5M2", DType::F8E5M2),
        ("I8", DType::I8),
        ("U8", DType::U8),
        ("I32", DType::I32),
        ("I64", DType::I64),
        ("BOOL", DType::Bool),
    ] {
        let bytes = 3 * dtype.size_bytes();
        let header = json!({"t": entry(name, &[3], 0, bytes as u64)}).to_string();
        let checkpoint = read(file(&header, bytes)).unwrap();
        assert_eq!(checkpoint.tensor("t").unwrap().dtype, dtype);
    }
}

#[test]
fn dtype_that_ridge_lacks_is_refused_by_name() {
    for (name, bytes) in [("F64", 64), ("U16", 16), ("C64", 64), ("F8_E8M0", 8), ("F8_E4M3FNUZ", 8)] {
        let header = json!({"t": entry(name, &[8], 0, bytes)}).to_string();
        let message = refusal(file(&header, bytes as usize));
        assert_names(&message, &["the tensor t has dtype", name, "save the model in one of these"]);
        assert!(!message.contains("damaged"), "{message}");
    }
    assert_names(&entries_refusal(json!({"t": entry("F33", &[16], 0, 64)})), &["tensor t", "F33"]);
}

#[test]
fn empty_tensors_and_scalars_are_read() {
    let header = json!({
        "none": entry("F32", &[0, 7], 4, 4),
        "scalar": entry("F32", &[], 0, 4),
        "first": entry("F32", &[0], 0, 0)
    });
    let checkpoint = read(file(&header.to_string(), 4)).unwrap();
    assert_eq!(checkpoint.tensor("scalar").unwrap().data.len(), 4);
    assert!(checkpoint.tensor("none").unwrap().data.is_empty());
    assert!(read(file("{}", 0)).unwrap().is_empty());
}

#[test]
fn file_without_room_for_a_header_is_refused() {
    for bytes in 0..8 {
        assert_names(&refusal(vec![0; bytes]), &["too short"]);
    }
}

#[test]
fn header_length_that_lies_is_refused() {
    for length in [u64::MAX, u64::MAX - 7, 1 << 63, 100_000_001] {
        let mut bytes = sound();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        assert_names(&refusal(bytes), &[&length.to_string(), "limit"]);
    }
    let mut bytes = sound();
    bytes[..8].copy_from_slice(&10_000u64.to_le_bytes());
    assert_names(&refusal(bytes), &["claims 10000 bytes"]);
}

#[test]
fn every_truncation_is_refused() {
    let bytes = sound();
    for end in 0..bytes.len() {
        assert!(read(bytes[..end].to_vec()).is_err(), "cut at {end}");
    }
}

#[test]
fn trailing_bytes_are_refused() {
    let mut bytes = sound();
    bytes.push(0);
    assert_names(&refusal(bytes), &["end at byte 32 of the data, but the data end at 33"]);
}

#[test]
fn header_that_is_not_an_object_is_refused() {
    for header in ["", " {}", "[]", "{", "{}x", "\u{0}"] {
        assert!(read(file(header, 0)).is_err(), "{header:?}");
    }
    assert!(read(file(&"[".repeat(1_000_000), 0)).is_err());
}

#[test]
fn offsets_outside_the_file_are_refused() {
    for (begin, end) in [(0, 65), (64, 128), (u64::MAX - 3, u64::MAX), (8, 4)] {
        let message = entries_refusal(json!({"t": entry("F32", &[1], begin, end)}));
        assert_names(&message, &["tensor t", "outside the file's 0..64"]);
    }
}

#[test]
fn overlapping_tensors_are_refused() {
    let message = entries_refusal(json!({
        "a": entry("F32", &[10], 0, 40),
        "b": entry("F32", &[10], 24, 64)
    }));
    assert_names(&message, &["the tensor b at 24..64 overlaps a, which ends at 40"]);
    let message = entries_refusal(json!({
        "a": entry("F32", &[16], 0, 64),
        "b": entry("F32", &[16], 0, 64)
    }));
    assert_names(&message, &["overlaps"]);
}

#[test]
fn gaps_between_tensors_are_refused() {
    let message = entries_refusal(json!({
        "a": entry("F32", &[4], 0, 16),
        "b": entry("F32", &[4], 48, 64)
    }));
    assert_names(&message, &["the tensor b at 48..64 leaves a gap after a, which ends at 16"]);
}

#[test]
fn data_that_does_not_fit_shape_and_dtype_is_refused() {
    let message = entries_refusal(json!({"t": entry("F32", &[15], 0, 64)}));
    assert_names(&message, &["tensor t", "needs 60 bytes", "has 64"]);
    let message = entries_refusal(json!({"t": entry("BF16", &[16], 0, 64)}));
    assert_names(&message, &["dtype bf16 needs 32 bytes"]);
}

#[test]
fn shape_whose_product_overflows_is_refused() {
    for shape in [[1 << 62, 16], [u64::MAX, 2], [1 << 32, 1 << 32]] {
        let message = entries_refusal(json!({"t": entry("F32", &shape, 0, 64)}));
        assert_names(&message, &["more than 2^64"]);
    }
}

#[test]
fn nonsense_entries_are_refused() {
    for value in [
        json!(3),
        json!({}),
        json!({"dtype": "F32", "shape": [-1], "data_offsets": [0, 64]}),
        json!({"dtype": "F32", "shape": [16.0], "data_offsets": [0, 64]}),
        json!({"dtype": "F32", "shape": "16", "data_offsets": [0, 64]}),
        json!({"dtype": "F32", "shape": [16], "data_offsets": [0]}),
        json!({"dtype": "F32", "shape": [16], "data_offsets": [0, 64, 64]}),
    ] {
        assert_names(&entries_refusal(json!({"some.name": value})), &["some.name"]);
    }
    assert_names(&entries_refusal(json!({"__metadata__": {"a": 1}})), &["__metadata__"]);
}

#[test]
fn tensor_named_twice_in_a_header_is_refused() {
    let one = entry("F32", &[16], 0, 64).to_string();
    let message = refusal(file(&format!(r#"{{"t":{one},"t":{one}}}"#), 64));
    assert!(message.contains("the key \"t\" appears twice"), "{message}");
}

#[test]
fn asking_for_an_unknown_tensor_names_it() {
    let message = read(sound()).unwrap().tensor("c").unwrap_err().to_string();
    assert_names(&message, &["there is no tensor c"]);
}

#[test]
fn check_reports_every_kind_of_difference_at_once() {
    let checkpoint = read(sound()).unwrap();
    checkpoint.check([("a", [2, 3].as_slice()), ("b", &[4])], &[]).unwrap();
    let error = checkpoint.check([("a", vec![3, 2]), ("c", vec![1])], &["x.*"]).unwrap_err();
    let FilesError::Tensors(mismatch) = &error else { panic!("{error}") };
    assert_eq!(mismatch.missing, [("c".to_owned(), vec![1])]);
    assert_eq!(mismatch.extra, [("b".to_owned(), vec![4])]);
    assert_eq!(mismatch.misshapen, [("a".to_owned(), vec![3, 2], vec![2, 3])]);
    let message = error.to_string();
    for part in ["1 missing:\n  c [1]", "b [4]", "a is [2, 3], expected [3, 2]", "config.json"] {
        assert!(message.contains(part), "{part:?} is not in {message}");
    }
    checkpoint.check([("a", [2, 3])], &["*b*"]).unwrap();
}

#[test]
fn check_shows_ten_of_many() {
    let expected = (0..25).map(|i| (format!("layer.{i}"), vec![1]));
    let message = read(file("{}", 0)).unwrap().check(expected, &[]).unwrap_err().to_string();
    assert!(message.contains("25 missing:"), "{message}");
    assert!(message.contains("layer.9 ") && !message.contains("layer.10 "), "{message}");
    assert!(message.contains("and 15 more"), "{message}");
}

/// A folder with two shards and their index, which `edit` may change.
fn sharded(edit: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, tensor) in [("one.safetensors", "a"), ("two.safetensors", "b")] {
        let header = json!({tensor: entry("F32", &[2], 0, 8)}).to_string();
        write(dir.path(), name, file(&header, 8));
    }
    let mut index = json!({
        "metadata": {"total_size": 16},
        "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}
    });
    edit(&mut index);
    write(dir.path(), "model.safetensors.index.json", index.to_string());
    dir
}

fn open_refusal(dir: &tempfile::TempDir) -> String {
    Checkpoint::open(dir.path()).unwrap_err().to_string()
}

#[test]
fn shards_are_read_as_one() {
    let dir = sharded(|_| {});
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.len(), 2);
    assert_eq!(checkpoint.tensor("b").unwrap().shape, [2]);
}

#[test]
fn index_that_leaves_the_folder_is_refused() {
    for name in ["../one.safetensors", "/etc/passwd", "..\\one.safetensors", "sub/one.safetensors", ".."] {
        let dir = sharded(|index| index["weight_map"]["a"] = json!(name));
        let message = open_refusal(&dir);
        assert!(message.contains("is not the plain name"), "{message}");
    }
}

#[test]
fn index_that_disagrees_with_its_shards_is_refused() {
    let missing_shard = sharded(|index| index["weight_map"]["a"] = json!("three.safetensors"));
    assert!(open_refusal(&missing_shard).contains("three.safetensors: this shard"));
    let wrong_shard = sharded(|index| index["weight_map"]["a"] = json!("two.safetensors"));
    assert!(open_refusal(&wrong_shard).contains("weight_map lists a in"));
    let no_such_tensor = sharded(|index| index["weight_map"]["c"] = json!("one.safetensors"));
    assert!(open_refusal(&no_such_tensor).contains("weight_map lists c in"));
    let unlisted = sharded(|_| {});
    let header = json!({"b": entry("F32", &[1], 0, 4), "c": entry("F32", &[1], 4, 8)}).to_string();
    write(unlisted.path(), "two.safetensors", file(&header, 8));
    assert!(open_refusal(&unlisted).contains("weight_map lacks c"));
}

#[test]
fn index_that_is_not_one_is_refused() {
    for text in ["", "{}", "[]", r#"{"weight_map": 3}"#, r#"{"weight_map": {}}"#, r#"{"weight_map": {"a": 3}}"#] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "model.safetensors.index.json", text);
        assert!(open_refusal(&dir).contains("model.safetensors.index.json: "), "{text}");
    }
}

#[test]
fn tensor_in_two_shards_is_refused() {
    let dir = sharded(|_| {});
    let header = json!({"b": entry("F32", &[1], 0, 4), "a": entry("F32", &[1], 4, 8)}).to_string();
    write(dir.path(), "two.safetensors", file(&header, 8));
    let message = open_refusal(&dir);
    assert!(message.contains("the tensor a is also in"), "{message}");
}

#[test]
fn only_safetensors_file_is_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "weights.safetensors", sound());
    write(dir.path(), "._weights.safetensors", "not one");
    assert_eq!(Checkpoint::open(dir.path()).unwrap().len(), 2);
    write(dir.path(), "more.safetensors", sound());
    assert!(open_refusal(&dir).contains("contains 2 *.safetensors files"));
}

#[test]
fn folder_without_weights_says_what_to_fetch() {
    let dir = tempfile::tempdir().unwrap();
    assert!(open_refusal(&dir).contains("download model.safetensors"));
    write(dir.path(), "pytorch_model.bin", "");
    assert!(open_refusal(&dir).contains("convert it to safetensors"));
    assert!(Checkpoint::open(dir.path().join("none")).is_err());
}

#[test]
fn empty_file_and_folder_in_place_of_weights_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "model.safetensors", "");
    assert!(open_refusal(&dir).contains("0 bytes long"));
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    std::fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    assert!(open_refusal(&dir).contains("not a regular file"));
}

/// Whatever is accepted, the reference implementation accepts and reads the same way, and all of it can be looked at.
fn agrees_with_the_reference(bytes: Vec<u8>) {
    let Ok(ours) = Checkpoint::from_bytes("x.safetensors", bytes.clone()) else {
        return;
    };
    let theirs = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(ours.len(), theirs.len());
    for tensor in ours.tensors() {
        let their = theirs.tensor(tensor.name).unwrap();
        assert_eq!((tensor.shape, tensor.data), (their.shape(), their.data()));
    }
}

proptest! {
    #[test]
    fn damaged_file_never_panics_and_is_never_misread(
        edits in proptest::collection::vec((0usize..300, any::<u8>()), 1..6),
        cut in proptest::option::of(0usize..300),
    ) {
        let mut bytes = sound();
        for (at, byte) in edits {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        bytes.truncate(cut.unwrap_or(bytes.len()));
        agrees_with_the_reference(bytes);
    }

    #[test]
    fn header_of_any_numbers_never_panics_and_is_never_misread(
        shape in proptest::collection::vec(prop_oneof![0u64..9, any::<u64>()], 0..4),
        begin in prop_oneof![0u64..70, any::<u64>()],
        end in prop_oneof![0u64..70, any::<u64>()],
    ) {
        let header = json!({"t": entry("BF16", &shape, begin, end)}).to_string();
        agrees_with_the_reference(file(&header, 64));
    }
}
