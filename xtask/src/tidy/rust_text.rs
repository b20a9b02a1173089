//! Rust source split into what is code and what is comment, with the content of strings in neither.
//!
//! It is a scanner of tokens that can hide others (comments, strings, characters), not a parser: enough to find a
//! word in code without being misled by the same word in a string.

/// Two copies of a source, line for line: in `code` comments and the content of literals are blank, in `comments`
/// everything else is.
pub(super) struct RustText {
    pub(super) code: String,
    pub(super) comments: String,
}

/// A word of letters, digits and underscores, where it stands.
pub(super) struct Word<'a> {
    pub(super) text: &'a str,
    /// Counted from 1.
    pub(super) line: usize,
    /// The text before the word and after it.
    pub(super) before: &'a str,
    pub(super) after: &'a str,
}

#[derive(Clone, Copy, PartialEq)]
enum SourcePart {
    Code,
    Comment,
    Literal,
}

impl RustText {
    pub(super) fn split(source: &str) -> Self {
        let mut text = Self { code: String::with_capacity(source.len()), comments: String::new() };
        let mut rest = source;
        while !rest.is_empty() {
            let (part, length) = next_piece(rest, &text.code);
            let (piece, tail) = rest.split_at(length);
            text.push(part, piece);
            rest = tail;
        }
        text
    }

    fn push(&mut self, part: SourcePart, piece: &str) {
        for letter in piece.chars() {
            let or_blank = |shown| if shown || letter == '\n' { letter } else { ' ' };
            self.code.push(or_blank(part == SourcePart::Code));
            self.comments.push(or_blank(part == SourcePart::Comment));
        }
    }
}

/// Which part the text begins with, and for how many bytes. `code` is the code so far.
fn next_piece(rest: &str, code: &str) -> (SourcePart, usize) {
    if rest.starts_with("//") {
        return (SourcePart::Comment, rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("/*") {
        return (SourcePart::Comment, block_comment(rest));
    }
    // A prefix such as `r` in `r"..."` must not be the end of a longer word.
    let in_word = code.chars().next_back().is_some_and(is_word_char);
    if !in_word && let Some(length) = raw_string(rest) {
        return (SourcePart::Literal, length);
    }
    if rest.starts_with('"') {
        return (SourcePart::Literal, quoted(rest, '"'));
    }
    if rest.starts_with('\'') && is_char_literal(rest) {
        return (SourcePart::Literal, quoted(rest, '\''));
    }
    (SourcePart::Code, rest.chars().next().map_or(0, char::len_utf8))
}

/// Length of a block comment, which may hold others.
fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        let here = &rest.as_bytes()[at..];
        if here.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if here.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// Length of a raw string (`r"..."`, `r#"..."#`, `br"..."`, `cr"..."`), if the text begins with one.
fn raw_string(rest: &str) -> Option<usize> {
    let after_prefix = ["r", "br", "cr"].iter().find_map(|prefix| rest.strip_prefix(prefix))?;
    let content = after_prefix.trim_start_matches('#');
    let hashes = &after_prefix[..after_prefix.len() - content.len()];
    let content = content.strip_prefix('"')?;
    let start = rest.len() - content.len();
    let end = format!("\"{hashes}");
    let length = content.find(&end).map_or(content.len(), |at| at + end.len());
    Some(start + length)
}

/// Length of a literal between quotes, in which a backslash hides the character after it.
fn quoted(rest: &str, quote: char) -> usize {
    let mut hidden = false;
    for (at, letter) in rest.char_indices().skip(1) {
        if hidden {
            hidden = false;
        } else if letter == '\\' {
            hidden = true;
        } else if letter == quote {
            return at + 1;
        }
    }
    rest.len()
}

/// Tells `'a'` and `'\n'` from the lifetime `'a`.
fn is_char_literal(rest: &str) -> bool {
    let mut letters = rest.chars().skip(1);
    letters.next() == Some('\\') || letters.next() == Some('\'')
}

fn is_word_char(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// The words of a text in order, over line ends.
pub(super) fn words(text: &str) -> impl Iterator<Item = Word<'_>> {
    let (mut at, mut line) = (0, 1);
    std::iter::from_fn(move || {
        let start = at + text[at..].find(is_word_char)?;
        let word = text[start..].split(|c| !is_word_char(c)).next()?;
        line += text[at..start].matches('\n').count();
        at = start + word.len();
        Some(Word { text: word, line, before: &text[..start], after: &text[at..] })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(source: &str) -> String {
        let code = RustText::split(source).code;
        code.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn comments(source: &str) -> String {
        RustText::split(source).comments.trim().to_owned()
    }

    #[test]
    fn comments_are_no_code() {
        let source = "a // b\nc /* d /* e */ f */ g";
        assert_eq!(code(source), "a c g");
        assert_eq!(comments(source), "// b\n  /* d /* e */ f */");
    }

    #[test]
    fn strings_are_neither_code_nor_comment() {
        for string in
            [r#""x // \" y""#, r##"r"x \""##, r###"r#"x " y"#"###, r#"b"x""#, r###"br#"x"#"###, "\"two\nlines\""]
        {
            let source = format!("a({string})z");
            let words: Vec<_> = code(&source).split(['(', ')', ' ']).map(str::to_owned).collect();
            assert_eq!(words.first().unwrap(), "a", "{source}");
            assert_eq!(words.last().unwrap(), "z", "{source}");
            assert!(!code(&source).contains(['x', 'y', 't']), "{source}");
            assert_eq!(comments(&source), "", "{source}");
        }
    }

    #[test]
    fn characters_are_literals_and_lifetimes_are_code() {
        assert_eq!(code(r"f('x', '\'', '\\', '\u{41}', z)"), "f( , , , , z)");
        assert_eq!(code("f('\"', x, '\"')"), "f( , x, )");
        assert_eq!(code("fn f<'a>(x: &'a str)"), "fn f<'a>(x: &'a str)");
    }

    #[test]
    fn raw_identifiers_and_words_that_end_in_r_are_code() {
        assert_eq!(code("r#type = number"), "r#type = number");
        assert_eq!(code("for \"x\""), "for");
    }

    #[test]
    fn unclosed_literals_end_with_the_text() {
        assert_eq!(code("a \"b"), "a");
        assert_eq!(code("a r#\"b\""), "a");
        assert_eq!(code("a /* b"), "a");
    }

    #[test]
    fn lines_stay_where_they_were() {
        let source = "a /* \n */ \"\n\" // b\nlast";
        let RustText { code, comments } = RustText::split(source);
        assert_eq!(code.lines().count(), source.lines().count());
        assert_eq!(comments.matches('\n').count(), source.matches('\n').count());
        let last = words(&code).last().unwrap();
        assert_eq!((last.text, last.line), ("last", 4));
    }

    #[test]
    fn words_are_whole() {
        let found: Vec<_> = words("a_1 b\nc!d").map(|word| (word.text, word.line)).collect();
        assert_eq!(found, [("a_1", 1), ("b", 1), ("c", 2), ("d", 2)]);
        let c = words("a(c)").nth(1).unwrap();
        assert_eq!((c.before, c.after), ("a(", ")"));
    }
}
