//! `ridge eval --choices`.

use std::path::Path;

use ridge_engine::evaluate::{Encoded, encode_choices, mean_stderr, most_likely};
use ridge_engine::scoring::Question;
use serde_json::{Value, json};

use super::args::EvalSettings;
use super::scoring::{EvalModel, show, unusable};
use crate::error::Result;
use crate::input;
use crate::output::{columns, count, note};

/// A question, parsed from a line.
struct ChoiceQuestion {
    line: usize,
    context: String,
    choices: Vec<String>,
    gold: usize,
}

pub(super) fn run(
    settings: &EvalSettings,
    opened: &EvalModel,
    file: &Path,
    limit: Option<usize>,
    delimiter: &str,
) -> Result<()> {
    let items = read(file, limit)?;
    let most = settings.context.unwrap_or(opened.config.max_context());
    let end = opened.tokenizer.bos().or(opened.tokenizer.eos()).or(opened.config.bos_token_id);
    let mut encoded = Vec::with_capacity(items.len());
    for item in &items {
        let place = || format!("{}:{}", file.display(), item.line);
        let texts: Vec<String> = item.choices.iter().map(|choice| format!("{delimiter}{choice}")).collect();
        let tokens = encode_choices(&opened.tokenizer, &item.context, &texts, &opened.begin, end)?;
        if tokens.context.is_empty() {
            return Err(unusable(place(), "its text is empty, and the model has no begin token"));
        }
        if let Some(i) = tokens.continuations.iter().position(Vec::is_empty) {
            return Err(unusable(place(), format!("answer {i} adds no token and cannot be scored")));
        }
        if let Some(long) = tokens.continuations.iter().map(Vec::len).find(|n| *n > most) {
            return Err(unusable(place(), format!("an answer has {long} tokens, more than the context of {most}")));
        }
        encoded.push(tokens);
    }
    // If one answer makes the text too long, each answer is scored separately, after as much of the end of the text as fits.
    let mut questions = Vec::with_capacity(encoded.len());
    let mut cut = 0;
    for Encoded { context, continuations } in &encoded {
        let whole = Question { context, continuations: continuations.iter().map(Vec::as_slice).collect() };
        if whole.positions() <= most {
            questions.push(whole);
            continue;
        }
        cut += 1;
        for answer in &whole.continuations {
            let kept = (most + 1 - answer.len()).min(context.len());
            questions.push(Question { context: &context[context.len() - kept..], continuations: vec![answer] });
        }
    }
    if cut > 0 && !settings.quiet && !settings.json {
        note(&format!("{} truncated at the beginning to fit the context of {most}", count(cut, "question")));
    }
    let scored = opened.score(settings, &questions)?;
    let mut sums = scored.scores.iter().flatten().map(|s| s.iter().map(|v| f64::from(*v)).sum::<f64>());
    let judged: Vec<Judged> = items.iter().map(|item| Judged::new(item, &mut sums)).collect();

    let names = ["acc", "acc_norm", "acc_bytes"];
    let rates = [0, 1, 2].map(|i| {
        let right: Vec<f64> = judged.iter().map(|j| f64::from(j.right[i])).collect();
        (right.iter().sum::<f64>() / right.len() as f64, mean_stderr(right))
    });
    let rows: Vec<Vec<String>> = names
        .iter()
        .zip(&rates)
        .map(|(name, (rate, stderr))| vec![(*name).to_owned(), format!("{rate:.4} ± {stderr:.4}")])
        .collect();
    let mut object = json!({
        "questions": items.len(),
        "truncated_questions": cut,
        "settings": { "context": most, "delimiter": delimiter },
        "items": items.iter().zip(&judged).zip(&encoded).map(|((item, judged), tokens)| json!({
            "line": item.line,
            "answer": item.gold,
            "log_likelihoods": judged.sums,
            "tokens": tokens.continuations.iter().map(Vec::len).collect::<Vec<_>>(),
            "chosen": judged.chosen[0],
            "chosen_norm": judged.chosen[1],
            "chosen_bytes": judged.chosen[2],
        })).collect::<Vec<_>>(),
    });
    for (name, (rate, stderr)) in names.iter().zip(rates) {
        object[name] = json!(rate);
        object[format!("{name}_stderr")] = json!(stderr);
    }
    let text = format!("{}: {}\n{}", file.display(), count(items.len(), "question"), columns(&rows));
    show(settings, opened, file, &scored, (text, object))
}

/// The model's choices: by total log-probability, by log-probability per character, and per byte.
struct Judged {
    sums: Vec<f64>,
    chosen: [usize; 3],
    right: [bool; 3],
}

impl Judged {
    fn new(item: &ChoiceQuestion, sums: &mut impl Iterator<Item = f64>) -> Self {
        let sums: Vec<f64> = sums.take(item.choices.len()).collect();
        let by = |length: fn(&str) -> usize| {
            let over = sums.iter().zip(&item.choices).map(|(sum, text)| sum / length(text).max(1) as f64);
            most_likely(&over.collect::<Vec<_>>())
        };
        let chosen = [by(|_| 1), by(|text| text.chars().count()), by(str::len)];
        Self { sums, chosen, right: chosen.map(|c| c == item.gold) }
    }
}

