//! Import cycles: inside a crate, no file imports a file that imports it back, directly or through others.
//!
//! A file imports another when a `use` or a path in its code names something that the other defines. Re-exports are
//! followed to the definition, so a file that only hands names on stands above what it hands on and below nothing.
//! `mod child;` alone is no import, and neither is anything under `#[cfg(test)]`: tests stand above what they test.

use std::collections::{BTreeMap, BTreeSet};

use super::finding::Finding;
use super::imports::{self, ReferenceKind};
use super::tree::RepoFile;

/// Why one file imports another: the line of the first use, and the name that it takes.
#[derive(Clone)]
struct Import {
    line: usize,
    name: String,
}

/// `from -> to`, by file.
type Edges = BTreeMap<String, BTreeMap<String, Import>>;

pub(super) fn check(files: &[RepoFile]) -> Vec<Finding> {
    let roots = files.iter().filter(|file| is_crate_root(&file.path));
    roots.flat_map(|root| check_crate(&root.path, files)).collect()
}

fn is_crate_root(path: &str) -> bool {
    path.strip_suffix("src/lib.rs").or_else(|| path.strip_suffix("src/main.rs")).is_some()
}

fn check_crate(root: &str, files: &[RepoFile]) -> Vec<Finding> {
    let texts = files.iter().filter_map(|file| Some((file.path.as_str(), file.text.as_deref()?))).collect();
    let edges = edges_of(root, &texts);
    cycles(&edges).iter().flat_map(|cycle| findings(cycle, &edges)).collect()
}

/// One finding for each import between two files of a cycle.
fn findings(cycle: &BTreeSet<&str>, edges: &Edges) -> Vec<Finding> {
    let members = cycle.len();
    let mut found = Vec::new();
    for from in cycle {
        for (to, Import { line, name }) in edges.get(*from).into_iter().flatten() {
            if cycle.contains(to.as_str()) {
                let message = format!(
                    "`{name}` of {to} is imported in a cycle of {members} files; move what both need into a file below both"
                );
                found.push(Finding::failure(from, *line, message));
            }
        }
    }
    found
}

fn edges_of(root: &str, texts: &BTreeMap<&str, &str>) -> Edges {
    let modules = imports::modules(root, texts);
    let mut edges = Edges::new();
    for (path, module) in &modules {
        for reference in &module.references {
            let found = match reference.kind {
                ReferenceKind::Glob => imports::glob_definition(&modules, path, &reference.segments),
                ReferenceKind::Macro => imports::macro_definition(&modules, path, &reference.segments),
                ReferenceKind::Path | ReferenceKind::Word => imports::definition(&modules, path, &reference.segments),
            };
            let Some((target, name)) = found else { continue };
            let to = &modules[&target].file;
            if *to != module.file {
                let import = Import { line: reference.line, name };
                edges.entry(module.file.clone()).or_default().entry(to.clone()).or_insert(import);
            }
        }
    }
    edges
}

/// The sets of files that reach each other: the strongly connected components of more than one file.
fn cycles(edges: &Edges) -> Vec<BTreeSet<&str>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        edges.keys().map(|from| (from.as_str(), reachable(edges, from))).collect();
    let mut cycles: Vec<BTreeSet<&str>> = Vec::new();
    for (from, to) in &reached {
        let cycle: BTreeSet<&str> =
            to.iter().copied().filter(|file| reached.get(file).is_some_and(|back| back.contains(from))).collect();
        if cycle.len() > 1 && !cycles.contains(&cycle) {
            cycles.push(cycle);
        }
    }
    cycles
}

