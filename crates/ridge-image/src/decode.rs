//! PNG and JPEG files to pixels.

use std::io::Cursor;

use png::{ColorType, Transformations};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use crate::error::{ImageError, Result};
use crate::orientation::{is_on_its_side, orientation, stored_at};

/// Pixels of an image at most.
pub const MAX_PIXELS: usize = 1 << 26;

/// Pixels of a side at most.
const MAX_SIDE: usize = 1 << 16;

/// Scans of a progressive JPEG file at most: each takes the time of a whole image.
const MAX_SCANS: usize = 100;

/// An upright image of three channels: red, green and blue, as the file has them (sRGB, for most).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Pixels of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Red, green and blue of each pixel, row by row from the top left.
    pub rgb: Vec<u8>,
}

impl Image {
    /// Decodes a PNG or JPEG file and turns it as its EXIF orientation says. Transparency is dropped, 16 bits are cut to 8,
    /// grey becomes three equal channels, as Pillow's `convert("RGB")` has it. `file` names it in errors.
    ///
    /// # Errors
    /// When the file is neither, is damaged, or has more pixels than [`MAX_PIXELS`].
    pub fn decode(file: &str, bytes: &[u8]) -> Result<Self> {
        let (image, exif) = if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
            png(file, bytes)?
        } else if bytes.starts_with(b"\xff\xd8\xff") {
            jpeg(file, bytes)?
        } else {
            return Err(ImageError::Format { file: file.to_owned() });
        };
        Ok(match exif.as_deref().map_or(1, orientation) {
            1 => image,
            turned => image.upright(turned),
        })
    }

    fn upright(&self, orientation: u8) -> Self {
        let sides = (self.width, self.height);
        let (width, height) = if is_on_its_side(orientation) { (sides.1, sides.0) } else { sides };
        let mut rgb = Vec::with_capacity(self.rgb.len());
        for y in 0..height {
            for x in 0..width {
                let (column, row) = stored_at(orientation, (x, y), (width, height));
                let at = 3 * (row * self.width + column);
                rgb.extend_from_slice(&self.rgb[at..at + 3]);
            }
        }
        Self { width, height, rgb }
    }
}

/// Refuses an image of more pixels than are read.
fn check(file: &str, width: usize, height: usize) -> Result<()> {
    if width.saturating_mul(height) > MAX_PIXELS {
        return Err(ImageError::TooLarge { file: file.to_owned(), width, height, most: MAX_PIXELS });
    }
    Ok(())
}

fn damaged(file: &str) -> impl Fn(String) -> ImageError {
    move |problem| ImageError::Damaged { file: file.to_owned(), problem }
}

/// An image as it is stored, and its EXIF data.
type Stored = (Image, Option<Vec<u8>>);

fn png(file: &str, bytes: &[u8]) -> Result<Stored> {
    let wrong = damaged(file);
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(bytes), png::Limits { bytes: 8 * MAX_PIXELS });
    decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
    let mut reader = decoder.read_info().map_err(|e| wrong(e.to_string()))?;
    let info = reader.info();
    let (width, height) = (info.width as usize, info.height as usize);
    check(file, width, height)?;
    let exif = info.exif_metadata.as_ref().map(|exif| exif.to_vec());
    let size = reader.output_buffer_size().ok_or_else(|| wrong("its size overflows".to_owned()))?;
    let mut pixels = vec![0; size];
    let frame = reader.next_frame(&mut pixels).map_err(|e| wrong(e.to_string()))?;
    pixels.truncate(frame.buffer_size());
    let rgb = match frame.color_type {
        ColorType::Rgb => pixels,
        ColorType::Rgba => pixels.as_chunks::<4>().0.iter().flat_map(|[r, g, b, _]| [*r, *g, *b]).collect(),
        ColorType::Grayscale => pixels.iter().flat_map(|grey| [*grey; 3]).collect(),
        ColorType::GrayscaleAlpha => pixels.as_chunks::<2>().0.iter().flat_map(|[grey, _]| [*grey; 3]).collect(),
        ColorType::Indexed => return Err(wrong("its palette is missing".to_owned())),
    };
    whole(file, Image { width, height, rgb }).map(|image| (image, exif))
}

fn jpeg(file: &str, bytes: &[u8]) -> Result<Stored> {
    let wrong = damaged(file);
    let options = DecoderOptions::default()
        .set_max_width(MAX_SIDE)
        .set_max_height(MAX_SIDE)
        .jpeg_set_max_scans(MAX_SCANS)
        .jpeg_set_out_colorspace(ColorSpace::RGB);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(|e| wrong(e.to_string()))?;
    let (width, height) = decoder.dimensions().ok_or_else(|| wrong("it has no size".to_owned()))?;
    check(file, width, height)?;
    let exif = decoder.exif().cloned();
    let pixels = decoder.decode().map_err(|e| wrong(e.to_string()))?;
    let rgb = match pixels.len() == width * height {
        true => pixels.iter().flat_map(|grey| [*grey; 3]).collect(),
        false => pixels,
    };
    whole(file, Image { width, height, rgb }).map(|image| (image, exif))
}

/// Refuses an image with too few or too many pixels for its sides.
fn whole(file: &str, image: Image) -> Result<Image> {
    if image.width == 0 || image.height == 0 || image.rgb.len() != 3 * image.width * image.height {
        return Err(damaged(file)("its pixel data do not match its size".to_owned()));
    }
    Ok(image)
}
