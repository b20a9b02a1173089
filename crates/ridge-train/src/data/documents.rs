//! Documents of files and folders: text files are one each, JSONL files one a line, tables and archives one a row or sample.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::formats::Container;
use super::source::{Compression, Source};
use crate::address::is_remote;
use crate::error::{Result, TrainError, io_error};

/// What a file holds, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// One document.
    Text,
    /// A document a line.
    JsonLines,
    /// A document a row or sample.
    Container(Container),
    /// Tokens.
    Tokens,
}

impl FileKind {
    /// By its name, without the ending of a compression: `.jsonl` and `.ndjson`, `.bin`, `.parquet`, `.tar`, `.mds`, and text
    /// otherwise.
    pub fn of(path: &Path) -> Self {
        match ending(path).0.as_deref() {
            Some("jsonl" | "ndjson") => Self::JsonLines,
            Some("bin") => Self::Tokens,
            Some("parquet") => Self::Container(Container::Parquet),
            Some("tar") => Self::Container(Container::WebDataset),
            Some("mds") => Self::Container(Container::Mds),
            _ => Self::Text,
        }
    }
}

/// The ending of a file's name, in lower case and without that of its compression. Of a URL, what asks for it does not count.
fn ending(path: &Path) -> (Option<String>, Compression) {
    let lower = |path: &Path| path.extension().and_then(OsStr::to_str).map(str::to_ascii_lowercase);
    let whole = path.to_str().filter(|_| is_remote(path)).map(|url| url.split(['?', '#']).next().unwrap_or(url));
    let path = whole.map_or(path, Path::new);
    let compression = match lower(path).as_deref() {
        Some("zst" | "zstd") => Compression::Zstd,
        Some("gz") => Compression::Gzip,
        Some("tgz") => return (Some("tar".to_owned()), Compression::Gzip),
        _ => return (lower(path), Compression::None),
    };
    (lower(Path::new(path.file_stem().unwrap_or_default())), compression)
}

/// The path of a compressed file without its compression.
fn decompressed(path: &Path) -> PathBuf {
    let is_archive = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("tgz"));
    path.with_extension(if is_archive { "tar" } else { "" })
}

/// The files that `path` names: itself, which may be a URL, or of a folder all files of documents and tokens in it and below, by name. A dataset
/// as the Hugging Face Hub has it is such a folder. Of a file that a folder has plain and compressed, the plain one is taken; compressed files of
/// tokens are left out.
///
/// # Errors
/// When it is not there, a folder has none, or it is a file of tokens that is compressed or on a server.
pub fn files_of(path: &Path) -> Result<Vec<PathBuf>> {
    if is_remote(path) {
        if FileKind::of(path) == FileKind::Tokens {
            let remedy = "download the file and give its path";
            return Err(TrainError::path(path, "token files are mapped, and this one is on a server", remedy));
        }
        return Ok(vec![path.to_owned()]);
    }
    let metadata = std::fs::metadata(path).map_err(|cause| io_error(path, "open the data", &cause))?;
    if !metadata.is_dir() {
        if FileKind::of(path) == FileKind::Tokens && ending(path).1 != Compression::None {
            let remedy = "decompress it and give the path of that";
            return Err(TrainError::path(path, "token files are mapped, and this one is compressed", remedy));
        }
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    walk(path, &mut found)?;
    if found.is_empty() {
        return Err(TrainError::path(
            path,
            "the folder has no .txt, .md, .jsonl, .parquet, .tar, .mds or .bin file",
            "check the path",
        ));
    }
    Ok(found)
}

fn walk(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let failed = |cause| io_error(folder, "list the folder", &cause);
    let mut entries = std::fs::read_dir(folder).map_err(failed)?.collect::<Result<Vec<_>, _>>().map_err(failed)?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        let known = ["txt", "md", "jsonl", "ndjson", "parquet", "tar", "mds", "bin"];
        if path.is_dir() {
            walk(&path, found)?;
            continue;
        }
        let (Some(ending), compression) = ending(&path) else { continue };
        let left_out = compression != Compression::None && (ending == "bin" || decompressed(&path).is_file());
        if known.contains(&&*ending) && !left_out {
            found.push(path);
        }
    }
    Ok(())
}

/// The documents of one file, which stays mapped or where it is on a server.
pub struct DocumentFile {
    path: PathBuf,
    source: Source,
    kind: FileKind,
}

