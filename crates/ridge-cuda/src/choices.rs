//! The choice file: which of several kernels was fastest, measured once on a machine and read back by later processes.
//!
//! TOML, one `[[choice]]` an entry: the device with the versions of what runs on it, the op with its shape range and
//! dtypes, the kernel's name and its time. The same file gives the same choices without timing. `RIDGE_CUDA_CHOICES` names
//! another file than that of the kernel cache's folder. A file that cannot be read as this version is reported,
//! ignored and replaced at the next measurement; one that cannot be written is none.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::cache;

/// The layout of the file.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ChoiceTable {
    version: u32,
    #[serde(default, rename = "choice")]
    choices: Vec<Choice>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Choice {
    device: String,
    op: String,
    chosen: String,
    microseconds: f64,
}

type Known = BTreeMap<(String, String), Choice>;

/// The choices of one device, and the file that keeps them.
pub(crate) struct ChoiceFile {
    path: Option<PathBuf>,
    /// The device, and what else a time depends on.
    device: String,
    known: Mutex<Known>,
}

impl ChoiceFile {
    /// The file of this user for `device`.
    pub(crate) fn of_user(device: String) -> Self {
        let named = std::env::var_os("RIDGE_CUDA_CHOICES").map(PathBuf::from);
        let (file, why) = Self::at(named.or_else(|| Some(cache::folder_of_user()?.join("choices.toml"))), device);
        if let Some(why) = why {
            // A warning that cannot be written is lost: that is no reason to panic.
            let _ = writeln!(
                std::io::stderr().lock(),
                "warning: {why}; its choices are ignored, kernels are timed again and the file is replaced"
            );
        }
        file
    }

    /// The file at `path`, and what is wrong with it.
    fn at(path: Option<PathBuf>, device: String) -> (Self, Option<String>) {
        let (known, why) = match path.as_deref().map(read) {
            None => (Known::new(), None),
            Some(Ok(known)) => (known, None),
            Some(Err(why)) => (Known::new(), Some(why)),
        };
        (Self { path, device, known: Mutex::new(known) }, why)
    }

    /// The index in `offered` of the kernel that is kept for `op`, else of the one that `time` finds the fastest,
    /// with its seconds, which is then kept.
    pub(crate) fn choose<E>(
        &self,
        op: &str,
        offered: &[&str],
        time: impl FnOnce() -> Result<(usize, f64), E>,
    ) -> Result<usize, E> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (self.device.clone(), op.to_owned());
        let kept = known.get(&key).and_then(|choice| offered.iter().position(|name| *name == choice.chosen));
        if let Some(index) = kept {
            return Ok(index);
        }
        let (index, seconds) = time()?;
        let choice = Choice {
            device: self.device.clone(),
            op: op.to_owned(),
            chosen: offered[index].to_owned(),
            microseconds: seconds * 1e6,
        };
        known.insert(key.clone(), choice.clone());
        if let Some(path) = &self.path {
            // Another process may have added to the file since.
            let mut all = read(path).unwrap_or_default();
            all.insert(key, choice);
            let table = ChoiceTable { version: VERSION, choices: all.into_values().collect() };
            if let Ok(text) = toml::to_string(&table) {
                // The next process measures again, which costs time alone.
                let _ = cache::replace(path, &[text.as_bytes()]);
            }
        }
        Ok(index)
    }
}

/// The choices of a file, none if there is none.
fn read(path: &Path) -> Result<Known, String> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(why) if why.kind() == std::io::ErrorKind::NotFound => return Ok(Known::new()),
        Err(why) => return Err(format!("{}: {why}", path.display())),
    };
    let table: ChoiceTable = toml::from_str(&text).map_err(|why| format!("{}: {}", path.display(), why.message()))?;
    if table.version != VERSION {
        return Err(format!("{}: version {} of a choice file, known is {VERSION}", path.display(), table.version));
    }
    Ok(table.choices.into_iter().map(|choice| ((choice.device.clone(), choice.op.clone()), choice)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &Path, device: &str) -> (ChoiceFile, Option<String>) {
        ChoiceFile::at(Some(path.into()), device.into())
    }

    /// Times nothing: `None` if that was asked for.
    fn kept(file: &ChoiceFile, op: &str, offered: &[&str]) -> Option<usize> {
        file.choose(op, offered, || Err(())).ok()
    }

    #[test]
    fn choice_is_timed_once_and_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/choices.toml");
        let (first, why) = file(&path, "a");
        assert_eq!((kept(&first, "x", &["p", "q"]), why), (None, None));
        assert_eq!(first.choose("x", &["p", "q"], || Ok::<_, ()>((1, 2e-6))), Ok(1));
        assert_eq!(kept(&first, "x", &["p", "q"]), Some(1));
        // By name: where it stands among what is offered does not matter.
        let (second, why) = file(&path, "a");
        assert_eq!((kept(&second, "x", &["q", "p", "r"]), why), (Some(0), None));
        assert_eq!(kept(&second, "y", &["q"]), None, "another op");
        assert_eq!(kept(&file(&path, "b").0, "x", &["q"]), None, "another device");
        let text = std::fs::read_to_string(&path).unwrap();
        for part in
            ["version = 1", "[[choice]]", "device = \"a\"", "op = \"x\"", "chosen = \"q\"", "microseconds = 2.0"]
        {
            assert!(text.contains(part), "{part} is missing in\n{text}");
        }
    }

    #[test]
    fn choice_that_is_no_longer_offered_is_timed_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("choices.toml");
        file(&path, "a").0.choose("x", &["p", "q"], || Ok::<_, ()>((1, 1e-6))).unwrap();
        let (next, _) = file(&path, "a");
        assert_eq!(next.choose("x", &["p", "r"], || Ok::<_, ()>((0, 1e-6))), Ok(0));
        assert_eq!(kept(&file(&path, "a").0, "x", &["q", "p"]), Some(1));
    }

    #[test]
    fn broken_file_is_reported_ignored_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("choices.toml");
        for (text, said) in [("version = 1\n[[choice", "choices.toml"), ("version = 2\n", "version 2"), ("x = 1", "x")]
        {
            std::fs::write(&path, text).unwrap();
            let (broken, why) = file(&path, "a");
            let why = why.expect("is reported");
            assert!(why.contains(said), "{why}");
            assert_eq!(kept(&broken, "x", &["p"]), None);
            broken.choose("x", &["p"], || Ok::<_, ()>((0, 1e-6))).unwrap();
            let (again, why) = file(&path, "a");
            assert_eq!((kept(&again, "x", &["p"]), why), (Some(0), None));
        }
    }

    #[test]
    fn processes_add_to_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("choices.toml");
        let (one, other) = (file(&path, "a").0, file(&path, "b").0);
        one.choose("x", &["p"], || Ok::<_, ()>((0, 1e-6))).unwrap();
        other.choose("x", &["q"], || Ok::<_, ()>((0, 1e-6))).unwrap();
        assert_eq!(kept(&file(&path, "a").0, "x", &["p"]), Some(0));
        assert_eq!(kept(&file(&path, "b").0, "x", &["q"]), Some(0));
    }

    #[test]
    fn without_a_file_choices_are_of_the_process() {
        let (file, why) = ChoiceFile::at(None, "a".into());
        assert_eq!(file.choose("x", &["p"], || Ok::<_, ()>((0, 1e-6))), Ok(0));
        assert_eq!((kept(&file, "x", &["p"]), why), (Some(0), None));
    }
}
