//! Python's three ways to format: `%`, `str.format` and the format language behind it.

use super::args::Args;
use super::fault::{Res, fail, unsupported};
use super::ops::Num;
use super::renderer::Renderer;
use super::value::Value;

/// Widths and precisions beyond this are refused.
const WIDEST: usize = 1 << 16;

/// How a value is to be laid out.
#[derive(Clone, Copy, Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    zero: bool,
    alternate: bool,
    comma: Option<char>,
    width: usize,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Renderer<'_> {
    /// `format % values`
    pub(crate) fn percent(&self, format: &str, values: &Value) -> Res<Value> {
        let many = match values {
            Value::Tuple(items) => items.items.clone(),
            one => vec![one.clone()],
        };
        let mut next = many.iter();
        let mut out = String::new();
        let mut used_key = false;
        let mut chars = format.chars().peekable();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut key = None;
            if chars.next_if_eq(&'(').is_some() {
                let mut name = String::new();
                let mut depth = 1;
                for c in chars.by_ref() {
                    depth += i32::from(c == '(') - i32::from(c == ')');
                    if depth == 0 {
                        break;
                    }
                    name.push(c);
                }
                if depth > 0 {
                    return fail("incomplete format key");
                }
                let Value::Dict(dict) = values else {
                    return fail("format requires a mapping");
                };
                used_key = true;
                match dict.get_str(&name) {
                    Some(value) => key = Some(value.clone()),
                    None => return fail(format!("'{name}'")),
                }
            }
            let mut spec = Spec::default();
            while let Some(flag) = chars.next_if(|c| "-+ #0".contains(*c)) {
                match flag {
                    '-' => spec.align = Some('<'),
                    '#' => spec.alternate = true,
                    '0' => spec.zero = true,
                    '+' => spec.sign = Some('+'),
                    _ => spec.sign = spec.sign.or(Some(' ')),
                }
            }
            if chars.peek() == Some(&'*') {
                return unsupported("'*' in a format is not supported");
            }
            spec.width = number(&mut chars)?.unwrap_or(0);
            if chars.next_if_eq(&'.').is_some() {
                spec.precision = Some(number(&mut chars)?.unwrap_or(0));
            }
            while chars.next_if(|c| "hlL".contains(*c)).is_some() {}
            let Some(kind) = chars.next() else {
                return fail("incomplete format");
            };
            if kind == '%' {
                out.push('%');
                continue;
            }
            let value = match key {
                Some(value) => value,
                None => match next.next() {
                    Some(value) => value.clone(),
                    None => return fail("not enough arguments for format string"),
                },
            };
            let formatted = self.conversion(kind, &value, spec)?;
            self.charge(formatted.len())?;
            out.push_str(&formatted);
        }
        if next.next().is_some()
            && !used_key
            && !matches!(values, Value::Dict(_) | Value::List(_) | Value::Range(..) | Value::Undefined(_))
        {
            return fail("not all arguments converted during string formatting");
        }
        self.string(out)
    }

    fn conversion(&self, kind: char, value: &Value, mut spec: Spec) -> Res<String> {
        let integer = || match Num::of(value) {
            Some(Num::Int(i)) => Ok(i),
            Some(Num::Float(x)) if matches!(kind, 'd' | 'i' | 'u') && x.is_finite() && x.abs() < 1e38 => {
                Ok(x.trunc() as i128)
            }
            _ => fail(format!("%{kind} format: a real number is required, not {}", value.type_name())),
        };
        match kind {
            's' | 'r' => {
                let mut text = String::new();
                if kind == 's' {
                    self.write_text(&mut text, value)?;
                } else {
                    self.write_repr(&mut text, value)?;
                }
                spec.zero = false;
                Ok(layout(&cut(text, spec.precision), spec, '>'))
            }
            'd' | 'i' | 'u' => {
                if spec.precision.is_some() {
                    return unsupported("a precision of integers is not supported");
                }
                spec.kind = Some('d');
                digits(integer()?, spec)
            }
            'x' | 'X' | 'o' => {
                if spec.precision.is_some() {
                    return unsupported("a precision of integers is not supported");
                }
                spec.kind = Some(kind);
                digits(integer()?, spec)
            }
            'f' | 'F' | 'e' | 'E' | 'g' | 'G' => {
                let Some(number) = Num::of(value) else {
                    return fail(format!("must be real number, not {}", value.type_name()));
                };
                spec.kind = Some(kind);
                float(number.float(), spec)
            }
            _ => unsupported(format!("'%{kind}' is not supported")),
        }
    }

    /// `format.format(args)`
    pub(crate) fn str_format(&self, format: &str, args: &Args) -> Res<Value> {
        let mut out = String::new();
        let mut chars = format.chars().peekable();
        // Fields are numbered by hand or by themselves, never both.
        let mut automatic: Option<usize> = None;
        let mut manual = false;
        while let Some(c) = chars.next() {
            match c {
                '{' | '}' if chars.next_if_eq(&c).is_some() => out.push(c),
                '}' => return fail("Single '}' encountered in format string"),
                '{' => {
                    let mut field = String::new();
                    loop {
                        match chars.next() {
                            Some('}') => break,
                            Some('{') => return unsupported("fields inside of fields are not supported"),
                            Some(c) => field.push(c),
                            None => return fail("expected '}' before end of string"),
                        }
                    }
                    let (name, spec) = field.split_once(':').unwrap_or((&field, ""));
                    let (name, conversion) = match name.split_once('!') {
                        Some((name, conversion)) => (name, Some(conversion)),
                        None => (name, None),
                    };
                    if name.contains(['.', '[']) {
                        return unsupported("attributes and items in a format are not supported");
                    }
                    let index = if name.is_empty() {
                        let next = automatic.map_or(0, |at| at + 1);
                        automatic = Some(next);
                        Some(next)
                    } else {
                        let index = name.bytes().all(|b| b.is_ascii_digit()).then(|| name.parse().ok()).flatten();
                        manual |= index.is_some();
                        index
                    };
                    if manual && automatic.is_some() {
                        return fail("cannot switch between manual field specification and automatic numbering");
                    }
                    let value = match index {
                        Some(index) => args.positional.get(index),
                        None => args.named.iter().find(|(n, _)| **n == *name).map(|(_, value)| value),
                    };
                    let Some(value) = value else {
                        return fail(format!("the format names an argument that is not given: '{name}'"));
                    };
                    let formatted = self.field(value, conversion, spec)?;
                    self.charge(formatted.len())?;
                    out.push_str(&formatted);
                }
                _ => out.push(c),
            }
        }
        self.string(out)
    }

    fn field(&self, value: &Value, conversion: Option<&str>, spec: &str) -> Res<String> {
        let converted = match conversion {
            None => None,
            Some("s") => Some(self.text(value)?),
            Some("r") => {
                let mut text = String::new();
                self.write_repr(&mut text, value)?;
                Some(text)
            }
            Some(other) => return unsupported(format!("the conversion '!{other}' is not supported")),
        };
        let spec_is_empty = spec.is_empty();
        let parsed = parse(spec)?;
        match (converted, value) {
            (None, Value::Bool(_)) if !spec_is_empty => unsupported("a format of a bool is not supported"),
            (None, Value::Int(i)) if matches!(parsed.kind, Some('f' | 'F' | 'e' | 'E' | 'g' | 'G' | '%')) => {
                float(*i as f64, parsed)
            }
            (None, Value::Int(_)) if parsed.precision.is_some() => {
                fail("Precision not allowed in integer format specifier")
            }
            (None, Value::Int(i)) => digits(*i, parsed),
            (None, Value::Float(x)) if !spec_is_empty => match parsed.kind {
                None => unsupported("a format of a float without a kind is not supported"),
                Some(_) => float(*x, parsed),
            },
            (text, value) => {
                if text.is_none() && !spec_is_empty && !matches!(value, Value::Str(_)) {
                    return fail(format!("unsupported format string passed to {}.__format__", value.type_name()));
                }
                if !matches!(parsed.kind, None | Some('s')) || parsed.sign.is_some() || parsed.comma.is_some() {
                    return fail("Unknown format code for object of type 'str'");
                }
                let text = text.map_or_else(|| self.text(value), Ok)?;
                Ok(layout(&cut(text, parsed.precision), parsed, '<'))
            }
        }
    }
}

