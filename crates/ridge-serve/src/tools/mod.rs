//! Calls of tools in what a model writes, found while it writes.
//!
//! Each family was trained on a notation of its own ([`ToolCallStyle`]); all of them hold JSON, which `json` checks character by
//! character, so that a call is only announced once its name is known and its arguments are only passed on while they are
//! JSON. What only looked like a call is given back as text.

mod json;

use json::{Call, Piece};

/// How a model writes calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolCallStyle {
    /// `{"name": ..., "parameters": {...}}` as the whole answer, several behind `;`, perhaps after `<|python_tag|>`.
    Llama3,
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen and Hermes.
    Hermes,
    /// `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` for each.
    Mistral,
    /// `[{"name": ..., "parameters": {...}}]`: what an answer is held to that must call a tool.
    Array,
    /// The arguments of this tool alone: what an answer is held to that must call one.
    Arguments(String),
}

impl ToolCallStyle {
    /// The style of the models that a chat template was written for, read off the marks in it.
    pub(crate) fn of_template(source: &str) -> Option<Self> {
        if source.contains("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if source.contains("<tool_call>") && !source.contains("<function=") {
            Some(Self::Hermes)
        } else if source.contains("<|python_tag|>") || source.contains("\"parameters\": dictionary") {
            Some(Self::Llama3)
        } else {
            None
        }
    }

    /// The text that a call begins behind.
    fn mark(&self) -> Option<&'static str> {
        match self {
            Self::Llama3 => Some("<|python_tag|>"),
            Self::Hermes => Some("<tool_call>"),
            Self::Mistral => Some("[TOOL_CALLS]"),
            Self::Array | Self::Arguments(_) => None,
        }
    }
}

/// What a piece of an answer turned out to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolOutputPart {
    /// Text that is no call.
    Text(String),
    /// A call begins: which one of the answer, and its tool.
    Call { index: usize, name: String },
    /// Arguments of call `index` go on.
    Arguments { index: usize, json: String },
}

enum ToolParserState {
    /// Nothing but white space has come. Llama's calls begin here without a mark.
    Start,
    /// Text, and behind it what may become a mark, or white space before one.
    Text { held: String },
    /// Behind a mark, or between calls.
    Gap,
    /// The name before `[ARGS]`.
    Name { name: String },
    /// In a call.
    Call(Box<Call>),
    /// Behind a call of Hermes: its closing mark, as far as it has come.
    Close { read: String },
}

/// Finds calls in one answer.
pub(crate) struct ToolCallParser {
    style: ToolCallStyle,
    /// The tools that may be called.
    names: Vec<String>,
    state: ToolParserState,
    /// Are calls elements of a list?
    in_array: bool,
    /// What was read since the last mark, and becomes text if no call comes of it.
    unsure: String,
    calls: usize,
    ended: usize,
    parts: Vec<ToolOutputPart>,
}

const CLOSE: &str = "</tool_call>";

impl ToolCallParser {
    pub(crate) fn new(style: ToolCallStyle, names: Vec<String>) -> Self {
        let state = match &style {
            ToolCallStyle::Arguments(name) => ToolParserState::Call(Box::new(Call::of(name.clone()))),
            _ => ToolParserState::Start,
        };
        Self { style, names, state, in_array: false, unsure: String::new(), calls: 0, ended: 0, parts: Vec::new() }
    }

    /// Calls that have begun.
    pub(crate) fn calls(&self) -> usize {
        self.calls
    }

    /// Calls that have ended.
    pub(crate) fn calls_ended(&self) -> usize {
        self.ended
    }

    /// Takes the next piece of the answer.
    pub(crate) fn push(&mut self, text: &str) -> Vec<ToolOutputPart> {
        for c in text.chars() {
            self.take(c);
        }
        std::mem::take(&mut self.parts)
    }

    /// The answer has ended.
    pub(crate) fn finish(&mut self) -> Vec<ToolOutputPart> {
        let rest = match std::mem::replace(&mut self.state, ToolParserState::Start) {
            // White space behind calls is not worth a message.
            ToolParserState::Text { held } if self.calls > 0 && held.trim().is_empty() => String::new(),
            ToolParserState::Text { held } => held,
            // A call whose beginning is out.
            _ if self.calls > 0 && self.unsure.trim().is_empty() => String::new(),
            ToolParserState::Close { .. } => String::new(),
            _ => std::mem::take(&mut self.unsure),
        };
        self.text(&rest);
        std::mem::take(&mut self.parts)
    }

