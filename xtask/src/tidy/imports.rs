//! The modules of a crate, read from its source: what each defines, what it brings in by `use`, what its code names.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// From the root of the crate, whose own path is empty.
pub(super) type ModulePath = Vec<String>;

/// Segments of a path as written, from the first that is no leading `::`.
type Segments = Vec<String>;

pub(super) struct Module {
    /// The file that holds it; an inline module shares its parent's.
    pub(super) file: String,
    /// Names of its items, child modules included.
    items: BTreeSet<String>,
    /// Names that a `use` binds, and the path that each stands for.
    bindings: BTreeMap<String, Segments>,
    /// The paths that end in `::*`.
    globs: Vec<Segments>,
    /// Every path in its code, outside of tests.
    pub(super) references: Vec<Reference>,
}

pub(super) struct Reference {
    pub(super) segments: Segments,
    pub(super) line: usize,
}

pub(super) type Modules = BTreeMap<ModulePath, Module>;

/// All modules of the crate whose root is the file `root`; `texts` are the sources of the repository by path. A file
/// that does not parse is left out: the compiler says so better.
pub(super) fn modules(root: &str, texts: &BTreeMap<&str, &str>) -> Modules {
    let mut modules = Modules::new();
    let folder = root.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
    read_file(root, &folder, Vec::new(), texts, &mut modules);
    modules
}

/// Reads one file as the module `path`, whose children lie in `folder`.
fn read_file(file: &str, folder: &str, path: ModulePath, texts: &BTreeMap<&str, &str>, modules: &mut Modules) {
    let Some(parsed) = texts.get(file).and_then(|text| syn::parse_file(text).ok()) else { return };
    read_items(&parsed.items, file, folder, path, texts, modules);
}

fn read_items(
    items: &[syn::Item],
    file: &str,
    folder: &str,
    path: ModulePath,
    texts: &BTreeMap<&str, &str>,
    modules: &mut Modules,
) {
    let mut reader = Reader::default();
    for item in items {
        if is_test(attributes(item)) {
            continue;
        }
        if let syn::Item::Mod(module) = item {
            let name = module.ident.to_string();
            reader.items.insert(name.clone());
            let below = format!("{folder}/{name}");
            let child: ModulePath = path.iter().cloned().chain([name]).collect();
            match &module.content {
                Some((_, items)) => read_items(items, file, &below, child, texts, modules),
                None => {
                    let candidates = [format!("{below}.rs"), format!("{below}/mod.rs")];
                    if let Some(found) = candidates.iter().find(|file| texts.contains_key(file.as_str())) {
                        read_file(found, &below, child, texts, modules);
                    }
                }
            }
        } else {
            reader.items.extend(name_of(item));
            reader.visit_item(item);
        }
    }
    let Reader { items, bindings, globs, references } = reader;
    modules.insert(path, Module { file: file.to_owned(), items, bindings, globs, references });
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Union(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Whether an item exists in tests only: `#[cfg(test)]`, also within `all(..)`, or `#[test]`.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg")
                && attribute.meta.require_list().is_ok_and(|list| {
                    let text = list.tokens.to_string();
                    text == "test" || text.starts_with("all (") && text.contains("test")
                })
    })
}