fn number(chars: &mut std::iter::Peekable<std::str::Chars<'_>>) -> Res<Option<usize>> {
    let mut found = None;
    while let Some(digit) = chars.next_if(char::is_ascii_digit) {
        let value = found.unwrap_or(0) * 10 + digit as usize - '0' as usize;
        if value > WIDEST {
            return unsupported(format!("widths of more than {WIDEST} are not supported"));
        }
        found = Some(value);
    }
    Ok(found)
}

/// `[[fill]align][sign][#][0][width][,][.precision][kind]`
fn parse(spec: &str) -> Res<Spec> {
    let mut parsed = Spec::default();
    let mut chars = spec.chars().peekable();
    let is_align = |c: &char| "<>=^".contains(*c);
    let mut ahead = spec.chars();
    if let (Some(fill), Some(align)) = (ahead.next(), ahead.next().filter(is_align)) {
        (parsed.fill, parsed.align) = (Some(fill), Some(align));
        chars = ahead.as_str().chars().peekable();
    } else {
        parsed.align = chars.next_if(is_align);
    }
    parsed.sign = chars.next_if(|c| "+- ".contains(*c));
    parsed.alternate = chars.next_if_eq(&'#').is_some();
    parsed.zero = chars.next_if_eq(&'0').is_some();
    parsed.width = number(&mut chars)?.unwrap_or(0);
    parsed.comma = chars.next_if(|c| ",_".contains(*c));
    if chars.next_if_eq(&'.').is_some() {
        parsed.precision = number(&mut chars)?;
    }
    parsed.kind = chars.next();
    if chars.next().is_some() || parsed.kind.is_some_and(|kind| !"dxXobfFeEgGs%".contains(kind)) {
        return unsupported(format!("the format '{spec}' is not supported"));
    }
    Ok(parsed)
}

