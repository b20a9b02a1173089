//! Who may use the server: keys from a file or the environment.

use std::path::Path;

use axum::http::{HeaderMap, header};
use subtle::ConstantTimeEq as _;

use crate::error::{ApiError, ApiResult, ServeError};

/// The variable that may hold one key.
pub const KEY_VARIABLE: &str = "RIDGE_API_KEY";

/// The keys that are accepted; with none, everybody is.
#[derive(Clone, Default)]
pub struct Keys(Vec<ApiKey>);

#[derive(Clone)]
struct ApiKey {
    /// What logs and the scheduler call its holder.
    name: String,
    secret: String,
}

/// The holder of a key: a number for the scheduler, which is fair between them. 0 where there are no keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holder(pub(crate) u32);

impl Keys {
    /// Keys of a file, one a line, perhaps with a name before it and white space between; `#` begins a comment. And the
    /// key of the variable [`KEY_VARIABLE`], if it is given as `variable`.
    ///
    /// # Errors
    /// When the file cannot be read, has no key, or a line that is none.
    pub fn read(file: Option<&Path>, variable: Option<&str>) -> Result<Self, ServeError> {
        let mut keys = Vec::new();
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
                        let problem = "has more than a name and a key; write one key a line".to_owned();
                        return Err(fail(Some(line + 1), problem));
                    }
                };
                keys.push(ApiKey { name, secret: secret.to_owned() });
            }
            if keys.is_empty() {
                return Err(fail(None, "has no key, and everybody would be let in; write one key a line".to_owned()));
            }
        }
        if let Some(secret) = variable {
            if secret.trim().is_empty() {
                let problem = "is empty, and everybody would be let in; give a key, or unset it".to_owned();
                return Err(ServeError::Keys { place: KEY_VARIABLE.to_owned(), problem });
            }
            keys.push(ApiKey { name: KEY_VARIABLE.to_owned(), secret: secret.trim().to_owned() });
        }
        Ok(Self(keys))
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Is everybody let in?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whose key `headers` have.
    pub(crate) fn holder(&self, headers: &HeaderMap) -> ApiResult<Holder> {
        if self.0.is_empty() {
            return Ok(Holder::default());
        }
        let value = headers.get(header::AUTHORIZATION).map(axum::http::HeaderValue::as_bytes);
        let Some(sent) = value.and_then(|v| v.strip_prefix(b"Bearer ")) else {
            let message = "this server needs a key; send the header Authorization: Bearer KEY";
            return Err(ApiError::unauthorized(message));
        };
        // Every key is compared, and each in a time that says nothing of where it differs.
        let mut found = None;
        for (i, key) in self.0.iter().enumerate() {
            if bool::from(key.secret.as_bytes().ct_eq(sent)) {
                found = Some(Holder(i as u32));
            }
        }
        found.ok_or_else(|| ApiError::unauthorized("the key is not one of this server's; check it"))
    }

    /// What logs call a holder.
    pub(crate) fn name(&self, holder: Holder) -> &str {
        self.0.get(holder.0 as usize).map_or("-", |key| &key.name)
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static(value))])
    }

    fn keys(text: &str) -> Result<Keys, ServeError> {
        let file = std::env::temp_dir().join(format!("ridge-keys-{}-{}", std::process::id(), text.len()));
        std::fs::write(&file, text).unwrap();
        let keys = Keys::read(Some(&file), None);
        std::fs::remove_file(&file).unwrap();
        keys
    }

    #[test]
    fn holders_are_told_apart() {
        let keys = keys("# ours\nann sk-1\nsk-2 # plain\n").unwrap();
        let name = |value| keys.holder(&headers(value)).map(|h| keys.name(h).to_owned());
        assert_eq!(name("Bearer sk-1").unwrap(), "ann");
        assert_eq!(name("Bearer sk-2").unwrap(), "line 3");
        for wrong in ["Bearer sk-", "Bearer sk-11", "Bearer ", "sk-1", "Basic sk-1", "Bearer SK-1"] {
            assert_eq!(name(wrong).unwrap_err().status.as_u16(), 401, "{wrong}");
        }
        assert!(keys.holder(&HeaderMap::new()).is_err());
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
