//! Files of tensors in the safetensors format, written with a checksum.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ridge_files::MappedFile;
use ridge_graph::DType;
use ridge_runtime::WeightData;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use crate::error::{Result, TrainError, io_error};
use crate::stop::check_stop;

/// A tensor with its name.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedTensor {
    /// Its name.
    pub name: String,
    /// Its dtype.
    pub dtype: DType,
    /// Its extents, outermost first.
    pub shape: Vec<usize>,
    /// Its elements, row-major, little-endian.
    pub bytes: Vec<u8>,
}

fn spelling(dtype: DType) -> String {
    match dtype {
        DType::F8E4M3 => "F8_E4M3".to_owned(),
        DType::F8E5M2 => "F8_E5M2".to_owned(),
        other => other.to_string().to_uppercase(),
    }
}

/// The header of a file of these tensors, padded to a multiple of 8 bytes.
fn header(tensors: &[SavedTensor]) -> Vec<u8> {
    let mut entries = Map::new();
    entries.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut begin = 0;
    for tensor in tensors {
        let end = begin + tensor.bytes.len();
        let entry = json!({"dtype": spelling(tensor.dtype), "shape": tensor.shape, "data_offsets": [begin, end]});
        entries.insert(tensor.name.clone(), entry);
        begin = end;
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// The bytes of a file of these tensors.
pub(crate) fn tensor_bytes(tensors: &[SavedTensor]) -> Vec<u8> {
    let mut bytes = header(tensors);
    tensors.iter().for_each(|tensor| bytes.extend(&tensor.bytes));
    bytes
}

/// Writes tensors to the new file `path`, synchronises it with the disk, and gives its SHA-256.
///
/// # Errors
/// When it cannot be written.
pub fn write_tensors(path: &Path, tensors: &[SavedTensor]) -> Result<String> {
    let failed = |cause: std::io::Error| io_error(path, "write the tensors", &cause);
    let mut hash = Sha256::new();
    let mut file = BufWriter::new(File::create(path).map_err(failed)?);
    for bytes in std::iter::once(&header(tensors)).chain(tensors.iter().map(|tensor| &tensor.bytes)) {
        hash.update(bytes);
        file.write_all(bytes).map_err(failed)?;
    }
    file.flush().map_err(failed)?;
    file.get_ref().sync_all().map_err(failed)?;
    Ok(hexadecimal(&hash.finalize()))
}

pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file of tensors that was verified.
pub struct TensorFile {
    bytes: Arc<MappedFile>,
    path: PathBuf,
    /// By name: shape, and where the elements are.
    tensors: HashMap<String, (Dtype, Vec<usize>, Range<usize>)>,
}

/// Bytes that are hashed before it is looked whether the run is to stop.
const HASHED: usize = 1 << 24;

impl TensorFile {
    /// Opens the file, if its SHA-256 is this.
    ///
    /// # Errors
    /// When it cannot be read, or is damaged; [`TrainError::Stopped`] when `stop` is set meanwhile.
    pub fn open(path: &Path, sha256: &str, stop: &AtomicBool) -> Result<Self> {
        let bytes = MappedFile::open(path).map_err(|cause| io_error(path, "open the tensors", &cause))?;
        let mut hash = Sha256::new();
        for part in bytes.chunks(HASHED) {
            check_stop(stop)?;
            hash.update(part);
        }
        let found = hexadecimal(&hash.finalize());
        if found != sha256 {
            let problem = format!("it is damaged: its SHA-256 is {found}, and was {sha256} when it was written");
            let remedy = "continue from an older checkpoint, named with checkpoint.resume";
            return Err(TrainError::path(path, problem, remedy));
        }
        let wrong = |error| {
            let problem = format!("it is no file of tensors: {error}");
            TrainError::path(path, problem, "continue from another checkpoint")
        };
        let parsed = SafeTensors::deserialize(&bytes).map_err(wrong)?;
        let place = |view: &TensorView<'_>| {
            let begin = view.data().as_ptr().addr() - bytes.as_ptr().addr();
            begin..begin + view.data().len()
        };
        let entry =
            |(name, view): (String, TensorView<'_>)| (name, (view.dtype(), view.shape().to_vec(), place(&view)));
        let tensors = parsed.tensors().into_iter().map(entry).collect();
        Ok(Self { bytes: Arc::new(bytes), path: path.to_owned(), tensors })
    }

    /// The bytes of the tensor `name`, of this dtype and shape, in the mapped file.
    ///
    /// # Errors
    /// When there is none, or it is of another dtype or shape.
    pub fn tensor(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<WeightData> {
        let remedy = "continue with the model and optimizer that the checkpoint was made with";
        let Some((stored, extents, place)) = self.tensors.get(name) else {
            return Err(TrainError::path(&self.path, format!("it has no tensor {name}"), remedy));
        };
        let elements: usize = shape.iter().product();
        if extents != shape || place.len() != elements * dtype.size_bytes() {
            let problem = format!("{name} is {stored:?}{extents:?}, and {dtype}{shape:?} is needed");
            return Err(TrainError::path(&self.path, problem, remedy));
        }
        Ok(WeightData::Shared(Arc::clone(&self.bytes) as _, place.clone()))
    }
}
