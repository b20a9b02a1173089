//! What an op costs wherever it runs: arithmetic by unit, and bytes if each input is read and each output written
//! once. Symbolic, so one walk of a graph serves every batch and context length.

use std::ops::AddAssign;

use crate::poly::Poly;
use crate::types::Type;

/// Work of an op, a function or a graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Multiplies and adds of matrix products, counted as 2 a pair.
    pub matrix_flops: Poly,
    /// Elementwise and reduction arithmetic.
    pub vector_flops: Poly,
    /// Exponentials, roots, divisions and trigonometry.
    pub special_flops: Poly,
    /// Bytes read from memory.
    pub bytes_read: Poly,
    /// Bytes written to memory.
    pub bytes_written: Poly,
    /// Bytes each rank sends to others (ring algorithms).
    pub bytes_sent: Poly,
}

impl Cost {
    /// Each input read once, each output written once, no arithmetic.
    pub fn moving(inputs: &[Type], outputs: &[Type]) -> Self {
        let sum = |types: &[Type]| types.iter().fold(Poly::zero(), |s, t| s + &t.bytes());
        Self { bytes_read: sum(inputs), bytes_written: sum(outputs), ..Self::default() }
    }

    /// All arithmetic together.
    pub fn flops(&self) -> Poly {
        self.matrix_flops.clone() + &self.vector_flops + &self.special_flops
    }

    /// All memory traffic together.
    pub fn bytes(&self) -> Poly {
        self.bytes_read.clone() + &self.bytes_written
    }
}

impl AddAssign<&Self> for Cost {
    fn add_assign(&mut self, other: &Self) {
        self.matrix_flops += &other.matrix_flops;
        self.vector_flops += &other.vector_flops;
        self.special_flops += &other.special_flops;
        self.bytes_read += &other.bytes_read;
        self.bytes_written += &other.bytes_written;
        self.bytes_sent += &other.bytes_sent;
    }
}
