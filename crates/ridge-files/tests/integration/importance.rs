//! Importance matrices, as llama.cpp's tools write them (`fixtures/gguf_files.sh`).

use ridge_files::gguf::ImportanceMatrix;

use crate::common::fixtures;

#[test]
fn both_layouts_of_an_importance_matrix_say_the_same() {
    let open = |name: &str| ImportanceMatrix::open(fixtures().join("gguf_files").join(name)).expect("reads");
    let (new, old) = (open("imatrix.gguf"), open("imatrix.dat"));
    // Seven matrices of each of five layers; the output projection is the embedding, and is not told of.
    assert_eq!((new.len(), old.len()), (35, 35));
    for (name, inputs) in [("blk.0.attn_q.weight", 64), ("blk.4.ffn_down.weight", 172)] {
        let (new, old) = (new.of(name, inputs).expect("has it"), old.of(name, inputs).expect("has it"));
        assert!(new.iter().all(|v| *v > 0.0));
        for (a, b) in new.iter().zip(old) {
            assert!((a - b).abs() <= 1e-5 * a.abs(), "{name}: {a} {b}");
        }
    }
    assert!(new.of("blk.0.attn_q.weight", 63).is_none() && new.of("x", 64).is_none());
}

#[test]
fn what_is_no_importance_matrix_is_refused() {
    let whole = std::fs::read(fixtures().join("gguf_files/imatrix.dat")).expect("is there");
    let says = |bytes: &[u8]| ImportanceMatrix::from_list("x.dat", bytes).expect_err("is broken").to_string();
    let end = 4 + 35 * (4 + 20 + 8 + 64 * 4);
    assert!(whole.len() > end);
    for len in [0, 3, 4, 7, 20, 40, 1000, 8000] {
        assert!(says(&whole[..len]).contains("neither GGUF nor a list"), "{len}");
    }
    let mut huge = whole.clone();
    huge[4..8].copy_from_slice(&i32::MAX.to_le_bytes());
    assert!(says(&huge).contains("neither GGUF nor a list"));
    huge[4..8].copy_from_slice(&(-1i32).to_le_bytes());
    assert!(says(&huge).contains("neither GGUF nor a list"));
    assert!(says(&0i32.to_le_bytes()).contains("says nothing of any matrix"));
    // A list of one matrix of one input.
    let one = |sum: f32| {
        let numbers = [1i32.to_le_bytes(), 1i32.to_le_bytes()].concat();
        [&numbers[..], b"w", &1i32.to_le_bytes(), &1i32.to_le_bytes(), &sum.to_le_bytes()].concat()
    };
    assert_eq!(ImportanceMatrix::from_list("x.dat", &one(2.0)).expect("reads").of("w", 1), Some(&[2.0][..]));
    assert!(says(&one(f32::NAN)).contains("has NaN for w"));
    assert!(says(&one(-1.0)).contains("has -1 for w"));
    let model = fixtures().join("gguf_files/model-00001-of-00003.gguf");
    assert!(ImportanceMatrix::open(model).expect_err("is a model").to_string().contains("says nothing of any matrix"));
}
