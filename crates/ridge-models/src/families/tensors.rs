//! Names of tensors: what the graph calls a weight, where tensor parallelism places it and what GGUF calls it, each
//! written once. The tables here are those that several families share; a family refers to them or has its own rows.

/// How a parameter is cut over the ranks of tensor parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Between the columns of a product, which are the rows of its weight: `x w^T` comes out cut.
    Columns,
    /// Between columns, those of a head together.
    Heads,
    /// Between the terms of a product's sums: `x w^T` comes out as summands.
    Terms,
    /// Between terms, those of a head together.
    HeadTerms,
    /// A summand on every rank: added once, to a sum that is not finished yet.
    Summand,
    /// A cache, between its key and value heads.
    Cache,
    /// Between the columns of the output projection, where the vocabulary divides: only the logits that are sampled from
    /// are gathered.
    Vocabulary,
}

/// The weight and bias of one scope of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorName {
    /// The scope: below a layer's, such as `self_attn.q_proj`, or the whole, such as `lm_head`.
    pub(crate) scope: &'static str,
    /// How the weight is cut; whole on every rank if `None`.
    pub(crate) cut: Option<Cut>,
    /// The name in GGUF without the `blk.N.` of a layer. Neighbours with the same name are one tensor there, one
    /// after another. `None` if GGUF does not have it.
    pub(crate) gguf: Option<&'static str>,
}

impl TensorName {
    /// No tensor, where a family lacks what others have.
    pub(crate) const NONE: Self = Self { scope: "", cut: None, gguf: None };

    /// A tensor that is whole on every rank.
    pub(crate) const fn whole(scope: &'static str, gguf: &'static str) -> Self {
        Self { scope, cut: None, gguf: Some(gguf) }
    }

    /// A tensor whose weight is cut.
    pub(crate) const fn cut(scope: &'static str, cut: Cut, gguf: &'static str) -> Self {
        Self { scope, cut: Some(cut), gguf: Some(gguf) }
    }

    /// A tensor whose weight is cut and that GGUF does not have.
    pub(crate) const fn planned(scope: &'static str, cut: Cut) -> Self {
        Self { scope, cut: Some(cut), gguf: None }
    }

    /// The name of the weight outside the layers, if the family has it.
    pub(crate) fn weight(&self) -> Option<String> {
        (!self.scope.is_empty()).then(|| format!("{}.weight", self.scope))
    }

    /// How the parameter `kind`, `weight` or `bias`, is cut.
    pub(crate) fn cut_of(&self, kind: &str) -> Option<Cut> {
        match (self.cut?, kind) {
            (Cut::Terms | Cut::HeadTerms, "bias") => Some(Cut::Summand),
            (Cut::Vocabulary, "bias") => None,
            (cut, "weight" | "bias") => Some(cut),
            _ => None,
        }
    }
}

/// The tensors of a family.
#[derive(Debug)]
pub(crate) struct TensorTable {
    /// The embedding of tokens.
    pub(crate) embedding: TensorName,
    /// Scope of the layers, each under its number.
    pub(crate) layers: &'static str,
    /// Scope of attention within a layer.
    pub(crate) attention: &'static str,
    /// The norm outside the layers: after the last one, or of an encoder's embeddings.
    pub(crate) norm: TensorName,
    /// The output projection, if it is not the embedding.
    pub(crate) head: TensorName,
    /// Others outside the layers.
    pub(crate) others: &'static [TensorName],
    /// Those of a layer, in the order of a GGUF file.
    pub(crate) layer: &'static [&'static [TensorName]],
    /// Patterns, with `*` for any characters, of tensors that checkpoints carry and the graph computes: tables and masks.
    pub(crate) computed: &'static [&'static str],
}

impl TensorTable {
    /// The tensors of a layer.
    pub(crate) fn of_layer(&self) -> impl Iterator<Item = &'static TensorName> + use<> {
        self.layer.iter().copied().flatten()
    }

    /// All tensors.
    pub(crate) fn all(&'static self) -> impl Iterator<Item = &'static TensorName> {
        [&self.embedding, &self.norm, &self.head].into_iter().chain(self.others).chain(self.of_layer())
    }
}

