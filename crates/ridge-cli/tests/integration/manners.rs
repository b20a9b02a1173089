//! What holds of every command: its help, its completions, its page of the manual, and where it writes.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use crate::common::{command, ridge, stdout};

/// The commands, as the help lists them.
fn commands() -> Vec<String> {
    let help = stdout(&["--help"]);
    let listed = help.split_once("Commands:\n").unwrap().1.split_once("\n\n").unwrap().0;
    let names = listed.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names: Vec<String> = names.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect();
    assert!(names.iter().any(|name| name == "generate") && names.len() >= 8, "{names:?}");
    names.into_iter().filter(|name| name != "help").collect()
}

/// Long flags that the help of a command names as its own.
fn flags(command: &str) -> BTreeSet<String> {
    let help = stdout(&[command, "--help"]);
    let own = help.lines().filter(|line| line.trim_start().starts_with('-'));
    let flags = own.filter_map(|line| line.split([' ', ',']).find(|word| word.starts_with("--")));
    flags.map(str::to_owned).collect()
}

#[test]
fn help_fits_a_terminal_of_80_columns() {
    for name in commands() {
        let output = command(&[&name, "--help"]).env("COLUMNS", "80").output().unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        assert!(help.starts_with(char::is_uppercase) && !help.contains('\x1b'), "{help}");
        for line in help.lines() {
            assert!(line.chars().count() <= 80, "{name}: {line}");
        }
        // An example that was broken continues in a line that does not begin with the command.
        let examples = help.split_once("Examples:\n").map_or("", |(_, rest)| rest.split("\n\n").next().unwrap());
        for line in examples.lines() {
            let example = line.starts_with("  ridge ") || line.starts_with("  source ");
            assert!(example, "an example of {name} is longer than 80 columns: {line}");
        }
    }
}

#[test]
fn pages_of_the_manual_have_every_command_and_every_flag() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(stdout(&["man", "--folder", folder.path().to_str().unwrap()]), "");
    let page = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap().replace('\\', "");
    let main = page("ridge.1");
    assert_eq!(main, stdout(&["man"]).replace('\\', ""));
    for name in commands() {
        assert!(main.contains(&format!("ridge-{name}(1)")), "{name}");
        let page = page(&format!("ridge-{name}.1"));
        assert!(page.contains(&format!(".TH ridge-{name} 1")), "{page}");
        for flag in flags(&name) {
            assert!(page.contains(&format!("fB{flag}fR")), "the page of {name} lacks {flag}");
        }
    }
    for name in ["ridge-plan-serve", "ridge-bench-serve"] {
        assert!(page(&format!("{name}.1")).contains(&format!(".TH {name} 1")), "{name}");
    }
    assert_eq!(page("ridge-plan-serve.1"), stdout(&["man", "plan", "serve"]).replace('\\', ""));
    let ran = ridge(&["man", "plan", "nothing"]);
    assert!(ran.code == 2 && ran.stderr.contains("choose one of: fit, "), "{}", ran.stderr);
    let ran = ridge(&["man", "nothing"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("man nothing: there is no such command; choose one of: generate, "), "{}", ran.stderr);
}

#[test]
fn completions_name_every_command_and_flag_in_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = stdout(&["completions", shell]);
        for name in commands() {
            assert!(script.contains(&name), "{shell} lacks {name}");
            for flag in flags(&name) {
                // Fish has flags without their dashes.
                let flag = if shell == "fish" { format!("-l {}", flag.trim_start_matches('-')) } else { flag };
                assert!(script.contains(&flag), "{shell}: {name} lacks {flag}");
            }
        }
    }
}

/// What bash offers for the last of `words`; `None` if there is no bash.
fn completed(words: &[&str]) -> Option<Vec<String>> {
    let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    let script = format!(
        "set -e\n{}\nCOMP_WORDS=({})\nCOMP_CWORD={}\n_ridge ridge '{}' '{}' || true\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\n",
        stdout(&["completions", "bash"]),
        quoted.join(" "),
        words.len() - 1,
        words[words.len() - 1],
        words[words.len() - 2],
    );
    let bash = Command::new("bash").args(["--norc", "-c", &script]).stdin(Stdio::null()).output().ok()?;
    assert!(bash.status.success(), "{}", String::from_utf8_lossy(&bash.stderr));
    Some(String::from_utf8(bash.stdout).unwrap().lines().map(str::to_owned).collect())
}

#[test]
fn bash_completes_commands_flags_and_values() {
    let Some(generate) = completed(&["ridge", "gen"]) else { ridge_testing::skip!("there is no bash") };
    assert_eq!(generate, ["generate"]);
    assert_eq!(completed(&["ridge", "chat", "--template-v"]).unwrap(), ["--template-variable"]);
    assert_eq!(completed(&["ridge", "generate", "--dtype", "b"]).unwrap(), ["bf16"]);
}

#[test]
fn errors_go_to_standard_error_alone_and_mistakes_of_use_end_with_2() {
    for name in commands() {
        let ran = ridge(&[&name, "--no-such-flag"]);
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{name}");
        assert!(ran.stderr.starts_with("error: ") && ran.stderr.contains("--no-such-flag"), "{}", ran.stderr);
        assert!(!ran.stderr.contains('\x1b'), "{}", ran.stderr);
    }
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    for args in [&["--help"][..], &["man"], &["completions", "zsh"], &["tokenize", "a"], &["inspect"]] {
        let mut child = command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()), "{args:?}");
    }
}
