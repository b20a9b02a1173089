//! `cargo xtask tidy`: house rules that rustc, clippy and rustfmt do not check.
//!
//! Each rule is one file below, a pure function from a path and its text to [`Finding`]s, so that its tests need no
//! tree. Read [`files_of_the_repository`](tree::files_of_the_repository) for what is checked, [`check_file`] for the
//! rules in order, and [`rust_text`] for how code is told from comments and strings.

mod characters;
mod cycles;
mod edges;
mod finding;
mod headers;
mod imports;
mod links;
mod machine_paths;
mod manifests;
mod rust_text;
mod size;
mod toml_text;
mod tree;
mod unfinished;
mod unsafe_code;

use std::collections::BTreeSet;
use std::path::Path;

use crate::error::XtaskError;
use crate::task::{Task, TaskOutcome, TaskRun};
use finding::{Finding, Level};
use rust_text::RustText;
use tree::RepoFile;

pub(crate) const TASK: Task = Task {
    name: "tidy",
    summary: "Check the house rules for every file of the repository",
    help: "\
Check the house rules for every file that git tracks, and every untracked file that git does not ignore.

Usage: cargo xtask tidy

A finding is a line `path:line: what is wrong; what to do`. Warnings are marked as such and do not fail the check.

  edges       a crate depends only on crates below it, as ARCHITECTURE.md lists them
  cycles      no import cycles between the files of a crate
  manifests   every crate uses the workspace's lints and has a description
  headers     every source file opens with a `//!` comment that describes its contents
  unsafe      only in ridge-cpu, ridge-cuda, ridge-comm/src/shared_memory*, ridge-files/src/mapped* and python/src/tensor*
  unfinished  no placeholder macros, no TODO notes, no ignored test without a reason
  size        .rs files: warning above 500 lines, failure above 700; no file above 4 MB outside models/
  characters  no trailing whitespace, CRLF or non-ASCII identifiers, no tabs in .rs, .md and .toml, one newline at the
              end of a file; models/, tests/data/ and .jinja files are exempt
  paths       no absolute path of one machine in any text
  links       relative links in Markdown point to a file of the repository

Exit code: 0 without failures, 1 with failures, 2 when git or a file could not be read.
",
    run: TaskRun::Plain(run),
};

fn run(root: &Path) -> Result<TaskOutcome, XtaskError> {
    let files = tree::files_of_the_repository(root)?;
    let places = tree::places(files.iter().map(|file| file.path.as_str()));
    let mut findings: Vec<Finding> = files.iter().flat_map(|file| check_file(file, &places)).collect();
    findings.extend(cycles::check(&files));
    findings.sort();
    Ok(report(&findings, files.len()))
}

/// All rules over one file. `places` are the files and folders that a link may lead to.
fn check_file(file: &RepoFile, places: &BTreeSet<String>) -> Vec<Finding> {
    let path = file.path.as_str();
    let mut findings = size::check_bytes(path, file.bytes);
    let Some(text) = file.text.as_deref() else {
        return findings;
    };
    findings.extend(characters::check(path, text));
    findings.extend(machine_paths::check(path, text));
    if path.ends_with(".rs") {
        let rust = RustText::split(text);
        findings.extend(size::check_lines(path, text));
        findings.extend(headers::check(path, text));
        findings.extend(characters::check_identifiers(path, &rust));
        findings.extend(unsafe_code::check(path, &rust));
        findings.extend(unfinished::check(path, &rust));
    } else if path.ends_with("Cargo.toml") {
        findings.extend(edges::check(path, text));
        findings.extend(manifests::check(path, text));
    } else if path.ends_with(".md") {
        findings.extend(links::check(path, text, places));
    }
    findings
}

fn report(findings: &[Finding], files: usize) -> TaskOutcome {
    let mut report = String::new();
    for Finding { path, line, level, message } in findings {
        let mark = match level {
            Level::Failure => "",
            Level::Warning => "warning: ",
        };
        report += &format!("{path}:{line}: {mark}{message}\n");
    }
    let warnings = findings.iter().filter(|finding| finding.level == Level::Warning).count();
    let failures = findings.len() - warnings;
    report += &format!("tidy: {files} files, {failures} failures, {warnings} warnings\n");
    TaskOutcome { report, passed: failures == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> RepoFile {
        RepoFile { path: path.to_owned(), bytes: text.len() as u64, text: Some(text.to_owned()) }
    }

    #[test]
    fn every_rule_for_rust_files_is_applied() {
        let text = format!("fn f() {{ unsafe {{ todo!() }} }} \n// {}\nlet \u{e9} = 1;\n", machine_paths::example());
        let found = check_file(&file("crates/ridge-hw/src/lib.rs", &text), &BTreeSet::new());
        // Trailing whitespace, a machine's path, no header, a non-ASCII identifier, unsafe, unfinished.
        assert_eq!(found.len(), 6, "{found:#?}");
    }

    #[test]
    fn every_rule_for_manifests_is_applied() {
        let text = "[package]\nname = \"ridge-hw\"\n[dependencies]\nridge-cli.workspace = true\n";
        let found = check_file(&file("crates/ridge-hw/Cargo.toml", text), &BTreeSet::new());
        // An upward edge, no lints, no description.
        assert_eq!(found.len(), 3, "{found:#?}");
    }

    #[test]
    fn links_of_markdown_files_are_followed() {
        let found = check_file(&file("README.md", "[gone](gone.md)\n"), &BTreeSet::new());
        assert_eq!(found.len(), 1, "{found:#?}");
    }

    #[test]
    fn failures_fail_and_warnings_do_not() {
        let failure = Finding::failure("a.rs", 3, "wrong; fix it");
        let warning = Finding::warning("b.rs", 1, "long; split it");

        let outcome = report(std::slice::from_ref(&warning), 2);
        assert!(outcome.passed);
        assert_eq!(outcome.report, "b.rs:1: warning: long; split it\ntidy: 2 files, 0 failures, 1 warnings\n");

        let outcome = report(&[failure, warning], 2);
        assert!(!outcome.passed);
        assert!(outcome.report.starts_with("a.rs:3: wrong; fix it\n"));
    }
}
