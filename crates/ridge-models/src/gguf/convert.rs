//! From a model in any layout to a GGUF file.

use std::path::Path;

use ridge_files::checkpoint::{Change, TensorBytes, deinterleaved};
use ridge_files::gguf::{GgufWriter, ImportanceMatrix, TensorStorage, is_split_key};
use ridge_files::{Checkpoint, FilesError, replace_file};
use ridge_graph::DType;
use ridge_text::gguf::write_tokenizer;

use super::metadata;
use super::mix::{Mix, MixedModel};
use super::names::{self, Rule, Sizes};
use crate::error::Result;
use crate::model::BuildOptions;
use crate::source::ModelFiles;
use crate::weights;

/// How tensors are to be stored.
#[derive(Debug, Default)]
pub struct Quantisation {
    /// Of matrices; as they are if `None`.
    pub matrices: Option<TensorStorage>,
    /// A mix of formats for matrices, in the place of `matrices`.
    pub mix: Option<Mix>,
    /// Of the embedding and the output projection; as the other matrices, or as the mix has it, if `None`.
    pub outer: Option<TensorStorage>,
    /// How much each input of each matrix matters, if that is known.
    pub importance: Option<ImportanceMatrix>,
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
pub(super) enum WriteFailure {
    Io(std::io::Error),
    /// What is wrong with a tensor.
    Tensor(String),
}

impl From<std::io::Error> for WriteFailure {
    fn from(cause: std::io::Error) -> Self {
        Self::Io(cause)
    }
}

/// Where a file's tensor comes from.
enum TensorSource<'a> {
    /// Weights of the model, one after another, which are stored alike. Those that are rearranged are so when they are written,
    /// one at a time.
    Weights(Vec<TensorBytes>, TensorStorage, Change),
    /// A tensor of a GGUF file.
    Bytes(&'a [u8], TensorStorage),
    /// Numbers.
    Table(Vec<f32>),
}

struct PlannedTensor<'a> {
    name: String,
    shape: Vec<usize>,
    storage: TensorStorage,
    source: TensorSource<'a>,
}

