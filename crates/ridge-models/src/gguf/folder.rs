//! From a GGUF file, or a folder whose weights are quantised, to a folder in the layout of Hugging Face.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use ridge_files::checkpoint::Published;
use ridge_files::gguf::TensorStorage;
use ridge_files::{FilesError, TensorView, json, replace_file};
use ridge_graph::DType;
use ridge_text::gguf::tokenizer_json;
use serde_json::{Value as Json, json};

use super::config::torch_name;
use super::convert::{WriteFailure, restored};
use super::pooling::pooling;
use crate::error::Result;
use crate::families::NetworkConfig;
use crate::model::BuildOptions;
use crate::sentence::SentenceConfig;
use crate::source::ModelFiles;
use crate::weights;

/// Writes a GGUF file, or a decoder's folder, as a folder in the layout of Hugging Face. What is stored in a format becomes `dtype`,
/// and so does everything else if `all`. `progress` is as that of [`to_gguf`](super::to_gguf). Weights are written first, so that a
/// folder that was there is as it was where they fail.
///
/// # Errors
///
/// When the files cannot be read as a model or lack a tensor, those of a folder are plain already and not to become `dtype`, a number is
/// too large for `dtype`, or the folder cannot be written.
pub fn to_folder(
    files: &ModelFiles,
    folder: &Path,
    dtype: DType,
    all: bool,
    mut progress: impl FnMut(u64, u64) -> std::io::Result<()>,
) -> Result<()> {
    let gguf = files.gguf();
    let refused = |problem: &str, remedy: &str| {
        let (problem, remedy) = (problem.to_owned(), remedy.to_owned());
        Err(FilesError::Path { path: files.to_string().into(), problem, remedy }.into())
    };
    let (config, config_text) = (files.network_config()?, files.config_text()?);
    let checkpoint = files.network_checkpoint(&config)?;
    let tensors = match &config {
        NetworkConfig::Decoder(config) => {
            weights::check(&checkpoint, &config.build(&BuildOptions::default())?.graph)?;
            config.published(&checkpoint)
        }
        NetworkConfig::Encoder(config) if gguf.is_some() => {
            weights::check(&checkpoint, &config.build(&BuildOptions::default())?.graph)?;
            config.published(&checkpoint)
        }
        _ => return refused("only folders of decoders are written as folders", "run the model from its folder"),
    };
    if gguf.is_none() && !all && tensors.iter().all(|tensor| tensor.views.iter().all(|view| view.format.is_none())) {
        let remedy = "give a dtype that they shall have (--dtype), or an output that ends in .gguf";
        return refused("its weights are plain already", remedy);
    }
    let usual = of_matrices(&tensors);
    let kept = |tensor: &Published<'_>| match tensor.views[0] {
        view if all || tensor.views.iter().any(|view| view.format.is_some()) => {
            if view.dtype.is_float() {
                dtype
            } else {
                view.dtype
            }
        }
        // Vectors are f32 in a file whatever they were.
        _ if gguf.is_some() && tensor.shape.len() < 2 && tensor.views.iter().all(|view| holds(usual, view)) => usual,
        view => view.dtype,
    };
    let dtypes: Vec<DType> = tensors.iter().map(kept).collect();
    let io = |path: &Path, action| {
        let path = path.to_owned();
        move |cause| FilesError::Io { path, action, cause }
    };
    std::fs::create_dir_all(folder).map_err(io(folder, "make the folder"))?;
    let put = |name: &str, text: &str| {
        let path = folder.join(name);
        replace_file(&path, |out| out.write_all(text.as_bytes())).map_err(io(&path, "write the file"))
    };
    let pretty = |text: &str| match serde_json::from_str::<Json>(text) {
        Ok(json) => format!("{json:#}\n"),
        Err(_) => text.to_owned(),
    };
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut offset = 0usize;
    for (tensor, dtype) in tensors.iter().zip(&dtypes) {
        let bytes = tensor.shape.iter().product::<usize>() * dtype.size_bytes();
        let entry = json!({
            "dtype": safetensors_name(*dtype), "shape": tensor.shape, "data_offsets": [offset, offset + bytes],
        });
        header.insert(tensor.name.clone(), entry);
        offset += bytes;
    }
    let mut text = Json::Object(header).to_string();
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    let path = folder.join("model.safetensors");
    let write = |out: &mut BufWriter<File>| -> Result<(), WriteFailure> {
        out.write_all(&(text.len() as u64).to_le_bytes())?;
        out.write_all(text.as_bytes())?;
        let mut done = 0u64;
        for (tensor, dtype) in tensors.iter().zip(&dtypes) {
            let to = TensorStorage::plain(*dtype);
            let bytes = tensor.bytes(|view| {
                if let (Some(format), Some(scales)) = (view.format, view.scales) {
                    let values = format.values(&[view.data, scales], view.shape);
                    let bytes = DType::F32.encode(values.into_iter().map(f64::from));
                    return restored(view.name, &bytes, &TensorStorage::plain(DType::F32), &to, view.shape, None);
                }
                let from = TensorStorage { dtype: view.dtype, format: view.format.cloned() };
                if from == to {
                    return Ok(view.data.to_vec());
                }
                restored(view.name, view.data, &from, &to, view.shape, None)
            });
            let bytes = bytes.map_err(WriteFailure::Tensor)?;
            out.write_all(&bytes)?;
            done += bytes.len() as u64;
            progress(done, offset as u64)?;
        }
        Ok(())
    };
    replace_file(&path, write).map_err(|failure| {
        // If it is empty: it was made just now.
        let _ = std::fs::remove_dir(folder);
        failure.of(&files.to_string(), &path, "write the weights")
    })?;
    let mut config: serde_json::Map<String, Json> = json::object(&files.config_name(), config_text.as_bytes())?;
    let most = if all || tensors.iter().any(|t| t.views[0].format.is_some()) { dtype } else { usual };
    config.remove("quantization_config");
    config.remove("dtype");
    config.insert("torch_dtype".into(), torch_name(most).into());
    put("config.json", &pretty(&Json::Object(config).to_string()))?;
    let Some(gguf) = gguf else {
        return files.copy_texts(folder);
    };
    if gguf.metadata().contains_key("tokenizer.ggml.tokens") {
        let (tokenizer, tokenizer_config) = tokenizer_json(gguf)?;
        put("tokenizer.json", &tokenizer)?;
        put("tokenizer_config.json", &pretty(&tokenizer_config))?;
    }
    if let Some(pooling) = pooling(gguf)? {
        let folder = folder.join(SentenceConfig::POOLING);
        std::fs::create_dir_all(&folder).map_err(io(&folder, "make the folder"))?;
        for (name, text) in SentenceConfig::texts(pooling) {
            put(&name, &text)?;
        }
    }
    Ok(())
}

/// The dtype of the matrices that are stored plainly, if it is one; else f32.
fn of_matrices(tensors: &[Published<'_>]) -> DType {
    let plain =
        tensors.iter().map(|tensor| tensor.views[0]).filter(|view| view.shape.len() > 1 && view.format.is_none());
    let mut dtypes: Vec<DType> = plain.map(|view| view.dtype).collect();
    dtypes.dedup();
    if let [one] = dtypes[..] { one } else { DType::F32 }
}

/// Is every number of `view` one of `dtype`?
fn holds(dtype: DType, view: &TensorView<'_>) -> bool {
    let values = view.dtype.decode(view.data);
    view.format.is_none() && dtype.decode(&dtype.encode(values.iter().copied())) == values
}

fn safetensors_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "F32",
        DType::BF16 => "BF16",
        DType::F16 => "F16",
        DType::F8E4M3 => "F8_E4M3",
        DType::F8E5M2 => "F8_E5M2",
        DType::I8 => "I8",
        DType::U8 => "U8",
        DType::I32 => "I32",
        DType::I64 => "I64",
        DType::Bool => "BOOL",
    }
}
