//! Filters of lists and other things to walk over.

use std::cmp::Ordering;
use std::sync::Arc;

use crate::template::jinja::args::Args;
use crate::template::jinja::ast::Op;
use crate::template::jinja::fault::{Res, fail, unsupported};
use crate::template::jinja::renderer::Renderer;
use crate::template::jinja::value::{Dict, Value};

impl Renderer<'_> {
    pub(super) fn list_filter(&self, name: &str, value: Value, args: Args) -> Res<Value> {
        match name {
            "list" => args.none(name).and_then(|()| Value::list(self.items(&value)?)),
            "first" => {
                args.none(name)?;
                let first = self.iterate(&value)?.borrow_mut().pop_front();
                first.unwrap_or_else(|| Ok(Value::undefined("No first item, sequence was empty.")))
            }
            "last" => {
                args.none(name)?;
                let last = self.reversed(&value)?.into_iter().next();
                Ok(last.unwrap_or_else(|| Value::undefined("No last item, sequence was empty.")))
            }
            "reverse" => {
                args.none(name)?;
                match &value {
                    Value::Str(text) => self.string(text.chars().rev().collect()),
                    Value::Markup(_) => unsupported("reverse of a string made by escape or safe is not supported"),
                    Value::Iter(..) => {
                        let mut items = self.items(&value)?;
                        items.reverse();
                        Value::list(items)
                    }
                    _ => Ok(Value::iter(self.reversed(&value)?.into_iter().map(Ok))),
                }
            }
            "items" => {
                args.none(name)?;
                Ok(Value::iter(match &value {
                    Value::Undefined(_) => Vec::new(),
                    Value::Dict(dict) => self.pairs(dict)?.into_iter().map(Ok).collect(),
                    // A generator fails when the first item is taken from it.
                    _ => vec![fail("Can only get item pairs from a mapping.")],
                }))
            }
            "join" => self.join(&value, args),
            "sort" => {
                let mut bound = args.bind(name, &["reverse", "case_sensitive", "attribute"], 0)?;
                let (reverse, case) = (bound.flag(0, false), bound.flag(1, false));
                let paths = attributes(&bound.value(2));
                let mut items = self.items(&value)?;
                self.sort(&mut items, reverse, |item| {
                    let parts = paths.iter().map(|path| self.key(item, path, case, None)).collect::<Res<_>>()?;
                    Value::list(parts)
                })?;
                Value::list(items)
            }
            "dictsort" => self.dict_sort(&value, args),
            "unique" => {
                let mut bound = args.bind(name, &["case_sensitive", "attribute"], 0)?;
                let (case, path) = (bound.flag(0, false), bound.value(1));
                let mut seen = Dict::default();
                Ok(self.generate_all(&value, |item| {
                    let key = self.key(&item, &path, case, None)?;
                    let is_new = seen.get(&key)?.is_none();
                    if is_new {
                        seen.insert(key, Value::None)?;
                    }
                    Ok(is_new.then_some(item))
                }))
            }
            "min" | "max" => {
                let mut bound = args.bind(name, &["case_sensitive", "attribute"], 0)?;
                let (case, path) = (bound.flag(0, false), bound.value(1));
                let mut best: Option<(Value, Value)> = None;
                for item in self.items(&value)? {
                    let key = self.key(&item, &path, case, None)?;
                    let better = match &best {
                        None => true,
                        Some((least, _)) if name == "min" => self.compare("<", &key, least)? == Some(Ordering::Less),
                        Some((most, _)) => self.compare(">", &key, most)? == Some(Ordering::Greater),
                    };
                    if better {
                        best = Some((key, item));
                    }
                }
                let none = || Value::undefined("No aggregated item, sequence was empty.");
                Ok(best.map_or_else(none, |(_, item)| item))
            }
            "sum" => {
                let mut bound = args.bind(name, &["attribute", "start"], 0)?;
                let path = bound.value(0);
                let mut sum = bound.take(1).unwrap_or(Value::Int(0));
                if sum.as_str().is_some() {
                    return fail("sum() can't sum strings [use ''.join(seq) instead]");
                }
                for item in self.items(&value)? {
                    let part = self.path(&item, &path, None)?;
                    if matches!((&sum, &part), (Value::Float(_), _) | (_, Value::Float(_))) {
                        // Newer Pythons keep the rounding errors of a sum and add them in the end.
                        return unsupported("a sum of floats is not supported");
                    }
                    sum = self.binary(Op::Add, &sum, &part)?;
                }
                Ok(sum)
            }
            "batch" | "slice" => self.chunks(name, &value, args),
            "groupby" => self.group_by(&value, args),
            "map" => self.map(&value, args),
            _ => Ok(self.select(name, &value, &args)),
        }
    }

    /// What `reversed()` gives, of what has an order and a length.
    fn reversed(&self, value: &Value) -> Res<Vec<Value>> {
        match value {
            Value::Iter(..) | Value::Loop(_) => fail(format!("'{}' object is not reversible", value.type_name())),
            _ => {
                let mut items = self.items(value)?;
                items.reverse();
                Ok(items)
            }
        }
    }

    /// The key of an item: an attribute of it or itself, in small letters unless case counts.
    fn key(&self, item: &Value, path: &Value, case: bool, default: Option<&Value>) -> Res<Value> {
        let key = self.path(item, path, default)?;
        if case { Ok(key) } else { self.ignoring_case(key) }
    }

    /// [`generate_all`](Self::generate_all) of a value that is true; of others there are no items, whatever they are.
    fn generate(&self, value: &Value, each: impl FnMut(Value) -> Res<Option<Value>>) -> Value {
        if value.truthy() { self.generate_all(value, each) } else { Value::iter([]) }
    }

    /// A generator of what `each` makes of the items. It is run here and now, and an error is kept for whoever takes
    /// that item.
    fn generate_all(&self, value: &Value, mut each: impl FnMut(Value) -> Res<Option<Value>>) -> Value {
        let items = match self.iterate(value) {
            Ok(items) => items,
            Err(fault) => return Value::iter([Err(fault)]),
        };
        let mut made = Vec::new();
        loop {
            let next = items.borrow_mut().pop_front();
            let Some(item) = next else { break };
            match self.step().and(item).and_then(&mut each) {
                Ok(item) => made.extend(item.map(Ok)),
                Err(fault) => {
                    made.push(Err(fault));
                    break;
                }
            }
        }
        Value::iter(made)
    }

    fn join(&self, value: &Value, args: Args) -> Res<Value> {
        let mut bound = args.bind("join", &["d", "attribute"], 0)?;
        let separator = bound.take(0).map_or_else(|| Ok(String::new()), |d| self.text(&d))?;
        let path = bound.value(1);
        let mut joined = String::new();
        for (at, item) in self.items(value)?.iter().enumerate() {
            self.charge(separator.len())?;
            joined.push_str(if at == 0 { "" } else { &separator });
            self.write_text(&mut joined, &self.path(item, &path, None)?)?;
        }
        Ok(Value::str(joined))
    }

    fn dict_sort(&self, value: &Value, args: Args) -> Res<Value> {
        let mut bound = args.bind("dictsort", &["case_sensitive", "by", "reverse"], 0)?;
        let case = bound.flag(0, false);
        let by = bound.text(1)?.unwrap_or_else(|| "key".into());
        let reverse = bound.flag(2, false);
        if !matches!(&*by, "key" | "value") {
            return fail("You can only sort by either \"key\" or \"value\"");
        }
        let Value::Dict(dict) = value else {
            return match value {
                Value::Undefined(message) => fail(&**message),
                other => fail(format!("'{}' object has no attribute 'items'", other.type_name())),
            };
        };
        let mut entries: Vec<&(Value, Value)> = dict.entries().iter().collect();
        self.sort(&mut entries, reverse, |entry| {
            let key = if &*by == "key" { &entry.0 } else { &entry.1 };
            if case { Ok(key.clone()) } else { self.ignoring_case(key.clone()) }
        })?;
        let pairs = entries.into_iter().map(|(key, value)| Value::tuple(vec![key.clone(), value.clone()]));
        Value::list(pairs.collect::<Res<_>>()?)
    }

    fn chunks(&self, name: &str, value: &Value, args: Args) -> Res<Value> {
        let mut bound = args.bind(name, &[if name == "batch" { "linecount" } else { "slices" }, "fill_with"], 1)?;
        let size = usize::try_from(bound.int(0)?.unwrap_or(0)).unwrap_or(0);
        if size == 0 || size > 100_000 {
            return unsupported(format!("{name} needs a size of 1 to 100000"));
        }
        let fill = bound.take(1).filter(|fill| !matches!(fill, Value::None));
        let items = self.items(value)?;
        let mut chunks: Vec<Vec<Value>> = Vec::new();
        if name == "batch" {
            chunks.extend(items.chunks(size).map(<[Value]>::to_vec));
            if let (Some(last), Some(fill)) = (chunks.last_mut(), &fill) {
                self.charge(16 * size)?;
                last.resize(size, fill.clone());
            }
        } else {
            let (each, extra) = (items.len() / size, items.len() % size);
            self.charge(16 * size)?;
            let mut rest = &items[..];
            for at in 0..size {
                let (chunk, after) = rest.split_at(each + usize::from(at < extra));
                rest = after;
                let filled = fill.iter().filter(|_| at >= extra);
                chunks.push(chunk.iter().chain(filled).cloned().collect());
            }
        }
        Ok(Value::iter(chunks.into_iter().map(Value::list)))
    }

    fn group_by(&self, value: &Value, args: Args) -> Res<Value> {
        let mut bound = args.bind("groupby", &["attribute", "default", "case_sensitive"], 1)?;
        let (path, default, case) = (bound.value(0), bound.value(1), bound.flag(2, false));
        let default = Some(&default).filter(|default| !matches!(default, Value::None));
        let mut items = self.items(value)?;
        self.sort(&mut items, false, |item| self.key(item, &path, case, default))?;
        let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
        for item in items {
            let key = self.key(&item, &path, case, default)?;
            match groups.last_mut() {
                Some((last, members)) if self.equal(last, &key)? => members.push(item),
                _ => groups.push((key, vec![item])),
            }
        }
        // jinja2 also calls the parts of a pair `grouper` and `list`; of tuples, these names are refused.
        let pairs = groups.into_iter().map(|(key, members)| {
            let key = match members.first() {
                Some(first) if !case => self.path(first, &path, default)?,
                _ => key,
            };
            Value::tuple(vec![key, Value::list(members)?])
        });
        Value::list(pairs.collect::<Res<_>>()?)
    }

    fn map(&self, value: &Value, args: Args) -> Res<Value> {
        if args.positional.is_empty() && args.named.iter().any(|(name, _)| &**name == "attribute") {
            let mut bound = args.bind("map", &["attribute", "default"], 1)?;
            let (path, default) = (bound.value(0), bound.value(1));
            let default = Some(default).filter(|default| !matches!(default, Value::None));
            return Ok(self.generate(value, |item| self.path(&item, &path, default.as_ref()).map(Some)));
        }
        let Some(filter) = args.positional.first().cloned() else {
            return Ok(Value::iter([fail("map requires a filter argument")]));
        };
        let rest = Self::rest_of(&args, 1);
        Ok(self.generate(value, |item| {
            let name = filter_name(&filter)?;
            self.deeper(|| self.filter(&name, item, rest.clone())).map(Some)
        }))
    }

    fn select(&self, name: &str, value: &Value, args: &Args) -> Value {
        let by_attribute = name.ends_with("attr");
        let keep = name.starts_with("select");
        let mut positional = args.positional.iter();
        let path = if by_attribute { positional.next().cloned() } else { Some(Value::None) };
        let test = positional.next().cloned();
        let rest = Self::rest_of(args, usize::from(by_attribute) + 1);
        self.generate(value, |item| {
            let Some(path) = &path else {
                return fail("Missing parameter for attribute name");
            };
            let tested = self.path(&item, path, None)?;
            let passed = match &test {
                Some(test) => self.test(&filter_name(test)?, &tested, rest.clone())?,
                None => tested.truthy(),
            };
            Ok((passed == keep).then_some(item))
        })
    }
}

fn filter_name(value: &Value) -> Res<Arc<str>> {
    match value {
        Value::Str(name) => Ok(name.clone()),
        other => fail(format!("No filter or test named {}.", other.type_name())),
    }
}

/// The attributes that a sort goes by: text with commas names several.
fn attributes(value: &Value) -> Vec<Value> {
    match value {
        Value::Str(text) => text.split(',').map(Value::str).collect(),
        other => vec![other.clone()],
    }
}
