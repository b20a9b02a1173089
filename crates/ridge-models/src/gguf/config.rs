//! Metadata as a `config.json`. What a key must be is checked where that is read; here keys get their other names.

use std::cell::RefCell;
use std::collections::BTreeSet;

use ridge_files::Gguf;
use ridge_files::gguf::{GgufType, GgufValue, TensorStorage};
use ridge_graph::DType;
use ridge_text::gguf::end_tokens;
use serde_json::{Map, Value as Json, json};

use crate::error::{ModelError, Result};
use crate::families::{
    FamilyDefinition, FamilyKind, GgufMapping, GgufMetadata, LAYERS_KEY, ROTATED_KEY, WINDOW_KEY, by_gguf,
};
use crate::pooling::Pooling;

/// Numbers of `pooling_type`.
pub(super) const POOLINGS: [(u32, Pooling); 3] = [(1, Pooling::Mean), (2, Pooling::Cls), (3, Pooling::Last)];

/// What `torch_dtype` calls a dtype of weights.
pub(super) fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    }
}

/// The text of a `config.json` that says what the metadata of `gguf` says.
///
/// # Errors
///
/// [`ModelError::Files`](crate::ModelError::Files) if a key is missing, has the wrong type, or asks for something that
/// Ridge does not do.
pub fn config_json(gguf: &Gguf) -> Result<String> {
    let architecture = gguf.needed("general.architecture", gguf.text("general.architecture")?)?;
    let window = gguf.int(&format!("{architecture}.{WINDOW_KEY}"))?;
    let read = RefCell::new(BTreeSet::from([WINDOW_KEY.to_owned()]));
    let file = Metadata { gguf, architecture, window, read, lists: RefCell::default() };
    let family = by_gguf(architecture, &file);
    let mut reader = ConfigReader { file, family, out: Map::new() };
    reader.read()?;
    if family.is_some() {
        reader.check()?;
    }
    Ok(Json::Object(reader.out).to_string())
}

/// The factor by which YaRN scales attention scores unless the file says otherwise (section 3.4 of its paper).
pub(super) fn yarn_temper(factor: f64) -> f64 {
    if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 }
}

/// A file's metadata, whose keys begin with the architecture's name.
struct Metadata<'a> {
    gguf: &'a Gguf,
    architecture: &'a str,
    /// How many tokens a token sees.
    window: Option<u64>,
    /// The keys that were asked for, without the architecture's name.
    read: RefCell<BTreeSet<String>>,
    /// Those of them that the family reads as arrays.
    lists: RefCell<BTreeSet<String>>,
}

impl Metadata<'_> {
    fn key(&self, key: &str) -> String {
        self.read.borrow_mut().insert(key.to_owned());
        format!("{}.{key}", self.architecture)
    }
}

/// The factor of scores.
const SCALE_KEY: &str = "attention.scale";

/// What GGUF calls the gates of experts, which families with experts have.
const GATE_EXPERTS: &str = "ffn_gate_exps";

/// Keys behind the architecture's name that cannot change what the model computes.
const HARMLESS: [&str; 5] =
    ["classifier.output_labels", "expert_used_count", "pooling_type", "rope.scaling.finetuned", "tensor_data_layout"];

impl GgufMetadata for Metadata<'_> {
    fn int(&self, key: &str) -> Result<Option<u64>> {
        Ok(self.gguf.int(&self.key(key))?)
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        Ok(self.gguf.float(&self.key(key))?)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        Ok(self.gguf.flag(&self.key(key))?)
    }

    fn list(&self, key: &str) -> Result<Option<Vec<f64>>> {
        self.lists.borrow_mut().insert(key.to_owned());
        let key = self.key(key);
        let number = |value: GgufValue| match value {
            GgufValue::Bool(flag) => Some(f64::from(u8::from(flag))),
            value => value.as_f64(),
        };
        let numbers: Option<Vec<f64>> = match self.gguf.value(&key) {
            None => return Ok(None),
            Some(GgufValue::Array(array)) => self.gguf.elements(array).map(number).collect(),
            Some(value) => number(value.clone()).map(|number| vec![number]),
        };
        numbers.map(Some).ok_or_else(|| self.gguf.wrong(&key, "is neither a number nor an array of them").into())
    }

    fn numbers(&self, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(tensor) = self.gguf.tensors().iter().find(|t| t.name == name) else { return Ok(None) };
        if tensor.shape.len() != 1 || tensor.storage.format.is_some() {
            return Err(self.gguf.wrong(name, "is not a plain vector").into());
        }
        Ok(Some(tensor.storage.decode(self.gguf.data(tensor)).into_iter().map(f64::from).collect()))
    }

    fn window_or_zero(&self) -> Option<u64> {
        self.window
    }

    fn experts(&self) -> u64 {
        self.int("expert_count").ok().flatten().unwrap_or(0)
    }

    fn token_types(&self) -> Result<Option<u64>> {
        Ok(self.gguf.int("tokenizer.ggml.token_type_count")?)
    }

    fn has(&self, name: &str) -> bool {
        self.gguf.tensors().iter().any(|t| t.name == name)
    }

    fn rows(&self, name: &str) -> Option<usize> {
        self.gguf.tensors().iter().find(|t| t.name == name)?.shape.first().copied()
    }

    fn wrong(&self, key: &str, problem: &str) -> ModelError {
        self.gguf.wrong(&self.key(key), problem).into()
    }
}

