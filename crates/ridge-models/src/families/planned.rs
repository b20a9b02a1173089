//! Graphs for plans alone; see [`PlannedConfig`]. Layers are made of the blocks that other families use, and of latent
//! attention.

use ridge_graph::ops::planned::{Indexer, LatentAttention};
use ridge_graph::{Builder, DType, Dim, FuncId, Result as GraphResult, Shape, Type, Var};

use super::blocks::{MlpGate, NormKind, gated_mlp, linear, rope, weight};
use super::experts::experts;
use super::planned_config::{Channel, LayerKind, Mixer, PlannedConfig};
use super::tensors::LLAMA_TENSORS;
use crate::model::{BuildOptions, Model, StepInputs, attention_symbols, history_group, kv_bytes, symbols};
use crate::module::{Module, StateGroup};
use crate::sampled::finish_decoder;

impl PlannedConfig {
    /// Builds the graph, with every weight as plain f32. It has parameters and costs; lowering it is an error where it
    /// has an op of [`ridge_graph::ops::planned`].
    ///
    /// # Errors
    /// A mistake of ours: the configuration has been checked.
    pub fn build(&self, options: &BuildOptions) -> GraphResult<Model> {
        let (c, names) = (&self.decoder, &LLAMA_TENSORS);
        let mut g = Builder::new();
        let step = StepInputs::ask(&mut g)?;
        let (positions, slots) =
            g.token_layout(step.seq_ids, step.query_start, step.lengths, step.block_table, options.block_size)?;
        let table =
            |g: &mut Builder| g.scoped(names.embedding.scope, |g| weight(g, "weight", [c.vocab_size, c.hidden_size]));
        let embedding = table(&mut g)?;
        let mut x = g.embedding(embedding, step.token_ids, options.activations)?;
        let mut functions: Vec<(LayerKind, FuncId)> = Vec::new();
        let mut groups: Vec<(Mixer, StateGroup)> = Vec::new();
        for (index, kind) in self.layers.iter().enumerate() {
            let known = functions.iter().find(|(k, _)| k == kind).map(|(_, f)| *f);
            let function = match known {
                Some(function) => function,
                None => {
                    let built = g.function(&name_of(*kind), |g| {
                        let x = g.arg(
                            "x",
                            Type::tensor(options.activations, [Dim::sym(symbols::TOKENS), c.hidden_size.into()]),
                        );
                        let row = Type::tensor(DType::I32, [Dim::sym(symbols::TOKENS)]);
                        let at = PlannedLayer { config: self, options, positions: g.arg("positions", row) };
                        Ok(vec![at.build(g, x, *kind)?])
                    })?;
                    functions.push((*kind, built));
                    built
                }
            };
            let scope = format!("{}.{index}", names.layers);
            let at = groups.iter().position(|(mixer, _)| *mixer == kind.0).unwrap_or(groups.len());
            if at == groups.len() {
                groups.push((kind.0, empty_group()));
            }
            groups[at].1.states.push(format!("{scope}.self_attn.latent"));
            let index = self.index_width(kind.0 == Mixer::SharingLatent);
            for width in [self.latent.kv_rank + self.latent.rope].into_iter().chain(index) {
                groups[at].1.bytes_per_token += kv_bytes([1, 1, width], options);
            }
            x = g.scoped(&scope, |g| g.call(function, &[x, positions]))?[0];
        }
        let norm = NormKind::Rms(c.norm_eps);
        x = norm.apply(&mut g, names.norm.scope, x)?;
        let graph = finish_decoder(g, x, &step, [positions, slots], options, |g, x| {
            let logits = match c.tie_word_embeddings {
                true => {
                    let embedding = table(g)?;
                    g.scoped(names.head.scope, |g| g.linear(x, embedding))?
                }
                false => linear(g, names.head.scope, x, c.vocab_size, false)?,
            };
            g.cast(logits, DType::F32)
        })?;
        Ok(Model {
            module: Module {
                family: self.family,
                graph,
                state_groups: groups.into_iter().map(|(_, group)| group).collect(),
                shares: None,
                activations: options.activations,
            },
            answers: None,
            drafts: None,
            history: history_group(),
            cache: options.cache,
            block_size: options.block_size,
            max_context: c.max_context(),
            vocab_size: c.vocab_size,
            eos_token_ids: c.eos_token_ids.clone(),
        })
    }

    /// Elements of a row of the latent cache of a layer, which has an indexer's key unless it is `sharing` another's choice.
    fn latent_width(&self, sharing: bool) -> usize {
        self.latent.kv_rank + self.latent.rope + self.index_width(sharing).unwrap_or(0)
    }

    /// Elements of an indexer's key, of a layer that has one of its own.
    fn index_width(&self, sharing: bool) -> Option<usize> {
        self.latent.index.filter(|_| !sharing).map(|(_, dim, _)| dim)
    }
}

/// Of latents, which all heads share.
fn empty_group() -> StateGroup {
    StateGroup { states: Vec::new(), bytes_per_token: 0, bytes_per_sequence: 0, window: None, heads: 1 }
}

fn name_of((mixer, channel): LayerKind) -> String {
    let mixer = match mixer {
        Mixer::Latent => "latent",
        Mixer::SharingLatent => "sharing_latent",
    };
    let channel = match channel {
        Channel::Gated => "dense",
        Channel::Experts => "experts",
    };
    format!("{mixer}_{channel}_layer")
}

