//! Traces: how many tokens the requests of a real service had, and when they came.

use std::path::Path;

use serde_json::Value;

use super::LoadError;

/// Tokens that one of the ids of a Mooncake trace stands for (Qin et al. 2024, section 4).
pub const TRACE_BLOCK: usize = 512;
/// Tokens of a request at most; more is a mistake of the file.
const MAX_TOKENS: u64 = 1 << 24;

/// A request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceRequest {
    /// Seconds after the first one; `None` if the trace has lengths alone.
    pub at: Option<f64>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the answer, at least 1.
    pub output_tokens: usize,
    /// What each [`TRACE_BLOCK`] tokens of the prompt are: the same id is the same text after the same ids.
    pub blocks: Vec<u64>,
}

/// Reads a trace: JSON lines as Mooncake's, with `timestamp` in ms, `input_length`, `output_length` and `hash_ids`, or a
/// CSV file as Azure's, with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`, or with `input_tokens` and
/// `output_tokens` alone. In the order of time.
///
/// # Errors
/// Names the file, the line and what is wrong with it.
pub fn read_trace(path: &Path) -> Result<Vec<TraceRequest>, LoadError> {
    let name = path.display().to_string();
    let text = std::fs::read(path).map_err(|cause| LoadError::Read { path: name.clone(), cause })?;
    let wrong = |line: usize, problem: String| LoadError::Data { place: format!("{name}:{}", line + 1), problem };
    let Ok(text) = str::from_utf8(&text) else {
        let line = text.split(|b| *b == b'\n').position(|l| str::from_utf8(l).is_err()).unwrap_or(0);
        return Err(wrong(line, "is not UTF-8; give a trace as CSV or as JSON lines".to_owned()));
    };
    let text = text.trim_start_matches('\u{feff}');
    let mut requests = Vec::new();
    let mut columns = None;
    for (i, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        let request = if line.starts_with('{') && columns.is_none() {
            json_line(line)
        } else if let Some(columns) = &columns {
            csv_line(line, columns)
        } else if requests.is_empty() {
            columns = Some(Columns::of(line).map_err(|problem| wrong(i, problem))?);
            continue;
        } else {
            Err("is not a JSON object, unlike the lines before it".to_owned())
        };
        requests.push(request.map_err(|problem| wrong(i, problem))?);
    }
    let first = requests.iter().filter_map(|r| r.at).fold(f64::INFINITY, f64::min);
    if requests.is_empty() {
        return Err(LoadError::Data { place: name, problem: "has no requests".to_owned() });
    }
    for request in &mut requests {
        request.at = request.at.map(|at| at - first);
    }
    requests.sort_by(|a, b| a.at.unwrap_or(0.0).total_cmp(&b.at.unwrap_or(0.0)));
    Ok(requests)
}

fn tokens(name: &str, value: Option<u64>, least: u64) -> Result<usize, String> {
    match value {
        Some(n) if (least..=MAX_TOKENS).contains(&n) => Ok(n as usize),
        _ => Err(format!("{name} must be a whole number from {least} to {MAX_TOKENS}")),
    }
}

fn json_line(line: &str) -> Result<TraceRequest, String> {
    let value: Value = serde_json::from_str(line).map_err(|error| format!("is not JSON: {error}"))?;
    let at = match &value["timestamp"] {
        Value::Null => None,
        ms => {
            let ms = ms.as_f64().filter(|ms| *ms >= 0.0);
            Some(ms.ok_or("timestamp must be milliseconds from 0 on")? / 1000.0)
        }
    };
    let prompt_tokens = tokens("input_length", value["input_length"].as_u64(), 1)?;
    let output_tokens = tokens("output_length", value["output_length"].as_u64(), 1)?;
    let blocks = match &value["hash_ids"] {
        Value::Null => Vec::new(),
        Value::Array(ids) => {
            let ids: Option<Vec<u64>> = ids.iter().map(Value::as_u64).collect();
            ids.ok_or("hash_ids must be whole numbers")?
        }
        _ => return Err("hash_ids must be a list".to_owned()),
    };
    let most = prompt_tokens.div_ceil(TRACE_BLOCK);
    if blocks.len() > most {
        let ids = blocks.len();
        return Err(format!("has {ids} hash_ids, but {prompt_tokens} tokens have {most} blocks of {TRACE_BLOCK}"));
    }
    Ok(TraceRequest { at, prompt_tokens, output_tokens, blocks })
}

