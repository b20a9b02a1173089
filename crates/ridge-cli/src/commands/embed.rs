//! `ridge embed`: text embeddings.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ridge_engine::{EmbedOptions, similarities};
use ridge_models::{ModelFiles, NetworkConfig, Pooling, SentenceConfig};
use ridge_text::Tokenizer;
use serde_json::json;

use crate::args::{DeviceArgs, MAX_COUNT, NumberArgs, whole};
use crate::error::{Result, refused};
use crate::input;
use crate::output::{LoadProgress, columns, count, note, print, print_json};

/// Compute embeddings of texts
///
/// Works for encoders (BERT) and decoders. The pooling is read from the model's sentence-transformers files if there are
/// any; the default is the mean. Their default prompt is put in front of every text.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge embed --model DIR \"a text\" \"another\"       one line of numbers per text
  ridge embed --model DIR --similarity \"a\" \"b\"     cosine similarity
  ridge embed --model DIR --json - < lines.txt     one text per line

Exit codes: 0 done, 1 failed, 2 usage error.")]
pub(crate) struct EmbedArgs {
    /// Texts; `-` reads one per line from standard input
    #[arg(required = true)]
    texts: Vec<String>,

    /// Model: a folder in the Hugging Face layout, a GGUF file, or the ORG/NAME of a model downloaded with `ridge pull`
    /// [default: the embedded model]
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,

    /// Use random weights
    #[arg(long)]
    random_weights: bool,

    /// Pooling of token vectors
    #[arg(long, value_enum, default_value = "auto")]
    pooling: PoolingArg,

    /// Normalise each vector to length 1
    #[arg(long, overrides_with = "no_normalize")]
    normalize: bool,

    /// Do not normalise, even if the model's files request it
    #[arg(long, overrides_with = "normalize")]
    no_normalize: bool,

    /// Truncate texts that are too long instead of rejecting them
    #[arg(long)]
    truncate: bool,

    /// Maximum tokens per step
    #[arg(
        long, value_name = "N", value_parser = whole::<usize, 1, MAX_COUNT>,
        allow_negative_numbers = true, default_value_t = 4096, help_heading = "Running"
    )]
    batch_tokens: usize,

    #[command(flatten)]
    place: DeviceArgs,

    #[command(flatten)]
    numbers: NumberArgs,

    /// Print the cosine similarity of each pair of texts
    #[arg(long, help_heading = "Output")]
    similarity: bool,

    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,

    /// Print no notes
    #[arg(short, long, help_heading = "Output")]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PoolingArg {
    Auto,
    Mean,
    Cls,
    Last,
    Max,
}

impl PoolingArg {
    fn chosen(self) -> Option<Pooling> {
        match self {
            Self::Auto => None,
            Self::Mean => Some(Pooling::Mean),
            Self::Cls => Some(Pooling::Cls),
            Self::Last => Some(Pooling::Last),
            Self::Max => Some(Pooling::Max),
        }
    }
}

pub(crate) fn run(args: EmbedArgs) -> Result<()> {
    let settings = args.numbers.settings(args.model.clone())?;
    let files = ModelFiles::open(args.model.as_deref())?;
    if matches!(files.network_config()?, NetworkConfig::ImageClassifier(_)) {
        return Err(refused("--model", files, "is an image classifier; use `ridge classify`"));
    }
    let said = sentence_config(&args, &files)?;
    if said.is_none() && !args.quiet && !args.json {
        note("the model's files do not specify a pooling; using the mean (--pooling changes it)");
    }
    let mut sentence = said.unwrap_or_default();
    sentence.normalize = !args.no_normalize && (args.normalize || sentence.normalize);
    let (pooling, normalize) = (sentence.pooling, sentence.normalize);
    let tokenizer = files.tokenizer()?;
    let texts = texts(&args.texts)?;
    let prompted: Vec<_> = texts.iter().map(|text| sentence.prompted(text).into_owned()).collect();
    let options = EmbedOptions::new(sentence, args.batch_tokens);
    let (placement, mut progress) = (args.place.placement(), LoadProgress::new(false));
    let mut embedder =
        ridge::load_embedder(&files, options, &settings.numbers, &placement, args.random_weights, &mut progress)?;
    let most = embedder.max_tokens();
    let ids = prompted.iter().map(|text| tokens(&tokenizer, text, most, args.truncate)).collect::<Result<Vec<_>>>()?;
    let vectors = embedder.embed(&ids)?;
    if args.json {
        let each = |((text, ids), vector): ((&String, &Vec<u32>), &Vec<f32>)| json!({ "text": text, "tokens": ids.len(), "embedding": vector });
        let similarity = args.similarity.then(|| similarities(&vectors));
        return print_json(&json!({
            "model": files.to_string(),
            "pooling": pooling.name(),
            "normalized": normalize,
            "dimensions": vectors.first().map_or(0, Vec::len),
            "embeddings": texts.iter().zip(&ids).zip(&vectors).map(each).collect::<Vec<_>>(),
            "similarity": similarity,
        }));
    }
    if args.similarity {
        let cells = |row: Vec<f64>| row.into_iter().map(|cosine| format!("{cosine:.4}")).collect();
        let rows: Vec<Vec<String>> = similarities(&vectors).into_iter().map(cells).collect();
        return print(&columns(&rows));
    }
    for vector in &vectors {
        let line: Vec<String> = vector.iter().map(f32::to_string).collect();
        print(&format!("{}\n", line.join(" ")))?;
    }
    Ok(())
}

/// How texts become vectors: as the files say, but for a pooling that is given.
fn sentence_config(args: &EmbedArgs, files: &ModelFiles) -> Result<Option<SentenceConfig>> {
    let said = files.sentence_config();
    let Some(pooling) = args.pooling.chosen() else {
        let said = said?;
        if said.as_ref().is_some_and(|said| said.words.is_some()) {
            let why = "scores texts (its modules end in LogitScore): `ridge serve` ranks by the scores, and --pooling makes vectors";
            return Err(refused("--model", files, why));
        }
        return Ok(said);
    };
    // The files may ask for a pooling that Ridge does not support.
    let said = said.unwrap_or_else(|error| {
        if !args.quiet {
            note(&format!("--pooling replaces all modules of the model, which cannot be read: {error}"));
        }
        None
    });
    Ok(Some(SentenceConfig { pooling, words: None, ..said.unwrap_or_default() }))
}

/// The given texts, with the lines of standard input in place of `-`.
fn texts(typed: &[String]) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    for text in typed {
        if text == "-" {
            texts.extend(input::stdin()?.lines().map(str::to_owned));
        } else {
            texts.push(text.clone());
        }
    }
    Ok(texts)
}

/// The tokens of a text, at most `most`.
fn tokens(tokenizer: &Tokenizer, text: &str, most: usize, truncate: bool) -> Result<Vec<u32>> {
    let ids = tokenizer.encode(text, true)?;
    if ids.len() <= most {
        return if ids.is_empty() { Err(refused("TEXT", format!("{text:?}"), "has no tokens")) } else { Ok(ids) };
    }
    if !truncate {
        let start: String = text.chars().take(30).collect();
        let why =
            format!("has {}, but the model's maximum is {most}; --truncate truncates it", count(ids.len(), "token"));
        return Err(refused("TEXT", format!("{start:?}..."), &why));
    }
    Ok(tokenizer.encode_truncated(text, most)?)
}
