//! Generation with drafts of the model's own prediction module.

use std::time::{Duration, Instant};

use ridge::DeviceRates;
use ridge_engine::costs::{self, StepCost};
use ridge_engine::{Engine, EngineError, Next, Outcome, Row, Sampling, SequenceId};
use ridge_graph::passes::Kernel;
use ridge_graph::sample::Rng;
use ridge_hw::units::{Bytes, Flops, Seconds};
use ridge_models::Model;
use serde_json::{Value, json};

use super::work::StepWork;
use crate::error::Result;
use crate::output::count;

/// What a run drafted, and the time of its steps.
#[derive(Clone, Debug, Default)]
pub(super) struct DraftedRun {
    /// Tokens that each sequence got.
    produced: usize,
    proposed: usize,
    accepted: usize,
    /// Time until a step had sampled, and from then until the drafts behind it were there, summed over steps.
    verifying: Duration,
    drafting: Duration,
    /// The sequences of each step: tokens in the cache and tokens of the step.
    steps: Vec<Vec<(usize, usize)>>,
}

/// A sequence that generates.
struct Drafting {
    id: SequenceId,
    last: u32,
    produced: usize,
}

/// Fills the cache of `batch` sequences with random tokens to `depth`, then generates `tokens` behind each, verifying what the
/// model's module drafts. Only the generation is timed.
pub(super) fn timed(
    engine: &mut Engine,
    model: &Model,
    tokens: usize,
    (depth, chunk): (usize, usize),
    batch: usize,
) -> Result<(Duration, DraftedRun)> {
    let mut rng = Rng::new(0);
    let ids: Vec<SequenceId> = (0..batch).filter_map(|_| engine.start(Sampling::GREEDY, depth)).collect();
    let mut random = |count: usize| -> Vec<u32> { (0..count).map(|_| rng.below(model.vocab_size) as u32).collect() };
    let texts: Vec<Vec<u32>> = ids.iter().map(|_| random(depth + 1)).collect();
    let mut outcomes = Vec::new();
    let mut at = 0;
    while at < depth {
        let end = (at + chunk).min(depth);
        let rows = ids.iter().zip(&texts);
        let rows: Vec<Row<'_>> =
            rows.map(|(id, text)| Row { follower: Some(text[end]), ..Row::of(*id, &text[at..end]) }).collect();
        engine.submit(&rows)?;
        engine.complete(&mut outcomes)?;
        at = end;
    }
    let mut sequences: Vec<Drafting> =
        ids.iter().zip(&texts).map(|(id, text)| Drafting { id: *id, last: text[depth], produced: 0 }).collect();
    let mut run = DraftedRun { produced: tokens, ..DraftedRun::default() };
    let started = Instant::now();
    while sequences.iter().any(|sequence| sequence.produced < tokens) {
        step(engine, tokens, &mut sequences, &mut run, &mut outcomes)?;
    }
    let time = started.elapsed();
    ids.into_iter().for_each(|id| engine.end(id));
    Ok((time, run))
}

/// A step of the sequences that have fewer than `tokens` tokens.
fn step(
    engine: &mut Engine,
    tokens: usize,
    sequences: &mut [Drafting],
    run: &mut DraftedRun,
    outcomes: &mut Vec<Outcome>,
) -> Result<()> {
    let mut running: Vec<&mut Drafting> = sequences.iter_mut().filter(|one| one.produced < tokens).collect();
    let drafts = |one: &Drafting| -> Vec<u32> {
        // The token behind them needs a place too.
        engine.drafts(one.id).iter().take(tokens - one.produced - 1).copied().collect()
    };
    let given: Vec<([u32; 1], Vec<u32>)> = running.iter().map(|one| ([one.last], drafts(one))).collect();
    let cached = |one: &Drafting| engine.length(one.id).unwrap_or(0);
    run.steps.push(running.iter().zip(&given).map(|(one, (_, drafts))| (cached(one), 1 + drafts.len())).collect());
    let rows = running.iter().zip(&given);
    let rows: Vec<Row<'_>> =
        rows.map(|(one, (last, candidates))| Row { sample: true, candidates, ..Row::of(one.id, last) }).collect();
    let started = Instant::now();
    engine.submit(&rows)?;
    engine.wait_sampled()?;
    let sampled = started.elapsed();
    engine.complete(outcomes)?;
    (run.verifying, run.drafting) = (run.verifying + sampled, run.drafting + started.elapsed() - sampled);
    for ((one, outcome), (_, candidates)) in running.iter_mut().zip(outcomes.iter()).zip(&given) {
        one.last = match outcome.next {
            Next::Token(token) => token,
            Next::NotFinite(position) => return Err(EngineError::NotFinite { position }.into()),
            Next::NotAsked => one.last,
        };
        one.produced += outcome.accepted + 1;
        run.proposed += candidates.len();
        run.accepted += outcome.accepted;
    }
    Ok(())
}

