//! One module of a crate: what it defines, what it brings in by `use`, what its code names.

use std::collections::{BTreeMap, BTreeSet};

/// From the root of the crate, whose own path is empty.
pub(in super::super) type ModulePath = Vec<String>;

/// Segments of a path as written, without a leading `::`.
pub(super) type Segments = Vec<String>;

/// The modules of a crate by path.
pub(in super::super) type Modules = BTreeMap<ModulePath, Module>;

#[derive(Default)]
pub(in super::super) struct Module {
    /// The file that holds it; an inline module shares its parent's.
    pub(in super::super) file: String,
    /// Names of its items, without child modules.
    pub(super) items: BTreeSet<String>,
    /// Names of its `macro_rules!`, which are visible below `#[macro_use]` without any `use`.
    pub(super) macros: BTreeSet<String>,
    /// Words given to macros that stand as items: a macro may define items by these names.
    pub(super) generated: BTreeSet<String>,
    /// Names that a `use` binds, and the path that each stands for.
    pub(super) bindings: BTreeMap<String, Segments>,
    /// The paths that end in `::*`.
    pub(super) globs: Vec<Segments>,
    /// What its code names, outside of tests.
    pub(in super::super) references: Vec<Reference>,
}

/// A path in the code of a module.
pub(in super::super) struct Reference {
    pub(in super::super) segments: Segments,
    pub(in super::super) kind: ReferenceKind,
    pub(in super::super) line: usize,
}

#[derive(Clone, Copy, PartialEq)]
pub(in super::super) enum ReferenceKind {
    /// A `use` of one name, or a path of several segments.
    Path,
    /// The path before `::*`.
    Glob,
    /// One word, which names something of another file only if a glob brings it in.
    Word,
    /// `name!`, which may be a `macro_rules!` of any file.
    Macro,
}
