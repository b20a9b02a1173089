//! Graphs of training at whose sizes hand-written kernels change their ways.

use ridge_graph::ops::{
    BlockSparseAttention, CrossEntropyBackward, CrossEntropySaving, Gelu, GeluBackward, LinearCrossEntropy,
    LinearCrossEntropySaving, LinearForward, LinearInputGradient, LinearWeightGradient, NormInputGradient,
    NormWeightGradient, RaggedAttention, RaggedAttentionBackward, RaggedAttentionSaving, SumRows,
};
use ridge_graph::sample::Rng;
use ridge_graph::{Builder, DType, Result, Sym, Tensor, Type, Var};

use crate::cases::{KernelCase, case};

/// Attention without a cache over sequences around the tiles of kernels, and its gradient.
pub(crate) fn attentions() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    let mut add = |dtype: DType, dim: usize, [heads, keys]: [usize; 2], lengths: &[usize], op: &RaggedAttention| {
        let mut ids: Vec<i64> = lengths.iter().enumerate().flat_map(|(i, n)| vec![i as i64; *n]).collect();
        ids.extend([-1, -1]);
        let tokens = ids.len();
        // About the logarithms of the sums over the tokens that each sees.
        let seen = |i: usize| {
            let first = ids.iter().position(|id| *id == ids[i]).unwrap_or(0);
            let seen = if op.causal { i - first + 1 } else { lengths.get(ids[i] as usize).copied().unwrap_or(1) };
            (op.window.map_or(seen, |w| seen.min(w)) as f64).ln() + 0.5
        };
        let lse = (0..tokens * heads).map(|i| seen(i / heads)).collect();
        let lse = Tensor::float(DType::F32, &[tokens, heads], lse).rounded();
        let ids = Tensor::int(DType::I32, &[tokens], ids.clone());
        let what = format!("{dtype}, {heads} and {keys} heads of {dim}, {lengths:?}, {op:?}");
        let inputs = |g: &mut Builder| -> Result<Vec<Var>> {
            let mut all = Vec::new();
            for (name, heads) in [("q", heads), ("k", keys), ("v", keys)] {
                all.push(g.step_input(name, Type::tensor(dtype, [tokens, heads, dim]))?);
            }
            all.push(g.step_input("ids", ids.ty())?);
            Ok(all)
        };
        let random = [Tensor::int(DType::I64, &[], vec![-12345]), Tensor::int(DType::I64, &[heads], vec![5; heads])];
        let drawn = |g: &mut Builder, all: &mut Vec<Var>| -> Result<()> {
            if op.dropout != 0.0 {
                for (name, tensor) in ["key", "heads"].into_iter().zip(&random) {
                    all.push(g.step_input(name, tensor.ty())?);
                }
            }
            Ok(())
        };
        let mut push = |kernel, build: &dyn Fn(&mut Builder) -> Result<Vec<Var>>| {
            let mut case = case(kernel, &what, build);
            case.given = vec![("ids", ids.clone()), ("lse", lse.clone())];
            if op.dropout != 0.0 {
                case.given.extend(["key", "heads"].into_iter().zip(random.clone()));
            }
            cases.push(case);
        };
        let kernels = if op.dropout == 0.0 {
            ["ragged_attention", "ragged_attention_saving", "ragged_attention_backward"]
        } else {
            ["ragged_attention_dropped", "ragged_attention_saving_dropped", "ragged_attention_backward_dropped"]
        };
        push(kernels[0], &|g| {
            let mut inputs = inputs(g)?;
            drawn(g, &mut inputs)?;
            g.composite(op.clone(), &inputs)
        });
        push(kernels[1], &|g| {
            let mut inputs = inputs(g)?;
            drawn(g, &mut inputs)?;
            g.composite(RaggedAttentionSaving(op.clone()), &inputs)
        });
        push(kernels[2], &|g| {
            let mut inputs = inputs(g)?;
            let rows = Type::tensor(dtype, [tokens, heads, dim]);
            inputs.push(g.step_input("y", rows.clone())?);
            inputs.push(g.step_input("lse", lse.ty())?);
            drawn(g, &mut inputs)?;
            inputs.push(g.step_input("dy", rows)?);
            g.composite(RaggedAttentionBackward(op.clone()), &inputs)
        });
    };
    for dim in [32, 64, 128] {
        let both = RaggedAttention::new(1.0 / (dim as f64).sqrt(), Sym::new("pairs"));
        let causal = RaggedAttention { causal: true, ..both.clone() };
        let window = RaggedAttention { window: Some(70), ..causal.clone() };
        let capped = RaggedAttention { softcap: Some(2.0), ..causal.clone() };
        add(DType::BF16, dim, [4, 2], &[200, 1, 70, 29], &causal);
        add(DType::BF16, dim, [2, 2], &[513], &causal);
        add(DType::BF16, dim, [3, 1], &[64, 128, 65, 127], &both);
        add(DType::BF16, dim, [2, 1], &[300, 90], &window);
        let sides = RaggedAttention { window: Some(70), ..both.clone() };
        add(DType::BF16, dim, [4, 2], &[300, 90, 1, 69], &sides);
        add(DType::BF16, dim, [2, 2], &[130, 7, 9], &capped);
        add(DType::F16, dim, [2, 1], &[150, 40], &causal);
        let dropped = RaggedAttention { dropout: 0.25, ..causal.clone() };
        add(DType::BF16, dim, [4, 2], &[200, 1, 70, 29], &dropped);
    }
    cases
}

