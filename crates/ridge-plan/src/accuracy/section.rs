//! Rows of a source, measured and planned, and their errors.

use std::fmt;

use serde::Serialize;

/// One row of a source, measured and planned.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AccuracyRow {
    /// What it is.
    pub what: String,
    /// Was it in view when efficiencies were chosen?
    pub fit: bool,
    /// As published.
    pub measured: f64,
    /// As planned.
    pub planned: f64,
}

impl AccuracyRow {
    /// Relative error.
    pub fn error(&self) -> f64 {
        self.planned / self.measured - 1.0
    }
}

/// How errors are to be judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorStatistic {
    /// By the mean of absolute errors.
    Mean,
    /// By their median.
    Median,
    /// By the worst.
    Worst,
}

/// One source and quantity.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AccuracySection {
    /// The source and what is compared.
    pub title: String,
    /// Unit of the figures.
    pub unit: &'static str,
    /// What is to be reached.
    pub target: f64,
    /// Of which figure.
    pub judged: ErrorStatistic,
    /// The rows.
    pub rows: Vec<AccuracyRow>,
    /// What stands in the way, where something does.
    pub note: String,
    /// Are single rows shown?
    pub shown: bool,
}

impl AccuracySection {
    /// Mean, median and worst absolute error of the rows that `of` takes; `None` if it takes none.
    pub fn errors(&self, of: impl Fn(&AccuracyRow) -> bool) -> Option<[f64; 3]> {
        let mut errors: Vec<f64> = self.rows.iter().filter(|r| of(r)).map(|r| r.error().abs()).collect();
        errors.sort_by(f64::total_cmp);
        let n = errors.len();
        (n > 0).then(|| [errors.iter().sum::<f64>() / n as f64, errors[n / 2], errors[n - 1]])
    }

    /// Is the target reached by the rows that were held out?
    pub fn reached(&self) -> bool {
        let Some([mean, median, worst]) = self.errors(|r| !r.fit) else { return false };
        let figure = match self.judged {
            ErrorStatistic::Mean => mean,
            ErrorStatistic::Median => median,
            ErrorStatistic::Worst => worst,
        };
        figure <= self.target
    }
}

impl fmt::Display for AccuracySection {
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
            ErrorStatistic::Mean => "mean",
            ErrorStatistic::Median => "median",
            ErrorStatistic::Worst => "worst",
        };
        let verdict = if self.reached() { "reached" } else { "missed" };
        writeln!(f, "  target: {judged} of held-out rows within {:.1} %: {verdict}", 100.0 * self.target)?;
        if self.note.is_empty() { Ok(()) } else { writeln!(f, "  note: {}", self.note) }
    }
}
