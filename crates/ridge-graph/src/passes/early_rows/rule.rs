//! Which ops give some rows of their outputs from the same rows of their inputs. That is what their sharding rules say: an op that
//! runs on shares of its inputs along some axes, and gives shares of its outputs, treats what lies along these axes one by one.
//! A mixture of experts does so as a whole: the order of its (token, expert) pairs is another one for each set of tokens.

use crate::dim::Dim;
use crate::graph::{Function, Op, Var};
use crate::ops::{ExpertCombine, ExpertPermutation, GroupedBias, GroupedLinear};
use crate::prim::Prim;
use crate::shape::Shape;
use crate::shard::{MeshAxis, Placement, ShardingRule, rules};
use crate::types::Type;

/// How many rows there are, and how many of them are taken.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    pub(super) all: Dim,
    pub(super) some: Dim,
}

/// What part of a value is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    /// The rows that are taken, along this axis.
    Of(usize),
    /// Along axis 0 the pairs of these rows with their experts, in the order that this node makes.
    Pairs(usize),
    /// Where the experts' pairs begin in the order that this node makes.
    Offsets(usize),
}

/// A node that computes rows.
#[derive(Debug)]
pub(super) struct Moved {
    pub(super) op: Op,
    /// What it reads: a part of each input, or the whole where there is none.
    pub(super) inputs: Vec<Option<Rows>>,
    pub(super) outputs: Vec<Type>,
}

impl Moved {
    /// Node `index`, of whose outputs the parts `asked` are computed (none of those that nobody reads); `None` if it computes no
    /// rows one by one.
    pub(super) fn of(function: &Function, index: usize, asked: &[Option<Rows>], taken: &Taken) -> Option<Self> {
        let node = &function.nodes[index];
        if node.outputs.iter().any(|ty| ty.state) {
            return None;
        }
        let inputs = by_experts(function, index, asked).or_else(|| by_rows(function, index, asked))?;
        let first = asked.iter().flatten().next()?;
        let op = match &node.op {
            Op::Prim(prim) => Op::Prim(resized(prim, *first, extents(function, *first, taken))?),
            Op::Composite(op) => Op::Composite(op.of_single_rows().unwrap_or_else(|| op.clone())),
            Op::Arg(_) | Op::Call(_) | Op::Group(_) => return None,
        };
        let part = |var: &Var, rows: &Option<Rows>| match rows {
            Some(rows) => part(function, function.ty(*var), *rows, taken),
            None => Some(function.ty(*var).clone()),
        };
        let types: Vec<Type> =
            node.inputs.iter().zip(&inputs).map(|(var, rows)| part(var, rows)).collect::<Option<_>>()?;
        let outputs = match &op {
            Op::Prim(prim) => prim.infer(&types).ok()?,
            Op::Composite(op) => op.infer(&types).ok()?,
            Op::Arg(_) | Op::Call(_) | Op::Group(_) => return None,
        };
        let is_part = outputs.iter().enumerate().all(|(out, ty)| match asked[out] {
            Some(rows) => self::part(function, &node.outputs[out], rows, taken).as_ref() == Some(ty),
            None => true,
        });
        is_part.then_some(Self { op, inputs, outputs })
    }
}

/// The axis that is another one of `rows`, and what becomes of its extent; `None` where none is.
fn extents(function: &Function, rows: Rows, taken: &Taken) -> Option<(usize, Taken)> {
    match rows {
        Rows::Of(axis) => Some((axis, taken.clone())),
        Rows::Pairs(order) => {
            let each = function.nodes[order].outputs[1].shape.last();
            Some((0, Taken { all: taken.all.times(&each)?, some: taken.some.times(&each)? }))
        }
        Rows::Offsets(_) => None,
    }
}

/// The type of a part of a value of type `ty`; `None` where its axis has not as many rows as there are.
pub(super) fn part(function: &Function, ty: &Type, rows: Rows, taken: &Taken) -> Option<Type> {
    if matches!(rows, Rows::Offsets(_)) {
        return Some(ty.clone());
    }
    let (axis, Taken { all, some }) = extents(function, rows, taken)?;
    let mut shape = ty.shape.0.clone();
    let extent = shape.get_mut(axis).filter(|extent| **extent == all)?;
    *extent = some;
    Some(ty.with_shape(Shape(shape)))
}

/// `prim` with the extent of the rows' axis in its attributes.
fn resized(prim: &Prim, rows: Rows, extents: Option<(usize, Taken)>) -> Option<Prim> {
    let Some((axis, taken)) = extents else { return matches!(rows, Rows::Offsets(_)).then(|| prim.clone()) };
    let with = |shape: &Shape| {
        let mut dims = shape.0.clone();
        *dims.get_mut(axis)? = taken.some.clone();
        Some(Shape(dims))
    };
    Some(match prim {
        Prim::Reshape(shape) => Prim::Reshape(with(shape)?),
        Prim::Broadcast(shape) => Prim::Broadcast(with(shape)?),
        Prim::Iota { shape, axis, dtype } => Prim::Iota { shape: with(shape)?, axis: *axis, dtype: *dtype },
        Prim::Slice { axis: of, start, .. } if *of == axis => {
            Prim::Slice { axis, start: start.clone(), len: taken.some }
        }
        _ => prim.clone(),
    })
}

