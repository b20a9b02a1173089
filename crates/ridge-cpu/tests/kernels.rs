//! Results of hand-written kernels depend on a row's own values and position alone: not on the rows beside it, on
//! threads, or on where a prompt is cut.

mod common;

use common::{poisoned, run};
use ridge_graph::conformance::judge_graph;
use ridge_graph::format;
use ridge_graph::ops::{Activations, PagedAttention, SampleToken};
use ridge_graph::passes::round_activations;
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, Dim, FormatRef, Graph, Sym, Tensor, Type, Value, uniform};

/// Rows `rows` of a tensor.
fn rows(tensor: &Tensor, rows: std::ops::Range<usize>) -> Tensor {
    let row = tensor.len() / tensor.shape[0] * tensor.dtype.size_bytes();
    let shape = [&[rows.len()], &tensor.shape[1..]].concat();
    Tensor::from_bytes(tensor.dtype, &shape, &tensor.to_bytes()[rows.start * row..rows.end * row])
}

/// Requires that output 0 for some rows of the inputs named `by_row` is those rows of the output for all of them.
fn cuts_agree(graph: &Graph, symbol: &str, values: &dyn Fn(&str) -> Value, by_row: &[&str], cuts: &[usize]) {
    let total = values(by_row[0]).tensor().shape[0];
    let part = |range: std::ops::Range<usize>, threads: usize| {
        let value = |arg: &Arg| match values(&arg.name) {
            Value::Plain(tensor) if by_row.contains(&&*arg.name) => Value::Plain(rows(&tensor, range.clone())),
            value => value,
        };
        run(&poisoned(threads), graph, &Bindings::new().with(symbol, range.len()), &value).expect("runs").remove(0)
    };
    let whole = part(0..total, 1);
    for threads in [2, 3] {
        assert_eq!(part(0..total, threads).to_bytes(), whole.to_bytes(), "{threads} threads");
    }
    for cut in cuts.windows(2) {
        let range = cut[0]..cut[1];
        let got = part(range.clone(), 1 + cut[0] % 3);
        assert_eq!(got.to_bytes(), rows(&whole, range.clone()).to_bytes(), "rows {range:?} of {total}");
    }
}

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
        let by_codes = stored.clone().map(|case| (case, Activations::Int8));
        let exact = plain.into_iter().chain(stored).map(|case| (case, Activations::Exact));
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

/// Weights of bf16 that nothing else reads are repacked, where there are matrix tiles; those that an embedding reads are
/// not. Products of both are right, and the same.
#[test]
fn products_of_weights_in_any_layout_are_right_and_the_same() {
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum With {
        Biases,
        Residual,
        Gate,
    }
    // Rows and K that fill tiles and such that do not, up to more than one block of either.
    for (inner, columns, all_rows) in [
        (32, vec![1, 33, 64], vec![1, 2, 5, 6, 8, 9, 17]),
        (70, vec![31, 64, 5], vec![3, 5, 6, 15, 31, 49]),
        (41, vec![40], vec![257, 289, 600]),
        (2048, vec![33], vec![1, 20]),
        (2081, vec![40, 7], vec![1, 4, 9, 33]),
        (4130, vec![35, 70], vec![3, 18]),
    ] {
        for (dtype, with) in [DType::F32, DType::F16, DType::BF16]
            .into_iter()
            .flat_map(|dtype| [With::Biases, With::Residual, With::Gate].map(|with| (dtype, with)))
        {
            let columns = if with == With::Biases { &columns[..] } else { &columns[..1] };
            let build = |read: bool| -> ridge_graph::Result<Graph> {
                let mut g = Builder::new();
                let rows = Dim::sym("rows");
                let x = g.step_input("x", Type::tensor(dtype, [rows.clone(), inner.into()]))?;
                let weight = |g: &mut Builder, name: String, columns: usize| {
                    g.weight(&name, Type::tensor(DType::BF16, [columns, inner]))
                };
                let mut outputs = Vec::new();
                let mut weights = Vec::new();
                match with {
                    With::Biases => {
                        for (i, columns) in columns.iter().enumerate() {
                            let w = weight(&mut g, format!("w{i}"), *columns)?;
                            let b = g.weight(&format!("b{i}"), Type::tensor(dtype, [*columns]))?;
                            outputs.push(g.linear_bias(x, w, Some(b))?);
                            weights.push(w);
                        }
                    }
                    With::Residual => {
                        let w = weight(&mut g, "w".into(), columns[0])?;
                        let r = g.step_input("r", Type::tensor(dtype, [rows.clone(), columns[0].into()]))?;
                        let y = g.linear(x, w)?;
                        outputs.push(g.add(r, y)?);
                        weights.push(w);
                    }
                    With::Gate => {
                        let gate = weight(&mut g, "gate".into(), columns[0])?;
                        let up = weight(&mut g, "up".into(), columns[0])?;
                        weights.extend([gate, up]);
                        let (gate, up) = (g.linear(x, gate)?, g.linear(x, up)?);
                        outputs.push(g.swiglu(gate, up)?);
                    }
                }
                if read {
                    let ids = g.step_input("ids", Type::tensor(DType::I32, [1]))?;
                    for w in weights {
                        outputs.push(g.embedding(w, ids, dtype)?);
                    }
                }
                g.finish(outputs.into_iter().enumerate().map(|(i, y)| (format!("y{i}"), y)).collect())
            };
            let [alone, read] = [false, true].map(|read| build(read).unwrap());
            for rows in all_rows.iter().copied() {
                let bindings = Bindings::new().with("rows", rows);
                let value = |arg: &Arg| {
                    let name = arg.name.bytes().fold(rows as u64, |sum, byte| sum * 31 + u64::from(byte));
                    let shape = arg.ty.shape.eval(&bindings).unwrap();
                    Value::Plain(match arg.ty.dtype {
                        DType::I32 => Tensor::int(DType::I32, &shape, vec![0]),
                        float => Rng::new(name).normal(float, &shape),
                    })
                };
                let got = run(&poisoned(1 + rows % 3), &alone, &bindings, &value).expect("runs");
                let mut other = run(&poisoned(2), &read, &bindings, &value).expect("runs");
                other.truncate(got.len());
                let what = format!("{rows} rows of {inner} by {columns:?}, {dtype}, {with:?}");
                assert!(common::same_bits(&got, &other), "{what}");
                // The arithmetic is that of the same rows: some stand for all where there are many.
                if rows * inner < 10_000 {
                    judge_graph(&alone, &|arg| Some(value(arg)), &bindings, &got)
                        .unwrap_or_else(|why| panic!("{what}: {why}"));
                }
            }
        }
    }
}

