//! Metadata as a `config.json`. What a key must be is checked where that is read; here keys get their other names.

use ridge_files::Gguf;
use ridge_files::gguf::{GgufType, GgufValue, TensorStorage};
use ridge_graph::DType;
use ridge_text::gguf::end_tokens;
use serde_json::{Map, Value as Json, json};

use crate::error::Result;
use crate::pooling::Pooling;

/// Names of architectures in GGUF, and the `model_type` that they are.
pub(super) const ARCHITECTURES: [(&str, &str); 11] = [
    ("llama", "llama"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("gemma2", "gemma2"),
    ("gemma3", "gemma3_text"),
    ("phi3", "phi3"),
    ("olmo2", "olmo2"),
    ("gpt2", "gpt2"),
    ("gptneox", "gpt_neox"),
    ("falcon", "falcon"),
    ("bert", "bert"),
];

/// Numbers of `pooling_type`.
pub(super) const POOLINGS: [(u32, Pooling); 3] = [(1, Pooling::Mean), (2, Pooling::Cls), (3, Pooling::Last)];

/// The family of an architecture; an unknown one keeps its name.
pub(super) fn model_type(architecture: &str) -> &str {
    ARCHITECTURES.iter().find(|(theirs, _)| *theirs == architecture).map_or(architecture, |(_, ours)| ours)
}

/// Keys of metadata behind the architecture's name, and what they are called in most families.
const USUAL: [(&str, &str); 8] = [
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    (LAYERS, "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.key_length", "head_dim"),
];

/// How many layers there are.
const LAYERS: &str = "block_count";

/// What families call them that differ; `None` for what they do not have.
const OTHERS: [(&str, &str, Option<&str>); 15] = [
    ("gpt2", "embedding_length", Some("n_embd")),
    ("gpt2", "feed_forward_length", Some("n_inner")),
    ("gpt2", LAYERS, Some("n_layer")),
    ("gpt2", "attention.head_count", Some("n_head")),
    ("gpt2", "attention.head_count_kv", None),
    ("gpt2", "context_length", Some("n_positions")),
    ("gpt2", "attention.layer_norm_epsilon", Some("layer_norm_epsilon")),
    ("gpt_neox", "attention.head_count_kv", None),
    ("gpt_neox", "attention.layer_norm_epsilon", Some("layer_norm_eps")),
    ("falcon", "feed_forward_length", Some("ffn_hidden_size")),
    ("falcon", "attention.head_count_kv", Some("num_kv_heads")),
    ("falcon", "attention.layer_norm_epsilon", Some("layer_norm_epsilon")),
    ("bert", "attention.head_count_kv", None),
    ("bert", "attention.key_length", None),
    ("bert", "attention.layer_norm_epsilon", Some("layer_norm_eps")),
];

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
    let mut reader = ConfigReader { gguf, architecture, family: model_type(architecture), out: Map::new() };
    reader.read()?;
    Ok(Json::Object(reader.out).to_string())
}

/// The factor by which YaRN scales attention scores unless the file says otherwise (section 3.4 of its paper).
pub(super) fn yarn_temper(factor: f64) -> f64 {
    if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 }
}

/// Reads metadata into the object of a `config.json`.
struct ConfigReader<'a> {
    gguf: &'a Gguf,
    architecture: &'a str,
    family: &'a str,
    out: Map<String, Json>,
}