    fn take(&mut self, c: char) {
        match &mut self.state {
            ToolParserState::Start => self.start(c),
            ToolParserState::Text { held } => {
                held.push(c);
                self.look_for_mark();
            }
            ToolParserState::Gap => self.gap(c),
            ToolParserState::Name { name } => {
                self.unsure.push(c);
                name.push(c);
                self.named();
            }
            ToolParserState::Call(_) => self.call(c),
            ToolParserState::Close { read } => {
                let blank = c.is_whitespace() && read.is_empty();
                if !blank {
                    read.push(c);
                }
                if read == CLOSE {
                    self.state = ToolParserState::Text { held: String::new() };
                } else if !CLOSE.starts_with(read.as_str()) {
                    // Some models forget to close a call before the next.
                    let held = std::mem::take(read);
                    self.state = ToolParserState::Text { held };
                    self.look_for_mark();
                }
            }
        }
    }

    fn start(&mut self, c: char) {
        self.unsure.push(c);
        match (&self.style, c) {
            (_, c) if c.is_whitespace() => {}
            (ToolCallStyle::Llama3, '{') => self.begin(Call::new(), c),
            (ToolCallStyle::Array, '[') => {
                self.in_array = true;
                self.state = ToolParserState::Gap;
            }
            _ => {
                self.state = ToolParserState::Text { held: std::mem::take(&mut self.unsure) };
                self.look_for_mark();
            }
        }
    }

    /// Gives out the text before a mark, or all that cannot become one.
    fn look_for_mark(&mut self) {
        let ToolParserState::Text { held } = &mut self.state else { return };
        let Some(mark) = self.style.mark() else {
            let text = std::mem::take(held);
            return self.text(&text);
        };
        if let Some(before) = held.strip_suffix(mark) {
            let before = before.trim_end().to_owned();
            self.unsure = held[before.len()..].to_owned();
            self.state = ToolParserState::Gap;
            return self.text(&before);
        }
        let may_begin = mark.char_indices().map(|(i, _)| i).filter(|i| held.ends_with(&mark[..*i])).max();
        let certain = held[..held.len() - may_begin.unwrap_or(0)].trim_end().len();
        // White space may stand before a mark; where text follows, it comes out with that.
        let rest = held.split_off(certain);
        let text = std::mem::replace(held, rest);
        self.text(&text);
    }

    fn gap(&mut self, c: char) {
        self.unsure.push(c);
        match (&self.style, c) {
            (_, c) if c.is_whitespace() => {}
            (_, '{') => self.begin(Call::new(), c),
            (ToolCallStyle::Mistral, '[') if !self.in_array => self.in_array = true,
            (ToolCallStyle::Mistral | ToolCallStyle::Array, ',') if self.in_array && self.calls > 0 => {
                self.unsure.clear()
            }
            (ToolCallStyle::Mistral | ToolCallStyle::Array, ']') if self.in_array => {
                self.in_array = false;
                self.unsure.clear();
                self.state = ToolParserState::Text { held: String::new() };
            }
            (ToolCallStyle::Llama3, ';' | ',') if self.calls > 0 => self.unsure.clear(),
            (ToolCallStyle::Mistral, _) if !self.in_array => self.state = ToolParserState::Name { name: c.to_string() },
            _ => self.give_up(),
        }
    }

    /// Behind `[TOOL_CALLS]`: a name, perhaps `[CALL_ID]` and one, and `[ARGS]` or the arguments themselves.
    fn named(&mut self) {
        const LONGEST: usize = 256;
        let ToolParserState::Name { name } = &self.state else { return };
        if let Some(head) = name.strip_suffix("[ARGS]") {
            let name = head.split("[CALL_ID]").next().unwrap_or_default().trim().to_owned();
            self.state = ToolParserState::Call(Box::new(Call::of(name)));
        } else if let Some(head) = name.strip_suffix('{') {
            let name = head.trim().to_owned();
            self.begin(Call::of(name), '{');
        } else if name.len() > LONGEST {
            self.give_up();
        }
    }

    /// Goes on in `call`, whose first character `c` has been read.
    fn begin(&mut self, call: Call, c: char) {
        self.state = ToolParserState::Call(Box::new(call));
        self.unsure.pop();
        self.call(c);
    }

