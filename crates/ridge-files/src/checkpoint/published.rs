//! The tensors of a checkpoint as its family publishes them: the inverse of `divide.rs` and `stack.rs`.

use std::collections::BTreeMap;

use super::parts::{Part, Stack};
use super::pattern::star;
use super::rearrange::transpose;
use super::tensors::{Checkpoint, TensorView};

/// A tensor as it is published.
#[derive(Debug)]
pub struct Published<'a> {
    /// Its published name.
    pub name: String,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
    /// The weights that it is made of.
    pub views: Vec<TensorView<'a>>,
    /// Where their rows go; nothing if it is one weight as it is.
    parts: Vec<Part>,
}

impl Checkpoint {
    /// The tensors of which the weights in this checkpoint are `parts` or `stacks`, and those weights that are published as
    /// they are.
    pub fn published(&self, parts: &[Part], stacks: &[Stack]) -> Vec<Published<'_>> {
        let mut fused: BTreeMap<String, (Vec<TensorView<'_>>, Vec<Part>)> = BTreeMap::new();
        let mut out = Vec::new();
        for view in self.tensors() {
            let part = parts.iter().find_map(|part| Some((part, star(&part.name, view.name)?)));
            if let Some((part, star)) = part {
                let (views, parts) = fused.entry(part.of.replace('*', star)).or_default();
                views.push(view);
                parts.push(part.clone());
            } else if let Some((stack, star)) = stacks.iter().find_map(|s| Some((s, star(&s.name, view.name)?))) {
                fn nth<'a>(all: &'a [u8], stack: &Stack, number: usize) -> &'a [u8] {
                    let bytes = all.len() / stack.count.max(1);
                    &all[number * bytes..][..bytes]
                }
                for number in 0..stack.count {
                    let name = stack.of.replacen('*', star, 1).replace('*', &number.to_string());
                    let (data, scales) =
                        (nth(view.data, stack, number), view.scales.map(|all| nth(all, stack, number)));
                    let one = TensorView { shape: &view.shape[1..], data, scales, ..view };
                    out.push(Published { name, shape: one.shape.to_vec(), views: vec![one], parts: Vec::new() });
                }
            } else {
                let (name, shape) = (view.name.to_owned(), view.shape.to_vec());
                out.push(Published { name, shape, views: vec![view], parts: Vec::new() });
            }
        }
        for (name, (views, parts)) in fused {
            let mut shape = views[0].shape.to_vec();
            let axis = row_axis(&views[0], &parts[0]);
            shape[axis] = views.iter().map(|view| view.shape[axis]).sum();
            if parts[0].transposed && axis + 1 < shape.len() {
                shape.swap(axis, axis + 1);
            }
            out.push(Published { name, shape, views, parts });
        }
        out
    }
}

/// The axis of a weight's rows: the last but one of matrices, and the last of vectors.
fn row_axis(view: &TensorView<'_>, part: &Part) -> usize {
    let vectors = view.shape.len() == 1 || part.name.ends_with(".bias");
    view.shape.len() - if vectors { 1 } else { 2 }
}

impl Published<'_> {
    /// Its elements; `plain` gives those of a weight, row-major.
    ///
    /// # Errors
    /// Those of `plain`.
    pub fn bytes<E>(&self, plain: impl Fn(&TensorView<'_>) -> Result<Vec<u8>, E>) -> Result<Vec<u8>, E> {
        if self.parts.is_empty() {
            return plain(&self.views[0]);
        }
        let axis = row_axis(&self.views[0], &self.parts[0]);
        let rows_of = |view: &TensorView<'_>| -> usize { view.shape[..=axis].iter().product() };
        let rows: usize = self.views.iter().map(rows_of).sum();
        let width = self.views[0].shape.get(axis + 1).copied().unwrap_or(1);
        let mut whole = Vec::new();
        let mut element = 1;
        for (view, part) in self.views.iter().zip(&self.parts) {
            let bytes = plain(view)?;
            let row = bytes.len() / rows_of(view).max(1);
            element = row / width.max(1);
            whole.resize(rows * row, 0);
            let to: Vec<usize> = match part.rows {
                Some(rows) => rows.iter().collect(),
                None => (0..rows_of(view)).collect(),
            };
            for (from, to) in bytes.chunks_exact(row.max(1)).zip(to) {
                whole[to * row..][..row].copy_from_slice(from);
            }
        }
        if self.parts[0].transposed && axis + 1 < self.views[0].shape.len() {
            let columns: Vec<usize> = (0..width).collect();
            let matrices: usize = self.views[0].shape[..axis].iter().product();
            let rows = rows / matrices.max(1);
            let matrices = whole.chunks_exact((rows * width * element).max(1));
            return Ok(matrices.flat_map(|matrix| transpose(matrix, [rows, width], &columns, element)).collect());
        }
        Ok(whole)
    }
}