/// Writes the model `files` to the file `path`, which is there when it is whole: what was there before may be a part of
/// the model. `progress` is told the bytes written after each tensor, and their sum; its error ends the writing.
///
/// # Errors
///
/// When the model cannot be read or lacks a tensor, GGUF has no words for it, a number is not finite or too large for the
/// storage that it is to have, or the file cannot be written.
pub fn to_gguf(
    files: &ModelFiles,
    path: &Path,
    how: &Quantisation,
    mut progress: impl FnMut(u64, u64) -> std::io::Result<()>,
) -> Result<Written> {
    let mut writer = GgufWriter::default();
    let mut written = Written::default();
    let checkpoint;
    let planned = match files.gguf() {
        Some(gguf) => {
            for (key, value) in gguf.metadata() {
                let dropped = ["general.file_type", "general.quantization_version", "general.alignment"];
                if !dropped.contains(&key.as_str()) && !is_split_key(key) {
                    writer.copy(key, value, gguf);
                }
            }
            let each = gguf.tensors().iter().map(|tensor| PlannedTensor {
                name: tensor.name.clone(),
                shape: tensor.shape.clone(),
                storage: tensor.storage.clone(),
                source: TensorSource::Bytes(gguf.data(tensor), tensor.storage.clone()),
            });
            each.collect()
        }
        None => {
            let (rules, tables);
            if let Some(config) = files.encoder_config()? {
                if config.classifier.is_some() {
                    return Err(FilesError::Path {
                        path: files.to_string().into(),
                        problem: "it is a classifier of texts, which is not written as GGUF".to_owned(),
                        remedy: "run the model from its folder".to_owned(),
                    }
                    .into());
                }
                checkpoint = config.arrange(files.checkpoint()?)?;
                weights::check(&checkpoint, &config.build(&BuildOptions::default())?.graph)?;
                metadata::write_encoder(files, &config, &mut writer)?;
                tokens(files, config.vocab_size, &[], &mut writer)?;
                (rules, tables) = (names::encoder_rules(&config), Vec::new());
            } else {
                let config = files.config()?;
                checkpoint = config.arrange(files.checkpoint()?)?;
                if let Some(name) = checkpoint.with_scales() {
                    return Err(FilesError::Safetensors {
                        file: files.to_string(),
                        problem: format!("{name} is stored as codes with block scales, which GGUF does not have"),
                        remedy: "convert it to a folder of plain weights first (`ridge convert FOLDER PLAIN`)"
                            .to_owned(),
                    }
                    .into());
                }
                weights::check(&checkpoint, &config.build(&BuildOptions::default())?.graph)?;
                metadata::write(files, &config, &mut writer)?;
                tokens(files, config.vocab_size, &config.eos_token_ids, &mut writer)?;
                let mut all = names::decoder_rules(&config);
                all.retain(|rule| !config.tie_word_embeddings || rule.file != "output.weight");
                (rules, tables) = (all, metadata::tables(&config));
            }
            of_weights(files, rules, tables, &checkpoint)?
        }
    };
    let mut planned: Vec<PlannedTensor<'_>> = planned;
    let tied = !planned.iter().any(|tensor| tensor.name == "output.weight");
    let model = match how.mix {
        Some(_) => Some(match files.encoder_config()? {
            Some(config) => MixedModel::new(names::mix_rules(config.family()), &Sizes::from(&config), tied),
            None => {
                let config = files.config()?;
                MixedModel::new(names::mix_rules(Some(config.family())), &Sizes::from(&*config), tied)
            }
        }),
        None => None,
    };
    for tensor in &mut planned {
        choose(tensor, how, model.as_ref(), &mut written);
    }
    let quantised = || planned.iter().filter(|tensor| tensor.storage.format.is_some());
    if let Some(importance) = &how.importance {
        // Of stacks of matrices there is none that all have in common.
        importance.check(
            quantised().filter(|t| t.shape.len() == 2).map(|t| (t.name.as_str(), t.shape.last().copied().unwrap_or(1))),
        )?;
    }
    writer.u32("general.file_type", file_type(&planned, how));
    if quantised().next().is_some() {
        writer.u32("general.quantization_version", 2);
    }
    for tensor in &planned {
        let refused = |problem| FilesError::Path {
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
    replace_file(path, |out| {
        writer.write::<WriteFailure>(out, |index| {
            let tensor = &planned[index];
            let inputs = tensor.shape.last().copied().unwrap_or(1);
            let importance = how.importance.as_ref().filter(|_| tensor.shape.len() == 2);
            let importance = importance.and_then(|all| all.of(&tensor.name, inputs));
            let quantised = tensor.storage.format.is_some();
            *unweighed += usize::from(how.importance.is_some() && quantised && importance.is_none());
            let bytes = tensor.bytes(importance).map_err(WriteFailure::Tensor)?;
            done += bytes.len() as u64;
            progress(done, total)?;
            Ok(bytes)
        })
    })
    .map_err(|failure| failure.of(&files.to_string(), path, "write the model"))?;
    Ok(written)
}

impl WriteFailure {
    /// As the error of writing what `from` says to `path`.
    pub(super) fn of(self, from: &str, path: &Path, action: &'static str) -> FilesError {
        match self {
            Self::Io(cause) => FilesError::Io { path: path.to_owned(), action, cause },
            Self::Tensor(problem) => FilesError::Path {
                path: from.into(),
                problem,
                remedy: "choose f32 or bf16, which hold every number, or download the model again".to_owned(),
            },
        }
    }
}

/// Adds the tokenizer of `files`, if there is one.
fn tokens(files: &ModelFiles, vocab_size: usize, ends: &[u32], to: &mut GgufWriter) -> Result<()> {
    if files.has_tokenizer() {
        return Ok(write_tokenizer(&files.tokenizer_source()?, &files.tokenizer()?, vocab_size, ends, to)?);
    }
    to.text("tokenizer.ggml.model", "none");
    Ok(())
}

/// The tensors of a model that is no GGUF file, by `rules`, and `tables`. Those of `checkpoint` are the model's, of its
/// shapes.
fn of_weights<'a>(
    files: &ModelFiles,
    rules: Vec<Rule>,
    tables: Vec<(&str, Vec<f32>)>,
    checkpoint: &'a Checkpoint,
) -> Result<Vec<PlannedTensor<'a>>> {
    let mut planned = Vec::new();
    for (name, factors) in tables {
        planned.push(PlannedTensor {
            name: name.to_owned(),
            shape: vec![factors.len()],
            storage: TensorStorage::plain(DType::F32),
            source: TensorSource::Table(factors),
        });
    }
    for Rule { file, weights, change, .. } in rules {
        let there = weights.iter().filter(|(name, _)| checkpoint.contains(name)).count();
        if there == 0 {
            continue;
        }
        let names: Vec<&str> = weights.iter().map(|(name, _)| name.as_str()).collect();
        let bytes = names.iter().map(|name| checkpoint.bytes(name)).collect::<Result<Vec<_>, _>>()?;
        let stored = |name: &str| {
            let (dtype, format) = (checkpoint.dtype(name).unwrap_or(DType::F32), checkpoint.format(name).cloned());
            (TensorStorage { dtype, format }, checkpoint.shape(name).unwrap_or_default())
        };
        let (first, of_first) = stored(names[0]);
        let mut shape = of_first.to_vec();
        for name in &names[1..] {
            let (other, of_other) = stored(name);
            if (&other, &of_other[1..]) != (&first, &of_first[1..]) {
                return Err(FilesError::Path {
                    path: files.to_string().into(),
                    problem: format!("{} and {name} have other dtypes or widths", names[0]),
                    remedy: "GGUF has them as one tensor: store them alike".to_owned(),
                }
                .into());
            }
            shape[0] += of_other[0];
        }
        // Norms, biases and the like are few, and are read as f32 everywhere.
        let kept = first.format.is_some() || matches!(first.dtype, DType::F32 | DType::F16 | DType::BF16);
        let storage = if shape.len() < 2 || !kept { TensorStorage::plain(DType::F32) } else { first.clone() };
        planned.push(PlannedTensor { name: file, shape, storage, source: TensorSource::Weights(bytes, first, change) });
    }
    Ok(planned)
}

