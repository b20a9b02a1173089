//! What attention over latents does beside attention: its queries, keys and values.

use ridge_graph::ops::{PagedAttention, Rope, rope_frequencies};
use ridge_graph::sample::Rng;
use ridge_graph::{Builder, DType, Result, Sym, Tensor, Type, Var};

use crate::cases::{KernelCase, Step, case};

/// Elements of heads: of queries and keys that are not rotated, that are, of values; and of latents.
struct Widths {
    plain: usize,
    turned: usize,
    value: usize,
    rank: usize,
}

const V2: Widths = Widths { plain: 128, turned: 64, value: 128, rank: 512 };
const SMALL: Widths = Widths { plain: 24, turned: 16, value: 40, rank: 112 };

/// The first `turned` elements of heads, pairs of neighbours, to two halves.
fn halves(g: &mut Builder, x: Var, turned: usize) -> Result<Var> {
    let [tokens, heads, dim] = g.ty(x)?.shape.as_const().expect("constant")[..] else { panic!("three axes") };
    let part = g.slice(x, 2, 0, turned)?;
    let pairs = g.reshape(part, [tokens, heads, turned / 2, 2])?;
    let sides = g.transpose(pairs, &[0, 1, 3, 2])?;
    let part = g.reshape(sides, [tokens, heads, turned])?;
    let rest = g.slice(x, 2, turned, dim - turned)?;
    g.concat(&[part, rest], 2)
}

fn rotated(g: &mut Builder, x: Var, positions: Var, turned: usize, interleaved: bool) -> Result<Var> {
    let x = if interleaved { halves(g, x, turned)? } else { x };
    g.rope(x, positions, &Rope { inv_freq: rope_frequencies(10_000.0, turned).into(), scale: 1.25 })
}

/// One token and several, with queries in pairs of neighbours and in halves, alone and of several sequences.
pub(crate) fn queries() -> Vec<KernelCase> {
    let one: &[(usize, usize)] = &[(300, 1)];
    let several: &[(usize, usize)] = &[(100, 1), (0, 7), (257, 1), (30, 3)];
    let many: &[(usize, usize)] = &[(40, 30)];
    let long: &[(usize, usize)] = &[(700, 1), (127, 2), (0, 1)];
    let mut cases = Vec::new();
    for (dtype, widths, heads, sequences, padding, interleaved) in [
        (DType::BF16, V2, 16, one, 0, true),
        (DType::BF16, V2, 16, several, 3, true),
        (DType::F16, V2, 5, several, 0, false),
        (DType::F16, SMALL, 20, several, 2, true),
        (DType::BF16, SMALL, 3, one, 0, false),
        (DType::BF16, SMALL, 3, many, 0, true),
        // More heads than a matrix tile has rows.
        (DType::BF16, V2, 128, long, 2, true),
        (DType::F16, V2, 40, long, 0, false),
        (DType::BF16, SMALL, 70, many, 1, true),
    ] {
        let Widths { plain, turned, value, rank } = widths;
        let (step, dim) = (Step::new(sequences, padding, 1), turned + rank);
        let tokens = step.ids.shape[0];
        let kernel = if interleaved { "interleaved_latent_attention" } else { "latent_attention" };
        let what = format!("{dtype}, {heads} heads of {plain} and {turned} over {rank}, {sequences:?}, {padding} more");
        let mut case = case(kernel, &what, |g| {
            let q = g.step_input("q", Type::tensor(dtype, [tokens, heads, plain + turned]))?;
            let w = g.weight("w", Type::tensor(dtype, [heads, plain + value, rank]))?;
            let kv = g.state("kv", Type::state(dtype, [step.blocks, 1, 1, 16, dim]))?;
            let int = |g: &mut Builder, name: &str, of: &Tensor| g.step_input(name, of.ty());
            let table = int(g, "table", &step.table)?;
            let (ids, positions) = (int(g, "ids", &step.ids)?, int(g, "positions", &step.positions)?);
            let (x, part) = (g.slice(q, 2, 0, plain)?, g.slice(q, 2, plain, turned)?);
            let x = g.cast(x, DType::F32)?;
            let x = g.transpose(x, &[1, 0, 2])?;
            let w = g.slice(w, 1, 0, plain)?;
            let x = g.matmul(x, w, false, false, DType::F32)?;
            let x = g.transpose(x, &[1, 0, 2])?;
            let x = g.cast(x, dtype)?;
            let q = g.concat(&[part, x], 2)?;
            let q = rotated(g, q, positions, turned, interleaved)?;
            // Scores of ordinary size: of larger ones, a rounding of a query decides.
            let scale = 0.3 / ((plain * dim) as f64).sqrt();
            let op = PagedAttention::new(scale, Sym::new("pairs"), Sym::new("cached"));
            Ok(vec![g.attention_with([q, kv, table, ids, positions], &[], op)?])
        });
        case.given = vec![("table", step.table), ("ids", step.ids), ("positions", step.positions)];
        cases.push(case);
    }
    cases
}

