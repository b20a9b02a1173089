//! Graphs at whose sizes hand-written kernels change their ways: few and many rows, long and ragged contexts, odd columns.

use ridge_graph::format;
use ridge_graph::ops::{PagedAttention, Rope, rope_frequencies};
use ridge_graph::{Builder, DType, FormatRef, Graph, Result, Sym, Tensor, Type, Var};

/// A graph that `kernel` must claim whole. Inputs that are not given are random.
pub(crate) struct KernelCase {
    pub(crate) kernel: &'static str,
    pub(crate) what: String,
    pub(crate) graph: Graph,
    pub(crate) given: Vec<(&'static str, Tensor)>,
}

pub(crate) fn case(
    kernel: &'static str,
    what: &str,
    build: impl FnOnce(&mut Builder) -> Result<Vec<Var>>,
) -> KernelCase {
    let mut g = Builder::new();
    let outputs = build(&mut g).expect("builds");
    let outputs = outputs.into_iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect();
    KernelCase { kernel, what: what.to_owned(), graph: g.finish(outputs).expect("finishes"), given: Vec::new() }
}

/// A weight of this name, with so many columns of results.
pub(crate) type MakeWeight<'a> = &'a dyn Fn(&mut Builder, &str, usize) -> Result<Var>;

/// The gate of an MLP, of two linears of x.
pub(crate) fn gated_pair(g: &mut Builder, x: Var, columns: usize, weight: MakeWeight<'_>) -> Result<Vec<Var>> {
    let (gate, up) = (weight(g, "gate", columns)?, weight(g, "up", columns)?);
    let (gate, up) = (g.linear(x, gate)?, g.linear(x, up)?);
    Ok(vec![g.swiglu(gate, up)?])
}

/// Three linears of x, of different widths.
pub(crate) fn three_linears(g: &mut Builder, x: Var, columns: usize, weight: MakeWeight<'_>) -> Result<Vec<Var>> {
    let widths = [("q", columns), ("k", 17), ("v", columns + 3)];
    widths.into_iter().map(|(name, columns)| weight(g, name, columns).and_then(|w| g.linear(x, w))).collect()
}

/// Products of groups of rows by two weights that are gated, and sums of experts that are added to what a layer begins with.
pub(crate) fn experts() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    let kinds = [
        (DType::BF16, None),
        (DType::F16, None),
        (DType::F32, None),
        (DType::BF16, Some("mxfp4")),
        (DType::BF16, Some("q4_k")),
        (DType::F16, Some("q8_0")),
        (DType::F32, Some("q6_k")),
    ];
    for (dtype, format) in kinds {
        let format = format.and_then(|name| format::all().into_iter().find(|f| f.name() == name));
        // Few rows, groups of a tile and more, and rows behind the last.
        for groups in [[1, 0, 2], [2, 1, 1], [0, 40, 3], [70, 0, 130], [300, 65, 0]] {
            for (depth, columns) in [(256, 5), (256, 130), (96, 66), (40, 33)] {
                if format.as_ref().is_some_and(|f| depth % f.granularity(3)[2] != 0) {
                    continue;
                }
                let rows = groups.iter().sum::<usize>() + 2;
                let what = format!("{dtype}, {format:?}, {groups:?} x {depth} x {columns}");
                let mut case = case("grouped_linear_swiglu", &what, |g| {
                    let x = g.step_input("x", Type::tensor(dtype, [9, depth]))?;
                    let offsets = g.step_input("offsets", Type::tensor(DType::I32, [4]))?;
                    let index = g.step_input("rows", Type::tensor(DType::I32, [rows]))?;
                    let plain = Type::tensor(if format.is_some() { DType::F32 } else { dtype }, [3, columns, depth]);
                    let stored = || format.clone().map_or(plain.clone(), |format| plain.clone().stored_as(format));
                    let (up, gate) = (g.weight("up", stored())?, g.weight("gate", stored())?);
                    let reached = Sym::new("reached");
                    let up = g.grouped_linear(x, up, offsets, Some(index), &reached)?;
                    let gate = g.grouped_linear(x, gate, offsets, Some(index), &reached)?;
                    Ok(vec![g.swiglu(gate, up)?])
                });
                let ends = groups.iter().scan(0, |end, n| {
                    *end += *n as i64;
                    Some(*end)
                });
                let offsets: Vec<i64> = std::iter::once(0).chain(ends).collect();
                // Some rows are none.
                let index: Vec<i64> = (0..rows as i64).map(|i| i * 7 % 10 - i64::from(i % 11 == 5)).collect();
                case.given = vec![
                    ("offsets", Tensor::int(DType::I32, &[4], offsets)),
                    ("rows", Tensor::int(DType::I32, &[rows], index)),
                ];
                cases.push(case);
            }
        }
    }
    for (dtype, tokens, top_k, hidden) in
        [(DType::BF16, 1, 8, 2048), (DType::F16, 3, 2, 33), (DType::F32, 70, 4, 72), (DType::BF16, 9, 1, 520)]
    {
        let pairs = tokens * top_k;
        let mut case = case("expert_combine_add", &format!("{dtype}, {tokens} of {top_k}, {hidden}"), |g| {
            let r = g.step_input("r", Type::tensor(dtype, [tokens, hidden]))?;
            let y = g.step_input("y", Type::tensor(dtype, [pairs, hidden]))?;
            let places = g.step_input("places", Type::tensor(DType::I32, [tokens, top_k]))?;
            let weights = g.step_input("weights", Type::tensor(DType::F32, [tokens, top_k]))?;
            let sum = g.expert_combine(y, places, weights)?;
            Ok(vec![g.add(r, sum)?])
        });
        let places = (0..pairs as i64).map(|i| if i % 5 == 3 { -1 } else { (i * 3 + 1) % pairs as i64 }).collect();
        case.given = vec![("places", Tensor::int(DType::I32, &[tokens, top_k], places))];
        cases.push(case);
    }
    cases
}

