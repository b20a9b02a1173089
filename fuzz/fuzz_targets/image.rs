//! Any bytes as an image file, and as `preprocessor_config.json`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ridge_image::Image;
use ridge_models::config::image_preprocessing;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(image) = Image::decode("image", bytes) {
        assert_eq!(image.rgb.len(), 3 * image.width * image.height);
    }
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(preprocessing) = image_preprocessing("preprocessor_config.json", text)
    {
        assert!(preprocessing.std.iter().all(|std| *std > 0.0));
    }
});
