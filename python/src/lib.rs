//! Ridge as a Python module. `ridge/__init__.py` is what Python sees.
//!
//! Whatever takes time runs without the interpreter's lock. A stream runs on a thread of its own, which ends when the
//! iterator is dropped.

mod tensor;

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyFileNotFoundError, PyMemoryError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use ridge::{Device, EmbedOptions, Embedder, Placement, Question, Sampling, Scorer, TensorParallel, Writer};
use ridge_graph::{DType, FormatRef};
use ridge_hub::{HubSettings, PullRequest};
use ridge_plan::efficiency::Calibration;
use ridge_plan::ledger::{Quantisation, ServingMemory, serving};
use ridge_plan::reading::Reading;
use ridge_text::template::Data;

use tensor::Tensor;

/// Converts the error to the matching Python exception.
fn raised(error: ridge::Error) -> PyErr {
    let text = error.to_string();
    match error {
        ridge::Error::Memory { .. } => PyMemoryError::new_err(text),
        ridge::Error::Files(_) | ridge::Error::Model(_) if text.contains("there is no such") => {
            PyFileNotFoundError::new_err(text)
        }
        ridge::Error::Engine(_) | ridge::Error::Kind { .. } | ridge::Error::Device { .. } => {
            PyValueError::new_err(text)
        }
        _ => PyRuntimeError::new_err(text),
    }
}

