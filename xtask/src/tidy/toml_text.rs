//! TOML with the line of each key, which findings need.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::finding::Finding;

/// Parses a manifest; a text that is no TOML is itself the finding.
pub(super) fn parse<'a>(path: &str, text: &'a str) -> Result<DeTable<'a>, Finding> {
    match DeTable::parse(text) {
        Ok(table) => Ok(table.into_inner()),
        Err(error) => {
            let line = error.span().map_or(1, |span| line_at(text, span.start));
            let message = format!("no TOML ({}); mend the syntax", error.message());
            Err(Finding::failure(path, line, message))
        }
    }
}

/// The value at a path of keys.
pub(super) fn get<'t, 'a>(table: &'t DeTable<'a>, keys: &[&str]) -> Option<&'t DeValue<'a>> {
    let (last, above) = keys.split_last()?;
    let mut table = table;
    for key in above {
        table = table.get(*key)?.get_ref().as_table()?;
    }
    table.get(*last).map(Spanned::get_ref)
}

/// The line, counted from 1, of a byte of the text.
pub(super) fn line_at(text: &str, byte: usize) -> usize {
    1 + text.bytes().take(byte).filter(|&b| b == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_toml_is_a_finding_on_its_line() {
        let finding = parse("Cargo.toml", "[a]\nb = \n").unwrap_err();
        assert_eq!(finding.line, 2, "{finding:?}");
    }

    #[test]
    fn values_are_found_by_their_keys() {
        let table = parse("Cargo.toml", "[a]\nb.c = true\n").unwrap();
        assert_eq!(get(&table, &["a", "b", "c"]).unwrap().as_bool(), Some(true));
        assert!(get(&table, &["a", "c"]).is_none());
        assert!(get(&table, &["a", "b", "c", "d"]).is_none());
    }
}
