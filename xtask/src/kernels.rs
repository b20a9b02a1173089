//! `cargo xtask kernels`: the compile check of the GPU kernels, which needs no GPU.

use std::path::Path;

use crate::error::Error;
use crate::{Command, Outcome};

const KERNELS: &str = "crates/ridge-cuda/kernels";

pub(crate) const COMMAND: Command = Command {
    name: "kernels",
    summary: "Compile the GPU kernels, where there are any",
    help: "\
Compile the GPU kernels in crates/ridge-cuda/kernels, without a GPU.

Usage: cargo xtask kernels

While that folder does not exist the check is skipped, says so, and passes.
",
    run,
};

fn run(root: &Path) -> Result<Outcome, Error> {
    // A folder of kernels that nothing compiles must not pass for checked.
    if root.join(KERNELS).exists() {
        return Err(Error::KernelsUnchecked(KERNELS.into()));
    }
    Ok(Outcome { report: format!("kernels: skipped, {KERNELS} does not exist yet\n"), passed: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_kernels_are_skipped_aloud() {
        let outcome = run(Path::new("no/such/root")).unwrap();
        assert!(outcome.passed);
        assert_eq!(outcome.report, "kernels: skipped, crates/ridge-cuda/kernels does not exist yet\n");
    }

    #[test]
    fn kernels_that_nothing_compiles_do_not_pass() {
        let root = std::env::temp_dir().join(format!("xtask-kernels-{}", std::process::id()));
        std::fs::create_dir_all(root.join(KERNELS)).unwrap();
        let result = run(&root);
        std::fs::remove_dir_all(&root).unwrap();
        assert!(matches!(result, Err(Error::KernelsUnchecked(_))));
    }
}
