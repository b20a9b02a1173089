//! Incremental parser of tool calls in generated text.

use std::sync::Arc;

use super::call::{Callable, ToolOutputPart};
use super::json::{Call, Piece};
use super::notation;
use super::style::ToolCallStyle;

enum ToolParserState {
    /// Nothing but white space has come. Calls without a mark begin here.
    Start,
    /// Text, and behind it what may become a mark, or white space before one.
    Text { held: String },
    /// Behind a mark, or between calls.
    Gap,
    /// The name before `[ARGS]`.
    Name { name: String },
    /// In a call in JSON.
    Call(Box<Call>),
    /// In a call that is read whole.
    Body { body: String },
    /// In an answer that is read whole.
    Whole,
    /// Behind a call: its closing mark, as far as it has come.
    Close { read: String },
}

/// Parses the tool calls of one choice.
pub(crate) struct ToolCallParser {
    style: ToolCallStyle,
    /// The tools that may be called.
    tools: Arc<[Callable]>,
    state: ToolParserState,
    /// Are calls elements of a list?
    in_array: bool,
    /// What was read since the last mark, and becomes text if no call comes of it.
    unsure: String,
    /// What is known of a call that is not whole.
    held: Vec<Piece>,
    calls: usize,
    ended: usize,
    parts: Vec<ToolOutputPart>,
}

