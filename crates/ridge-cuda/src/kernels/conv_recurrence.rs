//! What lies between the two products of a Mamba-2 layer, for rows of few tokens: `kernels/conv_recurrence.cu`.

use ridge_graph::ops::{GatedRecurrence, Softplus, StatefulConv1d, Swiglu};
use ridge_graph::{Binary, Composite, DType, Dim, Function, Node, Op, Prim, Unary, Var};

use super::entry::CudaKernelEntry;
use crate::gemm::PROCESSORS;
use crate::kernel::{
    CudaKernel, CudaKernelSpec, CudaSource, KernelText, LaunchArg, OperandSlot, ZERO_BYTES, flag, grid, input, name,
    numbers, output,
};
use crate::prims::{LEAST_OF_CHUNKS, takes_gated};

pub(super) const CONV_RECURRENCE: KernelText<'_> = KernelText::new(concat!(
    include_str!("../../kernels/lines.cuh"),
    include_str!("../../kernels/compensated.cuh"),
    include_str!("../../kernels/conv_recurrence.cu")
))
.early_launch();

/// Taps at most: a thread has those of its channels in registers.
const MAX_TAPS: usize = 4;
/// Columns of the state and threads of a block, as the kernel has them.
const COLUMNS: usize = 32;
const THREADS: u32 = 128;

pub(super) fn entries() -> Vec<CudaKernelEntry> {
    // The convolution's result is rounded before its parts are taken: q, k and v are columns of it.
    let rounded = "b@cast(g@stateful_conv1d(slice(all), w, kept, lines, ids, starts, ...).0)";
    let operands = format!("reshape(slice({rounded})), reshape(slice(b)), v@reshape(slice(b))");
    let step = "softplus(add(cast(slice(all)), cast(broadcast(offset))?))";
    let slope = "broadcast(mul(exp(cast(rate)?), broadcast(const())))";
    let factors = |step: &str| format!("reshape(s@{step}), reshape(mul(s, {slope}))");
    let bounded = format!("max({step}, broadcast(const()))");
    let mut entries = Vec::new();
    for (of_factors, factors) in
        [("", "weight, decay".to_owned()), ("_steps", factors(step)), ("_bounded_steps", factors(&bounded))]
    {
        let recurrence = format!("r@gated_recurrence({operands}, {factors}, table, lines, starts)");
        let skipped = format!("add(cast({recurrence}.0), mul(cast(v), cast(broadcast(reshape(skip)))?))");
        let gated = format!("swiglu(cast(slice(all)), reshape({skipped})), r.1, g.1");
        for (of_gate, pattern) in [("", format!("{recurrence}, v, g.1")), ("_swiglu", gated)] {
            let name = format!("conv_recurrence{of_factors}{of_gate}");
            let entry = CudaKernelEntry::new(name, &pattern, supports, make).where_it_pays(few_tokens);
            // Rows of many tokens go in chunks: their sums are in another order.
            entries.push(entry.numerics_by_extents());
        }
    }
    entries
}

/// The first columns of the parts that are taken of a value, or the argument that a value is made of.
#[derive(Clone, Copy)]
struct Part {
    argument: Option<usize>,
    first: usize,
}

/// The body of a group.
#[derive(Clone, Copy)]
struct Body<'a>(&'a Function);

impl<'a> Body<'a> {
    fn op<T: Composite>(self) -> Option<(&'a Node, &'a T)> {
        self.0.nodes.iter().find_map(|node| match &node.op {
            Op::Composite(op) => op.downcast::<T>().map(|op| (node, op)),
            _ => None,
        })
    }

