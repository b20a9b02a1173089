//! The cost of a step, from the graph as lowered for a backend.

use ridge_graph::passes::{HostTraffic, Kernel, host_traffic};
use ridge_graph::{Bindings, Cost, FuncId, Graph, GraphError, Op, Poly, Prim};
use ridge_models::{DRAFTS, Model, attended_windows, attention_symbols, blocks_symbol, symbols, windows, with_reached};
use ridge_runtime::{RuntimeError, lower};

use crate::error::Result;
use crate::programs::{drafting, served, verifying};

/// The work of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepWork {
    /// Multiplies and adds of matrix products, 2 a pair.
    pub matrix_flops: f64,
    /// Arithmetic of all kinds.
    pub flops: f64,
    /// Bytes read and written in memory of the device.
    pub bytes: u64,
    /// Bytes of weights in memory of the host that are read.
    pub host: HostTraffic,
}

/// The cost of steps that sample the next tokens, of any sequences, which are all prompts or all answers.
#[derive(Clone, Debug)]
pub struct StepCost {
    cost: Cost,
    /// As lowered, for what it fetches.
    graph: Graph,
    block_size: usize,
    windows: Vec<Option<usize>>,
    /// Does a step sample behind each of its tokens? Otherwise behind the last of each sequence.
    verifies: bool,
}

impl StepCost {
    /// Of `model` as an engine runs it on a backend with these kernels, for sequences of at most `context` tokens: over rows
    /// on the device, and values that stay within a fused group cost no bytes.
    ///
    /// # Errors
    /// When the graph has no output `next`.
    pub fn new(model: &Model, context: usize, kernels: &[Kernel]) -> Result<Self> {
        Self::of(&model.graph, model, context, kernels)
    }

    /// As [`StepCost::new`], for tokens of answers.
    ///
    /// # Errors
    /// As for [`StepCost::new`].
    pub fn of_answers(model: &Model, context: usize, kernels: &[Kernel]) -> Result<Self> {
        Self::of(model.answers.as_ref().unwrap_or(&model.graph), model, context, kernels)
    }

    /// As [`StepCost::of_answers`], where all tokens of a sequence behind the first are drafts that the step verifies.
    ///
    /// # Errors
    /// As for [`StepCost::new`].
    pub fn of_verifying(model: &Model, context: usize, kernels: &[Kernel]) -> Result<Self> {
        let graph = model.answers.as_ref().unwrap_or(&model.graph);
        let graph = verifying(graph, &["next"], context.div_ceil(model.block_size))?;
        Ok(Self { verifies: true, ..Self::of_served(&graph, "next", model, kernels)? })
    }

    /// The cost of what the model's module drafts behind sequences of one token each; `None` of a model without drafts.
    ///
    /// # Errors
    /// A mistake of ours: when the graph is none that drafts.
    pub fn of_drafts(model: &Model, context: usize, kernels: &[Kernel]) -> Result<Option<Self>> {
        let graph = drafting(model, context.div_ceil(model.block_size))?;
        graph.map(|graph| Self::of_served(&graph, DRAFTS, model, kernels)).transpose()
    }

    fn of(graph: &Graph, model: &Model, context: usize, kernels: &[Kernel]) -> Result<Self> {
        Self::of_served(&served(graph, &["next"], context.div_ceil(model.block_size))?, "next", model, kernels)
    }

    fn of_served(graph: &Graph, output: &str, model: &Model, kernels: &[Kernel]) -> Result<Self> {
        let graph = lower(graph, &[output], kernels)?;
        let cost = graph.cost();
        // Those of pools, and numbers of tokens that are selected.
        let mut within = attended_windows(&cost);
        within.extend(windows(&graph));
        let windows = [None].into_iter().chain(within.into_iter().map(Some)).collect();
        Ok(Self { cost, graph, block_size: model.block_size, windows, verifies: false })
    }

