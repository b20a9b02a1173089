//! Rotary position embedding (Su et al. 2021, "RoFormer", section 3.2.2), in the rotate-half layout of GPT-NeoX and
//! Hugging Face: element `i` is paired with element `i + R/2`.

use std::fmt;
use std::sync::Arc;

use super::require::{takes, want, want_floats};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::dyn_eq::eq_by_bits;
use crate::error::Result;
use crate::graph::{Builder, Composite, CompositeRef, Gradient, Saved, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;

/// Rotates the pairs of the first `R = 2 * inv_freq.len()` elements of each head by `position * inv_freq`, computed
/// in f32; the other elements pass through.
///
/// `x`: `[tokens, heads, dim]` of any float dtype, `positions`: i32 `[tokens]`; gives the type of `x`.
#[derive(Clone)]
pub struct Rope {
    /// Radians a position, for each pair.
    pub inv_freq: Arc<[f64]>,
    /// Factor of sine and cosine: YaRN's attention scaling, otherwise 1.
    pub scale: f64,
}

/// Gradient of [`Rope`] with these attributes: the cotangents are rotated back.
///
/// `positions`: i32 `[tokens]`, `dy`: of the type of `x`, which the result has too.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeBackward(pub Rope);

eq_by_bits!(Rope { inv_freq, scale });

impl fmt::Debug for Rope {
    /// The text of a program tells ops apart, so a hash stands for all the frequencies.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, last) = (self.inv_freq.first().unwrap_or(&0.0), self.inv_freq.last().unwrap_or(&0.0));
        // FNV-1a, 64 bits (Fowler, Noll and Vo).
        let bytes = self.inv_freq.iter().flat_map(|x| x.to_bits().to_le_bytes());
        let hash =
            bytes.fold(0xcbf2_9ce4_8422_2325_u64, |h, byte| (h ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        let rotary = 2 * self.inv_freq.len();
        write!(f, "Rope {{ rotary: {rotary}, inv_freq: {first}..{last} #{hash:016x}, scale: {} }}", self.scale)
    }
}

impl Composite for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [x, positions] = inputs else { return Err(takes("x and positions", inputs)) };
        want_floats("x", x, 3, "[tokens, heads, dim]")?;
        want("positions", positions, DType::I32, [&x.shape.0[0]])?;
        let rotary = 2 * self.inv_freq.len();
        if rotary == 0 || x.shape.last().as_const().is_none_or(|dim| dim < rotary) {
            return Err(format!("x must have {rotary} elements or more a head, as many as are rotated, got {x}"));
        }
        Ok(vec![x.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let ty = g.ty(inputs[0])?.clone();
        let half = self.inv_freq.len();
        let positions = g.cast(inputs[1], DType::F32)?;
        let positions = g.reshape(positions, Shape(vec![ty.shape.0[0].clone(), 1.into(), 1.into()]))?;
        let freqs = g.table(DType::F32, &self.inv_freq)?;
        let angle = g.mul(positions, freqs)?;
        let scale = g.constant(DType::F32, self.scale)?;
        let cos = g.cos(angle)?;
        let cos = g.mul(cos, scale)?;
        let sin = g.sin(angle)?;
        let sin = g.mul(sin, scale)?;
        let x = g.cast(inputs[0], DType::F32)?;
        let a = g.slice(x, 2, 0, half)?;
        let b = g.slice(x, 2, half, half)?;
        let (a_cos, b_sin) = (g.mul(a, cos)?, g.mul(b, sin)?);
        let (b_cos, a_sin) = (g.mul(b, cos)?, g.mul(a, sin)?);
        let mut parts = vec![g.sub(a_cos, b_sin)?, g.add(b_cos, a_sin)?];
        let rest = ty.shape.last() + -2 * half as i64;
        if rest != 0.into() {
            parts.push(g.slice(x, 2, 2 * half, rest)?);
        }
        let y = g.concat(&parts, 2)?;
        Ok(vec![g.cast(y, ty.dtype)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let rows = crate::Poly::product(&inputs[0].shape.0[..2]);
        let pairs = self.inv_freq.len() as i128;
        // Four products and two sums a pair; sine and cosine once a token, whatever the heads.
        Cost {
            vector_flops: rows * (6 * pairs),
            special_flops: crate::Poly::from(&inputs[0].shape.0[0]) * (2 * pairs),
            ..Cost::moving(inputs, outputs)
        }
    }

    fn gradient(&self) -> Gradient {
        Gradient::Explicit {
            forward: CompositeRef::new(self.clone()),
            saved: vec![Saved::Input(1)],
            backward: CompositeRef::new(RopeBackward(self.clone())),
            wrt: vec![0],
        }
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        vec![
            ShardingRule {
                inputs: vec![Placement::shard(1), Placement::Replicate],
                outputs: vec![Placement::shard(1)],
            },
            ShardingRule { inputs: vec![Placement::shard(0); 2], outputs: vec![Placement::shard(0)] },
        ]
    }
}

impl Composite for RopeBackward {
    fn name(&self) -> &'static str {
        "rope_backward"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [positions, dy] = inputs else { return Err(takes("positions and dy", inputs)) };
        self.0.infer(&[dy.clone(), positions.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let inv_freq = self.0.inv_freq.iter().map(|f| -f).collect();
        g.composite(Rope { inv_freq, scale: self.0.scale }, &[inputs[1], inputs[0]])
    }

    fn is_shorthand(&self) -> bool {
        true
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        self.0.cost(&[inputs[1].clone(), inputs[0].clone()], outputs)
    }
}

impl Builder {
    /// Rotary position embedding of `x` at `positions`; see [`Rope`].
    ///
    /// # Errors
    /// When `x` is not `[tokens, heads, dim]` with as many elements a head as are rotated, or `positions` is not
    /// i32 `[tokens]`.
    pub fn rope(&mut self, x: Var, positions: Var, op: &Rope) -> Result<Var> {
        Ok(self.composite(op.clone(), &[x, positions])?[0])
    }
}

/// Instances of [`RopeBackward`].
pub(super) fn samples_backward(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    let cases = [(0, 2, 8, 8, 1.0), (5, 3, 64, 64, 1.0), (7, 2, 33, 16, 1.25)];
    let sample = |(tokens, heads, dim, rotary, scale): (usize, usize, usize, usize, f64)| {
        let inv_freq = super::rope_frequencies(10_000.0, rotary).into();
        Sample::new(RopeBackward(Rope { inv_freq, scale }))
            .input(rng.integers(DType::I32, &[tokens], 0, 300))
            .input(rng.normal(dtype, &[tokens, heads, dim]))
    };
    cases.into_iter().map(sample).collect()
}

pub(super) fn samples(rng: &mut Rng, dtype: DType) -> Vec<Sample> {
    use super::{llama3_scaling, rope_frequencies};
    // (tokens, heads, dim, rotary, scale)
    let cases = [
        (0, 2, 8, 8, 1.0),
        (1, 1, 2, 2, 1.0),
        (3, 0, 4, 4, 1.0),
        (5, 3, 64, 64, 1.0),
        (7, 2, 33, 16, 1.0),
        (17, 4, 128, 128, 1.25),
        (65, 1, 80, 20, 1.0),
    ];
    let sample = |(tokens, heads, dim, rotary, scale): (usize, usize, usize, usize, f64)| {
        let freqs = llama3_scaling(&rope_frequencies(10_000.0, rotary), 8.0, 1.0, 4.0, 64.0);
        Sample::new(Rope { inv_freq: freqs.into(), scale })
            .input(rng.normal(dtype, &[tokens, heads, dim]))
            .input(rng.integers(DType::I32, &[tokens], 0, 300))
    };
    cases.into_iter().map(sample).collect()
}
