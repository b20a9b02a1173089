//! The worked problems of `docs/worked`: every command is run and must print what the page shows.

use crate::common::binary;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What the command behind `$ ridge` prints.
fn run(line: &str) -> String {
    let output = binary().args(line.split_whitespace()).current_dir(root().join("fixtures/configs")).output().unwrap();
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The page with the outputs that its commands print, and how many commands it has.
fn executed(page: &str) -> (String, usize) {
    let (mut text, mut commands, mut skipping) = (String::new(), 0, false);
    for line in page.lines() {
        if skipping && line != "```" {
            continue;
        }
        skipping = false;
        text += &format!("{line}\n");
        if let Some(command) = line.strip_prefix("$ ridge ") {
            text += run(command).trim_end();
            text.push('\n');
            commands += 1;
            skipping = true;
        }
    }
    (text, commands)
}

#[test]
fn every_command_of_the_worked_problems_prints_what_its_page_shows() {
    let mut commands = 0;
    for entry in std::fs::read_dir(root().join("docs/worked")).unwrap() {
        let path = entry.unwrap().path();
        let page = std::fs::read_to_string(&path).unwrap();
        let (text, count) = executed(&page);
        commands += count;
        if std::env::var_os("RIDGE_BLESS").is_some() {
            std::fs::write(&path, &text).unwrap();
        } else {
            assert_eq!(page, text, "{}", path.display());
        }
    }
    assert!(commands >= 9, "{commands}");
}
