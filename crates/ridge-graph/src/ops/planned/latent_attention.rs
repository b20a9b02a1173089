//! Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1), with the indexer of DeepSeek-V3.2
//! (2025, "DeepSeek-V3.2", section 2.1) where there is one.

use super::refusal::planned_only;
use crate::cost::Cost;
use crate::dim::{Dim, Sym};
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::ops::require::{takes, want_floats, want_weight};
use crate::poly::Poly;
use crate::shape::Shape;
use crate::shard::{Placement, ShardingRule};
use crate::types::Type;
use crate::why::Why;
use crate::work::{AttentionWork, Work};

/// Adds a step's latents to a paged cache and attends to it.
///
/// `q`: `[tokens, heads, nope + rope]`; `latent`: `[tokens, rank + rope (+ index dim)]`; `w`: `[heads * (nope + value),
/// rank]`, from a latent to keys and values; `cache`: the state `[blocks, block_size, rank + rope (+ index dim)]`, one
/// row a token for all heads; with an indexer of its own `index_q`: `[tokens, index heads * index dim]` and `index_w`:
/// `[tokens, index heads]`. Gives `[tokens, heads * value]` and the cache.
///
/// The cost is that of the absorbed form (section 2.1.2 of the V2 report): queries are taken to latent space and the
/// cache is read as it is, so each pair takes `2 (2 rank + rope)` FLOPs a head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatentAttention {
    /// Elements of a head's query that are not rotated.
    pub nope: usize,
    /// Elements that are.
    pub rope: usize,
    /// Elements of a head's value.
    pub value: usize,
    /// (query, key) pairs that are attended to, for the cost alone.
    pub pairs: Sym,
    /// Tokens read from the cache, for the cost alone.
    pub cached: Sym,
    /// What chooses the pairs.
    pub indexer: Option<Indexer>,
}

/// Scores all pairs cheaply, so that attention takes the best alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Indexer {
    /// Its heads.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
    /// Keys that a query attends to.
    pub best: usize,
    /// Is it that of an earlier layer? Then it costs nothing here.
    pub shared: bool,
    /// All pairs, for the cost alone.
    pub pairs: Sym,
    /// All tokens of the cache, for the cost alone.
    pub cached: Sym,
}

impl LatentAttention {
    /// The indexer, if it is this layer's.
    fn own_indexer(&self) -> Option<&Indexer> {
        self.indexer.as_ref().filter(|index| !index.shared)
    }

    fn index_dim(&self) -> usize {
        self.own_indexer().map_or(0, |index| index.dim)
    }
}

