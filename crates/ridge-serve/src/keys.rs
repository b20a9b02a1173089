//! API keys from a file or the environment.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use axum::http::{HeaderMap, header};
use subtle::ConstantTimeEq as _;

use crate::error::{ApiError, ApiResult, ServeError};

/// The variable that may hold one key.
pub const KEY_VARIABLE: &str = "RIDGE_API_KEY";

/// The accepted keys; if empty, all requests are accepted.
#[derive(Default)]
pub struct Keys {
    /// Where they come from.
    file: Option<PathBuf>,
    variable: Option<String>,
    known: RwLock<Vec<ApiKey>>,
}

struct ApiKey {
    holder: Holder,
    secret: String,
}

/// The name of a key's holder, for logs and fair scheduling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder(pub(crate) Arc<str>);

/// The holder if there are no keys.
impl Default for Holder {
    fn default() -> Self {
        Self("-".into())
    }
}

impl Keys {
    /// Reads the keys of a file, one per line, optionally preceded by a name and white space; `#` starts a comment. Adds the
    /// key of the variable [`KEY_VARIABLE`], if it is given as `variable`.
    ///
    /// # Errors
    /// When the file cannot be read, has no key, or a line that is none.
    pub fn read(file: Option<&Path>, variable: Option<&str>) -> Result<Self, ServeError> {
        let known = RwLock::new(read(file, variable)?);
        Ok(Self { file: file.map(Path::to_owned), variable: variable.map(str::to_owned), known })
    }

    /// Reads the file again and returns the number of keys. Removed keys are rejected from now on; running requests
    /// continue.
    ///
    /// # Errors
    /// As [`Keys::read`]; the keys are as they were then.
    pub(crate) fn reload(&self) -> Result<usize, ServeError> {
        let new = read(self.file.as_deref(), self.variable.as_deref())?;
        let count = new.len();
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(count)
    }

    fn known(&self) -> RwLockReadGuard<'_, Vec<ApiKey>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.known().len()
    }

    /// Whether all requests are accepted.
    pub fn is_empty(&self) -> bool {
        self.known().is_empty()
    }

    /// The holder of the key in `headers`.
    pub(crate) fn holder<'a>(&self, headers: &'a HeaderMap) -> ApiResult<Holder> {
        let known = self.known();
        if known.is_empty() {
            return Ok(Holder::default());
        }
        let value = headers.get(header::AUTHORIZATION).map(axum::http::HeaderValue::as_bytes);
        // The scheme's case does not matter (RFC 9110, section 11.1).
        let bearer = |v: &'a [u8]| v.split_at_checked(7).filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"Bearer "));
        let Some((_, sent)) = value.and_then(bearer) else {
            let message = "this server requires an API key; send the header Authorization: Bearer KEY";
            return Err(ApiError::unauthorized(message));
        };
        // Compares all keys in constant time.
        let mut found = None;
        for key in known.iter() {
            if bool::from(key.secret.as_bytes().ct_eq(sent)) {
                found = Some(&key.holder);
            }
        }
        found.cloned().ok_or_else(|| ApiError::unauthorized("the API key is invalid"))
    }
}

/// The keys of `file` and of the variable.
fn read(file: Option<&Path>, variable: Option<&str>) -> Result<Vec<ApiKey>, ServeError> {
    let mut keys = Vec::new();
    let key = |name: &str, secret: &str| ApiKey { holder: Holder(name.into()), secret: secret.to_owned() };
    if let Some(path) = file {
        let fail = |line: Option<usize>, problem: String| ServeError::Keys {
            place: line.map_or(path.display().to_string(), |l| format!("{}:{l}", path.display())),
            problem,
        };
        let text = std::fs::read_to_string(path).map_err(|e| fail(None, format!("cannot read the keys: {e}")))?;
        for (line, content) in text.lines().enumerate() {
            let content = content.split('#').next().unwrap_or_default();
            let words: Vec<&str> = content.split_whitespace().collect();
            let (name, secret) = match words[..] {
                [] => continue,
                [secret] => (format!("line {}", line + 1), secret),
                [name, secret] => (name.to_owned(), secret),
                _ => {
                    let problem = "has more than a name and a key; write one key per line".to_owned();
                    return Err(fail(Some(line + 1), problem));
                }
            };
            keys.push(key(&name, secret));
        }
        if keys.is_empty() {
            return Err(fail(None, "has no key, so all requests would be accepted; write one key per line".to_owned()));
        }
    }
    if let Some(secret) = variable {
        if secret.trim().is_empty() {
            let problem = "is empty, so all requests would be accepted; set a key, or unset the variable".to_owned();
            return Err(ServeError::Keys { place: KEY_VARIABLE.to_owned(), problem });
        }
        keys.push(key(KEY_VARIABLE, secret.trim()));
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static(value))])
    }

    fn keys(text: &str) -> Result<Keys, ServeError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Keys::read(Some(file.path()), None)
    }

    #[test]
    fn holders_are_told_apart() {
        let keys = keys("# ours\nann sk-1\nsk-2 # plain\n").unwrap();
        let name = |value| keys.holder(&headers(value)).map(|h| h.0.to_string());
        assert_eq!(name("Bearer sk-1").unwrap(), "ann");
        assert_eq!(name("Bearer sk-2").unwrap(), "line 3");
        assert_eq!(name("bearer sk-2").unwrap(), "line 3");
        for wrong in ["Bearer sk-", "Bearer sk-11", "Bearer ", "sk-1", "Basic sk-1", "Bearer SK-1"] {
            assert_eq!(name(wrong).unwrap_err().status.as_u16(), 401, "{wrong}");
        }
        assert!(keys.holder(&HeaderMap::new()).is_err());
    }

    #[test]
    fn keys_are_read_again() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "ann sk-1").unwrap();
        let keys = Keys::read(Some(file.path()), None).unwrap();
        std::fs::write(file.path(), "bob sk-2").unwrap();
        assert_eq!(keys.reload().unwrap(), 1);
        assert!(keys.holder(&headers("Bearer sk-1")).is_err());
        assert_eq!(&*keys.holder(&headers("Bearer sk-2")).unwrap().0, "bob");
        // An invalid file keeps the known keys.
        std::fs::write(file.path(), "").unwrap();
        assert!(keys.reload().is_err());
        assert!(keys.holder(&headers("Bearer sk-2")).is_ok());
    }

    #[test]
    fn files_without_keys_let_nobody_in_by_mistake() {
        assert!(keys("\n# none\n").is_err_and(|e| e.to_string().contains("has no key")));
        assert!(keys("a b c d").is_err_and(|e| e.to_string().contains(":1: has more")));
        assert!(Keys::read(None, Some(" ")).is_err());
        assert_eq!(Keys::read(None, Some("sk")).unwrap().len(), 1);
        assert!(Keys::read(None, None).unwrap().is_empty());
    }
}