/// Keys that are normed and rotated on their way to the cache.
pub(crate) fn cache_writes() -> Vec<KernelCase> {
    let kinds =
        [(DType::BF16, DType::BF16, 128, 4), (DType::F32, DType::BF16, 80, 3), (DType::F16, DType::F16, 64, 33)];
    let mut cases = Vec::new();
    for (dtype, cache, dim, heads) in kinds {
        // The last are several rounds of a block.
        for tokens in [1usize, 70, if heads > 32 { 850 } else { 4000 }] {
            // Some slots are those of a later token, of the same block or of another.
            let places = 2 * tokens.next_multiple_of(64);
            let mut case =
                case("norm_rope_kv_write", &format!("{dtype} to {cache}, {tokens} x {heads} x {dim}"), |g| {
                    let kv = g.state("kv", Type::state(cache, [places / 16, 2, heads, 16, dim]))?;
                    let k = g.step_input("k", Type::tensor(dtype, [tokens, heads, dim]))?;
                    let v = g.step_input("v", Type::tensor(dtype, [tokens, heads, dim]))?;
                    let gain = g.weight("gain", Type::tensor(DType::BF16, [dim]))?;
                    let ints = |g: &mut Builder, name: &str| g.step_input(name, Type::tensor(DType::I32, [tokens]));
                    let (positions, slots) = (ints(g, "positions")?, ints(g, "slots")?);
                    let k = g.rms_norm(k, gain, 1e-5)?;
                    let rotated = Rope { inv_freq: rope_frequencies(10_000.0, dim).into(), scale: 1.0 };
                    let k = g.rope(k, positions, &rotated)?;
                    let written = g.kv_write(kv, k, v, slots)?;
                    Ok(vec![g.state_read(written)?])
                });
            let slot = |t: usize| match t % 23 {
                3 => -1,
                5 => (t as i64 + 31) * 5 + 2,
                9 => (t as i64 + 1) * 5 + 2,
                _ => t as i64 * 5 + 2,
            };
            let slots = (0..tokens).map(|t| slot(t) % places as i64).collect();
            let positions = (0..tokens as i64).map(|t| t * 1000 + 7).collect();
            case.given = vec![
                ("slots", Tensor::int(DType::I32, &[tokens], slots)),
                ("positions", Tensor::int(DType::I32, &[tokens], positions)),
            ];
            cases.push(case);
        }
    }
    cases
}

