//! Paths resolved to the module that defines what they name; re-exports and globs are followed.

use std::collections::BTreeSet;

use super::module::{ModulePath, Modules, Segments};

/// The module that defines what a path written in the module `from` names, and its name there; None for what belongs
/// to other crates, to the language or to the function around it.
pub(in super::super) fn definition(
    modules: &Modules,
    from: &ModulePath,
    segments: &[String],
) -> Option<(ModulePath, String)> {
    Resolver::new(modules).resolve(from, segments)
}

/// The module that a glob import `segments::*` takes names from, if it defines any itself; for a glob over an enum, the
/// module of the enum. Names that the module only hands on are found where they are used, by [`definition`].
pub(in super::super) fn glob_definition(
    modules: &Modules,
    from: &ModulePath,
    segments: &[String],
) -> Option<(ModulePath, String)> {
    let everything: Segments = segments.iter().cloned().chain(["*".to_owned()]).collect();
    Resolver::new(modules).resolve(from, &everything)
}

/// The module that defines the macro `name!` used in the module `from`. A `macro_rules!` needs no `use`: it is in scope
/// in what follows it, and below `#[macro_use]`.
pub(in super::super) fn macro_definition(
    modules: &Modules,
    from: &ModulePath,
    name: &[String],
) -> Option<(ModulePath, String)> {
    definition(modules, from, name).or_else(|| {
        let [name] = name else { return None };
        let (path, _) = modules.iter().find(|(_, module)| module.macros.contains(name))?;
        Some((path.clone(), name.clone()))
    })
}

/// Longer than any path. The name of another crate that a glob brings in may come through that glob itself, and so on.
const MAX_SEGMENTS: usize = 20;

struct Resolver<'m> {
    modules: &'m Modules,
    /// What was looked for and where, which ends re-exports that go in circles.
    visited: BTreeSet<(ModulePath, Segments)>,
}

impl<'m> Resolver<'m> {
    fn new(modules: &'m Modules) -> Self {
        Self { modules, visited: BTreeSet::new() }
    }

    fn resolve(&mut self, from: &ModulePath, segments: &[String]) -> Option<(ModulePath, String)> {
        let (first, rest) = segments.split_first()?;
        match first.as_str() {
            "crate" => self.walk(&Vec::new(), rest),
            "self" => self.walk(from, rest),
            "super" => {
                let parent = from.split_last()?.1.to_vec();
                match rest.first().map(String::as_str) {
                    Some("super") => self.resolve(&parent, rest),
                    _ => self.walk(&parent, rest),
                }
            }
            _ => self.walk(from, segments),
        }
    }

    /// Follows `segments` downward from `module`.
    fn walk(&mut self, module: &ModulePath, segments: &[String]) -> Option<(ModulePath, String)> {
        if segments.len() > MAX_SEGMENTS || !self.visited.insert((module.clone(), segments.to_vec())) {
            return None;
        }
        let (name, rest) = segments.split_first()?;
        let here = self.modules.get(module)?;
        if name == "*" {
            let defines = !here.items.is_empty() || !here.generated.is_empty();
            return defines.then(|| (module.clone(), "*".to_owned()));
        }
        let child: ModulePath = module.iter().cloned().chain([name.clone()]).collect();
        if !rest.is_empty() && self.modules.contains_key(&child) {
            return self.walk(&child, rest);
        }
        // A module is not defined by its parent's file: naming it imports nothing until something of it is used.
        if here.items.contains(name) {
            return Some((module.clone(), name.clone()));
        }
        let onward = |path: &Segments| -> Segments { path.iter().chain(rest).cloned().collect() };
        if let Some(path) = here.bindings.get(name) {
            return self.resolve(module, &onward(path));
        }
        let globbed = here.globs.iter().find_map(|glob| {
            let path: Segments = glob.iter().chain(segments).cloned().collect();
            self.resolve(module, &path)
        });
        globbed.or_else(|| here.generated.contains(name).then(|| (module.clone(), name.clone())))
    }
}