impl DocumentFile {
    /// Opens a file of texts. What is at a URL is read from there each time.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), source: Source::open(path, ending(path).1)?, kind: FileKind::of(path) })
    }

    /// Its name in messages.
    pub fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// Bytes of the file, as they are stored.
    pub fn bytes(&self) -> usize {
        self.source.size()
    }

    /// Gives `each` every document that is not empty; `field` holds the text of a JSONL line, row or sample.
    ///
    /// # Errors
    /// Names the line or row that is not UTF-8, not JSON, or has no text in `field`; and those of `each`.
    pub fn each(&self, field: &str, mut each: impl FnMut(&str) -> Result<()>) -> Result<()> {
        match self.kind {
            FileKind::Container(container) => container.each(&self.path, &self.source, field, &mut each),
            FileKind::JsonLines => self.each_line(field, &mut each),
            FileKind::Text | FileKind::Tokens => {
                let bytes = self.source.whole().map_err(|cause| io_error(&self.path, "read the text", &cause))?;
                match utf8(&self.path, &bytes, "it")? {
                    "" => Ok(()),
                    text => each(text),
                }
            }
        }
    }

    fn each_line(&self, field: &str, each: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        let failed = |cause| io_error(&self.path, "read the text", &cause);
        let mut reader = BufReader::with_capacity(1 << 18, self.source.reader().map_err(failed)?);
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            if reader.read_until(b'\n', &mut line).map_err(failed)? == 0 {
                break;
            }
            if line.trim_ascii().is_empty() {
                continue;
            }
            utf8(&self.path, &line, &format!("line {number}"))?;
            let wrong = |problem: String| {
                let remedy = "fix the line, or name the field that holds the text with data.text_field";
                TrainError::path(&self.path, format!("line {number}: {problem}"), remedy)
            };
            let value: Value =
                serde_json::from_slice(&line).map_err(|error| wrong(format!("it is not JSON: {error}")))?;
            match value.get(field) {
                Some(Value::String(text)) if text.is_empty() => {}
                Some(Value::String(text)) => each(text)?,
                Some(_) => return Err(wrong(format!("the field {field} is not a text"))),
                None => return Err(wrong(format!("there is no field {field}"))),
            }
        }
        Ok(())
    }
}

