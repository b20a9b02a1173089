//! The targets of a release, and which of them this machine can build.

use std::path::Path;
use std::process::Command;

use crate::error::XtaskError;
use crate::run::finish;

/// A target of a release.
pub(super) struct Target {
    pub(super) triple: &'static str,
    /// The C compiler of Debian and its relatives that links for it from another machine; without one, its own system
    /// is needed.
    cross_compiler: Option<&'static str>,
    /// How its name ends on every system that can link for it with no further linker.
    native: &'static str,
}

pub(super) const TARGETS: &[Target] = &[
    Target {
        triple: "x86_64-unknown-linux-gnu",
        cross_compiler: Some("x86_64-linux-gnu-gcc"),
        native: "x86_64-unknown-linux-gnu",
    },
    Target {
        triple: "aarch64-unknown-linux-gnu",
        cross_compiler: Some("aarch64-linux-gnu-gcc"),
        native: "aarch64-unknown-linux-gnu",
    },
    Target { triple: "aarch64-apple-darwin", cross_compiler: None, native: "apple-darwin" },
    Target { triple: "x86_64-apple-darwin", cross_compiler: None, native: "apple-darwin" },
];

/// What this machine builds with.
pub(super) struct Tools {
    /// The target of rustc itself.
    pub(super) host: String,
    /// Whether the standard library for a target is installed.
    library: fn(&str) -> bool,
    /// Whether a program runs.
    program: fn(&str) -> bool,
}

impl Tools {
    /// Asks rustc.
    pub(super) fn detect() -> Result<Self, XtaskError> {
        let version = finish(Command::new("rustc").arg("-vV"))?;
        let host = version.stdout.lines().find_map(|line| line.strip_prefix("host: "));
        let host = host.ok_or_else(|| XtaskError::NoReport("rustc -vV names no host".to_owned()))?.to_owned();
        Ok(Self { host, library: has_library, program: |name| finish(Command::new(name).arg("--version")).is_ok() })
    }
}

fn has_library(triple: &str) -> bool {
    let printed = finish(Command::new("rustc").args(["--print", "target-libdir", "--target", triple]));
    let files = printed.ok().and_then(|said| Path::new(said.stdout.trim()).read_dir().ok());
    files.is_some_and(|files| files.flatten().any(|file| file.file_name().to_string_lossy().starts_with("libcore-")))
}

impl Target {
    /// The linker to name, `None` for the default one, or why it cannot be built here.
    pub(super) fn linker(&self, tools: &Tools) -> Result<Option<String>, String> {
        let triple = self.triple;
        let native = tools.host.ends_with(self.native);
        if !native && self.cross_compiler.is_none() {
            return Err("it is built on macOS".to_owned());
        }
        if !(tools.library)(triple) {
            return Err(format!("the target is not installed (rustup target add {triple})"));
        }
        match self.cross_compiler {
            _ if native => Ok(None),
            Some(compiler) if (tools.program)(compiler) => Ok(Some(compiler.to_owned())),
            Some(compiler) => Err(format!("its linker is not installed ({compiler})")),
            None => Ok(None),
        }
    }
}

/// The newest version of glibc whose symbols a program names; `None` for one that names none.
pub(super) fn needed_glibc(program: &[u8]) -> Option<String> {
    let marker = b"GLIBC_2.";
    let starts = program.windows(marker.len()).enumerate().filter(|(_, found)| found == marker).map(|(at, _)| at);
    let minor = |at: usize| {
        let digits = program[at + marker.len()..].iter().take_while(|byte| byte.is_ascii_digit());
        digits.take(3).fold(0, |number, digit| number * 10 + u32::from(digit - b'0'))
    };
    starts.map(minor).max().map(|minor| format!("2.{minor}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(host: &str, library: fn(&str) -> bool, program: fn(&str) -> bool) -> Tools {
        Tools { host: host.to_owned(), library, program }
    }

    fn find(triple: &str) -> &'static Target {
        TARGETS.iter().find(|target| target.triple == triple).unwrap()
    }

    #[test]
    fn what_is_missing_is_the_reason() {
        let arm = find("aarch64-unknown-linux-gnu");
        let mac = find("aarch64-apple-darwin");
        let linux = "x86_64-unknown-linux-gnu";
        let reason = arm.linker(&tools(linux, |_| false, |_| true)).unwrap_err();
        assert!(reason.contains("rustup target add aarch64-unknown-linux-gnu"), "{reason}");
        let reason = arm.linker(&tools(linux, |_| true, |_| false)).unwrap_err();
        assert!(reason.contains("aarch64-linux-gnu-gcc"), "{reason}");
        assert_eq!(arm.linker(&tools(linux, |_| true, |_| true)).unwrap().as_deref(), Some("aarch64-linux-gnu-gcc"));
        assert!(mac.linker(&tools(linux, |_| true, |_| true)).unwrap_err().contains("macOS"));
    }

    #[test]
    fn macs_of_either_kind_link_for_each_other() {
        let mac = "aarch64-apple-darwin";
        assert_eq!(find("x86_64-apple-darwin").linker(&tools(mac, |_| true, |_| false)), Ok(None));
    }

    #[test]
    fn the_newest_symbol_of_glibc_counts() {
        assert_eq!(needed_glibc(b"..GLIBC_2.4\0GLIBC_2.35\0GLIBC_2.17\0").as_deref(), Some("2.35"));
        assert_eq!(needed_glibc(b"GLIBC_PRIVATE"), None);
    }
}