/// Elements and rows of a table, of whose places some come again among later ones.
pub(crate) fn table_writes() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for (dtype, changes, width) in [
        (DType::I32, 1, 1),
        (DType::I32, 255, 1),
        (DType::I64, 3003, 1),
        (DType::BF16, 5002, 1),
        (DType::F32, 45, 72),
        (DType::BF16, 300, 7),
        (DType::F32, 7, 2050),
    ] {
        let (rows, columns) = if width > 1 { (changes, width) } else { (changes, 16) };
        let mut case = case("table_write", &format!("{dtype}, {changes} x {width}"), |g| {
            let table = g.state("table", Type::state(dtype, [rows, columns]))?;
            let of_rows = Type::tensor(dtype, [changes, width]);
            let values = g.step_input("values", if width > 1 { of_rows } else { Type::tensor(dtype, [changes]) })?;
            let places = g.step_input("places", Type::tensor(DType::I32, [changes]))?;
            let written = g.table_write(table, values, places)?;
            Ok(vec![g.state_read(written)?])
        });
        let all = (if width > 1 { rows } else { rows * columns }) as i64;
        let place = |i: i64| match i % 11 {
            4 => -1,
            7 => all + i % 2,
            // Of the next change, and of one of another block.
            2 => (i + 1) * 37 % all,
            8 => (i + 265) * 37 % all,
            _ => i * 37 % all,
        };
        let numbered =
            |shape: &[usize], first: i64| Tensor::int(dtype, shape, (first..).take(shape.iter().product()).collect());
        case.given = vec![("places", Tensor::int(DType::I32, &[changes], (0..changes as i64).map(place).collect()))];
        if !dtype.is_float() {
            case.given.extend([("table", numbered(&[rows, columns], -70_000)), ("values", numbered(&[changes], 1))]);
        }
        cases.push(case);
    }
    cases
}

/// Linears with what goes before and after them.
pub(crate) fn linears() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for rows in [1, 2, 7, 8, 9, 16, 17, 70] {
            for (depth, columns) in [(8, 5), (264, 33), (1024, 48), (2056, 16)] {
                cases.extend(linears_of(dtype, rows, depth, columns));
            }
        }
    }
    // More tiles than multiprocessors.
    for rows in [1, 2, 9] {
        cases.extend(linears_of(DType::BF16, rows, 264, 4261));
    }
    // Rows that are too many and too long to be prepared by every block, one of them with wide tiles.
    cases.extend(linears_of(DType::BF16, 3, 16_392, 41));
    cases.extend(linears_of(DType::BF16, 9, 4104, 4277).into_iter().filter(|case| case.kernel == "linear_add"));
    cases
}

