//! The rule of tolerance, the same for every op, kernel, backend and dtype: a result is right when its error against
//! the f64 meaning is at most twice that of a plain implementation in the same precision, plus one rounding.
//!
//! The error is taken row by row (along the innermost axis of an extent that is not 1) in the Euclidean norm, so that a wrong row does not hide
//! behind the others and an element near zero is not asked for more digits than its row has. For a row of the exact
//! result `e` and of the one judged `g`:
//!
//! ```text
//! one rounding = unit roundoff * | max(|e|, smallest normal) |
//! |g - e| <= 2 * max(plain, usual) + one rounding
//! ```
//!
//! A plain implementation can be exact on a row by luck, and luck must not bind a kernel that sums in another order.
//! So `plain` is the largest error of a few plain implementations that differ in the order of their sums, and `usual`
//! is the root-mean-square of `plain` over all rows, absolute or relative to the row, whichever allows less. Both kinds
//! are needed: a row that cancels to zero has a relative error without bound, and a row of large numbers an absolute
//! one, and neither may loosen the rule for the others.
//!
//! Infinities and NaNs must be where the exact result, rounded to the dtype, has them, or where the plain
//! implementation has them: an intermediate that overflows may overflow, and need not. Integers and booleans must be
//! equal to the exact or the plain result's.
//!
//! Values in formats are compared after decoding. What quantises ([`Check::Codes`]) may give an element another code than
//! the exact one where the element lies between two codes: the value may be farther from the element than the exact one by a
//! share of 2^-12.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;

use crate::dim::Bindings;
use crate::dtype::DType;
use crate::eval::{Precision, evaluate, evaluate_function};
use crate::graph::{Arg, Graph, Op};
use crate::ops;
use crate::prim::samples::prim_registry;
use crate::registry::{OpEntry, OpRegistry};
use crate::sample::{Check, Rng, Sample};
use crate::tensor::{Data, Tensor, Value};

/// Share of a dequantised value by which the rounding of its scale, and of the product with it, may move it.
const SCALE_ROUNDING: f64 = 1.0 / (1u64 << 21) as f64;

/// Share of its distance to the nearest value by which an element may be farther from the one it is given: codes may differ
/// by one where an element lies between two but for the rounding of f32.
const TIE: f64 = 1.0 / (1u64 << 12) as f64;

/// Plain implementations whose largest error counts.
const ORDERS: u32 = 4;

/// The same where all is in f32, so that no rounding of results hides how lucky some of them are.
const ORDERS_OF_F32: u32 = 8;

/// Judges `got`, a backend's outputs for `sample` in the order of [`Sample::graph`]'s outputs. Gives the largest share
/// of the allowed error that any row uses, at most 1; 0 where equality or a property was required.
///
/// # Errors
/// Says for which op, input types, output and row the result is wrong, what was got, what is exact and what is
/// allowed.
pub fn judge(sample: &Sample, got: &[Tensor]) -> Result<f64, String> {
    Reference::of(sample)?.judge(got)
}

/// What results for a sample are judged by. It takes long to evaluate and serves the results of any number of backends.
pub struct Reference<'a> {
    sample: &'a Sample,
    /// Outputs of plain implementations that differ in the order of their sums, at least of one.
    plains: Vec<Vec<Tensor>>,
    /// Exact outputs, where they are what counts.
    exact: Vec<Tensor>,
}

impl<'a> Reference<'a> {
    /// Evaluates `sample`.
    ///
    /// # Errors
    /// When the sample is not valid for its op.
    pub fn of(sample: &'a Sample) -> Result<Self, String> {
        let outputs = |precision| expected(sample, precision).map_err(|why| format!("{}: {why}", described(sample)));
        let is_narrow = |value: &Value| value.ty().dtype.is_float() && value.ty().dtype != DType::F32;
        let orders = match sample.check {
            Check::Norm if sample.inputs.iter().any(is_narrow) => ORDERS,
            Check::Norm => ORDERS_OF_F32,
            _ => 1,
        };
        let reordered = (1..orders).map(Precision::Reordered);
        let plains = std::iter::once(Precision::Rounded).chain(reordered).map(outputs).collect::<Result<_, _>>()?;
        let exact = match sample.check {
            Check::Norm | Check::Codes => outputs(Precision::Exact)?,
            Check::Exact | Check::Property(_) => Vec::new(),
        };
        Ok(Self { sample, plains, exact })
    }

