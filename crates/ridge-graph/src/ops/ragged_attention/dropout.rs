//! Dropout of the shares of attention (Srivastava et al. 2014, "Dropout: A Simple Way to Prevent Neural Networks from
//! Overfitting", section 4; as Vaswani et al. 2017 and GPT-2 have it behind the softmax).

use super::terms::{Extents, RaggedAttention};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::error::Result;
use crate::eval::philox4x32;
use crate::graph::{Builder, Var};
use crate::shape::Shape;
use crate::shard::Placement;

/// How shares are dropped: what of the attributes a kernel needs, and which shares go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShareDropout {
    /// A share is dropped if its 12 random bits are below this; 1 to 4095.
    pub threshold: u32,
    /// What the others are multiplied by: the inverse of the probability that they stay.
    pub scale: f64,
}

impl ShareDropout {
    /// The factor of the share of key token `place` in the softmax of token `query`, places in the step, in query head
    /// `head` of the whole model: 0 or [`ShareDropout::scale`]. See [`RaggedAttention::DROPOUT_STREAM`].
    #[inline]
    pub fn keeps(&self, key: i64, head: i64, query: u32, place: u32) -> bool {
        let index = place / 16 * 8 + place % 8;
        let counter = [index, query, head as u32, RaggedAttention::DROPOUT_STREAM];
        let word = philox4x32(counter, [key as u32, (key >> 32) as u32])[0];
        let bits = if place & 8 == 0 { word >> 20 } else { (word >> 8) & 0xfff };
        bits >= self.threshold
    }
}

impl RaggedAttention {
    /// The random stream that shares are dropped by. Keys `i` and `i + 8` of 16 have one number of
    /// [`random`](Builder::random), `random(key, head, query, place / 16 * 8 + place % 8)`: the first has its upper 12
    /// bits, the second its lower 12. A share is kept if its bits are [`ShareDropout::threshold`] or more.
    pub const DROPOUT_STREAM: u32 = 3;

    /// The rate is rounded to a multiple of the inverse of this, and shares that stay are scaled by what it is then.
    pub const DROPOUT_STEPS: u32 = 4096;

    /// How shares are dropped, if any are.
    pub fn share_dropout(&self) -> Option<ShareDropout> {
        let steps = f64::from(Self::DROPOUT_STEPS);
        let threshold = (self.dropout * steps).round().clamp(0.0, steps - 1.0);
        (threshold > 0.0).then(|| ShareDropout { threshold: threshold as u32, scale: steps / (steps - threshold) })
    }

    /// Are `key` and `heads` among the inputs?
    pub(super) fn drops(&self) -> bool {
        self.dropout != 0.0
    }

    /// Operations of a pair: half a Philox number of some 40, a comparison and a product.
    pub(super) fn dropout_flops(&self) -> i128 {
        if self.drops() { 22 } else { 0 }
    }

    /// Placements of key and heads where heads are divided.
    pub(super) fn random_placements(&self) -> impl Iterator<Item = Placement> {
        let both = self.drops().then_some([Placement::Replicate, Placement::shard(0)]);
        both.into_iter().flatten()
    }

    /// The factor of each share, f32 `[kv_heads, group, tokens, tokens]`, if shares are dropped. `random` is key and heads.
    pub(super) fn share_factors(&self, g: &mut Builder, e: &Extents, random: &[Var]) -> Result<Option<Var>> {
        let (Some(dropout), [key, heads]) = (self.share_dropout(), random) else { return Ok(None) };
        let one = Dim::from(1);
        let pairs = Shape::new([&e.heads, &e.group, &e.tokens, &e.tokens]);
        let int = |g: &mut Builder, value: u32| g.constant(DType::I64, f64::from(value));
        let (two, eight, sixteen) = (int(g, 2)?, int(g, 8)?, int(g, 16)?);
        let places = g.iota(Shape::new([&one, &one, &one, &e.tokens]), 3, DType::I64)?;
        let eighth = g.div(places, eight)?;
        let start = g.mul(eighth, eight)?;
        let within = g.sub(places, start)?;
        let block = g.div(places, sixteen)?;
        let first = g.mul(block, eight)?;
        let index = g.add(first, within)?;
        let even = g.mul(block, two)?;
        let is_upper = g.eq(eighth, even)?;

        let queries = g.iota(Shape::new([&one, &one, &e.tokens, &one]), 2, DType::I64)?;
        let heads = g.reshape(*heads, Shape::new([&e.heads, &e.group, &one, &one]))?;
        let whole = |g: &mut Builder, var: Var| g.broadcast(var, pairs.clone());
        let counter = [whole(g, *key)?, whole(g, heads)?, whole(g, queries)?, whole(g, index)?];
        let number = g.random(counter[0], counter[1], counter[2], counter[3], Self::DROPOUT_STREAM)?;
        // A multiple of 2^-24 below 1, so nothing is rounded.
        let scale = g.constant(DType::F32, f64::from(1u32 << 24))?;
        let number = g.mul(number, scale)?;
        let number = g.cast(number, DType::I64)?;
        let steps = int(g, Self::DROPOUT_STEPS)?;
        let upper = g.div(number, steps)?;
        let lower = g.mul(upper, steps)?;
        let lower = g.sub(number, lower)?;
        let is_upper = whole(g, is_upper)?;
        let bits = g.select(is_upper, upper, lower)?;
        let threshold = int(g, dropout.threshold)?;
        let keep = g.ge(bits, threshold)?;
        let scale = g.constant(DType::F32, dropout.scale)?;
        let zero = g.constant(DType::F32, 0.0)?;
        let scale = whole(g, scale)?;
        Ok(Some(g.select(keep, scale, zero)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dim::Sym;

    fn op(dropout: f64) -> RaggedAttention {
        RaggedAttention { dropout, ..RaggedAttention::causal(1.0, Sym::new("pairs")) }
    }

    #[test]
    fn as_many_shares_are_dropped_as_the_rate_says_and_two_of_one_number_are_independent() {
        for rate in [0.1, 0.2, 0.5] {
            let dropout = op(rate).share_dropout().expect("drops");
            let (mut kept, mut alike, mut of_mates) = (0, 0, 0);
            let queries = 0..256;
            for (query, place) in queries.flat_map(|query| (0..256).map(move |place| (query, place))) {
                let keeps = dropout.keeps(-7, 3, query, place);
                kept += u32::from(keeps);
                if place & 8 == 0 {
                    of_mates += 1;
                    alike += u32::from(keeps == dropout.keeps(-7, 3, query, place + 8));
                }
            }
            // Four standard deviations of as many draws.
            let near = |count: u32, of: f64, p: f64| {
                let off = (f64::from(count) - of * p).abs();
                assert!(off < 4.0 * (of * p * (1.0 - p)).sqrt(), "rate {rate}: {count} of {of}, not {p}");
            };
            near(kept, 65536.0, 1.0 - rate);
            near(alike, f64::from(of_mates), rate * rate + (1.0 - rate) * (1.0 - rate));
            assert!((dropout.scale * (1.0 - rate) - 1.0).abs() < 1e-3);
        }
        assert_eq!(op(1e-5).share_dropout(), None);
        assert_eq!(op(0.999_99).share_dropout().map(|d| d.threshold), Some(4095));
    }
}