fn linears_of(dtype: DType, rows: usize, depth: usize, columns: usize) -> Vec<KernelCase> {
    let mut cases = Vec::new();
    let what = format!("{dtype}, {rows} x {depth} x {columns}");
    let input = |g: &mut Builder, name: &str, width: usize| g.step_input(name, Type::tensor(dtype, [rows, width]));
    let weight = |g: &mut Builder, name: &str, columns: usize| g.weight(name, Type::tensor(dtype, [columns, depth]));
    let normed = |g: &mut Builder| {
        let x = input(g, "x", depth)?;
        let gain = g.weight("gain", Type::tensor(dtype, [depth]))?;
        g.rms_norm(x, gain, 1e-5)
    };
    let gated = |g: &mut Builder, x: Var| gated_pair(g, x, columns, &weight);
    let three = |g: &mut Builder, x: Var| three_linears(g, x, columns, &weight);
    cases.push(case("linear", &what, |g| {
        let (x, w) = (input(g, "x", depth)?, weight(g, "w", columns)?);
        Ok(vec![g.linear(x, w)?])
    }));
    cases.push(case("linear_bias", &what, |g| {
        let (x, w) = (input(g, "x", depth)?, weight(g, "w", columns)?);
        let b = g.weight("b", Type::tensor(dtype, [columns]))?;
        Ok(vec![g.linear_bias(x, w, Some(b))?])
    }));
    cases.push(case("linear_group", &what, |g| {
        let x = input(g, "x", depth)?;
        three(g, x)
    }));
    cases.push(case("linear_add", &what, |g| {
        let (x, r, w) = (input(g, "x", depth)?, input(g, "r", columns)?, weight(g, "w", columns)?);
        let y = g.linear(x, w)?;
        Ok(vec![g.add(r, y)?])
    }));
    cases.push(case("linear_swiglu", &what, |g| {
        let x = input(g, "x", depth)?;
        gated(g, x)
    }));
    cases.push(case("norm_linear_group", &what, |g| {
        let x = normed(g)?;
        three(g, x)
    }));
    cases.push(case("norm_linear", &what, |g| {
        let (x, w) = (normed(g)?, weight(g, "w", columns)?);
        Ok(vec![g.linear(x, w)?])
    }));
    cases.push(case("norm_linear_bias", &what, |g| {
        let (x, w) = (normed(g)?, weight(g, "w", columns)?);
        let b = g.weight("b", Type::tensor(dtype, [columns]))?;
        Ok(vec![g.linear_bias(x, w, Some(b))?])
    }));
    // The norm of a row in f32, which is not as long.
    if dtype != DType::F32 && depth <= 16_384 {
        cases.push(case("norm_linear_add", &what, |g| {
            let x = g.step_input("x", Type::tensor(DType::F32, [rows, depth]))?;
            let gain = g.weight("gain", Type::tensor(dtype, [depth]))?;
            let x = g.rms_norm(x, gain, 1e-5)?;
            let (x, r, w) = (g.cast(x, dtype)?, input(g, "r", columns)?, weight(g, "w", columns)?);
            let y = g.linear(x, w)?;
            Ok(vec![g.add(r, y)?])
        }));
    }
    cases.push(case("norm_linear_swiglu", &what, |g| {
        let x = normed(g)?;
        gated(g, x)
    }));
    cases
}

/// Norms of rows up to the widest.
pub(crate) fn norms() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        // The last three are many rows, of which the first are a warp's each.
        for (rows, width) in [(1, 8), (3, 264), (2, 4096), (5, 5120), (1, 16_384), (2051, 8), (2050, 536), (2048, 1024)]
        {
            let what = format!("{dtype}, {rows} x {width}");
            let row = |g: &mut Builder, name: &str| g.step_input(name, Type::tensor(dtype, [rows, width]));
            let gain = |g: &mut Builder| g.weight("gain", Type::tensor(DType::BF16, [width]));
            cases.push(case("rms_norm", &what, |g| {
                let (x, w) = (row(g, "x")?, gain(g)?);
                Ok(vec![g.rms_norm(x, w, 1e-5)?])
            }));
            cases.push(case("add_rms_norm", &what, |g| {
                let (x, r, w) = (row(g, "x")?, row(g, "r")?, gain(g)?);
                let sum = g.add(x, r)?;
                Ok(vec![g.rms_norm(sum, w, 1e-5)?, sum])
            }));
            if dtype != DType::F32 {
                continue;
            }
            for to in [DType::BF16, DType::F16] {
                cases.push(case("rms_norm_cast", &what, |g| {
                    let (x, w) = (row(g, "x")?, gain(g)?);
                    let y = g.rms_norm(x, w, 1e-5)?;
                    Ok(vec![g.cast(y, to)?])
                }));
                // Of rows and of their heads.
                for heads in [1, 2] {
                    cases.push(case("gated_rms_norm", &what, |g| {
                        let head = width / heads;
                        let x = g.step_input("x", Type::tensor(dtype, [rows * heads, head]))?;
                        let w = g.weight("gain", Type::tensor(DType::BF16, [head]))?;
                        let gate = g.step_input("gate", Type::tensor(to, [rows, width]))?;
                        let (y, gate) = (g.rms_norm(x, w, 1e-5)?, g.cast(gate, DType::F32)?);
                        let y = if heads > 1 { g.reshape(y, ridge_graph::Shape::new([rows, width]))? } else { y };
                        let y = g.swiglu(gate, y)?;
                        Ok(vec![g.cast(y, to)?])
                    }));
                }
            }
        }
    }
    cases
}

