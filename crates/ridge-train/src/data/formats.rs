//! Containers of documents, each a parser of bytes that were not written by Ridge: Parquet tables, WebDataset archives and
//! MDS shards.

mod mds;
mod parquet;
mod reading;
mod webdataset;

use std::path::Path;

use self::reading::Reading;
use super::source::Source;
use crate::error::Result;

/// A kind of container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// A Parquet table: the field is a column of strings.
    Parquet,
    /// A WebDataset archive (tar): a sample's `.txt` member, or the field of its `.json` member.
    WebDataset,
    /// A shard of MosaicML streaming: the field is a column of encoding `str`.
    Mds,
}

impl Container {
    /// Gives `each` the texts in `source` that are not empty; `path` is named in errors.
    ///
    /// # Errors
    /// When the bytes are no such container, it lacks the field, or a text is not UTF-8; and those of `each`.
    pub fn each(
        self,
        path: &Path,
        source: &Source,
        field: &str,
        each: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        let container = Reading { path, field, each };
        match self {
            Self::Parquet => parquet::read(source, container),
            Self::WebDataset => webdataset::read(source, container),
            Self::Mds => mds::read(source, container),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use bytes::Bytes;

    use super::*;

    const LONG: &str =
        "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx";

    fn fixture(name: &str) -> (PathBuf, Bytes) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/documents").join(name);
        let bytes = std::fs::read(&path).expect("is there");
        (path, bytes.into())
    }

    fn read(container: Container, bytes: &Bytes, field: &str) -> Result<Vec<String>> {
        let mut texts = Vec::new();
        container.each(Path::new("file"), &Source::of(bytes.clone()), field, &mut |text| {
            texts.push(text.to_owned());
            Ok(())
        })?;
        Ok(texts)
    }

    const FILES: [(Container, &str); 8] = [
        (Container::Parquet, "none.parquet"),
        (Container::Parquet, "snappy.parquet"),
        (Container::Parquet, "gzip.parquet"),
        (Container::Parquet, "lz4.parquet"),
        (Container::Parquet, "zstd.parquet"),
        (Container::Parquet, "required.parquet"),
        (Container::WebDataset, "samples.tar"),
        (Container::Mds, "shard.mds"),
    ];

    #[test]
    fn files_of_other_software_give_their_texts() {
        let long = LONG.repeat(3);
        let texts = ["The first document.", "A second,\nof two lines.", "Größe, 東京 and 🙂", &long, "the last"];
        for (container, name) in FILES {
            let (path, bytes) = fixture(name);
            assert_eq!(read(container, &bytes, "text").unwrap_or_else(|e| panic!("{name}: {e}")), texts, "{name}");
            assert_eq!(
                crate::data::documents::FileKind::of(&path),
                crate::data::documents::FileKind::Container(container)
            );
        }
        let nested = fixture("nested.parquet").1;
        assert_eq!(read(Container::Parquet, &nested, "page.body").expect("reads"), ["of a structure"]);
    }

    #[test]
    fn what_is_not_there_is_named() {
        let refusal = |container, name: &str, field: &str| {
            read(container, &fixture(name).1, field).expect_err("is refused").to_string()
        };
        for (container, name, field, wanted) in [
            (Container::Parquet, "none.parquet", "body", "there is no column body; it has id, text, score"),
            (Container::Parquet, "none.parquet", "id", "the column id does not hold one string for each row"),
            (Container::Parquet, "nested.parquet", "text.list.element", "does not hold one string for each row"),
            (Container::Parquet, "samples.tar", "text", "it cannot be read as Parquet"),
            (Container::WebDataset, "samples.tar", "body", "001.json: there is no field body"),
            (Container::WebDataset, "shard.mds", "text", "it cannot be read as tar"),
            (Container::Mds, "shard.mds", "body", "there is no column body; it has id, meta, text"),
            (Container::Mds, "shard.mds", "meta", "the column meta has the encoding json, and str is wanted"),
            (Container::Mds, "samples.tar", "text", "it is not an MDS shard"),
        ] {
            let refused = refusal(container, name, field);
            assert!(refused.contains(wanted), "{name}: {refused}");
        }
    }

    #[test]
    fn damaged_files_are_refused_or_read_without_a_panic() {
        for (container, name) in FILES {
            let whole = fixture(name).1;
            let step = whole.len() / 400 + 1;
            for length in (0..whole.len()).step_by(step) {
                let _ = read(container, &whole.slice(..length), "text");
                for bits in [0x01, 0x80, 0xff] {
                    let mut changed = whole.to_vec();
                    changed[length] ^= bits;
                    let _ = read(container, &changed.into(), "text");
                }
            }
        }
        let mds = fixture("shard.mds").1;
        assert!(read(Container::Mds, &mds.slice(..mds.len() - 1), "text").is_err());
        let tar = fixture("samples.tar").1;
        assert!(read(Container::WebDataset, &tar.slice(..600), "text").is_err());
    }
}