    fn call(&mut self, c: char) {
        let ToolParserState::Call(call) = &mut self.state else { return };
        let announced = call.announced();
        if !announced {
            self.unsure.push(c);
        }
        match call.take(c) {
            Ok(pieces) => {
                let done = call.done();
                for piece in pieces {
                    match piece {
                        Piece::Name(name) if !self.may_call(&name) => {
                            return self.give_up();
                        }
                        Piece::Name(name) => {
                            self.calls += 1;
                            self.unsure.clear();
                            self.parts.push(ToolOutputPart::Call { index: self.calls - 1, name });
                        }
                        Piece::Arguments(json) => self.arguments(json),
                    }
                }
                if done {
                    self.ended += 1;
                    self.state = match self.style {
                        ToolCallStyle::Hermes => ToolParserState::Close { read: String::new() },
                        ToolCallStyle::Llama3 | ToolCallStyle::Array => ToolParserState::Gap,
                        ToolCallStyle::Mistral if self.in_array => ToolParserState::Gap,
                        ToolCallStyle::Mistral | ToolCallStyle::Arguments(_) => {
                            ToolParserState::Text { held: String::new() }
                        }
                    };
                }
            }
            // What is no JSON ends the call, or shows that it never was one.
            Err(()) if announced => {
                self.state = ToolParserState::Text { held: c.to_string() };
                self.look_for_mark();
            }
            Err(()) => self.give_up(),
        }
    }

    fn may_call(&self, name: &String) -> bool {
        matches!(self.style, ToolCallStyle::Arguments(_)) || self.names.contains(name)
    }

    /// What was read since the mark is text after all.
    fn give_up(&mut self) {
        let text = std::mem::take(&mut self.unsure);
        self.in_array = false;
        self.text(&text);
        self.state = ToolParserState::Text { held: String::new() };
    }

    fn text(&mut self, text: &str) {
        match self.parts.last_mut() {
            _ if text.is_empty() => {}
            Some(ToolOutputPart::Text(last)) => last.push_str(text),
            _ => self.parts.push(ToolOutputPart::Text(text.to_owned())),
        }
    }

