//! `ridge chat`, run as users run it: with turns that are given, and by hand on a terminal.

use crate::common::{Folder, command, fixture, json, ridge, ridge_reading, stdout};

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}\
                        {% if add_generation_prompt %}assistant:{% endif %}";

/// The embedded model with a chat template. It was not made for conversations, but answers.
fn talker() -> Folder {
    let folder = Folder::stories();
    folder.write("chat_template.jinja", TEMPLATE);
    folder
}

/// What `generate` says to the text that the model reads.
fn generated(text: &str, tokens: &str) -> String {
    let text = text.strip_prefix("<s>").unwrap_or(text);
    stdout(&["generate", "--greedy", "-n", tokens, text])
}

#[test]
fn an_answer_is_what_the_model_says_to_the_rendered_conversation() {
    let folder = talker();
    let chat = ["chat", "--model", folder.path(), "--greedy", "-n", "20"];
    let expected = generated("<s>user:The dog\nassistant:", "20");
    assert_eq!(stdout(&[&chat[..], &["-p", "The dog"]].concat()), expected);
    assert_eq!(ridge_reading("The dog\n", &chat).stdout, expected);
    assert_eq!(ridge_reading("The dog\n", &[&chat[..], &["-p", "-"]].concat()).stdout, expected);
    let expected = generated("<s>system:Be kind.\nuser:The dog\nassistant:", "20");
    assert_eq!(stdout(&[&chat[..], &["--system", "Be kind.", "-p", "The dog"]].concat()), expected);
    folder.write("system.txt", "Be kind.\n");
    let system = format!("@{}", folder.file("system.txt").display());
    assert_eq!(stdout(&[&chat[..], &["--system", &system, "-p", "The dog"]].concat()), expected);
}

#[test]
fn the_embedded_model_continues_a_story() {
    let args = ["chat", "--greedy", "-n", "20", "-p", "Once upon a time"];
    let ran = ridge(&args);
    assert_eq!((ran.code, ran.stdout), (0, generated("Once upon a time", "20")));
    assert!(
        ran.stderr.contains("(cut off after 20 tokens; --max-tokens N or /set max_tokens N raises the limit"),
        "{}",
        ran.stderr
    );
}

#[test]
fn turns_that_reuse_the_cache_are_answered_as_those_read_anew() {
    let folder = talker();
    let chat = ["chat", "--model", folder.path(), "--greedy", "-n", "12", "--json", "--chunk", "16"];
    let both = json(&[&chat[..], &["-p", "The dog was big", "-p", "Lily saw it"]].concat());
    assert!(both["cached_tokens"].as_u64().unwrap() > 10, "{both}");
    let messages = both["messages"].as_array().unwrap();
    assert_eq!(messages.len(), 4);
    folder.write("talk.json", serde_json::to_string(&messages[..2]).unwrap());
    let talk = folder.file("talk.json");
    let again = json(&[&chat[..], &["--load", talk.to_str().unwrap(), "-p", "Lily saw it"]].concat());
    assert_eq!(again["cached_tokens"], 0);
    for same in ["messages", "prompt_tokens", "generated_tokens", "finish_reason"] {
        assert_eq!(again[same], both[same], "{same}");
    }
}

#[test]
fn the_token_that_the_template_puts_behind_answers_ends_them() {
    // The model ends stories with its begin token, which no file names as an end token here.
    let folder = talker();
    folder.edit("config.json", |c| c.replace("\"eos_token_id\": 2", "\"eos_token_id\": 500"));
    folder.edit("tokenizer_config.json", |c| c.replace("\"eos_token\": \"</s>\"", "\"sep_token\": \"</s>\""));
    let finish = || {
        let args = ["chat", "--model", folder.path(), "--greedy", "-n", "450", "-p", "The end", "--json"];
        json(&args)["finish_reason"].clone()
    };
    assert_ne!(finish(), "stop");
    folder.write(
        "chat_template.jinja",
        TEMPLATE.replace("\n{% endfor", "\n{{ bos_token if m.role == 'assistant' }}{% endfor"),
    );
    assert_eq!(finish(), "stop");
}

