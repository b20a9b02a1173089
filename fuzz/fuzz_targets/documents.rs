//! Any bytes as a container of documents: a Parquet table, a WebDataset archive and an MDS shard.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use ridge_train::data::formats::Container;

fuzz_target!(|bytes: &[u8]| {
    let bytes = bytes::Bytes::copy_from_slice(bytes);
    for container in [Container::Parquet, Container::WebDataset, Container::Mds] {
        let _ = container.each(Path::new("file"), &bytes, "text", &mut |text| {
            assert!(!text.is_empty());
            Ok(())
        });
    }
});
