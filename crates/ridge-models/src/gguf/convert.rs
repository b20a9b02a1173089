//! From a model in any layout to a GGUF file, and from a GGUF file to a folder.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use ridge_graph::DType;
use serde_json::{Value as Json, json};

use super::config::torch_name;
use super::importance::Importance;
use super::mix::{self, Mix};
use super::names::{self, Rule, Sizes};
use super::storage::Storage;
use super::write::Writer;
use super::{Gguf, metadata, split, vocabulary};
use crate::checkpoint::{Change, Checkpoint, Published, TensorView, deinterleaved};
use crate::config::{BertConfig, ModelConfig};
use crate::error::{ModelError, Result};
use crate::json;
use crate::pooling::SentenceConfig;
use crate::source::ModelFiles;

/// How tensors are to be stored.
#[derive(Debug, Default)]
pub struct Quantisation {
    /// Of matrices; as they are if `None`.
    pub matrices: Option<Storage>,
    /// A mix of formats for matrices, in the place of `matrices`.
    pub mix: Option<Mix>,
    /// Of the embedding and the output projection; as the other matrices, or as the mix has it, if `None`.
    pub outer: Option<Storage>,
    /// How much each input of each matrix matters, if that is known.
    pub importance: Option<Importance>,
}

/// What has been written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Bytes of the tensors.
    pub bytes: u64,
    /// Tensors by the name of their storage.
    pub tensors: std::collections::BTreeMap<&'static str, usize>,
    /// Matrices whose rows the storage wanted of them cannot hold.
    pub instead: Vec<Instead>,
    /// Matrices that were in a format and are in another one now.
    pub again: usize,
    /// Matrices that the importance matrix says nothing of, though there is one.
    pub unweighed: usize,
}

/// A matrix in another storage than that wanted of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instead {
    /// Its name.
    pub tensor: String,
    /// The storage that was wanted.
    pub wanted: &'static str,
    /// The storage that it has.
    pub has: &'static str,
}

/// Why a file was not written.
enum Failure {
    Io(std::io::Error),
    /// What is wrong with a tensor.
    Tensor(String),
}

impl From<std::io::Error> for Failure {
    fn from(cause: std::io::Error) -> Self {
        Self::Io(cause)
    }
}

/// Where a file's tensor comes from.
enum Source<'a> {
    /// Weights of the model, one after another.
    Weights(Vec<TensorView<'a>>, Change),
    /// A tensor of a GGUF file.
    Bytes(&'a [u8], Storage),
    /// Numbers.
    Table(Vec<f32>),
}

struct Planned<'a> {
    name: String,
    shape: Vec<usize>,
    storage: Storage,
    source: Source<'a>,
}