fn cut(text: String, most: Option<usize>) -> String {
    match most {
        Some(most) => text.chars().take(most).collect(),
        None => text,
    }
}

/// Pads `text`, a number's sign with its digits or a word.
fn layout(text: &str, spec: Spec, align: char) -> String {
    let missing = spec.width.saturating_sub(text.chars().count());
    let zero = spec.zero && spec.align.is_none() && align == '>';
    let fill = spec.fill.unwrap_or(if spec.zero { '0' } else { ' ' });
    let pad = |count: usize| fill.to_string().repeat(count);
    match spec.align.unwrap_or(if zero { '=' } else { align }) {
        '<' => format!("{text}{}", pad(missing)),
        '^' => format!("{}{text}{}", pad(missing / 2), pad(missing - missing / 2)),
        '=' => {
            let sign = usize::from(text.starts_with(['+', '-', ' ']));
            format!("{}{}{}", &text[..sign], pad(missing), &text[sign..])
        }
        _ => format!("{}{text}", pad(missing)),
    }
}

fn sign(negative: bool, spec: Spec) -> &'static str {
    match (negative, spec.sign) {
        (true, _) => "-",
        (false, Some('+')) => "+",
        (false, Some(' ')) => " ",
        _ => "",
    }
}

fn digits(value: i128, spec: Spec) -> Res<String> {
    let magnitude = value.unsigned_abs();
    let plain = match spec.kind {
        None | Some('d') => magnitude.to_string(),
        Some('x') => format!("{magnitude:x}"),
        Some('X') => format!("{magnitude:X}"),
        Some('o') => format!("{magnitude:o}"),
        Some('b') => format!("{magnitude:b}"),
        Some(kind) => return fail(format!("Unknown format code '{kind}' for object of type 'int'")),
    };
    if spec.alternate || spec.comma == Some('_') || spec.comma.is_some() && !matches!(spec.kind, None | Some('d')) {
        return unsupported("this format of an integer is not supported");
    }
    grouped(plain, value < 0, spec)
}

fn grouped(plain: String, negative: bool, spec: Spec) -> Res<String> {
    let Some(comma) = spec.comma else {
        return Ok(layout(&(sign(negative, spec).to_owned() + &plain), spec, '>'));
    };
    if spec.zero {
        return unsupported("zeros and commas in one format are not supported");
    }
    let whole = plain.find('.').unwrap_or(plain.len());
    let mut out = String::new();
    for (at, c) in plain.chars().enumerate() {
        if at > 0 && at < whole && (whole - at).is_multiple_of(3) {
            out.push(comma);
        }
        out.push(c);
    }
    Ok(layout(&(sign(negative, spec).to_owned() + &out), spec, '>'))
}

fn float(x: f64, spec: Spec) -> Res<String> {
    if !x.is_finite() || spec.alternate {
        return unsupported("this format of a float is not supported");
    }
    let precision = spec.precision.unwrap_or(6);
    let magnitude = x.abs();
    let plain = match spec.kind {
        Some('f' | 'F') => format!("{magnitude:.precision$}"),
        Some('%') => format!("{:.precision$}%", magnitude * 100.0),
        Some('e') => exponent(magnitude, precision, "e"),
        Some('E') => exponent(magnitude, precision, "E"),
        _ => return unsupported("this format of a float is not supported"),
    };
    grouped(plain, x.is_sign_negative(), spec)
}

fn exponent(x: f64, precision: usize, e: &str) -> String {
    let text = format!("{x:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    format!("{digits}{e}{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}
