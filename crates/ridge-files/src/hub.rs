//! Models named as on the Hugging Face Hub, and the cache that holds downloaded ones, in the layout that
//! `huggingface_hub` and other tools share (<https://huggingface.co/docs/hub/local-cache>):
//!
//! ```text
//! models--ORG--NAME/refs/main                       the commit that the branch pointed to
//! models--ORG--NAME/snapshots/COMMIT/config.json    a link to
//! models--ORG--NAME/blobs/CHECKSUM                  the content
//! ```

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::{FilesError, Result};

/// A model on the Hugging Face Hub: `ORG/NAME`, `ORG/NAME@REVISION`, and `:FILE` behind either, which is a part of the name
/// of a GGUF file where a repository has several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubModel {
    owner: String,
    name: String,
    revision: Option<String>,
    file: Option<String>,
}

/// The revision of a model that names none.
const MAIN: &str = "main";

impl HubModel {
    /// `ORG/NAME`.
    pub fn id(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    /// The branch, tag, commit or `refs/pr/N`; `main` if none is named.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }

    /// The part of the name of a GGUF file that chooses it.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }

    /// The same model at this revision.
    ///
    /// # Errors
    /// When it cannot be the name of a revision.
    pub fn at(self, revision: &str) -> Result<Self, InvalidHubName> {
        let named = format!("{}@{revision}", self.id());
        let revision = is_revision(revision).then(|| revision.to_owned()).ok_or(InvalidHubName(named))?;
        Ok(Self { revision: Some(revision), ..self })
    }

    /// Is this a GGUF file, of those that the model's name chooses? Of one in several parts, the first.
    pub fn chooses(&self, path: &str) -> bool {
        let path = path.to_ascii_lowercase();
        let is_first_part = match path.rsplit_once("-of-") {
            Some((first, _)) if first.len() >= 6 && is_digits(&first[first.len() - 5..]) => first.ends_with("-00001"),
            _ => true,
        };
        path.ends_with(".gguf")
            && is_first_part
            && self.file.as_ref().is_none_or(|part| path.contains(&part.to_ascii_lowercase()))
    }
}

/// A text that is not the name of a model on the Hub.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not the name of a model on the Hugging Face Hub; give ORG/NAME or ORG/NAME@REVISION")]
pub struct InvalidHubName(String);

impl FromStr for HubModel {
    type Err = InvalidHubName;

    fn from_str(text: &str) -> Result<Self, InvalidHubName> {
        let invalid = || InvalidHubName(text.to_owned());
        let (rest, file) = match text.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (text, None),
        };
        let (id, revision) = match rest.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (rest, None),
        };
        let (owner, name) = id.split_once('/').ok_or_else(invalid)?;
        let valid = is_name(owner)
            && is_name(name)
            && revision.is_none_or(is_revision)
            && file.is_none_or(|file| !file.is_empty() && !file.contains(['/', '\\']));
        let owned = |text: Option<&str>| text.map(str::to_owned);
        valid
            .then(|| Self { owner: owner.into(), name: name.into(), revision: owned(revision), file: owned(file) })
            .ok_or_else(invalid)
    }
}

impl fmt::Display for HubModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)?;
        self.revision.iter().try_for_each(|revision| write!(f, "@{revision}"))?;
        self.file.iter().try_for_each(|file| write!(f, ":{file}"))
    }
}

fn is_digits(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit())
}

/// Owners and names, as the Hub allows them. `--` separates them in the cache.
fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && !text.contains("--")
        && !text.contains("..")
}

/// Parts of a path below `refs`.
fn is_revision(text: &str) -> bool {
    let plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.+".contains(c))
    };
    text.split('/').all(plain)
}

/// Is it the full name of a commit: 40 hexadecimal digits?
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// The folder of downloaded models.
#[derive(Clone, Debug)]
pub struct HubCache {
    root: PathBuf,
}

impl HubCache {
    /// The folder that the environment names: `HF_HUB_CACHE`, else `hub` in `HF_HOME`, else `huggingface/hub` in
    /// `XDG_CACHE_HOME` or in `~/.cache`. `None` if none of these is set.
    pub fn from_environment() -> Option<Self> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = set("HF_HUB_CACHE")
            .or_else(|| set("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| Some(hugging_face_home()?.join("hub")))?;
        Some(Self::new(root))
    }

    /// The cache in this folder, which need not exist.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of one model.
    pub fn model(&self, model: &HubModel) -> PathBuf {
        self.root.join(format!("models--{}--{}", model.owner, model.name))
    }

    /// The file that holds the commit of the model's revision.
    pub fn reference(&self, model: &HubModel) -> PathBuf {
        self.model(model).join("refs").join(model.revision())
    }

    /// The folder of the files of a commit.
    pub fn snapshot(&self, model: &HubModel, commit: &str) -> PathBuf {
        self.model(model).join("snapshots").join(commit)
    }

    /// The commit of the model's revision as it was when it was downloaded; `None` if it was not.
    pub fn commit(&self, model: &HubModel) -> Option<String> {
        let commit = match is_commit(model.revision()) {
            true => model.revision().to_owned(),
            false => std::fs::read_to_string(self.reference(model)).ok()?.trim().to_owned(),
        };
        (is_commit(&commit) && self.snapshot(model, &commit).is_dir()).then_some(commit)
    }

    /// The folder of the downloaded model, or its GGUF file where that is all it has.
    ///
    /// # Errors
    /// [`FilesError::Path`] when it was not downloaded, or several GGUF files would do; the error says what to run.
    pub fn find(&self, model: &HubModel) -> Result<PathBuf> {
        let fail = |problem: String, remedy: String| FilesError::Path {
            path: PathBuf::from(model.to_string()),
            problem,
            remedy,
        };
        let Some(commit) = self.commit(model) else {
            let problem = format!("this folder does not exist, and there is no such model in {}", self.root.display());
            return Err(fail(problem, format!("run `ridge pull {model}` to download it")));
        };
        let folder = self.snapshot(model, &commit);
        let mut files = gguf_files(&folder);
        let is_safetensors = |path: &Path| path.extension().is_some_and(|e| e == "safetensors");
        let has_safetensors =
            || folder.read_dir().is_ok_and(|mut all| all.any(|entry| entry.is_ok_and(|e| is_safetensors(&e.path()))));
        if model.file.is_none() && folder.join("config.json").is_file() && (files.is_empty() || has_safetensors()) {
            return Ok(folder);
        }
        files.retain(|path| path.strip_prefix(&folder).is_ok_and(|p| model.chooses(&p.to_string_lossy())));
        match &files[..] {
            [file] => Ok(file.clone()),
            [] if model.file.is_some() => Err(fail(
                format!("no downloaded GGUF file matches this name ({})", folder.display()),
                format!("run `ridge pull {model}` to download it"),
            )),
            [] => Err(fail(
                format!("the download has neither a config.json nor a GGUF file ({})", folder.display()),
                format!("run `ridge pull {model}` to complete it"),
            )),
            several => {
                let names = several.iter().filter_map(|path| path.file_name()?.to_str()).collect::<Vec<_>>();
                Err(fail(
                    format!("{} GGUF files match: {}", several.len(), names.join(", ")),
                    format!("select one by a part of its name: {}:PART", model.id()),
                ))
            }
        }
    }
}

/// `HF_HOME`, or where `huggingface_hub` puts it: `huggingface` in `XDG_CACHE_HOME` or in `~/.cache`.
pub fn hugging_face_home() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = || set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    set("HF_HOME").or_else(|| Some(cache()?.join("huggingface")))
}