/// Writes the model `files` to the file `path`, which is there when it is whole: what was there before may be a part of
/// the model. `progress` is told the bytes written after each tensor, and their sum.
///
/// # Errors
///
/// When the model cannot be read, GGUF has no words for it, a matrix to be quantised has numbers that are not finite, or
/// the file cannot be written.
pub fn to_gguf(
    files: &ModelFiles,
    path: &Path,
    how: &Quantisation,
    mut progress: impl FnMut(u64, u64),
) -> Result<Written> {
    let mut writer = Writer::default();
    let mut written = Written::default();
    let checkpoint;
    let planned = match files.gguf() {
        Some(gguf) => {
            for (key, value) in gguf.metadata() {
                let dropped = ["general.file_type", "general.quantization_version", "general.alignment"];
                if !dropped.contains(&key.as_str()) && !split::is_of_parts(key) {
                    writer.value(key, value, gguf.header());
                }
            }
            let each = gguf.tensors().iter().map(|tensor| Planned {
                name: tensor.name.clone(),
                shape: tensor.shape.clone(),
                storage: tensor.storage.clone(),
                source: Source::Bytes(gguf.data(tensor), tensor.storage.clone()),
            });
            each.collect()
        }
        None => {
            let (rules, tables);
            if let Some(config) = files.encoder_config()? {
                checkpoint = config.arrange(files.checkpoint()?);
                metadata::write_encoder(files, &config, &mut writer)?;
                tokens(files, config.vocab_size, &[], &mut writer)?;
                (rules, tables) = (names::rules("bert", &Sizes::from(&config), false), Vec::new());
            } else {
                let config = files.config()?;
                checkpoint = config.arrange(files.checkpoint()?)?;
                metadata::write(files, &config, &mut writer)?;
                tokens(files, config.vocab_size, &config.eos_token_ids, &mut writer)?;
                let two_norms = matches!(&config, ModelConfig::Falcon(c) if c.two_norms);
                let mut all = names::rules(metadata::family(&config), &Sizes::from(&*config), two_norms);
                all.retain(|rule| !config.tie_word_embeddings || rule.file != "output.weight");
                (rules, tables) = (all, metadata::tables(&config));
            }
            weights(files, rules, tables, &checkpoint)?
        }
    };
    let mut planned: Vec<Planned<'_>> = planned;
    let tied = !planned.iter().any(|tensor| tensor.name == "output.weight");
    let model = match how.mix {
        Some(_) => Some(match files.encoder_config()? {
            Some(config) => mix::Model::new("bert", &Sizes::from(&config), tied),
            None => {
                let config = files.config()?;
                mix::Model::new(metadata::family(&config), &Sizes::from(&*config), tied)
            }
        }),
        None => None,
    };
    for tensor in &mut planned {
        choose(tensor, how, model.as_ref(), &mut written);
    }
    writer.u32("general.file_type", file_type(&planned, how));
    if planned.iter().any(|t| t.storage.format.is_some()) {
        writer.u32("general.quantization_version", 2);
    }
    for tensor in &planned {
        let refused = |problem| ModelError::Files {
            path: path.to_owned(),
            problem: format!("the tensor {} {problem}", tensor.name),
            remedy: "choose another format".to_owned(),
        };
        writer.tensor(&tensor.name, &tensor.shape, &tensor.storage).map_err(refused)?;
        *written.tensors.entry(tensor.storage.name()).or_default() += 1;
        written.bytes += tensor.storage.bytes(&tensor.shape).map_err(refused)? as u64;
    }
    let (total, mut done) = (written.bytes, 0u64);
    let unweighed = &mut written.unweighed;
    whole(path, |out| {
        writer.write::<Failure>(out, |index| {
            let tensor = &planned[index];
            let inputs = tensor.shape.last().copied().unwrap_or(1);
            let importance = how.importance.as_ref().and_then(|all| all.of(&tensor.name, inputs));
            let quantised = tensor.storage.format.is_some();
            *unweighed += usize::from(how.importance.is_some() && quantised && importance.is_none());
            let bytes = tensor.bytes(importance).map_err(Failure::Tensor)?;
            done += bytes.len() as u64;
            progress(done, total);
            Ok(bytes)
        })
    })
    .map_err(|failure| match failure {
        Failure::Io(cause) => ModelError::Io { path: path.to_owned(), action: "write the model", cause },
        Failure::Tensor(problem) => ModelError::Files {
            path: files.to_string().into(),
            problem,
            remedy: "download the model again, or convert it to f32, f16 or bf16, which keep them".to_owned(),
        },
    })?;
    Ok(written)
}

/// Writes the file `path` beside itself and gives it its name when it is whole. What is mapped under that name stays as it
/// is, and a failure leaves nothing.
fn whole<E: From<std::io::Error>>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<(), E>,
) -> Result<(), E> {
    // Of a link the file that it leads to.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if path.is_dir() {
        return Err(std::io::Error::from(std::io::ErrorKind::IsADirectory).into());
    }
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let beside = path.with_file_name(name);
    let mut out = BufWriter::new(File::create(&beside)?);
    let done = write(&mut out).and_then(|()| Ok(out.flush()?)).and_then(|()| Ok(std::fs::rename(&beside, &path)?));
    if done.is_err() {
        // The failure is what is told.
        let _ = std::fs::remove_file(&beside);
    }
    done
}

/// Adds the tokenizer of `files`, if there is one.
fn tokens(files: &ModelFiles, vocab_size: usize, ends: &[u32], to: &mut Writer) -> Result<()> {
    if files.has_tokenizer() {
        return vocabulary::write(files, vocab_size, ends, to);
    }
    to.text("tokenizer.ggml.model", "none");
    Ok(())
}

