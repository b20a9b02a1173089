//! Results of hand-written kernels depend on a row's own values and position alone: not on the rows beside it, on
//! threads, or on where a prompt is cut.

use crate::common::{cuts_agree, poisoned, run};
use crate::rerun::with_instruction_sets;
use ridge_graph::conformance::judge_graph;
use ridge_graph::format::{self, ScaledFormat};
use ridge_graph::ops::SampleToken;
use ridge_graph::passes::{Activations, round_activations};
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, Dim, FormatRef, Tensor, Type, Value, uniform};

#[test]
fn a_product_is_the_same_for_one_row_and_for_many() {
    for (inner, columns, rows) in [
        (8, 5, 75),
        (33, 40, 300),
        (64, 37, 75),
        (172, 64, 75),
        (288, 40, 75),
        (512, 9, 75),
        (768, 40, 75),
        (1056, 50, 75),
        (2112, 33, 90),
        (4160, 200, 100),
        (8192, 33, 150),
        (8216, 9, 60),
    ] {
        let plain = [
            (DType::F32, DType::F32, None),
            (DType::BF16, DType::F32, None),
            (DType::BF16, DType::F16, None),
            (DType::BF16, DType::BF16, None),
            (DType::F16, DType::F32, None),
            (DType::F8E4M3, DType::F32, None),
            (DType::F8E5M2, DType::F32, None),
        ];
        // Long rows take time: two formats stand for all.
        let of_long = |f: &FormatRef| inner == 8192 && ["q8_0", "q4_k"].contains(&f.name());
        let fits = |f: &FormatRef| (inner < 1000 || of_long(f)) && inner % f.granularity(1)[0] == 0;
        let stored = format::all()
            .into_iter()
            .filter(fits)
            .flat_map(|f| [DType::F32, DType::BF16].map(|of_x| (DType::F32, of_x, Some(f.clone()))));
        // With scales of rows and tensors, whole numbers are multiplied by codes too.
        let scaled = |names: &[&str]| -> Vec<_> {
            let format = |name: &&str| FormatRef::new(ScaledFormat::from_name(name).expect("a format"));
            let of_x = |f: FormatRef| [DType::F32, DType::BF16].map(|of_x| (DType::F32, of_x, Some(f.clone())));
            let names = if inner < 1000 || inner == 2112 { names } else { &[] };
            names.iter().map(format).flat_map(of_x).collect()
        };
        let whole = scaled(&["int8_row", "int8_tensor"]);
        let floats = scaled(&["f8e4m3_row", "f8e4m3_tensor", "f8e4m3_b128"]);
        let stored = stored.chain(whole);
        let by_codes = stored.clone().map(|case| (case, Activations::Int8));
        let exact = plain.into_iter().chain(stored).chain(floats).map(|case| (case, Activations::Exact));
        for ((dtype, of_x, stored), activations) in exact.chain(by_codes) {
            let mut rng = Rng::new(inner as u64);
            let (x, w) = (rng.normal(of_x, &[rows, inner]), rng.normal(dtype, &[columns, inner]));
            let w = stored.map_or_else(|| Value::Plain(w.clone()), |format| Value::stored(&w, &format));
            let mut g = Builder::new();
            let input = g.step_input("x", Type::tensor(of_x, [Dim::sym("rows"), inner.into()])).unwrap();
            let weight = g.weight("w", w.ty()).unwrap();
            let y = g.linear(input, weight).unwrap();
            let mut graph = g.finish(vec![("y".into(), y)]).unwrap();
            round_activations(&mut graph, activations);
            let values = |name: &str| if name == "x" { Value::Plain(x.clone()) } else { w.clone() };
            cuts_agree(&graph, "rows", &values, &["x"], &[0, 1, 2, 4, 7, 11, 16, 25, rows - 1, rows]);
        }
    }
}

