//! GGUF files: what was written is read, and what is broken is refused by name before anything is allocated for it.

use ridge_files::gguf::{Gguf, GgufValue, GgufWriter, TensorStorage};
use ridge_graph::DType;

/// A small file with metadata of every type, and two tensors.
fn sample() -> Vec<u8> {
    let mut writer = GgufWriter::default();
    writer.text("general.architecture", "llama");
    writer.u32("a", 7);
    writer.f32("b", 0.5);
    writer.bool("c", true);
    writer.texts("d", ["x", "yz"].into_iter());
    writer.i32s("e", &[-1, 2]);
    writer.tensor("t", &[2, 32], &TensorStorage::from_name("q8_0").expect("known")).expect("fits");
    writer.tensor("u", &[3], &TensorStorage::plain(DType::F32)).expect("fits");
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
    assert_eq!(gguf.metadata()["a"], GgufValue::U32(7));
    assert_eq!(gguf.metadata()["c"], GgufValue::Bool(true));
    let GgufValue::Array(texts) = &gguf.metadata()["d"] else { panic!("an array") };
    assert!(gguf.elements(texts).eq([GgufValue::String("x".into()), GgufValue::String("yz".into())]));
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
        (t + 1, &[9], "has the tensor t with 9 axes; the number must be 1 to 4"),
        (t + 5, &[31], "which has rows of 31, which blocks of 32 of q8_0 do not divide"),
        (t + 5, &huge, "the tensor t"),
        (t + 21, &[200], "type 200, which Ridge does not know"),
        (t + 21, &[16], "type iq2_xxs, which Ridge does not read"),
        (t + 25, &[1], "which is not a multiple of 32"),
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
fn made(keys: impl Fn(&mut GgufWriter), tensors: &[(&str, &[usize])]) -> Vec<u8> {
    let mut writer = GgufWriter::default();
    keys(&mut writer);
    for (name, shape) in tensors {
        writer.tensor(name, shape, &TensorStorage::plain(DType::F32)).expect("fits");
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
        assert!(refused.contains(&format!("has general.alignment = {n}, which is not a power of two")), "{refused}");
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
    let refused = refusal(made(|_| (), &[("one", &[])]));
    assert!(refused.contains("has the tensor one with 0 axes; the number must be 1 to 4"), "{refused}");
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
