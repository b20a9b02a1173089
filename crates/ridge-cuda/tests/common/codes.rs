//! Cases of kernels that make codes with scales, and that multiply them.

use ridge_graph::format::{CodeType, ScaleLayout, ScaledFormat};
use ridge_graph::ops::PagedAttention;
use ridge_graph::sample::Rng;
use ridge_graph::{Builder, DType, FormatRef, Sym, Tensor, Type, Var};

use crate::cases::{KernelCase, Step, case, gated_pair, three_linears};

/// What norms and gates give as codes with scales, decoded again, and products of such values.
pub(crate) fn quantised() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for codes in [CodeType::Int8, CodeType::F8E4M3] {
        for scales in [ScaleLayout::Row, ScaleLayout::Group(128)] {
            let format = ScaledFormat::new(codes, scales);
            // Of the most rows threads have two parts each, where they are normed.
            for (rows, width) in [(1, 8), (3, 264), (17, 4096), (1025, 512)] {
                let dtype = DType::BF16;
                let what = format!("{format:?}, {rows} x {width}");
                let row = |g: &mut Builder, name: &str| g.step_input(name, Type::tensor(dtype, [rows, width]));
                let gain = |g: &mut Builder| g.weight("gain", Type::tensor(DType::F32, [width]));
                let back = |g: &mut Builder, x: Var| {
                    let x = g.quantize(x, format)?;
                    g.dequantize(x)
                };
                cases.push(case("rms_norm_quantize", &what, |g| {
                    let (x, w) = (row(g, "x")?, gain(g)?);
                    let y = g.rms_norm(x, w, 1e-5)?;
                    Ok(vec![back(g, y)?])
                }));
                cases.push(case("add_rms_norm_quantize", &what, |g| {
                    let (x, r, w) = (row(g, "x")?, row(g, "r")?, gain(g)?);
                    let sum = g.add(x, r)?;
                    let y = g.rms_norm(sum, w, 1e-5)?;
                    Ok(vec![back(g, y)?, sum])
                }));
                cases.push(case("swiglu_quantize", &what, |g| {
                    let (gate, up) = (row(g, "gate")?, row(g, "up")?);
                    let y = g.swiglu(gate, up)?;
                    Ok(vec![back(g, y)?])
                }));
            }
        }
    }
    use ScaleLayout::{Block, Group, Row, Tensor as Whole};
    for (x, w) in [(Whole, Whole), (Row, Row), (Group(128), Block)] {
        for (rows, depth, columns) in [(1, 512, 256), (37, 1024, 512), (300, 4096, 128), (128, 272, 40)] {
            let stored = |scales, shape: [usize; 2]| {
                let format = ScaledFormat::new(CodeType::F8E4M3, scales);
                Type::tensor(DType::BF16, shape).stored_as(FormatRef::new(format))
            };
            for bias in [false, true] {
                let kernel = match (w, bias) {
                    (Whole, false) => "linear_scaled",
                    (Whole, true) => "linear_scaled_bias",
                    (_, false) => "quantize_linear",
                    (_, true) => "quantize_linear_bias",
                };
                cases.push(case(kernel, &format!("{x:?} by {w:?}, {rows} x {depth} x {columns}"), |g| {
                    let x = g.weight("x", stored(x, [rows, depth]))?;
                    let w = g.weight("w", stored(w, [columns, depth]))?;
                    let b = g.weight("b", Type::tensor(DType::BF16, [columns]))?;
                    Ok(vec![g.linear_bias(x, w, bias.then_some(b))?])
                }));
            }
        }
    }
    for (rows, width, inner) in [(5, 64, 272), (1024, 128, 272), (1100, 64, 144)] {
        let stored = |g: &mut Builder, name: &str, shape: [usize; 2]| {
            g.weight(name, Type::tensor(DType::BF16, shape).stored_as(FormatRef::new(ScaledFormat::F8_ROWS)))
        };
        cases.push(case("scaled_mlp", &format!("{rows} x {width} x {inner}"), |g| {
            let x = g.step_input("x", Type::tensor(DType::BF16, [rows, width]))?;
            let gain = g.weight("gain", Type::tensor(DType::F32, [width]))?;
            let y = g.rms_norm(x, gain, 1e-5)?;
            let y = g.quantize(y, ScaledFormat::F8_ROWS)?;
            let y = gated_pair(g, y, inner, &|g: &mut Builder, name: &str, n: usize| stored(g, name, [n, width]))?;
            let y = g.quantize(y[0], ScaledFormat::F8_ROWS)?;
            let down = stored(g, "down", [width, inner])?;
            let y = g.linear(y, down)?;
            Ok(vec![g.add(x, y)?])
        }));
    }
    cases
}

