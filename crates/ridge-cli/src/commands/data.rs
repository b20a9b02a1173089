//! `ridge data`: token shards of texts.

use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use ridge_hw::units::Bytes;
use ridge_train::data::Vocabulary;
use ridge_train::data::blocklist::Blocklist;
use ridge_train::data::duplicates::Duplicates;
use ridge_train::data::filters::{Filters, Lang, language};
use ridge_train::data::prepare::{PrepareReport, PrepareSettings, prepare};

use crate::args::{MAX_THREADS, whole};
use crate::error::{Result, refused};
use crate::output::{Progress, grouped, note};

/// Make token shards of texts
///
/// Reads text, JSONL, Parquet, WebDataset (.tar) and MDS files, also compressed (.zst, .gz) or at URLs, and folders of these, leaves out what the filters refuse and
/// what is there already, and writes the tokens of the rest, each document followed by the token that ends texts, to files
/// that `ridge train` maps.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ridge data corpus/ -o shards --tokenizer DIR          with a model's tokenizer
  ridge data a.jsonl -o shards --duplicates near        without near duplicates
  ridge data corpus/ -o shards --gopher                 with Gopher's filters
  ridge data corpus/ -o shards --held-out eval.jsonl    without evaluation data

Exit codes: 0 done, 1 failed, 2 usage error.")]
pub(crate) struct DataArgs {
    /// Text, JSONL, Parquet, WebDataset (.tar) or MDS files, URLs of such, or folders of these
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,

    /// Output: a new folder
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,

    /// tokenizer.json, or the folder that holds one [default: bytes]
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,

    /// Field of a JSONL line, or column of a table, that holds the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    text_field: String,

    /// Which documents to leave out as duplicates
    #[arg(long, value_enum, default_value_t = DuplicatesArg::Exact)]
    duplicates: DuplicatesArg,

    /// Shortest document, in characters
    #[arg(long, value_name = "N", default_value_t = 1)]
    min_characters: usize,

    /// Longest document, in characters
    #[arg(long, value_name = "N")]
    max_characters: Option<usize>,

    /// Apply the quality rules of Gopher: words, symbols, bullets, frequent English words
    #[arg(long)]
    gopher: bool,

    /// Apply the rules of Gopher against repetition: of lines, paragraphs and sequences of words
    #[arg(long)]
    repetition: bool,

    /// Apply the rules of C4: keep lines that end a sentence, refuse texts with braces or placeholders
    #[arg(long)]
    c4: bool,

    /// Words and phrases, one a line: documents that contain one are left out; may be given more than once
    #[arg(long, value_name = "FILE")]
    blocklist: Vec<PathBuf>,

    /// Languages to keep, by code (en, deu), separated by commas [default: all]
    #[arg(long, value_name = "CODES", value_delimiter = ',', value_parser = known_language)]
    language: Vec<Lang>,

    /// Texts of evaluations, in the same kinds of files: documents that share a sequence of words with one are left out
    #[arg(long, value_name = "PATH")]
    held_out: Vec<PathBuf>,

    /// Words of such a sequence, 8 or more; a shorter text counts as a whole
    #[arg(long, value_name = "N", default_value_t = 13)]
    overlap_words: usize,

    /// Tokens of a shard
    #[arg(long, value_name = "N", default_value_t = 100_000_000)]
    shard_tokens: u64,

    /// Number of threads [default: the cores that this process may use]
    #[arg(short, long, value_name = "N", value_parser = whole::<usize, 1, MAX_THREADS>, allow_negative_numbers = true)]
    threads: Option<usize>,

    /// Print no notes
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DuplicatesArg {
    /// None
    Keep,
    /// Documents with the same text
    Exact,
    /// These, and documents that share most of their five-word sequences (MinHash)
    Near,
}

fn known_language(code: &str) -> Result<Lang, String> {
    language(code)
        .ok_or_else(|| "is not known; give two letters, such as en, or those of ISO 639-3, such as eng".to_owned())
}

pub(crate) fn run(args: &DataArgs) -> Result<()> {
    if args.shard_tokens == 0 {
        return Err(refused("--shard-tokens", 0, "must be 1 or more"));
    }
    if args.overlap_words < 8 {
        return Err(refused("--overlap-words", args.overlap_words, "must be 8 or more"));
    }
    let vocabulary = match &args.tokenizer {
        Some(path) => Vocabulary::open(path)?,
        None => Vocabulary::bytes()?,
    };
    let settings = PrepareSettings {
        inputs: args.inputs.clone(),
        output: args.output.clone(),
        text_field: args.text_field.clone(),
        filters: Filters {
            min_characters: args.min_characters,
            max_characters: args.max_characters.unwrap_or(usize::MAX),
            gopher: args.gopher,
            repetition: args.repetition,
            c4: args.c4,
            blocklist: if args.blocklist.is_empty() { None } else { Some(Blocklist::read(&args.blocklist)?) },
            languages: args.language.clone(),
        },
        held_out: args.held_out.clone(),
        overlap_words: args.overlap_words,
        duplicates: match args.duplicates {
            DuplicatesArg::Keep => Duplicates::Keep,
            DuplicatesArg::Exact => Duplicates::Exact,
            DuplicatesArg::Near => Duplicates::Near,
        },
        shard_tokens: args.shard_tokens,
        threads: args.threads.unwrap_or_else(|| ridge_hw::cpu::Cpu::detect().usable_threads()),
    };
    let began = Instant::now();
    let mut bar: Option<Progress> = None;
    let report = prepare(&settings, &vocabulary, |done, total| {
        bar.get_or_insert_with(|| Progress::new("making shards", total)).at(done);
    })?;
    drop(bar);
    if !args.quiet {
        show(args, &report, began.elapsed().as_secs_f64());
    }
    Ok(())
}

fn show(args: &DataArgs, report: &PrepareReport, seconds: f64) {
    let PrepareReport { read, left_out, kept, bytes, tokens, shards } = report;
    for (why, count) in left_out {
        note(&format!("left out {}: {why}", grouped(*count)));
    }
    let rate = *bytes as f64 / 1e6 / seconds.max(1e-9);
    note(&format!(
        "{} of {} documents, {}, {} tokens, {shards} shards in {}; {rate:.1} MB/s",
        grouped(*kept),
        grouped(*read),
        Bytes(*bytes),
        grouped(*tokens),
        args.output.display()
    ));
}