/// Sums of codes times scales of 2^127 are no numbers; those of values, by x that are small, are.
#[test]
fn products_by_mxfp4_are_right_for_every_exponent() {
    let (columns, inner) = (35, 288);
    let format = format::all().into_iter().find(|f| f.name() == "mxfp4").expect("is a format");
    for exponent in 0..=255u8 {
        let mut rng = Rng::new(exponent.into());
        let mut blocks = rng.integers(DType::U8, &[columns, inner / 32 * 17], 0, 256).to_bytes();
        blocks.chunks_exact_mut(17).for_each(|block| block[0] = exponent);
        let blocks = Tensor::from_bytes(DType::U8, &[columns, inner / 32 * 17], &blocks);
        let shape = vec![columns, inner];
        let w = Value::Stored { format: format.clone(), dtype: DType::F32, shape, components: vec![blocks] };
        for rows in [1, 2] {
            let factor = if exponent < 128 { 2f64.powi(30) } else { 2f64.powi(-30) };
            let x = rng.normal(DType::F32, &[rows, inner]).floats().iter().map(|x| x * factor).collect();
            let x = Value::Plain(Tensor::float(DType::F32, &[rows, inner], x));
            let mut g = Builder::new();
            let input = g.step_input("x", x.ty()).unwrap();
            let weight = g.weight("w", w.ty()).unwrap();
            let y = g.linear(input, weight).unwrap();
            let mut graph = g.finish(vec![("y".into(), y)]).unwrap();
            round_activations(&mut graph, Activations::Int8);
            let value = |arg: &Arg| if &*arg.name == "x" { x.clone() } else { w.clone() };
            let got = run(&poisoned(1), &graph, &Bindings::new(), &value).expect("runs");
            if let Err(why) = judge_graph(&graph, &|arg| Some(value(arg)), &Bindings::new(), &got) {
                panic!("exponent {exponent}, {rows} rows: {why}");
            }
        }
    }
}

/// Tokens sampled from equal logits, one a seed, and the random number that each came from.
fn of_equals(vocab: usize, top_k: i64, top_p: f64) -> Vec<(usize, f64)> {
    let n = 50;
    let mut g = Builder::new();
    let column = |dtype| Type::tensor(dtype, [n]);
    let logits = g.step_input("logits", Type::tensor(DType::F32, [n, vocab])).unwrap();
    let keys: Vec<_> =
        SampleToken::KEYS.iter().map(|(name, dtype)| g.step_input(name, column(*dtype)).unwrap()).collect();
    let token = g.sample_token(logits, keys.try_into().unwrap()).unwrap();
    let graph = g.finish(vec![("token".into(), token)]).unwrap();
    let value = |arg: &Arg| {
        Value::Plain(match &*arg.name {
            "logits" => Tensor::float(DType::F32, &[n, vocab], vec![-3.5; n * vocab]),
            "temperature" => Tensor::float(DType::F32, &[n], vec![0.7; n]),
            "top_p" => Tensor::float(DType::F32, &[n], vec![top_p; n]).rounded(),
            "min_p" => Tensor::float(DType::F32, &[n], vec![0.0; n]),
            "typical_p" => Tensor::float(DType::F32, &[n], vec![1.0; n]),
            "top_k" => Tensor::int(DType::I32, &[n], vec![top_k; n]),
            "seed" => Tensor::int(DType::I64, &[n], (0..n as i64).collect()),
            _ => Tensor::int(DType::I64, &[n], vec![3; n]),
        })
    };
    let tokens = run(&poisoned(2), &graph, &Bindings::new(), &value).expect("runs").remove(0);
    let u = (0..n as i64).map(|seed| f64::from(uniform(seed, 0, 3, 3, 0)));
    tokens.ints().iter().map(|t| *t as usize).zip(u).collect()
}

#[test]
fn of_equal_logits_each_token_is_as_likely_and_smaller_ids_come_first() {
    for (token, u) in of_equals(40_000, 0, 1.0) {
        assert_eq!(token, (u * 40_000.0) as usize);
    }
    for (token, u) in of_equals(40_000, 1000, 1.0) {
        assert_eq!(token, (u * 1000.0) as usize);
    }
    for (token, u) in of_equals(40_000, 0, 0.25) {
        assert_eq!(token, (u * 10_000.0) as usize);
    }
}

/// The test above is of the best instruction set that the machine has. It is run again with each other one.
const PRODUCTS: [&str; 1] = ["kernels::a_product_is_the_same_for_one_row_and_for_many"];

with_instruction_sets! {
    PRODUCTS,
    products_agree_without_vectors: "portable",
    products_agree_with_avx2: "avx2",
    products_agree_with_avx_vnni: "avx_vnni",
    products_agree_with_avx512: "avx512",
    products_agree_with_avx512_vnni: "avx512_vnni",
    products_agree_with_avx512_bf16: "avx512_bf16",
    products_agree_with_neon: "neon",
    products_agree_with_neon_dotprod: "neon_dotprod",
    products_agree_with_neon_i8mm: "neon_i8mm",
}
