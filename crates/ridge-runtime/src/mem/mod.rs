//! Memory that is not a plain allocation: files mapped into the address space.
//!
//! `unsafe` is allowed in the files of this folder that need it, and nowhere else in the crate.

mod file;

pub use file::MappedFile;
