//! Manifests: every crate takes the workspace's lints and says in a line what it is.

use toml::de::DeValue;

use super::finding::Finding;
use super::toml_text::{get, parse};

/// Is the path the manifest of a crate of the workspace?
pub(super) fn is_crate(path: &str) -> bool {
    matches!(path.split('/').collect::<Vec<_>>().as_slice(), ["crates", _, "Cargo.toml"] | ["xtask", "Cargo.toml"])
}

pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    let manifest = match parse(path, text) {
        Ok(manifest) => manifest,
        Err(finding) => return vec![finding],
    };
    if !is_crate(path) {
        return Vec::new();
    }
    let mut findings = Vec::new();
    let lints = get(&manifest, &["lints", "workspace"]).and_then(DeValue::as_bool);
    if lints != Some(true) {
        findings.push(Finding::failure(
            path,
            1,
            "the workspace's lints are not taken; add `[lints]` with `workspace = true`",
        ));
    }
    let description = get(&manifest, &["package", "description"]).and_then(DeValue::as_str);
    if description.is_none_or(|text| text.trim().is_empty()) {
        findings.push(Finding::failure(path, 1, "no description; say in `[package]` in one line what the crate is"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: &str = "crates/ridge-hw/Cargo.toml";

    #[test]
    fn lints_and_description_are_owed() {
        let whole = "[package]\ndescription = \"Sheets.\"\n[lints]\nworkspace = true\n";
        assert_eq!(check(PATH, whole), []);
        for missing in [
            "[package]\ndescription = \"Sheets.\"\n",
            "[package]\ndescription = \"Sheets.\"\n[lints]\nworkspace = false\n",
            "[package]\ndescription = \"Sheets.\"\n[lints.rust]\nunsafe_code = \"allow\"\n",
            "[package]\n[lints]\nworkspace = true\n",
            "[package]\ndescription = \" \"\n[lints]\nworkspace = true\n",
        ] {
            assert_eq!(check(PATH, missing).len(), 1, "{missing}");
        }
    }

    #[test]
    fn only_crates_of_the_workspace_owe_them() {
        assert_eq!(check("Cargo.toml", "[workspace]\n"), []);
        assert_eq!(check("crates/ridge-hw/fuzz/Cargo.toml", "[package]\n"), []);
        assert_eq!(check("xtask/Cargo.toml", "[package]\n").len(), 2);
    }

    #[test]
    fn broken_manifest_is_found() {
        assert_eq!(check(PATH, "[package\n").len(), 1);
    }
}
