//! The primitives: the closed set of ops whose meaning is a plain loop. Everything else decomposes into these.
//!
//! Read this file for what exists, `prim/infer.rs` for types, `prim/cost.rs` for costs, `eval/prim.rs` for meaning,
//! `grad/prim.rs` for gradients and `shard/prim.rs` for placements. A new primitive is a rare event that touches each of
//! them; a new op is usually a composite in `ops/`.

mod cost;
mod infer;
mod kinds;
pub(crate) mod samples;

use std::sync::Arc;

use crate::dim::Dim;
use crate::dtype::DType;
use crate::format::FormatRef;
use crate::shape::Shape;
use crate::work::Work;

pub use kinds::{Binary, CollectiveKind, Combine, Compare, Fetch, Literal, Memory, Unary};

/// A primitive with its static attributes.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // fields: the variants' descriptions name them
pub enum Prim {
    /// A constant.
    Const(Literal),
    /// `shape` filled with each element's index along `axis`.
    Iota { shape: Shape, axis: usize, dtype: DType },
    /// Elementwise function of one tensor.
    Unary(Unary),
    /// Elementwise function of two tensors of one type.
    Binary(Binary),
    /// Elementwise comparison; gives `Bool`.
    Compare(Compare),
    /// `(cond, a, b)`: `a` where `cond` holds, else `b`.
    Select,
    /// Conversion to another element type. Floats go to integers towards zero, saturating, NaN to 0; integers to
    /// integers modulo the size; anything but zero to `true`.
    Cast(DType),
    /// Combines along `axis`, which is kept with extent 1.
    Reduce { op: Combine, axis: usize },
    /// Index of the largest element along `axis` (the first of equals, NaN above all numbers, 0 of none), as I32; the
    /// axis is kept with extent 1.
    ArgMax { axis: usize },
    /// Inclusive prefix combination along `axis`.
    Scan { op: Combine, axis: usize },
    /// `[batch.., m, k] x [batch.., k, n] -> [batch.., m, n]` of dtype `out`; a transposed operand has its last two
    /// axes swapped. Products are summed in f32 at least.
    MatMul { trans_a: bool, trans_b: bool, out: DType },
    /// `(data, indices)`: rows of `data` along `axis`, which the axes of `indices` replace: a vector of indices
    /// keeps the rank, a matrix adds an axis. An index out of range gives zeros.
    Gather { axis: usize },
    /// `(data, indices, updates)`: `data` with rows along `axis` replaced, or added to; `updates` has the type of
    /// what a gather by `indices` gives. An index out of range is dropped; of equal indices the last replaces.
    Scatter { axis: usize, add: bool },
    /// `len` elements along `axis` from `start`.
    Slice { axis: usize, start: Dim, len: Dim },
    /// Joins along `axis`.
    Concat { axis: usize },
    /// `before` and `after` elements of `value` around `axis`.
    Pad { axis: usize, before: Dim, after: Dim, value: f64 },
    /// The same elements in row-major order under another shape.
    Reshape(Shape),
    /// Axis `i` of the output is axis `perm[i]` of the input.
    Transpose(Vec<usize>),
    /// Repeats extents of 1, and missing leading axes, up to `shape`.
    Broadcast(Shape),
    /// `(seed, sequence, position, index)`, all I64 of one shape: uniform f32 in `[0, 1)` from Philox4x32-10 with
    /// key `seed` and counter `(index, position, sequence, stream)`.
    Random { stream: u32 },
    /// `-> (values, indices)`: the first `keep` elements along `axis` in sorted order, ties by index, NaN last.
    Sort { axis: usize, descending: bool, keep: Dim },
    /// `(q, k, v, log_decay, state, query_start)`, and `(erase, write)` behind them where `low_rank`, `-> (y, state)`: for
    /// each head of each sequence, a recurrence over the step's tokens whose state is a matrix,
    ///
    /// ```text
    /// S_t = diag(exp(log_decay_t)) S_{t-1} + write_t (erase_t^T S_{t-1}) + k_t v_t^T
    /// y_t = S_t^T q_t
    /// ```
    ///
    /// F32 throughout: `q` and `k` are `[tokens, groups, key]`, each group serving neighbouring heads alike; `v` is `[tokens,
    /// heads, value]`; `log_decay` `[tokens, heads, key]`, or `[tokens, heads, 1]` where all keys of a head decay alike; `erase` and
    /// `write` `[tokens, heads, key]`; `state` `[sequences, heads, key, value]`, before the step and after it. `query_start`
    /// is i32 `[sequences + 1]`, where the tokens of each sequence begin; tokens of no sequence have a `y` of 0.
    ///
    /// With the decay of a head this is RetNet and the SSD of Mamba-2, with that of a channel GLA and (heads of one value)
    /// Mamba-1; with `erase = alpha k` and `write = -beta k` it is the gated delta rule, and RWKV-7 with its own (Yang et al. 2024,
    /// "Gated Linear Attention Transformers", table 1; Dao and Gu 2024, "Transformers are SSMs"; Yang et al. 2025, "Gated
    /// Delta Networks", section 3; Peng et al. 2025, "RWKV-7 Goose", section 3).
    LinearRecurrence { low_rank: bool },
    /// `(q, k, v, log_decay, state, query_start, [erase, write,] dy, dstate) -> (dq, dk, dv, dlog_decay, dstate_before[, derase,
    /// dwrite])`: the cotangents of the float inputs of [`Prim::LinearRecurrence`], in its order, from those of its outputs. Each has
    /// the type of its input but `dq` and `dk`, which are `[tokens, heads, key]`: the groups' are their sums over heads. With `G`
    /// the cotangent of the state, backwards from `dstate`, and `S` as above:
    ///
    /// ```text
    /// G_t = q_t dy_t^T + diag(exp(log_decay_{t+1})) G_{t+1} + erase_{t+1} (write_{t+1}^T G_{t+1})
    /// dq_t = S_t dy_t, dk_t = G_t v_t, dv_t = G_t^T k_t
    /// dlog_decay_t = exp(log_decay_t) * rows of (G_t * S_{t-1}), summed, and over keys where all decay alike
    /// derase_t = S_{t-1} (G_t^T write_t), dwrite_t = G_t (S_{t-1}^T erase_t)
    /// ```
    LinearRecurrenceGradient { low_rank: bool },
    /// The tensor that a state holds now.
    StateRead,
    /// `(state, tensor)`: the next version of the state.
    StateWrite,
    /// Component `index` of a value stored in a format.
    Component(usize),
    /// The value of `dtype` and `shape` that these components, in order, store in `format`: the inverse of `Component`.
    Assemble { format: FormatRef, dtype: DType, shape: Shape },
    /// The same tensor in another memory. What is in memory of the host while other things are computed takes none of the
    /// device's.
    Move(Memory),
    /// A parameter that is kept in memory of the host, in memory of the device, ahead of the call that reads it. The same value, in
    /// whatever format it is stored. Where [`Fetch::is_in_place`] holds, a plan copies nothing and gives the reader the
    /// parameter itself.
    Fetch(Fetch),
    /// Communication over mesh axis `mesh` of `ranks` ranks.
    Collective { kind: CollectiveKind, mesh: Arc<str>, ranks: usize },
}