#[test]
fn oldest_turns_are_left_out_when_the_context_is_full() {
    let folder = talker();
    let turn = "Once upon a time there was a dog who ran to the park";
    let turns = ["-p", turn].repeat(4);
    let chat = ["chat", "--model", folder.path(), "--greedy", "-n", "10", "--context", "100"];
    let ran = ridge(&[&chat[..], &turns].concat());
    assert_eq!((ran.code, ran.stdout.lines().count() >= 4), (0, true), "{}", ran.stderr);
    assert!(ran.stderr.contains("(the context of 100 tokens is full: the oldest "), "{}", ran.stderr);
    assert_eq!(ridge(&[&chat[..], &turns, &["--quiet"]].concat()).stderr, "");
    let long = turn.repeat(20);
    let ran = ridge(&[&chat[..], &["-p", &long]].concat());
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("but the context holds 100; shorten the message"), "{}", ran.stderr);
}

#[test]
fn templates_are_chosen_and_given_variables_and_tools() {
    let folder = talker();
    folder.write("other.jinja", "{{ messages[0].content }}{{ mood }}{{ tools[0].name }}");
    folder.write("tools.json", r#"[{"name": " a red ball"}]"#);
    let (other, tools) = (folder.file("other.jinja"), folder.file("tools.json"));
    let args = [
        "chat",
        "--greedy",
        "-n",
        "20",
        "--template-file",
        other.to_str().unwrap(),
        "--tools",
        tools.to_str().unwrap(),
        "--template-variable",
        "mood= saw",
        "-p",
        "<s>Lily",
    ];
    // The embedded model has no template of its own and needs none here.
    assert_eq!(stdout(&args), generated("Lily saw a red ball", "20"));
    let ran = ridge(&["chat", "--model", folder.path(), "--template", "nothing", "-p", "x"]);
    assert_eq!(ran.code, 1);
    assert!(ran.stderr.contains("there is none named nothing") && ran.stderr.contains("default"), "{}", ran.stderr);
}

#[test]
fn mistakes_say_what_to_do() {
    let folder = talker();
    folder.write("bad.json", "[{}]");
    let bad = folder.file("bad.json");
    let bad = bad.to_str().unwrap();
    let model = folder.path();
    for (code, args, said) in [
        (1, &["--model", &fixture("biased"), "-p", "hi"][..], "has no chat template"),
        (1, &["--model", model, "-p", " "], "a message is empty"),
        (1, &["--model", model], "a message is empty"),
        (1, &["--model", model, "--load", bad, "-p", "x"], "message 1 has no role"),
        (1, &["--model", model, "--load", "/no/such", "-p", "x"], "cannot read /no/such"),
        (1, &["--model", model, "--tools", "/dev/null", "-p", "x"], "/dev/null"),
        (2, &["--model", model, "--template-variable", "x", "-p", "x"], "--template-variable x: must be a name"),
        (2, &["--model", model, "--context", "513", "-p", "x"], "--context 513: the model supports at most 512"),
    ] {
        let ran = ridge(&[&["chat"], args].concat());
        assert_eq!(ran.code, code, "{args:?}: {}", ran.stderr);
        assert!(ran.stderr.starts_with("error: ") && ran.stderr.contains(said), "{args:?}: {}", ran.stderr);
        assert_eq!(ran.stdout, "");
    }
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    let folder = talker();
    let mut child = command(&["chat", "--model", folder.path(), "--greedy", "-q", "-p", "The dog"]);
    let mut child = child.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
}

/// A conversation on a terminal that `script` of util-linux makes.
#[cfg(target_os = "linux")]
mod by_hand {
    use std::io::{Read as _, Write as _};
    use std::process::{Child, Command, Stdio};
    use std::sync::mpsc::{Receiver, channel};
    use std::time::{Duration, Instant};

    use super::*;

    struct Terminal {
        child: Child,
        output: Receiver<Vec<u8>>,
        seen: String,
    }

    impl Terminal {
        /// `None` if the command `script` is missing.
        fn run(folder: &Folder, more: &str) -> Option<Self> {
            let ridge = env!("CARGO_BIN_EXE_ridge");
            let model = folder.path();
            let line = format!("'{ridge}' chat --model '{model}' --greedy --seed 1 {more}");
            let mut script = Command::new("script");
            script
                .args(["-qefc", &line, "/dev/null"])
                .env("XDG_STATE_HOME", model)
                .env("TERM", "xterm")
                .env("RIDGE_DEVICE", "cpu");
            let mut child = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().ok()?;
            let mut from = child.stdout.take().unwrap();
            let (send, output) = channel();
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(length @ 1..) = from.read(&mut bytes) {
                    let _ = send.send(bytes[..length].to_vec());
                }
            });
            let mut terminal = Self { child, output, seen: String::new() };
            terminal.until(">>> ");
            Some(terminal)
        }

        /// What comes up to `text`, which must come.
        fn until(&mut self, text: &str) -> String {
            let deadline = Instant::now() + Duration::from_secs(60);
            loop {
                if let Some(at) = self.seen.find(text) {
                    let rest = self.seen.split_off(at + text.len());
                    return std::mem::replace(&mut self.seen, rest);
                }
                let left = deadline.saturating_duration_since(Instant::now());
                match self.output.recv_timeout(left) {
                    Ok(bytes) => self.seen += &String::from_utf8_lossy(&bytes),
                    Err(_) => panic!("{text:?} does not come: {:?}", self.seen),
                }
            }
        }

        fn press(&mut self, keys: &str) {
            self.child.stdin.as_mut().unwrap().write_all(keys.as_bytes()).unwrap();
        }

        /// Types a line, and gives what comes up to the next prompt.
        fn say(&mut self, line: &str) -> String {
            self.press(&format!("{line}\r"));
            // The editor shows the line behind a prompt of its own.
            self.until("\x1b[?2004l");
            self.until(">>> ")
        }

        fn ends(mut self) -> Option<i32> {
            self.child.wait().unwrap().code()
        }
    }

    #[test]
    fn commands_change_the_conversation() {
        let folder = talker();
        let Some(mut terminal) = Terminal::run(&folder, "-n 8 -v") else {
            ridge_testing::skip!("the command `script`, which gives a terminal, is not there; install util-linux");
        };
        assert!(terminal.say("/help").contains("/retry"));
        assert!(terminal.say("/nothing").contains("unknown command /nothing"));
        assert!(terminal.say("/system Be kind.").contains("(system prompt set; it applies from the next message on)"));
        assert!(terminal.say("The dog").contains("(0 cached)"));
        let again = terminal.say("The cat");
        assert!(again.contains("cached)") && !again.contains("(0 cached)"), "{again}");
        assert!(terminal.say("/undo").contains("(2 messages remaining)"));
        assert!(terminal.say("/retry").contains("generated 8 tokens"));
        let file = folder.file("talk.json");
        terminal.say(&format!("/save {}", file.display()));
        let saved: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let roles: Vec<_> = saved.as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant"]);
        assert_eq!(saved[1]["content"], "The dog");
        assert!(terminal.say("/clear").contains("(2 messages cleared; the system prompt is kept)"));
        assert!(terminal.say("/system off").contains("(system prompt removed)"));
        assert!(terminal.say(&format!("/load {}", file.display())).contains("(2 messages loaded from"));
        assert!(terminal.say("/settings").contains("greedy"));
        assert!(terminal.say("/set max_tokens 3").contains("(max_tokens = 3)"));
        assert!(terminal.say("The cat").contains("(cut off after 3 tokens; "));
        assert!(
            terminal.say("/set temperature -1").contains("(temperature -1: must be 0 (greedy) or a positive number)")
        );
        assert!(terminal.say("/set top-p 0.5").contains("(top_p = 0.5)"));
        assert!(
            terminal.say("/set warmth 3").contains("(warmth 3: is not a setting; the settings are temperature, top_k,")
        );
        assert!(terminal.say("/set temperature 0.25").contains("(temperature = 0.25)"));
        assert!(terminal.say("/settings").contains("temperature 0.25, top_k 0, top_p 0.5, min_p 0, seed 2"));
        terminal.press("/quit\r");
        assert_eq!(terminal.ends(), Some(0));
        let history = std::fs::read_to_string(folder.file("ridge/chat_history")).unwrap();
        assert!(history.lines().any(|line| line == "The dog"), "{history}");
    }

    #[test]
    fn ctrl_c_ends_an_answer_then_the_command() {
        let folder = talker();
        let Some(mut terminal) = Terminal::run(&folder, "--no-history") else {
            ridge_testing::skip!("the command `script`, which gives a terminal, is not there; install util-linux");
        };
        terminal.press("The dog\r");
        terminal.until("\x1b[?2004l\r\n ");
        terminal.press("\x03");
        // A quick machine may be done before the key is heard; then it is that of the next prompt.
        let said = terminal.until(">>> ");
        if said.contains("(interrupted)") {
            terminal.press("\x03");
            terminal.until("(Ctrl-C again, or Ctrl-D, to exit)");
            terminal.until(">>> ");
        }
        assert!(!folder.file("ridge").exists());
        terminal.press("\x03");
        assert_eq!(terminal.ends(), Some(130));
    }

    #[test]
    fn keys_typed_during_an_answer_are_the_next_line() {
        let folder = talker();
        let Some(mut terminal) = Terminal::run(&folder, "-n 300 -q") else {
            ridge_testing::skip!("the command `script`, which gives a terminal, is not there; install util-linux");
        };
        terminal.press("The dog\r");
        terminal.until("\x1b[?2004l\r\n ");
        terminal.press("/set top_k 7\r/set top");
        // The answer comes without what was typed, then the line is shown and run.
        let answer = terminal.until(">>> /set top_k 7\r\n(top_k = 7)");
        assert_eq!(answer.matches("/set").count(), 1, "{answer}");
        terminal.until(">>> ");
        terminal.press("_k 9\r");
        terminal.until("(top_k = 9)");
        terminal.until(">>> ");
        terminal.press("\x04");
        assert_eq!(terminal.ends(), Some(0));
    }

    #[test]
    fn a_conversation_that_was_not_saved_is_kept() {
        let folder = talker();
        let Some(mut terminal) = Terminal::run(&folder, "-n 8") else {
            ridge_testing::skip!("the command `script`, which gives a terminal, is not there; install util-linux");
        };
        terminal.say("The dog");
        terminal.press("\x03");
        terminal.until("(Ctrl-C again, or Ctrl-D, to exit)");
        terminal.until(">>> ");
        terminal.press("\x03");
        terminal.until("continues it)");
        assert_eq!(terminal.ends(), Some(130));
        let kept = std::fs::read_to_string(folder.file("ridge/last_chat.json")).unwrap();
        let kept: serde_json::Value = serde_json::from_str(&kept).unwrap();
        assert_eq!((&kept[0]["content"], kept.as_array().unwrap().len()), (&"The dog".into(), 2));
    }

    #[test]
    fn ctrl_d_leaves() {
        let folder = talker();
        let Some(mut terminal) = Terminal::run(&folder, "-q") else {
            ridge_testing::skip!("the command `script`, which gives a terminal, is not there; install util-linux");
        };
        terminal.press("\x04");
        assert_eq!(terminal.ends(), Some(0));
    }
}