/// Attention by blocks over sequences of fewer and more tokens than see each other, in tiles that begin where sequences do not.
pub(crate) fn attentions_in_blocks() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    let all = [
        (DType::BF16, 64, [2, 2], 64, 1, vec![900]),
        (DType::BF16, 64, [2, 1], 16, 2, vec![37, 500, 144, 145, 3]),
        (DType::F16, 128, [1, 1], 24, 0, vec![10, 650]),
        (DType::BF16, 32, [3, 3], 40, 1, vec![450, 9]),
        (DType::BF16, 128, [2, 2], 7, 3, vec![400, 77, 78]),
        (DType::BF16, 64, [1, 1], 200, 0, vec![1, 1200]),
    ];
    for (dtype, dim, [heads, keys], block, repeats, lengths) in all {
        let pairs = Sym::new("pairs");
        let op = BlockSparseAttention { scale: 1.0 / (dim as f64).sqrt(), block, repeats, pairs };
        let of = |each: fn(usize, usize) -> i64, last: i64| {
            let numbers = lengths.iter().enumerate().flat_map(|(id, n)| (0..*n).map(move |at| each(id, at)));
            let numbers: Vec<i64> = numbers.chain([last, last]).collect();
            Tensor::int(DType::I32, &[numbers.len()], numbers)
        };
        let (ids, positions) = (of(|id, _| id as i64, -1), of(|_, at| at as i64, 0));
        let tokens = ids.shape[0];
        let what = format!("{dtype}, {heads} and {keys} heads of {dim}, {lengths:?} in blocks of {block}");
        let mut case = case("block_sparse_attention", &what, |g| {
            let mut inputs = Vec::new();
            for (name, heads) in [("q", heads), ("k", keys), ("v", keys)] {
                inputs.push(g.step_input(name, Type::tensor(dtype, [tokens, heads, dim]))?);
            }
            inputs.push(g.step_input("ids", ids.ty())?);
            inputs.push(g.step_input("positions", positions.ty())?);
            g.composite(op.clone(), &inputs)
        });
        case.given = vec![("ids", ids), ("positions", positions)];
        cases.push(case);
    }
    cases
}

