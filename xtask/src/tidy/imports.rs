//! The imports of a crate, read from its source: [`modules`] reads the module tree, [`definition`] resolves a path that
//! its code names to the module that defines it.

mod module;
mod read;
mod resolve;

pub(super) use module::ReferenceKind;
pub(super) use read::modules;
pub(super) use resolve::{definition, glob_definition, macro_definition};
