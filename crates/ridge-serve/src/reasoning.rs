//! Separates reasoning between `<think>` and `</think>` from the content.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

enum ReasoningState {
    /// Nothing but white space, or the beginning of the mark, has come.
    Before(String),
    Thinking(String),
    /// Behind the mark: white space before the answer is left out.
    Behind,
    Answering,
}

/// Takes one answer apart.
pub(crate) struct Reasoning(ReasoningState);

/// A piece of an answer, taken apart.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ReasoningSplit {
    pub(crate) reasoning: String,
    pub(crate) answer: String,
}

impl Reasoning {
    /// For an answer behind `prompt`, which may have opened the mark already.
    pub(crate) fn after(prompt: &str) -> Self {
        let thinking = prompt.trim_end().ends_with(OPEN);
        Self(if thinking { ReasoningState::Thinking(String::new()) } else { ReasoningState::Before(String::new()) })
    }

    /// Does a template know of the marks?
    pub(crate) fn is_known_to(template: &str) -> bool {
        template.contains(CLOSE)
    }

    pub(crate) fn push(&mut self, text: &str) -> ReasoningSplit {
        let mut apart = ReasoningSplit::default();
        let mut text = text.to_owned();
        loop {
            match &mut self.0 {
                ReasoningState::Before(held) => {
                    held.push_str(&text);
                    let begun = held.trim_start();
                    if let Some(rest) = begun.strip_prefix(OPEN) {
                        text = rest.to_owned();
                        self.0 = ReasoningState::Thinking(String::new());
                    } else if OPEN.starts_with(begun) {
                        return apart;
                    } else {
                        text = std::mem::take(held);
                        self.0 = ReasoningState::Answering;
                    }
                }
                ReasoningState::Thinking(held) => {
                    held.push_str(&text);
                    if let Some((thought, rest)) = held.split_once(CLOSE) {
                        apart.reasoning.push_str(thought);
                        text = rest.to_owned();
                        self.0 = ReasoningState::Behind;
                    } else {
                        let may_begin = CLOSE.char_indices().map(|(i, _)| i).filter(|i| held.ends_with(&CLOSE[..*i]));
                        let keep = may_begin.max().unwrap_or(0);
                        let rest = held.split_off(held.len() - keep);
                        apart.reasoning.push_str(&std::mem::replace(held, rest));
                        return apart;
                    }
                }
                ReasoningState::Behind => {
                    let rest = text.trim_start();
                    if rest.is_empty() {
                        return apart;
                    }
                    text = rest.to_owned();
                    self.0 = ReasoningState::Answering;
                }
                ReasoningState::Answering => {
                    apart.answer.push_str(&text);
                    return apart;
                }
            }
        }
    }

    /// The answer has ended: what was held back.
    pub(crate) fn finish(&mut self) -> ReasoningSplit {
        match std::mem::replace(&mut self.0, ReasoningState::Answering) {
            ReasoningState::Before(answer) => ReasoningSplit { answer, ..ReasoningSplit::default() },
            ReasoningState::Thinking(reasoning) => ReasoningSplit { reasoning, ..ReasoningSplit::default() },
            ReasoningState::Behind | ReasoningState::Answering => ReasoningSplit::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(prompt: &str, text: &str, reasoning: &str, answer: &str) {
        let chars: Vec<char> = text.chars().collect();
        for size in [1, 3, 5, 1000] {
            let mut split = Reasoning::after(prompt);
            let mut whole = ReasoningSplit::default();
            let pieces = chars.chunks(size).map(|p| p.iter().collect::<String>());
            let mut parts: Vec<ReasoningSplit> = pieces.map(|p| split.push(&p)).collect();
            parts.push(split.finish());
            for part in parts {
                whole.reasoning += &part.reasoning;
                whole.answer += &part.answer;
            }
            assert_eq!(
                whole,
                ReasoningSplit { reasoning: reasoning.into(), answer: answer.into() },
                "in pieces of {size}"
            );
        }
    }

    #[test]
    fn thoughts_are_taken_apart() {
        check("", "<think>a < b</think>\n\nAnswer </think>", "a < b", "Answer </think>");
        check("", "\n<think>\nyes\n</think>x", "\nyes\n", "x");
        check("assistant<think>\n", "so</think>x", "so", "x");
        check("<think>\n\n</think>\n\n", "plain", "", "plain");
        check("", " <thin air", "", " <thin air");
        check("", "<think>cut </thi", "cut </thi", "");
        check("", " <thi", "", " <thi");
    }
}
