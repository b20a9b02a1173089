//! Any bytes as a container of documents: a Parquet table, a WebDataset archive and an MDS shard.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use ridge_train::data::formats::Container;
use ridge_train::data::source::Source;

fuzz_target!(|bytes: &[u8]| {
    let source = Source::of(bytes::Bytes::copy_from_slice(bytes));
    for container in [Container::Parquet, Container::WebDataset, Container::Mds] {
        let _ = container.each(Path::new("file"), &source, "text", &mut |text| {
            assert!(!text.is_empty());
            Ok(())
        });
    }
});
