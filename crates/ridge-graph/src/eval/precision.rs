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
    /// plain implementations, whose errors show how much of the first one's was luck. 0 is the order of `Rounded`.
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
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
