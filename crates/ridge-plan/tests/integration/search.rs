//! A search over layouts: what it finds, what it rejects and why.

use std::path::Path;

use ridge_hw::spec::Precision;
use ridge_plan::efficiency::Machine;
use ridge_plan::ledger::{training, training_total};
use ridge_plan::reading::Reading;
use ridge_plan::search::{LayoutCandidate, SearchSpace, judge, pareto, search};
use ridge_plan::train::{Layout, Recompute, Workload};

fn configs() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/configs")
}

fn reading(name: &str) -> Reading {
    let path = configs().join(format!("{name}.json"));
    Reading::from_json(name, &std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn every_config_is_read_and_its_parameters_are_shared_out_without_rest() {
    for entry in std::fs::read_dir(configs()).unwrap() {
        let path = entry.unwrap().path();
        let r = Reading::from_json("config.json", &std::fs::read_to_string(&path).unwrap()).unwrap();
        let layers: f64 = r.each_layer().map(|l| l.cut + l.whole + l.experts).sum();
        assert_eq!(layers + r.embedding + r.head, r.parameters as f64, "{}", path.display());
        // The embedding and one norm are left.
        assert_eq!(r.embedding, (r.vocab * r.hidden + r.hidden) as f64, "{}", path.display());
    }
}

#[test]
fn what_is_ranked_fits_and_what_is_rejected_has_its_reason() {
    let (model, h100) = (reading("Meta-Llama-3.1-70B"), Machine::find("H100", Precision::Bf16).unwrap());
    let (work, space) = (Workload::default(), SearchSpace::new(64, 8));
    let found = search(&model, &h100, &work, &space);
    let rejected: usize = found.rejected.values().map(|(n, _)| n).sum();
    assert_eq!(found.ranked.len() + rejected, found.seen);
    assert!(found.ranked.iter().all(|c| c.bytes <= h100.memory * space.utilisation && c.layout.gpus() == 64));
    assert!(found.ranked.windows(2).all(|pair| pair[0].step.total <= pair[1].step.total));
    for word in ["layers", "GiB", "ZeRO 2 and 3", "batch"] {
        assert!(found.rejected.keys().any(|why| why.contains(word)), "{word}: {:?}", found.rejected.keys());
    }
    let best = found.ranked[0];
    assert!((0.3..0.7).contains(&best.step.mfu), "{best:?}");
    assert!(best.step.hfu >= best.step.mfu);
}

#[test]
fn the_front_has_the_fastest_and_the_smallest_and_nothing_that_is_beaten() {
    let (model, h100) = (reading("Meta-Llama-3.1-8B"), Machine::find("H100", Precision::Bf16).unwrap());
    let found = |gpus| search(&model, &h100, &Workload::default(), &SearchSpace::new(gpus, 8)).ranked;
    let all: Vec<LayoutCandidate> = [8, 16, 32].into_iter().flat_map(found).collect();
    let front = pareto(&all);
    assert!(!front.is_empty() && front.len() < all.len() / 10);
    let least =
        |of: fn(&LayoutCandidate) -> f64, among: &[LayoutCandidate]| among.iter().map(of).fold(f64::INFINITY, f64::min);
    for of in [|c: &LayoutCandidate| c.step.total, |c: &LayoutCandidate| c.bytes] {
        assert_eq!(least(of, &front), least(of, &all));
    }
}

#[test]
fn a_ledger_adds_up_to_what_the_search_holds_against_memory() {
    let model = reading("Mixtral-8x7B-v0.1");
    let work = Workload::default();
    for layout in [
        Layout { dp: 8, ep: 8, zero: 1, ..Layout::default() },
        Layout { dp: 64, zero: 3, recompute: Recompute::Full, ..Layout::default() },
        Layout { tp: 4, pp: 4, dp: 4, interleave: 2, sequence_parallel: true, ..Layout::default() },
    ] {
        let total = training_total(&model, &layout, &work);
        let entries = training(&model, &layout, &work).total().as_f64();
        assert!((entries - total).abs() < 16.0, "{layout}: {entries} {total}");
    }
}

#[test]
fn the_last_stage_is_the_fullest_where_logits_outweigh_activations() {
    let model = reading("Meta-Llama-3.1-8B");
    let ledger = |pp, recompute| {
        let layout = Layout { pp, micro_batch: 4, recompute, ..Layout::default() };
        let (work, total) = (Workload::default(), |l: &Layout| training_total(&model, l, &Workload::default()));
        (training(&model, &layout, &work), total(&layout))
    };
    // Layers computed again keep their inputs alone: 16 GB of logits are more than 4 micro-batches of those.
    let (last, total) = ledger(4, Recompute::Full);
    assert!(last.of("logits").as_f64() > 1e10 && last.of("activations").as_f64() < 5e9, "{last:?}");
    assert!((last.total().as_f64() - total).abs() < 16.0);
    let (first, _) = ledger(4, Recompute::None);
    assert_eq!(first.of("logits").as_f64(), 0.0);
    assert!(first.of("activations").as_f64() > 5e10, "{first:?}");
}

#[test]
fn zero_cuts_states_by_the_formulas_of_its_paper() {
    // Rajbhandari et al. 2020, figure 1: 16 bytes a parameter, of which stages cut 12, 14 and 16 over the ranks.
    let model = reading("Meta-Llama-3.1-8B");
    let mut work = Workload::default();
    work.states.gradient = 2.0;
    let states = |zero: u8| {
        let ledger = training(&model, &Layout { dp: 64, zero, ..Layout::default() }, &work);
        ["weights", "gradients", "master weights", "optimiser states"]
            .map(|what| ledger.of(what).as_f64())
            .iter()
            .sum::<f64>()
    };
    for (zero, bytes) in [(0, 16.0), (1, 4.0 + 12.0 / 64.0), (2, 2.0 + 14.0 / 64.0), (3, 16.0 / 64.0)] {
        assert!((states(zero) / model.parameters as f64 / bytes - 1.0).abs() < 1e-6, "{zero}");
    }
}

#[test]
fn flops_of_a_step_are_six_a_parameter_and_token_and_attention() {
    let (model, h100) = (reading("Meta-Llama-3.1-8B"), Machine::find("H100", Precision::Bf16).unwrap());
    let work = Workload { seq: 8192, global_batch: 16, ..Workload::default() };
    let layout = Layout { dp: 8, zero: 3, recompute: Recompute::Full, ..Layout::default() };
    let step = judge(&model, &h100, &work, &layout, 1e15).unwrap().step;
    // Embeddings are looked up, norms are no products. Causal pairs: half.
    let parameters = model.parameters as f64 - model.embedding - 64.0 * 4096.0;
    let pairs = 16.0 * 0.5 * 8192.0 * 8193.0;
    let wanted = 6.0 * parameters * 16.0 * 8192.0 + 3.0 * 4.0 * 32.0 * 4096.0 * pairs;
    assert!((step.model_flops / wanted - 1.0).abs() < 1e-6, "{} {wanted}", step.model_flops);
    assert!((1.25..1.34).contains(&(step.hardware_flops / step.model_flops)));
}

#[test]
fn impossible_splits_name_the_nearest_possible() {
    let model = reading("Meta-Llama-3.1-8B");
    let said = |layout: Layout| layout.require(&model, 4096, 256).unwrap_err().to_string();
    let message = said(Layout { tp: 6, ..Layout::default() });
    assert!(message.contains("tp does not divide 32 heads; the nearest divisor is 4"), "{message}");
    let message = said(Layout { pp: 5, ..Layout::default() });
    assert!(message.contains("32 layers; the nearest valid pp is 4"), "{message}");
    assert!(said(Layout { ep: 2, dp: 2, ..Layout::default() }).contains("no experts"));
    assert!(said(Layout { dp: 7, ..Layout::default() }).contains("the nearest batch is 259"));
    let device = Machine::find("H1000", Precision::Bf16).unwrap_err().to_string();
    assert!(device.contains("H100"), "{device}");
    let rate = Machine::find("A100", Precision::Fp8).unwrap_err().to_string();
    assert!(rate.contains("bf16"), "{rate}");
}

#[test]
fn latent_attention_folds_its_weights_for_answers_and_expands_its_cache_for_prompts() {
    let model = reading("DeepSeek-V3");
    let attention = model.kinds[0].ops.iter().find(|op| op.expanded_pair > 0.0).unwrap();
    // 128 heads: rows of 512 + 64 and 512 against keys of 128 + 64 and values of 128 (DeepSeek-V2 report, section 2.1).
    assert_eq!(attention.flops_pair, 2.0 * 128.0 * (512.0 + 64.0 + 512.0));
    assert_eq!(attention.expanded_pair, 2.0 * 128.0 * (128.0 + 64.0 + 128.0));
    assert!(reading("Meta-Llama-3.1-8B").kinds[0].ops.iter().all(|op| op.expanded_pair == 0.0));
}
