//! What every network below the engine is, whatever it is for.

use ridge_graph::{Arg, DType, Graph, Role, Shape};

use crate::shares::Shares;

/// A group of layers that keep the same thing from step to step. The cache manager knows groups and blocks, never
/// keys or values, so every kind of attention is the same to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateGroup {
    /// Names of the graph's states that belong to it, one a layer.
    pub states: Vec<String>,
    /// Bytes that one token takes in all of them together.
    pub bytes_per_token: usize,
    /// Bytes that one sequence takes in all of them together however long it is: the state of a recurrence.
    pub bytes_per_sequence: usize,
    /// Only the last this many tokens are ever read; all of them if `None`. Groups of one window share a pool of blocks,
    /// see [`block_table_name`](crate::block_table_name).
    pub window: Option<usize>,
    /// Over how many ranks it can be cut: its key and value heads, or 1 for what all heads share.
    pub heads: usize,
}

/// A network as a graph: a decoder, an encoder of texts, a classifier of images. Inputs, outputs and parameters are those
/// of the graph, by name; what is stored, counted, loaded and placed on a device is the same for all of them.
/// [`Model`](crate::Model), [`Encoder`](crate::Encoder) and [`ImageClassifier`](crate::ImageClassifier) are modules with
/// what their use needs besides.
#[derive(Clone, Debug)]
pub struct Module {
    /// Family, such as `llama`.
    pub family: &'static str,
    /// The graph. Each use documents its step inputs and outputs; a program computes the outputs that it is compiled for.
    pub graph: Graph,
    /// What its layers keep between steps; nothing for a network that sees its whole input at once.
    pub state_groups: Vec<StateGroup>,
    /// Dtype of activations.
    pub activations: DType,
    /// How it was cut over ranks, of one of which it is then the module; `None` for the whole.
    pub shares: Option<Shares>,
}

impl Module {
    /// What a step is given, in the order in which the graph first uses each.
    pub fn inputs(&self) -> impl Iterator<Item = &Arg> {
        self.graph.args(Role::StepInput)
    }

    /// Names of what a step can compute.
    pub fn outputs(&self) -> impl Iterator<Item = &str> {
        self.graph.main().outputs.iter().map(|output| &*output.name)
    }

    /// The parameters, in the order in which the graph first uses each.
    pub fn parameters(&self) -> impl Iterator<Item = &Arg> {
        self.graph.args(Role::Weight)
    }

    /// Elements of the parameters; one that is used twice counts once.
    pub fn parameter_count(&self) -> u64 {
        self.parameters().filter_map(|a| Shape::elements(&a.ty.shape).as_const()).map(|n| n as u64).sum()
    }

    /// Bytes of the parameters as they are stored.
    pub fn weight_bytes(&self) -> u64 {
        self.parameters().filter_map(|a| a.ty.bytes().as_const()).map(|b| b as u64).sum()
    }

    /// Bytes that one token takes in the states, over all layers.
    pub fn state_bytes_per_token(&self) -> u64 {
        self.state_groups.iter().map(|group| group.bytes_per_token as u64).sum()
    }

    /// Bytes that one sequence takes in the states however long it is, over all layers.
    pub fn state_bytes_per_sequence(&self) -> u64 {
        self.state_groups.iter().map(|group| group.bytes_per_sequence as u64).sum()
    }
}
