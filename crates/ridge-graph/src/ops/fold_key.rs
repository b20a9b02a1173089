//! Keys of random numbers derived from other keys, as `jax.random.fold_in` derives them (Salmon et al. 2011, "Parallel
//! random numbers: as easy as 1, 2, 3": a counter-based generator of another counter is another stream).

use super::require::{takes, want};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Check, Rng, Sample};
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// The key that `key` and `word` give: 64 bits, taken from three numbers of [`random`](Builder::random) with stream
/// [`FoldKey::STREAM`], key `key` and counter `word`. `key`, `word` and the result: I64 scalars, whose bits all count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoldKey;

impl FoldKey {
    /// The random stream that keys are derived from.
    pub const STREAM: u32 = 1;
    /// Bits of one random number.
    const BITS: u32 = 24;
}

impl Composite for FoldKey {
    fn name(&self) -> &'static str {
        "fold_key"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [key, word] = inputs else { return Err(takes("key and word", inputs)) };
        want("key", key, DType::I64, Shape::default())?;
        want("word", word, DType::I64, Shape::default())?;
        Ok(vec![key.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let half = g.constant(DType::I64, 2f64.powi(32))?;
        let high = g.div(inputs[1], half)?;
        let scale = g.constant(DType::F32, f64::from(1u32 << Self::BITS))?;
        let shift = g.constant(DType::I64, f64::from(1u32 << Self::BITS))?;
        let mut folded = None;
        for index in 0..3 {
            let index = g.constant(DType::I64, f64::from(index))?;
            let number = g.random(inputs[0], inputs[1], high, index, Self::STREAM)?;
            // A multiple of 2^-24 below 1, so nothing is rounded. Integers wrap.
            let bits = g.mul(number, scale)?;
            let bits = g.cast(bits, DType::I64)?;
            folded = Some(match folded {
                None => bits,
                Some(before) => {
                    let shifted = g.mul(before, shift)?;
                    g.add(shifted, bits)?
                }
            });
        }
        Ok(folded.into_iter().collect())
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        // Three Philox numbers of some 40 operations.
        let vector_flops = inputs[0].shape.elements() * 120;
        Cost { vector_flops, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }
}

impl Builder {
    /// The key derived from `key` by `word`; see [`FoldKey`].
    ///
    /// # Errors
    /// When they are not I64 scalars.
    pub fn fold_key(&mut self, key: Var, word: Var) -> Result<Var> {
        Ok(self.composite(FoldKey, &[key, word])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, _dtype: DType) -> Vec<Sample> {
    let words = [0, 1, -1, i64::MAX, i64::MIN, 1 << 32, rng.bits() as i64];
    let scalar = |value: i64| Tensor::int(DType::I64, &[], vec![value]);
    let keys = [rng.bits() as i64, 0];
    let pairs = keys.into_iter().flat_map(|key| words.map(|word| (key, word)));
    pairs.map(|(key, word)| Sample::new(FoldKey).input(scalar(key)).input(scalar(word)).judged(Check::Exact)).collect()
}