/// The text of `bytes`; `what` is named in errors.
fn utf8<'a>(path: &Path, bytes: &'a [u8], what: &str) -> Result<&'a str> {
    std::str::from_utf8(bytes).map_err(|error| {
        let problem = format!("{what} is not UTF-8 at byte {}", error.valid_up_to());
        TrainError::path(path, problem, "save it as UTF-8")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_give_their_documents_by_name_and_lines_that_are_wrong_are_named() {
        let dir = tempfile::tempdir().expect("is made");
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("writes");
        write("b.txt", "second");
        std::fs::create_dir(dir.path().join("a")).expect("is made");
        write("a/x.jsonl", "{\"text\": \"first\"}\n\n{\"text\": \"\"}\n{\"text\": \"more\"}\n");
        write("ignored.png", "x");
        let mut documents = Vec::new();
        for file in files_of(dir.path()).expect("has some") {
            let file = DocumentFile::open(&file).expect("opens");
            file.each("text", |text| {
                documents.push(text.to_owned());
                Ok(())
            })
            .expect("reads");
        }
        assert_eq!(documents, ["first", "more", "second"]);
        write("c.jsonl", "{\"text\": \"x\"}\n{\"body\": 1}\n");
        let error = |field| {
            let file = DocumentFile::open(&dir.path().join("c.jsonl")).expect("opens");
            file.each(field, |_| Ok(())).expect_err("is wrong").to_string()
        };
        assert!(error("text").contains("c.jsonl: line 2: there is no field text; fix the line"), "{}", error("text"));
        assert!(error("body").contains("line 1: there is no field body"));
        let empty = dir.path().join("empty");
        std::fs::create_dir(&empty).expect("is made");
        assert!(files_of(&empty).expect_err("is empty").to_string().contains("has no .txt"));
    }
    fn texts(path: &Path) -> Result<Vec<String>> {
        let mut texts = Vec::new();
        DocumentFile::open(path)?.each("text", |text| {
            texts.push(text.to_owned());
            Ok(())
        })?;
        Ok(texts)
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        use std::io::Write as _;
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(bytes).expect("writes");
        encoder.finish().expect("compresses")
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        zstd::encode_all(bytes, 3).expect("compresses")
    }

    fn lines(count: usize) -> (Vec<String>, Vec<u8>) {
        let texts: Vec<String> = (0..count).map(|i| format!("document {i}, {}", "\u{e9}".repeat(i % 50))).collect();
        let line = |text: &String| format!("{{\"text\": \"{text}\"}}\n");
        (texts.clone(), texts.iter().map(line).collect::<String>().into_bytes())
    }

    fn fixture(name: &str) -> Vec<u8> {
        std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/documents").join(name))
            .expect("is there")
    }

    #[test]
    fn compressed_files_give_the_texts_of_plain_ones() {
        let dir = tempfile::tempdir().expect("is made");
        let write = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).expect("writes");
            path
        };
        let (wanted, plain) = lines(2000);
        // Frames and members one behind the other are one file.
        let half = plain.iter().position(|byte| *byte == b'\n').expect("has lines") + 1;
        let two = |compress: fn(&[u8]) -> Vec<u8>| [compress(&plain[..half]), compress(&plain[half..])].concat();
        for (name, bytes) in [
            ("a.jsonl", plain.clone()),
            ("a.jsonl.zst", zstd(&plain)),
            ("b.jsonl.zst", two(zstd)),
            ("a.jsonl.gz", gzip(&plain)),
            ("b.NDJSON.GZ", two(gzip)),
        ] {
            assert_eq!(texts(&write(name, &bytes)).unwrap_or_else(|e| panic!("{name}: {e}")), wanted, "{name}");
        }
        let samples = texts(&write("plain.tar", &fixture("samples.tar"))).expect("reads");
        assert_eq!(samples.len(), 5);
        for (name, bytes) in [
            ("a.tar.zst", zstd(&fixture("samples.tar"))),
            ("a.tgz", gzip(&fixture("samples.tar"))),
            ("shard.00000.mds.zstd", zstd(&fixture("shard.mds"))),
            ("a.parquet.gz", gzip(&fixture("none.parquet"))),
            ("a.parquet.zst", zstd(&fixture("snappy.parquet"))),
        ] {
            assert_eq!(texts(&write(name, &bytes)).unwrap_or_else(|e| panic!("{name}: {e}")), samples, "{name}");
        }
        assert_eq!(texts(&write("a.txt.zst", &zstd(b"one text"))).expect("reads"), ["one text"]);
        let whole = zstd(&plain);
        for bytes in [&whole[..whole.len() / 2], &plain[..]] {
            let refused = texts(&write("broken.jsonl.zst", bytes)).expect_err("is no whole frame").to_string();
            assert!(refused.contains("broken.jsonl.zst") && refused.contains("read the text"), "{refused}");
        }
    }

    #[test]
    fn folders_give_a_file_once_and_compressed_tokens_are_refused() {
        let dir = tempfile::tempdir().expect("is made");
        for name in
            ["a.jsonl", "a.jsonl.zst", "b.jsonl.gz", "c.tar", "c.tgz", "c.tar.gz", "d.tgz", "e.bin", "e.bin.zst"]
        {
            std::fs::write(dir.path().join(name), b"x").expect("writes");
        }
        for name in ["shard.00000.mds", "shard.00000.mds.zstd", "x.bin.gz"] {
            std::fs::write(dir.path().join(name), b"x").expect("writes");
        }
        let found = files_of(dir.path()).expect("has some");
        let names: Vec<_> = found.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        assert_eq!(names, ["a.jsonl", "b.jsonl.gz", "c.tar", "d.tgz", "e.bin", "shard.00000.mds"]);
        // What is named is taken, whatever is beside it.
        assert_eq!(files_of(&dir.path().join("a.jsonl.zst")).expect("is one").len(), 1);
        for (path, wanted) in [
            (dir.path().join("x.bin.gz"), "this one is compressed; decompress it"),
            (dir.path().join("e.bin.zst"), "this one is compressed; decompress it"),
            ("https://localhost/x.bin?download=true".into(), "this one is on a server; download the file"),
            ("https://localhost/x.bin.zst".into(), "this one is on a server; download the file"),
        ] {
            let refused = files_of(&path).expect_err("is refused").to_string();
            assert!(refused.contains(path.to_str().expect("is text")) && refused.contains(wanted), "{refused}");
        }
    }

    /// A table of three columns of 200 texts in each of two groups, with pages of a few, and the bytes of the texts of one column.
    fn large_table() -> (Vec<u8>, usize) {
        use parquet::data_type::{ByteArray, ByteArrayType};
        use parquet::file::{properties::WriterProperties, writer::SerializedFileWriter};
        let columns = ["before", "text", "behind"].map(|name| format!("required binary {name} (UTF8);")).concat();
        let schema = parquet::schema::parser::parse_message_type(&format!("message table {{ {columns} }}"));
        let properties = WriterProperties::builder()
            .set_dictionary_enabled(false)
            .set_data_page_size_limit(40_000)
            .set_write_batch_size(1)
            .build();
        let texts: Vec<ByteArray> = (0..200).map(|i| format!("{i:08000}").into_bytes().into()).collect();
        let mut table =
            SerializedFileWriter::new(Vec::new(), schema.expect("is one").into(), properties.into()).expect("begins");
        for _ in 0..2 {
            let mut group = table.next_row_group().expect("begins");
            while let Some(mut column) = group.next_column().expect("begins") {
                column.typed::<ByteArrayType>().write_batch(&texts, None, None).expect("writes");
                column.close().expect("ends");
            }
            group.close().expect("ends");
        }
        (table.into_inner().expect("ends"), 2 * 200 * 8000)
    }

    #[test]
    fn of_a_table_on_a_server_one_column_is_requested_once() {
        use ridge_testing::{HubFaults, HubServer};
        let (table, of_texts) = large_table();
        let server = HubServer::start("org/data", [("t.parquet".to_owned(), table)], HubFaults::default());
        let found =
            texts(Path::new(&format!("{}/storage/t.parquet", server.endpoint()))).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((found.len(), &*found[399]), (400, &*format!("{:08000}", 199)));
        let requested: Vec<usize> = server
            .seen()
            .into_iter()
            .filter_map(|request| {
                let range = request.range?;
                let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
                Some(last.parse::<usize>().ok()? + 1 - first.parse::<usize>().ok()?)
            })
            .collect();
        let all: usize = requested.iter().sum();
        println!("{all} bytes of {of_texts} in {requested:?}");
        assert!(all > of_texts && all < of_texts + of_texts / 50, "{all} bytes of {of_texts}: {requested:?}");
        assert!(requested.len() < 12, "{requested:?}");
    }

    #[test]
    fn files_on_servers_are_read_in_parts_and_from_where_a_connection_broke() {
        use ridge_testing::{HubFaults, HubServer};
        let (wanted, plain) = lines(2000);
        let compressed = zstd(&plain);
        let table = fixture("snappy.parquet");
        let files = [
            ("a.jsonl".to_owned(), plain.clone()),
            ("a.jsonl.zst".to_owned(), compressed.clone()),
            ("t.parquet".to_owned(), table.clone()),
            ("s.tar".to_owned(), fixture("samples.tar")),
            ("s.mds".to_owned(), fixture("shard.mds")),
        ];
        let server = HubServer::start("org/data", files, HubFaults::default());
        let url = |name: &str| {
            PathBuf::from(format!("{}/org/data/resolve/{}/{name}?download=true", server.endpoint(), server.commit()))
        };
        let samples = ["The first document.", "A second,\nof two lines."];
        for faults in
            [HubFaults::default(), HubFaults { cut_after: Some(20_000), unavailable: 1, ..HubFaults::default() }]
        {
            server.set_faults(faults);
            assert_eq!(texts(&url("a.jsonl")).unwrap_or_else(|e| panic!("{e}")), wanted);
            assert_eq!(texts(&url("a.jsonl.zst")).unwrap_or_else(|e| panic!("{e}")), wanted);
            for name in ["t.parquet", "s.tar", "s.mds"] {
                assert_eq!(texts(&url(name)).unwrap_or_else(|e| panic!("{name}: {e}"))[..2], samples, "{name}");
            }
        }
        let ranges: Vec<String> = server.seen().into_iter().filter_map(|request| request.range).collect();
        assert!(ranges.iter().any(|range| range == "bytes=20000-"), "continued: {ranges:?}");
        let missing = PathBuf::from(format!("{}/storage/none.jsonl", server.endpoint()));
        let error = texts(&missing).expect_err("is not there").to_string();
        assert!(
            error.contains("none.jsonl") && error.contains("404") && error.contains("check the address"),
            "{error}"
        );
        server.set_faults(HubFaults { without_ranges: true, ..HubFaults::default() });
        assert_eq!(texts(&url("a.jsonl")).unwrap_or_else(|e| panic!("{e}")), wanted);
        let error = texts(&url("t.parquet")).expect_err("needs ranges").to_string();
        assert!(error.contains("does not send ranges"), "{error}");
    }
}
