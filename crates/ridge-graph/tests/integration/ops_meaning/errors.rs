//! What each op says of inputs that do not fit.

use std::fmt::Write as _;

use ridge_graph::format::{CodeType, Q8_0, ScaleLayout, ScaledFormat};
use ridge_graph::ops::{
    AdamW, CrossEntropy, CrossEntropyBackward, Dequantize, Dry, Embedding, ForbidTokens, Gelu, KvWrite, LayerNorm,
    Linear, LinearGroup, LogitBias, PagedAttention, Penalties, Quantize, Rope, SampleToken, Softmax, Swiglu,
    TableWrite, TokenLayout, rope_frequencies,
};
use ridge_graph::{Composite, DType, Dim, FormatRef, Sym, Type};

fn f32s<const N: usize>(shape: [usize; N]) -> Type {
    Type::tensor(DType::F32, shape)
}

fn i32s<const N: usize>(shape: [usize; N]) -> Type {
    Type::tensor(DType::I32, shape)
}

fn cache(heads: usize) -> Type {
    Type::state(DType::BF16, [9, 2, heads, 16, 8])
}

#[test]
fn errors_say_which_input_is_wrong_and_what_it_must_be() {
    let rope = Rope { inv_freq: rope_frequencies(1e4, 16).into(), scale: 1.0 };
    let attention = PagedAttention::new(1.0, Sym::new("pairs"), Sym::new("cached"));
    let (shut, capped) = (
        PagedAttention { window: Some(0), ..attention.clone() },
        PagedAttention { softcap: Some(0.0), ..attention.clone() },
    );
    let adamw = AdamW { beta1: 0.9, beta2: 1.0, eps: 1e-8, weight_decay: 0.0 };
    let stored = f32s([4, 64]).stored_as(FormatRef::new(Q8_0));
    let odd = Quantize { format: ScaledFormat::new(CodeType::Int8, ScaleLayout::Group(48)) };
    let of_matrices = Quantize { format: ScaledFormat::new(CodeType::F8E4M3, ScaleLayout::Block) };
    let key = |dtype| Type::tensor(dtype, [3usize]);
    // One is wrong: the sequence.
    let keys = SampleToken::KEYS.map(|(name, dtype)| key(if name == "sequence" { DType::I32 } else { dtype }));
    let history = Type::state(DType::I32, [9usize, 16]);
    let said = [f32s([3, 8]), history.clone(), i32s([3, 4]), i32s([3])];
    let blocks = Type::state(DType::BF16, [Dim::from(9), 2.into(), 2.into(), Dim::sym("size"), 8.into()]);

    let cases: Vec<(&dyn Composite, Vec<Type>)> = vec![
        (&Linear { bias: false }, vec![f32s([3, 8])]),
        (&Linear { bias: false }, vec![f32s([3, 8]), f32s([8, 4])]),
        (&Linear { bias: true }, vec![f32s([3, 8]), f32s([4, 8]), f32s([8])]),
        (&Linear { bias: false }, vec![Type::state(DType::F32, [4usize, 64]), f32s([4, 64])]),
        (&Linear { bias: false }, vec![stored.clone(), f32s([4, 32])]),
        (&Quantize { format: ScaledFormat::INT8_G256 }, vec![i32s([3, 8])]),
        (&Quantize { format: ScaledFormat::INT8_G256 }, vec![stored.clone()]),
        (&odd, vec![f32s([3, 96])]),
        (&of_matrices, vec![f32s([128])]),
        (&Dequantize { dtype: DType::F32 }, vec![f32s([3, 8])]),
        (&Dequantize { dtype: DType::BF16 }, vec![stored.clone()]),
        (&LinearGroup { count: 2, biases: false }, vec![f32s([3, 8]), f32s([4, 8])]),
        (&LinearGroup { count: 2, biases: false }, vec![f32s([3, 8]), f32s([4, 8]), i32s([4, 8])]),
        (&rope, vec![f32s([3, 2, 8]), i32s([3])]),
        (&rope, vec![f32s([3, 2, 16]), i32s([4])]),
        (&rope, vec![f32s([3, 32]), i32s([3])]),
        (&Softmax, vec![f32s([])]),
        (&Swiglu, vec![f32s([3, 8]), Type::tensor(DType::BF16, [3usize, 8])]),
        (&Embedding { dtype: DType::F32 }, vec![stored.clone(), key(DType::I64)]),
        (&Embedding { dtype: DType::I32 }, vec![stored, i32s([3])]),
        (&KvWrite, vec![f32s([9, 2, 2, 16, 8]), f32s([3, 2, 8]), f32s([3, 2, 8]), i32s([3])]),
        (&KvWrite, vec![cache(2), f32s([3, 4, 8]), f32s([3, 4, 8]), i32s([3])]),
        (&KvWrite, vec![cache(2), f32s([3, 2, 8]), f32s([3, 2, 8]), i32s([2])]),
        (&KvWrite, vec![blocks, f32s([3, 2, 8]), f32s([3, 2, 8]), i32s([3])]),
        (&attention, vec![f32s([3, 3, 8]), cache(2), i32s([2, 4]), i32s([3]), i32s([3])]),
        (&attention, vec![f32s([3, 4, 16]), cache(2), i32s([2, 4]), i32s([3]), i32s([3])]),
        (&attention, vec![f32s([3, 4, 8]), cache(2), i32s([4]), i32s([3]), i32s([3])]),
        (&attention, vec![f32s([3, 4, 8]), cache(2), i32s([2, 4]), i32s([2]), i32s([3])]),
        (&shut, vec![f32s([3, 4, 8]), cache(2), i32s([2, 4]), i32s([3]), i32s([3])]),
        (&capped, vec![f32s([3, 4, 8]), cache(2), i32s([2, 4]), i32s([3]), i32s([3])]),
        (&Gelu::Tanh, vec![i32s([3])]),
        (&LayerNorm { eps: 1e-5 }, vec![f32s([3, 8]), f32s([8])]),
        (&LayerNorm { eps: 1e-5 }, vec![f32s([3, 8]), f32s([8]), f32s([4])]),
        (&TokenLayout { block_size: 16 }, vec![i32s([3]), i32s([2]), i32s([2]), i32s([2, 4])]),
        (&CrossEntropy, vec![f32s([3, 8]), f32s([3])]),
        (&CrossEntropyBackward, vec![f32s([3, 8]), i32s([3]), f32s([3, 1]), f32s([3])]),
        (&SampleToken, [&[f32s([3, 8])], &keys[..]].concat()),
        (&SampleToken, [&[f32s([3, 0])], &keys[..]].concat()),
        (&SampleToken, vec![f32s([3, 8])]),
        (&TableWrite, vec![i32s([9, 16]), i32s([3]), i32s([3])]),
        (&TableWrite, vec![history, i32s([3]), i32s([4])]),
        (&LogitBias, vec![f32s([3, 8]), i32s([3, 2]), i32s([3, 2])]),
        (&ForbidTokens, vec![f32s([3, 8]), f32s([3, 1])]),
        (&ForbidTokens, vec![f32s([3, 8]), i32s([2, 1])]),
        (&Penalties, said.to_vec()),
        (&Penalties, [&said[..], &[i32s([3]), f32s([3]), f32s([3]), f32s([2])]].concat()),
        (&Dry, [&said[..], &[f32s([3]), f32s([3]), i32s([3]), f32s([3]), i32s([3, 1])]].concat()),
        (&Dry, [&said[..], &[f32s([3]), f32s([3]), i32s([3]), i32s([3]), i32s([1])]].concat()),
        (&adamw, vec![f32s([3]), f32s([4]), f32s([3]), f32s([3]), f32s([]), f32s([])]),
        (&adamw, vec![f32s([3]), f32s([3]), f32s([3]), f32s([3]), f32s([1]), f32s([])]),
        (&adamw, vec![f32s([3]), f32s([3]), f32s([3]), f32s([3]), f32s([]), f32s([])]),
    ];
    let mut text = String::new();
    for (op, inputs) in cases {
        let why = op.infer(&inputs).expect_err("none of these fits");
        writeln!(text, "{}: {why}", op.name()).expect("a String takes all");
    }
    insta::assert_snapshot!(text);
}
