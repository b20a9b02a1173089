//! Plans held against published measurements: `cargo xtask accuracy`. Nothing is fitted to a row or a model. Efficiencies
//! belong to devices and classes of op, and to serving programs. Rows are halved by pairs of device and model: shares were
//! searched for over the rows marked `fit` and are judged on those marked `held out`. That half is not blind: the form of
//! the model (what overlaps, which interleavings are tried, bytes of a logit, how a benchmark's clients come) was settled
//! with all rows in view. Notes say so where it counts.

mod collectives;
mod serving;
mod table;
mod training;

use std::fmt;
use std::path::Path;

use serde::Serialize;

/// One row of a source, measured and planned.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// What it is.
    pub what: String,
    /// Was it in view when efficiencies were chosen?
    pub fit: bool,
    /// As published.
    pub measured: f64,
    /// As planned.
    pub planned: f64,
}

impl Row {
    /// Relative error.
    pub fn error(&self) -> f64 {
        self.planned / self.measured - 1.0
    }
}

/// How errors are to be judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Judged {
    /// By the mean of absolute errors.
    Mean,
    /// By their median.
    Median,
    /// By the worst.
    Worst,
}

/// One source and quantity.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Section {
    /// The source and what is compared.
    pub title: String,
    /// Unit of the figures.
    pub unit: &'static str,
    /// What is to be reached.
    pub target: f64,
    /// Of which figure.
    pub judged: Judged,
    /// The rows.
    pub rows: Vec<Row>,
    /// What stands in the way, where something does.
    pub note: String,
    /// Are single rows shown?
    pub shown: bool,
}

impl Section {
    /// Mean, median and worst absolute error of the rows that `of` takes; `None` if it takes none.
    pub fn errors(&self, of: impl Fn(&Row) -> bool) -> Option<[f64; 3]> {
        let mut errors: Vec<f64> = self.rows.iter().filter(|r| of(r)).map(|r| r.error().abs()).collect();
        errors.sort_by(f64::total_cmp);
        let n = errors.len();
        (n > 0).then(|| [errors.iter().sum::<f64>() / n as f64, errors[n / 2], errors[n - 1]])
    }

    /// Is the target reached by the rows that were held out?
    pub fn reached(&self) -> bool {
        let Some([mean, median, worst]) = self.errors(|r| !r.fit) else { return false };
        let figure = match self.judged {
            Judged::Mean => mean,
            Judged::Median => median,
            Judged::Worst => worst,
        };
        figure <= self.target
    }
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        if self.shown {
            for r in &self.rows {
                let half = if r.fit { "fit" } else { "held out" };
                let (m, p) = (r.measured, r.planned);
                writeln!(
                    f,
                    "  {:<44} {m:>10.2} {:<8} planned {p:>10.2}  {:>+7.1} %  {half}",
                    r.what,
                    self.unit,
                    100.0 * r.error()
                )?;
            }
        }
        for (name, fit) in [("fit", true), ("held out", false)] {
            if let Some([mean, median, worst]) = self.errors(|r| r.fit == fit) {
                let n = self.rows.iter().filter(|r| r.fit == fit).count();
                writeln!(
                    f,
                    "  {name:<9} {n:>4} rows: mean {:.1} %, median {:.1} %, worst {:.1} %",
                    100.0 * mean,
                    100.0 * median,
                    100.0 * worst
                )?;
            }
        }
        let judged = match self.judged {
            Judged::Mean => "mean",
            Judged::Median => "median",
            Judged::Worst => "worst",
        };
        let verdict = if self.reached() { "reached" } else { "NOT reached" };
        writeln!(f, "  target: {judged} of what was held out within {:.1} %: {verdict}", 100.0 * self.target)?;
        if self.note.is_empty() { Ok(()) } else { writeln!(f, "  note: {}", self.note) }
    }
}

/// All sections, from the files of `folder` (`fixtures/planner`) and the configurations of `configs`
/// (`fixtures/configs`).
///
/// # Errors
/// Says which file cannot be read or holds what is not understood.
pub fn report(folder: &Path, configs: &Path) -> Result<Vec<Section>, String> {
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
