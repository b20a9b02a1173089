//! Polynomials in symbols with integer coefficients: element counts and costs, exact for any binding.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Add, AddAssign, Mul};

use crate::dim::{Bindings, Dim, Sym, UnboundSymbol};

/// A sum of `coefficient * product of symbols`. Zero coefficients are never kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Poly(BTreeMap<Vec<Sym>, i128>);

impl Poly {
    /// The constant 0.
    pub fn zero() -> Self {
        Self::default()
    }

    /// The product of `dims`; 1 for none.
    pub fn product<'a>(dims: impl IntoIterator<Item = &'a Dim>) -> Self {
        dims.into_iter().fold(Self::from(1), |acc, d| &acc * &Self::from(d))
    }

    /// The number, if no symbol takes part.
    pub fn as_const(&self) -> Option<i128> {
        match self.0.len() {
            0 => Some(0),
            1 => self.0.get(&Vec::new()).copied(),
            _ => None,
        }
    }

    /// Every symbol that takes part, repeated where it stands in several terms.
    pub fn symbols(&self) -> impl Iterator<Item = &Sym> {
        self.0.keys().flatten()
    }

    /// The number under `bindings`.
    ///
    /// # Errors
    /// Names the symbol that is not bound.
    pub fn eval(&self, bindings: &Bindings) -> Result<i128, UnboundSymbol> {
        self.0.iter().try_fold(0, |total, (syms, coefficient)| {
            let mut term = *coefficient;
            for s in syms {
                term *= bindings.get(s).ok_or_else(|| UnboundSymbol::Unbound(s.clone()))? as i128;
            }
            Ok(total + term)
        })
    }

    /// Every coefficient divided by `by`, rounded down.
    #[must_use]
    pub fn div_floor(self, by: i128) -> Self {
        let mut out = Self::zero();
        for (syms, c) in self.0 {
            out.add_term(syms, c.div_euclid(by));
        }
        out
    }

    fn add_term(&mut self, syms: Vec<Sym>, coefficient: i128) {
        let sum = self.0.get(&syms).copied().unwrap_or(0) + coefficient;
        if sum == 0 {
            self.0.remove(&syms);
        } else {
            self.0.insert(syms, sum);
        }
    }
}

impl From<i128> for Poly {
    fn from(constant: i128) -> Self {
        let mut p = Self::zero();
        p.add_term(Vec::new(), constant);
        p
    }
}

impl From<&Dim> for Poly {
    fn from(dim: &Dim) -> Self {
        let (constant, terms) = dim.parts();
        let mut p = Self::from(i128::from(constant));
        for (sym, c) in terms {
            p.add_term(vec![sym.clone()], i128::from(*c));
        }
        p
    }
}

impl AddAssign<&Self> for Poly {
    fn add_assign(&mut self, other: &Self) {
        for (syms, c) in &other.0 {
            self.add_term(syms.clone(), *c);
        }
    }
}

impl Add<&Self> for Poly {
    type Output = Self;
    fn add(mut self, other: &Self) -> Self {
        self += other;
        self
    }
}

impl Mul<&Poly> for &Poly {
    type Output = Poly;
    fn mul(self, other: &Poly) -> Poly {
        let mut out = Poly::zero();
        for (a, ca) in &self.0 {
            for (b, cb) in &other.0 {
                let mut syms = [a.as_slice(), b.as_slice()].concat();
                syms.sort();
                out.add_term(syms, ca * cb);
            }
        }
        out
    }
}

impl Mul<i128> for Poly {
    type Output = Self;
    fn mul(self, by: i128) -> Self {
        &self * &Self::from(by)
    }
}

/// An extent is shown as the polynomial of degree 1 that it is.
impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Poly::from(self), f)
    }
}

impl fmt::Display for Poly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("0");
        }
        // Symbols first, the constant last, as one writes it by hand.
        for (i, (syms, c)) in self.0.iter().rev().enumerate() {
            if i > 0 {
                f.write_str(if *c < 0 { " - " } else { " + " })?;
            } else if *c < 0 {
                f.write_str("-")?;
            }
            let names: Vec<&str> = syms.iter().map(Sym::name).collect();
            match (c.unsigned_abs(), names.is_empty()) {
                (n, true) => write!(f, "{n}")?,
                (1, false) => f.write_str(&names.join("*"))?,
                (n, false) => write!(f, "{n}*{}", names.join("*"))?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_extents_expand_and_evaluate() {
        let t = Dim::sym("t");
        let p = Poly::product(&[t.clone() + 1, t + 2]);
        assert_eq!(p.to_string(), "t*t + 3*t + 2");
        assert_eq!(p.eval(&Bindings::new().with("t", 10)), Ok(132));
        assert_eq!((p.clone() + &(p * -1)).as_const(), Some(0));
    }
}
