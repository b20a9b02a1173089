//! Methods of Python's strings, and of dicts, lists, tuples and loops.

use std::ops::Range;
use std::sync::Arc;

use super::args::{Args, Bound};
use super::fault::{Res, fail, unsupported};
use super::renderer::Renderer;
use super::text;
use super::value::{Value, View};

/// A limit of splits or replacements: negative numbers mean none.
fn count(bound: &mut Bound, at: usize) -> Res<Option<usize>> {
    Ok(bound.int(at)?.and_then(|count| usize::try_from(count).ok()))
}

fn width(bound: &mut Bound, at: usize) -> Res<usize> {
    Ok(usize::try_from(bound.int(at)?.unwrap_or(0).max(0)).unwrap_or(usize::MAX))
}

fn required(bound: &mut Bound, at: usize) -> Res<Arc<str>> {
    bound.text(at)?.map_or_else(|| fail("expected str, got NoneType"), Ok)
}

impl Renderer<'_> {
    /// `object.name(args)`
    pub(crate) fn method(&self, object: &Value, name: &str, args: Args) -> Res<Value> {
        match object {
            Value::Str(text) => self.str_method(text, name, args),
            Value::Markup(text) => self.markup_method(text, name, args),
            Value::Dict(dict) => match name {
                "keys" => args.none(name).map(|()| Value::View(View::Keys, dict.clone())),
                "values" => args.none(name).map(|()| Value::View(View::Values, dict.clone())),
                "items" => args.none(name).map(|()| Value::View(View::Items, dict.clone())),
                "copy" => args.none(name).map(|()| object.clone()),
                _ => {
                    let mut bound = args.bind(name, &["/key", "/default"], 1)?;
                    let key = bound.value(0);
                    Ok(dict.get(&key)?.cloned().unwrap_or_else(|| bound.value(1)))
                }
            },
            Value::List(items) | Value::Tuple(items) => match name {
                "copy" => args.none(name).map(|()| object.clone()),
                "count" => {
                    let wanted = args.bind(name, &["/value"], 1)?.value(0);
                    let mut found = 0;
                    for item in items.iter() {
                        found += i128::from(self.equal(item, &wanted)?);
                    }
                    Ok(Value::Int(found))
                }
                _ => {
                    let mut bound = args.bind(name, &["/value", "/start", "/stop"], 1)?;
                    let wanted = bound.value(0);
                    let range = window(items.len(), bound.int(1)?, bound.int(2)?);
                    for at in range {
                        if self.equal(&items[at], &wanted)? {
                            return Ok(Value::Int(at as i128));
                        }
                    }
                    fail(format!("the value is not in the {}", object.type_name()))
                }
            },
            Value::Loop(state) if name == "cycle" => match args.positional.len() {
                0 => fail("no items for cycling given"),
                count => Ok(args.positional[state.index0.get() % count].clone()),
            },
            Value::Loop(state) => {
                let now = Value::tuple(args.positional)?;
                let before = state.last_changed.borrow().clone();
                let same = before.map_or(Ok(false), |before| self.equal(&before, &now))?;
                if !same {
                    state.last_changed.replace(Some(now));
                }
                Ok(Value::Bool(!same))
            }
            Value::Cycler(_, cycler) => {
                args.none(name)?;
                let at = cycler.1.get();
                if name == "reset" {
                    cycler.1.set(0);
                    return Ok(Value::None);
                }
                cycler.1.set((at + 1) % cycler.0.len());
                Ok(cycler.0[at].clone())
            }
            other => unsupported(format!("method {name}() of a {} is not supported", other.type_name())),
        }
    }

    /// A method of an escaped string: what it adds is escaped, and the texts that it gives are such strings too.
    fn markup_method(&self, text: &Arc<str>, name: &str, mut args: Args) -> Res<Value> {
        let escape = |value: &Value| match value {
            Value::Str(_) => self.escaped(value).map(Value::Str),
            other => Ok(other.clone()),
        };
        match (name, args.positional.get(1), args.positional.first()) {
            ("replace" | "ljust" | "rjust" | "center", Some(added), _) => args.positional[1] = escape(added)?,
            ("join", _, Some(items)) => {
                let items: Vec<Value> = self.items(items)?.iter().map(escape).collect::<Res<_>>()?;
                args.positional[0] = Value::list(items)?;
            }
            _ => {}
        }
        let markup = |value: &Value| match value {
            Value::Str(text) => Value::Markup(text.clone()),
            other => other.clone(),
        };
        Ok(match self.str_method(text, name, args)? {
            Value::List(items) => Value::list(items.iter().map(markup).collect())?,
            Value::Tuple(items) => Value::tuple(items.iter().map(markup).collect())?,
            other => markup(&other),
        })
    }

    /// A list of texts.
    pub(crate) fn texts<'t>(&self, parts: impl IntoIterator<Item = &'t str>) -> Res<Vec<Value>> {
        let mut values = Vec::new();
        for part in parts {
            self.charge(16 + part.len())?;
            values.push(Value::str(part));
        }
        Ok(values)
    }

    fn str_method(&self, text: &Arc<str>, name: &str, args: Args) -> Res<Value> {
        self.work(text.len())?;
        let whole: &str = text;
        match name {
            "strip" | "lstrip" | "rstrip" => {
                let chars = args.bind(name, &["/chars"], 0)?.text(0)?;
                self.string(strip(whole, chars.as_deref(), name != "rstrip", name != "lstrip").to_owned())
            }
            "upper" => args.none(name).and_then(|()| self.string(whole.to_uppercase())),
            "lower" => args.none(name).and_then(|()| self.string(whole.to_lowercase())),
            "title" => args.none(name).and_then(|()| self.string(text::title(whole)?)),
            "capitalize" => args.none(name).and_then(|()| self.string(text::capitalize(whole)?)),
            "swapcase" => args.none(name).and_then(|()| self.string(text::swapcase(whole)?)),
            "isupper" => args.none(name).map(|()| Value::Bool(text::all_of_case(whole, false))),
            "islower" => args.none(name).map(|()| Value::Bool(text::all_of_case(whole, true))),
            "istitle" => args.none(name).map(|()| Value::Bool(text::is_title_text(whole))),
            "isascii" => args.none(name).map(|()| Value::Bool(whole.is_ascii())),
            "isspace" => args.none(name).and_then(|()| {
                text::all_chars(whole, name, text::is_space, |c| Some(text::is_space(c))).map(Value::Bool)
            }),
            "isalpha" => args.none(name).and_then(|()| {
                text::all_chars(whole, name, |c| c.is_ascii_alphabetic(), text::is_letter).map(Value::Bool)
            }),
            "isdigit" => args
                .none(name)
                .and_then(|()| text::all_chars(whole, name, |c| c.is_ascii_digit(), text::is_digit).map(Value::Bool)),
            "isalnum" => args.none(name).and_then(|()| {
                let other = |c| if text::is_digit(c).is_none() { Some(true) } else { text::is_letter(c) };
                text::all_chars(whole, name, |c| c.is_ascii_alphanumeric(), other).map(Value::Bool)
            }),
            "split" | "rsplit" => {
                let mut bound = args.bind(name, &["sep", "maxsplit"], 0)?;
                let separator = bound.text(0)?;
                let most = count(&mut bound, 1)?;
                let parts = split(whole, separator.as_deref(), most, name == "rsplit")?;
                Value::list(self.texts(parts)?)
            }
            "splitlines" => {
                let keep = args.bind(name, &["keepends"], 0)?.flag(0, false);
                Value::list(self.texts(text::lines(whole, keep))?)
            }
            "partition" | "rpartition" => {
                let separator = required(&mut args.bind(name, &["/sep"], 1)?, 0)?;
                if separator.is_empty() {
                    return fail("empty separator");
                }
                let last = name == "rpartition";
                let found = if last { whole.rsplit_once(&*separator) } else { whole.split_once(&*separator) };
                let parts = match found {
                    Some((before, after)) => [before, &separator, after],
                    None if last => ["", "", whole],
                    None => [whole, "", ""],
                };
                Value::tuple(self.texts(parts)?)
            }
            "replace" => {
                let mut bound = args.bind(name, &["/old", "/new", "/count"], 2)?;
                let (old, new) = (required(&mut bound, 0)?, required(&mut bound, 1)?);
                let most = count(&mut bound, 2)?;
                self.replace(whole, &old, &new, most)
            }
            "startswith" | "endswith" => self.starts_or_ends(whole, name, args),
            "find" | "rfind" | "index" | "rindex" | "count" => Self::find(whole, name, args),
            "join" => {
                let items = self.items(&args.bind(name, &["/iterable"], 1)?.value(0))?;
                let mut joined = String::new();
                for (at, item) in items.iter().enumerate() {
                    let (Value::Str(part) | Value::Markup(part)) = item else {
                        let kind = item.type_name();
                        return fail(format!("sequence item {at}: expected str instance, {kind} found"));
                    };
                    self.charge(part.len() + whole.len())?;
                    joined.push_str(if at == 0 { "" } else { whole });
                    joined.push_str(part);
                }
                Ok(Value::str(joined))
            }
            "removeprefix" | "removesuffix" => {
                let affix = required(&mut args.bind(name, &["/affix"], 1)?, 0)?;
                let rest = match name {
                    "removeprefix" => whole.strip_prefix(&*affix),
                    _ => whole.strip_suffix(&*affix),
                };
                self.string(rest.unwrap_or(whole).to_owned())
            }
            "ljust" | "rjust" | "center" => {
                let mut bound = args.bind(name, &["/width", "/fillchar"], 1)?;
                let width = width(&mut bound, 0)?;
                let fill = bound.text(1)?.unwrap_or_else(|| " ".into());
                self.pad(whole, width, &fill, name)
            }
            "zfill" => {
                let width = width(&mut args.bind(name, &["/width"], 1)?, 0)?;
                let sign = usize::from(whole.starts_with(['+', '-']));
                let zeros = width.saturating_sub(whole.chars().count());
                self.charge(zeros)?;
                self.string(format!("{}{}{}", &whole[..sign], "0".repeat(zeros), &whole[sign..]))
            }
            "expandtabs" => {
                let size = args.bind(name, &["tabsize"], 0)?.int(0)?.unwrap_or(8);
                self.expand_tabs(whole, usize::try_from(size.max(0)).unwrap_or(usize::MAX))
            }
            _ => self.str_format(whole, &args),
        }
    }

    /// `str.replace`.
    pub(crate) fn replace(&self, text: &str, old: &str, new: &str, most: Option<usize>) -> Res<Value> {
        let found = if old.is_empty() { text.chars().count() + 1 } else { text.matches(old).count() };
        let found = found.min(most.unwrap_or(usize::MAX));
        self.charge(text.len().saturating_add(found.saturating_mul(new.len())))?;
        Ok(Value::str(text.replacen(old, new, found)))
    }

    /// `str.ljust`, `str.rjust` and `str.center`.
    pub(crate) fn pad(&self, text: &str, width: usize, fill: &str, side: &str) -> Res<Value> {
        if fill.chars().count() != 1 {
            return fail("The fill character must be exactly one character long");
        }
        let missing = width.saturating_sub(text.chars().count());
        self.charge(missing.saturating_mul(fill.len()))?;
        let left = match side {
            "ljust" => 0,
            "rjust" => missing,
            // CPython's way to share an odd number.
            _ => missing / 2 + (missing & width & 1),
        };
        self.string(format!("{}{text}{}", fill.repeat(left), fill.repeat(missing - left)))
    }

    fn expand_tabs(&self, text: &str, size: usize) -> Res<Value> {
        let mut out = String::new();
        let mut column = 0;
        for c in text.chars() {
            match c {
                '\t' => {
                    let spaces = if size == 0 { 0 } else { size - column % size };
                    self.charge(spaces)?;
                    out.push_str(&" ".repeat(spaces));
                    column += spaces;
                }
                '\n' | '\r' => {
                    out.push(c);
                    column = 0;
                }
                _ => {
                    out.push(c);
                    column += 1;
                }
            }
        }
        self.string(out)
    }

    fn starts_or_ends(&self, text: &str, name: &str, args: Args) -> Res<Value> {
        let mut bound = args.bind(name, &["/affix", "/start", "/end"], 1)?;
        let affixes = match bound.value(0) {
            Value::Tuple(affixes) => affixes.items.clone(),
            one => vec![one],
        };
        let part = part(text, bound.int(1)?, bound.int(2)?);
        for affix in affixes {
            let (Value::Str(affix) | Value::Markup(affix)) = &affix else {
                let kind = affix.type_name();
                return fail(format!("{name} first arg must be str or a tuple of str, not {kind}"));
            };
            self.work(affix.len())?;
            let is = part.is_some_and(|(_, part)| match name {
                "startswith" => part.starts_with(&**affix),
                _ => part.ends_with(&**affix),
            });
            if is {
                return Ok(Value::Bool(true));
            }
        }
        Ok(Value::Bool(false))
    }

    fn find(text: &str, name: &str, args: Args) -> Res<Value> {
        let mut bound = args.bind(name, &["/sub", "/start", "/end"], 1)?;
        let wanted = required(&mut bound, 0)?;
        let part = part(text, bound.int(1)?, bound.int(2)?);
        if name == "count" {
            let found = part.map_or(0, |(_, part)| match wanted.is_empty() {
                true => part.chars().count() + 1,
                false => part.matches(&*wanted).count(),
            });
            return Ok(Value::Int(found as i128));
        }
        let found = part.and_then(|(start, part)| {
            let at = if name.starts_with('r') { part.rfind(&*wanted) } else { part.find(&*wanted) }?;
            Some(start + part[..at].chars().count())
        });
        match found {
            Some(at) => Ok(Value::Int(at as i128)),
            None if name.ends_with("find") => Ok(Value::Int(-1)),
            None => fail("substring not found"),
        }
    }
}