/// Linears by weights in block formats: few rows, whose weights are read in their own bits, and many, and depths of whole
/// chunks of 256 and of halves.
pub(crate) fn blocks() -> Vec<KernelCase> {
    let formats = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4", "q4_k", "q5_k", "q6_k"];
    let mut cases = Vec::new();
    for name in formats {
        let format = ridge_graph::format::all().into_iter().find(|f| f.name() == name).expect("is there");
        let whole = format.granularity(1)[0] == 256;
        for (dtype, rows) in
            [(DType::BF16, 1), (DType::F16, 1), (DType::BF16, 3), (DType::BF16, 17), (DType::BF16, 40), (DType::F16, 9)]
        {
            for (depth, columns) in [(256, 5), (2304, 33), (640, 16)] {
                if whole && depth % 256 != 0 {
                    continue;
                }
                let what = format!("{name}, {dtype}, {rows} x {depth} x {columns}");
                let stored = |g: &mut Builder, name: &str, columns: usize, format: &FormatRef| {
                    g.weight(name, Type::tensor(DType::F32, [columns, depth]).stored_as(format.clone()))
                };
                let weight = |g: &mut Builder, name: &str, columns: usize| stored(g, name, columns, &format);
                let input =
                    |g: &mut Builder, name: &str, width: usize| g.step_input(name, Type::tensor(dtype, [rows, width]));
                let normed = |g: &mut Builder| {
                    let x = input(g, "x", depth)?;
                    let gain = g.weight("gain", Type::tensor(DType::F32, [depth]))?;
                    g.rms_norm(x, gain, 1e-5)
                };
                cases.push(case("linear_blocks", &what, |g| {
                    let (x, w) = (input(g, "x", depth)?, weight(g, "w", columns)?);
                    Ok(vec![g.linear(x, w)?])
                }));
                cases.push(case("linear_blocks_bias_add", &what, |g| {
                    let (x, r, w) = (input(g, "x", depth)?, input(g, "r", columns)?, weight(g, "w", columns)?);
                    let b = g.weight("b", Type::tensor(DType::F32, [columns]))?;
                    let y = g.linear_bias(x, w, Some(b))?;
                    Ok(vec![g.add(r, y)?])
                }));
                cases.push(case("norm_linear_blocks", &what, |g| {
                    let (x, w) = (normed(g)?, weight(g, "w", columns)?);
                    Ok(vec![g.linear(x, w)?])
                }));
                // Weights of two formats.
                cases.push(case("norm_linear_blocks_group", &what, |g| {
                    let x = normed(g)?;
                    let (q, k) = (weight(g, "q", columns)?, stored(g, "k", 17, &FormatRef::new(format::Q8_0))?);
                    Ok(vec![g.linear(x, q)?, g.linear(x, k)?])
                }));
                cases.push(case("norm_linear_blocks_swiglu", &what, |g| {
                    let x = normed(g)?;
                    gated_pair(g, x, columns, &weight)
                }));
            }
        }
    }
    cases
}

/// A step of sequences of these `(cached, new)` tokens, with some padding at the end, in blocks in no order.
pub(crate) struct Step {
    pub(crate) table: Tensor,
    pub(crate) ids: Tensor,
    pub(crate) positions: Tensor,
    pub(crate) blocks: usize,
}

impl Step {
    /// In blocks of 16.
    pub(crate) fn new(sequences: &[(usize, usize)], padding: usize, spare: usize) -> Self {
        Self::in_blocks(sequences, padding, spare, 16)
    }

    pub(crate) fn in_blocks(sequences: &[(usize, usize)], padding: usize, spare: usize, block: usize) -> Self {
        let columns = sequences.iter().map(|(cached, new)| (cached + new).div_ceil(block)).max().unwrap_or(0) + spare;
        let blocks = sequences.len() * columns;
        let (mut ids, mut positions) = (Vec::new(), Vec::new());
        for (i, (cached, new)) in sequences.iter().enumerate() {
            ids.extend(std::iter::repeat_n(i as i64, *new));
            positions.extend((0..*new).map(|t| (cached + t) as i64));
        }
        ids.extend(std::iter::repeat_n(-1, padding));
        positions.extend(std::iter::repeat_n(0, padding));
        let int = |shape: &[usize], values: Vec<i64>| Tensor::int(DType::I32, shape, values);
        let table = (0..blocks as i64).map(|i| blocks as i64 - 1 - i).collect();
        Self {
            table: int(&[sequences.len(), columns], table),
            positions: int(&[positions.len()], positions),
            ids: int(&[ids.len()], ids),
            blocks,
        }
    }
}

