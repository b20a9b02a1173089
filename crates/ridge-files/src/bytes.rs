//! The bytes of a file, mapped or in memory.

use std::borrow::Cow;
use std::fmt;

use crate::mapped::MappedFile;

/// The bytes of a file.
pub(crate) enum FileBytes {
    /// Mapped from the file system.
    Mapped(MappedFile),
    /// In memory: compiled in, or read from elsewhere.
    InMemory(Cow<'static, [u8]>),
}

impl FileBytes {
    pub(crate) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Mapped(file) => file,
            Self::InMemory(bytes) => bytes,
        }
    }
}

/// Shows the number of bytes only: they are a model's weights.
impl fmt::Debug for FileBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.as_slice().len())
    }
}
