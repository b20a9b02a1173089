//! Which documents are worth training on, by what can be counted (Rae et al. 2021, "Scaling Language Models: Methods,
//! Analysis & Insights from Training Gopher", table A1).

/// What a document must have.
#[derive(Clone, Debug, PartialEq)]
pub struct Filters {
    /// The least number of characters.
    pub min_characters: usize,
    /// The largest number of characters.
    pub max_characters: usize,
    /// Whether the rules of Gopher hold: 50 to 100,000 words of 3 to 10 characters on average, at most a tenth as many `#` and
    /// ellipses as words, less than 90 % of lines that begin with a bullet and 30 % that end with an ellipsis, four fifths of
    /// words with a letter, and two of the most frequent words of English.
    pub gopher: bool,
}

impl Default for Filters {
    fn default() -> Self {
        Self { min_characters: 1, max_characters: usize::MAX, gopher: false }
    }
}

impl Filters {
    /// Why `text` is left out.
    pub fn refusal(&self, text: &str) -> Option<&'static str> {
        let characters = text.chars().count();
        if characters < self.min_characters {
            return Some("too short");
        }
        if characters > self.max_characters {
            return Some("too long");
        }
        if self.gopher { gopher(text) } else { None }
    }
}

fn gopher(text: &str) -> Option<&'static str> {
    const FREQUENT: [&str; 8] = ["the", "be", "to", "of", "and", "that", "have", "with"];
    let (mut words, mut letters, mut with_letter, mut frequent) = (0_usize, 0_usize, 0_usize, [false; 8]);
    for word in text.split_whitespace() {
        words += 1;
        letters += word.chars().count();
        with_letter += usize::from(word.chars().any(char::is_alphabetic));
        if let Some(at) = FREQUENT.iter().position(|known| word.eq_ignore_ascii_case(known)) {
            frequent[at] = true;
        }
    }
    if !(50..=100_000).contains(&words) {
        return Some("number of words");
    }
    if !(3 * words..=10 * words).contains(&letters) {
        return Some("length of words");
    }
    let symbols = text.matches('#').count() + text.matches("...").count() + text.matches('\u{2026}').count();
    if symbols * 10 > words {
        return Some("symbols");
    }
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let bullets = lines.iter().filter(|line| line.starts_with(['-', '*', '\u{2022}'])).count();
    let ellipses = lines.iter().filter(|line| line.ends_with("...") || line.ends_with('\u{2026}')).count();
    if bullets * 10 > lines.len() * 9 {
        return Some("bullets");
    }
    if ellipses * 10 > lines.len() * 3 {
        return Some("ellipses");
    }
    if with_letter * 5 < words * 4 {
        return Some("words without letters");
    }
    (frequent.iter().filter(|found| **found).count() < 2).then_some("frequent words")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prose_passes_and_lists_tables_and_fragments_do_not() {
        let prose = "It was the best of times, and it was the worst of times to be young.\n".repeat(10);
        let rules = Filters { gopher: true, ..Filters::default() };
        assert_eq!(rules.refusal(&prose), None);
        for (text, why) in [
            ("too few of the words".to_owned(), "number of words"),
            ("a b c ".repeat(40), "length of words"),
            (format!("{prose}{}", "symbol# ".repeat(60)), "symbols"),
            ("- another item of the whole list\n".repeat(40), "bullets"),
            ("more of the same to read...\nand on ".repeat(40), "symbols"),
            ("the 123 and 456 789 1234 ".repeat(20), "words without letters"),
            ("Zwei Worte ohne jeden Sinn stehen hier ".repeat(20), "frequent words"),
        ] {
            assert_eq!(rules.refusal(&text), Some(why), "{text}");
        }
        let lengths = Filters { min_characters: 3, max_characters: 5, gopher: false };
        assert_eq!(
            ["ab", "abc", "abcdef"].map(|text| lengths.refusal(text)),
            [Some("too short"), None, Some("too long")]
        );
    }
}