/// The tensors of a model that is no GGUF file, by `rules`, and `tables`.
fn weights<'a>(
    files: &ModelFiles,
    rules: Vec<Rule>,
    tables: Vec<(&str, Vec<f32>)>,
    checkpoint: &'a Checkpoint,
) -> Result<Vec<Planned<'a>>> {
    let mut planned = Vec::new();
    for (name, factors) in tables {
        planned.push(Planned {
            name: name.to_owned(),
            shape: vec![factors.len()],
            storage: Storage::plain(DType::F32),
            source: Source::Table(factors),
        });
    }
    for Rule { file, weights, change } in rules {
        let there = weights.iter().filter(|(name, _)| checkpoint.contains(name)).count();
        if there == 0 {
            continue;
        }
        let views = weights.iter().map(|(name, _)| checkpoint.tensor(name)).collect::<Result<Vec<_>>>()?;
        for (view, (_, rows)) in views.iter().zip(&weights) {
            check_rows(view, if views.len() > 1 { *rows } else { 0 }, change).map_err(|problem| ModelError::Files {
                path: files.to_string().into(),
                problem: format!("the tensor {} has the shape {:?}, {problem}", view.name, view.shape),
                remedy: "take the config.json that came with these weights".to_owned(),
            })?;
        }
        let (first, mut shape) = (views[0], views[0].shape.to_vec());
        shape[0] = views.iter().map(|view| view.shape[0]).sum();
        if let Some(other) = views.iter().find(|v| v.dtype != first.dtype || v.shape[1..] != first.shape[1..]) {
            return Err(ModelError::Files {
                path: files.to_string().into(),
                problem: format!("{} and {} have other dtypes or widths", first.name, other.name),
                remedy: "GGUF has them as one tensor: store them alike".to_owned(),
            });
        }
        // Norms, biases and the like are few, and are read as f32 everywhere.
        let dtype = if shape.len() < 2 || !matches!(first.dtype, DType::F32 | DType::F16 | DType::BF16) {
            DType::F32
        } else {
            first.dtype
        };
        planned.push(Planned {
            name: file,
            shape,
            storage: Storage::plain(dtype),
            source: Source::Weights(views, change),
        });
    }
    Ok(planned)
}

/// Does `view` have the rows that the configuration says? `rows` are as many as there must be, any if 0.
///
/// # Errors
/// What is wrong with its shape.
fn check_rows(view: &TensorView<'_>, rows: usize, change: Change) -> Result<(), String> {
    let Some(has) = view.shape.first() else { return Err("and a weight has an axis at least".to_owned()) };
    if view.shape.contains(&0) {
        return Err("and so nothing in it".to_owned());
    }
    if rows != 0 && rows != *has {
        return Err(format!("and the configuration asks for {rows} rows"));
    }
    match change {
        Change::Interleaved { heads } if heads == 0 || !has.is_multiple_of(2 * heads) => {
            Err(format!("whose rows are no pairs of {heads} heads, which the configuration asks for"))
        }
        _ => Ok(()),
    }
}

/// Gives a matrix the storage that is asked for, or the nearest that can hold it.
fn choose(tensor: &mut Planned<'_>, how: &Quantisation, model: Option<&mix::Model>, written: &mut Written) {
    let outer = matches!(tensor.name.as_str(), "token_embd.weight" | "output.weight");
    let width = tensor.shape.last().copied().unwrap_or(1);
    let mixed = || how.mix.zip(model).and_then(|(mix, model)| mix.of(&tensor.name, width, model));
    let wanted = how.outer.clone().filter(|_| outer).or_else(mixed).or_else(|| how.matrices.clone());
    // Positions and segments are looked up and added, and small.
    let added = matches!(tensor.name.as_str(), "position_embd.weight" | "token_types.weight");
    let Some(wanted) = wanted.filter(|_| tensor.shape.len() == 2 && !added) else { return };
    let mut storage = wanted.clone();
    while storage.bytes(&tensor.shape).is_err() {
        storage = instead(&storage);
    }
    if storage != wanted {
        written.instead.push(Instead { tensor: tensor.name.clone(), wanted: wanted.name(), has: storage.name() });
    }
    written.again +=
        usize::from(tensor.storage.format.is_some() && storage.format.is_some() && storage != tensor.storage);
    tensor.storage = storage;
}

