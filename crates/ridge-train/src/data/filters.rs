//! Which documents are worth training on, by what can be counted: the rules of Gopher (Rae et al. 2021, "Scaling Language Models:
//! Methods, Analysis & Insights from Training Gopher", section A.1.1 and table A1) and of C4 (Raffel et al. 2020, "Exploring the
//! Limits of Transfer Learning with a Unified Text-to-Text Transformer", section 2.2); and by language.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use whatlang::detect;

pub use whatlang::Lang;

use super::blocklist::Blocklist;
use super::order::mix;

/// What a document must have.
#[derive(Clone, Debug, PartialEq)]
pub struct Filters {
    /// The least number of characters.
    pub min_characters: usize,
    /// The largest number of characters.
    pub max_characters: usize,
    /// Whether the quality rules of Gopher hold: 50 to 100,000 words of 3 to 10 characters on average, at most a tenth as many `#`
    /// and ellipses as words, less than 90 % of lines that begin with a bullet and 30 % that end with an ellipsis, four fifths of
    /// words with a letter, and two of the most frequent words of English.
    pub gopher: bool,
    /// Whether its rules of repetition hold: lines and paragraphs that are there already are at most 30 % of their number and 20 %
    /// of the characters, the most frequent sequence of 2, 3 or 4 words has at most 20, 18 or 16 % of the characters, and
    /// sequences of 5 to 10 words that occur again 15 to 10 %.
    pub repetition: bool,
    /// Whether the rules of C4 hold: lines that do not end a sentence, have fewer than 5 words, or speak of Javascript are left out,
    /// and documents with braces or placeholder text, and those that have fewer than 3 sentences then.
    pub c4: bool,
    /// Words of which a document has none, after the rules of C4 have left out lines.
    pub blocklist: Option<Blocklist>,
    /// The languages that are kept; all if empty.
    pub languages: Vec<Lang>,
}

impl Default for Filters {
    fn default() -> Self {
        Self {
            min_characters: 1,
            max_characters: usize::MAX,
            gopher: false,
            repetition: false,
            c4: false,
            blocklist: None,
            languages: Vec::new(),
        }
    }
}

/// The language of an ISO 639-3 code, such as `eng`, or of the two letters of those that have most text.
pub fn language(code: &str) -> Option<Lang> {
    const SHORT: [(&str, Lang); 20] = [
        ("ar", Lang::Ara),
        ("cs", Lang::Ces),
        ("de", Lang::Deu),
        ("en", Lang::Eng),
        ("es", Lang::Spa),
        ("fa", Lang::Pes),
        ("fr", Lang::Fra),
        ("hi", Lang::Hin),
        ("id", Lang::Ind),
        ("it", Lang::Ita),
        ("ja", Lang::Jpn),
        ("ko", Lang::Kor),
        ("nl", Lang::Nld),
        ("pl", Lang::Pol),
        ("pt", Lang::Por),
        ("ru", Lang::Rus),
        ("tr", Lang::Tur),
        ("uk", Lang::Ukr),
        ("vi", Lang::Vie),
        ("zh", Lang::Cmn),
    ];
    let code = code.to_ascii_lowercase();
    SHORT.iter().find(|(short, _)| *short == code).map(|(_, lang)| *lang).or_else(|| Lang::from_code(&code))
}

/// Bytes of a text that its language is told by.
const SEEN: usize = 4096;

impl Filters {
    /// What of `text` is kept, or why nothing is.
    ///
    /// # Errors
    /// Why it is left out.
    pub fn kept<'a>(&self, text: &'a str) -> Result<Cow<'a, str>, &'static str> {
        let kept = if self.c4 { Cow::Owned(c4(text)?) } else { Cow::Borrowed(text) };
        let characters = kept.chars().count();
        if characters < self.min_characters {
            return Err("too short");
        }
        if characters > self.max_characters {
            return Err("too long");
        }
        if !self.languages.is_empty() {
            let end = (0..=SEEN.min(kept.len())).rev().find(|end| kept.is_char_boundary(*end)).unwrap_or(0);
            let seen = &kept[..end];
            if !detect(seen).is_some_and(|found| self.languages.contains(&found.lang())) {
                return Err("another language");
            }
        }
        if self.blocklist.as_ref().is_some_and(|list| list.is_in(&kept)) {
            return Err("words of the blocklist");
        }
        if let Some(why) = self.gopher.then(|| gopher(&kept)).flatten() {
            return Err(why);
        }
        if let Some(why) = self.repetition.then(|| repetition(&kept)).flatten() {
            return Err(why);
        }
        Ok(kept)
    }
}

