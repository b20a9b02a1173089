//! Patterns: small graphs that a kernel computes as one, written as text.
//!
//! `rms_norm(*add(x, r), w)` is an `rms_norm` whose first input is an `add`; names that are not called (`x`, `r`, `w`)
//! stand for any value, the same value where a name is repeated. `*` says that the kernel also gives the inner op's
//! result, so that others may use it. `g@linear_group(...)` names a node; `g.1` is its second output; `...` stands for
//! any further inputs. `kv_write(kv, reshape(g@linear_group(x, ...).1), reshape(g.2), slots), g.0` gives the first output of `g`
//! besides that of `kv_write`; the other two are read by nobody else. `linear(quantize(x)?, w)` is a linear whose first input may be a `quantize`, which then belongs to the
//! pattern, or any value. The operands of commutative primitives match in either order.

use std::collections::HashMap;

use crate::graph::{Function, Node, Op, Var};
use crate::prim::Prim;

/// A parsed pattern. Inner nodes come before outer ones; the last is the root.
#[derive(Clone, Debug)]
pub struct Pattern {
    nodes: Vec<PatternNode>,
    externals: usize,
    /// Outputs of nodes that are given besides those of the root and of exported nodes.
    results: Vec<(usize, u32)>,
}

#[derive(Clone, Debug)]
struct PatternNode {
    op: String,
    inputs: Vec<Input>,
    /// Takes any further inputs.
    rest: bool,
    exported: bool,
    /// May its only input stand in its place?
    optional: bool,
}

#[derive(Clone, Copy, Debug)]
enum Input {
    External(usize),
    Node(usize, u32),
}

/// Where a pattern was found.
#[derive(Clone, Debug)]
pub(super) struct Match {
    /// The function's node for each node of the pattern that is there.
    pub(super) nodes: Vec<usize>,
    /// What it gives: the root's outputs, those of exported nodes, then the single outputs that the text names.
    pub(super) results: Vec<Var>,
    /// The values from outside, in the order of the pattern's text; one for each place where the text names one.
    pub(super) inputs: Vec<Var>,
}

impl Pattern {
    /// Parses the text form.
    ///
    /// # Panics
    /// When `text` is not a pattern: patterns are written by kernel authors, never by users.
    pub fn parse(text: &str) -> Self {
        let mut parser = Parser { text, at: 0, nodes: Vec::new(), named: HashMap::new(), externals: HashMap::new() };
        let root = parser.input();
        let (count, mut results) = (parser.nodes.len(), Vec::new());
        while parser.eat(",") {
            let Input::Node(node, out) = parser.input() else { panic!("pattern `{text}` gives what it does not name") };
            results.push((node, out));
        }
        let whole = matches!(root, Input::Node(..)) && parser.nodes.len() == count && parser.rest().is_empty();
        assert!(whole, "pattern `{text}` ends early or late");
        Self { nodes: parser.nodes, externals: parser.externals.len(), results }
    }

    /// The name of its root op.
    pub(super) fn root_op(&self) -> &str {
        self.nodes.last().map_or("", |root| &root.op)
    }

    /// Number of ops that it covers.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Never: a pattern has a root.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Are all results of pattern node `index` also given to others?
    fn is_exported(&self, index: usize) -> bool {
        self.nodes[index].exported || index + 1 == self.nodes.len()
    }

    /// Matches with the root at node `root` of `function`: with what is optional, then without it.
    pub(super) fn find(&self, function: &Function, root: usize) -> impl Iterator<Item = Match> {
        let ways = if self.nodes.iter().any(|n| n.optional) { &[true, false][..] } else { &[true] };
        ways.iter().filter_map(move |whole| self.find_one(function, root, *whole))
    }

    /// The match with the root at node `root`, in which all that is optional is there if `whole`, and else nothing of it.
    fn find_one(&self, function: &Function, root: usize, whole: bool) -> Option<Match> {
        let mut found =
            PartialMatch { nodes: vec![None; self.nodes.len()], externals: vec![None; self.externals], whole };
        if !self.node(function, self.nodes.len() - 1, root, &mut found) {
            return None;
        }
        let mut inputs = Vec::new();
        let mut seen = vec![false; self.nodes.len()];
        self.collect(function, self.nodes.len() - 1, &found, &mut seen, &mut inputs);
        let exported = (0..self.nodes.len()).rev().filter(|i| self.is_exported(*i)).filter_map(|i| found.nodes[i]);
        let mut results = outputs_of(function, exported);
        for (node, out) in &self.results {
            let node = found.nodes[*node]?;
            if *out as usize >= function.nodes[node].outputs.len() {
                return None;
            }
            results.push(function.var(node, *out as usize));
        }
        Some(Match { nodes: found.nodes.into_iter().flatten().collect(), results, inputs })
    }