/// What holds rows that `storage` cannot, with about as many bits.
fn instead(storage: &Storage) -> Storage {
    let name = match storage.name() {
        "q2_k" | "q3_k" | "iq4_xs" => "iq4_nl",
        "q4_k" => "q5_0",
        "q5_k" => "q5_1",
        "q6_k" => "q8_0",
        _ => "f16",
    };
    Storage::from_name(name).unwrap_or_else(|| Storage::plain(DType::F16))
}

/// The number by which llama.cpp tells what most tensors are.
fn file_type(planned: &[Planned<'_>], how: &Quantisation) -> u32 {
    if let Some(mix) = how.mix {
        return mix.file_type;
    }
    let most = how.matrices.as_ref().map(Storage::name);
    let name = most.unwrap_or_else(|| {
        let matrices = || planned.iter().filter(|t| t.shape.len() == 2);
        let names = matrices().map(|t| t.storage.name());
        names.max_by_key(|name| matrices().filter(|t| t.storage.name() == *name).count()).unwrap_or("f32")
    });
    match name {
        "f32" => 0,
        "f16" => 1,
        "q4_0" => 2,
        "q4_1" => 3,
        "q8_0" => 7,
        "q5_0" => 8,
        "q5_1" => 9,
        "q2_k" => 10,
        "q3_k" => 12,
        "q4_k" => 15,
        "q5_k" => 17,
        "q6_k" => 18,
        "iq4_nl" => 25,
        "iq4_xs" => 30,
        "bf16" => 32,
        "mxfp4" => 38,
        _ => 1024,
    }
}

impl Planned<'_> {
    /// Its bytes in its storage.
    ///
    /// # Errors
    /// What is wrong with its numbers.
    fn bytes(&self, importance: Option<&[f32]>) -> Result<Vec<u8>, String> {
        let (storage, bytes) = match &self.source {
            Source::Table(values) => return Ok(self.storage.encode(values, &self.shape, None)),
            Source::Bytes(bytes, storage) => (storage.clone(), bytes.to_vec()),
            Source::Weights(views, change) => {
                let storage = Storage { dtype: views[0].dtype, format: views[0].format.cloned() };
                let bytes: Vec<u8> = views.iter().flat_map(|view| view.data).copied().collect();
                match *change {
                    Change::Interleaved { heads } => {
                        let (rows, row) = (self.shape[0], bytes.len() / self.shape[0]);
                        let of_head = rows / heads;
                        let from = |i: usize| (i / of_head * of_head + deinterleaved(of_head, i % of_head)) * row;
                        (storage, (0..rows).flat_map(|i| &bytes[from(i)..][..row]).copied().collect())
                    }
                    Change::MinusOne => {
                        let values: Vec<f32> = storage.decode(&bytes).iter().map(|v| v + 1.0).collect();
                        return Ok(self.storage.encode(&values, &self.shape, None));
                    }
                    Change::None => (storage, bytes),
                }
            }
        };
        if storage == self.storage {
            return Ok(bytes);
        }
        let told = |value: f32| {
            format!("the tensor {} has a number that is {value}, which {} cannot hold", self.name, self.storage.name())
        };
        restored(&bytes, &storage, &self.storage, &self.shape, importance).map_err(told)
    }
}