/// The GGUF files in a folder and in those below it, by name.
fn gguf_files(folder: &Path) -> Vec<PathBuf> {
    /// Deeper folders are none that the Hub has.
    const DEPTH: usize = 4;
    fn collect(folder: &Path, depth: usize, files: &mut Vec<PathBuf>) {
        let Ok(entries) = folder.read_dir() else { return };
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            if path.is_dir() && depth > 0 {
                collect(&path, depth - 1, files);
            } else if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
                files.push(path);
            }
        }
    }
    let mut files = Vec::new();
    collect(folder, DEPTH, &mut files);
    files.sort();
    files
}

/// The path of a model as it was given, or, if there is nothing and it is named as on the Hub, that of the downloaded one.
///
/// # Errors
/// As for [`HubCache::find`].
pub fn find_model(path: &Path) -> Result<PathBuf> {
    let named = path.to_str().and_then(|text| text.parse::<HubModel>().ok()).filter(|_| !path.exists());
    match named.zip(HubCache::from_environment()) {
        // A file that is missing rather than a repository, which end in -GGUF.
        Some((model, _)) if model.file.is_none() && model.name.to_ascii_lowercase().ends_with(".gguf") => {
            Ok(path.to_owned())
        }
        Some((model, cache)) => cache.find(&model),
        None => Ok(path.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_told_from_paths() {
        for (text, id, revision, file) in [
            ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "main", None),
            ("a/b@refs/pr/1", "a/b", "refs/pr/1", None),
            ("a/b-GGUF:q4_k_m", "a/b-GGUF", "main", Some("q4_k_m")),
            ("a/b@v1.0:Q8", "a/b", "v1.0", Some("Q8")),
        ] {
            let model: HubModel = text.parse().unwrap();
            assert_eq!((model.id().as_str(), model.revision(), model.file()), (id, revision, file), "{text}");
            assert_eq!(model.to_string(), text);
        }
        for path in
            ["model", "./model", "../a", "/a/b", "a/b/c", "a/", "/a", "a/..", "a/b@../c", "a/b@", "a/b:", "a--b/c"]
        {
            assert!(path.parse::<HubModel>().is_err(), "{path}");
        }
    }

    #[test]
    fn downloaded_models_are_found_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let cache = HubCache::new(folder.path());
        let model: HubModel = "o/n".parse().unwrap();
        let said = cache.find(&model).unwrap_err().to_string();
        assert!(said.ends_with("run `ridge pull o/n` to download it"), "{said}");
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let snapshot = cache.snapshot(&model, commit);
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(cache.reference(&model).parent().unwrap()).unwrap();
        std::fs::write(cache.reference(&model), commit).unwrap();
        assert!(cache.find(&model).unwrap_err().to_string().contains("neither a config.json nor a GGUF file"));

        for name in ["x-Q4_K_M.gguf", "x-Q8_0-00001-of-00002.gguf", "x-Q8_0-00002-of-00002.gguf"] {
            std::fs::write(snapshot.join(name), "").unwrap();
        }
        let said = cache.find(&model).unwrap_err().to_string();
        assert!(said.contains("2 GGUF files match: x-Q4_K_M.gguf, x-Q8_0-00001-of-00002.gguf"), "{said}");
        let found = |text: &str| cache.find(&text.parse().unwrap()).unwrap();
        assert_eq!(found("o/n:q8_0"), snapshot.join("x-Q8_0-00001-of-00002.gguf"));
        assert_eq!(found(&format!("o/n@{commit}:q4")), snapshot.join("x-Q4_K_M.gguf"));
        assert!(cache.find(&"o/n:f16".parse().unwrap()).is_err());
        for name in ["config.json", "model.safetensors"] {
            assert!(cache.find(&model).is_err());
            std::fs::write(snapshot.join(name), "{}").unwrap();
        }
        assert_eq!(found("o/n"), snapshot);
    }
}
