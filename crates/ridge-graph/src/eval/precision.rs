//! The precision of an evaluation.

/// How floats are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// In f64, and nothing is rounded to a dtype: casts between floats change the dtype alone.
    Exact,
    /// Each primitive's output is rounded to its dtype; sums (reductions, scans, matrix products, scattered adds,
    /// collectives) accumulate in f32, one after another: a plain implementation in the same precision.
    Rounded,
    /// As `Rounded`, but reductions and matrix products take their terms in another order, one for each number: other
    /// plain implementations, whose errors show how much of the first one's was luck. 0 is the order of `Rounded`. What has but one order differs
    /// in other ways: recurrences, of odd numbers, and matrix products, of all from 4 on, add products as they are, as fused multiply-adds do; and from 4 on,
    /// exponentials and the like are up to one and a half units in the last place of f32 off, as those of mathematical libraries are.
    Reordered(u32),
}

impl Precision {
    /// The order in which a sum takes `count` terms: for order `n`, in strides of some `n` times the golden section
    /// of the count, so that neighbours come far apart and no two orders are alike.
    pub(super) fn order(self, count: usize) -> impl Iterator<Item = usize> + Clone {
        let step = match self {
            Self::Exact | Self::Rounded | Self::Reordered(0) => 1,
            Self::Reordered(n) => {
                let near = (f64::from(n) * 0.618_033_988_749_895).fract() * count as f64;
                (near as usize + 1..).find(|step| gcd(*step, count) == 1).unwrap_or(1)
            }
        };
        (0..count).map(move |i| i * step % count)
    }

    /// Element `i` of a function that libraries do not round exactly, before it is rounded.
    pub(super) fn library_function(self, i: usize, exact: f64) -> f64 {
        const HALF_A_UNIT: f64 = 1.0 / (1 << 24) as f64;
        match self {
            Self::Reordered(n) if n >= 4 && i >> (n % 4) & 1 == 0 => exact * (1.0 + HALF_A_UNIT),
            Self::Reordered(n) if n >= 4 => exact * (1.0 - HALF_A_UNIT),
            Self::Exact | Self::Rounded | Self::Reordered(_) => exact,
        }
    }

    /// Do recurrences add products as they are?
    pub(super) fn fuses_recurrences(self) -> bool {
        matches!(self, Self::Reordered(n) if n % 2 == 1)
    }

    /// Do matrix products?
    pub(super) fn fuses_products(self) -> bool {
        matches!(self, Self::Reordered(n) if n >= 4)
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
