//! Words and phrases that no document may contain, as C4 leaves out pages with a word of a published list (Raffel et al. 2020,
//! section 2.2).

use std::path::PathBuf;

use aho_corasick::AhoCorasick;

use crate::error::{Result, TrainError, io_error};

/// Words and phrases that are looked for in one pass over a text.
#[derive(Clone, Debug)]
pub struct Blocklist {
    entries: Vec<Entry>,
    automaton: AhoCorasick,
}

#[derive(Clone, Debug, PartialEq)]
struct Entry {
    /// As [`folded`] gives it.
    text: String,
    /// Whether a word must begin where it begins, and end where it ends.
    edges: [bool; 2],
}

impl PartialEq for Blocklist {
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

impl Blocklist {
    /// The lines of all `files`, each a word or a phrase in any language; blank lines count for nothing.
    ///
    /// # Errors
    /// When a file cannot be read, is not UTF-8, or has no words.
    pub fn read(files: &[PathBuf]) -> Result<Self> {
        let mut words = Vec::new();
        for file in files {
            let text = std::fs::read_to_string(file).map_err(|cause| io_error(file, "read the blocklist", &cause))?;
            // Editors of Windows begin files with a byte order mark.
            let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
            let before = words.len();
            words.extend(text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned));
            if words.len() == before {
                return Err(TrainError::path(file, "it has no words", "give a file with a word or a phrase a line"));
            }
        }
        Self::new(&words)
    }

    /// Of these words and phrases, none of them blank.
    ///
    /// # Errors
    /// When they are too many to look for at once.
    pub fn new(words: &[impl AsRef<str>]) -> Result<Self> {
        let mut entries: Vec<Entry> = words.iter().map(|word| Entry::of(word.as_ref())).collect();
        entries.sort_by(|a, b| a.text.cmp(&b.text));
        entries.dedup();
        let automaton = AhoCorasick::new(entries.iter().map(|entry| &entry.text))
            .map_err(|error| TrainError::setting("blocklist", format!("{} words", entries.len()), error.to_string()))?;
        Ok(Self { entries, automaton })
    }

    /// Does `text` contain one, however it is capitalised and spaced?
    pub fn is_in(&self, text: &str) -> bool {
        let text = folded(text);
        // Where a longer entry is no whole word, a shorter one within it may be.
        self.automaton.find_overlapping_iter(&text).any(|found| {
            let [begins, ends] = self.entries[found.pattern().as_usize()].edges;
            let (ahead, behind) = (&text[..found.start()], &text[found.end()..]);
            let goes_on = begins && ahead.ends_with(is_in_word) || ends && behind.starts_with(is_in_word);
            !goes_on
        })
    }
}

impl Entry {
    fn of(word: &str) -> Self {
        let text = folded(word.trim());
        let is_edge = |c: Option<char>| c.is_some_and(|c| is_in_word(c) && !is_unspaced(c));
        let edges = [is_edge(text.chars().next()), is_edge(text.chars().next_back())];
        Self { text, edges }
    }
}

/// In lower case, with a space for any run of white space, and with one sigma, which capitals do not tell from that at the end of a
/// word.
fn folded(text: &str) -> String {
    let mut folded = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_whitespace() {
            true if folded.ends_with(' ') => {}
            true => folded.push(' '),
            false => folded.extend(c.to_lowercase().map(|c| if c == '\u{3c2}' { '\u{3c3}' } else { c })),
        }
    }
    folded
}

fn is_in_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || is_mark(c)
}

/// Is it a mark on a letter that is not alphabetic itself: an accent, a point or sign of Hebrew or Arabic, or a nukta or virama of India
/// (Unicode 17, general category Mn)?
fn is_mark(c: char) -> bool {
    matches!(
        u32::from(c),
        0x0300..=0x036f
            | 0x0483..=0x0487
            | 0x0591..=0x05bd
            | 0x05bf
            | 0x05c1..=0x05c2
            | 0x05c4..=0x05c5
            | 0x05c7
            | 0x064b..=0x065f
            | 0x0670
            | 0x093c | 0x094d | 0x09bc | 0x09cd | 0x0a3c | 0x0a4d | 0x0abc | 0x0acd | 0x0b3c | 0x0b4d
            | 0x0bcd | 0x0c3c | 0x0c4d | 0x0cbc | 0x0ccd | 0x0d3b..=0x0d3c | 0x0d4d | 0x0dca
            | 0x1ab0..=0x1aff
            | 0x1dc0..=0x1dff
            | 0xfe20..=0xfe2f
    )
}

