//! What attention promises besides its meaning: the same bits wherever a prompt is cut, and that what is no number stays
//! with those who see it.

use crate::common::{cuts_agree, poisoned, rows, run};
use ridge_graph::conformance::judge_graph;
use ridge_graph::ops::PagedAttention;
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, Dim, Graph, Sym, Tensor, Type, Value};

/// Attention of every token of one sequence over a cache of as many, and its inputs.
struct OneSequence {
    graph: Graph,
    q: Tensor,
    kv: Tensor,
    /// Of a cache of codes.
    scales: Tensor,
    table: Tensor,
}

impl OneSequence {
    #[allow(clippy::too_many_arguments)]
    fn new(
        tokens: usize,
        (heads, kv_heads, dim): (usize, usize, usize),
        block_size: usize,
        of_q: DType,
        cache: DType,
        window: Option<usize>,
    ) -> Self {
        let blocks = tokens.div_ceil(block_size);
        let mut rng = Rng::new(dim as u64);
        let q = rng.normal(of_q, &[tokens, heads, dim]);
        let of_cache = [blocks + 1, 2, kv_heads, block_size, dim];
        let codes = cache == DType::I8;
        let kv = if codes { rng.integers(cache, &of_cache, -127, 128) } else { rng.normal(cache, &of_cache) };
        let scales = rng.normal(DType::F32, &of_cache[..4]);
        let scales = scales.floats().iter().map(|x| x.abs() / 127.0).collect();
        let scales = Tensor::float(DType::F32, &of_cache[..4], scales).rounded();
        let table = Tensor::int(DType::I32, &[1, blocks], (0..blocks as i64).rev().collect());
        let mut g = Builder::new();
        let count = Dim::sym("tokens");
        let ids = Type::tensor(DType::I32, [&count]);
        let x = g.step_input("q", Type::tensor(of_q, [count, heads.into(), dim.into()])).unwrap();
        let state = g.state("kv", Type { state: true, ..kv.ty() }).unwrap();
        let table_input = g.step_input("table", table.ty()).unwrap();
        let seq_ids = g.step_input("seq_ids", ids.clone()).unwrap();
        let positions = g.step_input("positions", ids).unwrap();
        let op = PagedAttention::new(0.3, Sym::new("pairs"), Sym::new("cached"));
        let op = PagedAttention { window, ..op };
        let y = if codes {
            let scales = g.state("scales", Type { state: true, ..scales.ty() }).unwrap();
            g.attention_with([x, state, table_input, seq_ids, positions], &[scales], op)
        } else {
            g.attention(x, state, table_input, seq_ids, positions, op)
        };
        Self { graph: g.finish(vec![("y".into(), y.unwrap())]).unwrap(), q, kv, scales, table }
    }

    fn value(&self, name: &str) -> Value {
        let tokens = self.q.shape[0];
        Value::Plain(match name {
            "q" => self.q.clone(),
            "kv" => self.kv.clone(),
            "scales" => self.scales.clone(),
            "table" => self.table.clone(),
            "seq_ids" => Tensor::int(DType::I32, &[tokens], vec![0; tokens]),
            _ => Tensor::int(DType::I32, &[tokens], (0..tokens as i64).collect()),
        })
    }

    /// Makes element `nth` of the key (side 0) or value (side 1) at `position` of kv head `head` another number.
    fn set(&mut self, side: usize, position: usize, head: usize, nth: usize, number: f64) {
        let [_, _, heads, block_size, dim] = self.kv.shape[..] else { panic!("a cache has five axes") };
        let block = self.table.ints()[position / block_size] as usize;
        let at = (((block * 2 + side) * heads + head) * block_size + position % block_size) * dim + nth;
        let mut floats = self.kv.floats().to_vec();
        floats[at] = number;
        self.kv = Tensor::float(self.kv.dtype, &self.kv.shape, floats);
    }

    fn run(&self, threads: usize) -> Tensor {
        let bindings = Bindings::new().with("tokens", self.q.shape[0]);
        run(&poisoned(threads), &self.graph, &bindings, &|arg: &Arg| self.value(&arg.name)).expect("runs").remove(0)
    }
}

