//! What of communication is hidden behind compute: gradients in buckets, each sent when it is computed.

use serde::Serialize;

/// One bucket of a backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GradientBucket {
    /// Seconds at which its gradients are there.
    pub ready: f64,
    /// Seconds at which its communication begins.
    pub start: f64,
    /// Seconds at which it ends.
    pub end: f64,
}

/// A backward pass and its communication.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Overlap {
    /// The buckets, first computed first.
    pub buckets: Vec<GradientBucket>,
    /// Seconds of communication behind the end of compute: what is on the critical path.
    pub exposed: f64,
    /// Seconds of communication beside compute.
    pub hidden: f64,
}

/// `compute` seconds that yield `buckets` of equal size evenly, each of which takes `each` seconds to communicate, one
/// after another. Exposed is `max(each, buckets each - (buckets - 1) / buckets compute)`.
pub fn overlap(compute: f64, buckets: usize, each: f64) -> Overlap {
    let n = buckets.max(1);
    let mut free = 0.0f64;
    let bucket = |i: usize| {
        let ready = compute * (i + 1) as f64 / n as f64;
        let start = free.max(ready);
        free = start + each;
        GradientBucket { ready, start, end: free }
    };
    let buckets: Vec<GradientBucket> = (0..n).map(bucket).collect();
    let exposed = (free - compute).max(0.0);
    Overlap { buckets, exposed, hidden: (n as f64 * each - exposed).min(compute).max(0.0) }
}

/// Seconds of [`overlap`] on the critical path: `max(each, buckets each - (buckets - 1) / buckets compute)`.
pub fn exposed(compute: f64, buckets: usize, each: f64) -> f64 {
    let n = buckets.max(1) as f64;
    each.max(n * each - (n - 1.0) / n * compute)
}
