//! Concrete tensors for evaluation and tests: f64 for floats, i64 for integers and booleans, so that nothing is
//! rounded that the meaning does not round.

use crate::dtype::DType;
use crate::format::FormatRef;
use crate::shape::Shape;
use crate::types::Type;

/// Elements in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Of a float dtype.
    Float(Vec<f64>),
    /// Of an integer dtype, or 0 and 1 of `Bool`.
    Int(Vec<i64>),
}

/// A tensor of known shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Vec<usize>,
    /// Elements.
    pub data: Data,
}

impl Tensor {
    /// Float elements as given, unrounded.
    ///
    /// # Panics
    /// When the number of values is not the product of `shape`, or `dtype` is not float.
    pub fn float(dtype: DType, shape: &[usize], values: Vec<f64>) -> Self {
        assert!(dtype.is_float(), "{dtype} is not a float dtype");
        assert_eq!(values.len(), shape.iter().product::<usize>(), "elements of {shape:?}");
        Self { dtype, shape: shape.to_vec(), data: Data::Float(values) }
    }

    /// Integer or boolean elements.
    ///
    /// # Panics
    /// When the number of values is not the product of `shape`, or `dtype` is float.
    pub fn int(dtype: DType, shape: &[usize], values: Vec<i64>) -> Self {
        assert!(!dtype.is_float(), "{dtype} is a float dtype");
        assert_eq!(values.len(), shape.iter().product::<usize>(), "elements of {shape:?}");
        Self { dtype, shape: shape.to_vec(), data: Data::Int(values) }
    }

    /// All zeros.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Self {
        let n = shape.iter().product();
        if dtype.is_float() { Self::float(dtype, shape, vec![0.0; n]) } else { Self::int(dtype, shape, vec![0; n]) }
    }

    /// From little-endian bytes of `dtype`.
    ///
    /// # Panics
    /// When `bytes` has another length than `shape` needs.
    pub fn from_bytes(dtype: DType, shape: &[usize], bytes: &[u8]) -> Self {
        let values = dtype.decode(bytes);
        match dtype {
            _ if dtype.is_float() => Self::float(dtype, shape, values),
            // Exact where f64 is not.
            DType::I64 => {
                let exact = bytes.as_chunks::<8>().0.iter().map(|c| i64::from_le_bytes(*c)).collect();
                Self::int(dtype, shape, exact)
            }
            _ => Self::int(dtype, shape, values.into_iter().map(|v| v as i64).collect()),
        }
    }

    /// Little-endian bytes of its dtype; floats are rounded.
    pub fn to_bytes(&self) -> Vec<u8> {
        match &self.data {
            Data::Float(v) => self.dtype.encode(v.iter().copied()),
            Data::Int(v) if self.dtype == DType::I64 => v.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Data::Int(v) => self.dtype.encode(v.iter().map(|x| *x as f64)),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Has it no elements?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Float elements.
    ///
    /// # Panics
    /// When it is not float.
    pub fn floats(&self) -> &[f64] {
        match &self.data {
            Data::Float(v) => v,
            Data::Int(_) => panic!("{} is not float", self.dtype),
        }
    }

    /// Elements of any dtype as floats.
    pub fn numbers(&self) -> Vec<f64> {
        match &self.data {
            Data::Float(v) => v.clone(),
            Data::Int(v) => v.iter().map(|x| *x as f64).collect(),
        }
    }

    /// Integer or boolean elements.
    ///
    /// # Panics
    /// When it is float.
    pub fn ints(&self) -> &[i64] {
        match &self.data {
            Data::Int(v) => v,
            Data::Float(_) => panic!("{} is not an integer dtype", self.dtype),
        }
    }

    /// Float elements rounded to its dtype.
    #[must_use]
    pub fn rounded(mut self) -> Self {
        if let Data::Float(v) = &mut self.data {
            v.iter_mut().for_each(|x| *x = self.dtype.round(*x));
        }
        self
    }

    /// Its plain type.
    pub fn ty(&self) -> Type {
        Type::tensor(self.dtype, Shape::new(self.shape.iter().copied()))
    }
}

/// The value of a graph's `Var`: a tensor (state too), or the components of a stored parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A tensor.
    Plain(Tensor),
    /// A parameter in a format.
    Stored {
        /// The format.
        format: FormatRef,
        /// Logical dtype.
        dtype: DType,
        /// Logical shape.
        shape: Vec<usize>,
        /// Component tensors.
        components: Vec<Tensor>,
    },
}

impl Value {
    /// `tensor` quantised to `format`.
    ///
    /// # Panics
    /// When it is not float.
    pub fn stored(tensor: &Tensor, format: &FormatRef) -> Self {
        let values: Vec<f32> = tensor.floats().iter().map(|v| *v as f32).collect();
        let logical = Shape::new(tensor.shape.iter().copied());
        let components = format
            .components(&logical)
            .iter()
            .zip(format.encode(&values, &tensor.shape, None))
            .map(|(c, bytes)| Tensor::from_bytes(c.dtype, &c.shape.as_const().unwrap_or_default(), &bytes))
            .collect();
        Self::Stored { format: format.clone(), dtype: tensor.dtype, shape: tensor.shape.clone(), components }
    }

    /// The plain tensor.
    ///
    /// # Panics
    /// When it is stored in a format.
    pub fn tensor(&self) -> &Tensor {
        match self {
            Self::Plain(t) => t,
            Self::Stored { format, .. } => panic!("stored as {}", format.name()),
        }
    }

    /// Its type.
    pub fn ty(&self) -> Type {
        match self {
            Self::Plain(t) => t.ty(),
            Self::Stored { format, dtype, shape, .. } => {
                Type::tensor(*dtype, Shape::new(shape.iter().copied())).stored_as(format.clone())
            }
        }
    }
}

impl From<Tensor> for Value {
    fn from(tensor: Tensor) -> Self {
        Self::Plain(tensor)
    }
}
