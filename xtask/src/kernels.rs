//! `cargo xtask kernels`: the compile check of the GPU kernels, which needs no GPU.

use std::path::Path;

use crate::error::XtaskError;
use crate::run::{ProgramOutput, cargo};
use crate::task::{Task, TaskOutcome, TaskRun};

/// The architectures of A100, L4 and RTX 4090, and H100 and H200.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_89", "sm_90a"];

/// The exit code by which the check says that there is no NVRTC.
const NO_COMPILER: i32 = 3;

pub(crate) const TASK: Task = Task {
    name: "kernels",
    summary: "Compile the GPU kernels, without a GPU",
    help: "\
Compile the kernels of ridge-cuda for every op of the registry in every dtype, for sm_80, sm_89 and sm_90a, and
print the registers, spills and shared memory of each. A kernel that does not compile, or spills, fails the check. If
nvdisasm is found, so does one whose hot loop lacks the instructions that its header claims, such as TMA copies and wgmma.

Usage: cargo xtask kernels

It needs NVRTC but no GPU. NVRTC is searched like in `ridge doctor`: in the system, in CUDA_HOME, and in the active Python
environment (pip install nvidia-cuda-nvrtc). Without NVRTC the check is skipped with a message and passes.
",
    run: TaskRun::Plain(run),
};

fn run(root: &Path) -> Result<TaskOutcome, XtaskError> {
    let args = ["run", "--quiet", "--package", "ridge-cuda", "--example", "kernels", "--"];
    Ok(outcome(&cargo(root, &[&args[..], &ARCHITECTURES].concat())?))
}

fn outcome(ran: &ProgramOutput) -> TaskOutcome {
    match ran.code {
        Some(NO_COMPILER) => TaskOutcome { report: format!("kernels: skipped, {}", ran.stdout), passed: true },
        code => TaskOutcome { report: format!("{}{}", ran.stdout, ran.stderr), passed: code == Some(0) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(code: Option<i32>) -> TaskOutcome {
        outcome(&ProgramOutput { code, stdout: "what was found\n".to_owned(), stderr: String::new() })
    }

    #[test]
    fn a_missing_compiler_is_told_and_passes() {
        let outcome = of(Some(NO_COMPILER));
        assert!(outcome.passed);
        assert_eq!(outcome.report, "kernels: skipped, what was found\n");
    }

    #[test]
    fn kernels_that_fail_or_a_check_that_dies_do_not_pass() {
        assert!(of(Some(0)).passed);
        assert!(!of(Some(1)).passed && !of(Some(101)).passed && !of(None).passed);
    }
}
