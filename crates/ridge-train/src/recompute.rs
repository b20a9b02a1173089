//! How much of the forward pass a step computes again, and the least of it that fits into a memory budget.

use std::fmt;

use ridge_graph::grad::Recompute;
use ridge_graph::{Graph, Op};

use crate::settings::Recomputation;

/// What the backward pass computes again, on a scale from nothing over passes over memory to ever more whole layers. Each
/// step up the scale needs less memory and more time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecomputeLevel {
    level: usize,
    layers: usize,
}

impl RecomputeLevel {
    /// The level that a setting names, of a training graph: each of its calls is a layer.
    pub fn of(setting: Recomputation, graph: &Graph) -> Self {
        let layers = graph.main().nodes.iter().filter(|node| matches!(node.op, Op::Call(_))).count();
        let level = match setting {
            Recomputation::None => 0,
            Recomputation::Selective => 1,
            Recomputation::Full => 1 + layers,
        };
        Self { level, layers }
    }

    /// Those from this one on, in order.
    pub fn and_above(self) -> impl ExactSizeIterator<Item = Self> + DoubleEndedIterator {
        (self.level..self.layers + 2).map(move |level| Self { level, ..self })
    }

    /// Does it recompute all of every layer?
    pub fn is_whole(self) -> bool {
        self.level == self.layers + 1
    }

    /// What each layer recomputes.
    pub fn of_layers(self) -> Vec<Recompute> {
        let Self { level, layers } = self;
        match level.checked_sub(1) {
            None => vec![Recompute::Cheap; layers],
            Some(whole) => (0..layers).map(|i| if i < whole { Recompute::All } else { Recompute::Passes }).collect(),
        }
    }
}

impl fmt::Display for RecomputeLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.level {
            0 => f.write_str("no activations"),
            1 => f.write_str("the activations of norms and elementwise ops"),
            level => write!(f, "all activations of {} of {} layers", level - 1, self.layers),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_level_recomputes_one_layer_more() {
        use Recompute::{All, Cheap, Passes};
        let none = RecomputeLevel { level: 0, layers: 2 };
        let levels: Vec<Vec<Recompute>> = none.and_above().map(RecomputeLevel::of_layers).collect();
        assert_eq!(levels, [vec![Cheap, Cheap], vec![Passes, Passes], vec![All, Passes], vec![All, All]]);
        let full = none.and_above().next_back().expect("there is one");
        assert_eq!(full.to_string(), "all activations of 2 of 2 layers");
        assert_eq!(full.and_above().len(), 1);
    }
}
