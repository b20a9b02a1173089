//! Zamba 2 (Glorioso et al. 2024, "The Zamba2 Suite", section 2): layers of a Mamba-2 mixer, some of which add what one of a few
//! transformer blocks makes of the residual stream and the embedding. Layers share these blocks in turn, each with low-rank
//! adapters and a projection of its own.

use ridge_files::checkpoint::{Part, Rows};
use ridge_graph::ops::Gelu;
use ridge_graph::{Builder, Result as GraphResult, Var};

use super::bamba::{FINAL_NORM, HYBRID_HARMLESS};
use super::blocks::{NormKind, linear};
use super::decoder::{AttentionScores, DecoderFamily, DecoderLayer, LayerInputs, deref_to_decoder};
use super::definition::{FamilyDefinition, ReadConfig};
use super::experts::MAX_SIZE;
use super::layer_states::LayerStates;
use super::mamba2::check_groups;
use super::recurrent::{GatedNorm, Mamba2Mixer};
use super::tensors::{Cut, LLAMA_TENSORS, QKV, TensorName, TensorTable};
use crate::config::{DECODER_KEYS, DecoderConfig, DecoderKeys, Fields, REMEDY, ROPE_KEYS, read_rope};
use crate::error::Result;
use crate::model::BuildOptions;

/// Every size and switch of a Zamba 2 model.
#[derive(Clone, Debug, PartialEq)]
pub struct Zamba2Config {
    /// What every decoder has; the width of its heads is that of the shared blocks.
    pub decoder: DecoderConfig,
    /// The mixer of every layer.
    pub mixer: Mamba2Mixer,
    /// Layers that use a shared block, in order.
    pub hybrid: Vec<usize>,
    /// Shared blocks.
    pub blocks: usize,
    /// Rank of the adapters.
    pub adapter_rank: usize,
    /// Have queries, keys and values adapters? MLPs have them always.
    pub attention_adapters: bool,
    /// The activation of the blocks' MLPs.
    pub gelu: Gelu,
}

/// The kind of layers that use a shared block.
const HYBRID: &str = "hybrid";
/// The scope of a shared block within each layer that uses it.
const BLOCK: &str = "shared_transformer";
/// Its attention.
const ATTENTION: &str = "shared_transformer.self_attn";
/// The value by which layers know the embedding.
const EMBEDDED: &str = "embedded";
/// Epsilon of the norms in mixers, which the file does not say.
const MIXER_EPS: f64 = 1e-5;

impl Zamba2Config {
    fn read(f: &mut Fields<'_>) -> Result<Self> {
        const KEYS: DecoderKeys = DecoderKeys {
            intermediate_factor: Some(4),
            tie_word_embeddings: true,
            default_eps: Some(1e-5),
            ..DECODER_KEYS
        };
        f.must_be("add_bias_linear", false)?;
        f.must_be("use_conv_bias", true)?;
        f.must_be("use_long_context", false)?;
        // The older code bounds steps by the shortest whether there is a limit or not.
        f.must_be("time_step_limit", serde_json::Value::Null)?;
        f.harmless(&["use_mem_eff_path", "kv_channels", "num_query_groups"]);
        let gelu = f.gelu("hidden_act", Gelu::Erf)?;
        let mut decoder = DecoderConfig::read(f, &KEYS)?;
        let (hidden, heads) = (decoder.hidden_size, decoder.num_attention_heads);
        if !(2 * hidden).is_multiple_of(2 * heads) {
            return Err(f.wrong("num_attention_heads", format!("does not divide hidden_size = {hidden}"), REMEDY));
        }
        decoder.head_dim = 2 * hidden / heads;
        f.must_be("attention_hidden_size", 2 * hidden)?;
        f.must_be("attention_head_dim", decoder.head_dim)?;
        if f.optional("use_mem_rope")?.unwrap_or(false) {
            decoder.rope = Some(read_rope(f, decoder.rope_sizes(), &ROPE_KEYS)?);
        } else {
            f.harmless(&["rope_theta", "rope_scaling", "rope_parameters"]);
        }
        let hybrid = read_layers(f, decoder.num_hidden_layers)?;
        Ok(Self {
            mixer: read_mixer(f, hidden)?,
            hybrid,
            blocks: f.optional_size("num_mem_blocks", 64)?.unwrap_or(1),
            adapter_rank: f.optional_size("adapter_rank", MAX_SIZE)?.unwrap_or(128),
            attention_adapters: f.optional("use_shared_attention_adapter")?.unwrap_or(false),
            gelu,
            decoder,
        })
    }

    /// How many layers before layer `index` use a shared block, if it does.
    fn use_of(&self, index: usize) -> Option<usize> {
        self.hybrid.iter().position(|layer| *layer == index)
    }

