//! Links: a relative link in Markdown leads to a file or folder of the repository.
//!
//! Links in code, links to other sites and anchors within a page are not followed.

use std::collections::BTreeSet;

use super::finding::Finding;

/// `places` are the files and folders of the repository, from its root, without a slash at the end.
pub(super) fn check(path: &str, text: &str, places: &BTreeSet<String>) -> Vec<Finding> {
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut findings = Vec::new();
    for (line, content) in prose(text) {
        for target in targets(&content) {
            let Some(relative) = relative_path(target) else {
                continue;
            };
            let leads_somewhere = resolve(folder, relative).is_some_and(|place| places.contains(&place));
            if !leads_somewhere {
                let message =
                    format!("link to `{target}`, which is not in the repository; correct the link or add the file");
                findings.push(Finding::failure(path, line, message));
            }
        }
    }
    findings
}

/// The numbered lines outside fenced code, with the code inside them blank.
fn prose(text: &str) -> impl Iterator<Item = (usize, String)> {
    let mut fence: Option<&str> = None;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let trimmed = line.trim_start();
        let marker = fence_marker(trimmed);
        match (fence, marker) {
            (None, None) => return Some((index + 1, without_code(line))),
            (None, Some(_)) => fence = marker,
            (Some(open), Some(close)) => {
                let closes = close.starts_with(open) && trimmed[close.len()..].trim().is_empty();
                if closes {
                    fence = None;
                }
            }
            (Some(_), None) => {}
        }
        None
    })
}

/// The run of three or more backticks or tildes that the line begins with.
fn fence_marker(line: &str) -> Option<&str> {
    let first = line.chars().next().filter(|c| matches!(c, '`' | '~'))?;
    let run = &line[..line.len() - line.trim_start_matches(first).len()];
    (run.len() >= 3).then_some(run)
}

/// The line with its code spans left out.
fn without_code(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(start) = rest.find('`') {
        text.push_str(&rest[..start]);
        let (ticks, after) = split_ticks(&rest[start..]);
        // A run of backticks without its match is text.
        rest = after_code(ticks, after).unwrap_or(after);
    }
    text + rest
}

/// What follows the code span that `ticks` open, if they are closed.
fn after_code<'a>(ticks: &str, mut rest: &'a str) -> Option<&'a str> {
    loop {
        let (close, after) = split_ticks(&rest[rest.find('`')?..]);
        if close.len() == ticks.len() {
            return Some(after);
        }
        rest = after;
    }
}

fn split_ticks(text: &str) -> (&str, &str) {
    text.split_at(text.len() - text.trim_start_matches('`').len())
}

/// The targets of `[text](target)`, `[name]: target` and of HTML's `href` and `src`.
fn targets(line: &str) -> Vec<&str> {
    let inline = line.split("](").skip(1).filter_map(inline_target);
    let html = ["href=\"", "src=\""]
        .into_iter()
        .flat_map(|attribute| line.split(attribute).skip(1))
        .filter_map(|rest| rest.split('"').next());
    inline.chain(definition_target(line)).chain(html).collect()
}

/// The target at the beginning of what follows `](`: to its closing bracket, or to the title.
fn inline_target(rest: &str) -> Option<&str> {
    if let Some(rest) = rest.strip_prefix('<') {
        return rest.split('>').next();
    }
    let mut depth = 0_usize;
    let end = rest.find(|letter: char| {
        match letter {
            '(' => depth += 1,
            ')' if depth == 0 => return true,
            ')' => depth -= 1,
            _ => {}
        }
        letter.is_whitespace()
    })?;
    Some(&rest[..end])
}

/// The target of a line `[name]: target`. A footnote, `[^name]: text`, has none.
fn definition_target(line: &str) -> Option<&str> {
    let (name, rest) = line.trim_start().strip_prefix('[')?.split_once("]:")?;
    if name.starts_with('^') || name.contains(']') {
        return None;
    }
    let target = rest.split_whitespace().next()?;
    Some(target.trim_start_matches('<').trim_end_matches('>'))
}

/// The path of a link into the repository; None for other sites and for anchors within the page.
fn relative_path(target: &str) -> Option<&str> {
    let path = target.split(['#', '?']).next()?;
    let has_scheme = path.split('/').next()?.contains(':');
    (!path.is_empty() && !has_scheme && !path.starts_with("//")).then_some(path)
}

/// The place that a link in `folder` leads to, from the root; None when it leaves the repository.
fn resolve(folder: &str, link: &str) -> Option<String> {
    let link = link.replace("%20", " ");
    // As on the sites that render it, a leading slash is the root of the repository.
    let base = if link.starts_with('/') { "" } else { folder };
    let mut parts: Vec<&str> = Vec::new();
    for part in base.split('/').chain(link.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines with a finding, in `docs/guide.md` of a small repository.
    fn found(text: &str) -> Vec<usize> {
        let places = ["", "README.md", "docs", "docs/guide.md", "docs/my notes.md", "docs/a_(b).md"];
        let places = places.map(str::to_owned).into();
        let findings = check("docs/guide.md", text, &places);
        findings.iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn dead_link_is_found_on_its_line() {
        for text in [
            "one\n[a](gone.md)",
            "one\n[a](guide.md) and [b](gone.md#part)",
            "one\n![a](img/gone.png \"title\")",
            "one\n[a](<gone away.md>)",
            "one\n[name]: gone.md",
            "one\n<img src=\"gone.png\">",
            "one\n<a href=\"gone.md\">",
            "one\n[a](/docs/gone.md)",
            "one\n[a](README.md)",
            "one\n[a](../../README.md)",
            "one\n`code` [a](gone.md) `code`",
        ] {
            assert_eq!(found(text), [2], "{text}");
        }
    }

    #[test]
    fn link_to_a_file_or_folder_passes() {
        for text in [
            "[a](guide.md)",
            "[a](./guide.md#part)",
            "[a](../README.md)",
            "[a](..)",
            "[a](/docs/)",
            "[a](<my notes.md>)",
            "[a](my%20notes.md)",
            "[a](a_(b).md)",
            "[name]: ../README.md \"title\"",
        ] {
            assert!(found(text).is_empty(), "{text}");
        }
    }

    #[test]
    fn other_sites_anchors_and_footnotes_are_not_followed() {
        for text in [
            "[a](https://example.org/gone.md)",
            "[a](mailto:a@example.org)",
            "[a](//example.org/gone.md)",
            "[a](#part)",
            "[^1]: gone.md",
        ] {
            assert!(found(text).is_empty(), "{text}");
        }
    }

    #[test]
    fn code_holds_no_links() {
        assert!(found("`[a](gone.md)`").is_empty());
        assert!(found("``x ` [a](gone.md)``").is_empty());
        assert_eq!(found("```text\n[a](gone.md)\n```\n[b](gone.md)"), [4]);
        assert_eq!(found("~~~\n```\n[a](gone.md)\n~~~\n[b](gone.md)"), [5]);
        assert_eq!(found("a ` b [c](gone.md)"), [1]);
    }
}
