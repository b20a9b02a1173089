//! Block formats beside the Python package `gguf`; see `fixtures/formats.py`.

use std::path::Path;

use ridge_graph::format;
use safetensors::SafeTensors;

fn fixture() -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/formats.safetensors");
    std::fs::read(path).expect("the fixture is there")
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|c| f32::from_le_bytes(*c)).collect()
}

#[test]
fn blocks_are_read_bit_for_bit() {
    let file = fixture();
    let file = SafeTensors::deserialize(&file).expect("it is a safetensors file");
    for format in format::all() {
        let tensor = |what: &str| file.tensor(&format!("{}.{what}", format.name())).expect("each format is there");
        let should = floats(tensor("values").data());
        let is = format.values(&[tensor("blocks").data()], &[should.len()]);
        assert_eq!(is.len(), should.len(), "{}", format.name());
        for (i, (is, should)) in is.iter().zip(&should).enumerate() {
            let same = is.to_bits() == should.to_bits() || is.is_nan() && should.is_nan();
            assert!(same, "{} element {i}: {is} and not {should}", format.name());
        }
    }
}

#[test]
fn blocks_are_written_bit_for_bit_where_the_reference_leaves_no_choice() {
    let file = fixture();
    let file = SafeTensors::deserialize(&file).expect("it is a safetensors file");
    let values = floats(file.tensor("values").expect("values").data());
    let mut compared = Vec::new();
    for format in format::all() {
        let Ok(should) = file.tensor(&format!("{}.encoded", format.name())) else { continue };
        let is = format.encode(&values, &[10, 256], None);
        let row = should.data().len() / 10;
        for (i, (is, should)) in is[0].chunks(row).zip(should.data().chunks(row)).enumerate() {
            assert_eq!(is, should, "{} row {i}", format.name());
        }
        compared.push(format.name());
    }
    assert_eq!(compared, ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4"]);
}
