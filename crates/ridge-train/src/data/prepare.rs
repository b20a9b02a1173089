//! From texts to token shards: filtered, without duplicates, tokenised by all threads, the same whatever their number.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use super::documents::{DocumentFile, FileKind, files_of};
use super::duplicates::{Duplicates, Seen, Signature};
use super::filters::Filters;
use super::held_out::HeldOut;
use super::pieces::{PieceEncoder, has_pieces};
use super::tokens::{SHARD_INDEX, ShardIndex, encoded};
use super::vocabulary::Vocabulary;
use crate::error::{Result, TrainError, io_error};

/// How shards are made.
#[derive(Clone, Debug)]
pub struct PrepareSettings {
    /// Files of documents, or folders of these.
    pub inputs: Vec<PathBuf>,
    /// The new folder of shards.
    pub output: PathBuf,
    /// The field of a JSONL line, or column of a table, that holds the text.
    pub text_field: String,
    /// Which documents are left out.
    pub filters: Filters,
    /// Texts that models are evaluated on: documents that share a sequence of words with them are left out.
    pub held_out: Vec<PathBuf>,
    /// Words of such a sequence.
    pub overlap_words: usize,
    /// Which count as duplicates.
    pub duplicates: Duplicates,
    /// Tokens of a shard.
    pub shard_tokens: u64,
    /// Threads.
    pub threads: usize,
}

/// What was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrepareReport {
    /// Documents that were read.
    pub read: u64,
    /// Those that were left out, by why.
    pub left_out: BTreeMap<&'static str, u64>,
    /// Documents that were kept.
    pub kept: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their tokens, with one behind each document.
    pub tokens: u64,
    /// Files.
    pub shards: usize,
}

/// Bytes of text that are worked on at a time.
const BATCH: usize = 8 << 20;

/// Makes the shards. `progress` learns bytes read and all bytes. The output is removed again if that fails.
///
/// # Errors
/// When a file cannot be read, the output is there already or cannot be written, or a text has characters without tokens.
pub fn prepare(
    settings: &PrepareSettings,
    vocabulary: &Vocabulary,
    progress: impl FnMut(u64, u64),
) -> Result<PrepareReport> {
    let PrepareSettings { inputs, output, .. } = settings;
    if output.exists() {
        return Err(TrainError::path(output, "it is there already", "give another folder, or remove it"));
    }
    let held_out = HeldOut::read(&settings.held_out, &settings.text_field, settings.overlap_words)?;
    let mut files = Vec::new();
    for input in inputs {
        for file in files_of(input)? {
            if FileKind::of(&file) == FileKind::Tokens {
                return Err(TrainError::path(&file, "it holds tokens, and texts are wanted", "leave it out"));
            }
            files.push(DocumentFile::open(&file)?);
        }
    }
    std::fs::create_dir_all(output).map_err(|cause| io_error(output, "make the folder", &cause))?;
    fill(settings, vocabulary, &files, held_out, progress).inspect_err(|_| {
        // The error of the shards says more than one of the removal.
        let _ = std::fs::remove_dir_all(output);
    })
}

/// Writes the shards of `files` into the output, which is there.
fn fill(
    settings: &PrepareSettings,
    vocabulary: &Vocabulary,
    files: &[DocumentFile],
    held_out: HeldOut,
    mut progress: impl FnMut(u64, u64),
) -> Result<PrepareReport> {
    let output = &settings.output;
    let total = files.iter().map(|file| file.bytes() as u64).sum();
    let mut work = Work {
        settings,
        vocabulary,
        has_pieces: has_pieces(vocabulary.json()),
        held_out,
        seen: Seen::default(),
        writer: ShardWriter::new(output, settings.shard_tokens, vocabulary),
        report: PrepareReport::default(),
        documents: Vec::new(),
        bytes: 0,
    };
    let mut done = 0;
    for file in files {
        file.each(&settings.text_field, |text| {
            work.add(text)?;
            // What is compressed gives more bytes than it has.
            progress((done + work.bytes as u64).min(total), total);
            Ok(())
        })?;
        work.flush()?;
        done += file.bytes() as u64;
        progress(done, total);
    }
    let Work { writer, mut report, .. } = work;
    let index = writer.finish()?;
    report.shards = index.shards.len();
    std::fs::write(output.join("tokenizer.json"), vocabulary.json())
        .map_err(|cause| io_error(output, "write the vocabulary", &cause))?;
    if report.kept == 0 {
        let remedy = "check the paths, or loosen the filters";
        return Err(TrainError::path(output, "no document is left to make shards of", remedy));
    }
    Ok(report)
}