impl ToolCallParser {
    pub(crate) fn new(style: ToolCallStyle, tools: Arc<[Callable]>) -> Self {
        let state = match &style {
            ToolCallStyle::Arguments(name) => ToolParserState::Call(Box::new(Call::of(name.clone()))),
            _ => ToolParserState::Start,
        };
        Self {
            style,
            tools,
            state,
            in_array: false,
            unsure: String::new(),
            held: Vec::new(),
            calls: 0,
            ended: 0,
            parts: Vec::new(),
        }
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
            ToolParserState::Whole => {
                let body = std::mem::take(&mut self.unsure);
                if self.read_whole(&body) { String::new() } else { body }
            }
            // A call whose beginning is out.
            ToolParserState::Call(_) if self.style.is_certain() => String::new(),
            ToolParserState::Close { .. } => String::new(),
            ToolParserState::Gap if self.calls > 0 && self.unsure.trim().is_empty() => String::new(),
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
            ToolParserState::Body { .. } => self.body(c),
            ToolParserState::Whole => self.unsure.push(c),
            ToolParserState::Close { read } => {
                let blank = c.is_whitespace() && read.is_empty();
                if !blank {
                    read.push(c);
                }
                let closes = self.style.closes();
                if closes.contains(&read.as_str()) {
                    self.state = ToolParserState::Text { held: String::new() };
                } else if !closes.iter().any(|close| close.starts_with(read.as_str())) {
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
            (ToolCallStyle::Pythonic, '[') => self.state = ToolParserState::Whole,
            _ => {
                self.state = ToolParserState::Text { held: std::mem::take(&mut self.unsure) };
                self.look_for_mark();
            }
        }
    }

    /// Gives out the text before a mark, or all that cannot become one.
    fn look_for_mark(&mut self) {
        let ToolParserState::Text { held } = &mut self.state else { return };
        let (marks, frames) = (self.style.marks(), self.style.frames());
        if let Some(before) = marks.iter().find_map(|mark| held.strip_suffix(mark)) {
            let before = before.trim_end().to_owned();
            self.unsure = held[before.len()..].to_owned();
            self.state = if self.style.is_closed() {
                ToolParserState::Body { body: String::new() }
            } else {
                ToolParserState::Gap
            };
            return self.text(&before);
        }
        if let Some(before) = frames.iter().find_map(|frame| held.strip_suffix(frame)) {
            let before = before.trim_end().to_owned();
            held.clear();
            return self.text(&before);
        }
        let begun = |mark: &&str| mark.char_indices().map(|(i, _)| i).filter(|i| held.ends_with(&mark[..*i])).max();
        let may_begin = marks.iter().chain(frames).filter_map(begun).max();
        let certain = held[..held.len() - may_begin.unwrap_or(0)].trim_end().len();
        // White space may stand before a mark; where text follows, it comes out with that.
        let rest = if marks.is_empty() { String::new() } else { held.split_off(certain) };
        let text = std::mem::replace(held, rest);
        self.text(&text);
    }

    fn gap(&mut self, c: char) {
        let is_list = matches!(
            self.style,
            ToolCallStyle::Hermes | ToolCallStyle::Granite | ToolCallStyle::Phi | ToolCallStyle::Mistral
        );
        self.unsure.push(c);
        match (&self.style, c) {
            (_, c) if c.is_whitespace() => {}
            (_, '{') => self.begin(Call::new(), c),
            (_, '[') if is_list && !self.in_array => self.in_array = true,
            (_, ',') if self.in_array && self.calls > 0 => self.unsure.clear(),
            (_, ']') if self.in_array => {
                self.in_array = false;
                self.unsure.clear();
                self.close();
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
        self.unsure.push(c);
        let Ok(pieces) = call.take(c) else { return self.give_up() };
        let done = call.done();
        for piece in pieces {
            if matches!(&piece, Piece::Name(name) if !self.may_call(name)) {
                return self.give_up();
            }
            self.held.push(piece);
        }
        if !done && !self.style.is_certain() {
            return;
        }
        for piece in std::mem::take(&mut self.held) {
            match piece {
                Piece::Name(name) => {
                    self.calls += 1;
                    self.parts.push(ToolOutputPart::Call { index: self.calls - 1, name });
                }
                Piece::Arguments(json) => self.arguments(json),
            }
        }
        if done {
            self.ended += 1;
            self.unsure.clear();
            self.state = match self.style {
                _ if self.in_array => ToolParserState::Gap,
                ToolCallStyle::Llama3 => ToolParserState::Gap,
                _ => return self.close(),
            };
        }
    }

    /// What closes a call may follow, or text.
    fn close(&mut self) {
        self.state = if self.style.closes().is_empty() {
            ToolParserState::Text { held: String::new() }
        } else {
            ToolParserState::Close { read: String::new() }
        };
    }

    fn body(&mut self, c: char) {
        self.unsure.push(c);
        let ToolParserState::Body { body } = &mut self.state else { return };
        body.push(c);
        let Some(inner) = self.style.closes().iter().find_map(|close| body.strip_suffix(close)) else { return };
        let inner = inner.to_owned();
        if self.read_whole(&inner) {
            self.unsure.clear();
            self.state = ToolParserState::Text { held: String::new() };
        } else {
            self.give_up();
        }
    }

    /// Tells the calls in `body`, if it holds calls and nothing else.
    fn read_whole(&mut self, body: &str) -> bool {
        let calls = notation::read(&self.style, body, &self.tools);
        let Some(calls) = calls.filter(|calls| calls.iter().all(|(name, _)| self.may_call(name))) else { return false };
        for (name, json) in calls {
            self.parts.push(ToolOutputPart::Call { index: self.calls, name });
            self.parts.push(ToolOutputPart::Arguments { index: self.calls, json });
            self.calls += 1;
            self.ended += 1;
        }
        true
    }

    fn may_call(&self, name: &str) -> bool {
        matches!(self.style, ToolCallStyle::Arguments(_)) || self.tools.iter().any(|tool| tool.name == name)
    }

    /// What was read since the mark is text after all.
    fn give_up(&mut self) {
        let mut text = std::mem::take(&mut self.unsure);
        self.held.clear();
        self.in_array = false;
        // A mark may begin with what cannot be of the call.
        let last = text.pop();
        self.text(&text);
        self.state = ToolParserState::Text { held: last.into_iter().collect() };
        self.look_for_mark();
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
        let tool = |name: &str| Callable { name: name.to_owned(), parameters: serde_json::json!({}) };
        ToolCallParser::new(style, [tool("weather"), tool("add")].into())
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
        // Without its closing mark, and a list.
        check(
            style,
            "<tool_call>{\"name\": \"add\"}<tool_call>[{\"name\": \"add\"}]",
            "",
            &[("add", "{}"), ("add", "{}")],
        );
        // Calls that are cut, or no JSON, are text, and calls behind them are calls.
        let cut = "<tool_call>{\"name\": \"add\", \"arguments\": {\"b\": [1";
        check(style, cut, cut, &[]);
        check(style, &format!("{cut} 2{one}"), &format!("{cut} 2"), &[("weather", "{\"city\": \"Oslo {\\\"}\"}")]);
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
    fn lists_of_calls_are_found() {
        let list = "[{\"name\": \"add\", \"arguments\": {\"a\": 1}}, {\"name\": \"weather\", \"arguments\": {}}]";
        let calls = [("add", "{\"a\": 1}"), ("weather", "{}")];
        for mark in ["<|tool_call|>", "<tool_call>"] {
            check(&ToolCallStyle::Granite, &format!("Ok.\n{mark}{list}\n"), "Ok.", &calls);
        }
        check(&ToolCallStyle::Phi, &format!("functools{list}"), "", &calls);
        check(&ToolCallStyle::Phi, &format!("<|tool_call|>{list}<|/tool_call|>Done"), "Done", &calls);
        let cut = "<|tool_call|>[{\"name\": \"add\", \"arguments\": {\"a\": 1}}, {\"name\"";
        check(&ToolCallStyle::Granite, cut, " {\"name\"", &calls[..1]);
        check(&ToolCallStyle::Phi, "functools is a module", "functools is a module", &[]);
    }

    #[test]
    fn calls_in_notations_of_their_own_are_found() {
        let calls = [("add", "{\"a\":1}"), ("weather", "{}")];
        let block = |name: &str, json: &str| {
            format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json}\n```<｜tool▁call▁end｜>")
        };
        let deepseek = |inner: &str| format!("Ok.<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>");
        let both = format!("{}\n{}", block("add", "{\"a\":1}"), block("weather", "{}"));
        check(&ToolCallStyle::DeepSeek, &deepseek(&both), "Ok.", &calls);
        check(&ToolCallStyle::DeepSeek, &deepseek(&block("rm", "{}")), &format!("Ok.{}", block("rm", "{}")), &[]);
        let gemma = "<|tool_call>call:add{a:1}<tool_call|><|tool_call>call:weather{}<tool_call|>";
        check(&ToolCallStyle::Gemma, gemma, "", &calls);
        let old = "<start_function_call>call:add{a:1}<end_function_call>";
        check(&ToolCallStyle::Gemma, old, "", &calls[..1]);
        check(&ToolCallStyle::Gemma, &old[..40], &old[..40], &[]);
        let qwen = "Ok.\n<tool_call>\n<function=weather>\n</function>\n</tool_call>";
        check(&ToolCallStyle::QwenCoder, qwen, "Ok.", &calls[1..]);
        check(&ToolCallStyle::QwenCoder, &qwen.replace("weather", "rm"), &qwen.replace("weather", "rm"), &[]);
        check(&ToolCallStyle::Pythonic, "[add(a=1), weather()]", "", &calls);
        check(&ToolCallStyle::Pythonic, "Ok.\n```tool_code\nadd(a=1)\n```", "Ok.", &calls[..1]);
        check(&ToolCallStyle::Pythonic, "[1] is a list", "[1] is a list", &[]);
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
}
