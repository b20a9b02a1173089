//! Files of tensors in the safetensors format, written with a checksum.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use ridge_files::MappedFile;
use ridge_graph::DType;
use safetensors::SafeTensors;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use crate::error::{Result, TrainError, io_error};

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
    bytes: MappedFile,
    path: std::path::PathBuf,
}

impl TensorFile {
    /// Opens the file, if its SHA-256 is this.
    ///
    /// # Errors
    /// When it cannot be read, or is damaged.
    pub fn open(path: &Path, sha256: &str) -> Result<Self> {
        let bytes = MappedFile::open(path).map_err(|cause| io_error(path, "open the tensors", &cause))?;
        let found = hexadecimal(&Sha256::digest(&*bytes));
        if found != sha256 {
            let problem = format!("it is damaged: its SHA-256 is {found}, and was {sha256} when it was written");
            let remedy = "continue from an older checkpoint, named with checkpoint.resume";
            return Err(TrainError::path(path, problem, remedy));
        }
        let file = Self { bytes, path: path.to_owned() };
        file.parsed()?;
        Ok(file)
    }

    fn parsed(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.bytes).map_err(|error| {
            TrainError::path(
                &self.path,
                format!("it is no file of tensors: {error}"),
                "continue from another checkpoint",
            )
        })
    }

    /// The bytes of the tensor `name`, of this dtype and shape.
    ///
    /// # Errors
    /// When there is none, or it is of another dtype or shape.
    pub fn tensor(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Vec<u8>> {
        let remedy = "continue with the model and optimizer that the checkpoint was made with";
        let parsed = self.parsed()?;
        let Ok(view) = parsed.tensor(name) else {
            return Err(TrainError::path(&self.path, format!("it has no tensor {name}"), remedy));
        };
        let elements: usize = shape.iter().product();
        if view.shape() != shape || view.data().len() != elements * dtype.size_bytes() {
            let problem = format!("{name} is {:?}{:?}, and {dtype}{shape:?} is needed", view.dtype(), view.shape());
            return Err(TrainError::path(&self.path, problem, remedy));
        }
        Ok(view.data().to_vec())
    }
}