struct Work<'a> {
    settings: &'a PrepareSettings,
    vocabulary: &'a Vocabulary,
    has_pieces: bool,
    held_out: HeldOut,
    seen: Seen,
    writer: ShardWriter,
    report: PrepareReport,
    documents: Vec<String>,
    bytes: usize,
}

impl Work<'_> {
    fn add(&mut self, text: &str) -> Result<()> {
        self.documents.push(text.to_owned());
        self.bytes += text.len();
        if self.bytes >= BATCH { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        self.bytes = 0;
        let documents = std::mem::take(&mut self.documents);
        let PrepareSettings { filters, duplicates, threads, .. } = self.settings;
        let held_out = &self.held_out;
        let judged = in_parallel(&documents, *threads, |part| {
            let judge = |text: &String| {
                let kept = filters.kept(text)?;
                if held_out.overlaps(&kept) {
                    return Err("overlap with held-out texts");
                }
                let signature = Signature::of(&kept, *duplicates);
                // A text that is kept as it is need not be copied.
                Ok((matches!(kept, Cow::Owned(_)).then(|| kept.into_owned()), signature))
            };
            Ok(part.iter().map(judge).collect())
        })?;
        let mut kept = Vec::new();
        for (text, judged) in documents.into_iter().zip(judged) {
            self.report.read += 1;
            let verdict = judged.and_then(|(cut, signature)| match self.seen.insert(&signature, *duplicates) {
                true => Ok(cut.unwrap_or(text)),
                false => Err("duplicate"),
            });
            match verdict {
                Ok(text) => kept.push(text),
                Err(why) => *self.report.left_out.entry(why).or_default() += 1,
            }
        }
        let (vocabulary, pieces) = (self.vocabulary, self.has_pieces);
        let tokens = in_parallel(&kept, *threads, |part| {
            let mut encoder = PieceEncoder::new(vocabulary.tokenizer());
            let encode = |text: &String| {
                let mut tokens = Vec::with_capacity(text.len() / 3);
                match pieces {
                    true => encoder.encode(text, &mut tokens)?,
                    false => vocabulary.encode("a document", text, &mut tokens)?,
                }
                tokens.extend(vocabulary.end_of_text());
                Ok(tokens)
            };
            part.iter().map(encode).collect()
        })?;
        for (text, tokens) in kept.iter().zip(&tokens) {
            self.report.kept += 1;
            self.report.bytes += text.len() as u64;
            self.report.tokens += tokens.len() as u64;
            self.writer.write(tokens)?;
        }
        Ok(())
    }
}

