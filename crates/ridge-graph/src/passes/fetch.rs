//! Weights in memory of the host: which may be kept there, in which order they leave the device, and the copies of those that a
//! step reads more than once (Sheng et al. 2023, "FlexGen", section 4; Eliseev and Mazur 2023, "Fast Inference of
//! Mixture-of-Experts Language Models with Offloading", section 3).
//!
//! The link between host and device is some sixty times slower than the memory of a GPU, so what counts is how many bytes cross
//! it in a step. A stack of experts is read in place by steps of few tokens, which reach few of its experts; for more tokens all of
//! it is copied, and always where its format is one that backends decode as a whole. A matrix crosses the link whole in every step,
//! and is always copied, so that it crosses while the call before its reader is computed. A plain embedding is read in place, a
//! row for each token; one in a storage format, which is decoded as a whole, stays on the device.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::order::Draft;
use crate::dim::{Bindings, Dim, Sym};
use crate::error::Result;
use crate::format::{Mxfp4, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, ScaledFormat};
use crate::graph::{Function, Graph, Node, Op, Role, Var};
use crate::ops::{Embedding, GroupedLinear, Linear, LinearGroup};
use crate::poly::Poly;
use crate::prim::{Fetch, Prim};
use crate::types::Type;

/// Rows for each expert, on average, up to which experts are read in place. At two, chance leaves a share of `exp(-2)`, a
/// seventh, of the experts without a row; and few of the others have more than eight rows, so that few weights are read again:
/// kernels read those of an expert once for up to eight of its rows, and again for each eight more.
const ROWS_OF_EXPERT: usize = 2;

/// Matrices below this share of the largest weight stay on the device: routers, and projections to few heads. They would free
/// little, and each is a copy of its own.
const LEAST_SHARE: u64 = 64;

/// A weight that may be kept in memory of the host.
#[derive(Clone, Debug, PartialEq)]
pub struct HostWeight {
    /// Its name.
    pub name: Arc<str>,
    /// Bytes that it takes.
    pub bytes: u64,
    /// Bytes of it that a step of one token reads.
    pub token_bytes: u64,
    /// The call of main that reads it, counted from 0; `None` where main reads it itself.
    pub call: Option<usize>,
    /// Its place among the arguments of that call.
    place: usize,
}

impl HostWeight {
    /// The order in which weights leave the device: first those of which a token reads the smallest share; of equal ones the
    /// same projection of all layers, from the last layer on, so that layers cross the link in equal parts and what is
    /// computed of each can hide its copy.
    fn before(&self, other: &Self) -> Ordering {
        let share = |weight: &Self, by: &Self| u128::from(weight.token_bytes) * u128::from(by.bytes);
        let place = |weight: &Self| (weight.place, weight.call);
        share(self, other).cmp(&share(other, self)).then_with(|| place(other).cmp(&place(self)))
    }
}

/// How the one node that reads a weight reads it.
enum Reader {
    /// Rows by index.
    Lookup { rows: Dim },
    /// All of it, as a matrix.
    Product,
    /// Matrices of groups of rows: the rows of all groups, the groups, and those that have rows.
    Groups { rows: Dim, groups: usize, reached: Sym },
}

impl Reader {
    /// When the weight, of `ty`, is copied to the device; `None` where it never is.
    fn fetch(&self, ty: &Type) -> Option<Fetch> {
        match self {
            Self::Lookup { .. } => None,
            Self::Product => Some(Fetch { rows: 0.into(), in_place: 0, reached: None }),
            Self::Groups { rows, groups, reached } => {
                let in_place = if is_read_by_group(ty) { ROWS_OF_EXPERT * groups } else { 0 };
                Some(Fetch { rows: rows.clone(), in_place, reached: Some(reached.clone()) })
            }
        }
    }

    /// Bytes of a weight of `ty` that a step of one token reads, of `bytes`.
    fn token_bytes(&self, ty: &Type, bytes: u64) -> u64 {
        match self {
            Self::Lookup { rows } => of_parts(bytes, of_one(rows), ty.shape.0[0].as_const().unwrap_or(1)),
            Self::Groups { rows, groups, .. } if is_read_by_group(ty) => of_parts(bytes, of_one(rows), *groups),
            Self::Product | Self::Groups { .. } => bytes,
        }
    }
}

