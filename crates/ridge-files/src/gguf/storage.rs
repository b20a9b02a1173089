//! Tensor types.

use ridge_graph::{DType, FormatRef};

/// How a tensor is stored: plainly, or in a format whose logical dtype is f32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorStorage {
    /// Element type; f32 for what is stored in a format.
    pub dtype: DType,
    /// The format, if it is not stored plainly.
    pub format: Option<FormatRef>,
}

/// Number of a type in the file, and its name.
const TYPES: [(u32, &str); 33] = [
    (0, "f32"),
    (1, "f16"),
    (2, "q4_0"),
    (3, "q4_1"),
    (6, "q5_0"),
    (7, "q5_1"),
    (8, "q8_0"),
    (9, "q8_1"),
    (10, "q2_k"),
    (11, "q3_k"),
    (12, "q4_k"),
    (13, "q5_k"),
    (14, "q6_k"),
    (15, "q8_k"),
    (16, "iq2_xxs"),
    (17, "iq2_xs"),
    (18, "iq3_xxs"),
    (19, "iq1_s"),
    (20, "iq4_nl"),
    (21, "iq3_s"),
    (22, "iq2_s"),
    (23, "iq4_xs"),
    (24, "i8"),
    (25, "i16"),
    (26, "i32"),
    (27, "i64"),
    (28, "f64"),
    (29, "iq1_m"),
    (30, "bf16"),
    (34, "tq1_0"),
    (35, "tq2_0"),
    (39, "mxfp4"),
    (40, "nvfp4"),
];

impl TensorStorage {
    /// Plain storage.
    pub fn plain(dtype: DType) -> Self {
        Self { dtype, format: None }
    }

    /// TensorStorage in `format`.
    pub fn in_format(format: FormatRef) -> Self {
        Self { dtype: DType::F32, format: Some(format) }
    }

    /// The storage called `name`: a dtype or a format.
    pub fn from_name(name: &str) -> Option<Self> {
        DType::from_name(name).map(Self::plain).or_else(|| FormatRef::from_name(name).map(Self::in_format))
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.format.as_ref().map_or(self.dtype.name(), |format| format.name())
    }

    /// The type with this number.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn from_number(number: u32) -> Result<Self, String> {
        let Some((_, name)) = TYPES.iter().find(|(n, _)| *n == number) else {
            return Err(format!("has type {number}, which Ridge does not know"));
        };
        Self::from_name(name).ok_or_else(|| format!("has type {name}, which Ridge does not read"))
    }

    /// The number of this type in a file; some dtypes have none.
    pub fn number(&self) -> Option<u32> {
        TYPES.iter().find(|(_, name)| *name == self.name()).map(|(number, _)| *number)
    }

    /// Elements and bytes of what cannot be cut apart along the innermost axis.
    pub fn block(&self) -> (usize, usize) {
        match &self.format {
            None => (1, self.dtype.size_bytes()),
            Some(format) => {
                let elements = format.granularity(1)[0];
                let components = format.components(&[elements].into());
                let bytes = components.iter().filter_map(|c| c.ty().bytes().as_const()).sum::<i128>();
                (elements, bytes as usize)
            }
        }
    }

    /// Bytes of a tensor.
    ///
    /// # Errors
    /// Why there is no such tensor.
    pub fn bytes(&self, shape: &[usize]) -> Result<usize, String> {
        let (elements, bytes) = self.block();
        let last = shape.last().copied().unwrap_or(1);
        if !last.is_multiple_of(elements) {
            return Err(format!("has rows of {last}, which blocks of {elements} of {} do not divide", self.name()));
        }
        let all = shape.iter().try_fold(1usize, |all, n| all.checked_mul(*n));
        let bytes = all.and_then(|all| (all / elements).checked_mul(bytes));
        bytes.ok_or_else(|| "has more bytes than can be counted".to_owned())
    }

    /// The elements of `data` as f32.
    pub fn decode(&self, data: &[u8]) -> Vec<f32> {
        match &self.format {
            None => self.dtype.decode(data).into_iter().map(|v| v as f32).collect(),
            Some(format) => format.values(&[data], &[]),
        }
    }

    /// `values` of `shape` as bytes; `importance` is that of each element of a row.
    pub fn encode(&self, values: &[f32], shape: &[usize], importance: Option<&[f32]>) -> Vec<u8> {
        match &self.format {
            None => self.dtype.encode(values.iter().map(|v| f64::from(*v))),
            Some(format) => format.encode(values, shape, importance).remove(0),
        }
    }
}
