//! Any bytes as a safetensors file. What is accepted must mean the same to the reference implementation.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ridge_files::Checkpoint;
use safetensors::SafeTensors;

fn check(bytes: &[u8]) {
    let Ok(ours) = Checkpoint::from_bytes("x.safetensors", bytes.to_vec()) else {
        return;
    };
    let theirs = SafeTensors::deserialize(bytes).expect("the reference accepts what we accept");
    assert_eq!(ours.len(), theirs.len());
    for tensor in ours.tensors() {
        let their = theirs.tensor(tensor.name).expect("the reference has every tensor");
        assert_eq!((tensor.shape, tensor.data), (their.shape(), their.data()));
    }
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    // The same bytes as a header whose length is right, which a mutation seldom hits, over some data.
    let mut file = (bytes.len() as u64).to_le_bytes().to_vec();
    file.extend(bytes);
    check(&file);
    file.extend([0; 64]);
    check(&file);
});
