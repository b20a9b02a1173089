//! Cases of attention to prompts whose queries are rotated on the way.

use ridge_graph::ops::{PagedAttention, Rope, rope_frequencies};
use ridge_graph::sample::Rng;
use ridge_graph::{Builder, DType, Sym, Tensor, Type};

use crate::cases::{KernelCase, Step, case};

/// Whole and partial rotations, of whole vectors and others, for prompts of several tiles alone and among single tokens, over caches of
/// floats and of codes.
pub(crate) fn rotated_prompts() -> Vec<KernelCase> {
    let prompt: &[(usize, usize)] = &[(0, 300)];
    let mixed: &[(usize, usize)] = &[(100, 1), (0, 220), (257, 1), (300, 140), (5, 3)];
    let mut cases = Vec::new();
    for (dtype, cache, dim, turned, sequences, padding) in [
        (DType::BF16, DType::BF16, 128, 128, prompt, 3),
        (DType::BF16, DType::BF16, 128, 128, mixed, 2),
        (DType::F16, DType::F16, 128, 32, mixed, 0),
        (DType::F16, DType::F16, 64, 64, prompt, 1),
        (DType::BF16, DType::BF16, 64, 48, mixed, 0),
        (DType::BF16, DType::BF16, 64, 16, prompt, 0),
        (DType::BF16, DType::BF16, 128, 40, prompt, 0),
        (DType::BF16, DType::I8, 128, 128, mixed, 3),
        (DType::F16, DType::F8E4M3, 64, 32, mixed, 0),
    ] {
        let (heads, keys, block) = (4, 2, 16);
        let step = Step::new(sequences, padding, 1);
        let tokens = step.ids.shape[0];
        let coded = dtype != cache;
        let kernel = if coded { "rope_attention_codes" } else { "rope_attention" };
        let what = format!("{dtype} over {cache}, {turned} of {dim} rotated, {sequences:?}");
        let of_scales = [step.blocks, 2, keys, block];
        let mut case = case(kernel, &what, |g| {
            let q = g.step_input("q", Type::tensor(dtype, [tokens, heads, dim]))?;
            let kv = g.state("kv", Type::state(cache, [step.blocks, 2, keys, block, dim]))?;
            let int = |g: &mut Builder, name: &str, of: &Tensor| g.step_input(name, of.ty());
            let table = int(g, "table", &step.table)?;
            let (ids, positions) = (int(g, "ids", &step.ids)?, int(g, "positions", &step.positions)?);
            let scales = coded.then(|| g.state("scales", Type::state(DType::F32, of_scales))).transpose()?;
            let op = PagedAttention::new(1.0 / (dim as f64).sqrt(), Sym::new("pairs"), Sym::new("cached"));
            let q = g.rope(q, positions, &Rope { inv_freq: rope_frequencies(10_000.0, turned).into(), scale: 1.25 })?;
            Ok(vec![g.attention_with([q, kv, table, ids, positions], scales.as_slice(), op)?])
        });
        let mut rng = Rng::new(9);
        if coded {
            let of_cache = [step.blocks, 2, keys, block, dim];
            // Scores are ordinary: of large ones, a query that is rounded to its other neighbour, as the last bit of an angle decides, shifts
            // weights farther than a plain implementation errs.
            let (kv, unit) = match cache {
                DType::I8 => (rng.integers(cache, &of_cache, -127, 128), 0.014),
                _ => (rng.normal(cache, &of_cache), 1.0),
            };
            let scales = rng.normal(DType::F32, &of_scales).floats().iter().map(|x| unit * (0.25 * x).exp()).collect();
            case.given.extend([("kv", kv), ("scales", Tensor::float(DType::F32, &of_scales, scales).rounded())]);
        }
        case.given.extend([("table", step.table), ("ids", step.ids), ("positions", step.positions)]);
        cases.push(case);
    }
    cases
}
