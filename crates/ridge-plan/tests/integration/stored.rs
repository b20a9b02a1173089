//! Plans with weights as files store them.

use std::path::Path;
use std::sync::Arc;

use ridge_hw::units::Bytes;
use ridge_models::summary::ModuleSummary;
use ridge_models::{BuildOptions, ModelFiles, NetworkConfig, WeightSource};
use ridge_plan::ledger::{Quantisation, ServingMemory, serving};
use ridge_plan::reading::Reading;

#[test]
fn the_weights_of_every_decoder_are_planned_to_the_byte() {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/families");
    let mut planned = 0;
    for folder in families.read_dir().expect("is there") {
        let folder = folder.expect("is listed").path();
        let Ok(files) = ModelFiles::open(Some(&folder)) else { continue };
        let Ok(NetworkConfig::Decoder(config)) = files.network_config() else { continue };
        let name = folder.display().to_string();
        let checkpoint = files.network_checkpoint(&NetworkConfig::Decoder(config.clone())).expect("opens");
        let source = WeightSource::Checkpoint(Arc::new(checkpoint));
        let mut model = config.build(&BuildOptions::default()).expect("builds");
        model.store(&source, None).expect("fits");
        let stored = ModuleSummary::new(&model).weight_bytes;
        let reading = Reading::from_json(&name, &files.config_text().expect("reads"));
        let reading = reading.unwrap_or_else(|error| panic!("{name}: {error}"));
        let weights = Quantisation::of_source(&config, &source).expect("fits").unwrap_or(Quantisation::Bf16);
        let memory =
            ServingMemory { tp: 1, pp: 1, ep: 1, weights, cache_bytes: 2.0, step_tokens: 64, utilisation: 0.94 };
        let fit = serving(&reading, Bytes(80 << 30), &memory, 16).unwrap_or_else(|error| panic!("{name}: {error}"));
        let bytes = fit.ledger.of("weights").0;
        assert!(bytes.abs_diff(stored) <= 1, "{name}: {bytes} planned, {stored} stored");
        planned += 1;
    }
    assert!(planned > 50, "{planned}");
}
