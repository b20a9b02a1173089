//! Calls: of the functions that every template has, and of whatever else can be called.

use std::cell::Cell;
use std::rc::Rc;

use super::args::Args;
use super::builtins::Function;
use super::exec::check_attribute;
use super::fault::{Fault, FaultKind, Res, fail, unsupported};
use super::renderer::Renderer;
use super::value::{Dict, Value, range_len};

/// Ranges are no longer than this.
const MAX_RANGE_LEN: usize = 100_000;

impl Renderer<'_> {
    /// Calls a value.
    pub(crate) fn call(&self, callee: &Value, args: Args) -> Res<Value> {
        self.step()?;
        match callee {
            Value::Function(function) => self.function(*function, args),
            Value::Method(method) => self.method(&method.0, &method.1, args),
            Value::Macro(called) => self.call_macro(called, args),
            Value::Loop(state) => {
                let iterable = args.bind("loop", &["iterable"], 1)?.value(0);
                match &state.recursive {
                    Some((each, frame)) => self.recurse(each, frame, &iterable, state.depth0 + 1).map(Value::str),
                    None => fail("The loop must have the 'recursive' marker to be called recursively."),
                }
            }
            Value::Joiner(joiner) => {
                args.none("joiner")?;
                Ok(if joiner.1.replace(true) { joiner.0.clone() } else { Value::str("") })
            }
            Value::Undefined(message) => fail(&**message),
            other => fail(format!("'{}' object is not callable", other.type_name())),
        }
    }

    fn function(&self, function: Function, args: Args) -> Res<Value> {
        match function {
            Function::Range => range(args),
            Function::Dict => self.new_dict(args).map(Value::dict),
            Function::Namespace => {
                let dict = self.new_dict(args)?;
                dict.keys().filter_map(Value::as_str).try_for_each(check_attribute)?;
                Ok(self.namespace(dict))
            }
            Function::Cycler => {
                if !args.named.is_empty() {
                    return fail("cycler() takes no keyword arguments");
                }
                if args.positional.is_empty() {
                    return fail("at least one item has to be provided");
                }
                let depth = super::value::nested(args.positional.iter())?;
                Ok(Value::Cycler(depth, Rc::new((args.positional, Cell::new(0)))))
            }
            Function::Joiner => {
                let separator = args.bind("joiner", &["sep"], 0)?.take(0).unwrap_or_else(|| Value::str(", "));
                super::value::nested([&separator].into_iter())?;
                Ok(Value::Joiner(Rc::new((separator, Cell::new(false)))))
            }
            Function::Lipsum => unsupported("lipsum() is not supported: its text is random"),
            Function::RaiseException => {
                let message = args.bind("raise_exception", &["message"], 1)?.value(0);
                Err(Fault::new(FaultKind::Raised, self.text(&message)?))
            }
            Function::StrftimeNow => match args.bind("strftime_now", &["format"], 1)?.text(0)? {
                Some(format) => self.string(self.clock.strftime(&format)?),
                None => fail("strftime_now() needs a format"),
            },
        }
    }

    /// Python's `dict(mapping or pairs, **named)`.
    fn new_dict(&self, args: Args) -> Res<Dict> {
        let mut positional = args.positional.into_iter();
        let mut dict = match positional.next() {
            None => Dict::default(),
            Some(Value::Dict(dict)) => (*dict).clone(),
            Some(pairs) => {
                let mut dict = Dict::default();
                for pair in self.items(&pairs)? {
                    match <[Value; 2]>::try_from(self.items(&pair)?) {
                        Ok([key, value]) => dict.insert(key, value)?,
                        Err(_) => return fail("dictionary update sequence element has not length 2"),
                    }
                }
                dict
            }
        };
        if positional.next().is_some() {
            return fail("dict expected at most 1 argument");
        }
        self.charge(16 * dict.len())?;
        for (name, value) in args.named {
            dict.insert(Value::Str(name), value)?;
        }
        Ok(dict)
    }
}

fn range(args: Args) -> Res<Value> {
    let mut bound = args.bind("range", &["/start", "/stop", "/step"], 1)?;
    let given = [bound.take(0), bound.take(1), bound.take(2)];
    let mut ints = [None; 3];
    for (int, value) in ints.iter_mut().zip(given) {
        *int = match value {
            None => None,
            Some(Value::Int(i)) if i.unsigned_abs() < 1 << 100 => Some(i),
            Some(Value::Bool(b)) => Some(i128::from(b)),
            Some(Value::Undefined(message)) => return fail(&*message),
            Some(other) => {
                return fail(format!("'{}' object cannot be interpreted as an integer", other.type_name()));
            }
        };
    }
    let (start, stop) = match (ints[0], ints[1]) {
        (Some(start), Some(stop)) => (start, stop),
        (stop, _) => (0, stop.unwrap_or(0)),
    };
    let step = ints[2].unwrap_or(1);
    if step == 0 {
        return fail("range() arg 3 must not be zero");
    }
    let range = Value::Range(start, stop, step);
    if range_len(&range) > MAX_RANGE_LEN {
        return fail(format!("Range too big. The sandbox blocks ranges larger than MAX_RANGE ({MAX_RANGE_LEN})."));
    }
    Ok(range)
}