/// Gradients of linears and norms, norms that only training needs, and losses.
pub(crate) fn gradients() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (rows, columns, depth) in [(1, 8, 16), (70, 264, 136), (300, 37, 65), (513, 1024, 256)] {
            let what = format!("{dtype}, {rows} x {columns} x {depth}");
            let row =
                |g: &mut Builder, name: &str, width: usize| g.step_input(name, Type::tensor(dtype, [rows, width]));
            cases.push(case("linear_input_gradient", &what, |g| {
                let (dy, w) = (row(g, "dy", columns)?, g.weight("w", Type::tensor(dtype, [columns, depth]))?);
                g.composite(LinearInputGradient, &[dy, w])
            }));
            cases.push(case("linear_group_input_gradient", &what, |g| {
                let widths = [columns, depth, columns];
                let mut all = [Vec::new(), Vec::new()];
                for (i, width) in widths.into_iter().enumerate() {
                    all[0].push(row(g, &format!("dy{i}"), width)?);
                    all[1].push(g.weight(&format!("w{i}"), Type::tensor(dtype, [width, depth]))?);
                }
                Ok(vec![g.linear_group_input_gradient(&all[0], &all[1])?])
            }));
            cases.push(case("linear_weight_gradient", &what, |g| {
                let (dy, x) = (row(g, "dy", columns)?, row(g, "x", depth)?);
                g.composite(LinearWeightGradient { dtype }, &[dy, x])
            }));
            cases.push(case("sum_rows", &what, |g| {
                let dy = row(g, "dy", columns)?;
                g.composite(SumRows { dtype }, &[dy])
            }));
        }
        for (rows, width) in [(1, 8), (3, 264), (70, 768), (5, 2048), (3, 5120), (2, 8192)] {
            norms(&mut cases, dtype, rows, width);
        }
    }
    for (tokens, vocab) in [(3, 65), (9, 1000), (2, 50_304)] {
        for dtype in [DType::BF16, DType::F32] {
            let what = format!("{dtype}, {tokens} x {vocab}");
            let targets = Rng::new(3).integers(DType::I32, &[tokens], -1, vocab as i64);
            let logits = |g: &mut Builder| g.step_input("logits", Type::tensor(dtype, [tokens, vocab]));
            let mut saving = case("cross_entropy_saving", &what, |g| {
                let (logits, targets) = (logits(g)?, g.step_input("targets", targets.ty())?);
                g.composite(CrossEntropySaving, &[logits, targets])
            });
            saving.given = vec![("targets", targets.clone())];
            cases.push(saving);
            let lse = Tensor::float(DType::F32, &[tokens], vec![(vocab as f64).ln() + 0.5; tokens]).rounded();
            let mut backward = case("cross_entropy_backward", &what, |g| {
                let (logits, targets) = (logits(g)?, g.step_input("targets", targets.ty())?);
                let dloss = g.step_input("dloss", Type::tensor(DType::F32, [tokens]))?;
                let lse = g.step_input("lse", lse.ty())?;
                g.composite(CrossEntropyBackward, &[logits, targets, lse, dloss])
            });
            backward.given = vec![("targets", targets), ("lse", lse)];
            cases.push(backward);
        }
    }
    let (plain, capped) = ((None, 0.0), (Some(5.0), 0.001));
    for ((softcap, z_loss), tokens, vocab) in
        [(plain, 70, 1000), (capped, 70, 1000), (plain, 72, 1001), (capped, 72, 77)]
    {
        let hidden = 136;
        let op = LinearCrossEntropySaving(LinearCrossEntropy { softcap, z_loss });
        let targets = Rng::new(5).integers(DType::I32, &[tokens], -1, vocab as i64);
        let mut loss = case("linear_cross_entropy_saving", &format!("{op:?}, {tokens} x {vocab}"), |g| {
            let x = g.step_input("x", Type::tensor(DType::BF16, [tokens, hidden]))?;
            let w = g.weight("w", Type::tensor(DType::BF16, [vocab, hidden]))?;
            let targets = g.step_input("targets", targets.ty())?;
            g.composite(op, &[x, w, targets])
        });
        loss.given = vec![("targets", targets)];
        cases.push(loss);
    }
    cases
}