fn read(file: &Path, limit: Option<usize>) -> Result<Vec<ChoiceQuestion>> {
    let text = input::file(file)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let item = |(index, line): (usize, &str)| {
        let parsed: std::result::Result<Value, _> = serde_json::from_str(line);
        parsed
            .map_err(|error| format!("is not JSON: {error}"))
            .and_then(|value| ChoiceQuestion::new(index + 1, &value))
            .map_err(|problem| unusable(format!("{}:{}", file.display(), index + 1), problem))
    };
    let items: Vec<ChoiceQuestion> = lines.take(limit.unwrap_or(usize::MAX)).map(item).collect::<Result<_>>()?;
    if items.is_empty() {
        return Err(unusable(file.display(), "is empty; give a JSON Lines file with one question per line"));
    }
    Ok(items)
}

const CONTEXT: [&str; 5] = ["context", "question", "prompt", "query", "ctx"];
const CHOICES: [&str; 2] = ["choices", "endings"];
const ANSWER: [&str; 4] = ["answer", "gold", "label", "answerKey"];

/// The first of these fields that is present in `value`.
fn field<'a>(value: &'a Value, names: &[&'static str]) -> std::result::Result<(&'static str, &'a Value), String> {
    let found = names.iter().find_map(|name| value.get(name).map(|v| (*name, v)));
    found.ok_or_else(|| format!("has none of the fields {}", names.join(", ")))
}

impl ChoiceQuestion {
    /// Parses a line; the error states what is wrong with it.
    fn new(line: usize, value: &Value) -> std::result::Result<Self, String> {
        let (name, context) = field(value, &CONTEXT)?;
        let context = context.as_str().ok_or_else(|| format!("`{name}` is not a text"))?.to_owned();
        let (name, choices) = field(value, &CHOICES)?;
        let texts = |value: &Value| -> Option<Vec<String>> {
            value.as_array()?.iter().map(|v| v.as_str().map(str::to_owned)).collect()
        };
        let labels = choices.get("label").and_then(texts);
        let choices = texts(choices.get("text").unwrap_or(choices));
        let choices = choices.ok_or_else(|| format!("`{name}` is not a list of texts"))?;
        if choices.len() < 2 {
            return Err(format!("`{name}` has {}; at least two are needed", count(choices.len(), "answer")));
        }
        let (name, answer) = field(value, &ANSWER)?;
        let letter = |typed: &str| match typed.as_bytes() {
            [letter @ b'A'..=b'Z'] => Some(usize::from(letter - b'A')),
            [letter @ b'a'..=b'z'] => Some(usize::from(letter - b'a')),
            _ => None,
        };
        let gold = match answer {
            Value::Number(number) => number.as_u64().and_then(|n| usize::try_from(n).ok()),
            Value::String(typed) => labels
                .and_then(|labels| labels.iter().position(|label| label == typed))
                .or_else(|| typed.parse().ok())
                .or_else(|| choices.iter().position(|choice| choice == typed))
                .or_else(|| letter(typed)),
            _ => None,
        };
        match gold.filter(|gold| *gold < choices.len()) {
            Some(gold) => Ok(Self { line, context, choices, gold }),
            None => Err(format!("`{name}` is {answer}, but the answers are 0 to {}", choices.len() - 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gold(line: &str) -> std::result::Result<usize, String> {
        ChoiceQuestion::new(1, &serde_json::from_str(line).unwrap()).map(|item| item.gold)
    }

    #[test]
    fn the_fields_of_common_sets_are_understood() {
        assert_eq!(gold(r#"{"question": "q", "choices": ["x", "y", "z"], "answer": 2}"#), Ok(2), "MMLU");
        assert_eq!(gold(r#"{"ctx": "q", "endings": ["x", "y"], "label": "1"}"#), Ok(1), "HellaSwag");
        let arc = r#"{"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "1"}"#;
        assert_eq!(gold(arc), Ok(0), "ARC, whose labels are sometimes numbers");
        assert_eq!(gold(r#"{"query": "q", "choices": ["x", "y"], "gold": "B"}"#), Ok(1));
        assert_eq!(gold(r#"{"prompt": "q", "choices": ["x", "y"], "answer": "y"}"#), Ok(1));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let said = |line: &str| gold(line).unwrap_err();
        assert!(said("{}").contains("context, question"));
        assert!(said(r#"{"prompt": 1}"#).contains("`prompt` is not a text"));
        assert!(said(r#"{"prompt": "", "choices": ["x"]}"#).contains("at least two"));
        assert!(said(r#"{"prompt": "", "choices": ["x", "y"], "answer": 2}"#).contains("answers are 0 to 1"));
        assert!(said(r#"{"prompt": "", "choices": ["x", "y"], "answer": "C"}"#).contains("answers are 0 to 1"));
    }
}
