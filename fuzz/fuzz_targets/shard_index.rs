//! Any text as `model.safetensors.index.json` beside one small file: a checkpoint or an error.
#![no_main]

use std::cell::OnceCell;
use std::path::PathBuf;

use libfuzzer_sys::fuzz_target;
use ridge_files::Checkpoint;

thread_local! {
    static FOLDER: OnceCell<PathBuf> = const { OnceCell::new() };
}

/// A folder of this process with a file of two small tensors, `a` and `b`.
fn folder() -> PathBuf {
    let path = std::env::temp_dir().join(format!("ridge-fuzz-shard-index-{}", std::process::id()));
    std::fs::create_dir_all(&path).expect("the temporary folder can be written");
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend([0; 12]);
    std::fs::write(path.join("x.safetensors"), file).expect("the temporary folder can be written");
    path
}

fuzz_target!(|text: &str| {
    FOLDER.with(|cell| {
        let folder = cell.get_or_init(folder);
        std::fs::write(folder.join("model.safetensors.index.json"), text).expect("the temporary folder can be written");
        if let Ok(checkpoint) = Checkpoint::open(folder) {
            assert!(checkpoint.tensors().all(|tensor| tensor.name == "a" || tensor.name == "b"));
        }
    });
});