/// GELU behind a linear, with and without what it is taken of, and its slope behind what comes to a linear's input.
pub(crate) fn activations() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for dtype in [DType::BF16, DType::F16] {
        // Few rows are streamed; cuBLASLt takes columns and depths that divide by 8.
        for (rows, columns, depth) in [(1, 72, 64), (16, 264, 136), (70, 264, 136), (300, 37, 65), (512, 1024, 256)] {
            let what = format!("{dtype}, {rows} x {columns} x {depth}");
            let row =
                |g: &mut Builder, name: &str, width: usize| g.step_input(name, Type::tensor(dtype, [rows, width]));
            let before = |g: &mut Builder| -> Result<[Var; 3]> {
                let (x, w) = (row(g, "x", depth)?, g.weight("w", Type::tensor(dtype, [columns, depth]))?);
                Ok([x, w, g.weight("bias", Type::tensor(dtype, [columns]))?])
            };
            cases.push(case("linear_gelu", &what, |g| {
                let [x, w, bias] = before(g)?;
                let h = g.linear_bias(x, w, Some(bias))?;
                Ok(vec![g.gelu(h, Gelu::Tanh)?])
            }));
            cases.push(case("linear_gelu_aux", &what, |g| {
                let inputs = before(g)?;
                let h = g.composite(LinearForward { bias: true }, &inputs)?[0];
                Ok(vec![g.gelu(h, Gelu::Tanh)?, h])
            }));
            cases.push(case("linear_input_gradient_gelu", &what, |g| {
                let (dy, w) = (row(g, "dy", columns)?, g.weight("w", Type::tensor(dtype, [columns, depth]))?);
                let (h, dx) = (row(g, "h", depth)?, g.composite(LinearInputGradient, &[dy, w])?[0]);
                g.composite(GeluBackward(Gelu::Tanh), &[h, dx])
            }));
        }
    }
    cases
}

/// Whole gradients of norms, with the sums of their rows: fewer rows than blocks and more, rows of a warp and of a block, of one
/// vector a thread and of several.
pub(crate) fn whole_gradients() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    let shapes = [
        (DType::BF16, 768, &[1, 3, 70, 1585, 3300][..]),
        (DType::F16, 768, &[5, 1584]),
        (DType::F32, 768, &[1, 600]),
        (DType::BF16, 8, &[9]),
        (DType::F16, 264, &[2, 70]),
        (DType::F32, 264, &[70]),
        (DType::BF16, 520, &[33]),
        (DType::BF16, 1024, &[70, 1100]),
        (DType::BF16, 1600, &[9]),
        (DType::BF16, 2048, &[1, 530, 1100]),
        (DType::F32, 2048, &[5]),
        (DType::BF16, 4096, &[3, 400]),
        (DType::F32, 4096, &[3]),
        (DType::F16, 5120, &[3]),
        (DType::F32, 5120, &[133]),
        (DType::BF16, 8192, &[2, 267]),
        (DType::F32, 8192, &[2, 134]),
    ];
    for (i, (dtype, width, all)) in shapes.into_iter().enumerate() {
        for (j, rows) in all.iter().copied().enumerate() {
            // Of three sums, those whose bits are set.
            for (centred, added, sums) in
                [(true, true, 0b111), (true, true, 0b011), (true, false, 0b001), (false, true, 0), (false, false, 0)]
            {
                cases.push(whole_gradient(dtype, [rows, width], (i + j) % 2 == 0, centred, added, sums));
            }
            if rows < 100 {
                for (centred, added, sums) in [(false, true, 0b110), (true, false, 0b010), (true, true, 0b100)] {
                    cases.push(whole_gradient(dtype, [rows, width], (i + j) % 2 == 0, centred, added, sums));
                }
            }
        }
    }
    cases
}