/// What the ops of a mixture of experts read. Pairs are a part of the whole as long as they begin with one order and end with it.
fn by_experts(function: &Function, index: usize, asked: &[Option<Rows>]) -> Option<Vec<Option<Rows>>> {
    let Op::Composite(op) = &function.nodes[index].op else { return None };
    let inputs = &function.nodes[index].inputs;
    let (of, pairs, offsets) = (Some(Rows::Of(0)), Rows::Pairs, Rows::Offsets);
    if op.downcast::<ExpertPermutation>().is_some() {
        let gives = [Some(pairs(index)), of, Some(offsets(index))];
        let fits = asked.iter().zip(&gives).all(|(asked, gives)| asked.is_none() || asked == gives);
        return fits.then(|| vec![of; 2]);
    }
    if op.downcast::<ExpertCombine>().is_some() {
        let order = inputs[1].index();
        return (asked[0] == of && inputs[1] == order_of(function, order, 1)?)
            .then(|| vec![Some(pairs(order)), of, of]);
    }
    let Some(Rows::Pairs(order)) = asked[0] else { return None };
    if op.downcast::<GroupedBias>().is_some() {
        return (inputs[2] == order_of(function, order, 2)?).then(|| vec![asked[0], None, Some(offsets(order))]);
    }
    let op = op.downcast::<GroupedLinear>()?;
    let is_of_order =
        inputs[2] == order_of(function, order, 2)? && (!op.gathered || inputs[3] == order_of(function, order, 0)?);
    is_of_order.then(|| match op.gathered {
        true => vec![of, None, Some(offsets(order)), Some(pairs(order))],
        false => vec![Some(pairs(order)), None, Some(offsets(order))],
    })
}

/// An output of the order that node `index` makes, if it makes one.
fn order_of(function: &Function, index: usize, out: usize) -> Option<Var> {
    let Op::Composite(op) = &function.nodes[index].op else { return None };
    op.downcast::<ExpertPermutation>().map(|_| function.var(index, out))
}

/// What a node reads that treats rows one by one.
fn by_rows(function: &Function, index: usize, asked: &[Option<Rows>]) -> Option<Vec<Option<Rows>>> {
    let node = &function.nodes[index];
    let types = function.types(&node.inputs);
    // Rows that are all alike.
    if let (Op::Prim(prim), Some(Some(rows))) = (&node.op, asked.first()) {
        let axis = axis(*rows)?;
        let alike = match prim {
            Prim::Broadcast(shape) => {
                let lead = shape.rank() - types[0].shape.rank();
                axis < lead || types[0].shape.0[axis - lead] != shape.0[axis]
            }
            Prim::Iota { axis: counted, .. } => *counted != axis,
            // Components have extents of their own.
            Prim::Component(_) | Prim::Assemble { .. } => return None,
            _ => false,
        };
        if alike {
            return Some(vec![None; node.inputs.len()]);
        }
    }
    let rules = rules(&node.op, &types, &node.outputs, &MeshAxis::new("rows", 1));
    rules.iter().find_map(|rule| read(rule, asked))
}

/// What the inputs of an op are where it runs by `rule`, if the rule gives what is asked.
fn read(rule: &ShardingRule, asked: &[Option<Rows>]) -> Option<Vec<Option<Rows>>> {
    let gives = |(placed, asked): (&Placement, &Option<Rows>)| {
        asked.is_none_or(|rows| axis(rows).is_some_and(|axis| *placed == Placement::shard(axis)))
    };
    if !rule.outputs.iter().zip(asked).all(gives) {
        return None;
    }
    let mut given = asked.iter().flatten();
    let first = *given.next()?;
    // Of pairs all are of one order.
    let of_pairs = matches!(first, Rows::Pairs(_));
    if of_pairs && given.any(|other| *other != first) {
        return None;
    }
    let input = |placed: &Placement| match *placed {
        Placement::Replicate => Some(None),
        Placement::Shard { dim: 0, multiple: 1 } if of_pairs => Some(Some(first)),
        Placement::Shard { dim, multiple: 1 } if !of_pairs => Some(Some(Rows::Of(dim))),
        Placement::Shard { .. } | Placement::Partial => None,
    };
    rule.inputs.iter().map(input).collect()
}

/// The axis that rows lie along.
fn axis(rows: Rows) -> Option<usize> {
    match rows {
        Rows::Of(axis) => Some(axis),
        Rows::Pairs(_) => Some(0),
        Rows::Offsets(_) => None,
    }
}
