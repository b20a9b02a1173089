//! The notations of tool calls.

/// How a model writes calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolCallStyle {
    /// `{"name": ..., "parameters": {...}}` as the whole answer, several behind `;`, perhaps after `<|python_tag|>`.
    Llama3,
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or a list of such: Qwen 2.5 and 3, Hermes, Granite 4.
    Hermes,
    /// `<|tool_call|>[{"name": ..., "arguments": {...}}]`, also behind `<tool_call>`: Granite 3.
    Granite,
    /// The same list behind `<|tool_call|>` or `functools`: Phi 3.5 and 4.
    Phi,
    /// `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` for each.
    Mistral,
    /// `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name` and the arguments in a block of code, or
    /// `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}`: DeepSeek R1, its distilled models, and V3.
    DeepSeek,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen 3 Coder.
    QwenCoder,
    /// `<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>`: Gemma 4; FunctionGemma with other marks.
    Gemma,
    /// `[name(key="value"), ...]` as the whole answer, or lines of calls in a block of `tool_code`: Gemma 3, Llama 3.2.
    Pythonic,
    /// `[{"name": ..., "parameters": {...}}]`: what an answer is held to that must call a tool.
    Array,
    /// The arguments of this tool alone: what an answer is held to that must call one.
    Arguments(String),
}

const NAMES: [(&str, ToolCallStyle); 9] = [
    ("llama3", ToolCallStyle::Llama3),
    ("hermes", ToolCallStyle::Hermes),
    ("granite", ToolCallStyle::Granite),
    ("phi", ToolCallStyle::Phi),
    ("mistral", ToolCallStyle::Mistral),
    ("deepseek", ToolCallStyle::DeepSeek),
    ("qwen3-coder", ToolCallStyle::QwenCoder),
    ("gemma", ToolCallStyle::Gemma),
    ("pythonic", ToolCallStyle::Pythonic),
];

/// Names of the supported notations of tool calls.
pub fn tool_call_parsers() -> impl Iterator<Item = &'static str> {
    NAMES.iter().map(|(name, _)| *name)
}

impl ToolCallStyle {
    /// The one of [`tool_call_parsers`] that is called `name`.
    pub(crate) fn named(name: &str) -> Option<Self> {
        NAMES.iter().find(|(known, _)| *known == name).map(|(_, style)| style.clone())
    }

    /// The style of the models that a chat template was written for, read off the marks in it.
    pub(crate) fn of_template(source: &str) -> Option<Self> {
        let has = |mark: &str| source.contains(mark);
        Some(if has("[TOOL_CALLS]") {
            Self::Mistral
        } else if has("<｜tool▁calls▁begin｜>") {
            Self::DeepSeek
        } else if has("<|tool_call>") || has("<start_function_call>") {
            Self::Gemma
        } else if has("<tool_call>") && has("<function=") {
            Self::QwenCoder
        } else if has("<|tool_call|>") && !has("<|tool|>") {
            Self::Granite
        } else if has("<tool_call>") {
            Self::Hermes
        } else if has("<|tool|>") || has("functools") {
            Self::Phi
        } else if has("<|python_tag|>") || has("\"parameters\": dictionary") {
            Self::Llama3
        } else {
            return None;
        })
    }

    /// The texts that a call begins behind.
    pub(super) fn marks(&self) -> &'static [&'static str] {
        match self {
            Self::Llama3 => &["<|python_tag|>"],
            Self::Hermes | Self::QwenCoder => &["<tool_call>"],
            Self::Granite => &["<|tool_call|>", "<tool_call>"],
            Self::Phi => &["<|tool_call|>", "functools"],
            Self::Mistral => &["[TOOL_CALLS]"],
            Self::DeepSeek => &["<｜tool▁call▁begin｜>"],
            Self::Gemma => &["<|tool_call>", "<start_function_call>"],
            Self::Pythonic => &["```tool_code"],
            Self::Array | Self::Arguments(_) => &[],
        }
    }

    /// Texts around calls that are no part of the answer.
    pub(super) fn frames(&self) -> &'static [&'static str] {
        match self {
            Self::DeepSeek => &["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
            _ => &[],
        }
    }

    /// The texts that may, or must, end a call.
    pub(super) fn closes(&self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::QwenCoder => &["</tool_call>"],
            Self::Granite => &["</tool_call>", "<|/tool_call|>"],
            Self::Phi => &["<|/tool_call|>"],
            Self::DeepSeek => &["<｜tool▁call▁end｜>"],
            Self::Gemma => &["<tool_call|>", "<end_function_call>"],
            Self::Pythonic => &["```"],
            Self::Llama3 | Self::Mistral | Self::Array | Self::Arguments(_) => &[],
        }
    }

    /// Is an answer held to the style by a grammar, so that a call that has begun is one?
    pub(super) fn is_certain(&self) -> bool {
        matches!(self, Self::Array | Self::Arguments(_))
    }

    /// Are calls read whole, between a mark and the text that ends them, rather than as JSON that ends by itself?
    pub(super) fn is_closed(&self) -> bool {
        matches!(self, Self::DeepSeek | Self::QwenCoder | Self::Gemma | Self::Pythonic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_tell_their_style() {
        for (template, style) in [
            ("... [TOOL_CALLS] ...", Some(ToolCallStyle::Mistral)),
            ("... <tool_call> ...", Some(ToolCallStyle::Hermes)),
            ("<tool_call>\n<function=", Some(ToolCallStyle::QwenCoder)),
            ("<|python_tag|>", Some(ToolCallStyle::Llama3)),
            ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'", Some(ToolCallStyle::DeepSeek)),
            ("'<|tool_call>call:'", Some(ToolCallStyle::Gemma)),
            ("'<start_function_call>call:'", Some(ToolCallStyle::Gemma)),
            ("emit <|tool_call|> followed by a list; <tool_call>", Some(ToolCallStyle::Granite)),
            ("'<|tool|>' + message['tools'] + '<|/tool|>'", Some(ToolCallStyle::Phi)),
            ("{{ messages }}", None),
        ] {
            assert_eq!(ToolCallStyle::of_template(template), style, "{template}");
        }
    }
}