    fn node(&self, function: &Function, pattern: usize, node: usize, found: &mut PartialMatch) -> bool {
        if let Some(known) = found.nodes[pattern] {
            return known == node;
        }
        if found.nodes.contains(&Some(node)) {
            return false;
        }
        let (want, have) = (&self.nodes[pattern], &function.nodes[node]);
        let arity = have.inputs.len() == want.inputs.len() || (want.rest && have.inputs.len() > want.inputs.len());
        if !is_plain_op(have) || have.op_name() != want.op || !arity {
            return false;
        }
        let before = found.clone();
        found.nodes[pattern] = Some(node);
        if self.inputs(function, want.inputs.iter().copied().zip(have.inputs.iter().copied()), found) {
            return true;
        }
        *found = before.clone();
        if matches!(&have.op, Op::Prim(Prim::Binary(op)) if op.commutes()) {
            found.nodes[pattern] = Some(node);
            if self.inputs(function, want.inputs.iter().copied().zip(have.inputs.iter().rev().copied()), found) {
                return true;
            }
            *found = before;
        }
        false
    }

    fn inputs(&self, function: &Function, pairs: impl Iterator<Item = (Input, Var)>, found: &mut PartialMatch) -> bool {
        for (mut want, have) in pairs {
            while let Input::Node(p, _) = want
                && self.nodes[p].optional
                && !found.whole
            {
                want = self.nodes[p].inputs[0];
            }
            let fits = match want {
                Input::External(e) => *found.externals[e].get_or_insert(have) == have,
                Input::Node(p, out) => have.out == out && self.node(function, p, have.index(), found),
            };
            if !fits {
                return false;
            }
        }
        true
    }

    fn collect(
        &self,
        function: &Function,
        pattern: usize,
        found: &PartialMatch,
        seen: &mut [bool],
        inputs: &mut Vec<Var>,
    ) {
        if std::mem::replace(&mut seen[pattern], true) {
            return;
        }
        for input in &self.nodes[pattern].inputs {
            match input {
                Input::External(e) => inputs.extend(found.externals[*e]),
                Input::Node(p, _) => self.collect(function, *p, found, seen, inputs),
            }
        }
        if let Some(node) = found.nodes[pattern] {
            inputs.extend(function.nodes[node].inputs.iter().skip(self.nodes[pattern].inputs.len()));
        }
    }
}

/// All outputs of `nodes`, in their order.
pub(super) fn outputs_of(function: &Function, nodes: impl IntoIterator<Item = usize>) -> Vec<Var> {
    let of = |node: usize| (0..function.nodes[node].outputs.len()).map(move |out| function.var(node, out));
    nodes.into_iter().flat_map(of).collect()
}

fn is_plain_op(node: &Node) -> bool {
    matches!(node.op, Op::Prim(_) | Op::Composite(_))
}

#[derive(Clone)]
struct PartialMatch {
    nodes: Vec<Option<usize>>,
    externals: Vec<Option<Var>>,
    /// Is what is optional to be there?
    whole: bool,
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    nodes: Vec<PatternNode>,
    named: HashMap<&'a str, usize>,
    externals: HashMap<&'a str, usize>,
}

