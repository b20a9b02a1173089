//! A JSON object, read key by key: values of the wrong type and unknown keys are rejected by name.

use serde_json::{Map, Value};

use crate::error::{ApiError, ApiResult};

/// The keys of an object that are still to be read. A key whose value is null counts as absent, as with OpenAI.
pub(crate) struct RequestFields {
    map: Map<String, Value>,
    /// What comes before a key in errors: empty, or `messages[2].`.
    place: String,
    /// Every key that was asked for.
    known: Vec<&'static str>,
}

impl RequestFields {
    /// The body of a request.
    pub(crate) fn body(bytes: &[u8]) -> ApiResult<Self> {
        let value = serde_json::from_slice(bytes)
            .map_err(|error| ApiError::bad(format!("the request is not valid JSON: {error}")))?;
        match value {
            Value::Object(map) => Ok(Self { map, place: String::new(), known: Vec::new() }),
            other => Err(ApiError::bad(format!("the request must be a JSON object, but is {}", shown(&other)))),
        }
    }

    /// The object at `place`.
    pub(crate) fn of(place: &str, value: Value) -> ApiResult<Self> {
        match value {
            Value::Object(map) => Ok(Self { map, place: format!("{place}."), known: Vec::new() }),
            other => Err(wrong(place, &other, "an object")),
        }
    }

    /// The full name of a key.
    pub(crate) fn name(&self, key: &str) -> String {
        format!("{}{key}", self.place)
    }

    pub(crate) fn take(&mut self, key: &'static str) -> Option<Value> {
        self.known.push(key);
        // The order of what is left does not matter; that of what was sent is kept for templates.
        self.map.swap_remove(key).filter(|value| !value.is_null())
    }

    fn read<T>(
        &mut self,
        key: &'static str,
        what: &str,
        as_type: impl Fn(&Value) -> Option<T>,
    ) -> ApiResult<Option<T>> {
        let Some(value) = self.take(key) else { return Ok(None) };
        as_type(&value).map(Some).ok_or_else(|| wrong(&self.name(key), &value, what))
    }

    pub(crate) fn bool(&mut self, key: &'static str) -> ApiResult<Option<bool>> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(crate) fn text(&mut self, key: &'static str) -> ApiResult<Option<String>> {
        self.read(key, "a string", |v| v.as_str().map(str::to_owned))
    }

    /// A number of f32.
    pub(crate) fn float(&mut self, key: &'static str) -> ApiResult<Option<f32>> {
        self.read(key, "a number", |v| v.as_f64().map(|x| x as f32).filter(|x| x.is_finite()))
    }

    /// A whole number from `least` to `most`.
    pub(crate) fn whole(&mut self, key: &'static str, least: u64, most: u64) -> ApiResult<Option<u64>> {
        let what = format!("a whole number from {least} to {most}");
        self.read(key, &what, |v| whole(v).filter(|n| (least..=most).contains(n)))
    }

    /// A whole number up to `most`, which is `what`.
    pub(crate) fn whole_up_to(&mut self, key: &'static str, most: u64, what: &str) -> ApiResult<Option<u64>> {
        self.read(key, what, |v| whole(v).filter(|n| *n <= most))
    }

    /// A whole number of 32 bits; -1 stands for 0 if that is all of something.
    pub(crate) fn whole_or_all(&mut self, key: &'static str, zero_is_all: bool) -> ApiResult<Option<u32>> {
        let what = if zero_is_all { "a whole number from 1, or 0 or -1 for all" } else { "a whole number from 0" };
        let all = |v: &Value| (zero_is_all && v.as_i64() == Some(-1)).then_some(0);
        self.read(key, what, |v| all(v).or_else(|| whole(v).and_then(|n| u32::try_from(n).ok())))
    }

    /// A whole number of 64 bits, negative ones too: a seed is any of them.
    pub(crate) fn seed(&mut self, key: &'static str) -> ApiResult<Option<u64>> {
        self.read(key, "a whole number of 64 bits", |v| whole(v).or_else(|| v.as_i64().map(i64::cast_unsigned)))
    }

    pub(crate) fn list(&mut self, key: &'static str) -> ApiResult<Option<Vec<Value>>> {
        let Some(value) = self.take(key) else { return Ok(None) };
        match value {
            Value::Array(list) => Ok(Some(list)),
            other => Err(wrong(&self.name(key), &other, "a list")),
        }
    }

    pub(crate) fn object(&mut self, key: &'static str) -> ApiResult<Option<Self>> {
        self.take(key).map(|value| Self::of(&self.name(key), value)).transpose()
    }

    /// Tokens of the vocabulary, or whatever ids are: the engine knows which there are.
    pub(crate) fn ids(&mut self, key: &'static str) -> ApiResult<Option<Vec<u32>>> {
        let Some(list) = self.list(key)? else { return Ok(None) };
        ids(&self.name(key), &list).map(Some)
    }

