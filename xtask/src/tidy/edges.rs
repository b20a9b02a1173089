//! Crate edges: a crate depends only on crates below it in [`ORDER`].

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::finding::Finding;
use super::manifests;
use super::toml_text::{get, line_at, parse};

/// The crates from top to bottom. A new crate takes its place here and in ARCHITECTURE.md.
const ORDER: &[&str] = &[
    "ridge-cli",
    "ridge",
    "ridge-serve",
    "ridge-train",
    "ridge-plan",
    "ridge-engine",
    "ridge-quant",
    "ridge-models",
    "ridge-image",
    "ridge-text",
    "ridge-hub",
    "ridge-files",
    "ridge-cuda",
    "ridge-cpu",
    "ridge-comm",
    "ridge-runtime",
    "ridge-graph",
    "ridge-hw",
    "ridge-testing",
];

/// Tests may not look upward either, or a crate could not be tested without all that is built on it.
const SECTIONS: &[&str] = &["dependencies", "build-dependencies", "dev-dependencies"];

/// A dependency as a manifest states it.
struct Edge<'a> {
    /// The package, whatever name the dependent crate gives it.
    to: &'a str,
    /// The name by which the dependent crate knows it.
    alias: &'a str,
    line: usize,
}

pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    let Ok(manifest) = parse(path, text) else {
        return Vec::new(); // `manifests` reports it
    };
    if path == "Cargo.toml" {
        return check_workspace(path, text, &manifest);
    }
    if !manifests::is_crate(path) {
        return Vec::new();
    }
    let Some(name) = get(&manifest, &["package", "name"]).and_then(DeValue::as_str) else {
        return Vec::new(); // Cargo itself refuses it
    };
    if name == "xtask" {
        return Vec::new(); // stands beside the house, not in it
    }
    let Some(place) = place_of(name) else {
        let message = format!(
            "crate `{name}` has no place in the order of crates; give it one in xtask/src/tidy/edges.rs and ARCHITECTURE.md"
        );
        return vec![Finding::failure(path, 1, message)];
    };
    edges(text, &manifest)
        .iter()
        .filter_map(|edge| {
            let message = refusal(name, place, edge.to)?;
            Some(Finding::failure(path, edge.line, message))
        })
        .collect()
}

/// A package of ours under another name in the workspace's table would hide an edge from the check of the crates.
fn check_workspace(path: &str, text: &str, manifest: &DeTable<'_>) -> Vec<Finding> {
    let Some(table) = get(manifest, &["workspace", "dependencies"]).and_then(DeValue::as_table) else {
        return Vec::new();
    };
    edges_of(text, table)
        .filter(|edge| is_ours(edge.to) && edge.to != edge.alias)
        .map(|Edge { to, alias, line }| {
            let message = format!("`{to}` goes by the name `{alias}`; call it by its own");
            Finding::failure(path, line, message)
        })
        .collect()
}

/// Why `from` may not depend on `to`, if it may not.
fn refusal(from: &str, from_place: usize, to: &str) -> Option<String> {
    if !is_ours(to) {
        return None;
    }
    match place_of(to) {
        Some(place) if place > from_place => None,
        Some(_) => Some(format!(
            "`{from}` depends on `{to}`, which is not below it; move what both need into a crate below both"
        )),
        None => Some(format!(
            "`{from}` depends on `{to}`, which has no place in the order of crates; remove the dependency or give it one"
        )),
    }
}

fn place_of(name: &str) -> Option<usize> {
    ORDER.iter().position(|&other| other == name)
}

fn is_ours(package: &str) -> bool {
    package.starts_with("ridge-") || package == "xtask"
}

/// Every dependency of a crate, those of one target included.
fn edges<'t>(text: &str, manifest: &'t DeTable<'_>) -> Vec<Edge<'t>> {
    let targets = get(manifest, &["target"]).and_then(DeValue::as_table);
    let of_targets =
        targets.into_iter().flat_map(|targets| targets.values()).filter_map(|target| target.get_ref().as_table());
    std::iter::once(manifest)
        .chain(of_targets)
        .flat_map(|table| SECTIONS.iter().map(move |section| (table, *section)))
        .filter_map(|(table, section)| get(table, &[section])?.as_table())
        .flat_map(|dependencies| edges_of(text, dependencies))
        .collect()
}

fn edges_of<'t>(text: &str, dependencies: &'t DeTable<'_>) -> impl Iterator<Item = Edge<'t>> {
    dependencies.iter().map(|(key, value)| {
        let alias: &str = key.get_ref();
        let package = value.get_ref().get("package").map(Spanned::get_ref);
        Edge { to: package.and_then(DeValue::as_str).unwrap_or(alias), alias, line: line_at(text, key.span().start) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_crate(name: &str, rest: &str) -> Vec<Finding> {
        let text = format!("[package]\nname = \"{name}\"\n{rest}");
        check(&format!("crates/{name}/Cargo.toml"), &text)
    }

    #[test]
    fn downward_edges_and_foreign_packages_pass() {
        let rest = "[dependencies]\nridge-graph.workspace = true\nserde = \"1\"\n\
                    [dev-dependencies]\nridge-hw.workspace = true\n";
        assert_eq!(of_crate("ridge-runtime", rest), []);
    }

    #[test]
    fn upward_edge_of_any_kind_is_found_on_its_line() {
        for section in ["dependencies", "build-dependencies", "dev-dependencies", "target.'cfg(unix)'.dependencies"] {
            let rest = format!("[{section}]\nserde = \"1\"\nridge-engine.workspace = true\n");
            let found = of_crate("ridge-graph", &rest);
            assert_eq!(found.len(), 1, "{section}");
            assert_eq!(found[0].line, 5, "{section}");
            assert!(found[0].message.contains("`ridge-engine`"), "{section}");
        }
    }

    #[test]
    fn new_name_does_not_hide_an_upward_edge() {
        let rest = "[dependencies]\nengine = { package = \"ridge-engine\", path = \"..\" }\n";
        assert_eq!(of_crate("ridge-graph", rest).len(), 1);

        let root = "[workspace.dependencies]\nengine = { package = \"ridge-engine\", path = \"x\" }\n";
        assert_eq!(check("Cargo.toml", root).len(), 1);
        let root = "[workspace.dependencies]\nridge-engine = { path = \"x\" }\n";
        assert_eq!(check("Cargo.toml", root), []);
    }

    #[test]
    fn crate_without_a_place_is_found_on_both_ends_of_an_edge() {
        assert_eq!(of_crate("ridge-new", "").len(), 1);
        let rest = "[dependencies]\nridge-new.workspace = true\n";
        assert_eq!(of_crate("ridge-cli", rest).len(), 1);
    }

    #[test]
    fn nothing_depends_on_xtask() {
        let rest = "[dev-dependencies]\nxtask.path = \"../../xtask\"\n";
        assert_eq!(of_crate("ridge-cli", rest).len(), 1);
    }
}
