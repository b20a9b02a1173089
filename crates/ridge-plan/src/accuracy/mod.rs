//! Plans held against published measurements: `cargo xtask accuracy`. Nothing is fitted to a row or a model. Efficiencies
//! belong to devices and classes of op, and to serving programs. Rows are halved by pairs of device and model: shares were
//! searched for over the rows marked `fit` and are judged on those marked `held out`. That half is not blind: the form of
//! the model (what overlaps, which interleavings are tried, bytes of a logit, how a benchmark's clients come) was settled
//! with all rows in view. Notes say so where it counts.

mod collectives;
mod section;
mod serving;
mod table;
mod training;

use std::path::Path;

pub use section::{AccuracyRow, AccuracySection, ErrorStatistic};

/// All sections, from the files of `folder` (`fixtures/planner`) and the configurations of `configs`
/// (`fixtures/configs`).
///
/// # Errors
/// Says which file cannot be read or holds what is not understood.
pub fn report(folder: &Path, configs: &Path) -> Result<Vec<AccuracySection>, String> {
    let mut sections = training::sections(folder, configs)?;
    sections.extend(collectives::sections(folder)?);
    sections.extend(serving::sections(folder, configs)?);
    Ok(sections)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::reading::Reading;

    /// The reading of a configuration of `fixtures/configs`.
    pub(crate) fn reading(name: &str) -> Reading {
        let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/configs");
        Reading::from_json(name, &std::fs::read_to_string(configs.join(format!("{name}.json"))).unwrap()).unwrap()
    }
}
