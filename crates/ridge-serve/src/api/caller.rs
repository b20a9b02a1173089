//! The authenticated caller of a request, set by middleware.

use crate::app::App;
use crate::keys::Holder;
use crate::wire::sampling::CommonParams;

/// The holder of the API key, and the request id.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    pub(super) id: String,
    pub(super) holder: Holder,
}

impl Caller {
    /// Logs the request with its prompt, if enabled.
    pub(super) fn log(&self, app: &App, common: &CommonParams, prompt_tokens: usize) {
        let user = common.user.as_deref().unwrap_or_default();
        tracing::debug!(id = self.id, user, prompt_tokens, n = common.n, stream = common.stream, "accepted");
        if app.options.log_prompts {
            tracing::info!(id = self.id, sampling = ?common.sampling, max_tokens = common.max_tokens, "settings");
        }
    }
}