    /// The work of a step over sequences of `(tokens in the cache, tokens of the step)`.
    ///
    /// # Errors
    /// A mistake of ours: when the graph costs in symbols that no step has.
    pub fn at(&self, sequences: &[(usize, usize)]) -> Result<StepWork> {
        let step = self.step(&self.cost, sequences);
        let host = host_traffic(&self.graph, &step).map_err(RuntimeError::from)?;
        let work = Self::work(&self.cost, &step)?;
        // What is read in place does not come from memory of the device; what is copied is written there, too.
        Ok(StepWork { bytes: work.bytes.saturating_sub(host.in_place) + host.copied, host, ..work })
    }

    fn step(&self, cost: &Cost, sequences: &[(usize, usize)]) -> Bindings {
        with_reached(cost, self.bindings(sequences), sequences.iter().map(|s| s.1).sum())
    }

    fn work(cost: &Cost, step: &Bindings) -> Result<StepWork> {
        let amount = |poly: &Poly| poly.eval(step).map_err(|e| RuntimeError::from(GraphError::from(e)));
        Ok(StepWork {
            matrix_flops: amount(&cost.matrix_flops)? as f64,
            flops: amount(&cost.flops())? as f64,
            bytes: u64::try_from(amount(&cost.bytes())?).unwrap_or(u64::MAX),
            host: HostTraffic::default(),
        })
    }

    /// The work of one node of a lowered graph in such a step. Kernels that read a weight in memory of the host count its bytes
    /// as those of the device.
    ///
    /// # Errors
    /// As for [`StepCost::at`].
    pub fn of_node(
        &self,
        graph: &Graph,
        (func, node): (FuncId, usize),
        sequences: &[(usize, usize)],
    ) -> Result<StepWork> {
        let node_of = &graph.function(func).nodes[node];
        let cost = graph.node_cost(func, node);
        let work = Self::work(&cost, &self.step(&cost, sequences))?;
        match (&node_of.op, node_of.outputs.first()) {
            (Op::Prim(Prim::Fetch(_)), Some(weight)) => {
                let copied = weight.bytes().as_const().and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0);
                Ok(StepWork { bytes: copied, host: HostTraffic { copied, in_place: 0 }, ..work })
            }
            _ => Ok(work),
        }
    }

    fn bindings(&self, sequences: &[(usize, usize)]) -> Bindings {
        let blocks = |(cached, tokens): &(usize, usize)| (cached + tokens).div_ceil(self.block_size);
        let tokens = sequences.iter().map(|s| s.1).sum::<usize>();
        let mut step = Bindings::new()
            .with(symbols::ROWS, sequences.len())
            .with(symbols::TOKENS, tokens)
            .with(symbols::SEQS, if self.verifies { tokens } else { sequences.len() })
            // Of lines those of the step's sequences.
            .with(symbols::STATE_LINES, sequences.len())
            .with(symbols::TABLE, sequences.iter().map(blocks).max().unwrap_or(0))
            .with(symbols::BLOCKS, sequences.iter().map(blocks).sum::<usize>());
        for window in &self.windows {
            let window_or = |most: usize| window.map_or(most, |w| w.min(most));
            let pairs =
                |(cached, tokens): &(usize, usize)| -> usize { (cached + 1..=cached + tokens).map(window_or).sum() };
            // What the first token sees, and the tokens of the step behind it.
            let read = |(cached, tokens): &(usize, usize)| window_or(cached + 1) + tokens.saturating_sub(1);
            // Rows are taken of all tokens that a step verifies, and of the last of each sequence else.
            let last = |(cached, tokens): &(usize, usize)| window_or(cached + tokens);
            let (pairs_name, cached_name) = attention_symbols(*window);
            let (pairs, read): (usize, usize) = (sequences.iter().map(pairs).sum(), sequences.iter().map(read).sum());
            let last: usize = sequences.iter().map(last).sum();
            let (taken_pairs, taken_read) = if self.verifies { (pairs, read) } else { (last, last) };
            step = step
                .with(pairs_name.name(), pairs)
                .with(cached_name.name(), read)
                .with(pairs_name.of_taken_rows().name(), taken_pairs)
                .with(cached_name.of_taken_rows().name(), taken_read)
                .with(&blocks_symbol(*window), sequences.iter().map(blocks).sum::<usize>());
        }
        step
    }
}
