//! The one error type of the crate.

/// The result of reading an image.
pub type Result<T, E = ImageError> = std::result::Result<T, E>;

/// Why an image could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The file is neither PNG nor JPEG.
    #[error("{file}: is neither a PNG nor a JPEG file; convert it to one of them")]
    Format {
        /// The file.
        file: String,
    },

    /// The file is damaged, or uses something that is not supported.
    #[error("{file}: cannot be decoded: {problem}; check that another program opens it, or save it again")]
    Damaged {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
    },

    /// The image has more pixels than are read.
    #[error("{file}: has {width} x {height} pixels, more than the limit of {most}; reduce its size")]
    TooLarge {
        /// The file.
        file: String,
        /// Its width.
        width: usize,
        /// Its height.
        height: usize,
        /// Pixels that are read at most.
        most: usize,
    },
}
