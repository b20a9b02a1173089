//! The modules of a crate, read from its source files.

use std::collections::BTreeMap;

use proc_macro2::{TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};

use super::module::{Module, ModulePath, Modules, Reference, ReferenceKind, Segments};

/// All modules of the crate whose root is the file `root`; `texts` are the sources of the repository by path. A file
/// that does not parse is left out: the compiler says so better.
pub(in super::super) fn modules(root: &str, texts: &BTreeMap<&str, &str>) -> Modules {
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
    let mut reader = ImportReader { module: Module { file: file.to_owned(), ..Module::default() } };
    for item in items {
        if is_test(attributes(item)) {
            continue;
        }
        if let syn::Item::Mod(module) = item {
            let name = module.ident.to_string();
            let below = format!("{folder}/{name}");
            let child: ModulePath = path.iter().cloned().chain([name]).collect();
            match &module.content {
                Some((_, items)) => read_items(items, file, &below, child, texts, modules),
                None => {
                    let named = path_attribute(&module.attrs).map(|path| beside(file, &path));
                    let candidates = [named.unwrap_or_default(), format!("{below}.rs"), format!("{below}/mod.rs")];
                    if let Some(found) = candidates.iter().find(|file| texts.contains_key(file.as_str())) {
                        read_file(found, &below, child, texts, modules);
                    }
                }
            }
        } else {
            reader.define(item);
            reader.visit_item(item);
        }
    }
    modules.insert(path, reader.module);
}

/// The value of `#[path = ".."]`.
fn path_attribute(attributes: &[syn::Attribute]) -> Option<String> {
    let attribute = attributes.iter().find(|attribute| attribute.path().is_ident("path"))?;
    match &attribute.meta.require_name_value().ok()?.value {
        syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
        _ => None,
    }
}

/// The path of a file that is given from the folder of another.
fn beside(file: &str, path: &str) -> String {
    let mut parts: Vec<&str> = file.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." => {}
            part => parts.push(part),
        }
    }
    parts.join("/")
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
                && attribute.parse_args::<syn::Meta>().is_ok_and(|condition| needs_test(&condition))
    })
}

fn needs_test(condition: &syn::Meta) -> bool {
    match condition {
        syn::Meta::Path(path) => path.is_ident("test"),
        syn::Meta::List(list) if list.path.is_ident("all") => list
            .parse_args_with(Punctuated::<syn::Meta, syn::Token![,]>::parse_terminated)
            .is_ok_and(|conditions| conditions.iter().any(needs_test)),
        _ => false,
    }
}

fn name_of(item: &syn::Item) -> Option<String> {
    let ident = match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        syn::Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

/// Collects what one module defines, brings in and names.
struct ImportReader {
    module: Module,
}

impl ImportReader {
    fn define(&mut self, item: &syn::Item) {
        self.module.items.extend(name_of(item));
        if let syn::Item::Macro(item) = item {
            match &item.ident {
                Some(name) => {
                    self.module.items.insert(name.to_string());
                    self.module.macros.insert(name.to_string());
                }
                None => self.generate(item.mac.tokens.clone()),
            }
        }
    }

    fn generate(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => drop(self.module.generated.insert(ident.to_string())),
                TokenTree::Group(group) => self.generate(group.stream()),
                _ => {}
            }
        }
    }

    fn refer(&mut self, segments: Segments, kind: ReferenceKind, line: usize) {
        self.module.references.push(Reference { segments, kind, line });
    }

    fn bring_in(&mut self, tree: &syn::UseTree, mut before: Segments) {
        match tree {
            syn::UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.bring_in(&path.tree, before);
            }
            syn::UseTree::Name(name) => self.bind(&name.ident, &name.ident, before),
            syn::UseTree::Rename(rename) => self.bind(&rename.ident, &rename.rename, before),
            syn::UseTree::Glob(glob) => {
                self.refer(before.clone(), ReferenceKind::Glob, glob.star_token.span.start().line);
                self.module.globs.push(before);
            }
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.bring_in(tree, before.clone());
                }
            }
        }
    }

    fn bind(&mut self, ident: &syn::Ident, name: &syn::Ident, mut segments: Segments) {
        let name = match (ident == "self", name == "self") {
            (true, true) => segments.last().cloned().unwrap_or_default(),
            _ => name.to_string(),
        };
        if ident != "self" {
            segments.push(ident.to_string());
        }
        self.refer(segments.clone(), ReferenceKind::Path, ident.span().start().line);
        self.module.bindings.insert(name, segments);
    }

    /// Paths among the tokens of a macro, whose grammar is unknown: words joined by `::`. A single word counts when it
    /// looks like the name of a type or of a constant.
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
        match segments.as_slice() {
            [] => {}
            [word] if !word.starts_with(char::is_uppercase) => segments.clear(),
            [_] => self.refer(std::mem::take(segments), ReferenceKind::Word, line),
            _ => self.refer(std::mem::take(segments), ReferenceKind::Path, line),
        }
    }
}

/// Whether a path of one segment is spelt like a type, a constant or a variant, and so is no local variable.
fn is_item_like(path: &syn::Path) -> bool {
    path.segments.first().is_some_and(|segment| segment.ident.to_string().starts_with(char::is_uppercase))
}

impl<'ast> Visit<'ast> for ImportReader {
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

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if let syn::Expr::Path(function) = &*call.func
            && let Some(name) = function.path.get_ident().filter(|_| !is_item_like(&function.path))
        {
            self.refer(vec![name.to_string()], ReferenceKind::Word, name.span().start().line);
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let several = path.segments.len() > 1;
        if path.leading_colon.is_none() && (several || is_item_like(path)) {
            let segments = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            let line = path.segments[0].ident.span().start().line;
            self.refer(segments, if several { ReferenceKind::Path } else { ReferenceKind::Word }, line);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, macro_: &'ast syn::Macro) {
        match macro_.path.get_ident() {
            Some(name) => self.refer(vec![name.to_string()], ReferenceKind::Macro, name.span().start().line),
            None => self.visit_path(&macro_.path),
        }
        self.read_tokens(macro_.tokens.clone());
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
}
