//! Random instances of ops, for conformance tests of every backend.

use crate::dtype::DType;
use crate::error::{GraphError, Result};
use crate::format::FormatRef;
use crate::graph::{Builder, Composite, CompositeRef, Graph, Op};
use crate::prim::Prim;
use crate::tensor::{Tensor, Value};
use crate::types::Type;

/// A small counter-based generator for test data: the same numbers on every machine.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator that repeats for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    /// A generator that stands at `state`.
    pub fn at(state: u64) -> Self {
        Self(state)
    }

    /// Where it stands: draw `n` of [`Rng::bits`] is a function of this and `n`.
    pub fn state(&self) -> u64 {
        self.0
    }

    /// This generator `draws` draws of [`Rng::bits`] on.
    #[must_use]
    pub fn after(&self, draws: u64) -> Self {
        Self(self.0.wrapping_add(draws.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// 64 random bits (SplitMix64; Steele, Lea and Flood 2014).
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..n`; 0 for `n` of 0.
    pub fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.bits() % n as u64) as usize }
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws of [`Rng::bits`] that [`Rng::gauss`] takes.
    pub const GAUSS_DRAWS: u64 = 2;

    /// A standard normal number (Box and Muller 1958).
    pub fn gauss(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Normal elements, rounded to `dtype`.
    pub fn normal(&mut self, dtype: DType, shape: &[usize]) -> Tensor {
        let n = shape.iter().product();
        Tensor::float(dtype, shape, (0..n).map(|_| self.gauss()).collect()).rounded()
    }

    /// Integers in `low..high`.
    pub fn integers(&mut self, dtype: DType, shape: &[usize], low: i64, high: i64) -> Tensor {
        let n = shape.iter().product();
        let span = usize::try_from(high - low).unwrap_or(0);
        Tensor::int(dtype, shape, (0..n).map(|_| low + self.below(span) as i64).collect())
    }
}

/// How an output is judged against the f64 meaning.
#[derive(Clone, Copy, Debug)]
pub enum Check {
    /// By the rule of tolerance: per row, an error of at most twice a plain implementation's plus one rounding.
    Norm,
    /// Every element equal.
    Exact,
    /// Of the quantised first input: every element as near to it as the exact result is, or equal to that but for the
    /// rounding of its scale.
    Codes,
    /// By a property of (inputs, outputs), for ops whose results jump. Returns what is wrong.
    Property(fn(&[Value], &[Tensor]) -> Result<(), String>),
}

/// One op with concrete inputs.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The op: a composite or a primitive.
    pub op: Op,
    /// Its inputs.
    pub inputs: Vec<Value>,
    /// Which inputs are linear state.
    pub states: Vec<usize>,
    /// How outputs are judged.
    pub check: Check,
}

impl Sample {
    /// An instance of a composite, without inputs yet.
    pub fn new(op: impl Composite) -> Self {
        Self { op: Op::Composite(CompositeRef::new(op)), inputs: Vec::new(), states: Vec::new(), check: Check::Norm }
    }

    /// An instance of a primitive, without inputs yet.
    pub fn prim(prim: Prim) -> Self {
        Self { op: Op::Prim(prim), inputs: Vec::new(), states: Vec::new(), check: Check::Norm }
    }

    /// Adds an input tensor.
    #[must_use]
    pub fn input(mut self, tensor: Tensor) -> Self {
        self.inputs.push(Value::Plain(tensor));
        self
    }

    /// Adds an input that is linear state.
    #[must_use]
    pub fn state(mut self, tensor: Tensor) -> Self {
        self.states.push(self.inputs.len());
        self.input(tensor)
    }

    /// Adds an input parameter stored in `format`.
    #[must_use]
    pub fn stored(mut self, tensor: &Tensor, format: &FormatRef) -> Self {
        self.inputs.push(Value::stored(tensor, format));
        self
    }

    /// Judged by `check`.
    #[must_use]
    pub fn judged(mut self, check: Check) -> Self {
        self.check = check;
        self
    }

    /// Types of the inputs.
    pub fn types(&self) -> Vec<Type> {
        let typed = |(i, v): (usize, &Value)| Type { state: self.states.contains(&i), ..v.ty() };
        self.inputs.iter().enumerate().map(typed).collect()
    }

    /// A graph that applies the op to its main function's arguments `0`, `1`, ..., states as states and stored inputs
    /// as weights, and gives its plain outputs as `0`, `1`, ... (those in formats decoded to f32) and its state outputs under the states' names.
    ///
    /// # Errors
    /// When the sample is not valid for its op.
    pub fn graph(&self) -> Result<Graph, GraphError> {
        let mut g = Builder::new();
        let mut vars = Vec::new();
        for (i, ty) in self.types().into_iter().enumerate() {
            let name = i.to_string();
            vars.push(match (ty.state, ty.format.is_some()) {
                (true, _) => g.state(&name, ty)?,
                (false, true) => g.weight(&name, ty)?,
                (false, false) => g.step_input(&name, ty)?,
            });
        }
        let outputs = g.emit(self.op.clone(), &vars)?;
        let mut plain = Vec::new();
        for var in outputs {
            let ty = g.ty(var)?.clone();
            if !ty.state {
                let var = if ty.format.is_some() { g.decoded(var, DType::F32)? } else { var };
                plain.push((plain.len().to_string(), var));
            }
        }
        g.finish(plain)
    }
}
