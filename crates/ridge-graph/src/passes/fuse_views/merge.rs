//! Stored values in launches: neighbours that can be at one level are one group.

use std::collections::{BTreeSet, HashSet};

use super::choose::Choices;
use super::open::{Kind, Opened};
use crate::graph::{Node, Op, Var};

/// How many other launches may lie between what is merged: a value is in memory for so much longer at most.
const WINDOW: usize = 6;

/// The most values that a group stores, and that it reads where it is more than one section.
const MAX_STORED: usize = 12;
const MAX_READ: usize = 40;

/// A group in the making.
#[derive(Default)]
pub(super) struct Launch {
    /// The nodes of its body, in order.
    pub(super) nodes: Vec<usize>,
    pub(super) inputs: Vec<Var>,
    /// The nodes whose values it stores.
    pub(super) exported: Vec<usize>,
    /// The place where it stands: 2i ahead of node i, 2i + 1 as node i.
    pub(super) place: usize,
}

/// What is stored together: at least a value, or those of a group with a reduction.
struct Section {
    exported: Vec<usize>,
    /// Nodes that are computed whether or not they are stored.
    roots: Vec<usize>,
    rows: bool,
    /// Does it depend on a late input?
    late: bool,
    /// The lowest and the highest level that it can be stored at.
    levels: (usize, usize),
    /// How many other launches stand before its first and its last value in the program.
    span: (usize, usize),
}

pub(super) fn launches(opened: &Opened, choices: &Choices) -> Vec<Launch> {
    let (late, between) = (late(opened), launches_before(opened));
    let mut sections: Vec<Section> = Vec::new();
    let mut done = HashSet::new();
    for (node, at) in between.into_iter().enumerate() {
        let (exported, roots, rows) = match opened.kinds[node] {
            Kind::Element if choices.stored[node] => (vec![node], vec![node], false),
            Kind::Rows(group) if done.insert(group) => {
                let (exported, roots) = of_rows(opened, group);
                (exported, roots, true)
            }
            _ => continue,
        };
        let latest = exported.iter().map(|node| choices.latest[*node]).min().unwrap_or(usize::MAX);
        sections.push(Section {
            levels: (choices.level[node], latest.max(choices.level[node])),
            late: roots.iter().any(|root| late[*root]),
            span: (at, at),
            exported,
            roots,
            rows,
        });
    }
    sections.sort_by_key(|section| section.levels.0);
    let mut launches: Vec<(Launch, Section)> = Vec::new();
    for section in sections {
        let joined = launches.iter().enumerate().rev().find_map(|(index, (launch, together))| {
            let together = together.with(&section)?;
            let launch = launch.with(opened, choices, &section);
            (launch.inputs.len() <= MAX_READ).then_some((index, launch, together))
        });
        match joined {
            Some((index, launch, together)) => launches[index] = (launch, together),
            None => launches.push((Launch::default().with(opened, choices, &section), section)),
        }
    }
    launches.into_iter().map(|(launch, _)| launch).collect()
}

/// The nodes of a group with a reduction: those that others read, and all.
fn of_rows(opened: &Opened, group: usize) -> (Vec<usize>, Vec<usize>) {
    let is_inside = |node: usize| opened.kinds[node] == Kind::Rows(group);
    let roots: Vec<usize> = (0..opened.function.nodes.len()).filter(|node| is_inside(*node)).collect();
    let is_used = |node: &usize| opened.returned[*node] || opened.users[*node].iter().any(|user| !is_inside(*user));
    (roots.iter().copied().filter(is_used).collect(), roots)
}

impl Section {
    /// Both together, if they can be.
    fn with(&self, other: &Self) -> Option<Self> {
        let levels = (self.levels.0.max(other.levels.0), self.levels.1.min(other.levels.1));
        let span = (self.span.0.min(other.span.0), self.span.1.max(other.span.1));
        let fits = levels.0 <= levels.1
            && span.1 - span.0 <= WINDOW
            && self.late == other.late
            && !(self.rows && other.rows)
            && self.exported.len() + other.exported.len() <= MAX_STORED;
        fits.then(|| Self {
            exported: [&self.exported[..], &other.exported].concat(),
            roots: Vec::new(),
            rows: self.rows || other.rows,
            late: self.late,
            levels,
            span,
        })
    }
}

impl Launch {
    /// The launch with the values of `section` besides.
    fn with(&self, opened: &Opened, choices: &Choices, section: &Section) -> Self {
        let mut nodes: BTreeSet<usize> = self.nodes.iter().copied().collect();
        let mut inputs = self.inputs.clone();
        let mut open = section.roots.clone();
        while let Some(node) = open.pop() {
            if !nodes.insert(node) {
                continue;
            }
            for (position, var) in opened.function.nodes[node].inputs.iter().enumerate() {
                if choices.is_inlined(node, position) {
                    open.push(var.index());
                } else if !inputs.contains(var) {
                    inputs.push(*var);
                }
            }
        }
        let exported: Vec<usize> = self.exported.iter().chain(&section.exported).copied().collect();
        let last = exported.iter().max().map_or(0, |node| 2 * node + 1);
        // At the latest where what it reads is replaced.
        let replaced = exported.iter().filter_map(|node| choices.expires[*node].first()).min();
        let place = replaced.map_or(last, |update| last.min(2 * update));
        Self { nodes: nodes.into_iter().collect(), inputs, exported, place }
    }
}

/// By node: does it depend on a late input?
fn late(opened: &Opened) -> Vec<bool> {
    let mut late: Vec<bool> = Vec::with_capacity(opened.kinds.len());
    for (index, node) in opened.function.nodes.iter().enumerate() {
        late.push(match node.op {
            Op::Arg(arg) => opened.function.args[arg].late,
            _ => opened.inputs(index).any(|input| late[input]),
        });
    }
    late
}

/// By node, how many launches of other kinds stand before it. Nothing is merged across a call.
fn launches_before(opened: &Opened) -> Vec<usize> {
    let mut before = 0;
    let count = |(node, kind): (&Node, &Kind)| {
        before += match (&node.op, kind) {
            (Op::Call(_), _) => WINDOW + 1,
            (_, Kind::Launch) => 1,
            _ => 0,
        };
        before
    };
    opened.function.nodes.iter().zip(&opened.kinds).map(count).collect()
}
