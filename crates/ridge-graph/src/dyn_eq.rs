//! Equality and hashes of values behind trait objects, such as ops and storage formats.

use std::any::Any;
use std::hash::{Hash, Hasher};

/// Equality with a value of any type. Every `PartialEq` type has it: values are equal when they are of one type and
/// equal by its `PartialEq`, so two types are never confused, whatever their `Debug` texts are.
pub trait DynEq: Any {
    /// Whether `other` is of the same type and equal.
    fn dyn_eq(&self, other: &dyn Any) -> bool;
}

impl<T: Any + PartialEq> DynEq for T {
    fn dyn_eq(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<T>().is_some_and(|other| self == other)
    }
}

/// A hash that agrees with [`DynEq`]. Every `Hash` type has it.
pub trait DynHash: Any {
    /// Hashes the type and the value.
    fn dyn_hash(&self, state: &mut dyn Hasher);
}

impl<T: Any + Hash> DynHash for T {
    fn dyn_hash(&self, mut state: &mut dyn Hasher) {
        self.type_id().hash(&mut state);
        self.hash(&mut state);
    }
}

/// Equality of an op's attribute. Floats are compared by bits, so that NaN equals itself and 0.0 differs from -0.0, as
/// their texts do.
pub(crate) trait EqByBits {
    /// Whether both are the same attribute.
    fn eq_by_bits(&self, other: &Self) -> bool;
}

impl EqByBits for f64 {
    fn eq_by_bits(&self, other: &Self) -> bool {
        self.to_bits() == other.to_bits()
    }
}

impl<T: EqByBits> EqByBits for Option<T> {
    fn eq_by_bits(&self, other: &Self) -> bool {
        match (self, other) {
            (Some(a), Some(b)) => a.eq_by_bits(b),
            (a, b) => a.is_none() && b.is_none(),
        }
    }
}

impl<T: EqByBits> EqByBits for [T] {
    fn eq_by_bits(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().zip(other).all(|(a, b)| a.eq_by_bits(b))
    }
}

impl<T: EqByBits + ?Sized> EqByBits for std::sync::Arc<T> {
    fn eq_by_bits(&self, other: &Self) -> bool {
        (**self).eq_by_bits(other)
    }
}

/// Implements `PartialEq` for an op with float attributes, `by_bits` for those and by `==` for the rest. Every field must
/// be named.
macro_rules! eq_by_bits {
    ($op:ty { $($float:ident),+ $(; $($other:ident),+)? }) => {
        impl PartialEq for $op {
            fn eq(&self, other: &Self) -> bool {
                let Self { $($float,)+ $($($other,)+)? } = self;
                $($crate::dyn_eq::EqByBits::eq_by_bits($float, &other.$float))&&+ $($(&& *$other == other.$other)+)?
            }
        }
    };
}
pub(crate) use eq_by_bits;

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(PartialEq)]
    struct Narrow(u8);
    #[derive(PartialEq)]
    struct Wide(u8);
    struct Scaled {
        scale: f64,
        heads: usize,
    }
    eq_by_bits!(Scaled { scale; heads });

    #[test]
    fn values_of_two_types_are_never_equal() {
        assert!(Narrow(1).dyn_eq(&Narrow(1)));
        assert!(!Narrow(1).dyn_eq(&Narrow(2)));
        assert!(!Narrow(1).dyn_eq(&Wide(1)));
    }

    #[test]
    fn floats_are_compared_by_bits() {
        let of = |scale, heads| Scaled { scale, heads };
        assert!(of(f64::NAN, 1) == of(f64::NAN, 1));
        assert!(of(0.0, 1) != of(-0.0, 1));
        assert!(of(1.0, 1) != of(1.0, 2));
    }
}
