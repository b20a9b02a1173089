//! Which values are stored, and which are computed again by what reads them.

use std::collections::{HashMap, HashSet};

use super::open::{Kind, MAX_INPUTS, Opened, union};
use crate::graph::Op;
use crate::prim::{Binary, Prim, Unary};

/// The most work of an element, in additions: some time of an element's bytes at the bandwidth of a GPU.
const MAX_WORK: usize = 256;

/// From this work on a value of an earlier level is stored for those that read it later.
const STORED_WORK: usize = 24;

/// The most work that each walk over a row takes for an input.
const MAX_WORK_OF_ROWS: usize = 32;

pub(super) struct Choices {
    /// By node and input: is the input computed by the node, rather than read?
    inlines: Vec<Vec<bool>>,
    /// By node: is its value in memory?
    pub(super) stored: Vec<bool>,
    /// By node, the launches that its value, where computed by what reads it, comes after.
    pub(super) level: Vec<usize>,
    /// By node, the work of an element.
    work: Vec<usize>,
    /// By node, the updates of states that all computation of its value comes before, in order.
    pub(super) expires: Vec<Vec<usize>>,
    /// By update, the launches that read what it replaces come before this level.
    readers: Vec<usize>,
    aliases: Vec<bool>,
    /// By node whose value is stored, the highest level that it may be stored at: what reads it comes later.
    pub(super) latest: Vec<usize>,
}

impl Choices {
    pub(super) fn new(opened: &Opened) -> Self {
        let nodes = &opened.function.nodes;
        let count = nodes.len();
        let mut choices = Self {
            inlines: nodes.iter().map(|n| vec![false; n.inputs.len()]).collect(),
            stored: needed(opened),
            level: vec![0; count],
            work: vec![0; count],
            expires: vec![Vec::new(); count],
            readers: vec![0; count],
            aliases: vec![false; count],
            latest: vec![usize::MAX; count],
        };
        let mut done = HashSet::new();
        for node in 0..count {
            match opened.kinds[node] {
                Kind::Name => {
                    choices.level[node] = choices.after_inputs(opened, node);
                    let expires = match opened.replaced_by[node] {
                        Some(update) => vec![update],
                        None => union(opened.inputs(node).map(|input| &choices.expires[input])),
                    };
                    choices.expire(node, expires);
                }
                Kind::Launch => choices.level[node] = choices.after_inputs(opened, node).max(choices.readers[node]) + 1,
                Kind::Element => choices.decide(opened, &[node]),
                Kind::Rows(group) if done.insert(group) => {
                    let of_group = |n: &usize| opened.kinds[*n] == Kind::Rows(group);
                    choices.decide(opened, &(node..count).filter(of_group).collect::<Vec<_>>());
                }
                Kind::Rows(_) => {}
            }
        }
        choices.store_behind_reshapes(opened);
        choices.find_latest(opened);
        choices
    }

    /// Is the value of input `position` computed by the node?
    pub(super) fn is_inlined(&self, node: usize, position: usize) -> bool {
        self.inlines[node][position]
    }

    /// Is the node a reshape that gives a value in memory another shape?
    pub(super) fn is_alias(&self, node: usize) -> bool {
        self.aliases[node]
    }

    /// The launches that come before the value of `node` is in memory.
    fn level_in_memory(&self, opened: &Opened, node: usize) -> usize {
        match opened.kinds[node] {
            Kind::Name | Kind::Launch => self.level[node],
            Kind::Element if opened.is_reshape(node) => {
                self.level_in_memory(opened, opened.inputs(node).next().unwrap_or(0))
            }
            Kind::Element | Kind::Rows(_) => self.level[node] + 1,
        }
    }

    fn after_inputs(&self, opened: &Opened, node: usize) -> usize {
        opened.inputs(node).map(|input| self.level_in_memory(opened, input)).max().unwrap_or(0)
    }

    /// Says that `node`, whose level is known, is computed before these updates.
    fn expire(&mut self, node: usize, updates: Vec<usize>) {
        for update in &updates {
            self.readers[*update] = self.readers[*update].max(self.level[node] + 1);
        }
        self.expires[node] = updates;
    }

    /// Decides which inputs the nodes, one by itself or those of a group, compute and which they read.
    fn decide(&mut self, opened: &Opened, nodes: &[usize]) {
        let in_group = |node: usize| nodes.contains(&node);
        let is_group = matches!(opened.kinds[nodes[0]], Kind::Rows(_));
        let mut open = Vec::new();
        let mut level = 0;
        for node in nodes {
            for (position, input) in opened.inputs(*node).enumerate() {
                if in_group(input) {
                    self.inlines[*node][position] = true;
                } else if opened.kinds[input] == Kind::Element {
                    open.push((*node, position, input));
                    level = level.max(self.level[input]);
                } else {
                    level = level.max(self.level_in_memory(opened, input));
                }
            }
        }
        for (node, position, input) in &open {
            let (work, earlier) = (self.work[*input], self.level[*input] < level);
            let reads = self.expires[*input].first().is_some_and(|update| update < node)
                || (work > STORED_WORK && earlier)
                || (is_group && work > MAX_WORK_OF_ROWS);
            self.inlines[*node][*position] = !reads;
        }
        while self.exceeds(opened, nodes) {
            let inlined = open.iter().filter(|(node, position, _)| self.inlines[*node][*position]);
            let Some((node, position, _)) = inlined.max_by_key(|(.., input)| self.work[*input]).copied() else {
                break;
            };
            self.inlines[node][position] = false;
        }
        let (mut level, mut expires) = (0, Vec::new());
        for node in nodes {
            for (position, input) in opened.inputs(*node).enumerate().filter(|(_, input)| !in_group(*input)) {
                let inlined = self.inlines[*node][position];
                level = level.max(if inlined { self.level[input] } else { self.level_in_memory(opened, input) });
                self.stored[input] |= !inlined;
                // What is stored is read before the update by its own launch.
                let is_memory = opened.kinds[input] == Kind::Name;
                if inlined || is_memory {
                    expires = union([&expires, &self.expires[input]]);
                }
            }
        }
        for node in nodes {
            self.level[*node] = level;
            self.expire(*node, expires.clone());
        }
    }

