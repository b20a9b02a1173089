//! Element types: how a number is stored and rounded. Block-quantised storage is not here: that is a
//! [`Format`](crate::Format) of a parameter, see `format.rs`.

use std::fmt;

use half::{bf16, f16};

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16: 8 exponent bits, 7 mantissa bits.
    BF16,
    /// IEEE 754 binary16.
    F16,
    /// OCP 8-bit float E4M3 ("fn": no infinities, one NaN pattern, largest value 448).
    F8E4M3,
    /// OCP 8-bit float E5M2 (IEEE-like, largest finite value 57344).
    F8E5M2,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// Truth value, stored as one byte 0 or 1.
    Bool,
}

impl DType {
    /// Every element type, in declaration order.
    pub const ALL: [Self; 10] = [
        Self::F32,
        Self::BF16,
        Self::F16,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::I8,
        Self::U8,
        Self::I32,
        Self::I64,
        Self::Bool,
    ];

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F8E4M3 | Self::F8E5M2 | Self::I8 | Self::U8 | Self::Bool => 1,
            Self::BF16 | Self::F16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// The name used in the text form, in errors and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::BF16 => "bf16",
            Self::F16 => "f16",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::Bool => "bool",
        }
    }

    /// The element type called `name`, as [`DType::name`] writes it.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|d| d.name() == name)
    }

    /// Is this a floating-point type?
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::BF16 | Self::F16 | Self::F8E4M3 | Self::F8E5M2)
    }

    /// Is this an integer type? `Bool` is not.
    pub const fn is_int(self) -> bool {
        matches!(self, Self::I8 | Self::U8 | Self::I32 | Self::I64)
    }

    /// The unit roundoff of a float type: half the gap between 1 and the next number. 0 for others.
    pub fn unit_roundoff(self) -> f64 {
        match self {
            Self::F32 => 2f64.powi(-24),
            Self::BF16 => 2f64.powi(-8),
            Self::F16 => 2f64.powi(-11),
            Self::F8E4M3 => 2f64.powi(-4),
            Self::F8E5M2 => 2f64.powi(-3),
            Self::I8 | Self::U8 | Self::I32 | Self::I64 | Self::Bool => 0.0,
        }
    }

    /// The smallest positive number of full precision of a float type. Subnormal ones below it are as far apart as
    /// those just above it. 0 for others.
    pub fn smallest_normal(self) -> f64 {
        match self {
            Self::F32 | Self::BF16 => 2f64.powi(-126),
            Self::F16 | Self::F8E5M2 => 2f64.powi(-14),
            Self::F8E4M3 => 2f64.powi(-6),
            Self::I8 | Self::U8 | Self::I32 | Self::I64 | Self::Bool => 0.0,
        }
    }

    /// `value` rounded to this type, to nearest with ties to even. Values beyond the largest finite number
    /// become infinite where the type has infinities and NaN in `F8E4M3`. Integers saturate and drop fractions.
    pub fn round(self, value: f64) -> f64 {
        match self {
            Self::F32 => f64::from(value as f32),
            Self::BF16 => bf16::from_f32(to_odd(value)).to_f64(),
            Self::F16 => f16::from_f32(to_odd(value)).to_f64(),
            Self::F8E4M3 => f8e4m3_to_f64(f64_to_f8e4m3(value)),
            Self::F8E5M2 => f8e5m2_to_f64(f64_to_f8e5m2(value)),
            Self::I8 => f64::from(value as i8),
            Self::U8 => f64::from(value as u8),
            Self::I32 => f64::from(value as i32),
            Self::I64 => (value as i64) as f64,
            Self::Bool => f64::from(u8::from(value != 0.0)),
        }
    }

    /// Decodes little-endian `bytes` into f64 values. Trailing bytes that make no whole element are left out.
    pub fn decode(self, bytes: &[u8]) -> Vec<f64> {
        fn map<const N: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            bytes.as_chunks::<N>().0.iter().map(|c| f(*c)).collect()
        }
        match self {
            Self::F32 => map(bytes, |c| f64::from(f32::from_le_bytes(c))),
            Self::BF16 => map(bytes, |c| bf16::from_le_bytes(c).to_f64()),
            Self::F16 => map(bytes, |c| f16::from_le_bytes(c).to_f64()),
            Self::F8E4M3 => map(bytes, |[b]| f8e4m3_to_f64(b)),
            Self::F8E5M2 => map(bytes, |[b]| f8e5m2_to_f64(b)),
            Self::I8 => map(bytes, |c| f64::from(i8::from_le_bytes(c))),
            Self::U8 | Self::Bool => map(bytes, |[b]| f64::from(b)),
            Self::I32 => map(bytes, |c| f64::from(i32::from_le_bytes(c))),
            Self::I64 => map(bytes, |c| i64::from_le_bytes(c) as f64),
        }
    }

    /// Encodes values as little-endian bytes of this type, rounding as [`DType::round`] does.
    pub fn encode(self, values: impl IntoIterator<Item = f64>) -> Vec<u8> {
        let mut out = Vec::new();
        for v in values {
            match self {
                Self::F32 => out.extend((v as f32).to_le_bytes()),
                Self::BF16 => out.extend(bf16::from_f32(to_odd(v)).to_le_bytes()),
                Self::F16 => out.extend(f16::from_f32(to_odd(v)).to_le_bytes()),
                Self::F8E4M3 => out.push(f64_to_f8e4m3(v)),
                Self::F8E5M2 => out.push(f64_to_f8e5m2(v)),
                Self::I8 => out.extend((v as i8).to_le_bytes()),
                Self::U8 => out.push(v as u8),
                Self::I32 => out.extend((v as i32).to_le_bytes()),
                Self::I64 => out.extend((v as i64).to_le_bytes()),
                Self::Bool => out.push(u8::from(v != 0.0)),
            }
        }
        out
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `value` as an f32 that a narrower type rounds as it would round `value` itself: truncated, with the last bit set
/// where something was cut off (rounding to odd; Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded
/// sums: proved algorithms using rounding to odd"). `half` looks at the upper half of an f64 alone.
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) == value || !near.is_finite() {
        return near;
    }
    let beyond = f64::from(near).abs() > value.abs();
    f32::from_bits((near.to_bits() - u32::from(beyond)) | 1)
}

