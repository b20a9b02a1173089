//! One step of AdamW with moments of 8 bits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").

use super::adamw::AdamW;
use super::optimizer::{sample_rate, want_alike, want_scalars};
use super::require::{takes, want};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Rng, Sample};
use crate::shape::Shape;
use crate::shard::ShardingRule;
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// The step of [`AdamW`] from moments in blocks of 256 elements, row-major: a code of 8 bits each, and for each block the
/// largest magnitude, which codes are relative to. Codes number the values of the dynamic map of the paper (section 2.2) in
/// ascending order, signed for the first moment and unsigned for the second; a value becomes the code that is nearest.
///
/// `param`, `grad`: f32 of one shape of `256 n` elements; `m`, `v`: u8 `[n, 256]`; `m_scale`, `v_scale`: f32 `[n, 1]`; `lr`,
/// `step`: f32 scalars, steps counted from 1. Takes `param, grad, m, m_scale, v, v_scale, lr, step`, gives `(param', m',
/// m_scale', v', v_scale')`. Moments of zero are the codes [`AdamW8::ZERO`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW8 {
    /// The step.
    pub adamw: AdamW,
}

/// Elements of a block.
const BLOCK: usize = 256;

impl AdamW8 {
    /// Elements of a block.
    pub const BLOCK: usize = BLOCK;
    /// The codes of 0: of the first moment and of the second.
    pub const ZERO: [u8; 2] = [127, 0];

    /// Blocks of a parameter of this shape, if its elements fill them.
    pub fn blocks(shape: &Shape) -> Option<usize> {
        let elements = shape.as_const()?.iter().product::<usize>();
        (elements > 0 && elements.is_multiple_of(BLOCK)).then_some(elements / BLOCK)
    }

    /// The values of the dynamic map, ascending: 7 exponents, the fractions of exponent `i` being the middles of `2^i` (or
    /// `2^(i + 1)` unsigned) parts of `[0.1, 1]`.
    pub fn map(signed: bool) -> Vec<f64> {
        const EXPONENTS: i32 = 7;
        let mut values = vec![0.0, 1.0];
        for i in 0..EXPONENTS {
            let parts = 1_u32 << (i + i32::from(!signed));
            let width = 0.9 / f64::from(parts);
            let of = |part: u32| 10_f64.powi(i - EXPONENTS + 1) * (0.1 + width * (f64::from(part) + 0.5));
            values.extend((0..parts).map(of));
            if signed {
                values.extend((0..parts).map(|part| -of(part)));
            }
        }
        values.sort_by(f64::total_cmp);
        values.into_iter().map(|value| DType::F32.round(value)).collect()
    }

    /// The borders between the values of `map`: a value becomes the last code whose border, of those from code 1 on, it is above.
    fn borders(map: &[f64]) -> Vec<f64> {
        map.windows(2).map(|pair| DType::F32.round(0.5 * (pair[0] + pair[1]))).collect()
    }

    /// The borders between the values of [`AdamW8::map`] as a search tree of 256 nodes, in which 0 stands for nothing and 1 is the
    /// root. Of eight steps, each goes from node `i` to `2 i`, or to `2 i + 1` if the value is above the border of `i`; they end at
    /// 256 plus the code.
    pub fn border_tree(signed: bool) -> Vec<f64> {
        let borders = Self::borders(&Self::map(signed));
        let mut tree = vec![0.0];
        for level in 0..BLOCK.ilog2() {
            let stride = BLOCK >> level;
            tree.extend((stride / 2..BLOCK).step_by(stride).map(|code| borders[code - 1]));
        }
        tree
    }

    fn decoded(g: &mut Builder, map: &[f64], [codes, scale]: [Var; 2]) -> Result<Var> {
        let table = g.table(DType::F32, map)?;
        let indices = g.cast(codes, DType::I32)?;
        let values = g.gather(table, indices, 0)?;
        g.mul(values, scale)
    }

    /// The codes nearest to `x`, `[n, 256]`, and the scales.
    fn encoded(g: &mut Builder, map: &[f64], x: Var) -> Result<[Var; 2]> {
        let magnitude = g.abs(x)?;
        let scale = g.reduce_max(magnitude, 1)?;
        let least = g.constant(DType::F32, f64::from(f32::MIN_POSITIVE))?;
        let divisor = g.max(scale, least)?;
        let relative = g.div(x, divisor)?;
        // The first code whose upper border is not below the value, by bisection.
        let mut borders = Self::borders(map);
        borders.insert(0, -2.0);
        let borders = g.table(DType::F32, &borders)?;
        let zero = g.constant(DType::I32, 0.0)?;
        let mut code = g.broadcast(zero, g.ty(x)?.shape.clone())?;
        for bit in (0..8).rev() {
            let by = g.constant(DType::I32, f64::from(1 << bit))?;
            let next = g.add(code, by)?;
            let border = g.gather(borders, next, 0)?;
            let above = g.gt(relative, border)?;
            code = g.select(above, next, code)?;
        }
        Ok([g.cast(code, DType::U8)?, scale])
    }
}