    /// Do the nodes, with all that is inlined, take more work than an element may, or read more than a launch may? Notes the work
    /// of a node by itself.
    fn exceeds(&mut self, opened: &Opened, nodes: &[usize]) -> bool {
        if let [node] = nodes {
            self.work[*node] = self.work_of(opened, *node);
            if self.work[*node] > MAX_WORK {
                return true;
            }
        }
        self.reads_of(opened, nodes) > MAX_INPUTS
    }

    /// How many values the nodes read, with all that is inlined.
    fn reads_of(&self, opened: &Opened, nodes: &[usize]) -> usize {
        let (mut seen, mut open, mut read) = (HashSet::new(), nodes.to_vec(), HashSet::new());
        while let Some(node) = open.pop() {
            if !seen.insert(node) {
                continue;
            }
            for (position, var) in opened.function.nodes[node].inputs.iter().enumerate() {
                if self.inlines[node][position] {
                    open.push(var.index());
                } else {
                    read.insert(*var);
                }
            }
        }
        read.len()
    }

    /// The work of an element of `node`, with all that is inlined, at each place that it is computed at.
    fn work_of(&self, opened: &Opened, node: usize) -> usize {
        let mut places: HashMap<(usize, usize), usize> = HashMap::new();
        let (mut seen, mut open, mut work) = (HashSet::new(), vec![(node, 0)], 0);
        while let Some((node, place)) = open.pop() {
            if work > MAX_WORK || !seen.insert((node, place)) {
                continue;
            }
            let Op::Prim(prim) = &opened.function.nodes[node].op else { continue };
            work += work_alone(prim, opened.function.nodes[node].outputs[0].dtype.is_float());
            for (position, input) in opened.inputs(node).enumerate().filter(|(p, _)| self.inlines[node][*p]) {
                let view = match prim {
                    p if p.is_elementwise() => None,
                    Prim::Reshape(_) => None,
                    // All broadcasts of a value to one place read it at one place.
                    Prim::Broadcast(_) => Some(input),
                    // Of a gather, the index and what it picks are at different places.
                    _ => Some(opened.function.nodes.len() + 2 * node + usize::from(position > 0)),
                };
                let known = places.len() + 1;
                let place = view.map_or(place, |view| *places.entry((view, place)).or_insert(known));
                open.push((input, place));
            }
        }
        work
    }

    /// A reshape that is read from memory is another name for its input, which is stored in its place.
    fn store_behind_reshapes(&mut self, opened: &Opened) {
        for node in (0..opened.function.nodes.len()).rev() {
            if self.stored[node] && opened.kinds[node] == Kind::Element && opened.is_reshape(node) {
                (self.stored[node], self.aliases[node]) = (false, true);
                opened.inputs(node).for_each(|input| self.stored[input] = true);
            }
        }
    }

    fn find_latest(&mut self, opened: &Opened) {
        for (node, kind) in opened.kinds.iter().enumerate() {
            // An update, and what reads its result, come after all that reads what it replaces.
            for update in &self.expires[node] {
                self.latest[node] = self.latest[node].min(self.level[*update].saturating_sub(2));
            }
            let before = match kind {
                Kind::Launch => self.level[node].saturating_sub(2),
                Kind::Element | Kind::Rows(_) => self.level[node].saturating_sub(1),
                Kind::Name => self.level[node],
            };
            let inputs = opened.inputs(node).enumerate().filter(|(position, _)| !self.inlines[node][*position]);
            for mut input in inputs.map(|(_, input)| input).collect::<Vec<_>>() {
                while self.aliases[input] {
                    input = opened.inputs(input).next().unwrap_or(input);
                }
                // A reshape that stays has no level of its own.
                if !self.aliases[node] {
                    self.latest[input] = self.latest[input].min(before);
                }
            }
        }
    }
}

/// By node: do others than elements read it?
fn needed(opened: &Opened) -> Vec<bool> {
    let reads = |user: &usize| matches!(opened.kinds[*user], Kind::Launch | Kind::Name);
    let of = |node: usize| opened.returned[node] || opened.users[node].iter().any(reads);
    (0..opened.function.nodes.len()).map(of).collect()
}

/// The work of one element in additions, roughly.
fn work_alone(prim: &Prim, float: bool) -> usize {
    match prim {
        Prim::Const(_) | Prim::Iota { .. } | Prim::Reshape(_) | Prim::Transpose(_) | Prim::Broadcast(_) => 0,
        Prim::Unary(op) => match op {
            Unary::Exp | Unary::Log | Unary::Tanh | Unary::Erf | Unary::Sigmoid => 10,
            Unary::Sin | Unary::Cos => 20,
            Unary::Sqrt | Unary::Rsqrt => 4,
            Unary::Neg | Unary::Abs | Unary::Floor | Unary::Not => 1,
        },
        Prim::Binary(Binary::Pow) => 30,
        Prim::Binary(Binary::Div | Binary::Rem) => {
            if float {
                6
            } else {
                20
            }
        }
        Prim::Random { .. } => 60,
        Prim::Concat { .. } | Prim::Pad { .. } | Prim::Gather { .. } => 3,
        _ => 1,
    }
}
