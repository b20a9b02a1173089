//! Which files make up the checkpoint in a folder.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use crate::error::{FilesError, Result};
use crate::json;
use crate::text_file::read_text;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The files of a checkpoint.
pub(crate) struct CheckpointFiles {
    pub(crate) paths: Vec<PathBuf>,
    pub(crate) index: Option<ShardIndex>,
}

/// An index of shards.
pub(crate) struct ShardIndex {
    /// The index file, for errors.
    pub(crate) file: String,
    /// From tensor names to places in [`CheckpointFiles::paths`].
    pub(crate) shard_of: BTreeMap<String, usize>,
}

/// Finds the files, in the order of preference that [`Checkpoint::open`](super::Checkpoint::open) documents.
pub(crate) fn find(dir: &Path) -> Result<CheckpointFiles> {
    let single = dir.join(SINGLE);
    if single.exists() {
        return Ok(CheckpointFiles { paths: vec![single], index: None });
    }
    let index = dir.join(INDEX);
    if index.exists() {
        return read_index(dir, &index);
    }
    match candidates(dir)?.as_slice() {
        [only] => Ok(CheckpointFiles { paths: vec![only.clone()], index: None }),
        [] => Err(FilesError::Path {
            path: dir.to_owned(),
            problem: "it contains no *.safetensors file".to_owned(),
            remedy: no_weights_remedy(dir),
        }),
        several => Err(FilesError::Path {
            path: dir.to_owned(),
            problem: format!("it contains {} *.safetensors files, but neither {SINGLE} nor {INDEX}", several.len()),
            remedy: format!("if they are shards, download {INDEX}; otherwise keep only the weights of the model"),
        }),
    }
}

/// The visible `*.safetensors` files of `dir`, by name.
fn candidates(dir: &Path) -> Result<Vec<PathBuf>> {
    let fail = |cause| FilesError::Io { path: dir.to_owned(), action: "list the folder", cause };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && path.extension() == Some(OsStr::new("safetensors")) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn no_weights_remedy(dir: &Path) -> String {
    let pickled = dir.join("pytorch_model.bin").exists() || dir.join("pytorch_model.bin.index.json").exists();
    if pickled {
        "Ridge does not open pytorch_model*.bin, because unpickling can run code: convert it to safetensors".to_owned()
    } else {
        format!("download {SINGLE}, or {INDEX} with its shards, into it")
    }
}

fn read_index(dir: &Path, path: &Path) -> Result<CheckpointFiles> {
    let file = path.display().to_string();
    let wrong = |problem: String| FilesError::Safetensors {
        file: file.clone(),
        problem,
        remedy: "download the index again".to_owned(),
    };
    let text = read_text(path, "read the index of the weights")?;
    let index = json::object(&file, text.as_bytes())?;
    let Some(weight_map) = index.get("weight_map").and_then(Value::as_object) else {
        return Err(wrong("it has no object weight_map".to_owned()));
    };
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    let mut paths = Vec::new();
    let mut shard_of = BTreeMap::new();
    for (tensor, shard) in weight_map {
        let Some(shard) = shard.as_str() else {
            return Err(wrong(format!("weight_map[{tensor:?}] = {} is not a file name", json::shown(shard))));
        };
        let place = match places.get(shard) {
            Some(&place) => place,
            None => {
                if !is_plain_name(shard) {
                    return Err(wrong(format!(
                        "weight_map[{tensor:?}] = {shard:?} is not the plain name of a *.safetensors file"
                    )));
                }
                let path = dir.join(shard);
                if !path.exists() {
                    return Err(FilesError::Path {
                        path,
                        problem: format!("this shard, which {INDEX} lists, is missing"),
                        remedy: "download it into the folder".to_owned(),
                    });
                }
                paths.push(path);
                places.insert(shard, paths.len() - 1);
                paths.len() - 1
            }
        };
        shard_of.insert(tensor.clone(), place);
    }
    if paths.is_empty() {
        return Err(wrong("its weight_map is empty".to_owned()));
    }
    Ok(CheckpointFiles { paths, index: Some(ShardIndex { file, shard_of }) })
}

/// Is `name` a file of the same folder on every system: no separator, no drive, no `..`?
fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let one = matches!(components.next(), Some(Component::Normal(_))) && components.next().is_none();
    one && !name.contains(['/', '\\', ':', '\0']) && name.ends_with(".safetensors")
}

#[cfg(test)]
mod tests {
    use super::is_plain_name;

    #[test]
    fn shard_names_cannot_leave_the_folder() {
        assert!(is_plain_name("model-00001-of-00002.safetensors"));
        for name in [
            "../x.safetensors",
            "/x.safetensors",
            "a/b.safetensors",
            "a\\b.safetensors",
            "C:x.safetensors",
            "./x.safetensors",
            "x.safetensors/",
            "..",
            ".",
            "",
            "x.bin",
            "x\0.safetensors",
        ] {
            assert!(!is_plain_name(name), "{name:?}");
        }
    }
}
