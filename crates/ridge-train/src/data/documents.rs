//! Documents of files and folders: text files are one each, JSONL files one a line, tables and archives one a row or sample.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::formats::Container;
use super::source::{Compression, Source};
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

/// Is it the URL of a file?
pub fn is_remote(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.starts_with("https://") || text.starts_with("http://"))
}

/// The files that `path` names: itself, which may be a URL, or of a folder all files of documents and tokens in it and below, by name. A dataset
/// as the Hugging Face Hub has it is such a folder.
///
/// # Errors
/// When it is not there, or a folder has none.
pub fn files_of(path: &Path) -> Result<Vec<PathBuf>> {
    if is_remote(path) {
        return Ok(vec![path.to_owned()]);
    }
    let metadata = std::fs::metadata(path).map_err(|cause| io_error(path, "open the data", &cause))?;
    if !metadata.is_dir() {
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
        } else if ending(&path).0.is_some_and(|e| known.contains(&&*e)) {
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
}
