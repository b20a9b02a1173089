//! What Python prints for a value: `str()` and `repr()`.

use std::fmt::Write;

use super::escape::quote;
use super::fault::{Res, unsupported};
use super::renderer::Renderer;
use super::value::{Value, View};

impl Renderer<'_> {
    /// `str(value)`.
    pub(crate) fn text(&self, value: &Value) -> Res<String> {
        let mut out = String::new();
        self.write_text(&mut out, value)?;
        Ok(out)
    }

    /// Appends `str(value)`.
    pub(crate) fn write_text(&self, out: &mut String, value: &Value) -> Res<()> {
        match value {
            Value::Str(text) | Value::Markup(text) => {
                self.charge(text.len())?;
                out.push_str(text);
                Ok(())
            }
            Value::Undefined(_) => Ok(()),
            other => self.write_repr(out, other),
        }
    }

    /// Appends `repr(value)`.
    pub(crate) fn write_repr(&self, out: &mut String, value: &Value) -> Res<()> {
        let before = out.len();
        // Writing to a string cannot fail.
        let _ = match value {
            Value::None => write!(out, "None"),
            Value::Bool(true) => write!(out, "True"),
            Value::Bool(false) => write!(out, "False"),
            Value::Int(i) => write!(out, "{i}"),
            Value::Float(x) => write!(out, "{}", float(*x)),
            Value::Undefined(_) => write!(out, "Undefined"),
            Value::Range(start, stop, 1) => write!(out, "range({start}, {stop})"),
            Value::Range(start, stop, step) => write!(out, "range({start}, {stop}, {step})"),
            Value::Loop(l) => write!(out, "<LoopContext {}/{}>", l.index0.get() + 1, l.length()),
            Value::Str(text) => {
                quote(out, text);
                Ok(())
            }
            Value::Markup(text) => {
                out.push_str("Markup(");
                quote(out, text);
                write!(out, ")")
            }
            Value::List(items) => return self.write_items(out, "[", items, "]"),
            Value::Tuple(items) if items.len() == 1 => return self.write_items(out, "(", items, ",)"),
            Value::Tuple(items) => return self.write_items(out, "(", items, ")"),
            Value::Dict(dict) => {
                self.charge(2)?;
                out.push('{');
                for (at, (key, value)) in dict.entries().iter().enumerate() {
                    self.charge(4)?;
                    out.push_str(if at == 0 { "" } else { ", " });
                    self.write_repr(out, key)?;
                    out.push_str(": ");
                    self.write_repr(out, value)?;
                }
                out.push('}');
                return Ok(());
            }
            Value::View(view, dict) => {
                let name = match view {
                    View::Keys => "dict_keys([",
                    View::Values => "dict_values([",
                    View::Items => "dict_items([",
                };
                let items: Vec<Value> = dict.entries().iter().map(|entry| view.item(entry)).collect::<Res<_>>()?;
                return self.write_items(out, name, &items, "])");
            }
            Value::Macro(m) => {
                out.push_str("<Macro ");
                match &m.def.name {
                    Some(name) => quote(out, name),
                    None => out.push_str("anonymous"),
                }
                write!(out, ">")
            }
            // Python would print an address.
            other => return unsupported(format!("printing a {} is not supported", other.type_name())),
        };
        self.charge(out.len() - before)
    }

    fn write_items(&self, out: &mut String, open: &str, items: &[Value], close: &str) -> Res<()> {
        self.charge(open.len() + close.len())?;
        out.push_str(open);
        for (at, item) in items.iter().enumerate() {
            self.charge(2)?;
            out.push_str(if at == 0 { "" } else { ", " });
            self.write_repr(out, item)?;
        }
        out.push_str(close);
        Ok(())
    }
}

/// Python's `repr` of a float: the shortest digits that give it back, with an exponent below 1e-4 and from 1e16 on.
pub(crate) fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if x == 0.0 || (-4..16).contains(&exponent) {
        let plain = format!("{x}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}