    fn prim(self, is: impl Fn(&Prim) -> bool) -> Option<&'a Node> {
        self.0.nodes.iter().find(|node| matches!(&node.op, Op::Prim(prim) if is(prim)))
    }

    /// What `var` is of, by way of casts and views.
    fn part(self, var: Var) -> Option<Part> {
        let node = &self.0.nodes[var.index()];
        match &node.op {
            Op::Arg(i) => Some(Part { argument: Some(*i), first: 0 }),
            Op::Prim(Prim::Slice { axis: 1, start, .. }) => {
                let of = self.part(node.inputs[0])?;
                Some(Part { first: of.first + start.as_const()?, ..of })
            }
            Op::Prim(Prim::Cast(_) | Prim::Reshape(_) | Prim::Broadcast(_)) => self.part(node.inputs[0]),
            Op::Composite(op) if op.downcast::<StatefulConv1d>().is_some() => Some(Part { argument: None, first: 0 }),
            _ => None,
        }
    }

    fn argument(self, var: Var) -> Option<usize> {
        self.part(var)?.argument
    }

    /// The scalar that `var` repeats.
    fn scalar(self, var: Var) -> Option<f64> {
        let node = &self.0.nodes[var.index()];
        match &node.op {
            Op::Prim(Prim::Const(literal)) => literal.values.first().copied(),
            Op::Prim(Prim::Broadcast(_)) => self.scalar(node.inputs[0]),
            _ => None,
        }
    }
}

/// How steps and decays are made of x.
struct Factors {
    /// The first column of x that is a step.
    first: usize,
    offset: usize,
    rate: usize,
    least: f64,
}

/// The gate behind the recurrence.
struct Gate {
    /// The first column of x that is a gate.
    first: usize,
    skip: usize,
}

/// What a group computes, by its arguments.
struct Mixer<'a> {
    conv: &'a StatefulConv1d,
    x: Part,
    taps: usize,
    kept: usize,
    lines: usize,
    starts: usize,
    bias: Option<usize>,
    /// The channels of the convolution that q, k and v begin at.
    operands: [usize; 3],
    /// Steps and log decays, where they are given.
    given: Option<[usize; 2]>,
    factors: Option<Factors>,
    table: usize,
    gate: Option<Gate>,
}

impl<'a> Mixer<'a> {
    fn new(body: &'a Function) -> Option<Self> {
        let body = Body(body);
        let (of_conv, conv) = body.op::<StatefulConv1d>()?;
        let (of_recurrence, _) = body.op::<GatedRecurrence>()?;
        let [x, w, kept, lines, _, starts, bias @ ..] = &of_conv.inputs[..] else { return None };
        let [q, k, v, step, decay, table, ..] = of_recurrence.inputs[..] else { return None };
        let channel = |var| body.part(var).filter(|part| part.argument.is_none()).map(|part| part.first);
        let factors = match body.op::<Softplus>() {
            Some((softplus, _)) => Some(Factors::new(body, softplus)?),
            None => None,
        };
        let gate = match body.op::<Swiglu>() {
            Some((swiglu, _)) => Some(Gate::new(body, swiglu, v)?),
            None => None,
        };
        Some(Self {
            conv,
            x: body.part(*x)?,
            taps: body.argument(*w)?,
            kept: body.argument(*kept)?,
            lines: body.argument(*lines)?,
            starts: body.argument(*starts)?,
            bias: bias.first().and_then(|bias| body.argument(*bias)),
            operands: [channel(q)?, channel(k)?, channel(v)?],
            given: if factors.is_none() { Some([body.argument(step)?, body.argument(decay)?]) } else { None },
            factors,
            table: body.argument(table)?,
            gate,
        })
    }
}

impl Factors {
    fn new(body: Body<'_>, softplus: &Node) -> Option<Self> {
        let sum = &body.0.nodes[softplus.inputs[0].index()].inputs;
        // Steps are columns of a row, and the offset is a row.
        let is_offset = |var: &&Var| body.argument(**var).is_some_and(|i| body.0.args[i].ty.shape.rank() == 1);
        let offset = sum.iter().find(is_offset)?;
        let dt = sum.iter().find(|var| *var != offset)?;
        let exp = body.prim(|prim| matches!(prim, Prim::Unary(Unary::Exp)))?;
        let of_exp = |node: &&Node| {
            let is_exp = |var: &Var| std::ptr::eq(&body.0.nodes[var.index()], exp);
            node.inputs.iter().any(is_exp)
        };
        let slope = body.0.nodes.iter().find(of_exp)?;
        if slope.inputs.iter().find_map(|var| body.scalar(*var)) != Some(-1.0) {
            return None;
        }
        // A step is positive.
        let bound = body.prim(|prim| matches!(prim, Prim::Binary(Binary::Max)));
        let least = bound.map(|max| max.inputs.iter().find_map(|var| body.scalar(*var)));
        Some(Self {
            first: body.part(*dt)?.first,
            offset: body.argument(*offset)?,
            rate: body.argument(exp.inputs[0])?,
            least: least.unwrap_or(Some(0.0))?,
        })
    }
}

