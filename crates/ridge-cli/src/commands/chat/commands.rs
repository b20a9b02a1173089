//! The slash commands of a conversation.

/// A parsed line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChatLine<'a> {
    Nothing,
    Message(String),
    Help,
    /// Shows the system prompt, or sets it.
    System(Option<&'a str>),
    Clear,
    Undo,
    Retry,
    Save(&'a str),
    Load(&'a str),
    Settings,
    /// Changes the setting of this name to this value.
    Set(&'a str, &'a str),
    Quit,
    /// An invalid line, with the error message.
    Wrong(String),
}

/// Name, argument and meaning of each, in the order of the help.
pub(super) const COMMANDS: [(&str, &str, &str); 10] = [
    ("/help", "", "show this"),
    ("/system", "[TEXT|off]", "show, set or remove the system prompt"),
    ("/clear", "", "clear the conversation and keep the system prompt"),
    ("/undo", "", "remove your last message and its reply"),
    ("/retry", "", "generate the last reply again"),
    ("/save", "FILE", "write the conversation as JSON"),
    ("/load", "FILE", "load a conversation written by /save"),
    ("/settings", "", "show the settings"),
    ("/set", "NAME VALUE", "change a sampling setting or max_tokens: /set temperature 0.2"),
    ("/quit", "", "exit (also Ctrl-D)"),
];

const BLOCK: &str = "\"\"\"";

pub(super) fn help() -> String {
    let commands =
        COMMANDS.map(|(name, argument, meaning)| format!("  {:<20} {meaning}\n", format!("{name} {argument}")));
    commands.concat()
        + "\nA message of several lines stands between \"\"\" and \"\"\", or has \\ at the ends of its lines. One that begins \
           with\na slash is typed with two. Ctrl-C interrupts an answer.\n"
}

/// Whether the message continues on the next line.
pub(super) fn unfinished(typed: &str) -> bool {
    match typed.trim_start().strip_prefix(BLOCK) {
        Some(inside) => !inside.trim_end().ends_with(BLOCK),
        None => typed.ends_with('\\'),
    }
}

/// Parses `typed`.
pub(super) fn parse(typed: &str) -> ChatLine<'_> {
    let trimmed = typed.trim();
    if trimmed.is_empty() {
        return ChatLine::Nothing;
    }
    if let Some(inside) = trimmed.strip_prefix(BLOCK) {
        let inside = inside.strip_suffix(BLOCK).unwrap_or(inside);
        return ChatLine::Message(inside.trim_matches('\n').to_owned());
    }
    if let Some(rest) = trimmed.strip_prefix("//") {
        return ChatLine::Message(format!("/{rest}"));
    }
    if !trimmed.starts_with('/') {
        return ChatLine::Message(trimmed.replace("\\\n", "\n"));
    }
    let (name, argument) = trimmed.split_once(char::is_whitespace).unwrap_or((trimmed, ""));
    let argument = argument.trim();
    let line = match name {
        "/system" => return ChatLine::System(Some(argument).filter(|a| !a.is_empty())),
        "/save" | "/load" if argument.is_empty() => ChatLine::Wrong(format!("{name} needs a file name")),
        "/save" => return ChatLine::Save(argument),
        "/load" => return ChatLine::Load(argument),
        "/set" => match argument.split_once([' ', '=']) {
            Some((name, value)) => return ChatLine::Set(name, value.trim()),
            None if argument.is_empty() => return ChatLine::Settings,
            None => ChatLine::Wrong(format!("/set {argument} needs a value")),
        },
        "/help" | "/?" => ChatLine::Help,
        "/clear" => ChatLine::Clear,
        "/undo" => ChatLine::Undo,
        "/retry" => ChatLine::Retry,
        "/settings" => ChatLine::Settings,
        "/quit" | "/exit" | "/bye" => ChatLine::Quit,
        _ => {
            return ChatLine::Wrong(format!(
                "unknown command {name}; /help lists the commands; start a message with // to send a slash"
            ));
        }
    };
    if argument.is_empty() { line } else { ChatLine::Wrong(format!("{name} takes no argument")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_mean_what_the_help_says() {
        let message = |text: &str| ChatLine::Message(text.to_owned());
        for (typed, line) in [
            ("  ", ChatLine::Nothing),
            (" hello ", message("hello")),
            ("one\\\ntwo", message("one\ntwo")),
            ("\"\"\"\n/quit\n\n  x\n\"\"\"", message("/quit\n\n  x")),
            ("//etc/passwd", message("/etc/passwd")),
            ("/system", ChatLine::System(None)),
            ("/system  Be brief. ", ChatLine::System(Some("Be brief."))),
            ("/save a b.json", ChatLine::Save("a b.json")),
            ("/set top_k 5", ChatLine::Set("top_k", "5")),
            ("/set min-p=0.1", ChatLine::Set("min-p", "0.1")),
            ("/quit", ChatLine::Quit),
        ] {
            assert_eq!(parse(typed), line, "{typed}");
        }
        for wrong in ["/save", "/nothing", "/undo 3"] {
            assert!(matches!(parse(wrong), ChatLine::Wrong(_)), "{wrong}");
        }
        for (name, argument, _) in COMMANDS {
            let typed = if argument == "FILE" { format!("{name} x") } else { name.to_owned() };
            assert!(!matches!(parse(&typed), ChatLine::Wrong(_) | ChatLine::Message(_)), "{name}");
        }
    }

    #[test]
    fn blocks_and_backslashes_go_on() {
        for (typed, goes_on) in [
            ("a", false),
            ("a\\", true),
            ("a\\\nb", false),
            ("\"\"\"a", true),
            ("\"\"\"a\n\"\"\"", false),
            ("\"\"\"", true),
        ] {
            assert_eq!(unfinished(typed), goes_on, "{typed}");
        }
    }
}