    fn arguments(&mut self, json: String) {
        let index = self.calls.saturating_sub(1);
        match self.parts.last_mut() {
            Some(ToolOutputPart::Arguments { json: last, .. }) => last.push_str(&json),
            _ => self.parts.push(ToolOutputPart::Arguments { index, json }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parser(style: ToolCallStyle) -> ToolCallParser {
        ToolCallParser::new(style, vec!["weather".to_owned(), "add".to_owned()])
    }

    /// The text, and the calls with their arguments, of `answer` given in pieces of `size` characters.
    fn parsed(style: &ToolCallStyle, answer: &str, size: usize) -> (String, Vec<(String, String)>) {
        let mut parser = parser(style.clone());
        let chars: Vec<char> = answer.chars().collect();
        let mut parts: Vec<ToolOutputPart> =
            chars.chunks(size).flat_map(|piece| parser.push(&piece.iter().collect::<String>())).collect();
        parts.extend(parser.finish());
        let (mut text, mut calls) = (String::new(), Vec::<(String, String)>::new());
        for part in parts {
            match part {
                ToolOutputPart::Text(piece) => text.push_str(&piece),
                ToolOutputPart::Call { index, name } => {
                    assert_eq!(index, calls.len());
                    calls.push((name, String::new()));
                }
                ToolOutputPart::Arguments { index, json } => {
                    assert_eq!(index + 1, calls.len(), "arguments belong to the last call");
                    calls[index].1.push_str(&json);
                }
            }
        }
        assert_eq!(parser.calls(), calls.len());
        (text, calls)
    }

    #[track_caller]
    fn check(style: &ToolCallStyle, answer: &str, text: &str, calls: &[(&str, &str)]) {
        let calls: Vec<(String, String)> = calls.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect();
        for size in [1, 2, 3, 7, 1000] {
            assert_eq!(parsed(style, answer, size), (text.to_owned(), calls.clone()), "in pieces of {size}");
        }
    }

    #[test]
    fn hermes_calls_are_found() {
        let style = &ToolCallStyle::Hermes;
        let one = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo {\\\"}\"}}\n</tool_call>";
        check(style, one, "", &[("weather", "{\"city\": \"Oslo {\\\"}\"}")]);
        let two =
            format!("Let me see.\n{one}\n<tool_call>{{\"arguments\": {{\"a\":1}}, \"name\":\"add\"}}</tool_call>\n");
        check(style, &two, "Let me see.", &[("weather", "{\"city\": \"Oslo {\\\"}\"}"), ("add", "{\"a\":1}")]);
        check(style, "a < b, <tool and  so on ", "a < b, <tool and  so on ", &[]);
        // A name that nobody gave, no JSON, no name, and an end before the name are text.
        for text in [
            "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>",
            "<tool_call>weather</tool_call>",
            "<tool_call>{\"name\": \"wea",
            "<tool_call>",
            "<tool_call>{\"x\": 1}</tool_call>",
        ] {
            check(style, text, text, &[]);
        }
        // Without its closing mark, and cut.
        check(
            style,
            "<tool_call>{\"name\": \"add\"}<tool_call>{\"name\": \"add\", \"arguments\": {\"b\": [1",
            "",
            &[("add", "{}"), ("add", "{\"b\": [1")],
        );
    }

    #[test]
    fn llama_calls_are_found() {
        let style = &ToolCallStyle::Llama3;
        let one = "{\"name\": \"add\", \"parameters\": {\"a\": -1.5e3, \"b\": null}}";
        let arguments = "{\"a\": -1.5e3, \"b\": null}";
        check(style, one, "", &[("add", arguments)]);
        check(style, &format!("\n<|python_tag|>{one}; {one}"), "", &[("add", arguments), ("add", arguments)]);
        let typed = format!("{{\"type\": \"function\", {}", &one[1..]);
        check(style, &typed, "", &[("add", arguments)]);
        check(style, "{\"answer\": 42}", "{\"answer\": 42}", &[]);
        check(style, "It is {\"name\": \"add\"}", "It is {\"name\": \"add\"}", &[]);
        check(style, " {not json", " {not json", &[]);
    }

    #[test]
    fn mistral_calls_are_found() {
        let style = &ToolCallStyle::Mistral;
        let list =
            "[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {\"a\": 1}}, {\"name\": \"weather\", \"arguments\": {}}]";
        check(style, list, "", &[("add", "{\"a\": 1}"), ("weather", "{}")]);
        check(style, &list.replace("[{", " [ {"), "", &[("add", "{\"a\": 1}"), ("weather", "{}")]);
        let named = "Ok. [TOOL_CALLS]add[ARGS]{\"a\": 1}[TOOL_CALLS]weather[CALL_ID]x1[ARGS]{}";
        check(style, named, "Ok.", &[("add", "{\"a\": 1}"), ("weather", "{}")]);
        check(style, "[TOOL_CALLS]add{\"a\": 1}", "", &[("add", "{\"a\": 1}")]);
        check(style, "[TOOL_CALLS]rm{\"a\": 1}", "[TOOL_CALLS]rm{\"a\": 1}", &[]);
        check(style, "[TOOL_CALLS][3]", "[TOOL_CALLS][3]", &[]);
    }

    #[test]
    fn constrained_answers_are_calls() {
        check(&ToolCallStyle::Array, "[{\"name\": \"add\", \"parameters\": {\"a\": 1}}]", "", &[("add", "{\"a\": 1}")]);
        check(&ToolCallStyle::Arguments("add".into()), "{\"a\": [true]} ", " ", &[("add", "{\"a\": [true]}")]);
    }

    #[test]
    fn arguments_in_a_string_are_taken_out_of_it() {
        let answer = "<tool_call>{\"name\": \"add\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>";
        check(&ToolCallStyle::Hermes, answer, "", &[("add", "{\"a\": 1}")]);
    }

    #[test]
    fn templates_tell_their_style() {
        assert_eq!(ToolCallStyle::of_template("... [TOOL_CALLS] ..."), Some(ToolCallStyle::Mistral));
        assert_eq!(ToolCallStyle::of_template("... <tool_call> ..."), Some(ToolCallStyle::Hermes));
        assert_eq!(ToolCallStyle::of_template("<|python_tag|>"), Some(ToolCallStyle::Llama3));
        assert_eq!(ToolCallStyle::of_template("{{ messages }}"), None);
    }
}