/// The lines that C4 keeps.
fn c4(text: &str) -> Result<String, &'static str> {
    let lower = text.to_lowercase();
    if text.contains('{') {
        return Err("braces");
    }
    if lower.contains("lorem ipsum") {
        return Err("placeholder text");
    }
    let ends = |line: &str| line.trim_end_matches('"').ends_with(['.', '!', '?']) && !line.ends_with("...");
    let is_kept =
        |line: &&str| ends(line) && line.split_whitespace().count() >= 5 && !line.to_lowercase().contains("javascript");
    let lines: Vec<&str> = text.lines().map(str::trim).filter(is_kept).collect();
    let sentences = |line: &&str| line.split_inclusive(['.', '!', '?']).filter(|part| part.trim().len() > 1).count();
    if lines.iter().map(sentences).sum::<usize>() < 3 {
        return Err("fewer than 3 sentences");
    }
    Ok(lines.join("\n"))
}

/// Which of Gopher's rules of repetition `text` breaks.
fn repetition(text: &str) -> Option<&'static str> {
    let all = text.chars().count().max(1);
    for (parts, why) in
        [(text.split("\n\n").collect::<Vec<_>>(), "repeated paragraphs"), (text.lines().collect(), "repeated lines")]
    {
        let (mut seen, mut count, mut again, mut characters) = (HashSet::new(), 0, 0, 0);
        for part in parts.into_iter().map(str::trim).filter(|part| !part.is_empty()) {
            count += 1;
            if !seen.insert(part) {
                again += 1;
                characters += part.chars().count();
            }
        }
        if again * 10 > count * 3 || characters * 5 > all {
            return Some(why);
        }
    }
    let words: Vec<&str> = text.split_whitespace().collect();
    let hashes: Vec<u64> =
        words.iter().map(|word| word.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)))).collect();
    let lengths: Vec<usize> = words.iter().map(|word| word.chars().count()).collect();
    let sequence = |words: &[u64]| words.iter().fold(1_u64, |hash, word| mix(hash.rotate_left(7) ^ word));
    for (length, percent) in [(2, 20), (3, 18), (4, 16)] {
        let mut counts: HashMap<u64, (usize, usize)> = HashMap::new();
        for (at, of) in hashes.windows(length).enumerate() {
            let count = counts.entry(sequence(of)).or_insert((0, lengths[at..at + length].iter().sum()));
            count.0 += 1;
        }
        let most = counts.values().max_by_key(|(count, characters)| (*count, *characters));
        if most.is_some_and(|(count, characters)| *count > 1 && count * characters * 100 > all * percent) {
            return Some("a frequent sequence of words");
        }
    }
    for (length, percent) in [(5, 15), (6, 14), (7, 13), (8, 12), (9, 11), (10, 10)] {
        let mut counts: HashMap<u64, usize> = HashMap::new();
        hashes.windows(length).for_each(|of| *counts.entry(sequence(of)).or_default() += 1);
        // Characters of words in a sequence that occurs again, each word once.
        let (mut characters, mut counted) = (0, 0);
        for (at, of) in hashes.windows(length).enumerate() {
            if counts[&sequence(of)] > 1 {
                characters += lengths[at.max(counted)..at + length].iter().sum::<usize>();
                counted = at + length;
            }
        }
        if characters * 100 > all * percent {
            return Some("repeated sequences of words");
        }
    }
    None
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
        assert_eq!(rules.kept(&prose).as_deref(), Ok(&*prose));
        for (text, why) in [
            ("too few of the words".to_owned(), "number of words"),
            ("a b c ".repeat(40), "length of words"),
            (format!("{prose}{}", "symbol# ".repeat(60)), "symbols"),
            ("- another item of the whole list\n".repeat(40), "bullets"),
            ("more of the same to read...\nand on ".repeat(40), "symbols"),
            ("the 123 and 456 789 1234 ".repeat(20), "words without letters"),
            ("Zwei Worte ohne jeden Sinn stehen hier ".repeat(20), "frequent words"),
        ] {
            assert_eq!(rules.kept(&text), Err(why), "{text}");
        }
        let lengths = Filters { min_characters: 3, max_characters: 5, ..Filters::default() };
        assert_eq!(
            ["ab", "abc", "abcdef"].map(|text| lengths.kept(text).err()),
            [Some("too short"), None, Some("too long")]
        );
    }
    #[test]
    fn c4_keeps_sentences_and_refuses_code() {
        let rules = Filters { c4: true, ..Filters::default() };
        let text = "Home | About | Contact\nThe harbour froze over for the third time. Boats lay still.\n\
                    Please enable Javascript to read this fine page.\nToo short.\nIt opened again when the spring came...\n\
                    \"Nobody had expected that at all,\" she said to him.";
        let kept = "The harbour froze over for the third time. Boats lay still.\n\"Nobody had expected that at all,\" she said to him.";
        assert_eq!(rules.kept(text).as_deref(), Ok(kept));
        assert_eq!(rules.kept("A line of one sentence alone."), Err("fewer than 3 sentences"));
        assert_eq!(rules.kept("fn main() { }"), Err("braces"));
        assert_eq!(rules.kept("Lorem ipsum dolor sit amet."), Err("placeholder text"));
    }

    #[test]
    fn a_word_of_the_blocklist_counts_in_the_lines_that_are_kept() {
        let blocklist = Some(Blocklist::new(&["darn"]).expect("is built"));
        let rules = |c4| Filters { c4, blocklist: blocklist.clone(), ..Filters::default() };
        let kept = "The harbour froze over for the third time. Boats lay still. Nobody had expected that.";
        let text = format!("{kept}\nDarn");
        assert_eq!(rules(false).kept(&text), Err("words of the blocklist"));
        assert_eq!(rules(true).kept(&text).as_deref(), Ok(kept));
    }

    #[test]
    fn repetition_is_found_in_lines_paragraphs_and_words() {
        let rules = Filters { repetition: true, ..Filters::default() };
        // Words of which none is a neighbour of another twice.
        let varied = |n: usize| (0..n).map(|i| format!("w{}{}", i * i % 997, i)).collect::<Vec<_>>().join(" ");
        assert_eq!(rules.kept(&varied(300)).err(), None);
        let lines = (0..40).map(|i| if i % 2 == 0 { "Share this page".to_owned() } else { varied(3 + i) });
        assert_eq!(rules.kept(&lines.collect::<Vec<_>>().join("\n")), Err("repeated lines"));
        let paragraph = varied(20);
        assert_eq!(rules.kept(&format!("{paragraph}\n\n{paragraph}\n\n{}", varied(60))), Err("repeated paragraphs"));
        let frequent = (0..60).map(|i| format!("click here {i}")).collect::<Vec<_>>().join(" ");
        assert_eq!(rules.kept(&frequent), Err("a frequent sequence of words"));
        let again = format!("{} {} {}", varied(30), varied(100), varied(31));
        assert_eq!(rules.kept(&again), Err("repeated sequences of words"));
    }

    #[test]
    fn texts_in_other_languages_are_left_out() {
        let english = "The ships had been waiting in the harbour since the beginning of the winter, and nobody knew when they would leave.";
        let german = "Die Schiffe warteten seit dem Anfang des Winters im Hafen, und niemand wusste, wann sie wieder ausfahren w\u{fc}rden.";
        let of = |codes: &[&str]| Filters {
            languages: codes.iter().map(|code| language(code).expect("is known")).collect(),
            ..Filters::default()
        };
        assert_eq!(of(&["en"]).kept(english).err(), None);
        assert_eq!(of(&["eng", "fr"]).kept(german), Err("another language"));
        assert_eq!(of(&["fr", "DE"]).kept(german).err(), None);
        assert_eq!(language("klingon"), None);
    }
}
