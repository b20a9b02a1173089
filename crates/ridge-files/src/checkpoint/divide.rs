//! Dividing published tensors into the weights of a graph.
//!
//! Consecutive rows stay where they are: such a part is a range of the mapped file. Other parts are copied when they
//! are first read.

use std::collections::BTreeMap;
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
    /// [`FilesError::Safetensors`] if the parts of a tensor do not cover its rows exactly, once each, if it has more than three
    /// axes, or if none has a name that a part asks for, nor that of the part itself.
    pub fn divided(mut self, parts: &[Part]) -> Result<Self> {
        if self.arranged {
            return Ok(self);
        }
        let mut whole = Vec::new();
        let mut covered: BTreeMap<&str, Vec<Range<usize>>> = BTreeMap::new();
        for part in parts {
            let before = whole.len();
            for (name, entry) in &self.tensors {
                if let Some(star) = star(&part.of, name) {
                    let wrong = |problem| self.wrong(format!("{name} {problem}"));
                    let rows = part.rows.unwrap_or(Rows::range(0, entry.rows(part).map_err(wrong)?));
                    covered.entry(name).or_default().extend(rows.ranges());
                    let entry = entry.part(part).map_err(wrong)?;
                    whole.push((name.clone(), part.name.replace('*', star), entry));
                }
            }
            // Where a tensor is published in one of two forms, the weight may be there already.
            let there = || self.tensors.keys().any(|name| star(&part.name, name).is_some());
            if whole.len() == before && !there() {
                return Err(self.wrong(format!("there is no tensor {}", part.of)));
            }
        }
        // A row that no part takes, or two, says that the sizes are those of another model.
        for (name, mut ranges) in covered {
            ranges.sort_by_key(|range| range.start);
            let end = ranges.iter().try_fold(0, |end, range| (range.start == end).then_some(range.end));
            let part = parts.iter().find(|part| star(&part.of, name).is_some());
            let rows = part.and_then(|part| self.tensors[name].rows(part).ok()).unwrap_or_default();
            if end != Some(rows) {
                let asked: usize = ranges.iter().map(ExactSizeIterator::len).sum();
                return Err(self.wrong(format!("{name} has {rows} rows, but the configuration requires {asked}")));
            }
        }
        for (published, _, _) in &whole {
            self.tensors.remove(published);
        }
        for (_, name, entry) in whole {
            if self.tensors.insert(name.clone(), entry).is_some() {
                return Err(self.wrong(format!("{name} exists both as a tensor and as a part of another")));
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

    /// The checkpoint with other names: those that `rename` gives, and as they were where it gives none.
    ///
    /// # Errors
    ///
    /// [`FilesError::Safetensors`] if two tensors would have one name.
    pub fn renamed(mut self, rename: impl Fn(&str) -> Option<String>) -> Result<Self> {
        for (name, entry) in std::mem::take(&mut self.tensors) {
            let new = rename(&name).unwrap_or(name);
            if self.tensors.insert(new.clone(), entry).is_some() {
                return Err(self.wrong(format!("{new} exists under two names")));
            }
        }
        Ok(self)
    }

    /// The checkpoint with the tensors of `other` too, each with `prefix` before its name.
    ///
    /// # Errors
    ///
    /// [`FilesError::Safetensors`] if two tensors would have one name.
    pub fn with_tensors(mut self, prefix: &str, other: Self) -> Result<Self> {
        let first = self.shards.len();
        for (name, mut tensor) in other.tensors {
            tensor.shard += first;
            tensor.scales.iter_mut().for_each(|scales| scales.shard += first);
            let name = format!("{prefix}{name}");
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(self.wrong(format!("{name} is also in {}", other.name)));
            }
        }
        self.shards.extend(other.shards);
        self.unused.extend(other.unused);
        Ok(self)
    }

    /// The checkpoint with the tensor `name`, if it has as many elements, in this shape: a graph may have as a matrix what
    /// is published with more axes.
    #[must_use]
    pub fn reshaped(mut self, name: &str, shape: &[usize]) -> Self {
        let elements = |shape: &[usize]| shape.iter().try_fold(1_usize, |n, extent| n.checked_mul(*extent));
        if let Some(tensor) = self.tensors.get_mut(name)
            && elements(&tensor.shape) == elements(shape)
        {
            tensor.shape = shape.to_vec();
        }
        self
    }

    /// The checkpoint without the tensors whose names match one of `patterns`, in which `*` stands for any characters.
    #[must_use]
    pub fn without(mut self, patterns: &[&str]) -> Self {
        self.tensors.retain(|name, _| !patterns.iter().any(|pattern| matches(pattern, name)));
        self
    }

    /// As [`Checkpoint::without`], and [`Checkpoint::unused`] has the names.
    #[must_use]
    pub fn leaving_out(mut self, patterns: &[&str]) -> Self {
        let of_model = |name: &String| !patterns.iter().any(|pattern| matches(pattern, name));
        self.unused.extend(self.tensors.keys().filter(|name| !of_model(name)).cloned());
        self.tensors.retain(|name, _| of_model(name));
        self
    }

    pub(super) fn wrong(&self, problem: String) -> FilesError {
        FilesError::Safetensors {
            file: self.name.clone(),
            problem,
            remedy: "check that config.json belongs to this checkpoint".to_owned(),
        }
    }
}

impl StoredTensor {
    /// The tensor as matrices, one unless it has a leading axis of experts: how many, and the rows and columns of each. Of
    /// biases an element is a row.
    fn matrices(&self, part: &Part) -> Result<[usize; 3], String> {
        match self.shape[..] {
            [experts, rows] if part.name.ends_with(".bias") => Ok([experts, rows, 1]),
            [experts, rows, columns] => Ok([experts, rows, columns]),
            [rows, columns] => Ok([1, rows, columns]),
            [rows] => Ok([1, rows, 1]),
            _ => Err(format!("has the shape {:?}, but should have at most three axes", self.shape)),
        }
    }

    /// Are its matrices the transposes of what is meant? What is in blocks never is: they lie along a product's inputs, as the
    /// weight's rows do.
    fn transposed(&self, part: &Part) -> bool {
        part.transposed && self.shape.len() > 1 && self.format.is_none()
    }

    /// Rows of all matrices, or columns if these are the transposes of what is meant.
    fn rows(&self, part: &Part) -> Result<usize, String> {
        let [experts, rows, columns] = self.matrices(part)?;
        Ok(experts * if self.transposed(part) { columns } else { rows })
    }

    fn part(&self, part: &Part) -> Result<Self, String> {
        if self.scales.is_some() {
            return Err("is stored as codes with block scales, which are not divided".to_owned());
        }
        let transposed = self.transposed(part);
        let [experts, height, width] = self.matrices(part)?;
        let rows = self.rows(part)?;
        let wanted = part.rows.unwrap_or(Rows::range(0, rows));
        if wanted.end() > rows {
            return Err(format!("has the shape {:?}, but should have at least {} rows", self.shape, wanted.end()));
        }
        if !wanted.count().is_multiple_of(experts.max(1)) {
            return Err(format!("has the shape {:?}, whose experts cannot share {} rows", self.shape, wanted.count()));
        }
        let mut extents = self.shape.clone();
        let axis = extents.len() - if self.shape.len() == 1 || part.name.ends_with(".bias") { 1 } else { 2 };
        if transposed {
            extents.swap(axis, axis + 1);
        }
        extents[axis] = wanted.count() / if axis > 0 { experts.max(1) } else { 1 };
        let element = self.dtype.size_bytes();
        let (mut range, mut rearranged) = (self.range.clone(), None);
        if let Some(blocks) = self.rearranged.as_ref().and_then(|rearranged| rearranged.of_rows(wanted)) {
            rearranged = Some(Arc::new(blocks));
        } else if transposed || wanted.blocks > 1 {
            let how = match (transposed, experts) {
                (true, 1) => How::Rows { shape: [height, width], transposed, rows: wanted, element },
                (true, _) => How::Columns { shape: [height, width], rows: wanted, element },
                (false, _) => How::Rows { shape: [experts * height, width], transposed, rows: wanted, element },
            };
            rearranged = Some(Arc::new(Rearranged::new(how)));
        } else {
            let row = width * element;
            range = Range { start: range.start + wanted.first * row, end: range.start + wanted.end() * row };
        }
        let (shard, dtype, format) = (self.shard, self.dtype, self.format.clone());
        Ok(Self { shard, dtype, format, shape: extents, range, rearranged, scales: None })
    }
}