/// Do the kernels that multiply groups of rows read a stack of matrices of `ty` as it is stored, each matrix by itself? A stack of
/// any other format is decoded as a whole ahead of them.
pub fn is_read_by_group(ty: &Type) -> bool {
    let Some(format) = &ty.format else { return true };
    format.downcast::<ScaledFormat>().is_some()
        || format.downcast::<Q8_0>().is_some()
        || format.downcast::<Q4_0>().is_some()
        || format.downcast::<Q4_1>().is_some()
        || format.downcast::<Q5_0>().is_some()
        || format.downcast::<Q5_1>().is_some()
        || format.downcast::<Mxfp4>().is_some()
        || format.downcast::<Q4K>().is_some()
        || format.downcast::<Q5K>().is_some()
        || format.downcast::<Q6K>().is_some()
}

/// `bytes` of `count` of `all` equal parts.
fn of_parts(bytes: u64, count: usize, all: usize) -> u64 {
    (u128::from(bytes) * count.min(all) as u128 / all.max(1) as u128) as u64
}

/// An extent with one token and one sequence.
fn of_one(rows: &Dim) -> usize {
    let (constant, terms) = rows.parts();
    usize::try_from(constant + terms.iter().map(|(_, count)| count).sum::<i64>()).unwrap_or(0)
}

/// The nodes of `function` that read argument `i`, and as which input.
fn readers(function: &Function, i: usize) -> impl Iterator<Item = (usize, usize)> {
    let is_argument = move |var: &Var| matches!(function.nodes[var.index()].op, Op::Arg(of) if of == i);
    function.nodes.iter().enumerate().flat_map(move |(index, node)| {
        node.inputs.iter().enumerate().filter(move |(_, var)| is_argument(var)).map(move |(at, _)| (index, at))
    })
}

/// How `node` of `function` reads its input `at`, through calls; `None` where it reads it otherwise than as a weight of a product.
fn reader(graph: &Graph, function: &Function, node: &Node, at: usize) -> Option<Reader> {
    let op = match &node.op {
        Op::Call(callee) => {
            let callee = graph.function(*callee);
            let mut all = readers(callee, at);
            let (index, input) = all.next()?;
            return match all.next() {
                None => reader(graph, callee, &callee.nodes[index], input),
                Some(_) => None,
            };
        }
        Op::Composite(op) => op,
        _ => return None,
    };
    if let Some(grouped) = op.downcast::<GroupedLinear>().filter(|_| at == 1) {
        let groups = function.ty(node.inputs[1]).shape.0[0].as_const()?;
        let rows = node.outputs[0].shape.0[0].clone();
        return Some(Reader::Groups { rows, groups, reached: grouped.reached.clone() });
    }
    if op.downcast::<Embedding>().is_some() && at == 0 {
        return Some(Reader::Lookup { rows: node.outputs[0].shape.0[0].clone() });
    }
    let weights = match (op.downcast::<Linear>(), op.downcast::<LinearGroup>()) {
        (Some(_), _) => 1..=1,
        (_, Some(group)) => 1..=group.count,
        _ => return None,
    };
    weights.contains(&at).then_some(Reader::Product)
}

/// A weight of main that one node alone reads.
struct ReadWeight {
    arg: usize,
    /// The node of main.
    node: usize,
    /// Which of its inputs.
    at: usize,
    reader: Reader,
}

/// The weights of `graph` that may be kept in memory of the host: experts and matrices of calls, and plain embeddings.
fn read_weights(graph: &Graph) -> Vec<ReadWeight> {
    let main = graph.main();
    let of = |arg: usize| {
        let mut all = readers(main, arg);
        let (node, at) = all.next()?;
        let reader = reader(graph, main, &main.nodes[node], at).filter(|_| all.next().is_none())?;
        // A matrix that main multiplies by itself is the output projection, which each step reads whole.
        let may_leave = match reader {
            // A table in a format is decoded as a whole for each step.
            Reader::Lookup { .. } => main.args[arg].ty.format.is_none(),
            Reader::Product | Reader::Groups { .. } => matches!(main.nodes[node].op, Op::Call(_)),
        };
        may_leave.then_some(ReadWeight { arg, node, at, reader })
    };
    (0..main.args.len()).filter(|arg| main.args[*arg].role == Role::Weight).filter_map(of).collect()
}

