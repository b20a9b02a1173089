//! Reads a file's header: `GGUF`, a version, counts, metadata, and the positions of tensors. Everything is little-endian; a string
//! is its length in 64 bits followed by its bytes.
//!
//! No allocation depends on a claimed length: strings are slices of the file, and an array stays in the file after one validation
//! pass, so memory is within a small multiple of the file's header.

use std::collections::BTreeMap;
use std::ops::Range;

use super::storage::TensorStorage;
use super::value::{GgufArray, GgufType, GgufValue, shortened};
use crate::error::{FilesError, Result};

/// How deep arrays may lie in arrays. No known writer nests them at all.
const MAX_NESTING: usize = 8;

/// How many axes a tensor may have.
const MAX_AXES: u32 = 4;

/// Data begins at a multiple of this unless `general.alignment` says otherwise.
pub(super) const ALIGNMENT: usize = 32;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Its name in the file, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// How its elements are stored.
    pub storage: TensorStorage,
    /// Extents, outermost first (the file has them the other way round).
    pub shape: Vec<usize>,
    /// Which of a model's files has it.
    pub part: usize,
    /// Where its bytes lie in that file.
    pub range: Range<usize>,
}

/// What is left of the file, and where that is.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

type Why<T> = std::result::Result<T, String>;

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize, what: &str) -> Why<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        match rest.get(..len) {
            Some(taken) => {
                self.at += len;
                Ok(taken)
            }
            None => Err(format!("ends at byte {} within {what}, which needs {len} bytes more", self.bytes.len())),
        }
    }

    fn array<const N: usize>(&mut self, what: &str) -> Why<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Why<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Why<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count or a length, within what is left of the file at `least` bytes each.
    fn count(&mut self, least: usize, what: &str) -> Why<usize> {
        let claimed = self.u64(what)?;
        let left = (self.bytes.len() - self.at) / least;
        match usize::try_from(claimed) {
            Ok(count) if count <= left => Ok(count),
            _ => Err(format!("claims {claimed} for {what}, and has room for {left} at most")),
        }
    }

    fn text(&mut self, what: &str) -> Why<&'a str> {
        let len = self.count(1, &format!("the length of {what}"))?;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes).map_err(|e| format!("has {what} that is no UTF-8 text at byte {}", e.valid_up_to()))
    }

    fn kind(&mut self, what: &str) -> Why<GgufType> {
        let number = self.u32(what)?;
        let kind = GgufType::ALL.get(number as usize).copied();
        kind.ok_or_else(|| format!("has {what} of type {number}, and there are types 0 to {}", GgufType::ALL.len() - 1))
    }

    fn value(&mut self, kind: GgufType, what: &str, depth: usize) -> Why<GgufValue> {
        Ok(match kind {
            GgufType::U8 => GgufValue::U8(self.array::<1>(what)?[0]),
            GgufType::I8 => GgufValue::I8(self.array(what).map(i8::from_le_bytes)?),
            GgufType::U16 => GgufValue::U16(self.array(what).map(u16::from_le_bytes)?),
            GgufType::I16 => GgufValue::I16(self.array(what).map(i16::from_le_bytes)?),
            GgufType::U32 => GgufValue::U32(self.u32(what)?),
            GgufType::I32 => GgufValue::I32(self.array(what).map(i32::from_le_bytes)?),
            GgufType::F32 => GgufValue::F32(self.array(what).map(f32::from_le_bytes)?),
            GgufType::Bool => match self.array::<1>(what)? {
                [0] => GgufValue::Bool(false),
                [1] => GgufValue::Bool(true),
                [other] => return Err(format!("has {what} of type bool with the value {other}")),
            },
            GgufType::String => GgufValue::String(self.text(what)?.to_owned()),
            GgufType::U64 => GgufValue::U64(self.u64(what)?),
            GgufType::I64 => GgufValue::I64(self.array(what).map(i64::from_le_bytes)?),
            GgufType::F64 => GgufValue::F64(self.array(what).map(f64::from_le_bytes)?),
            GgufType::Array => GgufValue::Array(self.array_value(what, depth)?),
        })
    }

    /// Walks an array without keeping its elements.
    fn array_value(&mut self, what: &str, depth: usize) -> Why<GgufArray> {
        if depth == MAX_NESTING {
            return Err(format!("has {what} with arrays nested deeper than {MAX_NESTING}"));
        }
        let kind = self.kind(what)?;
        // An array is at least its type and count, a text its length.
        let least = kind.size().unwrap_or(if kind == GgufType::String { 8 } else { 12 });
        let len = self.count(least, &format!("the elements of {what}"))?;
        let start = self.at;
        match kind {
            GgufType::String => {
                for _ in 0..len {
                    self.text(what)?;
                }
            }
            GgufType::Array => {
                for _ in 0..len {
                    self.array_value(what, depth + 1)?;
                }
            }
            GgufType::Bool => {
                if let Some(other) = self.take(len, what)?.iter().find(|b| **b > 1) {
                    return Err(format!("has {what} of type bool with the value {other}"));
                }
            }
            _ => {
                self.take(len * least, what)?;
            }
        }
        Ok(GgufArray { kind, len, range: start..self.at })
    }
}

