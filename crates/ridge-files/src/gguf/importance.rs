//! Importance matrices: for each matrix of a model, the mean square of each of its inputs over some text, used as weights of
//! quantisation errors.
//!
//! `llama-imatrix` writes them as GGUF (tensors `NAME.in_sum2` and `NAME.counts`), and formerly as a list: a count, and for each
//! matrix its name, the number of summed runs, and the sums; all numbers have 32 bits.

use std::collections::BTreeMap;
use std::path::Path;

use ridge_graph::DType;

use super::container::Gguf;
use super::storage::TensorStorage;
use crate::error::{FilesError, Result};
use crate::mapped::MappedFile;

/// How much each input of each matrix matters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImportanceMatrix {
    /// The file, for errors.
    file: String,
    /// By the names of matrices.
    inputs: BTreeMap<String, Vec<f32>>,
}

impl ImportanceMatrix {
    /// Reads a file in either layout.
    ///
    /// # Errors
    ///
    /// [`FilesError::Io`] if it cannot be read, [`FilesError::Gguf`] if it is no importance matrix, or one with numbers
    /// that are no mean squares.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let io = |cause| FilesError::Io { path: path.to_owned(), action: "read the importance matrix", cause };
        let bytes = MappedFile::open(path).map_err(io)?;
        if bytes.starts_with(b"GGUF") {
            return Self::of_gguf(&Gguf::open(path)?);
        }
        Self::from_list(&path.display().to_string(), &bytes)
    }

    /// Reads a list. `file` names it in errors.
    ///
    /// # Errors
    ///
    /// As for [`ImportanceMatrix::open`].
    pub fn from_list(file: &str, bytes: &[u8]) -> Result<Self> {
        let read = || {
            let mut list = List(bytes);
            let mut all = BTreeMap::new();
            for _ in 0..list.number()? {
                let len = list.number()?;
                let name = std::str::from_utf8(list.take(len)?).ok()?.to_owned();
                let (runs, inputs) = (list.number()?, list.number()?);
                let sums = DType::F32.decode(list.take(inputs.checked_mul(4)?)?);
                let mean = |sum: f64| (sum / runs.max(1) as f64) as f32;
                // What was never run says nothing.
                if runs > 0 {
                    all.insert(name, sums.into_iter().map(mean).collect());
                }
            }
            Some(all)
        };
        let fail = |problem| no_matrix(file, problem);
        Self::checked(file, read().ok_or_else(|| fail("it is neither GGUF nor a list of names and numbers"))?)
    }

    fn of_gguf(gguf: &Gguf) -> Result<Self> {
        let plain = TensorStorage::plain(DType::F32);
        let find = |name: &str| {
            let found = gguf.tensors().iter().find(|t| t.name == name && t.storage == plain)?;
            Some(found.storage.decode(gguf.data(found)))
        };
        let mut all = BTreeMap::new();
        for tensor in gguf.tensors() {
            let Some(name) = tensor.name.strip_suffix(".in_sum2") else { continue };
            let (sums, counts) = (find(&tensor.name), find(&format!("{name}.counts")));
            let Some((sums, count)) = sums.zip(counts.and_then(|counts| counts.first().copied())) else { continue };
            if count > 0.0 {
                all.insert(name.to_owned(), sums.iter().map(|sum| sum / count).collect());
            }
        }
        Self::checked(gguf.file(), all)
    }

    fn checked(file: &str, all: BTreeMap<String, Vec<f32>>) -> Result<Self> {
        if all.is_empty() {
            return Err(no_matrix(file, "it says nothing of any matrix"));
        }
        let wrong = |v: &&f32| !v.is_finite() || **v < 0.0;
        match all.iter().find_map(|(name, values)| Some((name, values.iter().find(wrong)?))) {
            Some((name, value)) => Err(no_matrix(file, &format!("it has {value} for {name}, which is no mean square"))),
            None => Ok(Self { file: file.to_owned(), inputs: all }),
        }
    }

    /// Of the inputs of the matrix called `name`, if it has `inputs` of them.
    pub fn of(&self, name: &str, inputs: usize) -> Option<&[f32]> {
        self.inputs.get(name).filter(|values| values.len() == inputs).map(Vec::as_slice)
    }

    /// Requires that it covers one of `matrices`, names and numbers of inputs, and none with another number of inputs.
    ///
    /// # Errors
    ///
    /// [`FilesError::Gguf`] if it is of another model.
    pub fn check<'a>(&self, matrices: impl Iterator<Item = (&'a str, usize)>) -> Result<()> {
        let fail = |problem: String| Err(no_matrix(&self.file, &problem));
        let mut none = true;
        for (name, inputs) in matrices {
            let Some(values) = self.inputs.get(name) else { continue };
            none = false;
            if values.len() != inputs {
                return fail(format!("it has {} inputs for {name}, which has {inputs} in this model", values.len()));
            }
        }
        if none { fail("it says nothing of the matrices of this model".to_owned()) } else { Ok(()) }
    }

    /// How many matrices it covers.
    pub fn len(&self) -> usize {
        self.inputs.len()
    }

    /// Whether it covers none.
    pub fn is_empty(&self) -> bool {
        self.inputs.is_empty()
    }
}

fn no_matrix(file: &str, problem: &str) -> FilesError {
    FilesError::Gguf {
        file: file.to_owned(),
        problem: format!("as an importance matrix, {problem}"),
        remedy: "make one of this model with llama-imatrix".to_owned(),
    }
}

/// What is left of a list.
struct List<'a>(&'a [u8]);

impl<'a> List<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    /// A number of 0 or more.
    fn number(&mut self) -> Option<usize> {
        let bytes = self.take(4)?.try_into().ok()?;
        i32::from_le_bytes(bytes).try_into().ok()
    }
}
