//! Multi-token prediction (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2): behind the last layer stands one more
//! that is given a token's hidden state and the token that follows, and whose output gives the token after that. Checkpoints
//! publish one such module; it drafts several tokens by taking its own output for the hidden state of the next.

use ridge_graph::{Builder, Result as GraphResult, Var};

use super::blocks::{NormKind, linear};

/// Scopes of a prediction module.
#[derive(Clone, Debug)]
pub(crate) struct PredictionScopes {
    /// Its layer.
    pub(super) layer: String,
    /// The norm of the embedding of the token that follows.
    pub(super) token_norm: String,
    /// The norm of the hidden state.
    pub(super) hidden_norm: String,
    /// The projection of both to the input of its layer.
    pub(super) projection: String,
    /// The norm of its output, ahead of the model's output projection.
    pub(super) norm: String,
}

impl PredictionScopes {
    /// Those of DeepSeek and GLM: the module is layer `index`, behind the last one of the model.
    pub(super) fn behind(index: usize) -> Self {
        let layer = format!("model.layers.{index}");
        let within = |name: &str| format!("{layer}.{name}");
        Self {
            token_norm: within("enorm"),
            hidden_norm: within("hnorm"),
            projection: within("eh_proj"),
            norm: within("shared_head.norm"),
            layer,
        }
    }

    /// The input of the module's layer (equation 21), `[tokens, hidden]`, from the embeddings of the tokens that follow and the
    /// hidden states, of the same shape. The released weights have the embedding first.
    pub(super) fn join(&self, g: &mut Builder, norm: NormKind, [embedded, hidden]: [Var; 2]) -> GraphResult<Var> {
        let width = g.ty(hidden)?.shape.last().as_const().unwrap_or_default();
        let embedded = norm.apply(g, &self.token_norm, embedded)?;
        let hidden = norm.apply(g, &self.hidden_norm, hidden)?;
        let both = g.concat(&[embedded, hidden], 1)?;
        linear(g, &self.projection, both, width, false)
    }
}

/// Patterns of the published tensors of `count` modules behind the `layers` of the model that it does without. With `drafts` these
/// are copies of the embedding and of the output projection, and all of later modules.
pub(super) fn unused_tensors(layers: usize, count: usize, drafts: bool) -> Vec<String> {
    let module = |layer: usize| match drafts && layer == layers {
        true => ["embed_tokens.*", "shared_head.head.*"].map(|name| format!("model.layers.{layer}.{name}")).to_vec(),
        false => vec![format!("model.layers.{layer}.*")],
    };
    (layers..layers + count).flat_map(module).collect()
}