impl Composite for AdamW8 {
    fn name(&self) -> &'static str {
        "adamw8"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [param, _, m, m_scale, v, v_scale, _, _] = inputs else {
            return Err(takes("param, grad, m, m_scale, v, v_scale, lr and step", inputs));
        };
        want_alike(&["param", "grad"], inputs)?;
        let blocks = Self::blocks(&param.shape)
            .ok_or_else(|| format!("param must have a multiple of {BLOCK} elements, got {param}"))?;
        for (name, codes, scale) in [("m", m, m_scale), ("v", v, v_scale)] {
            want(name, codes, DType::U8, Shape::new([blocks, BLOCK]))?;
            want(&format!("{name}_scale"), scale, DType::F32, Shape::new([blocks, 1]))?;
        }
        want_scalars(&["lr", "step"], &inputs[6..])?;
        Ok(vec![param.clone(), m.clone(), m_scale.clone(), v.clone(), v_scale.clone()])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [param, grad, m, m_scale, v, v_scale, lr, step] = inputs else {
            unreachable!("infer has counted the inputs")
        };
        let maps = [true, false].map(Self::map);
        let shape = g.ty(*param)?.shape.clone();
        let blocked = g.ty(*m)?.shape.clone();
        let flat = [g.reshape(*param, blocked.clone())?, g.reshape(*grad, blocked)?];
        let first = Self::decoded(g, &maps[0], [*m, *m_scale])?;
        let second = Self::decoded(g, &maps[1], [*v, *v_scale])?;
        let next = g.composite(self.adamw, &[flat[0], flat[1], first, second, *lr, *step])?;
        let mut outputs = vec![g.reshape(next[0], shape)?];
        for (map, moment) in maps.iter().zip(&next[1..]) {
            outputs.extend(Self::encoded(g, map, *moment)?);
        }
        Ok(outputs)
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let elements = inputs[0].shape.elements();
        // The step, and for each moment two lookups and eight comparisons.
        Cost { vector_flops: elements.clone() * 50, special_flops: elements * 3, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }

    fn shard(&self, _inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // Blocks lie across rows.
        Vec::new()
    }
}

pub(super) fn samples(rng: &mut Rng, _dtype: DType) -> Vec<Sample> {
    let adamw = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let cases: [(&[usize], f64); 3] = [(&[256], 1.0), (&[3, 512], 7.0), (&[16, 4, 32], 100.0)];
    let mut sample = |(shape, step): (&[usize], f64)| {
        let blocks = shape.iter().product::<usize>() / BLOCK;
        let mut sample = Sample::new(AdamW8 { adamw });
        sample = sample.input(rng.normal(DType::F32, shape)).input(rng.normal(DType::F32, shape));
        for scale in [0.1, 1e-3] {
            let scales = (0..blocks).map(|_| DType::F32.round(scale * (0.5 + rng.unit()))).collect();
            sample = sample.input(rng.integers(DType::U8, &[blocks, BLOCK], 0, 256));
            sample = sample.input(Tensor::float(DType::F32, &[blocks, 1], scales));
        }
        sample.input(sample_rate()).input(Tensor::float(DType::F32, &[], vec![step]))
    };
    cases.into_iter().map(&mut sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_have_a_value_for_each_code() {
        for (signed, zero) in [(true, AdamW8::ZERO[0]), (false, AdamW8::ZERO[1])] {
            let map = AdamW8::map(signed);
            assert_eq!((map.len(), map[usize::from(zero)], map[255]), (256, 0.0, 1.0));
            assert!(map.windows(2).all(|pair| pair[0] < pair[1]));
        }
        assert!((AdamW8::map(true)[0] + 0.992_968_75).abs() < 1e-7, "the middle of the last of 64 parts, negative");
    }

    #[test]
    fn the_tree_of_borders_leads_to_the_code() {
        for signed in [true, false] {
            let (map, tree) = (AdamW8::map(signed), AdamW8::border_tree(signed));
            assert_eq!(tree.len(), 256);
            let found = |x: f64| (0..8).fold(1, |node, _| 2 * node + usize::from(x > tree[node])) - 256;
            for (code, value) in map.iter().enumerate() {
                assert_eq!(found(*value), code);
            }
            for (code, border) in AdamW8::borders(&map).iter().enumerate() {
                assert_eq!([found(*border), found(border.next_up())], [code, code + 1]);
            }
            assert_eq!([found(-2.0), found(2.0), found(f64::NAN)], [0, 255, 0]);
        }
    }
}
