//! Storage formats of parameters. A format is not a dtype: the parameter keeps its logical shape and dtype, and
//! the format says which component tensors hold it and how they decode, as ordinary graph ops.
//!
//! Read `format/block.rs` for what the block formats of GGUF files share; each family of them has a file.

mod block;
mod eight;
mod fit;
mod five;
mod four;
mod k;
mod table;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::builder::Builder;
use crate::error::{Result, Why};
use crate::graph::Var;
use crate::types::{Shape, Type};

pub use block::{BlockFormat, Bytes};
pub use eight::Q8_0;
pub use five::{Q5_0, Q5_1};
pub use four::{Q4_0, Q4_1};
pub use k::{Q2K, Q3K, Q4K, Q5K, Q6K};
pub use table::{E2M1, Iq4Nl, Iq4Xs, Mxfp4, UNEVEN};

/// One stored tensor of a format: codes, scales, zero points or a codebook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Component {
    /// Its name within the format, such as `codes`.
    pub name: &'static str,
    /// Its dtype and shape for the logical shape asked about.
    pub ty: Type,
}

/// A way to store a parameter. Implementations are small values that are equal when their `Debug` texts are.
pub trait Format: fmt::Debug + Send + Sync {
    /// Name in the text form and on the command line.
    fn name(&self) -> &'static str;

    /// Elements along each axis that cannot be cut apart: slices and shards must respect these multiples.
    fn granularity(&self, rank: usize) -> Vec<usize>;

    /// Checks that `shape` can be stored.
    ///
    /// # Errors
    /// Says which extent is wrong and what it must be.
    fn check(&self, shape: &Shape) -> Result<(), Why>;

    /// The tensors that hold a parameter of logical `shape`.
    fn components(&self, shape: &Shape) -> Vec<Component>;

    /// The meaning: builds the logical f32 tensor of `shape` from the components.
    ///
    /// # Errors
    /// Those of the ops it builds.
    fn decode(&self, g: &mut Builder, components: &[Var], shape: &Shape) -> Result<Var>;

    /// Quantises row-major `values` of `shape` to the little-endian bytes of each component. `shape` has passed
    /// [`Format::check`] and `values` has its number of elements. `importance` says for each element of a row (the
    /// innermost axis) how much its squared error counts; without it a format weighs as its authors do.
    fn encode(&self, values: &[f32], shape: &[usize], importance: Option<&[f32]>) -> Vec<Vec<u8>>;

    /// What [`Format::decode`] means, computed here: the values that the bytes of the components stand for, in f32.
    fn values(&self, components: &[&[u8]]) -> Vec<f32>;
}

/// A shared format, compared by name and attributes.
#[derive(Clone, Debug)]
pub struct FormatRef(Arc<dyn Format>);

impl FormatRef {
    /// Shares `format`.
    pub fn new(format: impl Format + 'static) -> Self {
        Self(Arc::new(format))
    }

    /// The format called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        all().into_iter().find(|f| f.name() == name)
    }

    fn key(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// Runs `$body` with `$block` as the [`BlockFormat`] called `$name`, or `$other` where there is none.
#[macro_export]
macro_rules! with_block_format {
    ($name:expr, $block:ident => $body:expr, _ => $other:expr) => {
        $crate::with_block_format!(@ $name, $block, $body, $other,
            Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2K, Q3K, Q4K, Q5K, Q6K, Iq4Nl, Iq4Xs, Mxfp4)
    };
    (@ $name:expr, $block:ident, $body:expr, $other:expr, $($format:ident),*) => {
        match $name {
            $(name if name == <$crate::format::$format as $crate::format::BlockFormat>::NAME => {
                type $block = $crate::format::$format;
                $body
            })*
            _ => $other,
        }
    };
}

/// Every format with its standard attributes: what conformance tests walk and the command line offers.
pub fn all() -> Vec<FormatRef> {
    vec![
        FormatRef::new(Q8_0),
        FormatRef::new(Q4_0),
        FormatRef::new(Q4_1),
        FormatRef::new(Q5_0),
        FormatRef::new(Q5_1),
        FormatRef::new(Q2K),
        FormatRef::new(Q3K),
        FormatRef::new(Q4K),
        FormatRef::new(Q5K),
        FormatRef::new(Q6K),
        FormatRef::new(Iq4Nl),
        FormatRef::new(Iq4Xs),
        FormatRef::new(Mxfp4),
    ]
}

impl std::ops::Deref for FormatRef {
    type Target = dyn Format;
    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl PartialEq for FormatRef {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for FormatRef {}

impl Hash for FormatRef {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}