    /// What a shared block makes of `x` and the embedding, `[tokens, hidden]` each.
    fn block(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let embedded = at.value(g, EMBEDDED)?;
        let both = g.concat(&[x, embedded], 1)?;
        let both = g.scoped(BLOCK, |g| self.norm().apply(g, "input_layernorm", both))?;
        let mut qkv = g.scoped(ATTENTION, |g| at.project(g, both, QKV, false))?;
        if self.attention_adapters {
            for (name, x) in ["q", "k", "v"].into_iter().zip(&mut qkv) {
                let width = at.heads_width(g, *x)?;
                let y = self.adapter(g, name, both, &[("1", width)])?;
                let y = at.split_heads(g, y[0])?;
                *x = g.add(*x, y)?;
            }
        }
        let scores = AttentionScores { scale: (self.head_dim as f64 / 2.0).sqrt().recip(), ..at.scores() };
        let h = g.scoped(ATTENTION, |g| {
            let a = at.attend(g, qkv, &scores)?;
            linear(g, "o_proj", a, self.hidden_size, false)
        })?;
        let h = g.scoped(BLOCK, |g| self.norm().apply(g, "pre_ff_layernorm", h))?;
        let inner = self.intermediate_size;
        let own = self.adapter(g, "gate_up", h, &[("gate", inner), ("up", inner)])?;
        g.scoped("shared_transformer.feed_forward", |g| {
            let (gate, up) = (linear(g, "gate_proj", h, inner, false)?, linear(g, "up_proj", h, inner, false)?);
            let (gate, up) = (g.add(gate, own[0])?, g.add(up, own[1])?);
            let gate = g.gelu(gate, self.gelu)?;
            let h = g.mul(gate, up)?;
            linear(g, "down_proj", h, self.hidden_size, false)
        })
    }

    /// What the layer's adapter `name` gives for `x`: projections of these names and widths of one of low rank.
    fn adapter(&self, g: &mut Builder, name: &str, x: Var, out: &[(&str, usize)]) -> GraphResult<Vec<Var>> {
        g.scoped(&format!("adapters.{name}"), |g| {
            let low = linear(g, "0", x, self.adapter_rank, false)?;
            out.iter().map(|(name, width)| linear(g, name, low, *width, false)).collect()
        })
    }
}

/// The mixer of a configuration with Zamba's names of the keys.
fn read_mixer(f: &mut Fields<'_>, hidden: usize) -> Result<Mamba2Mixer> {
    let heads = f.optional_size("n_mamba_heads", MAX_SIZE)?.unwrap_or(8);
    let inner = f.optional_size("mamba_expand", MAX_SIZE)?.unwrap_or(2) * hidden;
    if !inner.is_multiple_of(heads) {
        return Err(f.wrong("n_mamba_heads", format!("does not divide mamba_expand * hidden_size = {inner}"), REMEDY));
    }
    let mixer = Mamba2Mixer {
        heads,
        head_dim: inner / heads,
        groups: f.optional_size("mamba_ngroups", MAX_SIZE)?.unwrap_or(1),
        state: f.optional_size("mamba_d_state", MAX_SIZE)?.unwrap_or(64),
        kernel: f.optional_size("mamba_d_conv", MAX_SIZE)?.unwrap_or(4),
        // transformers bounds steps (`dt_limit`) where it runs several tokens at once, by kernels and by torch alike, but not
        // where it runs a single one behind a cache (`selective_state_update`), so that there a text's logits depend on how it
        // was split. Here the bound holds for every token, as in its runs of whole texts.
        least_step: f.optional_positive("time_step_min")?.unwrap_or(0.001),
        conv_bias: true,
        proj_bias: false,
        factors: [1.0; 5],
    };
    f.must_be("mamba_headdim", mixer.head_dim)?;
    f.harmless(&["chunk_size", "time_step_floor", "time_step_max"]);
    check_groups(f, &mixer, "mamba_ngroups")?;
    Ok(mixer)
}

/// The layers that use a shared block.
fn read_layers(f: &mut Fields<'_>, layers: usize) -> Result<Vec<usize>> {
    const KEY: &str = "layers_block_type";
    let kinds: Vec<&str> = f.required(KEY)?;
    if kinds.len() != layers {
        return Err(f.wrong(KEY, format!("names {} layers of {layers}", kinds.len()), REMEDY));
    }
    if let Some(kind) = kinds.iter().find(|kind| !["mamba", "linear_attention", HYBRID].contains(*kind)) {
        let remedy = "Ridge knows \"mamba\", \"linear_attention\" and \"hybrid\"";
        return Err(f.wrong(KEY, format!("has {kind:?}, which is not supported"), remedy));
    }
    let hybrid: Vec<usize> = (0..layers).filter(|layer| kinds[*layer] == HYBRID).collect();
    let listed: Option<Vec<u64>> = f.optional("hybrid_layer_ids")?;
    if listed.is_some_and(|listed| !listed.iter().map(|layer| *layer as usize).eq(hybrid.iter().copied())) {
        return Err(f.wrong("hybrid_layer_ids", format!("are not the hybrid layers of {KEY}"), REMEDY));
    }
    Ok(hybrid)
}

deref_to_decoder!(Zamba2Config);