impl Composite for LatentAttention {
    fn name(&self) -> &'static str {
        "latent_attention"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let wanted = if self.own_indexer().is_some() { 6 } else { 4 };
        if inputs.len() != wanted {
            return Err(takes("q, latent, w, cache, and index_q and index_w with an indexer", inputs));
        }
        let (q, latent, w, cache) = (&inputs[0], &inputs[1], &inputs[2], &inputs[3]);
        want_floats("q", q, 3, "[tokens, heads, dim]")?;
        want_floats("latent", latent, 2, "[tokens, rank + rope]")?;
        want_weight("w", w, 2, "[heads * (nope + value), rank]")?;
        let (Some(heads), Some(dim), Some(rank)) =
            (q.shape.0[1].as_const(), q.shape.last().as_const(), w.shape.last().as_const())
        else {
            return Err("heads, dim and rank must be numbers".into());
        };
        if dim != self.nope + self.rope {
            return Err(format!("q must have heads of {} elements, got {q}", self.nope + self.rope));
        }
        if w.shape.0[0] != Dim::from(heads * (self.nope + self.value)) {
            return Err(format!("w must have {} rows, got {w}", heads * (self.nope + self.value)));
        }
        let width = rank + self.rope + self.index_dim();
        if latent.shape.last() != Dim::from(width) {
            return Err(format!("latent must be {width} wide, got {latent}"));
        }
        if !cache.state || cache.shape.rank() != 3 || cache.shape.last() != Dim::from(width) {
            return Err(format!("cache must be a state [blocks, block_size, {width}], got {cache}"));
        }
        if let Some(index) = self.own_indexer() {
            want_floats("index_q", &inputs[4], 2, "[tokens, index heads * index dim]")?;
            want_floats("index_w", &inputs[5], 2, "[tokens, index heads]")?;
            let wanted = [index.heads * index.dim, index.heads];
            if (4..6).any(|i| inputs[i].shape.last() != Dim::from(wanted[i - 4])) {
                return Err(format!(
                    "index_q and index_w must be {wanted:?} wide, got {} and {}",
                    inputs[4], inputs[5]
                ));
            }
        }
        let out = q.with_shape(Shape(vec![q.shape.0[0].clone(), (heads * self.value).into()]));
        Ok(vec![out, cache.clone()])
    }

    fn decompose(&self, g: &mut Builder, _inputs: &[Var]) -> Result<Vec<Var>> {
        planned_only(g, self.name())
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        let (q, latent, w, cache) = (&inputs[0], &inputs[1], &inputs[2], &inputs[3]);
        let symbol = |s: &Sym| Poly::from(&Dim::from(s.clone()));
        let heads = Poly::from(&q.shape.0[1]);
        let rank = w.shape.last().as_const().unwrap_or_default();
        let scores = &heads * &symbol(&self.pairs);
        let bytes = cache.dtype.size_bytes();
        // A cache of codes has a scale for each row, and for each indexer's key.
        let scale = if bytes == 1 { DType::F32.size_bytes() } else { 0 };
        let row = Poly::from((bytes * (rank + self.rope) + scale) as i128);
        // Queries into latent space and results out of it: the weight once for each token.
        let absorbed = &(&Poly::from(&q.shape.0[0]) * &w.shape.elements()) * &Poly::from(2);
        let mut cost = Cost {
            matrix_flops: scores.clone() * (2 * (2 * rank + self.rope) as i128) + &absorbed,
            vector_flops: scores.clone() * 4,
            special_flops: scores,
            bytes_read: q.bytes() + &latent.bytes() + &w.bytes() + &(&row * &symbol(&self.cached)),
            bytes_written: outputs[0].bytes() + &(latent.shape.elements() * bytes as i128),
            ..Cost::default()
        };
        if let Some(index) = self.own_indexer() {
            let scores = symbol(&index.pairs) * index.heads as i128;
            cost.matrix_flops += &(scores.clone() * (2 * index.dim as i128));
            cost.vector_flops += &(scores * 2);
            cost.bytes_read += &(symbol(&index.cached) * (index.dim * bytes + scale) as i128);
        }
        cost
    }

    fn work(&self) -> Work {
        let (indexer, index) = (self.indexer.as_ref(), self.own_indexer());
        Work::Attention(AttentionWork {
            pairs: [&self.pairs].into_iter().chain(index.map(|index| &index.pairs)).cloned().collect(),
            cached: [&self.cached].into_iter().chain(index.map(|index| &index.cached)).cloned().collect(),
            // Scores of all pairs and attention to the best: the window bounds the larger part.
            window: indexer.map(|index| index.best),
            weight: Some(2),
            expanded_pair: indexer.is_none().then_some(2 * (self.nope + self.rope + self.value)),
        })
    }

    fn shard(&self, inputs: &[Type], _outputs: &[Type]) -> Vec<ShardingRule> {
        // By heads; latents and their cache are of all heads.
        let (whole, cut) = (Placement::Replicate, Placement::shard);
        let mut places = vec![whole; inputs.len()];
        (places[0], places[2]) = (cut(1), Placement::Shard { dim: 0, multiple: self.nope + self.value });
        vec![ShardingRule { inputs: places, outputs: vec![Placement::Shard { dim: 1, multiple: self.value }, whole] }]
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }
}

impl Builder {
    /// Latent attention; see [`LatentAttention`]. `index` is `index_q` and `index_w`.
    ///
    /// # Errors
    /// When the inputs do not fit each other.
    pub fn latent_attention(
        &mut self,
        [q, latent, w, cache]: [Var; 4],
        index: Option<[Var; 2]>,
        op: LatentAttention,
    ) -> Result<Var> {
        let inputs: Vec<Var> = [q, latent, w, cache].into_iter().chain(index.into_iter().flatten()).collect();
        Ok(self.composite(op, &inputs)?[0])
    }
}