/// Where and how a layer is built.
struct PlannedLayer<'a> {
    config: &'a PlannedConfig,
    options: &'a BuildOptions,
    positions: Var,
}

impl PlannedLayer<'_> {
    fn norm(&self) -> NormKind {
        NormKind::Rms(self.config.decoder.norm_eps)
    }

    /// `x`, `[tokens, hidden]`, to the next.
    fn build(&self, g: &mut Builder, x: Var, (mixer, channel): LayerKind) -> GraphResult<Var> {
        let h = self.norm().apply(g, "input_layernorm", x)?;
        let h = g.scoped("self_attn", |g| self.latent(g, h, mixer == Mixer::SharingLatent))?;
        let x = g.add(x, h)?;
        let h = self.norm().apply(g, "post_attention_layernorm", x)?;
        let inner = self.config.decoder.intermediate_size;
        let h = g.scoped("mlp", |g| match channel {
            Channel::Gated => gated_mlp(g, h, inner, MlpGate::Silu, false),
            Channel::Experts => self.experts(g, h),
        })?;
        g.add(x, h)
    }

    fn heads(g: &mut Builder, x: Var, heads: usize) -> GraphResult<Var> {
        let width = g.ty(x)?.shape.last().as_const().unwrap_or_default();
        g.reshape(x, [Dim::sym(symbols::TOKENS), heads.into(), (width / heads).into()])
    }

    fn flat(g: &mut Builder, x: Var) -> GraphResult<Var> {
        let shape = &g.ty(x)?.shape.0;
        let width: usize = shape[1..].iter().filter_map(Dim::as_const).product();
        g.reshape(x, [Dim::sym(symbols::TOKENS), width.into()])
    }

    fn latent(&self, g: &mut Builder, x: Var, sharing: bool) -> GraphResult<Var> {
        let c = &self.config.decoder;
        let l = &self.config.latent;
        let (heads, head) = (c.num_attention_heads, l.nope + l.rope);
        let turn = |g: &mut Builder, x: Var| match &c.rope {
            Some(config) => {
                let turn = rope(config, self.options.context.unwrap_or_else(|| c.max_context()));
                g.rope(x, self.positions, &turn)
            }
            None => Ok(x),
        };
        let (q_latent, name) = match l.q_rank {
            Some(rank) => {
                let latent = linear(g, "q_a_proj", x, rank, false)?;
                (self.norm().apply(g, "q_a_layernorm", latent)?, "q_b_proj")
            }
            None => (x, "q_proj"),
        };
        let q = linear(g, name, q_latent, heads * head, false)?;
        let q = Self::heads(g, q, heads)?;
        let still = g.slice(q, 2, 0, l.nope)?;
        let turned = g.slice(q, 2, l.nope, l.rope)?;
        let turned = turn(g, turned)?;
        let q = g.concat(&[still, turned], 2)?;

        let both = linear(g, "kv_a_proj_with_mqa", x, l.kv_rank + l.rope, false)?;
        let latent = g.slice(both, 1, 0, l.kv_rank)?;
        let latent = self.norm().apply(g, "kv_a_layernorm", latent)?;
        let key = g.slice(both, 1, l.kv_rank, l.rope)?;
        let key = Self::heads(g, key, 1)?;
        let key = turn(g, key)?;
        let key = Self::flat(g, key)?;
        let mut row = vec![latent, key];
        let mut index = None;
        if let Some((count, dim, _)) = l.index.filter(|_| !sharing) {
            let (q, k, w) = g.scoped("indexer", |g| {
                let q = linear(g, "wq_b", q_latent, count * dim, false)?;
                let k = linear(g, "wk", x, dim, false)?;
                let k = NormKind::Layer(1e-6).apply(g, "k_norm", k)?;
                Ok::<_, ridge_graph::GraphError>((q, k, linear(g, "weights_proj", x, count, false)?))
            })?;
            row.push(k);
            index = Some([q, w]);
        }
        let row = g.concat(&row, 1)?;
        let width = self.config.latent_width(sharing);
        let cache = Shape(vec![Dim::sym(symbols::BLOCKS), self.options.block_size.into(), width.into()]);
        let cache = g.state("latent", Type::state(self.options.cache, cache))?;
        let w = g.scoped("kv_b_proj", |g| weight(g, "weight", [heads * (l.nope + l.value), l.kv_rank]))?;
        let all = attention_symbols(None);
        let seen = attention_symbols(l.index.map(|(_, _, top_k)| top_k));
        let op = LatentAttention {
            nope: l.nope,
            rope: l.rope,
            value: l.value,
            pairs: seen.0,
            cached: seen.1,
            indexer: l.index.map(|(heads, dim, best)| Indexer {
                heads,
                dim,
                best,
                shared: sharing,
                pairs: all.0,
                cached: all.1,
            }),
        };
        let a = g.latent_attention([q, row, w, cache], index, op)?;
        linear(g, "o_proj", a, c.hidden_size, false)
    }

    fn experts(&self, g: &mut Builder, x: Var) -> GraphResult<Var> {
        let e = &self.config.experts;
        let y = experts(g, x, e)?;
        if e.shared_size == 0 {
            return Ok(y);
        }
        let all = g.scoped("shared_experts", |g| gated_mlp(g, x, e.shared_size, MlpGate::Silu, false))?;
        g.add(y, all)
    }
}