#[test]
fn a_prompt_cut_anywhere_attends_to_the_same_bits() {
    // Beyond a span of 512 positions; heads of whole and of broken vectors; groups of one and of several heads.
    for (heads, kv_heads, dim, block_size, of_q, cache, window) in [
        (4, 2, 24, 16, DType::F32, DType::F32, None),
        (2, 2, 64, 16, DType::F32, DType::BF16, None),
        (4, 1, 8, 7, DType::F32, DType::F32, None),
        (3, 3, 4, 16, DType::F32, DType::F16, None),
        (3, 1, 80, 32, DType::F32, DType::F8E4M3, None),
        (8, 1, 64, 16, DType::BF16, DType::BF16, None),
        (3, 1, 128, 32, DType::BF16, DType::F32, None),
        (2, 1, 40, 16, DType::F16, DType::F32, None),
        (2, 1, 24, 16, DType::F32, DType::F32, Some(5)),
        (2, 1, 64, 16, DType::BF16, DType::BF16, Some(100)),
        (4, 1, 64, 16, DType::BF16, DType::I8, None),
        (3, 1, 48, 7, DType::F32, DType::I8, Some(100)),
        (4, 2, 8, 16, DType::F32, DType::I8, None),
    ] {
        let attention = OneSequence::new(533, (heads, kv_heads, dim), block_size, of_q, cache, window);
        let cuts = [0, 1, 3, 20, 37, 500, 509, 511, 512, 513, 514, 520, 532, 533];
        let by_row = ["q", "seq_ids", "positions"];
        cuts_agree(&attention.graph, "tokens", &|name: &str| attention.value(name), &by_row, &cuts);
    }
}

#[test]
fn single_tokens_of_a_long_context_have_the_bits_of_a_prompt() {
    // Several parts of a context, each of whose softmaxes is of its own; of many heads to a kv head and of few.
    for (heads, kv_heads, dim, of_q, cache, window) in [
        (2, 1, 32, DType::BF16, DType::BF16, Some(1200)),
        (17, 1, 32, DType::BF16, DType::BF16, None),
        (2, 2, 40, DType::F16, DType::I8, None),
        (1, 1, 32, DType::F32, DType::BF16, Some(70)),
    ] {
        let attention = OneSequence::new(2200, (heads, kv_heads, dim), 16, of_q, cache, window);
        let cuts = [0, 1, 1023, 1024, 1025, 1030, 2047, 2049, 2050, 2058, 2190, 2200];
        let by_row = ["q", "seq_ids", "positions"];
        cuts_agree(&attention.graph, "tokens", &|name: &str| attention.value(name), &by_row, &cuts);
        let last = |arg: &Arg| match attention.value(&arg.name) {
            Value::Plain(tensor) if by_row.contains(&&*arg.name) => Value::Plain(rows(&tensor, 2198..2200)),
            value => value,
        };
        let bindings = Bindings::new().with("tokens", 2);
        let got = run(&poisoned(2), &attention.graph, &bindings, &last).expect("runs");
        judge_graph(&attention.graph, &|arg| Some(last(arg)), &bindings, &got).unwrap();
    }
}