/// Where in a line of a CSV file things stand.
struct Columns {
    at: Option<usize>,
    prompt: usize,
    output: usize,
}

impl Columns {
    fn of(head: &str) -> Result<Self, String> {
        let find = |names: &[&str]| {
            head.split(',').position(|column| names.iter().any(|n| column.trim().eq_ignore_ascii_case(n)))
        };
        let missing = |names: &[&str]| format!("the header has no column {}", names.join(" or "));
        let (prompt, output) = (["ContextTokens", "input_tokens"], ["GeneratedTokens", "output_tokens"]);
        Ok(Self {
            at: find(&["TIMESTAMP"]),
            prompt: find(&prompt).ok_or_else(|| missing(&prompt))?,
            output: find(&output).ok_or_else(|| missing(&output))?,
        })
    }
}

fn csv_line(line: &str, columns: &Columns) -> Result<TraceRequest, String> {
    let cells: Vec<&str> = line.split(',').map(str::trim).collect();
    let cell =
        |at: usize| cells.get(at).copied().ok_or_else(|| format!("has {} columns and needs {}", cells.len(), at + 1));
    let number = |name: &str, at: usize, least| tokens(name, cell(at)?.parse().ok(), least);
    let at = match columns.at {
        None => None,
        Some(column) => {
            let text = cell(column)?;
            let problem =
                || format!("{text:?} is neither a time such as 2023-11-16 18:15:46.6805900 nor a number of seconds");
            Some(seconds(text).ok_or_else(problem)?)
        }
    };
    Ok(TraceRequest {
        at,
        prompt_tokens: number("the prompt tokens", columns.prompt, 1)?,
        output_tokens: number("the output tokens", columns.output, 1)?,
        blocks: Vec::new(),
    })
}

