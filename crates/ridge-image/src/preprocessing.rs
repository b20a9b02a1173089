//! An image to the numbers that a network was trained on.

use resize::Pixel::RGB8;
use resize::Type;
use rgb::FromSlice as _;

use crate::decode::Image;

/// How pixels are resampled, with the filters of Pillow: an image that is made smaller is averaged over as many pixels as
/// one of the result covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resampling {
    /// The nearest pixel.
    Nearest,
    /// Lanczos' filter with three lobes.
    Lanczos,
    /// A triangle.
    Bilinear,
    /// Catmull and Rom's cubic.
    Bicubic,
}

/// What is done to an image before a network sees it, in the order of the fields.
#[derive(Clone, Debug, PartialEq)]
pub struct Preprocessing {
    /// Height and width that it is resized to, without regard to its proportions, and how.
    pub size: Option<([usize; 2], Resampling)>,
    /// Factor of the values, which are 0 to 255.
    pub scale: f64,
    /// Of each channel, red, green and blue: what is subtracted then.
    pub mean: [f64; 3],
    /// Of each channel: what is divided by then.
    pub std: [f64; 3],
}

impl Image {
    /// The image with this height and width.
    #[must_use]
    pub fn resized(&self, [height, width]: [usize; 2], resampling: Resampling) -> Self {
        if [height, width] == [self.height, self.width] {
            return self.clone();
        }
        if resampling == Resampling::Nearest {
            return self.nearest([height, width]);
        }
        let filter = match resampling {
            Resampling::Lanczos => Type::Lanczos3,
            Resampling::Bicubic => Type::Catrom,
            Resampling::Bilinear | Resampling::Nearest => Type::Triangle,
        };
        let mut rgb = vec![0; 3 * width * height];
        // It fails where a side is 0, and then there is nothing to fill.
        if let Ok(mut resizer) = resize::new(self.width, self.height, width, height, RGB8, filter) {
            let filled = resizer.resize(self.rgb.as_rgb(), rgb.as_rgb_mut());
            debug_assert!(filled.is_ok(), "an image has the pixels that it says");
        }
        Self { width, height, rgb }
    }

    /// The pixels in which the centres of those of the result lie.
    fn nearest(&self, [height, width]: [usize; 2]) -> Self {
        let centre = |at: usize, from: usize, to: usize| (2 * at + 1) * from / (2 * to);
        let mut rgb = Vec::with_capacity(3 * width * height);
        for y in 0..height {
            for x in 0..width {
                let at = 3 * (centre(y, self.height, height) * self.width + centre(x, self.width, width));
                rgb.extend_from_slice(&self.rgb[at..at + 3]);
            }
        }
        Self { width, height, rgb }
    }
}

impl Preprocessing {
    /// The numbers of `image`: its channels one after another, each row by row, `[3, height, width]`.
    pub fn apply(&self, image: &Image) -> Vec<f32> {
        let resized = self.size.map(|(size, resampling)| image.resized(size, resampling));
        let image = resized.as_ref().unwrap_or(image);
        let mut values = Vec::with_capacity(image.rgb.len());
        for channel in 0..3 {
            let table: [f32; 256] = std::array::from_fn(|value| {
                ((value as f64 * self.scale - self.mean[channel]) / self.std[channel]) as f32
            });
            values.extend(image.rgb.iter().skip(channel).step_by(3).map(|value| table[usize::from(*value)]));
        }
        values
    }
}