/// Keys of few and many tokens, some of which go to one place, to caches of floats and of codes.
pub(crate) fn keys() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for (dtype, cache, widths, tokens, interleaved) in [
        (DType::BF16, DType::BF16, V2, 1, true),
        (DType::BF16, DType::BF16, V2, 70, true),
        (DType::F16, DType::F16, V2, 9, false),
        (DType::F16, DType::F16, SMALL, 5, true),
        (DType::F32, DType::BF16, SMALL, 130, false),
        (DType::BF16, DType::I8, V2, 3, true),
        (DType::F16, DType::F8E4M3, SMALL, 17, false),
    ] {
        let Widths { turned, rank, .. } = widths;
        let (dim, blocks, coded) = (turned + rank, 12, matches!(cache, DType::I8 | DType::F8E4M3));
        let of_pairs = if interleaved { "interleaved_" } else { "" };
        let of_codes = if coded { "_codes" } else { "" };
        let kernel = match (interleaved, coded) {
            (true, true) => "interleaved_latent_key_write_codes",
            (true, false) => "interleaved_latent_key_write",
            (false, true) => "latent_key_write_codes",
            (false, false) => "latent_key_write",
        };
        assert_eq!(kernel, format!("{of_pairs}latent_key_write{of_codes}"));
        let what = format!("{tokens} tokens of {rank} and {turned}, {dtype} to {cache}");
        let mut case = case(kernel, &what, |g| {
            let row = g.step_input("row", Type::tensor(dtype, [tokens, dim]))?;
            let w = g.weight("w", Type::tensor(dtype, [rank]))?;
            let positions = g.step_input("positions", Type::tensor(DType::I32, [tokens]))?;
            let slots = g.step_input("slots", Type::tensor(DType::I32, [tokens]))?;
            let kv = g.state("kv", Type::state(cache, [blocks, 1, 1, 16, dim]))?;
            let (latent, key) = (g.slice(row, 1, 0, rank)?, g.slice(row, 1, rank, turned)?);
            let latent = g.rms_norm(latent, w, 1e-6)?;
            let key = g.concat(&[key, latent], 1)?;
            let key = g.reshape(key, [tokens, 1, dim])?;
            let key = rotated(g, key, positions, turned, interleaved)?;
            let mut cache = vec![kv];
            if coded {
                cache.push(g.state("scales", Type::state(DType::F32, [blocks, 1, 1, 16]))?);
            }
            let written = g.kv_write_sides(&cache, &[key], slots)?;
            let mut kv = g.state_read(written[0])?;
            if coded {
                let scales = g.state_read(written[1])?;
                let scales = g.reshape(scales, [blocks, 1, 1, 16, 1])?;
                let scales = g.broadcast(scales, [blocks, 1, 1, 16, dim])?;
                kv = g.cast(kv, DType::F32)?;
                kv = g.mul(kv, scales)?;
            }
            Ok(vec![kv])
        });
        let mut rng = Rng::new(5);
        let ints = |values: Vec<i64>| Tensor::int(DType::I32, &[tokens], values);
        let positions = (0..tokens as i64).map(|t| 7 * t + 3).collect();
        // Places of one slot in three are taken twice, one lies behind the cache, and one ahead of it.
        let mut slots: Vec<i64> = (0..tokens as i64).map(|t| (t * 2 / 3) * 5 % (blocks as i64 * 16)).collect();
        if tokens > 8 {
            (slots[4], slots[6]) = (-1, blocks as i64 * 16);
        }
        case.given = vec![("positions", ints(positions)), ("slots", ints(slots))];
        if coded {
            let of_cache = [blocks, 1, 1, 16, dim];
            let codes = if cache == DType::I8 {
                rng.integers(cache, &of_cache, -127, 128)
            } else {
                rng.normal(cache, &of_cache)
            };
            case.given.push(("kv", codes));
        }
        cases.push(case);
    }
    cases
}

/// Values of few rows and many.
pub(crate) fn values() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for (dtype, widths, heads, tokens) in [
        (DType::BF16, V2, 16, 1),
        (DType::BF16, V2, 16, 7),
        (DType::F16, V2, 5, 16),
        (DType::F16, SMALL, 3, 5),
        (DType::BF16, SMALL, 20, 40),
    ] {
        let Widths { plain, turned, value, rank } = widths;
        let what = format!("{tokens} x {heads} heads of {rank} to {value}, {dtype}");
        cases.push(case("head_products_of_tokens", &what, |g| {
            let x = g.step_input("x", Type::tensor(dtype, [tokens, heads, turned + rank]))?;
            let w = g.weight("w", Type::tensor(dtype, [heads, plain + value, rank]))?;
            let x = g.slice(x, 2, turned, rank)?;
            let x = g.cast(x, DType::F32)?;
            let x = g.transpose(x, &[1, 0, 2])?;
            let w = g.slice(w, 1, plain, value)?;
            let y = g.matmul(x, w, false, true, DType::F32)?;
            let y = g.transpose(y, &[1, 0, 2])?;
            let y = g.reshape(y, [tokens, heads * value])?;
            Ok(vec![g.cast(y, dtype)?])
        }));
    }
    cases
}