/// `work` of parts of `items` of about the same number of bytes, by so many threads, in the order of the items.
fn in_parallel<T: Send>(
    items: &[String],
    threads: usize,
    work: impl Fn(&[String]) -> Result<Vec<T>> + Sync,
) -> Result<Vec<T>> {
    let total: usize = items.iter().map(String::len).sum();
    let each = total / threads.max(1) + 1;
    let mut parts = Vec::new();
    let mut rest = items;
    while !rest.is_empty() {
        let mut bytes = 0;
        let count = rest.iter().position(|text| {
            bytes += text.len();
            bytes >= each
        });
        let (part, behind) = rest.split_at(count.map_or(rest.len(), |at| at + 1));
        parts.push(part);
        rest = behind;
    }
    if parts.len() <= 1 {
        return work(items);
    }
    let results: Vec<Result<Vec<T>>> = std::thread::scope(|scope| {
        let threads: Vec<_> = parts.iter().map(|part| scope.spawn(|| work(part))).collect();
        let joined = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        joined.map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let mut all = Vec::with_capacity(items.len());
    for result in results {
        all.extend(result?);
    }
    Ok(all)
}

struct ShardWriter {
    folder: PathBuf,
    index: ShardIndex,
    most: u64,
    file: Option<BufWriter<File>>,
}

impl ShardWriter {
    fn new(folder: &Path, most: u64, vocabulary: &Vocabulary) -> Self {
        let index = ShardIndex::new(vocabulary.size(), vocabulary.end_of_text());
        Self { folder: folder.to_owned(), index, most, file: None }
    }

    /// A document, which is never divided.
    fn write(&mut self, tokens: &[u32]) -> Result<()> {
        if self.index.shards.last().is_none_or(|(_, written)| *written >= self.most) {
            self.close()?;
            let name = format!("tokens-{:05}.bin", self.index.shards.len());
            let path = self.folder.join(&name);
            let file = File::create(&path).map_err(|cause| io_error(&path, "make the shard", &cause))?;
            self.file = Some(BufWriter::new(file));
            self.index.shards.push((name, 0));
        }
        let bytes = encoded(tokens, self.index.token_bytes);
        if let (Some(file), Some((name, written))) = (&mut self.file, self.index.shards.last_mut()) {
            let path = self.folder.join(&*name);
            file.write_all(&bytes).map_err(|cause| io_error(&path, "write the shard", &cause))?;
            *written += tokens.len() as u64;
        }
        self.index.documents += 1;
        Ok(())
    }

    fn close(&mut self) -> Result<()> {
        let Some(mut file) = self.file.take() else { return Ok(()) };
        let closed = file.flush().and_then(|()| file.get_ref().sync_all());
        closed.map_err(|cause| io_error(&self.folder, "write the shard", &cause))
    }

    /// The index is written last: without it a folder is no folder of shards.
    fn finish(mut self) -> Result<ShardIndex> {
        self.close()?;
        let text = serde_json::to_string_pretty(&self.index).unwrap_or_default();
        let path = self.folder.join(SHARD_INDEX);
        std::fs::write(&path, text).map_err(|cause| io_error(&path, "write the index", &cause))?;
        Ok(self.index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tokens::Tokens;

    fn settings(dir: &Path, output: &str, threads: usize) -> PrepareSettings {
        PrepareSettings {
            inputs: vec![dir.join("in")],
            output: dir.join(output),
            text_field: "text".into(),
            filters: Filters { min_characters: 3, ..Filters::default() },
            held_out: Vec::new(),
            overlap_words: 13,
            duplicates: Duplicates::Exact,
            shard_tokens: 500,
            threads,
        }
    }

    #[test]
    fn shards_are_the_same_with_any_number_of_threads_and_hold_the_documents() {
        let dir = tempfile::tempdir().expect("is made");
        std::fs::create_dir(dir.path().join("in")).expect("is made");
        let line = |i: usize| format!("{{\"text\": \"document {} of \\u00e9 {}\"}}\n", i % 90, "x".repeat(i % 90));
        std::fs::write(dir.path().join("in/a.jsonl"), (0..100).map(line).collect::<String>()).expect("writes");
        std::fs::write(dir.path().join("in/b.txt"), "ab").expect("writes");
        let vocabulary = Vocabulary::bytes().expect("builds");
        let make = |output: &str, threads| {
            prepare(&settings(dir.path(), output, threads), &vocabulary, |_, _| ()).unwrap_or_else(|e| panic!("{e}"))
        };
        let report = make("one", 1);
        assert_eq!(report, make("four", 4));
        assert_eq!((report.read, report.kept), (101, 90));
        assert_eq!(report.left_out, BTreeMap::from([("duplicate", 10), ("too short", 1)]));
        let read = |output: &str| {
            let folder = dir.path().join(output);
            let index = ShardIndex::read(&folder).expect("reads").expect("is there");
            let tokens = Tokens::of_folder(&folder, &index).expect("opens");
            let mut ids = vec![0; tokens.len()];
            tokens.read(0, &mut ids);
            (index, ids)
        };
        let (index, ids) = read("one");
        assert_eq!(read("four"), (index.clone(), ids.clone()));
        assert!(index.shards.len() > 3 && index.shards.iter().all(|(_, tokens)| *tokens < 700), "{index:?}");
        assert_eq!((index.documents, ids.len() as u64), (90, report.tokens));
        let first = vocabulary.tokenizer().decode(&ids[..ids.iter().position(|id| *id == 256).expect("ends")], true);
        assert_eq!(first.expect("decodes"), "document 0 of \u{e9} ");
        let error = prepare(&settings(dir.path(), "one", 1), &vocabulary, |_, _| ()).expect_err("is there").to_string();
        assert!(error.contains("it is there already; give another folder"), "{error}");
        // What could not be made is not left behind, where it would be in the way.
        let mut nothing = settings(dir.path(), "nothing", 1);
        nothing.text_field = "no such field".to_owned();
        prepare(&nothing, &vocabulary, |_, _| ()).expect_err("has no text");
        assert!(!nothing.output.exists());
    }
}