/// Linears by weights of codes whose x becomes codes on the way: one row, a few, and many.
pub(crate) fn linears_of_codes() -> Vec<KernelCase> {
    let formats = [ScaledFormat::F8_ROWS, ScaledFormat::F8_BLOCKS, ScaledFormat::INT8_ROWS];
    formats.into_iter().flat_map(linears_of).collect()
}

fn linears_of(format: ScaledFormat) -> Vec<KernelCase> {
    let of_x = format.of_activations().expect("is multiplied by codes");
    let mut cases = Vec::new();
    for (dtype, rows) in [
        (DType::BF16, 1),
        (DType::BF16, 3),
        (DType::BF16, 17),
        (DType::BF16, 32),
        (DType::BF16, 65),
        (DType::F16, 1),
        (DType::F16, 9),
    ] {
        // More tiles than there are multiprocessors, for the rows that are streamed.
        let many_tiles = (rows <= 16).then_some((400, 4261));
        for (depth, columns) in [(16, 5), (1040, 33), (4096, 48), (1200, 200)].into_iter().chain(many_tiles) {
            let what = format!("{format:?}, {dtype}, {rows} x {depth} x {columns}");
            let weight = |g: &mut Builder, name: &str, columns: usize| {
                g.weight(name, Type::tensor(DType::BF16, [columns, depth]).stored_as(FormatRef::new(format)))
            };
            let input =
                |g: &mut Builder, name: &str, width: usize| g.step_input(name, Type::tensor(dtype, [rows, width]));
            let plain = |g: &mut Builder| {
                let x = input(g, "x", depth)?;
                g.quantize(x, of_x)
            };
            let normed = |g: &mut Builder| {
                let x = input(g, "x", depth)?;
                let gain = g.weight("gain", Type::tensor(DType::F32, [depth]))?;
                let x = g.rms_norm(x, gain, 1e-5)?;
                g.quantize(x, of_x)
            };
            let gated = |g: &mut Builder, x: Var| gated_pair(g, x, columns, &weight);
            let three = |g: &mut Builder, x: Var| three_linears(g, x, columns, &weight);
            cases.push(case("quantize_linear", &what, |g| {
                let (x, w) = (plain(g)?, weight(g, "w", columns)?);
                Ok(vec![g.linear(x, w)?])
            }));
            cases.push(case("norm_quantize_linear", &what, |g| {
                let (x, w) = (normed(g)?, weight(g, "w", columns)?);
                Ok(vec![g.linear(x, w)?])
            }));
            cases.push(case("quantize_linear_bias", &what, |g| {
                let (x, w) = (plain(g)?, weight(g, "w", columns)?);
                let b = g.weight("b", Type::tensor(dtype, [columns]))?;
                Ok(vec![g.linear_bias(x, w, Some(b))?])
            }));
            cases.push(case("quantize_linear_add", &what, |g| {
                let (x, r, w) = (plain(g)?, input(g, "r", columns)?, weight(g, "w", columns)?);
                let y = g.linear(x, w)?;
                Ok(vec![g.add(r, y)?])
            }));
            cases.push(case("quantize_linear_group", &what, |g| {
                let x = plain(g)?;
                three(g, x)
            }));
            cases.push(case("norm_quantize_linear_group", &what, |g| {
                let x = normed(g)?;
                three(g, x)
            }));
            cases.push(case("quantize_linear_swiglu", &what, |g| {
                let x = plain(g)?;
                gated(g, x)
            }));
            cases.push(case("norm_quantize_linear_swiglu", &what, |g| {
                let x = normed(g)?;
                gated(g, x)
            }));
        }
    }
    cases
}