/// Seconds of a day and time of the Gregorian calendar since some day, or of a number.
fn seconds(text: &str) -> Option<f64> {
    if let Ok(seconds) = text.parse::<f64>() {
        return (seconds >= 0.0 && seconds.is_finite()).then_some(seconds);
    }
    let (date, time) = text.split_once([' ', 'T'])?;
    let time = time.split(['+', 'Z']).next()?;
    let mut date = date.splitn(3, '-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut clock = time.splitn(3, ':');
    let (hour, minute) = (clock.next()?.parse::<u32>().ok()?, clock.next()?.parse::<u32>().ok()?);
    let second = clock.next()?.parse::<f64>().ok()?;
    let possible = (1..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !possible || hour > 23 || minute > 59 || !(0.0..61.0).contains(&second) {
        return None;
    }
    // Days since 1 March of year 0: the year begins in March, so that its leap day is its last.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1;
    // Counted from near the year 2000, so that fractions of a second keep their digits.
    Some((days - 730_000) as f64 * 86400.0 + f64::from(hour * 3600 + minute * 60) + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> Vec<TraceRequest> {
        read_trace(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/traces").join(name)).unwrap()
    }

    fn read(text: impl AsRef<[u8]>) -> Result<Vec<TraceRequest>, String> {
        let file =
            std::env::temp_dir().join(format!("ridge-trace-{}-{:?}", std::process::id(), std::thread::current().id()));
        std::fs::write(&file, text).unwrap();
        let read = read_trace(&file).map_err(|e| e.to_string().replace(&file.display().to_string(), "t"));
        std::fs::remove_file(file).unwrap();
        read
    }

    #[test]
    fn azure_requests_have_their_lengths_and_times() {
        let requests = fixture("azure_2023_conv.csv");
        assert_eq!((requests[0].at, requests[0].prompt_tokens, requests[0].output_tokens), (Some(0.0), 374, 44));
        assert_eq!((requests[1].prompt_tokens, requests[1].output_tokens), (396, 109));
        assert!((requests[1].at.unwrap() - (50.995_169 - 46.680_59)).abs() < 1e-6);
        assert!(requests.windows(2).all(|w| w[0].at <= w[1].at));
    }

    #[test]
    fn mooncake_requests_have_their_blocks() {
        let requests = fixture("mooncake_conversation.jsonl");
        assert_eq!((requests[0].prompt_tokens, requests[0].output_tokens), (6758, 500));
        assert_eq!(requests[0].blocks, (0..14).collect::<Vec<u64>>());
        assert!(requests.iter().all(|r| r.blocks.len() == r.prompt_tokens.div_ceil(TRACE_BLOCK)));
        assert!(requests.last().unwrap().at > Some(0.0));
    }

    #[test]
    fn times_cross_midnight_months_and_leap_days() {
        let at = |text| seconds(text).unwrap();
        for (from, to, gap) in [
            ("2023-11-16 23:59:59.5", "2023-11-17 00:00:01.25", 1.75),
            ("2023-12-31 23:59:59", "2024-01-01 00:00:00", 1.0),
            ("2024-02-28 00:00:00", "2024-03-01 00:00:00", 2.0 * 86400.0),
            ("2023-02-28 00:00:00", "2023-03-01T00:00:00", 86400.0),
            ("2000-01-01 00:00:00", "2001-01-01 00:00:00", 366.0 * 86400.0),
        ] {
            assert_eq!(at(to) - at(from), gap, "{from} {to}");
        }
        for wrong in
            ["", "2023-11-16", "2023-13-01 00:00:00", "2023-01-01 24:00:00", "-1", "nan", "inf", "a b", "1-2-3 4"]
        {
            assert_eq!(seconds(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn lengths_alone_are_a_trace_without_times() {
        let requests = read("input_tokens,output_tokens\r\n523,497\r\n\r\n559,12\r\n").unwrap();
        assert_eq!(
            requests.iter().map(|r| (r.at, r.prompt_tokens, r.output_tokens)).collect::<Vec<_>>(),
            [(None, 523, 497), (None, 559, 12)]
        );
    }

    #[test]
    fn what_is_wrong_with_a_trace_is_named_by_line() {
        let json = |more: &str| format!("{{\"timestamp\": 1, \"input_length\": 600, \"output_length\": 2{more}}}");
        for (text, said) in [
            (b"".as_slice(), "t: has no requests"),
            (b"\n\n", "t: has no requests"),
            (b"a,b\n1,2\n", "t:1: the header has no column ContextTokens"),
            (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3\n", "t:2: has 2 columns and needs 3"),
            (b"input_tokens,output_tokens\n5,-1\n", "t:2: the output tokens must be a whole number from 1"),
            (b"input_tokens,output_tokens\n99999999999999999999,1\n", "t:2: the prompt tokens must be"),
            (b"TIMESTAMP,input_tokens,output_tokens\nsoon,1,1\n", "t:2: \"soon\" is neither a time"),
            (b"input_tokens,output_tokens\n\xff,1\n", "t:2: is not UTF-8"),
            (b"{\"input_length\": 1", "t:1: is not JSON"),
            (b"{\"input_length\": 1.5, \"output_length\": 1}", "t:1: input_length must be"),
            (json(", \"hash_ids\": [1, 2, 3]").as_bytes(), "t:1: has 3 hash_ids, but 600 tokens have 2 blocks"),
            (json(", \"hash_ids\": [-1]").as_bytes(), "t:1: hash_ids must be whole"),
            (json(", \"hash_ids\": 7").as_bytes(), "t:1: hash_ids must be a list"),
            (json(", \"timestamp\": \"x\"").as_bytes(), "t:1: timestamp must be"),
            (format!("{}\nx", json("")).as_bytes(), "t:2: is not a JSON object"),
            ("[".repeat(100_000).as_bytes(), "t:1: the header"),
            (format!("{{\"a\":{}", "[".repeat(100_000)).as_bytes(), "t:1: is not JSON: recursion limit"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.starts_with(said), "{error}");
        }
    }
}
