//! Layers' keys and values on their way to the cache: rotated as a step of its own, or together with their products.

use ridge_graph::format::ScaledFormat;
use ridge_graph::ops::{Rope, rope_frequencies};
use ridge_graph::{Builder, DType, FormatRef, Tensor, Type};

use crate::cases::{KernelCase, case};

/// Queries, keys and values of one input, the latter two written to the cache.
#[derive(Clone, Copy)]
pub(crate) struct Projections {
    dtype: DType,
    cache: DType,
    tokens: usize,
    depth: usize,
    /// Columns of queries.
    queries: usize,
    /// Heads of keys and of values.
    heads: usize,
    /// Elements of a head, and how many of them are rotated.
    dim: usize,
    rotated: usize,
    norm: bool,
    bias: bool,
    format: Option<ScaledFormat>,
    /// The name of a format of blocks that the weights are in.
    blocks: Option<&'static str>,
}

const BLOCKS: usize = 3;
const BLOCK: usize = 16;

impl Projections {
    /// The kernel that claims all of it.
    fn kernel(&self) -> &'static str {
        if self.blocks.is_some() {
            return match (self.norm, self.rotated > 0) {
                (false, false) => "linear_blocks_group_kv_write",
                (false, true) => "linear_blocks_group_rope_kv_write",
                (true, false) => "norm_linear_blocks_group_kv_write",
                (true, true) => "norm_linear_blocks_group_rope_kv_write",
            };
        }
        match (self.format.is_some(), self.norm, self.rotated > 0) {
            (false, false, false) => "linear_group_kv_write",
            (false, false, true) => "linear_group_rope_kv_write",
            (false, true, false) => "norm_linear_group_kv_write",
            (false, true, true) => "norm_linear_group_rope_kv_write",
            (true, false, false) => "quantize_linear_group_kv_write",
            (true, false, true) => "quantize_linear_group_rope_kv_write",
            (true, true, false) => "norm_quantize_linear_group_kv_write",
            (true, true, true) => "norm_quantize_linear_group_rope_kv_write",
        }
    }

    /// Gives the cache and the queries; with `apart` also keys and values before they are rotated, so that these are results of a
    /// launch of their own.
    pub(crate) fn case(&self, apart: bool) -> KernelCase {
        let Self { dtype, cache, tokens, depth, queries, heads, dim, rotated, norm, bias, format, blocks } = *self;
        let what = format!(
            "{dtype} to {cache}, {tokens} x {depth} by {queries} and {heads} x {dim}, {rotated} rotated, bias {bias}, {format:?}, {blocks:?}"
        );
        let mut case = case(self.kernel(), &what, |g| {
            let kv = g.state("kv", Type::state(cache, [BLOCKS, 2, heads, BLOCK, dim]))?;
            let mut x = g.step_input("x", Type::tensor(dtype, [tokens, depth]))?;
            if norm {
                let gain = g.weight("gain", Type::tensor(DType::F32, [depth]))?;
                x = g.rms_norm(x, gain, 1e-5)?;
            }
            if let Some(of_x) = format.and_then(ScaledFormat::of_activations) {
                x = g.quantize(x, of_x)?;
            }
            let linear = |g: &mut Builder, name: &str, columns: usize| {
                let plain = Type::tensor(dtype, [columns, depth]);
                let named = |name: &str| ridge_graph::format::all().into_iter().find(|format| format.name() == name);
                let format = format.map(FormatRef::new).or_else(|| blocks.and_then(named));
                let stored = format.map_or(plain.clone(), |format| plain.stored_as(format));
                let w = g.weight(name, stored)?;
                let b = bias.then(|| g.weight(&format!("{name}.bias"), Type::tensor(dtype, [columns]))).transpose()?;
                g.linear_bias(x, w, b)
            };
            let (q, k, v) = (linear(g, "q", queries)?, linear(g, "k", heads * dim)?, linear(g, "v", heads * dim)?);
            let ints = |g: &mut Builder, name: &str| g.step_input(name, Type::tensor(DType::I32, [tokens]));
            let slots = ints(g, "slots")?;
            let (mut keys, values) = (g.reshape(k, [tokens, heads, dim])?, g.reshape(v, [tokens, heads, dim])?);
            if rotated > 0 {
                let rope = Rope { inv_freq: rope_frequencies(10_000.0, rotated).into(), scale: 1.25 };
                let positions = ints(g, "positions")?;
                keys = g.rope(keys, positions, &rope)?;
            }
            let written = g.kv_write(kv, keys, values, slots)?;
            let mut results = vec![g.state_read(written)?, q];
            results.extend([k, v].into_iter().filter(|_| apart));
            Ok(results)
        });
        // Some slots are below the cache and beyond, and some are another token's too.
        let slot = |t: usize| match t {
            2 => -1,
            4 => (BLOCKS * BLOCK) as i64,
            7 | 12 => 21,
            _ => ((t * 7 + 5) % (BLOCKS * BLOCK)) as i64,
        };
        let positions = (0..tokens as i64).map(|t| t * 1000 + 7).collect();
        case.given = vec![
            ("slots", Tensor::int(DType::I32, &[tokens], (0..tokens).map(slot).collect())),
            ("positions", Tensor::int(DType::I32, &[tokens], positions)),
        ];
        case.given.retain(|(name, _)| rotated > 0 || *name != "positions");
        case
    }

    /// Are weights in blocks?
    pub(crate) fn is_in_blocks(&self) -> bool {
        self.blocks.is_some()
    }

    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }
}

