//! Renders templates from standard input, one JSON object a line: `{"template": .., "variables": {..}}`. Writes one
//! object a line: `{"text": ..}`, or `{"error": ..}`. `fuzz/templates_against_jinja2.py` compares them with jinja2's.

use std::io::{BufRead, Write};

use ridge_text::template::{Clock, Data};
use ridge_text::{ChatInput, ChatTemplate};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let Data::Map(case) = Data::from_json("the line", &line)? else {
            return Err("a line must be a JSON object".into());
        };
        let case = Data::Map(case);
        let source = case.get("template").and_then(Data::as_str).ok_or("the line has no template")?;
        let mut input =
            ChatInput::new(vec![Data::Map(vec![("role".into(), Data::Text("user".into()))])], Clock::from_unix(0));
        if let Some(Data::Map(variables)) = case.get("variables") {
            input.variables = variables.clone();
        }
        let rendered = ChatTemplate::new("template", source).and_then(|template| template.render(&input));
        let answer = match rendered {
            Ok(rendered) => serde_json::json!({ "text": rendered.text }),
            Err(error) => serde_json::json!({ "error": error.to_string() }),
        };
        writeln!(out, "{answer}")?;
    }
    Ok(())
}