    /// As [`judge`].
    ///
    /// # Errors
    /// As [`judge`].
    pub fn judge(&self, got: &[Tensor]) -> Result<f64, String> {
        self.judged(got).map_err(|why| format!("{}: {why}", described(self.sample)))
    }

    fn judged(&self, got: &[Tensor]) -> Result<f64, String> {
        let plain = &self.plains[0];
        check_types(got, plain)?;
        match self.sample.check {
            Check::Property(holds) => holds(&self.sample.inputs, got).map(|()| 0.0),
            Check::Exact => {
                for (i, (g, p)) in got.iter().zip(plain).enumerate() {
                    equal(g, &[p]).map_err(|why| format!("output {i}{why}"))?;
                }
                Ok(0.0)
            }
            Check::Codes => {
                let first = self.sample.inputs.first();
                let Some(Value::Plain(x)) = first else { return Err("x is not a plain tensor".into()) };
                codes(&got[0], &self.exact[0], x).map(|()| 0.0)
            }
            Check::Norm => within(got, &self.plains, &self.exact),
        }
    }
}

/// The outputs of `sample` by evaluation, in the order of [`Sample::graph`]'s outputs.
///
/// # Errors
/// When the sample is not valid for its op.
pub fn expected(sample: &Sample, precision: Precision) -> Result<Vec<Tensor>, String> {
    let graph = sample.graph().map_err(|e| e.to_string())?;
    // Arguments are in the order of the inputs.
    let args = sample.inputs.clone();
    let outputs = evaluate_function(&graph.functions, graph.main, args, &Bindings::new(), precision);
    outputs.map_err(|e| e.to_string())?.into_iter().map(plain).collect()
}

/// The variable that names the one op that the suite is run for.
pub const ONLY: &str = "RIDGE_CONFORMANCE_OP";

/// Is the suite run for the op `name`: for all ops, or for it alone by [`ONLY`]?
pub fn is_selected(name: &str) -> bool {
    std::env::var(ONLY).map_or(true, |only| only == name)
}

/// Every sample of every built-in composite op and primitive that is [selected](is_selected), with the name of its
/// registry entry; see [`samples_of`]. Collectives are not among them, since they have no meaning on one rank.
///
/// # Panics
/// When [`ONLY`] names no op.
pub fn all_samples(dtype: DType, seed: u64) -> Vec<(Arc<str>, Sample)> {
    let mut samples = samples_of(&ops::registry(), dtype, seed);
    samples.extend(samples_of(&prim_registry(), dtype, seed));
    let known: BTreeSet<Arc<str>> = samples.iter().map(|(name, _)| Arc::clone(name)).collect();
    samples.retain(|(name, _)| is_selected(name));
    assert!(!samples.is_empty(), "{ONLY} names no op; there are {}", Vec::from_iter(known).join(", "));
    samples
}

/// Every sample of every op of `registry`, with the name of its entry. Float tensors have `dtype`; an entry's samples
/// depend on its name, `dtype` and `seed` only.
pub fn samples_of(registry: &OpRegistry, dtype: DType, seed: u64) -> Vec<(Arc<str>, Sample)> {
    let of_entry = |entry: &OpEntry| {
        let name = Arc::clone(&entry.name);
        // FNV-1a, so that a new entry leaves the samples of the others as they are.
        let salt = name
            .bytes()
            .chain(dtype.name().bytes())
            .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let samples = entry.samples(&mut Rng::new(seed ^ salt), dtype);
        samples.into_iter().map(move |sample| (Arc::clone(&name), sample))
    };
    registry.iter().flat_map(of_entry).collect()
}

