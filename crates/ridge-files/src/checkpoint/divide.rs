//! Dividing published tensors into the weights of a graph.
//!
//! Consecutive rows stay where they are: such a part is a range of the mapped file. Other parts are copied when they
//! are first read.

use std::ops::Range;
use std::sync::Arc;

use super::parts::{Part, Rows};
use super::pattern::{matches, star};
use super::rearrange::{How, Rearranged};
use super::tensors::{Checkpoint, StoredTensor};
use crate::error::{FilesError, Result};

impl Checkpoint {
    /// The checkpoint with each tensor that `parts` name replaced by its parts; as it is if it came from a file whose
    /// tensors have been taken apart.
    ///
    /// # Errors
    ///
    /// [`FilesError::Safetensors`] if a tensor has fewer rows than its parts need, or is transposed and no matrix, or
    /// if none has a name that a part asks for.
    pub fn divided(mut self, parts: &[Part]) -> Result<Self> {
        if self.arranged {
            return Ok(self);
        }
        let mut whole = Vec::new();
        for part in parts {
            let before = whole.len();
            for (name, entry) in &self.tensors {
                if let Some(star) = star(&part.of, name) {
                    let entry = entry.part(part).map_err(|problem| self.wrong(format!("{name} {problem}")))?;
                    whole.push((name.clone(), part.name.replace('*', star), entry));
                }
            }
            if whole.len() == before {
                return Err(self.wrong(format!("there is no tensor {}", part.of)));
            }
        }
        for (published, _, _) in &whole {
            self.tensors.remove(published);
        }
        for (_, name, entry) in whole {
            if self.tensors.insert(name.clone(), entry).is_some() {
                return Err(self.wrong(format!("{name} is there as a tensor and as a part of another")));
            }
        }
        Ok(self)
    }

    /// The checkpoint with `prefix` before each name, if it holds `tensor` only without: a model that was saved
    /// without its head has names of its own.
    #[must_use]
    pub fn prefixed(mut self, prefix: &str, tensor: &str) -> Self {
        let bare = !self.arranged && tensor.strip_prefix(prefix).is_some_and(|bare| self.contains(bare));
        if bare && !self.contains(tensor) {
            self.tensors = self.tensors.into_iter().map(|(name, entry)| (format!("{prefix}{name}"), entry)).collect();
        }
        self
    }

    /// The checkpoint without the tensors whose names match one of `patterns`, in which `*` stands for any characters.
    #[must_use]
    pub fn without(mut self, patterns: &[&str]) -> Self {
        self.tensors.retain(|name, _| !patterns.iter().any(|pattern| matches(pattern, name)));
        self
    }

    fn wrong(&self, problem: String) -> FilesError {
        FilesError::Safetensors {
            file: self.name.clone(),
            problem,
            remedy: "check that config.json belongs to this checkpoint".to_owned(),
        }
    }
}

impl StoredTensor {
    fn part(&self, part: &Part) -> Result<Self, String> {
        let shape = || format!("has the shape {:?}", self.shape);
        let transposed = part.transposed && self.shape.len() > 1;
        let rows = match self.shape[..] {
            [rows, columns] => {
                if transposed {
                    columns
                } else {
                    rows
                }
            }
            [rows] => rows,
            _ => return Err(format!("{}, and should be a matrix or a vector", shape())),
        };
        let wanted = part.rows.unwrap_or(Rows::range(0, rows));
        if wanted.end() > rows {
            return Err(format!("{}, and should have {} rows or more", shape(), wanted.end()));
        }
        let mut extents = self.shape.clone();
        if transposed {
            extents.swap(0, 1);
        }
        extents[0] = wanted.count();
        let element = self.dtype.size_bytes();
        let (mut range, mut rearranged) = (self.range.clone(), None);
        if transposed || wanted.blocks > 1 {
            let published = [self.shape[0], self.shape.get(1).copied().unwrap_or(1)];
            let how = How::Rows { shape: published, transposed, rows: wanted, element };
            rearranged = Some(Arc::new(Rearranged::new(how)));
        } else {
            let row = self.shape.get(1).copied().unwrap_or(1) * element;
            range = Range { start: range.start + wanted.first * row, end: range.start + wanted.end() * row };
        }
        Ok(Self { shard: self.shard, dtype: self.dtype, format: None, shape: extents, range, rearranged })
    }
}