#[test]
fn memory_that_is_written_may_be_bound_as_a_weight() {
    let mut rng = Rng::new(3);
    let (x, w) = (rng.normal(DType::BF16, &[3, 64]), rng.normal(DType::BF16, &[40, 64]));
    let mut g = Builder::new();
    let input = g.step_input("x", x.ty()).unwrap();
    let weight = g.weight("w", w.ty()).unwrap();
    let y = g.linear(input, weight).unwrap();
    let graph = g.finish(vec![("y".into(), y)]).unwrap();
    let backend = poisoned(2);
    let lowered = ridge_runtime::lower(&graph, &["y"], backend.kernels()).unwrap();
    let program = backend.compile(std::sync::Arc::new(lowered)).unwrap();
    let buffer = backend.allocate(w.to_bytes().len()).unwrap();
    for factor in [1.0, -2.0] {
        // What is written after it was bound counts too.
        let mut bucket = program.bind(&Bindings::new(), std::slice::from_ref(&buffer), &[]).unwrap();
        let w = Tensor::float(w.dtype, &w.shape, w.floats().iter().map(|x| x * factor).collect());
        backend.write(&buffer, &w.to_bytes()).unwrap();
        bucket.input(0).copy_from_slice(&x.to_bytes());
        bucket.submit().unwrap();
        bucket.wait().unwrap();
        let value = |arg: &Arg| Value::Plain(if &*arg.name == "x" { x.clone() } else { w.clone() });
        let expected = run(&backend, &graph, &Bindings::new(), &value).unwrap();
        assert_eq!(bucket.output(0), expected[0].to_bytes());
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
            g.attention_codes(x, [state, scales], table_input, seq_ids, positions, op)
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
    let [kv, scales] = g.kv_write_codes([kv, scales], k, v, slots).unwrap();
    let op = PagedAttention::new(0.3, Sym::new("pairs"), Sym::new("cached"));
    let y = g.attention_codes(q, [kv, scales], table, ids, positions, op).unwrap();
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

/// The other tests here are of the best instruction set that the machine has.
#[test]
fn every_instruction_set_gives_the_same_for_one_row_and_for_many() {
    let binary = std::env::current_exe().expect("tests have a binary");
    for isa in ["portable", "avx2", "avx_vnni", "avx512", "avx512_vnni"] {
        let mut tests = std::process::Command::new(&binary);
        tests.arg("a_product_is_the_same_for_one_row_and_for_many").env("RIDGE_CPU_ISA", isa);
        let ran = tests.output().expect("runs");
        let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
        if said.contains("is none of what this machine has") {
            assert!(isa != "portable", "{said}");
            println!("skipped: this machine has no {isa}");
            continue;
        }
        assert!(ran.status.success() && said.contains("1 passed"), "{isa}: {said}");
    }
}
