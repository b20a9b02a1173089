//! Requests, fully validated before anything runs. `fields` reads JSON objects strictly, `sampling` the settings common to
//! completions and chats, `completion` and `chat` one kind of request each.

pub(crate) mod chat;
pub(crate) mod completion;
pub(crate) mod constraint;
pub(crate) mod fields;
pub(crate) mod messages;
mod pattern;
pub(crate) mod sampling;
mod schema;
mod schema_errors;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{chat, completion};

    /// Every value of a request in turn, replaced by each of some that do not belong there.
    fn spoilt(request: &Value, out: &mut Vec<Value>) {
        let strange = [
            Value::Null,
            json!(true),
            json!(-1),
            json!(1e308),
            json!(u64::MAX),
            json!(""),
            json!("\u{0}\u{202e}"),
            json!([]),
            json!({}),
            json!([[[]]]),
            json!([null]),
            json!({ "type": "function" }),
        ];
        let mut places = Vec::new();
        pointers(request, String::new(), &mut places);
        for place in places {
            for value in &strange {
                let mut copy = request.clone();
                *copy.pointer_mut(&place).unwrap() = value.clone();
                out.push(copy);
            }
        }
    }

    fn pointers(value: &Value, at: String, out: &mut Vec<String>) {
        match value {
            Value::Object(map) => map.iter().for_each(|(key, value)| pointers(value, format!("{at}/{key}"), out)),
            Value::Array(list) => {
                list.iter().enumerate().for_each(|(i, value)| pointers(value, format!("{at}/{i}"), out));
            }
            _ => {}
        }
        out.push(at);
    }

    #[test]
    fn spoilt_requests_are_read_or_refused_with_a_message() {
        let common = json!({
            "temperature": 0.5, "top_k": 3, "n": 2, "stop": ["a"], "logit_bias": {"5": 1}, "stream": true,
            "stream_options": {"include_usage": true}, "seed": 1, "stop_token_ids": [2], "targets": {"ttft_ms": 5},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        });
        let mut completion = common.clone();
        completion["prompt"] = json!(["a", [1, 2]]);
        let mut chat = common;
        chat["messages"] = json!([
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        ]);
        chat["tools"] = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
        chat["tool_choice"] = json!("auto");
        chat["chat_template_kwargs"] = json!({"enable_thinking": false});
        assert!(completion::read(completion.to_string().as_bytes()).is_ok());
        assert!(chat::read(chat.to_string().as_bytes()).is_ok());
        let (mut completions, mut chats) = (Vec::new(), Vec::new());
        spoilt(&completion, &mut completions);
        spoilt(&chat, &mut chats);
        let refusals = completions.iter().filter_map(|v| completion::read(v.to_string().as_bytes()).err());
        let refusals: Vec<_> =
            refusals.chain(chats.iter().filter_map(|v| chat::read(v.to_string().as_bytes()).err())).collect();
        assert!(refusals.len() > 300, "{}", refusals.len());
        for error in refusals {
            assert!(error.status == 400 && !error.message.is_empty() && error.message.len() < 500, "{error:?}");
        }
    }
}
