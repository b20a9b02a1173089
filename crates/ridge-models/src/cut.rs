//! The model of one rank: its graph, states and shares of parameters.

use std::collections::HashMap;
use std::sync::Arc;

use ridge_graph::shard::{MeshAxis, Placement, shard};
use ridge_graph::{Arg, Graph, Role};

use crate::config::DecoderConfig;
use crate::error::Result;
use crate::model::Model;
use crate::parallel::tensor_parallel;
use crate::shares::Shares;

impl Model {
    /// Makes this the model of one rank of `axis`, by tensor parallelism: see [`tensor_parallel`]. Weights are stored as
    /// they are, so this comes after [`Module::store`](crate::Module::store). `config` is what the model was built from.
    ///
    /// # Errors
    /// When the model does not divide over the ranks, naming the key of the configuration or the weight.
    pub fn cut(&mut self, config: &DecoderConfig, axis: &MeshAxis) -> Result<()> {
        let place = tensor_parallel(config, axis)?;
        let mut whole = HashMap::new();
        let mut cut = |graph: &Graph| -> Result<Graph> {
            let weights = graph.args(Role::Weight);
            whole.extend(weights.map(|arg| (Arc::clone(&arg.name), (arg.ty.clone(), place(arg)))));
            Ok(shard(graph, axis, &place, &|_| true)?.graph)
        };
        let local = cut(&self.graph)?;
        let answers = self.answers.as_ref().map(&mut cut).transpose()?;
        let drafts = self.drafts.as_ref().map(&mut cut).transpose()?;
        let module = &mut self.module;
        let states: HashMap<&str, &Arg> = module.graph.args(Role::State).map(|arg| (&*arg.name, arg)).collect();
        for group in &mut module.state_groups {
            let is_cut =
                |name: &String| states.get(&**name).is_some_and(|arg| matches!(place(arg), Placement::Shard { .. }));
            if group.states.iter().any(is_cut) {
                group.bytes_per_token /= axis.ranks;
                group.bytes_per_sequence /= axis.ranks;
            }
        }
        self.module.graph = local;
        (self.answers, self.drafts) = (answers, drafts);
        self.module.shares = Some(Shares::new(axis.clone(), whole));
        Ok(())
    }
}
