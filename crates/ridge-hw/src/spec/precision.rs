//! Number formats of matrix units.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The format of the numbers that a matrix unit multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Precision {
    /// IEEE half precision, accumulated in f32.
    F16,
    /// bfloat16, accumulated in f32.
    Bf16,
    /// 8-bit floats (E4M3 or E5M2), accumulated in f32.
    Fp8,
    /// 8-bit integers, accumulated in 32-bit integers.
    Int8,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
        })
    }
}