/// Attention over caches of codes: prompts of several tiles, and among them single tokens, whose keys and values have scales of
/// several magnitudes.
pub(crate) fn attentions_over_codes() -> Vec<KernelCase> {
    let prompt: &[(usize, usize)] = &[(0, 300)];
    let mixed: &[(usize, usize)] = &[(100, 1), (0, 220), (257, 1), (300, 140), (5, 3)];
    let (none, window, softcap) = ((None, None), (Some(150), None), (None, Some(20.0)));
    let mut cases = Vec::new();
    for codes in [DType::I8, DType::F8E4M3] {
        for (dtype, dim, block, sequences, padding, (window, softcap), sinks) in [
            (DType::BF16, 128, 16, prompt, 3, none, false),
            (DType::BF16, 128, 32, mixed, 2, window, false),
            (DType::BF16, 128, 64, mixed, 0, softcap, false),
            (DType::BF16, 64, 64, mixed, 5, none, true),
            (DType::BF16, 64, 16, mixed, 0, window, true),
            (DType::F16, 128, 16, mixed, 0, none, true),
            (DType::F16, 64, 32, prompt, 0, softcap, false),
        ] {
            let (heads, keys) = (4, 2);
            let step = Step::in_blocks(sequences, padding, 1, block);
            let tokens = step.ids.shape[0];
            let what = format!(
                "{dtype} over {codes}, dim {dim}, blocks of {block}, {sequences:?}, {window:?}, {softcap:?}, sinks {sinks}"
            );
            let of_scales = [step.blocks, 2, keys, block];
            let cache = [step.blocks, 2, keys, block, dim];
            let kernel = if sinks { "attention_codes_sinks" } else { "attention_codes" };
            let mut case = case(kernel, &what, |g| {
                let q = g.step_input("q", Type::tensor(dtype, [tokens, heads, dim]))?;
                let kv = g.state("kv", Type::state(codes, cache))?;
                let int = |g: &mut Builder, name: &str, of: &Tensor| g.step_input(name, of.ty());
                let table = int(g, "table", &step.table)?;
                let (ids, positions) = (int(g, "ids", &step.ids)?, int(g, "positions", &step.positions)?);
                let mut more = vec![g.state("scales", Type::state(DType::F32, of_scales))?];
                if sinks {
                    // As checkpoints have them.
                    let sinks = g.weight("sinks", Type::tensor(dtype, [heads]))?;
                    more.push(g.cast(sinks, DType::F32)?);
                }
                let op = PagedAttention::new(1.0 / (dim as f64).sqrt(), Sym::new("pairs"), Sym::new("cached"));
                let op = PagedAttention { window, softcap, sinks, ..op };
                Ok(vec![g.attention_with([q, kv, table, ids, positions], &more, op)?])
            });
            let mut rng = Rng::new(7);
            let (kv, unit) = match codes {
                DType::I8 => (rng.integers(codes, &cache, -127, 128), 0.02),
                _ => (rng.normal(codes, &cache), 1.0),
            };
            let scales = rng.normal(DType::F32, &of_scales).floats().iter().map(|x| unit * x.exp()).collect();
            let scales = Tensor::float(DType::F32, &of_scales, scales).rounded();
            case.given = vec![
                ("kv", kv),
                ("scales", scales),
                ("table", step.table),
                ("ids", step.ids),
                ("positions", step.positions),
            ];
            cases.push(case);
        }
    }
    cases
}