impl<'a> Parser<'a> {
    fn rest(&mut self) -> &'a str {
        let rest = &self.text[self.at..];
        let trimmed = rest.trim_start();
        self.at += rest.len() - trimmed.len();
        trimmed
    }

    fn eat(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    fn word(&mut self) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        assert!(end > 0, "pattern `{}`: a name is missing at `{rest}`", self.text);
        self.at += end;
        &rest[..end]
    }

    fn input(&mut self) -> Input {
        let exported = self.eat("*");
        let mut word = self.word();
        let name = self.eat("@").then(|| std::mem::replace(&mut word, self.word()));
        let node = if self.eat("(") {
            let (inputs, rest) = self.arguments();
            let optional = self.eat("?");
            assert!(!optional || inputs.len() == 1, "pattern `{}`: what is optional has one input", self.text);
            self.nodes.push(PatternNode { op: word.into(), inputs, rest, exported, optional });
            let index = self.nodes.len() - 1;
            if let Some(name) = name {
                self.named.insert(name, index);
            }
            index
        } else if let Some(index) = self.named.get(word) {
            *index
        } else {
            let next = self.externals.len();
            return Input::External(*self.externals.entry(word).or_insert(next));
        };
        let out = if self.eat(".") { self.word().parse().expect("an output's number after `.`") } else { 0 };
        Input::Node(node, out)
    }

    fn arguments(&mut self) -> (Vec<Input>, bool) {
        let mut inputs = Vec::new();
        loop {
            if self.eat(")") {
                return (inputs, false);
            }
            if self.eat("...") {
                assert!(self.eat(")"), "pattern `{}`: `...` comes last", self.text);
                return (inputs, true);
            }
            inputs.push(self.input());
            self.eat(",");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::graph::Builder;
    use crate::types::Type;

    /// `swiglu(linear_group(x; w0, w1))`, then `rms_norm` of its sum with `r`, which is an output too.
    fn function() -> Function {
        let mut g = Builder::new();
        let matrix = Type::tensor(DType::F32, [4usize, 4]);
        let x = g.arg("x", matrix.clone());
        let r = g.arg("r", matrix.clone());
        let w = [g.weight("w0", matrix.clone()).unwrap(), g.weight("w1", matrix).unwrap()];
        let n = g.weight("n", Type::tensor(DType::F32, [4usize])).unwrap();
        let both = g.linear_group(x, &w, &[]).unwrap();
        let h = g.swiglu(both[0], both[1]).unwrap();
        let sum = g.add(h, r).unwrap();
        let y = g.rms_norm(sum, n, 1e-5).unwrap();
        let graph = g.finish(vec![("sum".into(), sum), ("y".into(), y)]).unwrap();
        graph.functions.into_iter().next().unwrap()
    }

    fn inputs(pattern: &str) -> Option<Vec<String>> {
        let function = function();
        let pattern = Pattern::parse(pattern);
        let found = (0..function.nodes.len()).rev().find_map(|root| pattern.find(&function, root).next())?;
        let name = |v: &Var| match &function.nodes[v.index()].op {
            Op::Arg(i) => function.args[*i].name.to_string(),
            _ => format!("{}.{}", function.nodes[v.index()].op_name(), v.out),
        };
        Some(found.inputs.iter().map(name).collect())
    }

    fn found(pattern: &str, expected: &[&str]) {
        assert_eq!(inputs(pattern).unwrap(), expected, "{pattern}");
    }

    #[test]
    fn inputs_come_in_the_order_of_the_text() {
        found("rms_norm(*add(a, b), w)", &["swiglu.0", "r", "n"]);
        found("rms_norm(s, w)", &["add.0", "n"]);
        found("linear_group(x, ...)", &["x", "w0", "w1"]);
    }

    #[test]
    fn a_named_node_can_be_used_twice() {
        found("swiglu(g@linear_group(x, ...).0, g.1)", &["x", "w0", "w1"]);
        assert_eq!(inputs("swiglu(g@linear_group(x, ...).1, g.0)"), None);
    }

    #[test]
    fn operands_of_commutative_ops_match_in_either_order() {
        found("add(r, swiglu(a, b))", &["r", "linear_group.0", "linear_group.1"]);
        found("add(swiglu(a, b), r)", &["linear_group.0", "linear_group.1", "r"]);
    }

    #[test]
    fn what_is_optional_is_taken_along_where_it_is_there() {
        let mut g = Builder::new();
        let x = g.arg("x", Type::tensor(DType::F32, [4usize]));
        let r = g.arg("r", Type::tensor(DType::F32, [4usize]));
        let a = g.abs(x).unwrap();
        let sum = g.sub(a, r).unwrap();
        let graph = g.finish(vec![("sum".into(), sum)]).unwrap();
        let found = |text: &str| -> Vec<(usize, Vec<Var>)> {
            let pattern = Pattern::parse(text);
            pattern.find(graph.main(), 3).map(|m| (m.nodes.len(), m.inputs)).collect()
        };
        assert_eq!(found("sub(abs(x)?, r)"), [(2, vec![x, r]), (1, vec![a, r])]);
        assert_eq!(found("sub(neg(x)?, r)"), [(1, vec![a, r])]);
        assert_eq!(found("sub(abs(x), r)").len(), 1);
    }

    #[test]
    fn a_repeated_name_is_one_value() {
        assert_eq!(inputs("add(a, a)"), None);
        assert_eq!(inputs("swiglu(a, a)"), None);
    }

    #[test]
    fn single_outputs_are_given_besides_those_of_the_root() {
        let function = function();
        let results = |text: &str| -> Option<Vec<(String, u32)>> {
            let found = (0..function.nodes.len()).find_map(|root| Pattern::parse(text).find(&function, root).next())?;
            Some(found.results.iter().map(|v| (function.nodes[v.index()].op_name().to_owned(), v.out)).collect())
        };
        let gated = |more: &str| format!("swiglu(g@linear_group(x, ...).0, g.1){more}");
        let named = |names: &[(&str, u32)]| Some(names.iter().map(|(name, out)| ((*name).to_owned(), *out)).collect());
        assert_eq!(results(&gated("")), named(&[("swiglu", 0)]));
        assert_eq!(results(&gated(", g.1")), named(&[("swiglu", 0), ("linear_group", 1)]));
        assert_eq!(results(&gated(", g.1, g.0")), named(&[("swiglu", 0), ("linear_group", 1), ("linear_group", 0)]));
        assert_eq!(results(&gated(", g.2")), None, "there is no third output");
        let all = results("swiglu(*g@linear_group(x, ...).0, g.1)");
        assert_eq!(all, named(&[("swiglu", 0), ("linear_group", 0), ("linear_group", 1)]));
    }

    #[test]
    #[should_panic(expected = "ends early or late")]
    fn a_result_is_of_a_node_of_the_pattern() {
        Pattern::parse("add(a, b), neg(a)");
    }

    #[test]
    #[should_panic(expected = "ends early or late")]
    fn a_pattern_must_be_whole() {
        Pattern::parse("add(a, b) c");
    }
}