    /// One of `allowed` texts.
    pub(crate) fn one_of(&mut self, key: &'static str, allowed: &[&'static str]) -> ApiResult<Option<&'static str>> {
        let what = format!("one of {}", allowed.join(", "));
        self.read(key, &what, |v| allowed.iter().find(|a| v.as_str() == Some(**a)).copied())
    }

    /// A value of `key` other than `only` is refused, for `why`.
    pub(crate) fn only(&mut self, key: &'static str, only: &[Value], why: &str) -> ApiResult<()> {
        match self.take(key).filter(|value| !only.contains(value)) {
            Some(value) => Err(ApiError::unsupported(self.name(key), format!("{} {why}", shown(&value)))),
            None => Ok(()),
        }
    }

    /// The value of a key that must be there.
    pub(crate) fn needed<T>(&self, key: &str, value: Option<T>) -> ApiResult<T> {
        value.ok_or_else(|| ApiError::param(self.name(key), "is missing"))
    }

    /// Refuses what nobody asked for; null counts as absent here too.
    pub(crate) fn done(self) -> ApiResult<()> {
        let Some((key, _)) = self.map.iter().find(|(_, value)| !value.is_null()) else { return Ok(()) };
        let nearest = self.known.iter().map(|known| (distance(known, key), *known)).min();
        let near = nearest.filter(|(distance, known)| *distance <= known.len().max(4) / 3);
        let hint = near.map_or(String::new(), |(_, known)| format!("; did you mean {known}?"));
        let key: String = key.chars().take(64).collect();
        Err(ApiError {
            code: Some("unknown_parameter"),
            ..ApiError::param(self.name(&key), format!("is not a parameter of this server{hint}"))
        })
    }
}

/// Numbers such as 16.0 are whole: some clients know no other.
fn whole(value: &Value) -> Option<u64> {
    let whole = |x: f64| (x.fract() == 0.0 && (0.0..9.007_199_254_740_992e15).contains(&x)).then_some(x as u64);
    value.as_u64().or_else(|| value.as_f64().filter(|_| value.is_f64()).and_then(whole))
}

/// The ids of a list at `place`.
pub(crate) fn ids(place: &str, list: &[Value]) -> ApiResult<Vec<u32>> {
    let id = |(i, v): (usize, &Value)| {
        let id = whole(v).and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| wrong(&format!("{place}[{i}]"), v, "a token id, a whole number"))
    };
    list.iter().enumerate().map(id).collect()
}

/// A value of the wrong kind.
pub(crate) fn wrong(place: &str, value: &Value, what: &str) -> ApiError {
    ApiError::param(place, format!("must be {what}, but is {}", shown(value)))
}

/// A value, shortened: errors go into logs.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::Object(_) => "an object".to_owned(),
        Value::String(text) if text.chars().count() > 40 => {
            format!("{:?}...", text.chars().take(40).collect::<String>())
        }
        other => other.to_string(),
    }
}

/// Letters to add, take or change until `a` is `b`.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> RequestFields {
        RequestFields::body(text.as_bytes()).unwrap()
    }

    #[test]
    fn unknown_keys_are_refused_with_the_nearest() {
        let mut f = fields(r#"{"temprature": 1}"#);
        assert_eq!(f.float("temperature"), Ok(None));
        let error = f.done().unwrap_err();
        assert_eq!(error.param.as_deref(), Some("temprature"));
        assert!(error.message.ends_with("did you mean temperature?"), "{}", error.message);
        let mut f = fields(r#"{"qqqqqqqqqq": 1}"#);
        assert_eq!(f.bool("n"), Ok(None));
        assert!(!f.done().unwrap_err().message.contains("did you mean"));
        assert!(fields(r#"{"tool_calls": null}"#).done().is_ok());
    }

    #[test]
    fn wrong_types_are_named_with_what_was_sent() {
        for (text, said) in [
            (r#"{"n": "1"}"#, r#"n: must be a whole number from 1 to 8, but is "1""#),
            (r#"{"n": 1.5}"#, "n: must be a whole number from 1 to 8, but is 1.5"),
            (r#"{"n": -1}"#, "n: must be a whole number from 1 to 8, but is -1"),
            (r#"{"n": 9}"#, "n: must be a whole number from 1 to 8, but is 9"),
            (r#"{"n": [1, 2]}"#, "n: must be a whole number from 1 to 8, but is a list of 2"),
            (r#"{"n": 1e300}"#, "n: must be a whole number from 1 to 8, but is 1e300"),
        ] {
            assert_eq!(fields(text).whole("n", 1, 8).unwrap_err().message.replace("1e+300", "1e300"), said);
        }
        assert_eq!(fields(r#"{"n": 2.0}"#).whole("n", 1, 8), Ok(Some(2)));
        assert_eq!(fields(r#"{"n": null}"#).whole("n", 1, 8), Ok(None));
        assert!(fields(r#"{"t": 1e39}"#).float("t").is_err());
        assert_eq!(fields(r#"{"s": -1}"#).seed("s"), Ok(Some(u64::MAX)));
        assert_eq!(fields(r#"{"i": [1, 4294967296]}"#).ids("i").unwrap_err().param.as_deref(), Some("i[1]"));
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for text in ["", "[", "[]", "3", "{\"a\": \"\\ud800\"}", "{\"a\": 1e999}", "{} x", "{\"a\": \"\u{0}\"}"] {
            assert!(RequestFields::body(text.as_bytes()).is_err(), "{text}");
        }
        assert!(RequestFields::body(b"{\"a\": \"\xff\"}").is_err());
        let deep = format!("{}{}", "{\"a\":".repeat(5000), "}".repeat(5000));
        assert!(RequestFields::body(deep.as_bytes()).is_err());
    }
}
