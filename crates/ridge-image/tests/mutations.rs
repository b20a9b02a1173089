//! Image files with mutated bytes give an image or an error, never a panic, and an image has the pixels that it says.

use std::path::Path;

use ridge_image::{Image, Preprocessing, Resampling};

/// SplitMix64 (Steele et al. 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

#[test]
fn mutated_files_are_images_or_errors() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/families/vit");
    let (mut images, mut errors) = (0, 0);
    for name in ["gradient.png", "palette.png", "gray.png", "gradient.jpg", "turned.jpg"] {
        let whole = std::fs::read(folder.join(name)).expect("a file");
        let mut random = Random(7);
        for _ in 0..2000 {
            let mut bytes = whole.clone();
            for _ in 0..=random.below(4) {
                let at = random.below(bytes.len());
                bytes[at] = random.below(256) as u8;
            }
            if random.below(4) == 0 {
                bytes.truncate(random.below(bytes.len()));
            }
            match Image::decode(name, &bytes) {
                Ok(image) => {
                    assert!(image.rgb.len() == 3 * image.width * image.height && !image.rgb.is_empty());
                    images += 1;
                }
                Err(error) => {
                    assert!(error.to_string().starts_with(&format!("{name}: ")), "{error}");
                    errors += 1;
                }
            }
        }
    }
    assert!(images > 500 && errors > 500, "{images} images, {errors} errors");
}

#[test]
fn giant_images_are_refused_before_they_are_decoded() {
    // Signature and header of a PNG of 65535 x 65535 pixels, with its checksum.
    let mut png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\xff\xff\0\0\xff\xff\x08\x02\0\0\0".to_vec();
    png.extend(0x7404_b3b1_u32.to_be_bytes());
    let error = Image::decode("giant.png", &png).expect_err("is refused").to_string();
    assert!(error.contains("giant.png"), "{error}");
}

#[test]
fn images_of_one_pixel_and_of_one_colour_keep_their_colour() {
    for (width, height) in [(1, 1), (7, 3)] {
        let image = Image { width, height, rgb: [10, 200, 77].repeat(width * height) };
        for resampling in [Resampling::Nearest, Resampling::Lanczos, Resampling::Bilinear, Resampling::Bicubic] {
            for size in [[1, 1], [5, 4], [40, 30]] {
                let resized = image.resized(size, resampling);
                assert_eq!(resized.rgb, [10, 200, 77].repeat(size[0] * size[1]), "{resampling:?} {size:?}");
            }
        }
        let preprocessing = Preprocessing { size: None, scale: 1.0, mean: [10.0, 0.0, 7.0], std: [1.0, 2.0, 10.0] };
        let pixels = width * height;
        let expected: Vec<f32> = [0.0, 100.0, 7.0].into_iter().flat_map(|v| std::iter::repeat_n(v, pixels)).collect();
        assert_eq!(preprocessing.apply(&image), expected);
    }
}