/// Reads metadata into the object of a `config.json`.
struct ConfigReader<'a> {
    file: Metadata<'a>,
    /// Its family; the keys of an architecture that Ridge does not know are read as Llama's, so that the configuration
    /// says which it is.
    family: Option<&'static FamilyDefinition>,
    out: Map<String, Json>,
}

impl ConfigReader<'_> {
    fn read(&mut self) -> Result<()> {
        const UNKNOWN: &GgufMapping = &GgufMapping::new("");
        let model_type = self.family.map_or(self.file.architecture, |family| family.model_type);
        let mapping = self.family.and_then(|family| family.gguf.as_ref()).unwrap_or(UNKNOWN);
        self.out.insert("model_type".into(), model_type.into());
        for (theirs, ours) in mapping.copied_keys() {
            self.copy(theirs, ours)?;
        }
        self.refuse()?;
        let gguf = self.file.gguf;
        let embedding = self.file.rows("token_embd.weight");
        let tokens = gguf.array("tokenizer.ggml.tokens")?.map(|tokens| tokens.len);
        let vocab = embedding.or(self.file.int("vocab_size")?.map(|n| n as usize)).or(tokens);
        if let Some(vocab) = vocab {
            self.out.insert("vocab_size".into(), vocab.into());
            self.tokens(vocab as u64)?;
        }
        // Values in blocks are good for no more than bf16. And matrices in f16 may be those of a model whose activations
        // are larger than f16 holds, since most are trained in bf16.
        let mut matrices = gguf.tensors().iter().filter(|t| t.shape.len() == 2).peekable();
        if matrices.peek().is_some() {
            let exact = matrices.all(|t| t.storage == TensorStorage::plain(DType::F32));
            let dtype = if exact { DType::F32 } else { DType::BF16 };
            self.out.insert("torch_dtype".into(), torch_name(dtype).into());
        }
        // An output projection that is not there is the embedding.
        if self.family.is_none_or(|family| family.kind() != FamilyKind::Encoder) {
            let output = self.file.has("output.weight");
            self.out.insert("tie_word_embeddings".into(), (!output).into());
        }
        if let Some(theta) = mapping.rope_theta {
            self.rope(theta)?;
        }
        let mut own = Map::new();
        (mapping.read)(&self.file, &mut own)?;
        self.out.append(&mut own);
        Ok(())
    }

    /// Copies a number, or the number that an array with one for each layer has throughout.
    fn copy(&mut self, theirs: &str, ours: &str) -> Result<()> {
        let key = self.file.key(theirs);
        let value = match self.file.gguf.value(&key) {
            None => return Ok(()),
            Some(GgufValue::Array(array)) if array.kind != GgufType::Array && theirs != LAYERS_KEY => {
                let layers = self.file.gguf.int(&self.file.key(LAYERS_KEY))?.unwrap_or_default();
                if array.len as u64 != layers {
                    return Err(self
                        .file
                        .gguf
                        .wrong(&key, &format!("has {} values for {layers} layers", array.len))
                        .into());
                }
                let mut all = self.file.gguf.elements(array);
                match all.next() {
                    Some(first) if all.all(|value| value == first) => first,
                    _ => {
                        return Err(self
                            .file
                            .gguf
                            .wrong(&key, "differs between layers, which Ridge does not do")
                            .into());
                    }
                }
            }
            Some(value) => value.clone(),
        };
        let number = match (value.as_u64(), &value) {
            (Some(whole), _) => Json::from(whole),
            (_, GgufValue::F32(v)) => json!(shortest(*v)),
            (_, other) => match other.as_f64() {
                Some(number) => json!(number),
                None => return Err(self.file.gguf.wrong(&key, &format!("= {other} is not a number")).into()),
            },
        };
        self.out.insert(ours.to_owned(), number);
        Ok(())
    }

    /// Refuses what the configuration that was read does not express, now that all of it was read.
    fn check(&self) -> Result<()> {
        let (file, decoder) = (&self.file, self.family.is_some_and(|family| family.kind() != FamilyKind::Encoder));
        let (hidden, heads) = (file.int("embedding_length")?, file.int("attention.head_count").ok().flatten());
        let shared = hidden.zip(heads.filter(|heads| *heads > 0)).map(|(hidden, heads)| hidden / heads);
        let head_dim = file.int("attention.key_length")?.or(shared);
        // Of families whose configuration has no such key.
        let lacks = |key: &str| {
            let mapping = self.family.and_then(|family| family.gguf.as_ref());
            mapping.is_some_and(|mapping| mapping.keys.contains(&(key, None)))
        };
        for (key, usual) in [("attention.head_count_kv", heads), ("attention.key_length", shared)] {
            let value = if lacks(key) && !file.lists.borrow().contains(key) { file.int(key)? } else { None };
            if let Some((value, usual)) = value.zip(usual).filter(|(value, usual)| value != usual) {
                return Err(file.wrong(key, &format!("= {value} where models of this family have {usual}")));
            }
        }
        let partial = file.read.borrow().contains(ROTATED_KEY);
        let rotates = self.family.and_then(|family| family.gguf.as_ref()?.rope_theta).is_some();
        for (key, matters) in [("attention.value_length", true), (ROTATED_KEY, rotates && !partial)] {
            let value = file.int(key)?.filter(|_| matters);
            if let Some((value, head_dim)) = value.zip(head_dim).filter(|(value, head_dim)| value != head_dim) {
                return Err(file.wrong(key, &format!("= {value} differs from the {head_dim} elements of a head")));
            }
        }
        let own_scale = file.read.borrow().contains(SCALE_KEY);
        if let Some((scale, head_dim)) = file.float(SCALE_KEY)?.filter(|_| !own_scale).zip(head_dim)
            && (scale * (head_dim as f64).sqrt() - 1.0).abs() > 1e-5
        {
            return Err(file.wrong(SCALE_KEY, &format!("= {scale} is not one over the root of {head_dim}")));
        }
        if decoder && file.flag("attention.causal")? == Some(false) {
            return Err(file.wrong("attention.causal", "= false asks for what no decoder does"));
        }
        let read = file.read.borrow();
        let unknown: Vec<(String, String)> = file
            .gguf
            .metadata()
            .iter()
            .filter(|(key, _)| {
                let own = key.strip_prefix(file.architecture).and_then(|key| key.strip_prefix('.'));
                own.is_some_and(|key| !read.contains(key) && !HARMLESS.contains(&key))
            })
            .map(|(key, value)| (key.clone(), value.to_string()))
            .collect();
        if unknown.is_empty() {
            return Ok(());
        }
        Err(ModelError::UnknownKeys { file: file.gguf.file().to_owned(), keys: unknown })
    }

    /// What would be computed otherwise than the file means.
    fn refuse(&self) -> Result<()> {
        let has_experts =
            self.family.is_some_and(|family| family.tensors.of_layer().any(|t| t.gguf == Some(GATE_EXPERTS)));
        for (key, harmless) in [("expert_count", 0), ("attention.max_alibi_bias", 0)] {
            if key == "expert_count" && has_experts {
                continue;
            }
            let key = self.file.key(key);
            if let Some(value) = self.file.gguf.float(&key)?
                && value != f64::from(harmless)
            {
                return Err(self
                    .file
                    .gguf
                    .wrong(&key, &format!("= {value} asks for layers that Ridge does not run"))
                    .into());
            }
        }
        Ok(())
    }

    /// Begin and end tokens.
    fn tokens(&mut self, vocab: u64) -> Result<()> {
        for (theirs, ours) in [("bos", "bos_token_id"), ("eos", "eos_token_id")] {
            let key = format!("tokenizer.ggml.{theirs}_token_id");
            if let Some(id) = self.file.gguf.int(&key)?
                && id < vocab
            {
                self.out.insert(ours.into(), id.into());
            }
        }
        let ends = end_tokens(self.file.gguf)?;
        if !ends.is_empty() {
            self.out.insert("eos_token_id".into(), ends.into());
        }
        Ok(())
    }

    /// The rotation. Factors of single frequencies, which Llama 3 has as a tensor, are those of LongRoPE.
    /// Its base is called `name`.
    fn rope(&mut self, name: &str) -> Result<()> {
        let (gguf, file) = (self.file.gguf, &self.file);
        let theta = file.float("rope.freq_base")?;
        self.out.insert(name.into(), json!(theta.unwrap_or(10_000.0)));
        let positions = file.int("context_length")?;
        let original = file.int("rope.scaling.original_context_length")?;
        // An older key, which counts where the newer is absent; a factor without a type is linear.
        let older = file.float("rope.scale_linear")?;
        let factor = file.float("rope.scaling.factor")?.or(older).filter(|factor| *factor != 0.0);
        let stated = gguf.text(&file.key("rope.scaling.type"))?;
        let kind = match (stated, factor.is_some_and(|factor| factor != 1.0)) {
            (None, true) => Some("linear"),
            (None | Some("linear"), false) => None,
            (stated, _) => stated,
        };
        let attention = match (file.float("rope.scaling.attn_factor")?, file.float("rope.scaling.yarn_attn_factor")?) {
            (Some(one), Some(other)) => Some(one * other),
            (one, other) => one.or(other),
        };
        const MIX: &str = "rope.scaling.yarn_ext_factor";
        if let Some(mix) = file.float(MIX)?.filter(|mix| *mix >= 0.0 && *mix != 1.0) {
            return Err(file.wrong(MIX, &format!("= {mix} mixes frequencies in a way that Ridge does not know")));
        }
        let (every, long, short) = (
            file.numbers("rope_freqs.weight")?,
            file.numbers("rope_factors_long.weight")?,
            file.numbers("rope_factors_short.weight")?,
        );
        if let Some(factor) = factor.filter(|factor| *factor != 1.0 && (every.is_some() || long.is_some())) {
            let problem = format!("= {factor} stretches frequencies that have factors of their own");
            return Err(file.wrong("rope.scaling.factor", &problem));
        }
        let betas = (file.float("rope.scaling.yarn_beta_fast")?, file.float("rope.scaling.yarn_beta_slow")?);
        let tempered = long.is_some() || kind == Some("yarn");
        if let Some(attention) = attention.filter(|attention| *attention != 1.0 && !tempered) {
            let problem = format!("= {attention} multiplies queries and keys, which Ridge does with YaRN and LongRoPE");
            return Err(file.wrong("rope.scaling.attn_factor", &problem));
        }
        let scaling = match (every, long, short, kind) {
            (Some(every), ..) => Some(json!({
                "rope_type": "longrope", "short_factor": every.clone(), "long_factor": every,
                "original_max_position_embeddings": positions, "attention_factor": 1.0,
            })),
            (_, Some(long), Some(short), _) => Some(json!({
                "rope_type": "longrope", "short_factor": short, "long_factor": long,
                "original_max_position_embeddings": original.or(positions), "attention_factor": attention,
            })),
            (.., Some("linear")) => Some(json!({ "rope_type": "linear", "factor": factor })),
            (.., Some("yarn")) => Some(json!({
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                "attention_factor": attention.zip(factor).map(|(part, factor)| part * yarn_temper(factor)),
                "beta_fast": betas.0, "beta_slow": betas.1,
            })),
            (.., None | Some("none")) => None,
            (.., Some(_)) => {
                return Err(file.wrong("rope.scaling.type", "names a scaling that Ridge does not know"));
            }
        };
        if let Some(Json::Object(mut scaling)) = scaling {
            scaling.retain(|_, value| !value.is_null());
            self.out.insert("rope_scaling".into(), scaling.into());
        }
        Ok(())
    }
}

/// The f64 that is written as `value` is: 1e-5 and not 9.999999747378752e-6.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| value.into())
}
