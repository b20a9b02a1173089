//! `ridge serve` and answers of a form: JSON of a schema, choices, expressions, grammars, calls of tools that must be made.

use crate::common::ridge;
use crate::common::server::Server;
use crate::common::tools::{ask, content, tools, with_tools};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

#[test]
fn answers_have_the_form_that_was_asked_for() {
    let server = Server::start(&[]);
    let said = |more: Value| {
        let answer = server.post(CHAT, &ask(&more));
        assert_eq!(answer.status, 200, "{}", answer.text());
        let answer = answer.json();
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        content(&answer).to_owned()
    };
    let schema = json!({
        "type": "object", "properties": { "n": { "enum": [1, 2] }, "b": { "type": "boolean" } },
        "required": ["n", "b"], "additionalProperties": false,
    });
    for more in [
        json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": schema } } }),
        json!({ "guided_json": schema }),
        json!({ "structured_outputs": { "json": schema } }),
    ] {
        let value: Value = serde_json::from_str(&said(more)).unwrap();
        assert!(value["b"].is_boolean() && (value["n"] == 1 || value["n"] == 2), "{value}");
    }
    assert!(["cat", "dog"].contains(&said(json!({ "guided_choice": ["cat", "dog"] })).as_str()));
    let number = said(json!({ "guided_regex": "[0-9]{3}-[ab]" }));
    assert!(number.len() == 5 && number[..3].bytes().all(|b| b.is_ascii_digit()), "{number}");
    let sum = said(json!({ "guided_grammar": "start: N \"+\" N\nN: /[0-9]/" }));
    assert!(sum.len() == 3 && &sum[1..2] == "+", "{sum}");
    let object =
        server.post(CHAT, &ask(&json!({ "response_format": { "type": "json_object" }, "max_tokens": 20 }))).json();
    assert!(content(&object).trim_start().starts_with('{'), "{object}");
}

