//! Q8_0: blocks of 32 along the innermost axis, each one f16 scale and 32 signed bytes (ggml's `block_q8_0`, with
//! codes and scales kept as two tensors). Value = scale * code; scale = largest magnitude / 127.

use half::f16;

use super::{Component, Format};
use crate::builder::Builder;
use crate::dtype::DType;
use crate::error::{Result, Why};
use crate::graph::Var;
use crate::types::{Shape, Type};

/// The Q8_0 format.
#[derive(Clone, Copy, Debug)]
pub struct Q8_0;

impl Q8_0 {
    /// Elements that share a scale.
    pub const BLOCK: usize = 32;

    fn scales_shape(shape: &Shape) -> Shape {
        let mut dims = shape.0.clone();
        if let Some(last) = dims.last_mut() {
            *last = last.div_exact(Self::BLOCK as i64).unwrap_or_else(|| last.clone());
        }
        Shape(dims)
    }
}

impl Format for Q8_0 {
    fn name(&self) -> &'static str {
        "q8_0"
    }

    fn granularity(&self, rank: usize) -> Vec<usize> {
        let mut multiples = vec![1; rank];
        if let Some(last) = multiples.last_mut() {
            *last = Self::BLOCK;
        }
        multiples
    }

    fn check(&self, shape: &Shape) -> Result<(), Why> {
        match shape.0.last() {
            Some(last) if last.div_exact(Self::BLOCK as i64).is_some() => Ok(()),
            _ => Err(format!(
                "q8_0 stores blocks of {} along the innermost axis, which {shape} does not divide into",
                Self::BLOCK
            )),
        }
    }

    fn components(&self, shape: &Shape) -> Vec<Component> {
        vec![
            Component { name: "codes", ty: Type::tensor(DType::I8, shape.clone()) },
            Component { name: "scales", ty: Type::tensor(DType::F16, Self::scales_shape(shape)) },
        ]
    }

    fn decode(&self, g: &mut Builder, components: &[Var], shape: &Shape) -> Result<Var> {
        let mut blocked = Self::scales_shape(shape).0;
        let mut per_block = blocked.clone();
        blocked.push(Self::BLOCK.into());
        per_block.push(1.into());
        let codes = g.cast(components[0], DType::F32)?;
        let codes = g.reshape(codes, Shape(blocked))?;
        let scales = g.cast(components[1], DType::F32)?;
        let scales = g.reshape(scales, Shape(per_block))?;
        let values = g.mul(codes, scales)?;
        g.reshape(values, shape.clone())
    }

    fn encode(&self, values: &[f32], _shape: &[usize]) -> Vec<Vec<u8>> {
        let mut codes = Vec::with_capacity(values.len());
        let mut scales = Vec::with_capacity(values.len() / Self::BLOCK * 2);
        for block in values.chunks(Self::BLOCK) {
            let largest = block.iter().fold(0f32, |m, v| m.max(v.abs()));
            let scale = largest / 127.0;
            let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            scales.extend(f16::from_f32(scale).to_le_bytes());
            codes.extend(block.iter().map(|v| (v * inverse).round() as i8 as u8));
        }
        vec![codes, scales]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_value_of_a_block_takes_code_127() {
        let mut values = vec![0.5f32; 32];
        values[7] = -2.0;
        let parts = Q8_0.encode(&values, &[32]);
        assert_eq!(parts[0][7] as i8, -127);
        assert_eq!(parts[0][0] as i8, 32);
        assert_eq!(f16::from_le_bytes([parts[1][0], parts[1][1]]), f16::from_f32(2.0 / 127.0));
    }

    #[test]
    fn a_ragged_row_is_refused() {
        assert!(Q8_0.check(&Shape::from([4usize, 33])).unwrap_err().contains("blocks of 32"));
        assert!(Q8_0.check(&Shape::from([4usize, 64])).is_ok());
    }
}
