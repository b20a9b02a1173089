//! RWKV's vocabularies, whose tokens are bytes spelt as Python spells them.

use serde_json::{Map, Value as Json, json};

/// The template that older files name instead of having one.
pub(super) const TEMPLATE_NAME: &str = "rwkv-world";

/// What the name stands for: RWKV World's turns, each behind its speaker.
pub(super) const TEMPLATE: &str = "{%- for message in messages %}{{ message['role']|capitalize + ': ' + \
    message['content']|trim + '\n\n' }}{%- endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}";

/// The model of `tokens`: each is spelt as itself if it `is_marker`, and else as byte-level tokenizers spell its bytes.
pub(super) fn model<'a>(tokens: impl Iterator<Item = (usize, &'a String)>, is_marker: impl Fn(usize) -> bool) -> Json {
    let vocab: Map<String, Json> = tokens
        .map(|(id, token)| (if is_marker(id) { token.clone() } else { spelt(&unescaped(token)) }, Json::from(id)))
        .collect();
    json!({ "type": "LongestMatch", "vocab": vocab })
}

/// The bytes of a token: `\xff`, `\n` and the like stand for one each.
fn unescaped(token: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(token.len());
    let mut rest = token.as_bytes();
    while let [first, after @ ..] = rest {
        let (byte, taken) = match (first, after) {
            (b'\\', [b'x', high, low, ..]) if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                let digit = |c: &u8| char::from(*c).to_digit(16).unwrap_or_default() as u8;
                (digit(high) << 4 | digit(low), 4)
            }
            (b'\\', [b'n', ..]) => (b'\n', 2),
            (b'\\', [b'r', ..]) => (b'\r', 2),
            (b'\\', [b't', ..]) => (b'\t', 2),
            (b'\\', [other, ..]) => (*other, 2),
            _ => (*first, 1),
        };
        bytes.push(byte);
        rest = &rest[taken..];
    }
    bytes
}

/// Bytes as byte-level tokenizers spell them, a character each: those that print in Latin-1 as themselves, the others in order
/// from U+0100 on.
fn spelt(bytes: &[u8]) -> String {
    let prints = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let spelling = |byte: &u8| match prints(*byte) {
        true => char::from(*byte),
        false => {
            let before = (0..*byte).filter(|other| !prints(*other)).count() as u32;
            char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    };
    bytes.iter().map(spelling).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_the_bytes_that_python_spells() {
        for (token, bytes) in [
            ("a'b", &b"a'b"[..]),
            (r"\\x", br"\x"),
            (r"\'\t\r\n", b"'\t\r\n"),
            (r"\xe4\xbD\xa0!", b"\xe4\xbd\xa0!"),
            (r"\x4", b"x4"),
            ("\\", b"\\"),
        ] {
            assert_eq!(unescaped(token), bytes, "{token}");
        }
    }

    #[test]
    fn every_byte_has_a_spelling_of_its_own() {
        let spellings: std::collections::BTreeSet<String> = (0..=255).map(|byte| spelt(&[byte])).collect();
        assert_eq!(spellings.len(), 256);
        assert_eq!(spelt(b" a\n\x7f\xad"), "ĠaĊġŃ");
    }
}