/// The tensors of a shared block that are cut.
const SHARED: &[TensorName] = &[
    TensorName::planned("shared_transformer.self_attn.q_proj", Cut::Heads),
    TensorName::planned("shared_transformer.self_attn.k_proj", Cut::Heads),
    TensorName::planned("shared_transformer.self_attn.v_proj", Cut::Heads),
    TensorName::planned("shared_transformer.self_attn.o_proj", Cut::HeadTerms),
    TensorName::planned("shared_transformer.feed_forward.gate_proj", Cut::Columns),
    TensorName::planned("shared_transformer.feed_forward.up_proj", Cut::Columns),
    TensorName::planned("shared_transformer.feed_forward.down_proj", Cut::Terms),
];

/// How it is registered.
pub(super) static ZAMBA2: FamilyDefinition = FamilyDefinition {
    name: "zamba2",
    model_type: "zamba2",
    class: Some("Zamba2ForCausalLM"),
    harmless: &[HYBRID_HARMLESS],
    read: ReadConfig::Decoder(|f| Ok(Box::new(Zamba2Config::read(f)?))),
    tensors: TensorTable {
        attention: ATTENTION,
        norm: FINAL_NORM,
        head: TensorName::planned("lm_head", Cut::Vocabulary),
        layer: &[SHARED],
        ..LLAMA_TENSORS
    },
    gguf: None,
};

impl DecoderFamily for Zamba2Config {
    fn kind(&self, index: usize) -> &'static str {
        if self.use_of(index).is_some() { HYBRID } else { "mamba" }
    }

    fn states(&self, index: usize, options: &BuildOptions) -> LayerStates {
        match self.kind(index) {
            HYBRID => LayerStates { paged: true, ..self.mixer.states("mamba_decoder.mamba", options) },
            _ => self.mixer.states("mamba", options),
        }
    }

    fn owner(&self, index: usize, name: &str) -> usize {
        let of_block = name.starts_with(BLOCK) && !name.starts_with("shared_transformer.self_attn.kv");
        match self.use_of(index) {
            Some(nth) if of_block => self.hybrid[nth % self.blocks],
            _ => index,
        }
    }

    fn embed(&self, _g: &mut Builder, x: Var, inputs: &mut LayerInputs) -> GraphResult<Var> {
        inputs.set(EMBEDDED, x);
        Ok(x)
    }

    fn norm(&self) -> NormKind {
        NormKind::Rms(self.norm_eps)
    }

    fn layer(&self, g: &mut Builder, x: Var, at: &DecoderLayer<'_>) -> GraphResult<Var> {
        let (mut h, scope) = (x, if at.kind == HYBRID { "mamba_decoder" } else { "" });
        if at.kind == HYBRID {
            let y = self.block(g, x, at)?;
            let y = linear(g, "linear", y, self.hidden_size, false)?;
            h = g.add(x, y)?;
        }
        let y = g.scoped(scope, |g| {
            let h = self.norm().apply(g, "input_layernorm", h)?;
            let norm = GatedNorm::After { groups: self.mixer.groups, eps: MIXER_EPS };
            g.scoped("mamba", |g| self.mixer.apply(g, h, at, norm))
        })?;
        g.add(x, y)
    }

    fn parts(&self) -> Vec<Part> {
        let inner = self.intermediate_size;
        let part = |of: String, name: String, rows: Option<Rows>| Part { of, name, transposed: false, rows };
        let half = |nth: usize| Some(Rows { first: nth * inner, len: inner, stride: inner, blocks: 1 });
        let mut parts = Vec::new();
        for (nth, name) in ["gate", "up"].into_iter().enumerate() {
            let within = |name: &str| format!("model.layers.*.{BLOCK}.feed_forward.{name}.weight");
            parts.push(part(within("gate_up_proj"), within(&format!("{name}_proj")), half(nth)));
        }
        // The adapters of each use are listed within the block, under the number of the use.
        for (nth, layer) in self.hybrid.iter().enumerate() {
            let block = format!("model.layers.{}.{BLOCK}", self.hybrid[nth % self.blocks]);
            let own = format!("model.layers.{layer}.adapters");
            let list = format!("{block}.feed_forward.gate_up_proj_adapter_list.{nth}");
            parts.push(part(format!("{list}.0.weight"), format!("{own}.gate_up.0.weight"), None));
            for (half_of, name) in ["gate", "up"].into_iter().enumerate() {
                parts.push(part(format!("{list}.1.weight"), format!("{own}.gate_up.{name}.weight"), half(half_of)));
            }
            for name in ["q", "k", "v"].into_iter().filter(|_| self.attention_adapters) {
                let list = format!("{block}.self_attn.linear_{name}_adapter_list.{nth}");
                for side in ["0", "1"] {
                    parts.push(part(format!("{list}.{side}.weight"), format!("{own}.{name}.{side}.weight"), None));
                }
            }
        }
        parts
    }

    fn unused(&self, _drafts: bool) -> Vec<String> {
        // Some checkpoints repeat the blocks in every layer that uses them.
        self.hybrid.iter().skip(self.blocks).map(|layer| format!("model.layers.{layer}.{BLOCK}.*")).collect()
    }
}
