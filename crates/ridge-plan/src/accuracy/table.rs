//! Small tables of comma-separated values with comments.

use std::collections::HashMap;
use std::path::Path;

/// One row by column.
pub(super) struct Record(HashMap<String, String>);

impl Record {
    pub(super) fn text(&self, column: &str) -> &str {
        self.0.get(column).map_or("", String::as_str)
    }

    pub(super) fn number(&self, column: &str) -> Result<f64, String> {
        self.text(column).parse().map_err(|_| format!("{column} = {:?} is no number", self.text(column)))
    }

    pub(super) fn count(&self, column: &str) -> Result<usize, String> {
        self.number(column).map(|n| n as usize)
    }

    /// A count, 1 where it is empty or 0.
    pub(super) fn degree(&self, column: &str) -> usize {
        self.count(column).unwrap_or(1).max(1)
    }
}

/// The rows of `name` in `folder`.
pub(super) fn read(folder: &Path, name: &str) -> Result<Vec<Record>, String> {
    let path = folder.join(name);
    let text = std::fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    let mut lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let header: Vec<&str> = lines.next().ok_or_else(|| format!("{name} is empty"))?.split(',').collect();
    let record =
        |line: &str| Record(header.iter().map(|h| (*h).to_owned()).zip(line.split(',').map(str::to_owned)).collect());
    Ok(lines.map(record).collect())
}