fn wrong(what: impl ToString) -> PyErr {
    PyValueError::new_err(what.to_string())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The path and settings of a model, from which it can be loaded repeatedly.
#[derive(Clone)]
struct Source {
    model: Option<String>,
    placement: Placement,
    format: Option<FormatRef>,
    dtype: Option<DType>,
    context: Option<usize>,
}

impl Source {
    fn new(
        model: Option<String>,
        (device, threads, tensor_parallel): (&str, Option<usize>, usize),
        format: Option<&str>,
        dtype: Option<&str>,
        context: Option<usize>,
    ) -> PyResult<Self> {
        let device = match device.to_ascii_lowercase().as_str() {
            "cpu" => Device::Cpu,
            "cuda" => Device::Cuda(0),
            "auto" => Device::Auto,
            name => match name.strip_prefix("cuda:").and_then(|index| index.parse().ok()) {
                Some(index) => Device::Cuda(index),
                None => return Err(wrong(format!("device {device:?}: choose cpu, cuda, cuda:N or auto"))),
            },
        };
        let tensor_parallel = match tensor_parallel {
            0 => return Err(wrong("tensor_parallel 0: must be 1 or more")),
            1 => TensorParallel::None,
            ranks => TensorParallel::Here(ranks),
        };
        let format = format.map(|name| {
            FormatRef::from_name(&name.to_ascii_lowercase())
                .ok_or_else(|| wrong(format!("format {name:?}: is not a storage format")))
        });
        let dtype = dtype.map(|name| match DType::from_name(&name.to_ascii_lowercase()) {
            Some(dtype @ (DType::F32 | DType::BF16 | DType::F16)) => Ok(dtype),
            _ => Err(wrong(format!("dtype {name:?}: choose f32, bf16 or f16"))),
        });
        let placement = Placement { threads, tensor_parallel, ..device.into() };
        Ok(Self { model, placement, format: format.transpose()?, dtype: dtype.transpose()?, context })
    }

    fn open(&self) -> PyResult<ridge::Model> {
        let model = match &self.model {
            Some(path) => ridge::Model::open(path),
            None => ridge::Model::embedded(),
        };
        let mut model = model.map_err(raised)?;
        if let Some(format) = self.format.clone() {
            model = model.with_format(format);
        }
        if let Some(dtype) = self.dtype {
            model = model.with_dtype(dtype);
        }
        if let Some(context) = self.context {
            model = model.with_context(context);
        }
        Ok(model)
    }

    fn placed(&self) -> PyResult<ridge::PlacedModel> {
        Ok(self.open()?.on(self.placement.clone()))
    }
}

/// The text to continue.
#[derive(FromPyObject)]
enum Prompt {
    Text(String),
    Messages(Vec<Py<PyAny>>),
}

/// A generating model.
#[pyclass(frozen)]
struct Model {
    source: Source,
    writer: Arc<Mutex<Writer>>,
    scorer: Mutex<Option<Scorer>>,
}

/// A prompt, as tokens or as text.
enum Asked {
    Text(String),
    Messages(Vec<Data>),
}

impl Asked {
    fn write(
        self,
        writer: &mut Writer,
        sampling: Sampling,
        max_tokens: usize,
        on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> ridge::Result<String> {
        let written = match self {
            Self::Text(text) => writer.write(&text, sampling, max_tokens, on_text),
            Self::Messages(messages) => writer.chat(messages, sampling, max_tokens, on_text),
        };
        written.map(|(text, _)| text)
    }
}

/// Converts messages to the template's data type, through JSON.
fn asked(py: Python<'_>, prompt: Prompt) -> PyResult<Asked> {
    let messages = match prompt {
        Prompt::Text(text) => return Ok(Asked::Text(text)),
        Prompt::Messages(messages) => messages,
    };
    let text: String = py.import("json")?.call_method1("dumps", (messages,))?.extract()?;
    match Data::from_json("messages", &text).map_err(wrong)? {
        Data::List(messages) if messages.iter().all(|message| matches!(message, Data::Map(_))) => {
            Ok(Asked::Messages(messages))
        }
        _ => Err(wrong("messages must be dicts with role and content")),
    }
}

/// Raises the exception of a pending signal, such as KeyboardInterrupt.
fn check_signals(py: Python<'_>) -> PyResult<()> {
    py.check_signals()
}

/// Validated sampling settings.
fn sampling(
    (temperature, top_k, top_p, min_p): (f32, u32, f32, f32),
    (repetition_penalty, frequency_penalty, presence_penalty): (f32, f32, f32),
    seed: Option<u64>,
) -> PyResult<Sampling> {
    let seed = seed.unwrap_or_else(|| {
        use std::hash::{BuildHasher as _, Hasher as _};
        std::hash::RandomState::new().build_hasher().finish() >> 32
    });
    let sampling = Sampling {
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        frequency_penalty,
        presence_penalty,
        seed,
        ..Sampling::GREEDY
    };
    sampling.check().map_err(wrong)?;
    Ok(sampling)
}

#[pymethods]
impl Model {
    #[new]
    #[pyo3(signature = (model, device, threads, tensor_parallel, format, dtype, context))]
    fn new(
        py: Python<'_>,
        model: Option<String>,
        device: &str,
        threads: Option<usize>,
        tensor_parallel: usize,
        format: Option<&str>,
        dtype: Option<&str>,
        context: Option<usize>,
    ) -> PyResult<Self> {
        let source = Source::new(model, (device, threads, tensor_parallel), format, dtype, context)?;
        let writer = py.detach(|| source.placed()?.writer().map_err(raised))?;
        Ok(Self { source, writer: Arc::new(Mutex::new(writer)), scorer: Mutex::new(None) })
    }

    #[pyo3(signature = (prompt, max_tokens, first, penalties, seed))]
    fn generate(
        &self,
        py: Python<'_>,
        prompt: Prompt,
        max_tokens: usize,
        first: (f32, u32, f32, f32),
        penalties: (f32, f32, f32),
        seed: Option<u64>,
    ) -> PyResult<String> {
        let (asked, sampling) = (asked(py, prompt)?, sampling(first, penalties, seed)?);
        let written = py.detach(|| {
            let mut writer = lock(&self.writer);
            // Ctrl-C is heard between tokens.
            let mut interrupt = None;
            let text = asked.write(&mut writer, sampling, max_tokens, |_| match Python::attach(check_signals) {
                Ok(()) => ControlFlow::Continue(()),
                Err(raised) => {
                    interrupt = Some(raised);
                    ControlFlow::Break(())
                }
            });
            (text, interrupt)
        });
        match written {
            (_, Some(interrupt)) => Err(interrupt),
            (text, None) => text.map_err(raised),
        }
    }

    #[pyo3(signature = (prompt, max_tokens, first, penalties, seed))]
    fn stream(
        &self,
        py: Python<'_>,
        prompt: Prompt,
        max_tokens: usize,
        first: (f32, u32, f32, f32),
        penalties: (f32, f32, f32),
        seed: Option<u64>,
    ) -> PyResult<TextStream> {
        /// Pieces that have not been read yet.
        const WAITING: usize = 256;
        let (asked, sampling) = (asked(py, prompt)?, sampling(first, penalties, seed)?);
        let (sender, pieces) = sync_channel(WAITING);
        let writer = Arc::clone(&self.writer);
        std::thread::spawn(move || {
            let mut writer = lock(&writer);
            let written = asked.write(&mut writer, sampling, max_tokens, |text| {
                match sender.send(Ok(text.to_owned())) {
                    Ok(()) => ControlFlow::Continue(()),
                    // The iterator was dropped.
                    Err(_) => ControlFlow::Break(()),
                }
            });
            if let Err(error) = written {
                let _ = sender.send(Err(error));
            }
        });
        Ok(TextStream { pieces: Mutex::new(pieces) })
    }

    fn tokenize(&self, text: &str, special: bool) -> PyResult<Vec<u32>> {
        lock(&self.writer).tokenizer().encode(text, special).map_err(wrong)
    }

    fn detokenize(&self, tokens: Vec<u32>) -> PyResult<String> {
        lock(&self.writer).tokenizer().decode(&tokens, false).map_err(wrong)
    }

    fn score(&self, py: Python<'_>, text: String) -> PyResult<Vec<(u32, f32)>> {
        let tokens = lock(&self.writer).tokenizer().encode(&text, true).map_err(wrong)?;
        py.detach(|| {
            let mut scorer = lock(&self.scorer);
            if scorer.is_none() {
                *scorer = Some(self.source.placed()?.scorer().map_err(raised)?);
            }
            let Some(scorer) = scorer.as_mut() else { return Ok(Vec::new()) };
            let [context, scored @ ..] = &tokens[..] else { return Ok(Vec::new()) };
            let question = Question { context: &[*context], continuations: vec![scored] };
            let scores = scorer.score(&[question], |_| {}).map_err(|error| raised(error.into()))?;
            Ok(scored.iter().copied().zip(scores.into_iter().flatten().flatten()).collect())
        })
    }
}

/// An iterator over the pieces of a generated text.
#[pyclass(frozen)]
struct TextStream {
    pieces: Mutex<Receiver<ridge::Result<String>>>,
}

#[pymethods]
impl TextStream {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<String>> {
        match py.detach(|| lock(&self.pieces).recv()) {
            Ok(piece) => piece.map(Some).map_err(raised),
            Err(_) => Ok(None),
        }
    }
}

/// An embedding model.
#[pyclass(frozen)]
struct TextEmbedder {
    embedder: Mutex<Embedder>,
    tokenizer: ridge::Tokenizer,
    max_tokens: usize,
}

#[pymethods]
impl TextEmbedder {
    #[new]
    #[pyo3(signature = (model, device, threads, format, dtype, normalize))]
    fn new(
        py: Python<'_>,
        model: Option<String>,
        device: &str,
        threads: Option<usize>,
        format: Option<&str>,
        dtype: Option<&str>,
        normalize: Option<bool>,
    ) -> PyResult<Self> {
        /// Maximum tokens per step; a single longer text is allowed.
        const STEP: usize = 4096;
        let source = Source::new(model, (device, threads, 1), format, dtype, None)?;
        py.detach(|| {
            let opened = source.open()?;
            let said = opened.files().sentence_config().map_err(|error| raised(error.into()))?;
            let mut sentence = said.unwrap_or_default();
            sentence.normalize = normalize.unwrap_or(sentence.normalize);
            let tokenizer = opened.tokenizer().map_err(raised)?;
            let options = EmbedOptions::new(sentence, STEP);
            let embedder = opened.on(source.placement.clone()).embedder(options).map_err(raised)?;
            let max_tokens = embedder.max_tokens();
            Ok(Self { embedder: Mutex::new(embedder), tokenizer, max_tokens })
        })
    }

    fn embed(&self, py: Python<'_>, texts: Vec<String>) -> PyResult<Tensor> {
        py.detach(|| {
            let tokens = texts.iter().map(|text| self.tokenizer.encode_truncated(text, self.max_tokens));
            let tokens = tokens.collect::<Result<Vec<_>, _>>().map_err(wrong)?;
            let vectors = lock(&self.embedder).embed(&tokens).map_err(|error| raised(error.into()))?;
            Ok(Tensor::of_rows(vectors))
        })
    }
}

/// Downloads a model and returns its folder.
#[pyfunction]
#[pyo3(signature = (model, revision, include))]
fn pull(py: Python<'_>, model: &str, revision: Option<&str>, include: Vec<String>) -> PyResult<String> {
    let mut model: ridge_hub::HubModel = model.parse().map_err(wrong)?;
    if let Some(revision) = revision {
        model = model.at(revision).map_err(wrong)?;
    }
    let request = PullRequest { include, ..PullRequest::new(model) };
    let settings = HubSettings::from_environment().map_err(wrong)?;
    let pulled = py.detach(|| ridge_hub::pull(&request, &settings, &mut ()));
    let pulled = pulled.map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    Ok(pulled.folder.display().to_string())
}

/// The memory plan of a model on a device, as JSON.
#[pyfunction]
#[pyo3(signature = (model, device, context, weights, cache_bits, tp))]
fn plan_fit(
    model: &str,
    device: &str,
    context: Option<usize>,
    weights: &str,
    cache_bits: u32,
    tp: usize,
) -> PyResult<String> {
    let files = ridge_models::ModelFiles::open(Some(model.as_ref())).map_err(wrong)?;
    let text = files.config_text().map_err(wrong)?;
    let reading = Reading::from_json(model, &text).map_err(wrong)?;
    let weights = Quantisation::find(weights).map_err(wrong)?;
    let machine = Calibration::default().machine(device, ridge_hw::spec::Precision::Bf16).map_err(wrong)?.in_a_server();
    let context = context.unwrap_or(8192.min(reading.max_context));
    let memory = ServingMemory {
        tp,
        pp: 1,
        ep: 1,
        weights,
        cache_bytes: f64::from(cache_bits) / 8.0,
        step_tokens: 8192,
        utilisation: 0.94,
    };
    let bytes = ridge_hw::units::Bytes(machine.memory as u64);
    let fit = match serving(&reading, bytes, &memory, context) {
        Ok(fit) => serde_json::json!({ "fits": fit.sequences > 0, "sequences": fit.sequences, "fit": fit }),
        Err(ridge_plan::PlanError::Room { needed, .. }) => serde_json::json!({ "fits": false, "needed_bytes": needed }),
        Err(error) => return Err(wrong(error)),
    };
    let mut plan = serde_json::json!({
        "model": reading.family, "parameters": reading.parameters, "device": machine.name, "device_bytes": bytes,
        "context": context,
    });
    if let (Some(plan), serde_json::Value::Object(fit)) = (plan.as_object_mut(), fit) {
        plan.extend(fit);
    }
    Ok(plan.to_string())
}

#[pymodule]
fn _ridge(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Model>()?;
    module.add_class::<TextStream>()?;
    module.add_class::<TextEmbedder>()?;
    module.add_class::<Tensor>()?;
    module.add_function(wrap_pyfunction!(pull, module)?)?;
    module.add_function(wrap_pyfunction!(plan_fit, module)?)
}