/// The weights of `graph` that may be kept in memory of the host, in the order in which they leave the device: a step of one
/// token reads the smallest share of the first.
pub fn host_weights(graph: &Graph) -> Vec<HostWeight> {
    let main = graph.main();
    let calls = |node: usize| main.nodes[..node].iter().filter(|n| matches!(n.op, Op::Call(_))).count();
    let of = |weight: &ReadWeight| {
        let arg = &main.args[weight.arg];
        let bytes = u64::try_from(arg.ty.bytes().as_const()?).ok()?;
        Some(HostWeight {
            name: Arc::clone(&arg.name),
            bytes,
            token_bytes: weight.reader.token_bytes(&arg.ty, bytes),
            call: matches!(main.nodes[weight.node].op, Op::Call(_)).then(|| calls(weight.node)),
            place: weight.at,
        })
    };
    let mut all: Vec<HostWeight> = read_weights(graph).iter().filter_map(of).collect();
    let largest = all.iter().map(|weight| weight.bytes).max().unwrap_or(0);
    all.retain(|weight| weight.bytes > 0 && weight.bytes >= largest / LEAST_SHARE);
    all.sort_by(HostWeight::before);
    all
}

/// Adds a [`Prim::Fetch`] of each weight of these names that is not always read in place, ahead of the call before the one that
/// reads it. Names that are not among [`host_weights`] are left alone.
pub fn fetch_weights(graph: &mut Graph, names: &BTreeSet<String>) {
    let main = graph.main();
    let mut draft = Draft::new(main.clone());
    // The old node behind which each new one stands.
    let mut places = Vec::new();
    let known = main.nodes.len();
    for ReadWeight { arg, node, at, reader } in read_weights(graph) {
        let fetch = reader.fetch(&main.args[arg].ty).filter(|_| names.contains(&*main.args[arg].name));
        let Some(fetch) = fetch else { continue };
        let parameter = main.nodes[node].inputs[at];
        let (op, scope) = (Op::Prim(Prim::Fetch(fetch)), Arc::clone(&main.args[arg].name));
        let fetched =
            draft.push(Node { op, inputs: vec![parameter], outputs: vec![main.args[arg].ty.clone()], scope })[0];
        if let Some(node) = &mut draft.nodes[node] {
            node.inputs[at] = fetched;
        }
        let before = main.nodes[..node].iter().rposition(|n| matches!(n.op, Op::Call(_)));
        places.push(before.unwrap_or(0).saturating_sub(1));
    }
    let index = graph.main.index();
    graph.functions[index] = draft.finish(|node| if node < known { node } else { places[node - known] });
}

/// Bytes of weights in memory of the host that a step reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTraffic {
    /// Those that are copied to the device and read there.
    pub copied: u64,
    /// Those that kernels read in memory of the host.
    pub in_place: u64,
}

impl HostTraffic {
    /// All that crosses the link.
    pub fn bytes(self) -> u64 {
        self.copied + self.in_place
    }
}

/// What crosses the link in a step of `graph` with these extents, which bind the numbers of experts reached. Rows of embeddings,
/// which are few, are not counted.
///
/// # Errors
/// When a symbol is unbound.
pub fn host_traffic(graph: &Graph, bindings: &Bindings) -> Result<HostTraffic> {
    let mut traffic = HostTraffic::default();
    for node in &graph.main().nodes {
        let Op::Prim(Prim::Fetch(fetch)) = &node.op else { continue };
        let number = |poly: &Poly| -> Result<u64> { Ok(u64::try_from(poly.eval(bindings)?).unwrap_or(0)) };
        let bytes = number(&node.outputs[0].bytes())?;
        match &fetch.reached {
            Some(reached) if fetch.is_in_place(bindings)? => {
                let reached = Dim::from(reached.clone()).eval(bindings)?;
                let groups = node.outputs[0].shape.0[0].eval(bindings)?;
                traffic.in_place += of_parts(bytes, reached, groups);
            }
            _ => traffic.copied += bytes,
        }
    }
    Ok(traffic)
}