/// `bytes` of tensors of `shape` in another storage, on all cores.
///
/// # Errors
/// A number that is not finite, where a format is to hold it.
fn restored(
    bytes: &[u8],
    from: &Storage,
    to: &Storage,
    shape: &[usize],
    importance: Option<&[f32]>,
) -> Result<Vec<u8>, f32> {
    let width = shape.last().copied().unwrap_or(1);
    let rows = shape.iter().product::<usize>() / width.max(1);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(rows.max(1));
    let share = rows.div_ceil(threads.max(1)).max(1);
    let row = bytes.len() / rows.max(1);
    let part = |bytes: &[u8]| {
        let values = from.decode(bytes);
        match values.iter().find(|value| to.format.is_some() && !value.is_finite()) {
            Some(value) => Err(*value),
            None => Ok(to.encode(&values, &[values.len() / width.max(1), width], importance)),
        }
    };
    std::thread::scope(|scope| {
        let parts: Vec<_> = bytes.chunks((share * row).max(1)).map(|chunk| scope.spawn(move || part(chunk))).collect();
        let joined = parts.into_iter().map(|part| part.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
        Ok(joined.collect::<Result<Vec<_>, _>>()?.concat())
    })
}

/// Writes a GGUF file as a folder in the layout of Hugging Face. What is stored in a format becomes `dtype`, and so does
/// everything else if `all`.
///
/// # Errors
///
/// When the file cannot be read as a model, or the folder cannot be written.
pub fn to_folder(
    gguf: &Gguf,
    folder: &Path,
    dtype: DType,
    all: bool,
    mut progress: impl FnMut(u64, u64),
) -> Result<()> {
    let config_text = gguf.config_json()?;
    let checkpoint = gguf.checkpoint()?;
    let tensors = match BertConfig::is_one(gguf.file(), &config_text)? {
        true => checkpoint.published(&[]),
        false => ModelConfig::from_json(gguf.file(), &config_text)?.published(&checkpoint),
    };
    let usual = of_matrices(&tensors);
    let kept = |tensor: &Published<'_>| match tensor.views[0] {
        view if all || view.format.is_some() => dtype,
        // Vectors are f32 in a file whatever they were.
        _ if tensor.shape.len() < 2 && tensor.views.iter().all(|view| holds(usual, view)) => usual,
        view => view.dtype,
    };
    let dtypes: Vec<DType> = tensors.iter().map(kept).collect();
    let io = |path: &Path, action| {
        let path = path.to_owned();
        move |cause| ModelError::Io { path, action, cause }
    };
    std::fs::create_dir_all(folder).map_err(io(folder, "make the folder"))?;
    let put = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(io(&path, "write the file"))
    };
    let pretty = |text: &str| match serde_json::from_str::<Json>(text) {
        Ok(json) => format!("{json:#}\n"),
        Err(_) => text.to_owned(),
    };
    let mut config: serde_json::Map<String, Json> = json::object(gguf.file(), config_text.as_bytes())?;
    let most = if all || tensors.iter().any(|t| t.views[0].format.is_some()) { dtype } else { usual };
    config.insert("torch_dtype".into(), torch_name(most).into());
    put("config.json", &pretty(&Json::Object(config).to_string()))?;
    if gguf.metadata().contains_key("tokenizer.ggml.tokens") {
        let (tokenizer, tokenizer_config) = gguf.tokenizer_json()?;
        put("tokenizer.json", &tokenizer)?;
        put("tokenizer_config.json", &pretty(&tokenizer_config))?;
    }
    if let Some(pooling) = gguf.pooling()? {
        let folder = folder.join(SentenceConfig::POOLING);
        std::fs::create_dir_all(&folder).map_err(io(&folder, "make the folder"))?;
        for (name, text) in SentenceConfig::texts(pooling) {
            put(&name, &text)?;
        }
    }
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
    let failed = io(&path, "write the weights");
    let write = |out: &mut BufWriter<File>| -> std::io::Result<()> {
        out.write_all(&(text.len() as u64).to_le_bytes())?;
        out.write_all(text.as_bytes())?;
        let mut done = 0u64;
        for (tensor, dtype) in tensors.iter().zip(&dtypes) {
            let to = Storage::plain(*dtype);
            let bytes = tensor.bytes(|view| {
                let from = Storage { dtype: view.dtype, format: view.format.cloned() };
                if from == to {
                    return view.data.to_vec();
                }
                // Plain storage holds every number.
                restored(view.data, &from, &to, view.shape, None).unwrap_or_default()
            });
            out.write_all(&bytes)?;
            done += bytes.len() as u64;
            progress(done, offset as u64);
        }
        Ok(())
    };
    whole(&path, write).map_err(failed)
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