/// Judges `got`, a backend's outputs for `graph` in the order of its main function's, by the rule of tolerance. Gives
/// the largest share of the allowed error that any row uses.
///
/// # Errors
/// Says which output and row is wrong, what was got, what is exact and what is allowed; or why the graph has no value.
pub fn judge_graph(
    graph: &Graph,
    args: &dyn Fn(&Arg) -> Option<Value>,
    bindings: &Bindings,
    got: &[Tensor],
) -> Result<f64, String> {
    let outputs = |precision| -> Result<Vec<Tensor>, String> {
        let outputs = evaluate(graph, args, bindings, precision).map_err(|e| e.to_string())?;
        outputs.into_iter().map(|(_, value)| plain(value)).collect()
    };
    let mut plains = vec![outputs(Precision::Rounded)?];
    check_types(got, &plains[0])?;
    for order in 1..ORDERS {
        plains.push(outputs(Precision::Reordered(order))?);
    }
    within(got, &plains, &outputs(Precision::Exact)?)
}

/// Holds every output to the rule of tolerance, given those of plain implementations and the exact ones.
fn within(got: &[Tensor], plains: &[Vec<Tensor>], exact: &[Tensor]) -> Result<f64, String> {
    let mut worst = 0f64;
    for (i, (g, e)) in got.iter().zip(exact).enumerate() {
        let plains: Vec<&Tensor> = plains.iter().map(|outputs| &outputs[i]).collect();
        let used =
            if g.dtype.is_float() { near(g, &plains, e) } else { equal(g, &[&[e], &*plains].concat()).map(|()| 0.0) };
        worst = worst.max(used.map_err(|why| format!("output {i}{why}"))?);
    }
    Ok(worst)
}

/// Requires as many outputs as are wanted, of their types.
fn check_types(got: &[Tensor], wanted: &[Tensor]) -> Result<(), String> {
    if got.len() != wanted.len() {
        return Err(format!("{} outputs, must be {}", got.len(), wanted.len()));
    }
    for (i, (g, w)) in got.iter().zip(wanted).enumerate() {
        if g.dtype != w.dtype || g.shape != w.shape {
            return Err(format!("output {i} is {}, must be {}", g.ty(), w.ty()));
        }
    }
    Ok(())
}

fn plain(value: Value) -> Result<Tensor, String> {
    match value {
        Value::Plain(tensor) => Ok(tensor),
        Value::Stored { format, .. } => Err(format!("an output is stored as {}", format.name())),
    }
}

/// Holds dequantised values `got` to the exact ones of `x`: equal but for the rounding of their scale, or, where `x` lies
/// between two codes, the value of the other code.
fn codes(got: &Tensor, exact: &Tensor, x: &Tensor) -> Result<(), String> {
    let (row, _) = rows(got);
    for (i, ((g, e), x)) in got.floats().iter().zip(exact.floats()).zip(x.floats()).enumerate() {
        // Beside the scale's rounding, that of the smallest numbers.
        let same = g == e
            || g.is_nan() && e.is_nan()
            || (g - e).abs() <= e.abs() * SCALE_ROUNDING + f64::from(f32::MIN_POSITIVE);
        let as_near = (g - x).abs() <= (e - x).abs() * (1.0 + TIE);
        if !same && !as_near {
            return Err(format!("output 0, row {}, element {}: got {g} of {x}, exact {e}", i / row, i % row));
        }
    }
    Ok(())
}

/// Requires each element to equal that of one of `wanted`, NaN being equal to itself.
fn equal(got: &Tensor, wanted: &[&Tensor]) -> Result<(), String> {
    let (row, _) = rows(got);
    let same = |i: usize, w: &Tensor| match (&got.data, &w.data) {
        (Data::Float(g), Data::Float(w)) => g[i] == w[i] || (g[i].is_nan() && w[i].is_nan()),
        (Data::Int(g), Data::Int(w)) => g[i] == w[i],
        _ => false,
    };
    match (0..got.len()).find(|&i| !wanted.iter().any(|w| same(i, w))) {
        None => Ok(()),
        Some(i) => Err(format!(
            ", row {}, element {}: got {}, must be {}",
            i / row,
            i % row,
            element(got, i),
            element(wanted[0], i)
        )),
    }
}