impl DraftedRun {
    /// The work of all its steps, what they draft included, and of the drafts alone.
    pub(super) fn work(&self, costs: &SpeculationCosts, rates: &DeviceRates) -> Result<(StepWork, StepWork)> {
        let (mut all, mut drafting) = (StepWork::default(), StepWork::default());
        let add = |total: &mut StepWork, work: costs::StepWork| {
            total.add(rates, Flops(work.flops), Bytes(work.bytes), Bytes(work.host.bytes()));
        };
        for step in &self.steps {
            let verified = costs.verifying.at(step)?;
            // The entry that a draft adds first stands behind the token that was sampled.
            let behind: Vec<(usize, usize)> = step.iter().map(|(cached, _)| (*cached, 1)).collect();
            let drafted = costs.drafts.at(&behind)?;
            add(&mut all, verified);
            add(&mut all, drafted);
            add(&mut drafting, drafted);
        }
        Ok((all, drafting))
    }
}

/// Costs of the two programs.
pub(super) struct SpeculationCosts {
    verifying: StepCost,
    drafts: StepCost,
}

impl SpeculationCosts {
    /// Of a model that drafts.
    pub(super) fn new(model: &Model, context: usize, kernels: &[Kernel]) -> Result<Option<Self>> {
        let Some(drafts) = StepCost::of_drafts(model, context, kernels)? else { return Ok(None) };
        Ok(Some(Self { verifying: StepCost::of_verifying(model, context, kernels)?, drafts }))
    }
}

/// What is reported of a test's runs, of which all have the same steps.
pub(super) struct SpeculationResult {
    pub(super) drafts: usize,
    pub(super) runs: Vec<DraftedRun>,
    /// Seconds of the floor of all drafts of a run.
    pub(super) drafting_floor: f64,
}

impl SpeculationResult {
    fn first(&self) -> &DraftedRun {
        &self.runs[0]
    }

    fn steps(&self) -> usize {
        self.first().steps.len()
    }

    /// Tokens that a step gave a sequence.
    fn tokens_per_step(&self) -> f64 {
        let rows: usize = self.first().steps.iter().map(Vec::len).sum();
        (rows + self.first().accepted) as f64 / rows as f64
    }

    /// The median over runs of the mean seconds of a step's part.
    fn seconds(&self, part: impl Fn(&DraftedRun) -> Duration) -> f64 {
        let each: Vec<f64> = self.runs.iter().map(|run| part(run).as_secs_f64() / run.steps.len() as f64).collect();
        super::work::median(&each)
    }

    /// A line of the report.
    pub(super) fn text(&self, name: &str) -> String {
        let run = self.first();
        format!(
            "{name}: {} for {} a sequence, {:.2} tokens per step; {} of {} drafts accepted; verifying takes {} a step, \
             drafting {} (floor {})\n",
            count(self.steps(), "step"),
            count(run.produced, "token"),
            self.tokens_per_step(),
            run.accepted,
            run.proposed,
            Seconds(self.seconds(|run| run.verifying)),
            Seconds(self.seconds(|run| run.drafting)),
            Seconds(self.drafting_floor / self.steps() as f64),
        )
    }

    /// The same, as JSON.
    pub(super) fn object(&self) -> Value {
        let run = self.first();
        json!({
            "drafts": self.drafts,
            "steps": self.steps(),
            "tokens_per_step": self.tokens_per_step(),
            "proposed": run.proposed,
            "accepted": run.accepted,
            "verifying_seconds_per_step": self.seconds(|run| run.verifying),
            "drafting_seconds_per_step": self.seconds(|run| run.drafting),
            "drafting_floor_seconds_per_step": self.drafting_floor / self.steps() as f64,
        })
    }
}