/// Heads of all sizes, rotated as a whole, in part and not at all; up to 16 tokens, and more.
pub(crate) fn projections() -> Vec<Projections> {
    let base = Projections {
        dtype: DType::BF16,
        cache: DType::BF16,
        tokens: 1,
        depth: 264,
        queries: 40,
        heads: 2,
        dim: 128,
        rotated: 128,
        norm: false,
        bias: false,
        format: None,
        blocks: None,
    };
    let mut all = Vec::new();
    for (i, (dim, rotated)) in
        [(64, 64), (96, 96), (128, 128), (256, 256), (128, 96), (80, 32), (64, 16), (64, 0), (16, 16)]
            .into_iter()
            .enumerate()
    {
        for (j, tokens) in [1, 3, 16, 17].into_iter().enumerate() {
            let dtype = if (i + j) % 3 == 2 { DType::F16 } else { DType::BF16 };
            let (norm, bias, heads) = ((i + j) % 2 == 0, i % 2 == 1, 1 + i % 3);
            let this = Projections { dtype, cache: dtype, tokens, dim, rotated, norm, bias, heads, ..base };
            all.push(this);
            // Heads of keys and their rotated parts are whole tiles.
            if rotated % 32 == 0 && dim % 32 == 0 {
                let blocks = Some(if i % 2 == 0 { "q4_k" } else { "q5_k" });
                // Of so many queries that it pays.
                all.push(Projections { depth: 512 * (1 + i % 2), queries: 4300, blocks, ..this });
            }
            for (nth, format) in
                [ScaledFormat::F8_ROWS, ScaledFormat::F8_BLOCKS, ScaledFormat::INT8_ROWS].into_iter().enumerate()
            {
                // A head of keys that are rotated is within a block of the weight.
                if nth == 1 && rotated > 0 && 128 % dim != 0 {
                    continue;
                }
                all.push(Projections { depth: 272, format: Some(format), ..this });
            }
        }
    }
    // Caches of other dtypes.
    all.push(Projections { cache: DType::F32, tokens: 5, ..base });
    all.push(Projections { cache: DType::F8E5M2, tokens: 2, norm: true, ..base });
    // More tiles than multiprocessors, rows that are too long to be prepared by every block, and those with wide tiles.
    for (tokens, depth, queries, heads) in
        [(1, 4096, 2048, 8), (16, 4096, 2048, 8), (3, 16_392, 41, 1), (9, 8200, 4100, 3)]
    {
        all.push(Projections { tokens, depth, queries, heads, norm: depth < 16_384, ..base });
    }
    for (tokens, dim) in [(1, 64), (13, 128)] {
        let format = Some(ScaledFormat::F8_BLOCKS);
        all.push(Projections {
            tokens,
            depth: 8192,
            queries: 4100,
            heads: 4,
            dim,
            rotated: dim,
            norm: true,
            format,
            ..base
        });
    }
    all
}