/// Holds `got` to the rule of tolerance, row by row, given the `exact` result, unrounded, and those of plain
/// implementations in the same precision. Gives the largest share of the allowed error that any row uses.
///
/// # Errors
/// Says which row is wrong, what was got, what is exact and what is allowed.
///
/// # Panics
/// When `plains` is empty, or a tensor is not float or has another number of elements.
pub fn near(got: &Tensor, plains: &[&Tensor], exact: &Tensor) -> Result<f64, String> {
    let dtype = got.dtype;
    let (row, count) = rows(got);
    let (g, e) = (got.floats(), exact.floats());
    let of_plains: Vec<&[f64]> = plains.iter().map(|p| p.floats()).collect();
    let p = of_plains[0];
    for i in 0..g.len() {
        let kind = FloatKind::of(g[i]);
        if kind != FloatKind::of(dtype.round(e[i])) && of_plains.iter().all(|p| kind != FloatKind::of(p[i])) {
            return Err(format!(
                ", row {}, element {}: got {}, exact {}, plain {}",
                i / row,
                i % row,
                g[i],
                e[i],
                p[i]
            ));
        }
    }
    let of_row = |r: usize, term: &dyn Fn(usize) -> f64| {
        let squares = (r * row..(r + 1) * row).map(term).filter(|x| x.is_finite()).map(|x| x * x);
        squares.sum::<f64>().sqrt()
    };
    let scales: Vec<f64> = (0..count).map(|r| of_row(r, &|i| e[i].abs().max(dtype.smallest_normal()))).collect();
    let plain_error = |r| of_plains.iter().map(|p| of_row(r, &|i| p[i] - e[i])).fold(0.0, f64::max);
    let plains: Vec<f64> = (0..count).map(plain_error).collect();
    let mean_square = |of: &dyn Fn(usize) -> f64| {
        let squares = (0..count).map(of).filter(|x| x.is_finite()).map(|x| x * x);
        (squares.sum::<f64>() / count.max(1) as f64).sqrt()
    };
    let absolute = mean_square(&|r| plains[r]);
    let relative = mean_square(&|r| plains[r] / scales[r]);
    let mut worst = 0f64;
    for r in 0..count {
        let usual = absolute.min(relative * scales[r]);
        let allowed = 2.0 * plains[r].max(usual) + dtype.unit_roundoff() * scales[r];
        let error = of_row(r, &|i| g[i] - e[i]);
        if error > allowed {
            let difference = |i: &usize| (g[*i] - e[*i]).abs();
            let finite = (r * row..(r + 1) * row).filter(|i| difference(i).is_finite());
            let at = finite.max_by(|a, b| difference(a).total_cmp(&difference(b))).unwrap_or(r * row);
            return Err(format!(
                ", row {r} of {count}: error {error:.3e}, allowed {allowed:.3e} (plain implementation {:.3e}); most at \
                 element {}: got {}, exact {}, plain {}",
                plains[r],
                at - r * row,
                g[at],
                e[at],
                p[at]
            ));
        }
        if error > 0.0 {
            worst = worst.max(error / allowed);
        }
    }
    Ok(worst)
}

/// Elements of a row, and the number of rows. A reduction keeps its axis with extent 1, which is no row of its own.
fn rows(tensor: &Tensor) -> (usize, usize) {
    let row = tensor.shape.iter().rev().copied().find(|extent| *extent != 1).unwrap_or(1);
    (row, tensor.len().checked_div(row).unwrap_or(0))
}

#[derive(PartialEq)]
enum FloatKind {
    Finite,
    Nan,
    Infinite,
    MinusInfinite,
}

impl FloatKind {
    fn of(x: f64) -> Self {
        match x {
            _ if x.is_nan() => Self::Nan,
            _ if x.is_finite() => Self::Finite,
            _ if x > 0.0 => Self::Infinite,
            _ => Self::MinusInfinite,
        }
    }
}

fn element(tensor: &Tensor, i: usize) -> String {
    match &tensor.data {
        Data::Float(v) => v[i].to_string(),
        Data::Int(v) => v[i].to_string(),
    }
}

/// The op with its attributes, and the types of its inputs.
fn described(sample: &Sample) -> String {
    let mut text = match &sample.op {
        Op::Composite(op) => format!("{op:?}"),
        Op::Prim(prim) => match prim.attrs() {
            attrs if attrs.is_empty() => prim.name().to_owned(),
            attrs => format!("{} {{{attrs}}}", prim.name()),
        },
        other @ (Op::Arg(_) | Op::Call(_) | Op::Group(_)) => format!("{other:?}"),
    };
    let types: Vec<String> = sample.types().iter().map(ToString::to_string).collect();
    let _ = write!(text, "({})", types.join(", "));
    text
}
