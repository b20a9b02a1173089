//! Extents of tensors: constants, or linear expressions in symbols that a step binds to numbers.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Add, Mul, Sub};
use std::sync::Arc;

/// A symbol such as `tokens` or `seqs`, equal to every other symbol of its name.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sym(Arc<str>);

/// What names of [`Sym::of_taken_rows`] begin with.
const TAKEN: &str = "taken_";

impl Sym {
    /// The symbol called `name`.
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// The symbol that counts the same, such as (query, key) pairs or tokens read from a cache, for the rows alone that are taken
    /// of a step's tokens.
    #[must_use]
    pub fn of_taken_rows(&self) -> Self {
        Self::new(&format!("{TAKEN}{}", self.0))
    }

    /// What it counts for all tokens, if it is [`Sym::of_taken_rows`] of that.
    pub fn taken_of(&self) -> Option<Self> {
        self.0.strip_prefix(TAKEN).map(Self::new)
    }
}

impl fmt::Display for Sym {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Sym {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// An extent: `constant + sum of coefficient * symbol`. Terms are sorted by symbol and never zero, so that
/// equality of values is equality of expressions.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Dim {
    constant: i64,
    terms: Vec<(Sym, i64)>,
}

impl Dim {
    /// The extent of symbol `name`.
    pub fn sym(name: &str) -> Self {
        Self::from(Sym::new(name))
    }

    /// The number, if no symbol takes part.
    pub fn as_const(&self) -> Option<usize> {
        (self.terms.is_empty()).then(|| usize::try_from(self.constant).ok())?
    }

    /// The constant part and the `(symbol, coefficient)` terms.
    pub fn parts(&self) -> (i64, &[(Sym, i64)]) {
        (self.constant, &self.terms)
    }

    /// Is this the constant 1, the extent that broadcasting stretches?
    pub fn is_one(&self) -> bool {
        self.terms.is_empty() && self.constant == 1
    }

    /// This extent divided by `by`, if every coefficient divides.
    pub fn div_exact(&self, by: i64) -> Option<Self> {
        let divides = by != 0 && self.constant % by == 0 && self.terms.iter().all(|(_, c)| c % by == 0);
        divides.then(|| Self {
            constant: self.constant / by,
            terms: self.terms.iter().map(|(s, c)| (s.clone(), c / by)).collect(),
        })
    }

    /// The product of two extents, if one of them is a number.
    pub fn times(&self, other: &Self) -> Option<Self> {
        match (self.as_const(), other.as_const()) {
            (Some(n), _) => Some(other.clone() * n as i64),
            (_, Some(n)) => Some(self.clone() * n as i64),
            _ => None,
        }
    }

    /// The number under `bindings`.
    ///
    /// # Errors
    /// Names the symbol that is not bound, or the expression that came out negative.
    pub fn eval(&self, bindings: &Bindings) -> Result<usize, UnboundSymbol> {
        let mut total = self.constant;
        for (sym, coefficient) in &self.terms {
            let value = bindings.get(sym).ok_or_else(|| UnboundSymbol::Unbound(sym.clone()))?;
            let term = i64::try_from(value).ok().and_then(|v| v.checked_mul(*coefficient));
            total = term
                .and_then(|t| total.checked_add(t))
                .ok_or_else(|| UnboundSymbol::TooLarge(self.to_string(), sym.clone(), value))?;
        }
        usize::try_from(total).map_err(|_| UnboundSymbol::Negative(self.to_string(), total))
    }

    fn combine(&self, other: &Self, sign: i64) -> Self {
        let mut terms: BTreeMap<Sym, i64> = self.terms.iter().cloned().collect();
        for (sym, c) in &other.terms {
            *terms.entry(sym.clone()).or_insert(0) += sign * c;
        }
        Self {
            constant: self.constant + sign * other.constant,
            terms: terms.into_iter().filter(|(_, c)| *c != 0).collect(),
        }
    }
}

/// Why an extent has no number.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnboundSymbol {
    /// A symbol that the step does not bind.
    #[error("symbol `{0}` is not bound; give it a value in the step's bindings")]
    Unbound(Sym),
    /// An expression beyond what an extent can be.
    #[error("extent `{0}` is too large with `{1}` = {2}; check the step's bindings")]
    TooLarge(String, Sym, usize),
    /// An expression below zero.
    #[error("extent `{0}` is {1}, which is negative; check the step's bindings")]
    Negative(String, i64),
}

impl From<usize> for Dim {
    fn from(constant: usize) -> Self {
        Self { constant: constant as i64, terms: Vec::new() }
    }
}

impl From<Sym> for Dim {
    fn from(sym: Sym) -> Self {
        Self { constant: 0, terms: vec![(sym, 1)] }
    }
}

impl From<&Self> for Dim {
    fn from(dim: &Self) -> Self {
        dim.clone()
    }
}

impl Add<&Dim> for &Dim {
    type Output = Dim;
    fn add(self, other: &Dim) -> Dim {
        self.combine(other, 1)
    }
}

impl Sub<&Dim> for &Dim {
    type Output = Dim;
    fn sub(self, other: &Dim) -> Dim {
        self.combine(other, -1)
    }
}

impl Add<i64> for Dim {
    type Output = Self;
    fn add(mut self, other: i64) -> Self {
        self.constant += other;
        self
    }
}

impl Mul<i64> for Dim {
    type Output = Self;
    fn mul(mut self, by: i64) -> Self {
        self.constant *= by;
        self.terms.iter_mut().for_each(|(_, c)| *c *= by);
        self.terms.retain(|(_, c)| *c != 0);
        self
    }
}

impl fmt::Debug for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The numbers of a step's symbols: the key of a compiled bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bindings(Vec<(Sym, usize)>);

impl Bindings {
    /// No symbol bound.
    pub fn new() -> Self {
        Self::default()
    }

    /// These bindings with `name` bound to `value`, in place of what it was bound to.
    #[must_use]
    pub fn with(mut self, name: &str, value: usize) -> Self {
        let sym = Sym::new(name);
        match self.0.binary_search_by(|(s, _)| s.cmp(&sym)) {
            Ok(i) => self.0[i].1 = value,
            Err(i) => self.0.insert(i, (sym, value)),
        }
        self
    }

    /// The number of `sym`.
    pub fn get(&self, sym: &Sym) -> Option<usize> {
        self.0.iter().find(|(s, _)| s == sym).map(|(_, v)| *v)
    }

    /// Every binding, sorted by symbol.
    pub fn iter(&self) -> impl Iterator<Item = (&Sym, usize)> {
        self.0.iter().map(|(s, v)| (s, *v))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_equal_expressions() {
        let t = Dim::sym("tokens");
        let s = Dim::sym("seqs");
        assert_eq!(&(&t + &s) - &t, s);
        assert_eq!((t.clone() * 2).div_exact(2), Some(t.clone()));
        assert_eq!((t.clone() * 2 + 1).div_exact(2), None);
        assert_eq!((t * 2 + 1).to_string(), "2*tokens + 1");
    }

    #[test]
    fn an_unbound_symbol_is_named() {
        let error = (Dim::sym("tokens") + 1).eval(&Bindings::new()).unwrap_err();
        assert_eq!(error, UnboundSymbol::Unbound(Sym::new("tokens")));
        assert_eq!((Dim::sym("tokens") + 1).eval(&Bindings::new().with("tokens", 4)), Ok(5));
    }
}