/// Parts of names of matrices whose storage stays as it is, here as in llama.cpp. Positions and segments are looked up and added,
/// and small. So are routers, whose choices jump, weights of Gemma 3n's streams, and projections of low rank. Biases of experts are no matrices.
const KEPT: [&str; 18] = [
    "_exps.bias",
    "position_embd.weight",
    "token_types.weight",
    ".ffn_gate_inp.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
];

/// Gives a matrix the storage that is asked for, or the nearest that can hold it.
fn choose(tensor: &mut PlannedTensor<'_>, how: &Quantisation, model: Option<&MixedModel>, written: &mut Written) {
    let outer = matches!(tensor.name.as_str(), "token_embd.weight" | "output.weight");
    let width = tensor.shape.last().copied().unwrap_or(1);
    let mixed = || how.mix.zip(model).and_then(|(mix, model)| mix.of(&tensor.name, width, model));
    let wanted = how.outer.clone().filter(|_| outer).or_else(mixed).or_else(|| how.matrices.clone());
    let small = KEPT.iter().any(|part| tensor.name.contains(part));
    let Some(wanted) = wanted.filter(|_| matches!(tensor.shape.len(), 2 | 3) && !small) else { return };
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
fn instead(storage: &TensorStorage) -> TensorStorage {
    let name = match storage.name() {
        "q2_k" | "q3_k" | "iq4_xs" => "iq4_nl",
        "q4_k" => "q5_0",
        "q5_k" => "q5_1",
        "q6_k" => "q8_0",
        _ => "f16",
    };
    TensorStorage::from_name(name).unwrap_or_else(|| TensorStorage::plain(DType::F16))
}

/// The number by which llama.cpp tells what most tensors are.
fn file_type(planned: &[PlannedTensor<'_>], how: &Quantisation) -> u32 {
    if let Some(mix) = how.mix {
        return mix.file_type;
    }
    let most = how.matrices.as_ref().map(TensorStorage::name);
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

impl PlannedTensor<'_> {
    /// Its bytes in its storage.
    ///
    /// # Errors
    /// What is wrong with its numbers.
    fn bytes(&self, importance: Option<&[f32]>) -> Result<Vec<u8>, String> {
        let (storage, bytes) = match &self.source {
            TensorSource::Table(values) => return Ok(self.storage.encode(values, &self.shape, None)),
            TensorSource::Bytes(bytes, storage) => (storage.clone(), bytes.to_vec()),
            TensorSource::Weights(weights, storage, change) => {
                let storage = storage.clone();
                let mut bytes = Vec::new();
                for weight in weights {
                    match weight.made() {
                        Some(made) if bytes.is_empty() => bytes = made,
                        Some(made) => bytes.extend(made),
                        None => bytes.extend(weight.as_ref()),
                    }
                }
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
                    // Rows are divided where files are read alone.
                    Change::None | Change::Rows(_) => (storage, bytes),
                }
            }
        };
        if storage == self.storage {
            return Ok(bytes);
        }
        restored(&self.name, &bytes, &storage, &self.storage, &self.shape, importance)
    }
}

/// `bytes` of the tensor `name` of `shape` in another storage, on all cores.
///
/// # Errors
/// The first number that `to` cannot hold: one that is not finite in a format, one that is too large in any storage.
pub(super) fn restored(
    name: &str,
    bytes: &[u8],
    from: &TensorStorage,
    to: &TensorStorage,
    shape: &[usize],
    importance: Option<&[f32]>,
) -> Result<Vec<u8>, String> {
    let width = shape.last().copied().unwrap_or(1);
    let rows = shape.iter().product::<usize>() / width.max(1);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(rows.max(1));
    let share = rows.div_ceil(threads.max(1)).max(1);
    let row = (bytes.len() / rows.max(1)).max(1);
    let part = &|first: usize, bytes: &[u8]| {
        let mut out = Vec::new();
        for (nth, bytes) in bytes.chunks(row).enumerate() {
            let values = from.decode(bytes);
            let encoded = to.encode(&values, &[1, width], importance);
            if let Some(value) = lost(&values, &encoded, to) {
                let (row, to) = (first + nth, to.name());
                return Err(format!(
                    "the tensor {name} has in row {row} a number that is {value}, which {to} cannot hold"
                ));
            }
            out.extend(encoded);
        }
        Ok(out)
    };
    std::thread::scope(|scope| {
        let chunks = bytes.chunks(share * row).enumerate();
        let parts: Vec<_> = chunks.map(|(nth, chunk)| scope.spawn(move || part(nth * share, chunk))).collect();
        let joined = parts.into_iter().map(|part| part.join().unwrap_or_else(|e| std::panic::resume_unwind(e)));
        Ok(joined.collect::<Result<Vec<_>, _>>()?.concat())
    })
}

/// The number of `values` that `encoded` does not hold. A block whose scale is too large for it holds none of its values,
/// so what is told is the row's largest.
fn lost(values: &[f32], encoded: &[u8], to: &TensorStorage) -> Option<f32> {
    let odd = values.iter().find(|value| to.format.is_some() && !value.is_finite());
    if odd.is_some() {
        return odd.copied();
    }
    let held = to.decode(encoded);
    let is_lost = held.iter().zip(values).any(|(held, value)| value.is_finite() && !held.is_finite());
    let finite = || values.iter().filter(|value| value.is_finite());
    is_lost.then(|| finite().fold(0f32, |most, value| if value.abs() > most.abs() { *value } else { most }))
}
