//! Which of a row's candidate tokens the model itself would have chosen: the check of speculative decoding (Leviathan,
//! Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding", section 2), over trees of
//! candidates as of Miao et al. 2024, "SpecInfer", section 4.3. A candidate is accepted where it equals the token that was
//! sampled behind its parent, so with random numbers keyed by position the text is that of decoding without candidates.

use super::require::{takes, want};
use crate::cost::Cost;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Builder, Composite, Gradient, Var};
use crate::sample::{Check, Rng, Sample};
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::types::Type;
use crate::why::Why;

/// The ends of accepted paths.
///
/// `next`: i32 `[lines]`, the token sampled behind each line; `tokens`: i32 `[lines]`, the token of each line itself;
/// `parents`: i32 `[lines]`, the line that each continues, [`AcceptCandidates::ROOT`] for a row's last known token and
/// [`AcceptCandidates::NONE`] for padding. Gives i32 `[lines]`: 1 for each line that ends its row's accepted path, else 0.
///
/// A root is accepted; another line is if its parent is and `next[parent] == tokens[line]`. A path ends at an accepted
/// line without accepted children. Children of one line have distinct tokens, so each root has one path. Lines further
/// than `depth` from their root are not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptCandidates {
    /// The most candidates of a path.
    pub depth: usize,
}

impl AcceptCandidates {
    /// The parent of a row's last known token.
    pub const ROOT: i32 = -1;
    /// The parent of a line that belongs to no row.
    pub const NONE: i32 = -2;
}

impl Composite for AcceptCandidates {
    fn name(&self) -> &'static str {
        "accept_candidates"
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        let [next, tokens, parents] = inputs else { return Err(takes("next, tokens and parents", inputs)) };
        let lines = next.shape.last();
        for (name, ty) in [("next", next), ("tokens", tokens), ("parents", parents)] {
            want(name, ty, DType::I32, [&lines])?;
        }
        Ok(vec![Type::tensor(DType::I32, [lines])])
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let [next, tokens, parents] = inputs else { unreachable!("infer has counted the inputs") };
        let lines = Shape(vec![g.ty(*next)?.shape.last()]);
        let (zero, one) = (g.constant(DType::I32, 0.0)?, g.constant(DType::I32, 1.0)?);
        let root = g.constant(DType::I32, f64::from(Self::ROOT))?;
        let is_root = g.eq(*parents, root)?;
        let has_parent = g.ge(*parents, zero)?;
        let sampled = g.gather(*next, *parents, 0)?;
        let agrees = g.eq(sampled, *tokens)?;
        let agrees = g.and(agrees, has_parent)?;
        let mut accepted = is_root;
        for _ in 0..self.depth {
            let flag = g.cast(accepted, DType::I32)?;
            let of_parent = g.gather(flag, *parents, 0)?;
            let of_parent = g.eq(of_parent, one)?;
            let follows = g.and(agrees, of_parent)?;
            accepted = g.or(is_root, follows)?;
        }
        let continued = g.constant(DType::I32, 0.0)?;
        let continued = g.broadcast(continued, lines.clone())?;
        let nowhere = g.constant(DType::I32, f64::from(Self::NONE))?;
        let to = g.select(accepted, *parents, nowhere)?;
        let mark = g.broadcast(one, lines)?;
        let continued = g.scatter(continued, to, mark, 0)?;
        let last = g.eq(continued, zero)?;
        let ends = g.and(accepted, last)?;
        Ok(vec![g.cast(ends, DType::I32)?])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost { vector_flops: outputs[0].shape.elements() * 4, ..Cost::moving(inputs, outputs) }
    }

    fn gradient(&self) -> Gradient {
        Gradient::None
    }
}

impl Builder {
    /// Which lines end the accepted paths of at most `depth` candidates; see [`AcceptCandidates`].
    ///
    /// # Errors
    /// When an input is not an i32 vector, or their lengths differ.
    pub fn accept_candidates(&mut self, next: Var, tokens: Var, parents: Var, depth: usize) -> Result<Var> {
        Ok(self.composite(AcceptCandidates { depth }, &[next, tokens, parents])?[0])
    }
}

pub(super) fn samples(rng: &mut Rng, _dtype: DType) -> Vec<Sample> {
    let mut samples = Vec::new();
    for (rows, candidates, depth, tree) in
        [(0, 0, 4, false), (1, 0, 0, false), (3, 4, 4, false), (40, 7, 7, false), (5, 9, 4, true), (300, 4, 4, true)]
    {
        samples.push(sample(rng, rows, candidates, depth, tree));
    }
    samples
}

/// Rows of a known token and `candidates` that continue it: as a chain, or each some line before it; some rows have fewer.
fn sample(rng: &mut Rng, rows: usize, candidates: usize, depth: usize, tree: bool) -> Sample {
    let (mut next, mut tokens, mut parents) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rows {
        let first = next.len();
        let here = rng.below(candidates + 1);
        for line in 0..=candidates {
            next.push(rng.below(1000) as i64);
            let parent = if tree { rng.below(line.max(1)) } else { line.max(1) - 1 };
            // Tokens differ by line, so those of siblings do; most agree with what was sampled.
            tokens.push(1000 + line as i64);
            parents.push(match line {
                0 => i64::from(AcceptCandidates::ROOT),
                _ if line > here => i64::from(AcceptCandidates::NONE),
                _ => (first + parent) as i64,
            });
            if line > 0 && line <= here && rng.below(4) > 0 {
                next[first + parent] = tokens[first + line];
            }
        }
    }
    let lines = [next.len()];
    let ints = |data| Tensor::int(DType::I32, &lines, data);
    Sample::new(AcceptCandidates { depth })
        .input(ints(next))
        .input(ints(tokens))
        .input(ints(parents))
        .judged(Check::Exact)
}
