//! `ridge tokenize`, run as users run it.

use crate::common::{Folder, json, ridge, ridge_reading, stdout};

#[test]
fn tokens_are_shown_with_the_bytes_they_stand_for() {
    let object = json(&["tokenize", "--json", "Once upon a timé 😀"]);
    let text = object["text"].as_str().unwrap();
    let tokens = object["tokens"].as_array().unwrap();
    assert_eq!((&tokens[0]["token"], &tokens[0]["special"]), (&"<s>".into(), &true.into()));
    let part = |t: &serde_json::Value| {
        &text[t["bytes"][0].as_u64().unwrap() as usize..t["bytes"][1].as_u64().unwrap() as usize]
    };
    assert_eq!((part(&tokens[0]), part(&tokens[1]), part(&tokens[2])), ("", "Once", " upon"));
    // Byte-fallback tokens share their character.
    assert!(tokens[tokens.len() - 4..].iter().all(|t| part(t) == "😀"));
    let table = stdout(&["tokenize", "Once upon"]);
    assert_eq!(
        table,
        "id   token  bytes  text\n1    <s>    0..0\n403  ▁Once  0..4   \"Once\"\n407  ▁upon  4..9   \" upon\"\n"
    );
}

#[test]
fn ids_come_back_as_the_text() {
    let text = "Lily's dog\twas \"big\" — 中 😀\n";
    let ids = ridge_reading(text, &["tokenize", "--ids", "--no-special", "-"]);
    assert_eq!((ids.code, ids.stderr.as_str()), (0, ""));
    assert_eq!(ridge_reading(&ids.stdout, &["tokenize", "--decode", "-"]).stdout, text);
    let count: usize =
        ridge_reading(text, &["tokenize", "--count", "--no-special", "-"]).stdout.trim().parse().unwrap();
    assert_eq!(ids.stdout.split_whitespace().count(), count);
    assert_eq!(stdout(&["tokenize", "--decode", "[1, 403,407]"]), "<s> Once upon\n");
    assert_eq!(stdout(&["tokenize", "--decode", "1 403 407", "--no-special"]), "Once upon\n");
}

#[test]
fn a_file_is_read_as_it_is() {
    let folder = Folder::stories();
    folder.write("text", "a\n");
    let with_newline = stdout(&["tokenize", "--ids", "--file", folder.file("text").to_str().unwrap()]);
    assert_eq!(with_newline, format!("{} 13\n", stdout(&["tokenize", "--ids", "a"]).trim_end()));
}

#[test]
fn a_conversation_is_shown_as_the_model_reads_it() {
    let folder = Folder::stories();
    folder.write("chat_template.jinja", "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}");
    let args = ["tokenize", "--model", folder.path(), "--chat", "--json"];
    let asked = r#"[{"role": "user", "content": "Hi"}]"#;
    let object = json(&[&args[..], &[asked]].concat());
    assert_eq!(object["text"], "<s>[user]Hi>");
    assert_eq!(object["ids"].as_array().unwrap().iter().filter(|id| **id == 1).count(), 1);
    let answered = r#"[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]"#;
    assert_eq!(json(&[&args[..], &[answered]].concat())["text"], "<s>[user]Hi[assistant]Ho");
}

#[test]
fn mistakes_say_what_to_do() {
    for (code, args, said) in [
        (2, &["--decode", "1 x"][..], "--decode x: must be a token id"),
        (2, &[], "required"),
        (2, &["a", "--decode", "1"], "cannot be used with"),
        (1, &["--decode", "70000"], "token 70000 is not in the vocabulary of 512 tokens"),
        (1, &["--file", "/no/such"], "cannot read /no/such"),
        (1, &["--chat", "[]"], "needs at least one message"),
        (1, &["--chat", "hello"], "is not a conversation"),
    ] {
        let ran = ridge(&[&["tokenize"], args].concat());
        assert_eq!(ran.code, code, "{args:?}: {}", ran.stderr);
        assert!(ran.stderr.starts_with("error: ") && ran.stderr.contains(said), "{args:?}: {}", ran.stderr);
        assert_eq!(ran.stdout, "");
    }
}