/// Calls in the notations of several families, whole and streamed; and what is no whole call is text.
#[test]
fn calls_are_found_in_each_notation() {
    let arguments = json!({ "colour": "red", "twice": true });
    let list = r#"[{"name": "mix", "arguments": {"colour": "red", "twice": true}}]"#;
    for (parser, text) in [
        ("granite", format!("<|tool_call|>{list}")),
        ("phi", format!("functools{list}")),
        ("hermes", format!("<tool_call>{}</tool_call>", &list[1..list.len() - 1])),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>mix\n```json\n{\"colour\": \"red\", \
             \"twice\": true}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
                .to_owned(),
        ),
        (
            "qwen3-coder",
            "<tool_call>\n<function=mix>\n<parameter=colour>\nred\n</parameter>\n<parameter=twice>\ntrue\n</parameter>\n\
             </function>\n</tool_call>"
                .to_owned(),
        ),
        ("gemma", "<|tool_call>call:mix{colour:<|\"|>red<|\"|>,twice:true}<tool_call|>".to_owned()),
        ("pythonic", "[mix(colour='red', twice=True)]".to_owned()),
    ] {
        let server = Server::start(&["--tool-call-parser", parser]);
        let body = ask(&json!({ "tools": tools(), "guided_choice": [text], "max_tokens": 400 }));
        let answer = server.post(CHAT, &body).json();
        let choice = &answer["choices"][0];
        let function = &choice["message"]["tool_calls"][0]["function"];
        let called: Value = serde_json::from_str(function["arguments"].as_str().unwrap_or_default()).unwrap_or_default();
        assert_eq!((&function["name"], &called), (&json!("mix"), &arguments), "{parser}: {answer}");
        assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &Value::Null));
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let events = server.post(CHAT, &streamed).events();
        let deltas = || events.iter().map(|e| &e["choices"][0]["delta"]);
        let calls = deltas().filter_map(|d| d["tool_calls"].as_array()).flatten();
        let same: String = calls.filter_map(|c| c["function"]["arguments"].as_str()).collect();
        assert_eq!(function["arguments"], same, "{parser}");
        // A call that is cut is given back as it was written.
        let cut: String = text.chars().take(text.chars().count() - 3).collect();
        if !matches!(parser, "phi" | "granite" | "hermes") {
            let answer = server.post(CHAT, &ask(&json!({ "tools": tools(), "guided_choice": [cut], "max_tokens": 400 })));
            let message = &answer.json()["choices"][0]["message"];
            assert!(message["tool_calls"].is_null() || parser == "deepseek", "{parser}: {message}");
        }
    }
    let refused = ridge(&["serve", "--tool-call-parser", "morse"]);
    assert!(refused.code == 2 && refused.stderr.contains("hermes, granite, phi"), "{}", refused.stderr);
}

/// What pydantic and zod write can be asked for, and what of it is not enforced is told once, whole or streamed.
#[test]
fn schemas_of_libraries_are_taken() {
    let server = Server::start(&[]);
    let schemas = crate::common::repository().join("fixtures/schemas");
    let at =
        |places: &[&str]| places.iter().map(|p| format!("response_format.json_schema.schema{p}")).collect::<Vec<_>>();
    let pydantic = at(&[
        "/$defs/Drawing/properties/tax/anyOf/1/pattern: lookaround assertions are not enforced",
        "/$defs/Drawing/properties/tags/uniqueItems: is not enforced",
        "/$defs/Drawing/properties/file/format: the format path is not enforced",
        "/$defs/Drawing/properties/network/format: the format ipv6network is not enforced",
    ]);
    let zod = at(&["/properties/word/pattern: lookaround assertions are not enforced"]);
    for (name, warnings) in [("pydantic", pydantic), ("zod", zod)] {
        let schema: Value =
            serde_json::from_str(&std::fs::read_to_string(schemas.join(format!("{name}.json"))).unwrap()).unwrap();
        let form = |strict: bool| json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema, "strict": strict } });
        let answer = server.post(CHAT, &ask(&json!({ "response_format": form(false), "max_tokens": 60 })));
        assert_eq!(answer.status, 200, "{name}: {}", answer.text());
        assert_eq!(answer.json()["warnings"], json!(warnings), "{name}");
        assert!(content(&answer.json()).starts_with('{'), "{}", answer.text());
        let mut streamed = ask(&json!({ "response_format": form(false), "max_tokens": 5 }));
        streamed["stream"] = json!(true);
        let told: Vec<Value> =
            server.post(CHAT, &streamed).events().into_iter().filter(|e| !e["warnings"].is_null()).collect();
        assert_eq!((told.len(), &told[0]["warnings"]), (1, &json!(warnings)), "{name}");
        let refused = server.post(CHAT, &ask(&json!({ "response_format": form(true) })));
        assert_eq!(refused.refused(400), "response_format.json_schema.schema", "{}", refused.text());
    }
}

#[test]
fn forms_that_cannot_be_are_refused_by_name_and_hurt_nobody_else() {
    let server = Server::start(&[]);
    let mut deep = json!({ "type": "object" });
    for _ in 0..40 {
        deep = json!({ "type": "object", "properties": { "a": deep, "b": deep } })
            .get("properties")
            .map_or(json!({}), |p| json!({ "properties": { "a": p["a"] } }));
    }
    for (more, param) in [
        (json!({ "guided_regex": "(" }), "guided_regex"),
        (json!({ "guided_grammar": "start: nothing" }), "guided_grammar"),
        (json!({ "guided_json": { "type": "no such type" } }), "guided_json"),
        (json!({ "guided_json": { "$ref": "#/$defs/none" } }), "guided_json"),
        (json!({ "guided_json": { "properties": { "a": { "type": "string", "pattern": "(a" } } } }), "guided_json"),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": { "type": 3 } } } }),
            "response_format",
        ),
    ] {
        let refused = server.post(CHAT, &ask(&more));
        assert!(refused.refused(400).starts_with(param), "{more}: {}", refused.text());
    }
    // A grammar that nothing meets, at once and in the middle of an answer, is refused without the library's names.
    for (param, text, why) in [
        ("guided_grammar", "start: X\nX: /a/ & /b/", "no text matches it"),
        ("guided_grammar", "start: \"a\" X\nX: /a/ & /b/", "nothing matches it from here"),
        ("guided_regex", r"[^\s\S]", "no text matches it"),
    ] {
        let refused = server.post(CHAT, &ask(&json!({ param: text })));
        assert_eq!(refused.refused(400), param);
        let message = refused.text();
        assert!(message.contains(why), "{message}");
        assert!(
            !message.contains("NoExtension") && !message.contains("Lark(") && !message.contains("Regex("),
            "{message}"
        );
    }
    // What turns out to be too much in the middle of an answer is said of the parameter, without the library's own words.
    let much = json!({ "guided_regex": "(a{1,1000}){1,1000}", "max_tokens": 450 });
    let answer = server.post(CHAT, &ask(&much));
    if answer.status != 200 {
        assert!(answer.refused(400) == "guided_regex" && !answer.text().contains('<'), "{}", answer.text());
    }
    // Heavy, and perhaps refused, but never fatal.
    for more in [
        json!({ "guided_regex": "(a+)+(a|aa)*b" }),
        json!({ "guided_regex": "(((a{1,200}){1,200}){1,200}){1,200}" }),
        json!({ "guided_json": deep }),
        json!({ "guided_choice": vec!["x".repeat(1000); 200] }),
    ] {
        let mut body = ask(&more);
        body["max_tokens"] = json!(4);
        let answer = server.post(CHAT, &body);
        assert!(matches!(answer.status, 200 | 400), "{}", answer.text());
    }
    let plain = server.post(CHAT, &ask(&json!({ "max_tokens": 5 })));
    assert_eq!((plain.status, server.get("/health").status), (200, 200));
}

#[test]
fn tools_that_must_be_called_are_called() {
    let (_folder, server) = with_tools("<tool_call>");
    for (choice, reason) in
        [(json!("required"), "tool_calls"), (json!({ "type": "function", "function": { "name": "mix" } }), "stop")]
    {
        let body = ask(&json!({ "tools": tools(), "tool_choice": choice, "parallel_tool_calls": false }));
        let whole = server.post(CHAT, &body).json();
        assert_eq!(whole["choices"][0]["finish_reason"], reason, "{whole}");
        let message = &whole["choices"][0]["message"];
        assert!(message["content"].is_null(), "{whole}");
        let calls = message["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1);
        let function = &calls[0]["function"];
        assert!(reason == "tool_calls" || function["name"] == "mix");
        let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        assert!(arguments["twice"].is_boolean() && arguments["colour"].is_string(), "{arguments}");

        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let events = server.post(CHAT, &streamed).events();
        let deltas: Vec<&Value> =
            events.iter().filter_map(|e| e["choices"][0]["delta"]["tool_calls"].as_array()).flatten().collect();
        // The first names the call, the others continue with its arguments.
        assert_eq!(deltas[0]["function"]["name"], function["name"]);
        assert!(deltas[0]["id"].is_string() && deltas[0]["type"] == "function");
        assert!(deltas.iter().skip(1).all(|d| d.get("id").is_none() && d["index"] == 0));
        let said: String = deltas.iter().map(|d| d["function"]["arguments"].as_str().unwrap()).collect();
        assert_eq!(function["arguments"], said);
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], reason);
    }
}

#[test]
fn tools_whose_schemas_refer_to_themselves_are_called() {
    let (_folder, server) = with_tools("<tool_call>");
    let tool = |name: &str, values: [&str; 2]| {
        json!({ "type": "function", "function": { "name": name, "parameters": {
            "$defs": { "Kind": { "enum": values } },
            "type": "object", "properties": { "kind": { "$ref": "#/$defs/Kind" } },
            "required": ["kind"], "additionalProperties": false,
        } } })
    };
    let tools = json!([tool("paint", ["red", "blue"]), tool("cook", ["soup", "rice"])]);
    let body = ask(&json!({ "tools": tools, "tool_choice": "required", "parallel_tool_calls": false }));
    let answer = server.post(CHAT, &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let answer = answer.json();
    let function = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
    let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
    let kinds = if function["name"] == "paint" { ["red", "blue"] } else { ["soup", "rice"] };
    assert!(kinds.contains(&arguments["kind"].as_str().unwrap()), "{answer}");
}

#[test]
fn mistakes_in_forms_are_told_with_their_place() {
    let server = Server::start(&[]);
    for (more, says) in [
        (
            json!({ "guided_json": { "properties": { "a": { "oneOf": [{ "type": "string" }, { "type": "strng" }] } } } }),
            "guided_json/properties/a/oneOf/1/type: \"strng\" is not a type; types are array, boolean",
        ),
        (
            json!({ "structured_outputs": { "json": { "patternProperties": { "(?=a)b": {} } } } }),
            "structured_outputs.json/patternProperties/(?=a)b: is not a regular expression that can be enforced: look-around",
        ),
        (json!({ "guided_grammar": "start: \"a\"\n  | ) \"b\"" }), "line 2, column 5: "),
        (
            json!({ "tool_choice": "required", "tools": [{ "type": "function", "function": {
                "name": "f", "parameters": { "properties": { "a": { "items": { "type": "strng" } } } } } }] }),
            "tools[0].function.parameters/properties/a/items/type: \"strng\" is not a type",
        ),
        (
            json!({ "guided_regex": "a\\" }),
            "guided_regex: \"a\\\\\" is not a regular expression: the \\ at byte 1 escapes nothing",
        ),
    ] {
        let refused = server.post(CHAT, &ask(&more));
        refused.refused(400);
        let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(says), "{more}: {message}");
    }
}

#[test]
fn stop_strings_end_no_answer_before_its_minimum() {
    let server = Server::start(&[]);
    let finished = |more: Value| {
        let mut body = json!({ "prompt": "Once upon a time", "max_tokens": 32, "temperature": 0, "stop": ["e"] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.post("/v1/completions", &body).json();
        let text = answer["choices"][0]["text"].as_str().unwrap().to_owned();
        (text, answer["choices"][0]["stop_reason"].clone(), answer["usage"]["completion_tokens"].as_u64().unwrap())
    };
    let (text, by, tokens) = finished(json!({}));
    assert!(tokens < 8 && by == "e" && !text.contains('e'), "{text}");
    let (text, by, tokens) = finished(json!({ "min_tokens": 12 }));
    assert!(tokens > 12 && tokens < 32 && by == "e" && text.contains('e'), "{tokens}: {text}");
    let (text, by, tokens) = finished(json!({ "min_tokens": 32 }));
    assert!(tokens == 32 && by.is_null() && text.contains('e'), "{tokens}: {text}");
}
