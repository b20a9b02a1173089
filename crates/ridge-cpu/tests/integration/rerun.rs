//! Tests that run tests of this binary again, in a process of their own.

use std::process::{Command, Output};

/// Runs these tests of this binary, named in full, in a process of their own with the environment variable `name` set.
/// Gives whether all of them passed, and what was printed.
pub(crate) fn rerun(tests: &[&str], (name, value): (&str, &str)) -> (bool, String) {
    let binary = std::env::current_exe().expect("tests have a binary");
    // What runs binaries of a foreign architecture, as cargo was told.
    let runner = format!("CARGO_TARGET_{}_UNKNOWN_LINUX_GNU_RUNNER", std::env::consts::ARCH.to_uppercase());
    let runner = std::env::var(runner).unwrap_or_default();
    let mut words = runner.split_whitespace();
    let mut command = words.next().map_or_else(|| Command::new(&binary), Command::new);
    if !runner.trim().is_empty() {
        command.args(words).arg(&binary);
    }
    let Output { status, stdout, stderr } = command
        .arg("--exact")
        .args(tests)
        .env(name, value)
        .env_remove(ridge_testing::SKIPPED_TESTS)
        .output()
        .expect("the binary runs");
    let printed = String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
    let all = printed.contains(&format!("{} passed", tests.len()));
    (status.success() && all, printed)
}

/// Tests that run `$tests` again with an instruction set below the machine's best, each test with one.
macro_rules! with_instruction_sets {
    ($tests:expr, $($name:ident: $isa:literal,)*) => {
        $(
            #[test]
            fn $name() {
                let (passed, printed) = crate::rerun::rerun(&$tests, ("RIDGE_CPU_ISA", $isa));
                if printed.contains("is none of what this machine has") {
                    assert!(!passed && $isa != "portable", "{printed}");
                    ridge_testing::skip!("this machine has no {}", $isa);
                }
                assert!(passed, "{printed}");
            }
        )*
    };
}
pub(crate) use with_instruction_sets;