impl Gate {
    fn new(body: Body<'_>, swiglu: &Node, v: Var) -> Option<Self> {
        let casts_v = |var: &Var| matches!(&body.0.nodes[var.index()], Node { op: Op::Prim(Prim::Cast(_)), inputs, .. } if inputs[..] == [v]);
        let product = body.0.nodes.iter().find(|node| node.inputs.len() == 2 && node.inputs.iter().any(casts_v))?;
        let skip = product.inputs.iter().find_map(|var| body.argument(*var))?;
        Some(Self { first: body.part(swiglu.inputs[0])?.first, skip })
    }
}

/// Operands in bf16 that are all channels of the convolution between them, and few taps.
fn supports(body: &Function) -> bool {
    let Some(mixer) = Mixer::new(body) else { return false };
    let Some((of_recurrence, recurrence)) = Body(body).op::<GatedRecurrence>() else { return false };
    let extents = |var: Var| body.ty(var).shape.0[1..].iter().map(Dim::as_const).collect::<Option<Vec<_>>>();
    let ty = |argument: usize| &body.args[argument].ty;
    let [Some(of_q), Some(of_v)] = [0, 2].map(|i| extents(of_recurrence.inputs[i])) else { return false };
    let ([groups, key], [heads, value]) = (&of_q[..], &of_v[..]) else { return false };
    let [Some(channels), Some(taps)] = [0, 1].map(|axis| ty(mixer.taps).shape.0[axis].as_const()) else { return false };
    let [q, k, v] = mixer.operands;
    let mut parts = [(q, groups * key), (k, groups * key), (v, heads * value)];
    parts.sort_unstable();
    let end = parts.into_iter().try_fold(0, |end, (first, width)| (first == end).then_some(end + width));
    let x = mixer.x.argument.map(ty);
    // Elements of f32 where the graph computes in f32.
    let floats = |i: usize| matches!(ty(i).dtype, DType::F32 | DType::BF16 | DType::F16);
    let further = [mixer.factors.as_ref().map(|f| f.offset), mixer.gate.as_ref().map(|g| g.skip), mixer.bias];
    !recurrence.delta
        && body.ty(of_recurrence.inputs[4]).shape.last().is_one()
        && end == Some(channels)
        && (2..=MAX_TAPS).contains(&taps)
        && takes_gated(*key, *value)
        && x.is_some_and(|x| x.dtype == DType::BF16 && x.shape.rank() == 2 && x.shape.last().as_const().is_some())
        && ty(mixer.kept).dtype == DType::BF16
        && body.ty(of_recurrence.inputs[2]).dtype == DType::BF16
        && further.into_iter().flatten().chain([mixer.taps]).all(floats)
        && mixer.gate.as_ref().is_none_or(|_| body.ty(body.outputs[0].var).dtype == DType::F32)
        && body.args.iter().all(|arg| arg.ty.format.is_none())
}

/// Blocks that run at once. Where there are more, what each block convolves again takes longer than a launch: of Mamba-2 2.7B on an H200 the
/// group takes 6.3 us for one row instead of 11, but 27 for 8 instead of 22 and 188 for 64 instead of 111.
const AT_ONCE: usize = 4 * PROCESSORS;

/// Are there few rows, none so long that it goes in chunks, and a counter for each row and group?
fn few_tokens(spec: &CudaKernelSpec<'_>) -> bool {
    let Some(extents) = Extents::new(spec) else { return false };
    extents.rows > 0
        && extents.rows * extents.heads * extents.value.div_ceil(COLUMNS) <= AT_ONCE
        && extents.tokens + 1 < extents.rows + LEAST_OF_CHUNKS
        && extents.rows * extents.groups <= ZERO_BYTES / size_of::<u32>()
}