/// The elements of an array that [`read`] has walked, one after another: an element takes more memory than its bytes.
pub(super) fn elements<'a>(bytes: &'a [u8], array: &GgufArray) -> impl Iterator<Item = GgufValue> + use<'a> {
    let (kind, len) = (array.kind, array.len);
    let mut cursor = Cursor { bytes: &bytes[..array.range.end], at: array.range.start };
    (0..len).map_while(move |_| cursor.value(kind, "an array", 0).ok())
}

/// Metadata and tensors of a file.
type Header = (BTreeMap<String, GgufValue>, Vec<GgufTensor>);

/// The header of the file whose bytes are `bytes`.
pub(super) fn read(file: &str, bytes: &[u8]) -> Result<Header> {
    parse(bytes).map_err(|(problem, remedy)| FilesError::Gguf {
        file: file.to_owned(),
        problem: format!("it {problem}"),
        remedy: remedy.to_owned(),
    })
}

const DAMAGED: &str = "the file is damaged or incomplete: download it again";

fn parse(bytes: &[u8]) -> Result<Header, (String, &'static str)> {
    let damaged = |problem| (problem, DAMAGED);
    let mut cursor = Cursor { bytes, at: 0 };
    if cursor.take(4, "its first word") != Ok(b"GGUF") {
        return Err(("does not begin with GGUF".to_owned(), "give a GGUF file, or a folder with config.json"));
    }
    match cursor.u32("its version").map_err(damaged)? {
        2 | 3 => {}
        swapped if swapped.swap_bytes() < 0x1_0000 => {
            return Err(("is big-endian".to_owned(), "convert it to little-endian, or download such a one"));
        }
        other => {
            return Err((format!("is of version {other}"), "Ridge reads versions 2 and 3: convert the model again"));
        }
    }
    // Name, axes, type and offset; key, type and a byte.
    let tensor_count = cursor.count(8 + 4 + 4 + 8, "the number of tensors").map_err(damaged)?;
    let key_count = cursor.count(8 + 4 + 1, "the number of keys").map_err(damaged)?;
    let mut metadata = BTreeMap::new();
    for _ in 0..key_count {
        let key = cursor.text("a key").map_err(damaged)?;
        let what = shortened(key);
        let kind = cursor.kind(&what).map_err(damaged)?;
        let value = cursor.value(kind, &what, 0).map_err(damaged)?;
        if metadata.insert(key.to_owned(), value).is_some() {
            return Err(damaged(format!("has the key {what} twice")));
        }
    }
    let alignment = match metadata.get("general.alignment").map(|v| (v, v.as_u64())) {
        None => ALIGNMENT,
        Some((_, Some(n))) if n.is_power_of_two() && n <= 1 << 20 => n as usize,
        Some((value, _)) => {
            return Err(damaged(format!("has general.alignment = {value}, which is not a power of two up to 2^20")));
        }
    };
    let mut tensors = Vec::new();
    for _ in 0..tensor_count {
        tensors.push(tensor(&mut cursor).map_err(damaged)?);
    }
    let start = cursor.at.next_multiple_of(alignment);
    let mut unreadable = None;
    for (tensor, problem) in &mut tensors {
        if let Some(problem) = problem.take() {
            unreadable = Some(format!("has the tensor {}, which {problem}", tensor.name));
            continue;
        }
        place(tensor, start, alignment, bytes.len())
            .map_err(|problem| damaged(format!("has the tensor {}, which {problem}", shortened(&tensor.name))))?;
    }
    if let Some(problem) = unreadable {
        return Err((problem, "choose a file in f32, f16, bf16 or one of the formats that `ridge quantize` writes"));
    }
    let tensors: Vec<GgufTensor> = tensors.into_iter().map(|(tensor, _)| tensor).collect();
    check_apart(&tensors).map_err(damaged)?;
    Ok((metadata, tensors))
}

