//! Published tensors taken apart: what stays where it is, what is moved, and what is refused.

use ridge_files::Checkpoint;
use ridge_files::checkpoint::{Part, Rows};
use ridge_graph::DType;

/// A checkpoint of f32 tensors that count up from 0.
fn checkpoint(tensors: &[(&str, &[usize])]) -> Checkpoint {
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, shape)| (0..shape.iter().product()).flat_map(|i: usize| (i as f32).to_le_bytes()).collect())
        .collect();
    let views = tensors.iter().zip(&data).map(|((name, shape), data)| {
        (*name, safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.to_vec(), data).unwrap())
    });
    Checkpoint::from_bytes("test", safetensors::serialize(views, None).unwrap()).unwrap()
}

fn part(of: &str, name: &str, transposed: bool, rows: Option<Rows>) -> Part {
    Part { of: of.into(), name: name.into(), transposed, rows }
}

fn values(checkpoint: &Checkpoint, name: &str) -> (Vec<usize>, Vec<f64>) {
    let view = checkpoint.tensor(name).unwrap();
    assert_eq!(view.dtype, DType::F32);
    (view.shape.to_vec(), DType::F32.decode(view.data))
}

#[test]
fn rows_that_lie_together_are_not_copied() {
    let whole = checkpoint(&[("layers.0.qkv", &[6, 2]), ("layers.10.qkv", &[6, 2]), ("layers.0.other", &[1])]);
    let start = whole.tensor("layers.10.qkv").unwrap().data.as_ptr() as usize;
    let parts = [
        part("layers.*.qkv", "layers.*.q", false, Some(Rows::range(0, 4))),
        part("layers.*.qkv", "layers.*.k", false, Some(Rows::range(4, 2))),
    ];
    let divided = whole.divided(&parts).unwrap();
    let names: Vec<&str> = divided.tensors().map(|t| t.name).collect();
    assert_eq!(names, ["layers.0.k", "layers.0.other", "layers.0.q", "layers.10.k", "layers.10.q"]);
    assert_eq!(values(&divided, "layers.0.k"), (vec![2, 2], vec![8.0, 9.0, 10.0, 11.0]));
    assert_eq!(divided.tensor("layers.10.k").unwrap().data.as_ptr() as usize - start, 4 * 2 * 4);
}

#[test]
fn blocks_of_rows_and_transposed_matrices_are_moved() {
    let whole = checkpoint(&[("fused", &[6, 2]), ("bias", &[6]), ("turned", &[2, 3]), ("square", &[2, 3])]);
    let third = |first| Some(Rows { first, len: 1, stride: 3, blocks: 2 });
    let parts = [
        part("fused", "first", false, third(0)),
        part("fused", "blocks", false, third(1)),
        part("fused", "last", false, third(2)),
        part("bias", "bias.first", true, third(0)),
        part("bias", "bias.blocks", true, third(1)),
        part("bias", "bias.last", true, third(2)),
        part("turned", "column", true, Some(Rows::range(0, 1))),
        part("turned", "columns", true, Some(Rows::range(1, 2))),
        part("square", "all", true, None),
    ];
    let divided = whole.divided(&parts).unwrap();
    assert_eq!(divided.dtype("blocks"), Some(DType::F32));
    assert_eq!(values(&divided, "blocks"), (vec![2, 2], vec![2.0, 3.0, 8.0, 9.0]));
    assert_eq!(values(&divided, "bias.blocks"), (vec![2], vec![1.0, 4.0]));
    assert_eq!(values(&divided, "columns"), (vec![2, 2], vec![1.0, 4.0, 2.0, 5.0]));
    assert_eq!(values(&divided, "all"), (vec![3, 2], vec![0.0, 3.0, 1.0, 4.0, 2.0, 5.0]));
}

#[test]
fn a_large_transpose_is_right_across_its_blocks() {
    let divided = checkpoint(&[("w", &[130, 67])]).divided(&[part("w", "t", true, None)]).unwrap();
    let (shape, got) = values(&divided, "t");
    assert_eq!(shape, [67, 130]);
    let want: Vec<f64> = (0..67).flat_map(|c| (0..130).map(move |r| f64::from(r * 67 + c))).collect();
    assert_eq!(got, want);
}

#[test]
fn what_does_not_fit_is_refused_by_the_tensor() {
    let refusal = |shape: &[usize], part: Part| checkpoint(&[("w", shape)]).divided(&[part]).unwrap_err().to_string();
    let message = refusal(&[6, 2], part("w", "x", false, Some(Rows::range(4, 3))));
    assert_eq!(
        message,
        "test: w has the shape [6, 2], but should have at least 7 rows; check that config.json belongs to this checkpoint"
    );
    let message = refusal(&[6, 2, 1, 1], part("w", "x", true, None));
    assert!(message.contains("w has the shape [6, 2, 1, 1], but should have at most three axes"), "{message}");
    let message = refusal(&[6], part("other.*", "x", false, None));
    assert!(message.contains("there is no tensor other.*"), "{message}");
    for (first, len, asked) in [(0, 5, 5), (1, 5, 5), (2, 2, 2)] {
        let message = refusal(&[6, 2], part("w", "x", false, Some(Rows::range(first, len))));
        assert!(message.contains(&format!("w has 6 rows, but the configuration requires {asked}")), "{message}");
    }
    let twice = [part("w", "x", false, None), part("w", "y", false, Some(Rows::range(3, 3)))];
    let message = checkpoint(&[("w", &[6, 2])]).divided(&twice).unwrap_err().to_string();
    assert!(message.contains("w has 6 rows, but the configuration requires 9"), "{message}");
    let both = checkpoint(&[("w", &[2]), ("x", &[2])]).divided(&[part("w", "x", false, None)]).unwrap_err().to_string();
    assert!(both.contains("x exists both as a tensor and as a part of another"), "{both}");
}

#[test]
fn a_model_saved_without_its_head_gets_its_prefix() {
    let bare = || checkpoint(&[("wte.weight", &[2]), ("h.0.w", &[2])]);
    let names = |c: &Checkpoint| c.tensors().map(|t| t.name.to_owned()).collect::<Vec<_>>();
    let prefixed = bare().prefixed("transformer.", "transformer.wte.weight");
    assert_eq!(names(&prefixed), ["transformer.h.0.w", "transformer.wte.weight"]);
    assert_eq!(names(&prefixed.prefixed("transformer.", "transformer.wte.weight")).len(), 2);
    assert_eq!(names(&bare().prefixed("model.", "model.embed.weight")), ["h.0.w", "wte.weight"]);
}