struct Extents {
    tokens: usize,
    rows: usize,
    groups: usize,
    heads: usize,
    key: usize,
    value: usize,
}

impl Extents {
    fn new(spec: &CudaKernelSpec<'_>) -> Option<Self> {
        let mixer = Mixer::new(spec.body)?;
        let (of_recurrence, _) = Body(spec.body).op::<GatedRecurrence>()?;
        let extent = |input: usize, axis: usize| spec.body.ty(of_recurrence.inputs[input]).shape.0[axis].as_const();
        Some(Self {
            tokens: spec.inputs[mixer.x.argument?].shape[0],
            rows: spec.inputs[mixer.lines].shape[0],
            groups: extent(0, 1)?,
            key: extent(0, 2)?,
            heads: extent(2, 1)?,
            value: extent(2, 2)?,
        })
    }
}

fn make(spec: &CudaKernelSpec<'_>) -> Result<CudaKernel, String> {
    let of_group = || "no convolution and recurrence in the group".to_owned();
    let mixer = Mixer::new(spec.body).ok_or_else(of_group)?;
    let Extents { tokens, rows, groups, heads, key, value } = Extents::new(spec).ok_or_else(of_group)?;
    let x = mixer.x.argument.ok_or_else(of_group)?;
    let (w, all) = (&spec.inputs[mixer.taps], &spec.inputs[x]);
    let factors = mixer.factors.as_ref();
    // Where there is no bias or skip, any address will do.
    let [step, rate] = factors.map(|f| [f.offset, f.rate]).or(mixer.given).ok_or_else(of_group)?;
    let (bias, skip) = (mixer.bias.unwrap_or(mixer.taps), mixer.gate.as_ref().map_or(mixer.taps, |gate| gate.skip));
    let type_of = |i: usize| name(spec.inputs[i].dtype);
    let [taps_text, key_text] = [w.shape[1], key].map(|n| n.to_string());
    let defines = [
        ("D", name(all.dtype)),
        ("W", name(w.dtype)),
        ("TAPS", &*taps_text),
        ("BIAS", flag(mixer.bias.is_some())),
        ("BIAS_TYPE", type_of(bias)),
        ("SILU", flag(mixer.conv.silu)),
        ("FACTORS", flag(factors.is_some())),
        ("STEP_TYPE", type_of(step)),
        ("RATE_TYPE", type_of(rate)),
        ("GATE", flag(mixer.gate.is_some())),
        ("SKIP_TYPE", type_of(skip)),
        ("KEY", &*key_text),
        ("LINES", "1"),
    ];
    // Behind a gate nothing wants what is convolved.
    let (convolved, kept_after) = if mixer.gate.is_some() { (0, 2) } else { (2, 3) };
    let [q, k, v] = mixer.operands;
    let extents = [
        tokens,
        rows,
        groups,
        heads,
        value,
        spec.inputs[mixer.table].shape[0],
        spec.inputs[mixer.kept].shape[0],
        w.shape[0],
        all.shape[1],
        mixer.x.first,
        mixer.gate.as_ref().map_or(0, |gate| gate.first),
        factors.map_or(0, |factors| factors.first),
        v,
        q,
        k,
    ];
    let ahead = [mixer.taps, bias, mixer.kept, mixer.lines, mixer.starts, mixer.table];
    let args = [x, mixer.taps, bias, mixer.kept, mixer.lines, mixer.starts, mixer.table, step, rate, skip].map(input);
    let mut args: Vec<LaunchArg> = args.into_iter().chain([0, convolved, kept_after, 1].map(output)).collect();
    args.push(LaunchArg::Pointer(OperandSlot::Zeros, 0));
    args.push(LaunchArg::Float(factors.map_or(0.0, |factors| factors.least as f32)));
    args.push(numbers(&extents));
    let blocks = rows * heads * value.div_ceil(COLUMNS) + 1;
    let source = CudaSource::new("conv_recurrence", &defines, &CONV_RECURRENCE);
    Ok(grid(source, [blocks, 1, 1], THREADS, args)?.prefetching(ahead))
}
