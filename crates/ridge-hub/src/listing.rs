//! The files of a revision of a model.

use ridge_files::hub::{HubModel, is_commit};
use serde::Deserialize;

use crate::client::Client;
use crate::error::{HubError, Result};

/// A revision of a model as the Hub describes it.
#[derive(Debug)]
pub(crate) struct Listing {
    pub(crate) commit: String,
    pub(crate) files: Vec<RemoteFile>,
}

/// A file of a model on the Hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteFile {
    /// Relative to the model's folder, with slashes.
    pub(crate) path: String,
    /// In bytes.
    pub(crate) size: u64,
    pub(crate) checksum: Checksum,
}

/// How the content of a file is checked; in lower-case hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Checksum {
    /// SHA-256 of the content, of large files.
    Sha256(String),
    /// Git's own, of small ones: SHA-1 of `blob SIZE`, a zero byte and the content.
    GitBlob(String),
}

impl Checksum {
    /// The digits, by which the cache names the content.
    pub(crate) fn digits(&self) -> &str {
        match self {
            Self::Sha256(digits) | Self::GitBlob(digits) => digits,
        }
    }
}

#[derive(Deserialize)]
struct ModelInfo {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: Option<String>,
    oid: Option<String>,
    size: Option<u64>,
}

/// Asks for the files of the model's revision.
pub(crate) fn ask(client: &Client, model: &HubModel) -> Result<Listing> {
    // The slashes of refs/pr/1 are part of its name here.
    let revision = model.revision().replace('/', "%2F");
    let path = format!("api/models/{}/revision/{revision}?blobs=true", model.id());
    let text = client.text(model, &path)?;
    parse(&text).map_err(|problem| HubError::Answer { url: client.url(&path), problem })
}

fn parse(text: &str) -> Result<Listing, String> {
    let info: ModelInfo = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if !is_commit(&info.sha) {
        return Err(format!("the commit {:?} is not 40 hexadecimal digits", info.sha));
    }
    let files = info.siblings.into_iter().map(Sibling::file).collect::<Result<_, _>>()?;
    Ok(Listing { commit: info.sha, files })
}

impl Sibling {
    /// Names come from a stranger and become paths.
    fn file(self) -> Result<RemoteFile, String> {
        let path = self.rfilename;
        let plain = |part: &str| !matches!(part, "" | "." | "..") && !part.contains(['\\', '\0', ':']);
        if !path.split('/').all(plain) {
            return Err(format!("the file name {path:?} is outside the model's folder"));
        }
        let of_digits = |digits: &String, length: usize| {
            digits.len() == length && digits.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        };
        let (size, checksum) = match self.lfs {
            Some(lfs) => {
                let digits = lfs.sha256.or(lfs.oid).filter(|d| of_digits(d, 64));
                (lfs.size.or(self.size), digits.map(Checksum::Sha256))
            }
            None => (self.size, self.blob_id.filter(|d| of_digits(d, 40)).map(Checksum::GitBlob)),
        };
        match (size, checksum) {
            (Some(size), Some(checksum)) => Ok(RemoteFile { path, size, checksum }),
            _ => Err(format!("{path} has no size or checksum")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn listing(siblings: &str) -> Result<Listing, String> {
        parse(&format!(r#"{{"sha": "{COMMIT}", "siblings": [{siblings}]}}"#))
    }

    #[test]
    fn small_and_large_files_are_listed() {
        let sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let text = format!(
            r#"{{"rfilename": "a/config.json", "size": 3, "blobId": "{COMMIT}"}},
               {{"rfilename": "w.safetensors", "size": 9, "blobId": "{COMMIT}", "lfs": {{"sha256": "{sha256}", "size": 9}}}}"#
        );
        let files = listing(&text).unwrap().files;
        assert_eq!(files[0].checksum, Checksum::GitBlob(COMMIT.to_owned()));
        assert_eq!((files[1].checksum.digits(), files[1].size), (sha256, 9));
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for name in ["../x", "/etc/passwd", "a//b", "a/./b", "a/..", r"a\\..\\b", ""] {
            let sibling = format!(r#"{{"rfilename": "{name}", "size": 3, "blobId": "{COMMIT}"}}"#);
            assert!(listing(&sibling).unwrap_err().contains("outside the model's folder"), "{name}");
        }
        for sibling in [
            r#"{"rfilename": "a", "size": 3, "blobId": "../../x"}"#,
            r#"{"rfilename": "a", "size": 3, "blobId": "0", "lfs": {"sha256": "x", "size": 3}}"#,
            r#"{"rfilename": "a", "size": 3}"#,
        ] {
            assert!(listing(sibling).is_err(), "{sibling}");
        }
        assert!(parse(r#"{"sha": "../../x", "siblings": []}"#).is_err());
    }
}