/// A tensor whose range is yet its offset, and why it cannot be read, if its type is not known.
fn tensor(cursor: &mut Cursor<'_>) -> Why<(GgufTensor, Option<String>)> {
    let name = cursor.text("the name of a tensor")?.to_owned();
    let what = format!("the tensor {}", shortened(&name));
    let axes = cursor.u32(&what)?;
    if !(1..=MAX_AXES).contains(&axes) {
        return Err(format!("has {what} with {axes} axes; the number must be 1 to {MAX_AXES}"));
    }
    let mut shape = Vec::new();
    for _ in 0..axes {
        let extent = cursor.u64(&what)?;
        shape.push(usize::try_from(extent).map_err(|_| format!("has {what} with an extent of {extent}"))?);
    }
    shape.reverse();
    let storage = TensorStorage::from_number(cursor.u32(&what)?);
    let offset = cursor.u64(&what)?;
    let offset = usize::try_from(offset).map_err(|_| format!("has {what} at {offset}, outside the file"))?;
    let (storage, problem) = match storage {
        Ok(storage) => (storage, None),
        Err(problem) => (TensorStorage::plain(ridge_graph::DType::U8), Some(problem)),
    };
    Ok((GgufTensor { name, storage, shape, part: 0, range: offset..offset }, problem))
}

/// Turns the offset of `tensor` from `start` on into its range.
fn place(tensor: &mut GgufTensor, start: usize, alignment: usize, end: usize) -> Why<()> {
    let (offset, bytes) = (tensor.range.start, tensor.storage.bytes(&tensor.shape)?);
    if !offset.is_multiple_of(alignment) {
        return Err(format!("begins at {offset}, which is not a multiple of {alignment}"));
    }
    let from = start.checked_add(offset);
    let to = from.and_then(|from| from.checked_add(bytes));
    match (from, to) {
        (Some(from), Some(to)) if to <= end => {
            tensor.range = from..to;
            Ok(())
        }
        _ => {
            Err(format!("needs {bytes} bytes from {offset} on, outside the {} of the data", end.saturating_sub(start)))
        }
    }
}

/// Tensors have names of their own.
pub(super) fn check_names(tensors: &[GgufTensor]) -> Why<()> {
    let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("has the tensor {} twice", shortened(pair[0]))),
        None => Ok(()),
    }
}

/// Tensors have names of their own and do not overlap.
fn check_apart(tensors: &[GgufTensor]) -> Why<()> {
    check_names(tensors)?;
    let mut order: Vec<&GgufTensor> = tensors.iter().collect();
    order.retain(|tensor| !tensor.range.is_empty());
    order.sort_by_key(|tensor| tensor.range.start);
    match order.windows(2).find(|pair| pair[0].range.end > pair[1].range.start) {
        Some(pair) => {
            Err(format!("has the tensors {} and {} overlapping", shortened(&pair[0].name), shortened(&pair[1].name)))
        }
        None => Ok(()),
    }
}
