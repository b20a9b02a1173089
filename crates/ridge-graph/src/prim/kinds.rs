//! What primitives are parametrised by: constants, and the kinds of elementwise functions, combinations and
//! collectives. It stands below the primitives, so that the decoding of a format, which a primitive names, can use it.

use std::fmt;
use std::sync::Arc;

use crate::dim::{Bindings, Dim, Sym, UnboundSymbol};
use crate::dtype::DType;

/// A constant scalar or vector.
#[derive(Clone)]
pub struct Literal {
    /// Element type.
    pub dtype: DType,
    /// The values; exactly one for a scalar.
    pub values: Arc<[f64]>,
    /// Rank 1 rather than rank 0.
    pub vector: bool,
}

impl PartialEq for Literal {
    fn eq(&self, other: &Self) -> bool {
        // By bits, so that NaN equals itself and 0.0 differs from -0.0.
        self.dtype == other.dtype
            && self.vector == other.vector
            && self.values.len() == other.values.len()
            && self.values.iter().zip(&*other.values).all(|(a, b)| a.to_bits() == b.to_bits())
    }
}

impl fmt::Debug for Literal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&*self.values, self.vector) {
            ([x], false) => write!(f, "{x}"),
            ([first, .., last], _) if self.values.len() > 4 => {
                write!(f, "[{first}, .. {} .., {last}]", self.values.len() - 2)
            }
            (all, _) => write!(f, "{all:?}"),
        }
    }
}

/// One input, elementwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Unary {
    Neg,
    Abs,
    Exp,
    Log,
    Sqrt,
    Rsqrt,
    Sin,
    Cos,
    Tanh,
    Erf,
    Sigmoid,
    Floor,
    Not,
}

/// Two inputs of one type, elementwise. `Rem` has the sign of the divisor. On integers results wrap, `Div` rounds
/// towards minus infinity, and dividing by zero gives zero. On floats `Max` and `Min` of a NaN are NaN. `And` and `Or`
/// take booleans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Rem,
    Pow,
    Max,
    Min,
    And,
    Or,
}

impl Binary {
    /// Does swapping the inputs leave the result as it is?
    pub fn commutes(self) -> bool {
        matches!(self, Self::Add | Self::Mul | Self::Max | Self::Min | Self::And | Self::Or)
    }
}

/// A comparison of two inputs of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

/// How a reduction or a scan combines elements. Floats accumulate in f32 at least; `Max` and `Min` of a NaN are NaN.
/// Of no elements the sum is 0, `Max` the dtype's lowest value (minus infinity) and `Min` its highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Combine {
    Sum,
    Max,
    Min,
}

/// Where a value is while nothing uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// Memory of the device that computes.
    Device,
    /// Memory of the host, which the device reads and writes more slowly.
    Host,
}

/// When a parameter in memory of the host is copied to the device for its reader, and when it is read where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Rows that the reader multiplies by the parameter.
    pub rows: Dim,
    /// Maximum number of rows for which the reader takes the parameter from memory of the host; 0 where it never does.
    pub in_place: usize,
    /// Of a stack of matrices that are multiplied by groups of rows, how many groups have rows: for costs alone.
    pub reached: Option<Sym>,
}

impl Fetch {
    /// Is the parameter read in memory of the host in a step of these extents, rather than copied?
    ///
    /// # Errors
    /// When a symbol of `rows` is unbound.
    pub fn is_in_place(&self, bindings: &Bindings) -> Result<bool, UnboundSymbol> {
        Ok(self.in_place > 0 && self.rows.eval(bindings)? <= self.in_place)
    }
}

/// Communication between the ranks of one mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveKind {
    /// Every rank gets the sum over ranks.
    AllReduce,
    /// Every rank gets the ranks' tensors one after another along an axis.
    AllGather(usize),
    /// Each rank gets its slice along an axis of the sum over ranks.
    ReduceScatter(usize),
    /// Each rank cuts its tensor along `split` and sends every rank its slice; the slices that a rank gets follow each
    /// other along `concat` in the order of ranks.
    AllToAll {
        /// The axis that is cut.
        split: usize,
        /// The axis along which what arrives is joined.
        concat: usize,
    },
    /// Every rank gets the tensor of this rank.
    Broadcast(usize),
    /// This rank gets the sum over ranks, the others zeros.
    Reduce(usize),
    /// Rank `to` gets the tensor of rank `from`, the others zeros.
    Send {
        /// The rank that sends.
        from: usize,
        /// The rank that receives.
        to: usize,
    },
    /// Each rank gets its slice along an axis of its own tensor, which is the same on every rank. Nothing is sent.
    Split(usize),
}

impl CollectiveKind {
    /// Name in the text form and in errors.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather(_) => "all_gather",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::AllToAll { .. } => "all_to_all",
            Self::Broadcast(_) => "broadcast_from",
            Self::Reduce(_) => "reduce_to",
            Self::Send { .. } => "send",
            Self::Split(_) => "split",
        }
    }

    /// The collective that brings cotangents of its outputs to those of its inputs: the transpose of the linear map from
    /// the inputs of all ranks to the outputs of all ranks. `None` of a split, whose input is one value that all ranks
    /// have: how its cotangent is shared among them is for whoever placed it to say.
    pub fn transpose(self) -> Option<Self> {
        Some(match self {
            Self::AllReduce => Self::AllReduce,
            Self::AllGather(axis) => Self::ReduceScatter(axis),
            Self::ReduceScatter(axis) => Self::AllGather(axis),
            Self::AllToAll { split, concat } => Self::AllToAll { split: concat, concat: split },
            Self::Broadcast(rank) => Self::Reduce(rank),
            Self::Reduce(rank) => Self::Broadcast(rank),
            Self::Send { from, to } => Self::Send { from: to, to: from },
            Self::Split(_) => return None,
        })
    }

    /// The highest rank that it names.
    pub(crate) fn names_rank(self) -> Option<usize> {
        match self {
            Self::Broadcast(rank) | Self::Reduce(rank) => Some(rank),
            Self::Send { from, to } => Some(from.max(to)),
            _ => None,
        }
    }
}
