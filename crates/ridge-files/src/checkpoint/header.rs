//! The header of one safetensors file.
//!
//! The format: eight bytes that hold the length N of the header, little-endian; N bytes of JSON, an object from tensor
//! names to `{"dtype", "shape", "data_offsets": [begin, end]}`, with offsets counted from the end of the header; then
//! the data, which the tensors cover without gaps or overlaps. The `safetensors` crate supplies the meaning of an
//! entry; the checks are written out here so that each names the tensor and the numbers, and because that crate keeps
//! the last of two entries with the same name.

use std::ops::Range;

use ridge_graph::DType;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::Value;

use crate::error::{FilesError, Result};
use crate::json;

/// A tensor as the header describes it, checked.
pub(crate) struct HeaderTensor {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// Where its data lies, counted from the start of the file; inside the file.
    pub(crate) range: Range<usize>,
}

/// The format's own limit on the header, in bytes.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const LENGTH_BYTES: usize = 8;

/// What is wrong with a header, and what to do about it.
struct Wrong {
    problem: String,
    remedy: &'static str,
}

impl From<String> for Wrong {
    fn from(problem: String) -> Self {
        Self { problem, remedy: "the file is damaged, incomplete or not safetensors: download it again" }
    }
}

/// Reads the header of the file whose bytes are `bytes`. The tensors come in the order of their data.
pub(crate) fn read(file: &str, bytes: &[u8]) -> Result<Vec<HeaderTensor>> {
    let wrong = |Wrong { problem, remedy }| FilesError::Safetensors {
        file: file.to_owned(),
        problem,
        remedy: remedy.to_owned(),
    };
    let fail = |problem: String| wrong(problem.into());
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(fail(format!("it is {} bytes long, too short to hold a safetensors header", bytes.len())));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(fail(format!(
            "its header claims {length} bytes, more than the format's limit of {MAX_HEADER_BYTES}"
        )));
    }
    let Some((header, data)) = rest.split_at_checked(length as usize) else {
        return Err(fail(format!("its header claims {length} bytes, but only {} follow", rest.len())));
    };
    if header.first() != Some(&b'{') {
        return Err(fail("its header does not start with '{'".to_owned()));
    }
    let mut tensors = Vec::new();
    for (name, value) in json::object(file, header)? {
        if name == "__metadata__" {
            check_metadata(&value).map_err(fail)?;
        } else {
            tensors.push(tensor(name, value, data.len()).map_err(wrong)?);
        }
    }
    // An empty tensor goes before one that starts at the same place.
    tensors.sort_by_key(|t: &HeaderTensor| (t.range.start, t.range.end));
    check_cover(&tensors, data.len()).map_err(fail)?;
    let start = LENGTH_BYTES + header.len();
    for tensor in &mut tensors {
        tensor.range = tensor.range.start + start..tensor.range.end + start;
    }
    Ok(tensors)
}

fn check_metadata(value: &Value) -> Result<(), String> {
    match value.as_object() {
        Some(map) if map.values().all(Value::is_string) => Ok(()),
        _ => Err("its __metadata__ is not an object of strings".to_owned()),
    }
}

/// The tensor under `name`, with its range still counted from the start of the data.
fn tensor(name: String, value: Value, data_bytes: usize) -> Result<HeaderTensor, Wrong> {
    let info: TensorInfo = serde_json::from_value(value).map_err(|e| format!("the entry of tensor {name}: {e}"))?;
    let (begin, end) = info.data_offsets;
    if begin > end || end > data_bytes {
        return Err(Wrong::from(format!(
            "the data range {begin}..{end} of tensor {name} is outside the file's 0..{data_bytes}"
        )));
    }
    let dtype = dtype(info.dtype).ok_or_else(|| Wrong {
        problem: format!(
            "the tensor {name} has dtype {:?}, which Ridge does not read ({})",
            info.dtype,
            DType::ALL.map(DType::name).join(", ")
        ),
        remedy: "save the model in one of these, for instance with `model.to(torch.float32).save_pretrained(...)`",
    })?;
    let bytes = info.shape.iter().try_fold(dtype.size_bytes(), |bytes, &extent| bytes.checked_mul(extent));
    if bytes != Some(end - begin) {
        let needed = bytes.map_or("more than 2^64".to_owned(), |b| b.to_string());
        return Err(Wrong::from(format!(
            "the tensor {name} of shape {:?} and dtype {dtype} needs {needed} bytes, but {begin}..{end} has {}",
            info.shape,
            end - begin
        )));
    }
    Ok(HeaderTensor { name, dtype, shape: info.shape, range: begin..end })
}

/// The tensors, in order of their ranges, must cover the data exactly.
fn check_cover(tensors: &[HeaderTensor], data_bytes: usize) -> Result<(), String> {
    let mut covered = 0;
    let mut before = "the header";
    for tensor in tensors {
        let Range { start, end } = tensor.range;
        if start != covered {
            let how = if start < covered { "overlaps" } else { "leaves a gap after" };
            return Err(format!(
                "the tensor {} at {start}..{end} {how} {before}, which ends at {covered}",
                tensor.name
            ));
        }
        (covered, before) = (end, &tensor.name);
    }
    if covered != data_bytes {
        return Err(format!("its tensors end at byte {covered} of the data, but the data end at {data_bytes}"));
    }
    Ok(())
}

/// The graph's name for a dtype of the format, if it has one.
fn dtype(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::BF16 => DType::BF16,
        Dtype::F16 => DType::F16,
        Dtype::F8_E4M3 => DType::F8E4M3,
        Dtype::F8_E5M2 => DType::F8E5M2,
        Dtype::I8 => DType::I8,
        Dtype::U8 => DType::U8,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        Dtype::BOOL => DType::Bool,
        _ => return None,
    })
}