#[test]
fn keys_and_values_that_are_no_numbers_reach_only_the_tokens_that_see_them() {
    let (bf16, f32, f16) = (DType::BF16, DType::F32, DType::F16);
    for (dim, of_q, cache, window) in [
        (64, bf16, bf16, None),
        (64, bf16, bf16, Some(40)),
        (40, f32, f32, None),
        (32, f16, f32, Some(40)),
        (8, f32, f16, Some(3)),
    ] {
        let tokens = 300;
        let clean = OneSequence::new(tokens, (4, 2, dim), 16, of_q, cache, window);
        let expected = clean.run(1);
        for (side, position, number) in [
            (0, 290, f64::NAN),
            (1, 290, f64::INFINITY),
            (1, 290, f64::NAN),
            (1, 37, f64::NEG_INFINITY),
            (0, 5, f64::NAN),
        ] {
            let mut poisoned =
                OneSequence { kv: clean.kv.clone(), ..OneSequence::new(tokens, (4, 2, dim), 16, of_q, cache, window) };
            poisoned.set(side, position, 1, 3, number);
            let got = poisoned.run(2);
            let what = format!("{number} at {position} of side {side}, {of_q} over {cache}, window {window:?}");
            for token in 0..tokens {
                let sees = (position..position + window.unwrap_or(tokens)).contains(&token);
                for i in 0..4 * dim {
                    let at = token * 4 * dim + i;
                    let (got, expected) = (got.floats()[at], expected.floats()[at]);
                    // Both query heads of kv head 1; of a value only its element.
                    if sees && i >= 2 * dim && (side == 0 || i % dim == 3) {
                        assert!(!got.is_finite(), "{got}, token {token}, element {i}: {what}");
                    } else {
                        assert_eq!(got.to_bits(), expected.to_bits(), "token {token}, element {i}: {what}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_key_whose_score_is_minus_infinity_weighs_nothing() {
    let (bf16, f32, f16) = (DType::BF16, DType::F32, DType::F16);
    // Key 511 is at times the only one of its span that is seen through a window.
    let (tokens, position) = (560, 511);
    for (dim, of_q, cache, window) in [
        (64, bf16, bf16, None),
        (64, f32, f32, None),
        (40, f16, f16, Some(40)),
        (32, f32, f16, Some(40)),
        (8, f32, f32, Some(3)),
        (24, bf16, f16, Some(40)),
    ] {
        let mut finite = OneSequence::new(tokens, (2, 1, dim), 16, of_q, cache, window);
        finite.set(0, position, 0, 3, 6e4);
        let mut infinite = OneSequence::new(tokens, (2, 1, dim), 16, of_q, cache, window);
        infinite.set(0, position, 0, 3, f64::INFINITY);
        let (expected, got) = (finite.run(1), infinite.run(2));
        let mut unseen = 0;
        for row in 0..2 * tokens {
            let what = format!("token {}, {of_q} over {cache} of {dim}, window {window:?}", row / 2);
            let (q, of_row) = (finite.q.floats()[row * dim + 3], row * dim..(row + 1) * dim);
            let (expected, got) = (&expected.floats()[of_row.clone()], &got.floats()[of_row]);
            if !(position..position + window.unwrap_or(tokens)).contains(&(row / 2)) || q < -0.02 {
                unseen += usize::from(row / 2 >= position && q < 0.0);
                assert!(got == expected && got.iter().all(|x| x.is_finite()), "{what}");
            } else if q > 0.0 {
                assert!(got.iter().all(|x| x.is_nan()), "{what}");
            }
        }
        assert!(unseen > 0);
    }
}

#[test]
fn what_is_no_number_stays_none_in_a_cache_of_codes() {
    let (heads, dim) = (2, 40);
    let mut rng = Rng::new(5);
    let state = Type { state: true, ..Type::tensor(DType::I8, [1, 2, heads, 4, dim]) };
    let mut g = Builder::new();
    let kv = g.state("kv", state.clone()).unwrap();
    let scales = g.state("scales", Type::state(DType::F32, ridge_graph::Shape(state.shape.0[..4].to_vec()))).unwrap();
    let row = |name: &str, g: &mut Builder| g.step_input(name, Type::tensor(DType::F32, [1, heads, dim])).unwrap();
    let (k, v) = (row("k", &mut g), row("v", &mut g));
    let slots = g.step_input("slots", Type::tensor(DType::I32, [1])).unwrap();
    let q = row("q", &mut g);
    let mut integers = |name: &str, shape: &[usize]| {
        g.step_input(name, Type::tensor(DType::I32, ridge_graph::Shape::new(shape.to_vec()))).unwrap()
    };
    let (table, ids, positions) = (integers("table", &[1, 1]), integers("ids", &[1]), integers("positions", &[1]));
    let written = g.kv_write_sides(&[kv, scales], &[k, v], slots).unwrap();
    let (kv, scales) = (written[0], written[1]);
    let op = PagedAttention::new(0.3, Sym::new("pairs"), Sym::new("cached"));
    let y = g.attention_with([q, kv, table, ids, positions], &[scales], op).unwrap();
    let graph = g.finish(vec![("y".into(), y)]).unwrap();
    let normal: Vec<f64> = rng.normal(DType::F32, &[1, heads, dim]).floats().to_vec();
    for side in ["k", "v"] {
        let value = |arg: &Arg| {
            let mut numbers = normal.clone();
            if *arg.name == *side {
                numbers[dim + 7] = f64::NAN;
            }
            Value::Plain(match &*arg.name {
                "kv" => Tensor::int(DType::I8, &[1, 2, heads, 4, dim], vec![0; 8 * heads * dim]),
                "scales" => Tensor::float(DType::F32, &[1, 2, heads, 4], vec![0.0; 8 * heads]),
                "k" | "v" | "q" => Tensor::float(DType::F32, &[1, heads, dim], numbers),
                "table" => Tensor::int(DType::I32, &[1, 1], vec![0]),
                _ => Tensor::int(DType::I32, &[1], vec![0]),
            })
        };
        let y = run(&poisoned(1), &graph, &Bindings::new(), &value).expect("runs").remove(0);
        let (first, second) = y.floats().split_at(dim);
        assert!(first.iter().all(|x| x.is_finite()) && second.iter().all(|x| x.is_nan()), "{side}: {second:?}");
    }
}
