//! Opening a model in one file or in several: `NAME-00001-of-00003.gguf` and so on, as `llama-gguf-split` writes them. The
//! first has the metadata, each has its number (`split.no`, counted from 0) and how many there are (`split.count`).

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use super::container::Gguf;
use super::read::check_names;
use crate::bytes::FileBytes;
use crate::error::{FilesError, Result};

/// Which part of how many.
const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
/// Tensors of all parts.
const TENSORS: &str = "split.tensors.count";

/// More parts are a damaged file rather than a model.
const MAX_PARTS: u64 = 99_999;

impl Gguf {
    /// Maps the file at `path` and reads its header. Of a model in several files, `path` is any one of them, and all are
    /// opened.
    ///
    /// # Errors
    ///
    /// [`FilesError::Io`] if a file cannot be mapped, [`FilesError::Gguf`] if a part is missing or of another model,
    /// else as for [`Gguf::from_bytes`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let part = Self::open_alone(path)?;
        match count(&part)? {
            1 => Ok(part),
            count => join(path, part, count),
        }
    }

    /// Reads a file that is in memory, the only one of its model. `file` names it in errors.
    ///
    /// # Errors
    ///
    /// [`FilesError::Gguf`] if the bytes are no GGUF file, break the format, or hold something that Ridge does not know.
    pub fn from_bytes(file: &str, bytes: impl Into<Cow<'static, [u8]>>) -> Result<Self> {
        let gguf = Self::read(file.to_owned(), FileBytes::InMemory(bytes.into()))?;
        match count(&gguf)? {
            1 => Ok(gguf),
            count => Err(gguf.fail(format!("it is one of {count} parts"), "open it where the others lie beside it")),
        }
    }
}

/// Whether a metadata key describes the parts and not the model.
pub fn is_split_key(key: &str) -> bool {
    matches!(key, NUMBER | COUNT | TENSORS)
}

/// How many files the model of `gguf` is in.
fn count(gguf: &Gguf) -> Result<u64> {
    let count = gguf.int(COUNT)?.unwrap_or(1).max(1);
    if count > MAX_PARTS {
        return Err(gguf.wrong(COUNT, &format!("= {count} exceeds {MAX_PARTS}")));
    }
    Ok(count)
}

/// The whole model of which `part`, read from `path`, is one of `count` files.
fn join(path: &Path, part: Gguf, count: u64) -> Result<Gguf> {
    let number = gguf_number(&part)?;
    let beside = |i: u64| named(path, number, i, count);
    if beside(number).is_none() {
        let name = format!("NAME-{:05}-of-{count:05}.gguf", number + 1);
        let problem = format!("it is part {} of {count}, but its name is not {name}", number + 1);
        return Err(part.fail(problem, "rename the parts to their published names"));
    }
    let mut all: Option<Gguf> = None;
    let mut given = Some(part);
    for i in 0..count {
        let this = match given.take_if(|_| i == number) {
            Some(given) => given,
            None => open(&beside(i).unwrap_or_default(), i, count, path)?,
        };
        match &mut all {
            None => all = Some(this),
            Some(all) => add(all, this)?,
        }
    }
    let Some(all) = all else { unreachable!("there is a part at least") };
    check_names(&all.tensors)
        .map_err(|problem| all.fail(format!("with its parts it {problem}"), "download all parts again"))?;
    match all.int(TENSORS)? {
        Some(said) if said != all.tensors.len() as u64 => {
            let problem = format!("its {count} parts have {} tensors, but {TENSORS} = {said}", all.tensors.len());
            Err(all.fail(problem, "download all parts again, from one revision"))
        }
        _ => Ok(all),
    }
}

fn gguf_number(part: &Gguf) -> Result<u64> {
    let (number, count) = (part.int(NUMBER)?, part.int(COUNT)?.unwrap_or(1));
    let number = part.needed(NUMBER, number)?;
    if number >= count {
        return Err(part.wrong(NUMBER, &format!("= {number}, but there are {count} parts")));
    }
    Ok(number)
}

/// The `i`-th part beside `path`, which is the one with `number`, if it is called so.
fn named(path: &Path, number: u64, i: u64, count: u64) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(&format!("-{:05}-of-{count:05}.gguf", number + 1))?;
    Some(path.with_file_name(format!("{stem}-{:05}-of-{count:05}.gguf", i + 1)))
}

fn open(path: &Path, i: u64, count: u64, of: &Path) -> Result<Gguf> {
    if !path.exists() {
        return Err(FilesError::Gguf {
            file: of.display().to_string(),
            problem: format!("it has {count} parts, but {} does not exist", path.display()),
            remedy: "download all parts into one folder".to_owned(),
        });
    }
    let part = Gguf::open_alone(path)?;
    if part.int(NUMBER)? != Some(i) || self::count(&part)? != count {
        let problem = format!("its name says part {} of {count}, but its metadata do not", i + 1);
        return Err(part.fail(problem, "download all parts again, from one revision"));
    }
    Ok(part)
}

/// Adds the tensors of the next part.
fn add(all: &mut Gguf, next: Gguf) -> Result<()> {
    let at = all.parts.len();
    for mut tensor in next.tensors {
        tensor.part = at;
        all.tensors.push(tensor);
    }
    all.parts.extend(next.parts);
    Ok(())
}