/// The names of the projections to queries, keys and values within attention.
pub(crate) const QKV: [&str; 3] = ["q_proj", "k_proj", "v_proj"];

/// The output projection of most families.
pub(crate) const LM_HEAD: TensorName = TensorName::cut("lm_head", Cut::Vocabulary, "output");

/// Llama's attention, which most families took over.
pub(crate) const ATTENTION: &[TensorName] = &[
    TensorName::cut("self_attn.q_proj", Cut::Heads, "attn_q"),
    TensorName::cut("self_attn.k_proj", Cut::Heads, "attn_k"),
    TensorName::cut("self_attn.v_proj", Cut::Heads, "attn_v"),
    ATTENTION_OUTPUT,
];

/// The projection out of Llama's attention.
pub(crate) const ATTENTION_OUTPUT: TensorName = TensorName::cut("self_attn.o_proj", Cut::HeadTerms, "attn_output");

/// Llama's MLP.
pub(crate) const GATED_MLP: &[TensorName] = &[
    TensorName::cut("mlp.gate_proj", Cut::Columns, "ffn_gate"),
    TensorName::cut("mlp.up_proj", Cut::Columns, "ffn_up"),
    MLP_DOWN,
];

/// The projection out of Llama's MLP.
pub(crate) const MLP_DOWN: TensorName = TensorName::cut("mlp.down_proj", Cut::Terms, "ffn_down");

/// An MLP without a gate, of GPT-NeoX and Falcon.
pub(crate) const PLAIN_MLP: &[TensorName] = &[
    TensorName::cut("mlp.dense_h_to_4h", Cut::Columns, "ffn_up"),
    TensorName::cut("mlp.dense_4h_to_h", Cut::Terms, "ffn_down"),
];

/// Norms of queries and keys.
pub(crate) const QK_NORMS: &[TensorName] =
    &[TensorName::whole("self_attn.q_norm", "attn_q_norm"), TensorName::whole("self_attn.k_norm", "attn_k_norm")];

/// The norm before attention.
pub(crate) const INPUT_NORM: TensorName = TensorName::whole("input_layernorm", "attn_norm");

/// The norm before the MLP, after what attention is added to.
pub(crate) const MLP_NORM: TensorName = TensorName::whole("post_attention_layernorm", "ffn_norm");

/// Norms on the way out of attention and MLP.
pub(crate) const OUTPUT_NORMS: &[TensorName] = &[
    TensorName::whole("post_attention_layernorm", "post_attention_norm"),
    TensorName::whole("post_feedforward_layernorm", "post_ffw_norm"),
];

/// Norms on the way into attention and MLP, where [`OUTPUT_NORMS`] are on the way out.
pub(crate) const GEMMA_INPUT_NORMS: &[TensorName] =
    &[INPUT_NORM, TensorName::whole("pre_feedforward_layernorm", "ffn_norm")];

/// The tensors of Llama, which most families took over.
pub(crate) const LLAMA_TENSORS: TensorTable = TensorTable {
    embedding: TensorName::whole("model.embed_tokens", "token_embd"),
    layers: "model.layers",
    attention: "self_attn",
    norm: TensorName::whole("model.norm", "output_norm"),
    head: LM_HEAD,
    others: &[],
    layer: &[ATTENTION, GATED_MLP, &[INPUT_NORM, MLP_NORM]],
    computed: &["*.rotary_emb.inv_freq"],
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bias_of_a_summed_projection_is_a_summand_and_that_of_a_cut_one_is_cut() {
        assert_eq!(ATTENTION_OUTPUT.cut_of("bias"), Some(Cut::Summand));
        assert_eq!(ATTENTION[0].cut_of("bias"), Some(Cut::Heads));
        assert_eq!(LM_HEAD.cut_of("bias"), None);
        assert_eq!(INPUT_NORM.cut_of("weight"), None);
    }
}
