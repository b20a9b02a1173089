//! Weights that are composed of several published tensors of one shape. If these are contiguous in one file, the weight is that
//! range of it; otherwise they are copied together when the weight is first read.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::parts::Stack;
use super::rearrange::{How, Joined, Rearranged};
use super::tensors::{Checkpoint, StoredTensor};
use crate::error::Result;

/// What the two `*` of `pattern` stand for when `name` matches it, if the second is a number.
pub(super) fn stars<'a>(pattern: &str, name: &'a str) -> Option<(&'a str, usize)> {
    let (head, rest) = pattern.split_once('*')?;
    let (middle, tail) = rest.split_once('*')?;
    let (star, number) = name.strip_prefix(head)?.strip_suffix(tail)?.rsplit_once(middle)?;
    Some((star, number.parse().ok()?))
}

impl Checkpoint {
    /// The checkpoint with the tensors that `stacks` name in the place of one weight for each of them; as it is if it came
    /// from a file whose tensors have the names of weights.
    ///
    /// # Errors
    ///
    /// [`FilesError::Safetensors`](crate::FilesError::Safetensors) if some but not all tensors of a stack are there, if there are more, if they differ in dtype or
    /// shape, or if there is a tensor with the name of the weight.
    pub fn stacked(mut self, stacks: &[Stack]) -> Result<Self> {
        if self.arranged {
            return Ok(self);
        }
        for stack in stacks {
            let mut found: BTreeMap<String, BTreeMap<usize, String>> = BTreeMap::new();
            for name in self.tensors.keys() {
                if let Some((star, number)) = stars(&stack.of, name) {
                    found.entry(star.to_owned()).or_default().insert(number, name.clone());
                }
            }
            for (star, members) in found {
                let entry = self.joined(stack, &star, &members)?;
                for name in members.values() {
                    self.tensors.remove(name);
                }
                let name = stack.name.replace('*', &star);
                if self.tensors.insert(name.clone(), entry).is_some() {
                    return Err(self.wrong(format!("{name} exists both as one tensor and as several")));
                }
            }
        }
        Ok(self)
    }

    fn joined(&self, stack: &Stack, star: &str, members: &BTreeMap<usize, String>) -> Result<StoredTensor> {
        let named = |number: &str| stack.of.replacen('*', star, 1).replace('*', number);
        if let Some(missing) = (0..stack.count).find(|number| !members.contains_key(number)) {
            return Err(self.wrong(format!("there is no tensor {}", named(&missing.to_string()))));
        }
        if members.len() > stack.count {
            let (asked, there) = (stack.count, members.len());
            return Err(self.wrong(format!("there are {there} tensors {}, but {asked} are expected", named("*"))));
        }
        let parts: Vec<&StoredTensor> = members.values().map(|name| &self.tensors[name]).collect();
        let names: Vec<&str> = members.values().map(String::as_str).collect();
        self.concatenated(&parts, &names)
    }

    /// `parts`, which are called `names`, as one tensor with an axis in front that counts them.
    fn concatenated(&self, parts: &[&StoredTensor], names: &[&str]) -> Result<StoredTensor> {
        let first = parts[0];
        for (part, name) in parts.iter().zip(names) {
            if (part.dtype, &part.shape, &part.format) != (first.dtype, &first.shape, &first.format) {
                let problem = format!(
                    "{name} is {}{:?}, but others are {}{:?}",
                    part.dtype, part.shape, first.dtype, first.shape
                );
                return Err(self.wrong(problem));
            }
        }
        let scales: Vec<&StoredTensor> = parts.iter().filter_map(|part| part.scales.as_deref()).collect();
        let scales = match scales.len() == parts.len() {
            true => Some(Box::new(self.concatenated(&scales, names)?)),
            false => None,
        };
        let lies_together = parts.iter().all(|part| part.rearranged.is_none())
            && parts.windows(2).all(|pair| pair[0].shard == pair[1].shard && pair[0].range.end == pair[1].range.start);
        let (mut range, mut rearranged) = (first.range.clone(), None);
        if lies_together {
            range.end = parts.last().map_or(range.end, |part| part.range.end);
        } else {
            let parts = parts.iter().map(|part| Joined {
                file: Arc::clone(&self.shards[part.shard].bytes),
                range: part.range.clone(),
                rearranged: part.rearranged.clone(),
            });
            rearranged = Some(Arc::new(Rearranged::new(How::Joined(parts.collect()))));
        }
        let shape = [&[parts.len()], &first.shape[..]].concat();
        let (dtype, format) = (first.dtype, first.format.clone());
        Ok(StoredTensor { shard: first.shard, dtype, format, shape, range, rearranged, scales })
    }
}

#[cfg(test)]
mod tests {
    use super::stars;

    #[test]
    fn second_star_is_a_number() {
        let pattern = "layers.*.experts.*.w1.weight";
        assert_eq!(stars(pattern, "layers.11.experts.7.w1.weight"), Some(("11", 7)));
        assert_eq!(stars(pattern, "layers.11.experts.x.w1.weight"), None);
        assert_eq!(stars(pattern, "layers.11.experts.7.w2.weight"), None);
        assert_eq!(stars(pattern, "layers.11.w1.weight"), None);
    }
}