/// Is it of a script without spaces between words: Thai, Lao, Burmese, Khmer, Japanese or Chinese (Unicode 17, blocks)?
fn is_unspaced(c: char) -> bool {
    matches!(
        u32::from(c),
        0x0e00..=0x0eff
            | 0x1000..=0x109f
            | 0x1780..=0x17ff
            | 0x3005..=0x3007
            | 0x3040..=0x30ff
            | 0x31f0..=0x31ff
            | 0x3400..=0x4dbf
            | 0x4e00..=0x9fff
            | 0xf900..=0xfaff
            | 0xff66..=0xff9f
            | 0x20000..=0x3ffff
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(words: &[&str]) -> Blocklist {
        Blocklist::new(words).expect("is built")
    }

    #[test]
    fn words_are_found_whole_and_in_any_capitals() {
        let list = list(&["darn", "Blast It", "\u{e9}t\u{e9}"]);
        for text in ["Darn!", "(darn)", "oh, DARN", "darn", "blast\n it all", "un \u{c9}T\u{c9} chaud", "a.darn.b"] {
            assert!(list.is_in(text), "{text}");
        }
        for text in ["darning socks", "undarn", "darn_it", "darn2", "blast item", "blastit", "l\u{e9}t\u{e9}", ""] {
            assert!(!list.is_in(text), "{text}");
        }
    }

    #[test]
    fn marks_belong_to_their_letters_and_a_sigma_is_one() {
        let list = list(&["cafe", "e\u{301}te\u{301}", "\u{3bb}\u{3cc}\u{3b3}\u{3bf}\u{3c2}", "\u{915}"]);
        assert!(list.is_in("le cafe!") && !list.is_in("le cafe\u{301}"), "an accent makes another word");
        assert!(list.is_in("un E\u{301}TE\u{301} chaud") && !list.is_in("e\u{301}te\u{301}s"));
        assert!(list.is_in("\u{39b}\u{38c}\u{393}\u{39f}\u{3a3}"), "a capital sigma at the end");
        assert!(list.is_in("\u{915}") && !list.is_in("\u{915}\u{94d}\u{937}"), "a virama joins");
    }

    #[test]
    fn a_word_within_a_longer_one_that_does_not_count_is_found() {
        let list = list(&["a b c", "b", "b c d"]);
        assert!(list.is_in("a b cx"), "`a b c` is no whole word there, `b` is");
        assert!(!list.is_in("ab cd"));
    }

    #[test]
    fn scripts_without_spaces_have_no_boundaries() {
        let list = list(&["\u{99ac}\u{9e7f}", "\u{30d0}\u{30ab}", "\u{0e1a}\u{0e49}\u{0e32}", "\u{bc14}\u{bcf4}"]);
        for text in [
            "\u{4f60}\u{99ac}\u{9e7f}\u{554a}",
            "\u{30d0}\u{30ab}\u{3060}",
            "\u{0e04}\u{0e19}\u{0e1a}\u{0e49}\u{0e32}\u{0e21}\u{0e32}\u{0e01}",
            "\u{bc14}\u{bcf4}!",
        ] {
            assert!(list.is_in(text), "{text}");
        }
        // Korean has spaces.
        assert!(!list.is_in("\u{bc14}\u{bcf4}\u{c0c1}"));
    }

    #[test]
    fn symbols_are_found_beside_letters() {
        let list = list(&["\u{1f595}", "c**p"]);
        assert!(list.is_in("no\u{1f595}way") && list.is_in("what c**p."));
        assert!(!list.is_in("what c**ps."));
    }

    #[test]
    fn files_are_read_together_and_mistakes_are_named() {
        let dir = tempfile::tempdir().expect("is made");
        let file = |name: &str, text: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).expect("writes");
            path
        };
        let (en, de) = (file("en", b"darn\r\n\r\nblast it \r\n"), file("de", "mist\ndarn\n".as_bytes()));
        let read = Blocklist::read(&[en.clone(), de]).expect("reads");
        assert_eq!(read, list(&["mist", "blast it", "darn"]));
        let marked = Blocklist::read(&[file("marked", b"\xef\xbb\xbfdarn\n")]).expect("reads");
        assert!(marked.is_in("darn"), "a byte order mark is no part of a word");
        let error = |path: PathBuf| Blocklist::read(&[en.clone(), path]).expect_err("is refused").to_string();
        assert!(
            error(file("blank", b" \n"))
                .ends_with("blank: it has no words; give a file with a word or a phrase a line")
        );
        assert!(error(file("latin", b"caf\xe9")).contains("cannot read the blocklist"), "it is not UTF-8");
        assert!(error(dir.path().join("none")).contains("cannot read the blocklist"));
    }
}