impl ConfigReader<'_> {
    fn read(&mut self) -> Result<()> {
        let family = self.family;
        self.out.insert("model_type".into(), family.into());
        let others = OTHERS.iter().filter(|(of, ..)| *of == family);
        let renamed = |key: &str| OTHERS.iter().find(|(of, theirs, _)| *of == family && *theirs == key);
        for (theirs, ours) in USUAL.iter().filter(|(theirs, _)| renamed(theirs).is_none()) {
            self.copy(theirs, ours)?;
        }
        for (_, theirs, ours) in others {
            if let Some(ours) = ours {
                self.copy(theirs, ours)?;
            }
        }
        self.refuse()?;
        let gguf = self.gguf;
        let embedding = gguf.tensors().iter().find(|t| t.name == "token_embd.weight").and_then(|t| t.shape.first());
        let tokens = gguf.array("tokenizer.ggml.tokens")?.map(|tokens| tokens.len);
        let vocab = embedding.copied().or(gguf.int(&self.key("vocab_size"))?.map(|n| n as usize)).or(tokens);
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
        if self.family != "bert" {
            let output = self.has("output.weight");
            self.out.insert("tie_word_embeddings".into(), (!output).into());
        }
        self.rope()?;
        self.family()
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn has(&self, tensor: &str) -> bool {
        self.gguf.tensors().iter().any(|t| t.name == tensor)
    }

    /// Copies a number, or the number that an array with one for each layer has throughout.
    fn copy(&mut self, theirs: &str, ours: &str) -> Result<()> {
        let key = self.key(theirs);
        let value = match self.gguf.value(&key) {
            None => return Ok(()),
            Some(GgufValue::Array(array)) if array.kind != GgufType::Array && theirs != LAYERS => {
                let layers = self.gguf.int(&self.key(LAYERS))?.unwrap_or_default();
                if array.len as u64 != layers {
                    return Err(self.gguf.wrong(&key, &format!("has {} values for {layers} layers", array.len)).into());
                }
                let mut all = self.gguf.elements(array);
                match all.next() {
                    Some(first) if all.all(|value| value == first) => first,
                    _ => return Err(self.gguf.wrong(&key, "differs between layers, which Ridge does not do").into()),
                }
            }
            Some(value) => value.clone(),
        };
        let number = match (value.as_u64(), &value) {
            (Some(whole), _) => Json::from(whole),
            (_, GgufValue::F32(v)) => json!(shortest(*v)),
            (_, other) => match other.as_f64() {
                Some(number) => json!(number),
                None => return Err(self.gguf.wrong(&key, &format!("= {other} is not a number")).into()),
            },
        };
        self.out.insert(ours.to_owned(), number);
        Ok(())
    }

    /// What would be computed otherwise than the file means.
    fn refuse(&self) -> Result<()> {
        for (key, harmless) in [("expert_count", 0), ("attention.max_alibi_bias", 0)] {
            let key = self.key(key);
            if let Some(value) = self.gguf.float(&key)?
                && value != f64::from(harmless)
            {
                return Err(self
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
            if let Some(id) = self.gguf.int(&key)?
                && id < vocab
            {
                self.out.insert(ours.into(), id.into());
            }
        }
        let ends = end_tokens(self.gguf)?;
        if !ends.is_empty() {
            self.out.insert("eos_token_id".into(), ends.into());
        }
        Ok(())
    }

    /// The rotation. Factors of single frequencies, which Llama 3 has as a tensor, are those of LongRoPE.
    fn rope(&mut self) -> Result<()> {
        if matches!(self.family, "gpt2" | "bert") {
            return Ok(());
        }
        let gguf = self.gguf;
        let theta = gguf.float(&self.key("rope.freq_base"))?;
        let name = if self.family == "gpt_neox" { "rotary_emb_base" } else { "rope_theta" };
        self.out.insert(name.into(), json!(theta.unwrap_or(10_000.0)));
        let positions = gguf.int(&self.key("context_length"))?;
        let original = gguf.int(&self.key("rope.scaling.original_context_length"))?;
        let factor = gguf.float(&self.key("rope.scaling.factor"))?;
        let kind = gguf.text(&self.key("rope.scaling.type"))?;
        let attention = gguf.float(&self.key("rope.scaling.attn_factor"))?;
        let (every, long, short) = (
            self.factors("rope_freqs.weight")?,
            self.factors("rope_factors_long.weight")?,
            self.factors("rope_factors_short.weight")?,
        );
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
                "beta_fast": gguf.float(&self.key("rope.scaling.yarn_beta_fast"))?,
                "beta_slow": gguf.float(&self.key("rope.scaling.yarn_beta_slow"))?,
            })),
            (.., None | Some("none")) => None,
            (.., Some(_)) => {
                return Err(gguf
                    .wrong(&self.key("rope.scaling.type"), "names a scaling that Ridge does not know")
                    .into());
            }
        };
        if let Some(Json::Object(mut scaling)) = scaling {
            scaling.retain(|_, value| !value.is_null());
            self.out.insert("rope_scaling".into(), scaling.into());
        }
        Ok(())
    }

    /// The elements of a tensor of factors.
    fn factors(&self, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(tensor) = self.gguf.tensors().iter().find(|t| t.name == name) else { return Ok(None) };
        if tensor.shape.len() != 1 || tensor.storage.format.is_some() {
            return Err(self.gguf.wrong(name, "is not a plain vector").into());
        }
        Ok(Some(tensor.storage.decode(self.gguf.data(tensor)).into_iter().map(f64::from).collect()))
    }

    /// What one family alone has.
    fn family(&mut self) -> Result<()> {
        let gguf = self.gguf;
        let window = gguf.int(&self.key("attention.sliding_window"))?;
        let mut put = Map::new();
        match self.family {
            "llama" => {
                if let Some(window) = window.filter(|window| *window > 0) {
                    put.insert("model_type".into(), "mistral".into());
                    put.insert("sliding_window".into(), window.into());
                } else {
                    put.insert("attention_bias".into(), self.has("blk.0.attn_q.bias").into());
                    put.insert("mlp_bias".into(), self.has("blk.0.ffn_up.bias").into());
                }
            }
            "qwen3" | "olmo2" => {
                put.insert("attention_bias".into(), self.has("blk.0.attn_q.bias").into());
            }
            "phi3" => {
                put.insert("sliding_window".into(), window.filter(|window| *window > 0).into());
                self.partial(&mut put, "partial_rotary_factor")?;
            }
            "gpt_neox" => {
                let parallel = gguf.flag(&self.key("use_parallel_residual"))?;
                put.insert("use_parallel_residual".into(), parallel.unwrap_or(true).into());
                put.insert("attention_bias".into(), self.has("blk.0.attn_qkv.bias").into());
                self.partial(&mut put, "rotary_pct")?;
            }
            "falcon" => {
                let (heads, kv) =
                    (gguf.int(&self.key("attention.head_count"))?, gguf.int(&self.key("attention.head_count_kv"))?);
                put.insert("new_decoder_architecture".into(), (kv.unwrap_or(1) > 1 && kv < heads).into());
                put.insert("multi_query".into(), (kv.unwrap_or(1) == 1).into());
                put.insert(
                    "num_ln_in_parallel_attn".into(),
                    (1 + u8::from(self.has("blk.0.attn_norm_2.weight"))).into(),
                );
                put.insert("bias".into(), self.has("blk.0.attn_qkv.bias").into());
            }
            "gemma2" | "gemma3_text" => self.gemma(&mut put, window)?,
            "bert" => {
                if gguf.flag(&self.key("attention.causal"))? == Some(true) {
                    return Err(gguf
                        .wrong(&self.key("attention.causal"), "= true asks for what no encoder does")
                        .into());
                }
                let table = gguf.tensors().iter().find(|t| t.name == "token_types.weight");
                let said = gguf.int("tokenizer.ggml.token_type_count")?;
                let types = table.and_then(|t| t.shape.first().map(|n| *n as u64)).or(said);
                put.insert("type_vocab_size".into(), types.unwrap_or(1).into());
            }
            _ => {}
        }
        self.out.append(&mut put);
        Ok(())
    }

    fn gemma(&self, put: &mut Map<String, Json>, window: Option<u64>) -> Result<()> {
        let gguf = self.gguf;
        put.insert("sliding_window".into(), window.unwrap_or(4096).into());
        put.insert("hidden_activation".into(), "gelu_pytorch_tanh".into());
        for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if let Some(cap) = gguf.float(&self.key(key))? {
                put.insert(key.into(), json!(cap));
            }
        }
        // The largest models divide by the width of a head of the residual stream, the others by that of a head.
        let layers = gguf.int(&self.key(LAYERS))?.unwrap_or_default();
        let (hidden, heads) = (gguf.int(&self.key("embedding_length"))?, gguf.int(&self.key("attention.head_count"))?);
        let largest = (self.family == "gemma2" && layers == 46) || (self.family == "gemma3_text" && layers == 62);
        let scalar = match (largest, hidden, heads) {
            (true, Some(hidden), Some(heads)) if heads > 0 => Some(hidden / heads),
            _ => gguf.int(&self.key("attention.key_length"))?,
        };
        // A converter of Ridge's says what it is.
        let said = gguf.float(&self.key("attention.query_pre_attn_scalar"))?;
        put.insert("query_pre_attn_scalar".into(), said.map_or_else(|| scalar.into(), |said| json!(said)));
        if self.family == "gemma3_text" {
            let local = gguf.float(&self.key("rope.freq_base_swa"))?.unwrap_or(10_000.0);
            put.insert("rope_local_base_freq".into(), json!(local));
            let pattern = gguf.int(&self.key("attention.sliding_window_pattern"))?;
            put.insert("sliding_window_pattern".into(), pattern.unwrap_or(6).into());
        }
        Ok(())
    }

    /// The share of a head that is rotated.
    fn partial(&self, put: &mut Map<String, Json>, name: &str) -> Result<()> {
        let rotated = self.gguf.int(&self.key("rope.dimension_count"))?;
        let (hidden, heads) =
            (self.gguf.int(&self.key("embedding_length"))?, self.gguf.int(&self.key("attention.head_count"))?);
        let dim = match self.gguf.int(&self.key("attention.key_length"))? {
            Some(dim) => Some(dim),
            None => hidden.zip(heads).filter(|(_, heads)| *heads > 0).map(|(hidden, heads)| hidden / heads),
        };
        if let Some((rotated, dim)) = rotated.zip(dim.filter(|dim| *dim > 0)) {
            put.insert(name.into(), json!(rotated as f64 / dim as f64));
        }
        Ok(())
    }
}

/// The f64 that is written as `value` is: 1e-5 and not 9.999999747378752e-6.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| value.into())
}
