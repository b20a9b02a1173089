//! Settings from the environment, in the variables that `huggingface_hub` reads.

use std::path::PathBuf;
use std::time::Duration;

use ridge_files::hub::{HubCache, hugging_face_home};

use crate::error::{HubError, Result};

/// Which server is asked, on whose behalf, and where files go.
#[derive(Clone, Debug)]
pub struct HubSettings {
    /// The server's address, without a slash at its end.
    pub endpoint: String,
    /// Is sent to this server alone.
    pub token: Option<String>,
    /// Ask no server: only the cache is read.
    pub offline: bool,
    /// The folder of downloaded models.
    pub cache: HubCache,
    /// How long the server may be silent.
    pub timeout: Duration,
    /// A file of certificate authorities in PEM, in place of Mozilla's.
    pub authorities: Option<PathBuf>,
}

const ENDPOINT: &str = "https://huggingface.co";
const TIMEOUT: Duration = Duration::from_secs(30);

impl HubSettings {
    /// `HF_ENDPOINT`, `HF_TOKEN` or the file that `hf auth login` writes, `HF_HUB_OFFLINE`, `HF_HUB_CACHE` or `HF_HOME`,
    /// `HF_HUB_DOWNLOAD_TIMEOUT` in seconds, and `SSL_CERT_FILE`. Proxies are those of `HTTPS_PROXY` and its like.
    ///
    /// # Errors
    /// When a variable has a value that cannot be used.
    pub fn from_environment() -> Result<Self> {
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            let why = "is not a URL such as https://huggingface.co".to_owned();
            return Err(HubError::Setting { name: "HF_ENDPOINT", value: endpoint, why });
        }
        let cache = HubCache::from_environment().ok_or(HubError::Setting {
            name: "HF_HUB_CACHE",
            value: String::new(),
            why: "is not set, and neither is HOME; set it to the folder of downloaded models".to_owned(),
        })?;
        let timeout = set("HF_HUB_DOWNLOAD_TIMEOUT").map(|value| match value.parse() {
            Ok(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds)),
            _ => {
                let why = "is not a whole number of seconds above 0".to_owned();
                Err(HubError::Setting { name: "HF_HUB_DOWNLOAD_TIMEOUT", value, why })
            }
        });
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: set("HF_TOKEN").or_else(|| set("HUGGING_FACE_HUB_TOKEN")).or_else(saved_token),
            offline: set("HF_HUB_OFFLINE").or_else(|| set("TRANSFORMERS_OFFLINE")).is_some_and(|v| is_true(&v)),
            cache,
            timeout: timeout.transpose()?.unwrap_or(TIMEOUT),
            authorities: authorities(),
        })
    }
}

/// The value of a variable of the environment, unless it is blank.
fn set(name: &str) -> Option<String> {
    std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

/// The file of certificate authorities that the environment names.
pub(crate) fn authorities() -> Option<PathBuf> {
    set("SSL_CERT_FILE").or_else(|| set("REQUESTS_CA_BUNDLE")).map(PathBuf::from)
}

fn is_true(value: &str) -> bool {
    ["1", "ON", "YES", "TRUE"].iter().any(|word| value.eq_ignore_ascii_case(word))
}

fn saved_token() -> Option<String> {
    let file = match std::env::var_os("HF_TOKEN_PATH").filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => hugging_face_home()?.join("token"),
    };
    let token = std::fs::read_to_string(file).ok()?.trim().to_owned();
    (!token.is_empty()).then_some(token)
}