/// The parts of one gradient, which lowering joins; weight and sums are in f32 if `fine`, else of the dtype of rows.
pub(crate) fn whole_gradient(
    dtype: DType,
    [rows, width]: [usize; 2],
    fine: bool,
    centred: bool,
    added: bool,
    sums: usize,
) -> KernelCase {
    let kernel = match (centred, added) {
        (false, false) => "rms_norm_gradients",
        (false, true) => "rms_norm_gradients_add",
        (true, false) => "layer_norm_gradients",
        (true, true) => "layer_norm_gradients_add",
    };
    let other = if fine { DType::F32 } else { dtype };
    let what = format!("{dtype} and {other}, {rows} x {width}, sums {sums:03b}");
    let eps = 1e-5;
    case(kernel, &what, |g| {
        let row = |g: &mut Builder, name: &str| g.step_input(name, Type::tensor(dtype, [rows, width]));
        let (x, dy) = (row(g, "x")?, row(g, "dy")?);
        let w = g.weight("gain", Type::tensor(other, [width]))?;
        let mut dx = g.composite(NormInputGradient { eps, centred }, &[x, w, dy])?[0];
        let mut of = vec![dy];
        if added {
            let r = row(g, "r")?;
            dx = g.add(r, dx)?;
            of.extend([dx, r]);
        } else {
            of.push(dx);
        }
        let mut all = vec![dx];
        all.extend(g.composite(NormWeightGradient { eps, centred, dtype: other }, &[x, dy])?);
        for (bit, of) in of.into_iter().enumerate() {
            if sums >> bit & 1 != 0 {
                all.extend(g.composite(SumRows { dtype: other }, &[of])?);
            }
        }
        Ok(all)
    })
}

/// Norms and their gradients, for rows of `width` elements.
fn norms(cases: &mut Vec<KernelCase>, dtype: DType, rows: usize, width: usize) {
    let what = format!("{dtype}, {rows} x {width}");
    let row = |g: &mut Builder, name: &str| g.step_input(name, Type::tensor(dtype, [rows, width]));
    let gain = |g: &mut Builder, name: &str| g.weight(name, Type::tensor(DType::F32, [width]));
    let eps = 1e-5;
    for centred in [false, true] {
        let of = |rms, layer| if centred { layer } else { rms };
        let op = NormWeightGradient { eps, centred, dtype };
        cases.push(case(of("rms_norm_weight_gradient", "layer_norm_weight_gradient"), &what, |g| {
            let (x, dy) = (row(g, "x")?, row(g, "dy")?);
            g.composite(op, &[x, dy])
        }));
        let op = NormInputGradient { eps, centred };
        cases.push(case(of("rms_norm_input_gradient", "layer_norm_input_gradient"), &what, |g| {
            let (x, w, dy) = (row(g, "x")?, gain(g, "gain")?, row(g, "dy")?);
            g.composite(op, &[x, w, dy])
        }));
        cases.push(case(of("rms_norm_input_gradient_add", "layer_norm_input_gradient_add"), &what, |g| {
            let (x, w, dy, r) = (row(g, "x")?, gain(g, "gain")?, row(g, "dy")?, row(g, "r")?);
            let dx = g.composite(op, &[x, w, dy])?[0];
            Ok(vec![g.add(r, dx)?])
        }));
    }
    cases.push(case("layer_norm", &what, |g| {
        let (x, w, b) = (row(g, "x")?, gain(g, "gain")?, gain(g, "bias")?);
        Ok(vec![g.layer_norm(x, w, b, eps)?])
    }));
    cases.push(case("add_layer_norm", &what, |g| {
        let (x, r, w, b) = (row(g, "x")?, row(g, "r")?, gain(g, "gain")?, gain(g, "bias")?);
        let sum = g.add(x, r)?;
        Ok(vec![g.layer_norm(sum, w, b, eps)?, sum])
    }));
}