fn reachable<'e>(edges: &'e Edges, from: &str) -> BTreeSet<&'e str> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<&str> = vec![from];
    while let Some(file) = open.pop() {
        for to in edges.get(file).into_iter().flat_map(BTreeMap::keys) {
            if reached.insert(to.as_str()) {
                open.push(to);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_files(files: &[(&str, &str)]) -> Vec<String> {
        let file = |(path, text): &(&str, &str)| RepoFile {
            path: format!("crates/c/src/{path}"),
            bytes: text.len() as u64,
            text: Some((*text).to_owned()),
        };
        let files: Vec<RepoFile> = files.iter().map(file).collect();
        let shown = |finding: Finding| format!("{}:{}", finding.path.trim_start_matches("crates/c/src/"), finding.line);
        check(&files).into_iter().map(shown).collect()
    }

    #[test]
    fn files_that_import_each_other_are_found_at_each_import() {
        let found = check_files(&[
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a.rs", "use crate::b::B;\npub struct A(B);\n"),
            ("b.rs", "pub struct B;\nfn f(a: &super::a::A) {}\n"),
        ]);
        assert_eq!(found, ["a.rs:1", "b.rs:2"]);
    }

    #[test]
    fn names_are_followed_through_re_exports_to_the_file_that_defines_them() {
        let found = check_files(&[
            ("lib.rs", "mod a;\npub use a::{A, low::Low};\n"),
            ("a.rs", "pub mod low;\nuse low::Low;\npub struct A(Low);\n"),
            ("a/low.rs", "pub struct Low;\n"),
            ("unused.rs", ""),
        ]);
        assert_eq!(found, [""; 0]);
        let found = check_files(&[
            ("lib.rs", "mod a;\nmod b;\npub use a::*;\n"),
            ("a.rs", "use crate::b;\npub struct A;\nfn f() { b::run() }\n"),
            ("b.rs", "use crate::A;\npub fn run() {}\n"),
        ]);
        assert_eq!(found, ["a.rs:3", "b.rs:1"]);
    }

    #[test]
    fn child_that_uses_its_parent_is_a_cycle_when_the_parent_uses_the_child() {
        let parent = "mod child;\npub use child::Child;\npub struct Base;\n";
        let child = "use super::Base;\npub struct Child(Base);\n";
        assert_eq!(check_files(&[("lib.rs", "mod p;\n"), ("p.rs", parent), ("p/child.rs", child)]).len(), 2);
        let facade = "mod base;\nmod child;\npub use base::Base;\npub use child::Child;\n";
        let files =
            [("lib.rs", "mod p;\n"), ("p.rs", facade), ("p/child.rs", child), ("p/base.rs", "pub struct Base;\n")];
        assert_eq!(check_files(&files), [""; 0]);
    }

    #[test]
    fn paths_inside_macros_and_function_bodies_count_and_tests_do_not() {
        let found = check_files(&[
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a.rs", "pub const A: u8 = 1;\n#[cfg(test)]\nmod tests {\n use crate::b::B;\n}\n"),
            ("b.rs", "pub struct B;\nfn f() { assert_eq!(crate::a::A, 1); }\n"),
        ]);
        assert_eq!(found, [""; 0]);
        let found = check_files(&[
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a.rs", "pub const A: u8 = 1;\nfn f() {\n use crate::b::B;\n}\n"),
            ("b.rs", "pub struct B;\nfn f() { assert_eq!(crate::a::A, 1); }\n"),
        ]);
        assert_eq!(found, ["a.rs:3", "b.rs:2"]);
    }

    #[test]
    fn names_that_a_glob_brings_in_count_where_they_are_defined() {
        let b = "pub struct B;\npub enum Kind {\n One,\n}\n";
        let lib = ("lib.rs", "mod a;\nmod b;\npub use b::B;\n");
        // The parent defines nothing itself: its glob leads to the definition.
        let a = "use super::*;\npub struct A(B);\n";
        assert_eq!(check_files(&[lib, ("a.rs", a), ("b.rs", b)]), [""; 0]);
        let with_a = format!("{b}fn f(a: &crate::a::A) {{}}\n");
        assert_eq!(check_files(&[lib, ("a.rs", a), ("b.rs", &with_a)]), ["a.rs:2", "b.rs:5"]);
        // Inside a macro, and of a parent that defines something.
        let a = "use super::*;\npub struct A;\nfn f() { assert!(x == B); }\n";
        assert_eq!(check_files(&[lib, ("a.rs", a), ("b.rs", &with_a)]), ["a.rs:3", "b.rs:5"]);
        let parent = ("lib.rs", "mod a;\npub struct Base;\npub use a::*;\n");
        assert_eq!(check_files(&[parent, ("a.rs", "use super::*;\npub struct A;\n")]), ["a.rs:1", "lib.rs:3"]);
        // The variants of an enum.
        let a = "use crate::b::Kind::*;\npub struct A;\n";
        assert_eq!(check_files(&[lib, ("a.rs", a), ("b.rs", &with_a)]), ["a.rs:1", "b.rs:5"]);
    }

    #[test]
    fn macros_and_what_they_define_count() {
        let lib = ("lib.rs", "#[macro_use]\nmod a;\nmod b;\n");
        let b = "pub struct B;\nfn f() { double!(1) }\n";
        let a = "macro_rules! double { ($x:expr) => { $crate::b::B } }\n";
        assert_eq!(check_files(&[lib, ("a.rs", a), ("b.rs", b)]), ["a.rs:1", "b.rs:2"]);
        let a = "use crate::b::B;\nquantity! { Seconds }\nfn f(b: B) {}\n";
        let b = "use crate::a::Seconds;\npub struct B(Seconds);\n";
        assert_eq!(check_files(&[lib, ("a.rs", a), ("b.rs", b)]), ["a.rs:1", "b.rs:1"]);
    }

    #[test]
    fn modules_of_another_path_and_names_shared_with_a_function_are_followed() {
        let lib = ("lib.rs", "mod b;\n#[path = \"odd/place.rs\"]\nmod a;\n");
        let a = ("odd/place.rs", "use crate::b::run;\npub struct A;\n");
        let b = ("b.rs", "pub mod run;\npub fn run(a: crate::a::A) {}\n");
        assert_eq!(check_files(&[lib, a, b, ("b/run.rs", "")]), ["b.rs:2", "odd/place.rs:1"]);
    }

    #[test]
    fn globs_of_other_crates_end() {
        let lib = "use other::prelude::*;\nuse third::prelude::*;\nfn f(x: Nowhere) { other::run(x) }\n";
        assert_eq!(check_files(&[("lib.rs", lib)]), [""; 0]);
    }

    #[test]
    fn re_exports_in_circles_end() {
        let globs = "pub use crate::a::*;\npub use crate::b::*;\npub use crate::c::*;\n";
        let c = format!("{globs}fn f(x: Nowhere) {{ nowhere(x) }}\n");
        let files = [("lib.rs", "mod a;\nmod b;\nmod c;\n"), ("a.rs", globs), ("b.rs", globs), ("c.rs", &c)];
        assert_eq!(check_files(&files), [""; 0]);
    }

    #[test]
    fn what_exists_in_tests_only_does_not_count() {
        let lib = ("lib.rs", "mod a;\nmod b;\n");
        let b = ("b.rs", "pub struct B(crate::a::A);\n");
        let a = |condition: &str| {
            format!("pub struct A;\nimpl A {{\n#[cfg({condition})]\nfn f() -> crate::b::B {{}}\n}}\n")
        };
        for (condition, findings) in [("test", 0), ("all(unix, test)", 0), ("any(unix, test)", 2), ("not(test)", 2)] {
            let a = a(condition);
            assert_eq!(check_files(&[lib, ("a.rs", &a), b]).len(), findings, "{condition}");
        }
    }
}