/// `str.strip` of one end or both.
pub(crate) fn strip<'t>(text: &'t str, chars: Option<&str>, left: bool, right: bool) -> &'t str {
    let drop = |c: char| chars.map_or_else(|| text::is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(drop) } else { text };
    if right { text.trim_end_matches(drop) } else { text }
}

fn split<'t>(text: &'t str, separator: Option<&str>, most: Option<usize>, right: bool) -> Res<Vec<&'t str>> {
    Ok(match (separator, most) {
        (Some(""), _) => return fail("empty separator"),
        (None, most) if right => text::rsplit_space(text, most),
        (None, most) => text::split_space(text, most),
        (Some(separator), None) => text.split(separator).collect(),
        (Some(separator), Some(most)) if right => {
            let mut parts: Vec<&str> = text.rsplitn(most.saturating_add(1), separator).collect();
            parts.reverse();
            parts
        }
        (Some(separator), Some(most)) => text.splitn(most.saturating_add(1), separator).collect(),
    })
}

/// The range that `[start:stop]` means.
fn window(length: usize, start: Option<i128>, stop: Option<i128>) -> Range<usize> {
    let clamp = |bound: i128| {
        let from_start = if bound < 0 { bound.saturating_add(length as i128).max(0) } else { bound };
        usize::try_from(from_start).unwrap_or(usize::MAX).min(length)
    };
    start.map_or(0, clamp)..stop.map_or(length, clamp)
}

/// The part of a text that `start` and `stop` leave, and where it begins, in characters. Nothing if it begins behind
/// the end, where not even an empty text is found.
fn part(text: &str, start: Option<i128>, stop: Option<i128>) -> Option<(usize, &str)> {
    if start.is_none() && stop.is_none() {
        return Some((0, text));
    }
    let length = text.chars().count();
    if start.is_some_and(|start| start > length as i128) {
        return None;
    }
    let range = window(length, start, stop);
    if range.start > range.end {
        return None;
    }
    let byte = |at: usize| text.char_indices().nth(at).map_or(text.len(), |(byte, _)| byte);
    Some((range.start, &text[byte(range.start)..byte(range.end)]))
}