impl Prim {
    /// Name in the text form and in errors.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Const(_) => "const",
            Self::Iota { .. } => "iota",
            Self::Unary(op) => match op {
                Unary::Neg => "neg",
                Unary::Abs => "abs",
                Unary::Exp => "exp",
                Unary::Log => "log",
                Unary::Sqrt => "sqrt",
                Unary::Rsqrt => "rsqrt",
                Unary::Sin => "sin",
                Unary::Cos => "cos",
                Unary::Tanh => "tanh",
                Unary::Erf => "erf",
                Unary::Sigmoid => "sigmoid",
                Unary::Floor => "floor",
                Unary::Not => "not",
            },
            Self::Binary(op) => match op {
                Binary::Add => "add",
                Binary::Sub => "sub",
                Binary::Mul => "mul",
                Binary::Div => "div",
                Binary::Rem => "rem",
                Binary::Pow => "pow",
                Binary::Max => "max",
                Binary::Min => "min",
                Binary::And => "and",
                Binary::Or => "or",
            },
            Self::Compare(op) => match op {
                Compare::Eq => "eq",
                Compare::Ne => "ne",
                Compare::Lt => "lt",
                Compare::Le => "le",
                Compare::Gt => "gt",
                Compare::Ge => "ge",
            },
            Self::Select => "select",
            Self::Cast(_) => "cast",
            Self::Reduce { op, .. } => match op {
                Combine::Sum => "reduce_sum",
                Combine::Max => "reduce_max",
                Combine::Min => "reduce_min",
            },
            Self::ArgMax { .. } => "argmax",
            Self::Scan { op, .. } => match op {
                Combine::Sum => "scan_sum",
                Combine::Max => "scan_max",
                Combine::Min => "scan_min",
            },
            Self::MatMul { .. } => "matmul",
            Self::Gather { .. } => "gather",
            Self::Scatter { add: false, .. } => "scatter",
            Self::Scatter { add: true, .. } => "scatter_add",
            Self::Slice { .. } => "slice",
            Self::Concat { .. } => "concat",
            Self::Pad { .. } => "pad",
            Self::Reshape(_) => "reshape",
            Self::Transpose(_) => "transpose",
            Self::Broadcast(_) => "broadcast",
            Self::Random { .. } => "random",
            Self::Sort { .. } => "sort",
            Self::LinearRecurrence { .. } => "linear_recurrence",
            Self::LinearRecurrenceGradient { .. } => "linear_recurrence_gradient",
            Self::StateRead => "state_read",
            Self::StateWrite => "state_write",
            Self::Component(_) => "component",
            Self::Assemble { .. } => "assemble",
            Self::Move(Memory::Host) => "to_host",
            Self::Move(Memory::Device) => "to_device",
            Self::Fetch(_) => "fetch",
            Self::Collective { kind, .. } => kind.name(),
        }
    }

    /// Static attributes as the text form shows them; empty where the output type says it all.
    pub fn attrs(&self) -> String {
        match self {
            Self::Const(literal) => format!("{literal:?}"),
            Self::Iota { axis, .. }
            | Self::Reduce { axis, .. }
            | Self::ArgMax { axis }
            | Self::Scan { axis, .. }
            | Self::Gather { axis }
            | Self::Scatter { axis, .. }
            | Self::Concat { axis } => format!("axis={axis}"),
            Self::MatMul { trans_a, trans_b, .. } => match (trans_a, trans_b) {
                (false, false) => String::new(),
                (true, false) => "trans_a".into(),
                (false, true) => "trans_b".into(),
                (true, true) => "trans_a, trans_b".into(),
            },
            Self::Slice { axis, start, len } => format!("axis={axis}, start={start}, len={len}"),
            Self::Pad { axis, before, after, value } => {
                format!("axis={axis}, before={before}, after={after}, value={value}")
            }
            Self::Transpose(perm) => format!("{perm:?}"),
            Self::Random { stream } => format!("stream={stream}"),
            Self::Sort { axis, descending, keep } => {
                format!("axis={axis}, {}, keep={keep}", if *descending { "descending" } else { "ascending" })
            }
            Self::LinearRecurrence { low_rank } | Self::LinearRecurrenceGradient { low_rank } => {
                if *low_rank {
                    "low_rank".into()
                } else {
                    String::new()
                }
            }
            Self::Component(index) => format!("{index}"),
            Self::Fetch(Fetch { rows, in_place, .. }) if *in_place > 0 => format!("unless {rows} <= {in_place}"),
            Self::Collective { mesh, ranks, kind } => {
                let said = match kind {
                    CollectiveKind::AllToAll { split, concat } => format!(", split={split}, concat={concat}"),
                    CollectiveKind::Broadcast(rank) | CollectiveKind::Reduce(rank) => format!(", rank={rank}"),
                    CollectiveKind::Send { from, to } => format!(", from={from}, to={to}"),
                    _ => String::new(),
                };
                format!("{mesh}={ranks}{said}")
            }
            Self::Unary(_)
            | Self::Binary(_)
            | Self::Compare(_)
            | Self::Select
            | Self::Cast(_)
            | Self::Reshape(_)
            | Self::Broadcast(_)
            | Self::StateRead
            | Self::StateWrite
            | Self::Move(_)
            | Self::Fetch(_)
            | Self::Assemble { .. } => String::new(),
        }
    }

    /// What kind of work it is, for those who plan.
    pub fn work(&self) -> Work {
        match self {
            Self::Reshape(_)
            | Self::Cast(_)
            | Self::Slice { .. }
            | Self::Broadcast(_)
            | Self::Transpose(_)
            | Self::Const(_)
            | Self::Iota { .. } => Work::View,
            _ => Work::Pass,
        }
    }

    /// Does each output element depend only on the inputs' elements at its own index?
    pub fn is_elementwise(&self) -> bool {
        matches!(
            self,
            Self::Unary(_) | Self::Binary(_) | Self::Compare(_) | Self::Select | Self::Cast(_) | Self::Random { .. }
        )
    }
}
