//! Texts that a BigBird computes by blocks beside transformers (fixtures/long_texts): alone, and of several lengths in one batch.

use crate::common::cpu;
use crate::common::modules::{ModuleFixture, Step};
use ridge_graph::{Bindings, DType, Precision, Tensor, conformance};
use ridge_models::symbols;

/// Texts whose tokens all see each other; one token more; whole blocks; a last block of 17 tokens.
const LENGTHS: [usize; 4] = [704, 705, 1024, 1041];

fn step(fixture: &ModuleFixture, lengths: &[usize]) -> Step {
    let int = |values: Vec<i64>| Tensor::int(DType::I32, &[values.len()], values);
    let total: usize = lengths.iter().sum();
    let ids = lengths.iter().flat_map(|n| fixture.expected.tokens(&format!("input_ids_{n}"))).collect();
    let seq_ids = lengths.iter().enumerate().flat_map(|(i, n)| std::iter::repeat_n(i as i64, *n)).collect();
    let starts = (0..=lengths.len()).map(|i| lengths[..i].iter().sum::<usize>() as i64).collect();
    let inputs = vec![
        ("token_ids", int(ids)),
        ("token_type_ids", int(vec![0; total])),
        ("seq_ids", int(seq_ids)),
        ("query_start", int(starts)),
    ];
    (inputs, Bindings::new().with(symbols::TOKENS, total).with(symbols::SEQS, lengths.len()))
}

/// The rows of a text's hidden states that the fixture has, where the text begins at row `start`.
fn kept(fixture: &ModuleFixture, hidden: &Tensor, length: usize, start: usize) -> Tensor {
    let (rows, width) = (fixture.expected.tokens(&format!("rows_{length}")), hidden.shape[1]);
    let values = rows.iter().flat_map(|row| &hidden.floats()[(start + *row as usize) * width..][..width]).copied();
    Tensor::float(hidden.dtype, &[rows.len(), width], values.collect())
}

fn expected(fixture: &ModuleFixture, length: usize, kind: &str) -> Tensor {
    fixture.expected.tensor(&format!("hidden_{length}_{kind}"))
}

#[test]
fn blocks_that_a_token_sees_are_those_of_transformers() {
    let fixture = ModuleFixture::open("long_texts/big_bird", DType::F32);
    for length in LENGTHS {
        let exact = kept(&fixture, &fixture.exact(fixture.graph(), &step(&fixture, &[length]), "hidden"), length, 0);
        let wanted = expected(&fixture, length, "f64");
        let off = crate::common::relative(exact.floats(), wanted.floats());
        assert!(off < 1e-11, "{length} tokens: off by {off:e}");
    }
}

#[test]
fn long_texts_are_as_near_to_exact_as_those_of_transformers_alone_and_in_a_batch() {
    let fixture = ModuleFixture::open("long_texts/big_bird", DType::F32);
    let mut alone = Vec::new();
    for length in LENGTHS {
        let step = step(&fixture, &[length]);
        let hidden = fixture.on_cpu(&step, "hidden", 1);
        assert_eq!(fixture.on_cpu(&step, "hidden", 3).to_bytes(), hidden.to_bytes(), "{length}: three threads");
        let plains = [Precision::Rounded, Precision::Reordered(1), Precision::Reordered(2)]
            .map(|precision| kept(&fixture, &fixture.evaluate(fixture.graph(), &step, "hidden", precision), length, 0));
        let (torch, exact) = (expected(&fixture, length, "f32"), expected(&fixture, length, "f64"));
        let found = kept(&fixture, &hidden, length, 0);
        let plains: Vec<&Tensor> = [&torch].into_iter().chain(&plains).collect();
        conformance::near(&found, &plains, &exact).unwrap_or_else(|why| panic!("{length} tokens: {why}"));
        alone.push(hidden);
    }
    let order = [2, 1, 3, 0];
    let lengths = order.map(|nth| LENGTHS[nth]);
    let together = fixture.on(cpu(2), &step(&fixture, &lengths), "hidden");
    let together = together.floats().chunks(together.shape[1]).collect::<Vec<_>>();
    let mut start = 0;
    for nth in order {
        let rows = &together[start..start + LENGTHS[nth]];
        assert_eq!(rows.concat(), alone[nth].floats(), "{} tokens in a batch", LENGTHS[nth]);
        start += LENGTHS[nth];
    }
}
