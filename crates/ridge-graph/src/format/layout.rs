//! What a storage format is: the component tensors that hold a parameter or another value, how values are encoded into their bytes, and
//! how they decode.

use std::any::Any;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::decoding::{Decoding, DecodingValue};
use crate::dtype::DType;
use crate::dyn_eq::{DynEq, DynHash};
use crate::shape::Shape;
use crate::why::Why;

/// One stored tensor of a format: codes, scales, zero points or a codebook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormatComponent {
    /// Its name within the format, such as `codes`.
    pub name: &'static str,
    /// Its element type.
    pub dtype: DType,
    /// Its shape, for the logical shape asked about.
    pub shape: Shape,
}

/// A way to store a parameter, or a value that a graph computes. Implementations are small values; they are equal when they have one type and equal
/// attributes.
pub trait Format: fmt::Debug + Send + Sync + DynEq + DynHash {
    /// Name in the text form and on the command line.
    fn name(&self) -> &'static str;

    /// Elements along each axis that cannot be cut apart: slices and shards must respect these multiples.
    fn granularity(&self, rank: usize) -> Vec<usize>;

    /// Checks that `shape` can be stored.
    ///
    /// # Errors
    /// Says which extent is wrong and what it must be.
    fn check(&self, shape: &Shape) -> Result<(), Why>;

    /// The tensors that hold a value of logical `shape`.
    fn components(&self, shape: &Shape) -> Vec<FormatComponent>;

    /// The meaning: appends to `decoding` what computes the logical f32 tensor of `shape` from the components.
    fn decode(&self, decoding: &mut Decoding, shape: &Shape) -> DecodingValue;

    /// Quantises row-major `values` of `shape` to the little-endian bytes of each component. `shape` has passed
    /// [`Format::check`] and `values` has its number of elements. `importance` gives the weight of each element's squared
    /// error, for the elements of a row (the innermost axis); without it a format uses the weights of its authors.
    fn encode(&self, values: &[f32], shape: &[usize], importance: Option<&[f32]>) -> Vec<Vec<u8>>;

    /// What [`Format::decode`] means, computed here: the values of `shape` that the bytes of the components stand for, in
    /// f32.
    fn values(&self, components: &[&[u8]], shape: &[usize]) -> Vec<f32>;
}

/// A shared format, compared by type and attributes.
#[derive(Clone, Debug)]
pub struct FormatRef(Arc<dyn Format>);

impl FormatRef {
    /// Shares `format`.
    pub fn new(format: impl Format) -> Self {
        Self(Arc::new(format))
    }

    /// The format as its own type, if it is a `T`.
    pub fn downcast<T: Format>(&self) -> Option<&T> {
        let any: &dyn Any = &*self.0;
        any.downcast_ref()
    }
}

impl std::ops::Deref for FormatRef {
    type Target = dyn Format;
    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl PartialEq for FormatRef {
    fn eq(&self, other: &Self) -> bool {
        let other: &dyn Any = &*other.0;
        self.0.dyn_eq(other)
    }
}

impl Eq for FormatRef {}

impl Hash for FormatRef {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.dyn_hash(state);
    }
}
