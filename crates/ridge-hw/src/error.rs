//! What can go wrong here: a specification sheet or a matrix of links that cannot be read, or a device that no sheet
//! describes.
//!
//! Detection itself never fails: what a machine does not tell is `None`.

use crate::spec::Precision;

/// An error of this crate; its message names the thing, the value and the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HwError {
    /// A sheet is not TOML, lacks a key or has one that sheets do not know.
    #[error("{file}: {reason}; see the sheets in crates/ridge-hw/specs for the keys and their units")]
    Sheet {
        /// File name of the sheet.
        file: String,
        /// What the parser said, with line and column.
        reason: String,
    },

    /// A figure of a sheet cannot be true.
    #[error(
        "{file}: {key} = {value}; it must be finite and above zero: correct it, or leave the key out if it is unknown"
    )]
    SheetValue {
        /// File name of the sheet.
        file: String,
        /// Key of the figure.
        key: String,
        /// The value found, in the unit that the key names.
        value: f64,
    },

    /// A figure cites a source that its sheet does not list.
    #[error("{file}: {key} cites the source \"{cited}\", which [sources] does not list (it lists: {}); add it there", .listed.join(", "))]
    SheetSource {
        /// File name of the sheet.
        file: String,
        /// Key of the figure.
        key: String,
        /// The source's key, as cited.
        cited: String,
        /// The keys under `[sources]`.
        listed: Vec<String>,
    },

    /// The text of `nvidia-smi topo -m` has no matrix, or one that contradicts itself.
    #[error("topology, line {line}: {problem}; {remedy}")]
    Topology {
        /// Line of the text, from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        remedy: String,
    },

    /// No sheet has this name.
    #[error("no specification sheet for the device \"{name}\"; did you mean \"{nearest}\"? known: {}", .known.join(", "))]
    UnknownDevice {
        /// The name asked for.
        name: String,
        /// The known name closest to it.
        nearest: String,
        /// The names of all sheets.
        known: Vec<String>,
    },

    /// A device's sheet gives no matrix rate in this precision.
    #[error("{device}: its specification sheet gives no dense {precision} rate; it gives: {}; choose one of these", list(.known))]
    NoRate {
        /// Name of the sheet.
        device: String,
        /// The precision asked for.
        precision: Precision,
        /// The precisions that the sheet has.
        known: Vec<Precision>,
    },
}

fn list(precisions: &[Precision]) -> String {
    precisions.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