fn name_of(item: &syn::Item) -> Option<String> {
    let ident = match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Macro(item) => item.ident.as_ref()?,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        syn::Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

/// Collects what one module brings in and names.
#[derive(Default)]
struct Reader {
    items: BTreeSet<String>,
    bindings: BTreeMap<String, Segments>,
    globs: Vec<Segments>,
    references: Vec<Reference>,
}

impl Reader {
    fn bring_in(&mut self, tree: &syn::UseTree, mut before: Segments) {
        match tree {
            syn::UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.bring_in(&path.tree, before);
            }
            syn::UseTree::Name(name) => self.bind(&name.ident, &name.ident, before),
            syn::UseTree::Rename(rename) => self.bind(&rename.ident, &rename.rename, before),
            syn::UseTree::Glob(_) => self.globs.push(before),
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.bring_in(tree, before.clone());
                }
            }
        }
    }

    fn bind(&mut self, ident: &syn::Ident, name: &syn::Ident, mut segments: Segments) {
        let name = if ident == "self" { segments.last().cloned().unwrap_or_default() } else { name.to_string() };
        if ident != "self" {
            segments.push(ident.to_string());
        }
        self.references.push(Reference { segments: segments.clone(), line: ident.span().start().line });
        self.bindings.insert(name, segments);
    }

    /// Paths among the tokens of a macro, whose grammar nobody knows: words joined by `::`.
    fn read_tokens(&mut self, tokens: TokenStream) {
        let mut segments = Segments::new();
        let (mut line, mut colons) = (0, 0);
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.finish(&mut segments, line);
                        line = ident.span().start().line;
                    }
                    segments.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Group(group) => {
                    self.finish(&mut segments, line);
                    self.read_tokens(group.stream());
                    colons = 0;
                }
                _ => {
                    self.finish(&mut segments, line);
                    colons = 0;
                }
            }
        }
        self.finish(&mut segments, line);
    }

    fn finish(&mut self, segments: &mut Segments, line: usize) {
        if segments.len() > 1 {
            self.references.push(Reference { segments: std::mem::take(segments), line });
        }
        segments.clear();
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if item.leading_colon.is_none() && !is_test(&item.attrs) {
            self.bring_in(&item.tree, Segments::new());
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            let segments = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            let line = path.segments[0].ident.span().start().line;
            self.references.push(Reference { segments, line });
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, macro_: &'ast syn::Macro) {
        self.visit_path(&macro_.path);
        self.read_tokens(macro_.tokens.clone());
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
}

/// The module that defines what a path written in the module `from` names, and its name there; None for what belongs
/// to other crates, to the language or to the function around it.
pub(super) fn definition(modules: &Modules, from: &ModulePath, segments: &[String]) -> Option<(ModulePath, String)> {
    resolve(modules, from, segments, 0)
}

/// More steps than any chain of re-exports has; ends those that go in circles.
const MAX_STEPS: usize = 32;

fn resolve(modules: &Modules, from: &ModulePath, segments: &[String], steps: usize) -> Option<(ModulePath, String)> {
    if steps > MAX_STEPS {
        return None;
    }
    let (first, rest) = segments.split_first()?;
    match first.as_str() {
        "crate" => walk(modules, &Vec::new(), rest, steps),
        "self" => walk(modules, from, rest, steps),
        "super" => {
            let (_, parent) = from.split_last()?;
            let parent = parent.to_vec();
            match rest.first().map(String::as_str) {
                Some("super") => resolve(modules, &parent, rest, steps + 1),
                _ => walk(modules, &parent, rest, steps),
            }
        }
        _ => walk(modules, from, segments, steps),
    }
}

/// Follows `segments` downward from `module`.
fn walk(modules: &Modules, module: &ModulePath, segments: &[String], steps: usize) -> Option<(ModulePath, String)> {
    let (name, rest) = segments.split_first()?;
    let here = modules.get(module)?;
    let child: ModulePath = module.iter().cloned().chain([name.clone()]).collect();
    if modules.contains_key(&child) {
        // The module itself is not defined by its parent's file; naming it imports nothing until it is used.
        return walk(modules, &child, rest, steps);
    }
    if here.items.contains(name) {
        return Some((module.clone(), name.clone()));
    }
    let onward = |path: &Segments| -> Segments { path.iter().chain(rest).cloned().collect() };
    if let Some(path) = here.bindings.get(name) {
        if path.first() == Some(name) && path.len() == 1 {
            return None; // a crate under its own name
        }
        return resolve(modules, module, &onward(path), steps + 1);
    }
    here.globs.iter().find_map(|glob| {
        let path: Segments = glob.iter().chain(segments).cloned().collect();
        resolve(modules, module, &path, steps + 1)
    })
}