/// Attention of prompts, of single tokens, and of both at once.
pub(crate) fn attentions() -> Vec<KernelCase> {
    let prompt: &[(usize, usize)] = &[(0, 150)];
    let ragged: &[(usize, usize)] = &[(0, 60), (70, 33), (3, 1), (200, 47)];
    let decode: &[(usize, usize)] = &[(300, 1), (15, 1), (0, 1), (530, 1)];
    let short: &[(usize, usize)] = &[(63, 1)];
    let mixed: &[(usize, usize)] = &[(100, 1), (0, 40), (257, 1)];
    let dtypes = [DType::BF16, DType::F16, DType::F32, DType::F32];
    let caches = [DType::BF16, DType::F16, DType::F32, DType::BF16];
    let mut cases = Vec::new();
    for (dtype, cache) in dtypes.into_iter().zip(caches) {
        for (dim, heads, keys) in [(64, 4, 2), (128, 2, 1), (80, 1, 1), (96, 6, 2), (192, 17, 1), (256, 3, 1)] {
            // The last two have tables far wider than their sequences.
            let steps =
                [(prompt, 0, 1), (ragged, 5, 1), (decode, 0, 1), (mixed, 2, 1), (decode, 3, 500), (short, 0, 500)];
            for (sequences, padding, spare) in steps {
                for (window, softcap, rope, norm) in [
                    (None, None, false, false),
                    (None, None, true, false),
                    (None, None, true, true),
                    (Some(40), None, false, false),
                    (None, Some(2.0), false, false),
                ] {
                    // The meaning copies the cache for each token: not every combination is worth its time.
                    let special = window.is_some() || softcap.is_some() || rope;
                    let wide = spare > 1 && (dim != 64 || softcap.is_some());
                    // Heads of other sizes, and more of a key head than one tile has rows, differ in decoding.
                    let other = matches!(dim, 96 | 192)
                        && (sequences.len() != decode.len() || padding > 0 || dtype == DType::F16);
                    if wide
                        || other
                        || (special && (dim != 64 || dtype == DType::F16))
                        || (dim > 64 && dtype == DType::F32)
                    {
                        continue;
                    }
                    let step = Step::new(sequences, padding, spare);
                    let tokens = step.ids.shape[0];
                    let op = PagedAttention::new(1.0 / (dim as f64).sqrt(), Sym::new("pairs"), Sym::new("cached"));
                    // A window of several spans where the table has room for them.
                    let window = window.map(|w| if spare > 1 { 200 } else { w });
                    let op = PagedAttention { window, softcap, ..op };
                    let what = format!(
                        "{dtype} over {cache}, dim {dim}, {sequences:?}, {spare} spare, {window:?}, {softcap:?}"
                    );
                    let kernel = match (norm, rope) {
                        (true, _) => "norm_rope_attention",
                        (false, true) => "rope_attention",
                        (false, false) => "attention",
                    };
                    let mut case = case(kernel, &what, |g| {
                        let q = g.step_input("q", Type::tensor(dtype, [tokens, heads, dim]))?;
                        let kv = g.state("kv", Type::state(cache, [step.blocks, 2, keys, 16, dim]))?;
                        let int = |g: &mut Builder, name: &str, of: &Tensor| g.step_input(name, of.ty());
                        let table = int(g, "table", &step.table)?;
                        let (ids, positions) = (int(g, "ids", &step.ids)?, int(g, "positions", &step.positions)?);
                        let rotated = Rope { inv_freq: rope_frequencies(10_000.0, dim).into(), scale: 1.0 };
                        let q = if norm {
                            let gain = g.weight("gain", Type::tensor(DType::BF16, [dim]))?;
                            g.rms_norm(q, gain, 1e-5)?
                        } else {
                            q
                        };
                        let q = if rope { g.rope(q, positions, &rotated)? } else { q };
                        Ok(vec![g.attention(q, kv, table, ids, positions, op)?])
                    });
                    case.given = vec![("table", step.table), ("ids", step.ids), ("positions", step.positions)];
                    cases.push(case);
                }
            }
        }
    }
    cases
}
