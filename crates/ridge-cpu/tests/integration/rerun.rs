//! Tests that run tests of this binary again, in a process of their own.

use std::process::{Command, Output};

/// Names the environment variable that selects an instruction set.
pub(crate) const ISA_VARIABLE: &str = "RIDGE_CPU_ISA";

/// The instruction sets that this machine has beside the one of this process; none where [`ISA_VARIABLE`] asks for one.
pub(crate) fn instruction_sets_beside_ours() -> Vec<&'static str> {
    if std::env::var_os(ISA_VARIABLE).is_some() {
        return Vec::new();
    }
    let mut all = ridge_cpu::instruction_sets();
    all.retain(|isa| *isa != ridge_cpu::instruction_set());
    all
}

/// Runs these tests of this binary, named in full, in a process of their own with these environment variables set.
/// Gives whether all of them passed, and what was printed.
pub(crate) fn rerun(tests: &[&str], variables: &[(&str, &str)]) -> (bool, String) {
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
        .envs(variables.iter().copied())
        .env_remove(ridge_testing::SKIPPED_TESTS)
        .output()
        .expect("the binary runs");
    let printed = String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
    let all = printed.contains(&format!("{} passed", tests.len()));
    (status.success() && all, printed)
}

/// Tests that run `$tests` again with an instruction set beside this process's own, each test with one.
macro_rules! with_instruction_sets {
    ($tests:expr, $($name:ident: $isa:literal,)*) => {
        $(
            #[test]
            fn $name() {
                if !crate::rerun::instruction_sets_beside_ours().contains(&$isa) {
                    ridge_testing::skip!("this machine has no {}, or the tests themselves are run with it", $isa);
                }
                let (passed, printed) = crate::rerun::rerun(&$tests, &[(crate::rerun::ISA_VARIABLE, $isa)]);
                assert!(passed, "{printed}");
            }
        )*
    };
}
pub(crate) use with_instruction_sets;