/// Decodes an OCP E4M3 byte (OCP 8-bit Floating Point Specification, revision 1.0, section 5).
pub fn f8e4m3_to_f64(byte: u8) -> f64 {
    if byte & 0x7f == 0x7f {
        return f64::NAN;
    }
    small_float(byte, 3, 7)
}

/// Decodes an OCP E5M2 byte (the same specification).
pub fn f8e5m2_to_f64(byte: u8) -> f64 {
    if byte & 0x7c == 0x7c {
        let magnitude = if byte & 3 == 0 { f64::INFINITY } else { f64::NAN };
        return if byte & 0x80 == 0 { magnitude } else { -magnitude };
    }
    small_float(byte, 2, 15)
}

fn small_float(byte: u8, mantissa_bits: u32, bias: i32) -> f64 {
    let scale = f64::from(1u32 << mantissa_bits);
    let mantissa = f64::from(byte & ((1 << mantissa_bits) - 1)) / scale;
    let exponent = i32::from((byte & 0x7f) >> mantissa_bits);
    let magnitude =
        if exponent == 0 { mantissa * 2f64.powi(1 - bias) } else { (1.0 + mantissa) * 2f64.powi(exponent - bias) };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Encodes to OCP E4M3, to nearest with ties to even; what rounds beyond 448 becomes NaN.
pub fn f64_to_f8e4m3(value: f64) -> u8 {
    encode_small(value, 3, 7, 0x7e, 0x7f, 0x7f)
}

/// Encodes to OCP E5M2, to nearest with ties to even; what rounds beyond 57344 becomes infinite.
pub fn f64_to_f8e5m2(value: f64) -> u8 {
    encode_small(value, 2, 15, 0x7b, 0x7c, 0x7e)
}

fn encode_small(value: f64, mantissa_bits: i32, bias: i32, largest: u8, overflow: u8, nan: u8) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return nan | sign;
    }
    let magnitude = value.abs();
    // The exponent of the binade, held at the smallest normal one so that subnormals share its quantum.
    let exponent =
        if magnitude == 0.0 { 1 - bias } else { (((magnitude.to_bits() >> 52) as i32) - 1023).clamp(1 - bias, 64) };
    let quanta = (magnitude / 2f64.powi(exponent - mantissa_bits)).round_ties_even();
    // `quanta` counts steps of the binade; adding the exponent field's offset carries into it when it rounds up.
    let code = quanta + f64::from((exponent - (1 - bias)) << mantissa_bits);
    if code > f64::from(largest) { overflow | sign } else { code as u8 | sign }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_8_bit_float_survives_a_round_trip() {
        for byte in 0..=255u8 {
            let value = f8e4m3_to_f64(byte);
            if !value.is_nan() {
                assert_eq!(f64_to_f8e4m3(value), byte, "e4m3 {value}");
            }
            let value = f8e5m2_to_f64(byte);
            if !value.is_nan() {
                assert_eq!(f64_to_f8e5m2(value), byte, "e5m2 {value}");
            }
        }
    }

    #[test]
    fn rounding_to_8_bits_goes_to_the_nearest_and_ties_to_even() {
        for (dtype, decode) in [(DType::F8E4M3, f8e4m3_to_f64 as fn(u8) -> f64), (DType::F8E5M2, f8e5m2_to_f64)] {
            let mut all: Vec<(f64, u8)> = (0..0x7f).map(|b| (decode(b), b)).collect();
            all.retain(|(v, _)| v.is_finite());
            for pair in all.windows(2) {
                let ((lo, lo_code), (hi, _)) = (pair[0], pair[1]);
                let middle = f64::midpoint(lo, hi);
                let even = if lo_code % 2 == 0 { lo } else { hi };
                assert_eq!(dtype.round(middle), even);
                assert_eq!(dtype.round(middle * (1.0 - 1e-12)), lo);
                assert_eq!(dtype.round(-middle * (1.0 + 1e-12)), -hi);
            }
        }
        assert_eq!(DType::F8E4M3.round(448.0), 448.0);
        assert!(DType::F8E4M3.round(480.1).is_nan());
        assert_eq!(DType::F8E5M2.round(1e9), f64::INFINITY);
    }

    #[test]
    fn rounding_to_16_bits_goes_to_the_nearest_however_little_beyond_the_middle() {
        for (dtype, decode) in [
            (DType::BF16, (|b| bf16::from_bits(b).to_f64()) as fn(u16) -> f64),
            (DType::F16, |b| f16::from_bits(b).to_f64()),
        ] {
            for code in 0..0x7fff {
                let (low, high) = (decode(code), decode(code + 1));
                if !high.is_finite() {
                    break;
                }
                let middle = f64::midpoint(low, high);
                assert_eq!(dtype.round(middle), if code % 2 == 0 { low } else { high });
                for tiny in [1e-15, 1e-9, 1e-7, 1e-4] {
                    assert_eq!(dtype.round(middle * (1.0 - tiny)), low, "{dtype} {middle}");
                    assert_eq!(dtype.round(-middle * (1.0 + tiny)), -high, "{dtype} {middle}");
                }
            }
        }
    }

    #[test]
    fn encoding_then_decoding_rounds_once() {
        for dtype in DType::ALL {
            let values = [0.0, 1.0, 3.3, 17.5, 100.0];
            let back = dtype.decode(&dtype.encode(values));
            let want: Vec<f64> = values.iter().map(|v| dtype.round(*v)).collect();
            assert_eq!(back, want, "{dtype}");
        }
    }
}
