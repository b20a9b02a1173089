//! Whole runs: what is learned, what is kept, what continues from it.

use ridge_runtime::{MemoryOwner, ProgramCache};
use ridge_testing::{JsonReply, JsonServer};
use ridge_train::log::TrainEvent;
use ridge_train::settings::Settings;
use ridge_train::{Prepared, RunEnd};
use serde_json::json;

use crate::common::{NEVER, checkpoint, cpu, deep, folder, run, run_on, settings, state};

fn without_run(dir: &std::path::Path) {
    std::fs::remove_dir_all(dir.join("run")).expect("is there");
}

#[test]
fn losses_fall_and_the_model_is_exported() {
    let dir = folder();
    for model in ["gpt2.json", "llama.json"] {
        let settings = settings(dir.path(), model, &[("train.steps", "40"), ("sample.every", "40")]);
        let ran = run(&settings);
        let RunEnd::Finished { validation, exported } = ran.end.as_ref().unwrap_or_else(|e| panic!("{e}")) else {
            panic!("nobody stopped it")
        };
        let losses = ran.losses();
        assert!(losses[39] < 0.7 * losses[0], "{model}: {losses:?}");
        let validation = validation.expect("there is data for it");
        assert!((validation - losses[39]).abs() < 0.5, "{model}: {validation} beside {}", losses[39]);
        let exported = exported.as_ref().expect("is the default");
        let files = ridge_models::ModelFiles::open(Some(exported)).unwrap_or_else(|e| panic!("{e}"));
        let config = files.config().unwrap_or_else(|e| panic!("{e}"));
        let checkpoint = config.arrange(files.checkpoint().expect("opens")).expect("has the family's tensors");
        let graph = config.build(&ridge_models::BuildOptions::default()).expect("builds").module.graph;
        let source = ridge_models::WeightSource::Checkpoint(std::sync::Arc::new(checkpoint));
        source.retype(&graph, None).expect("its tensors are the weights");
        assert_eq!(files.tokenizer().expect("is there").decode(&[0, 1], false).expect("decodes").len(), 2);
        let sample = ran.events.iter().find_map(|event| match event {
            TrainEvent::Sample { text, .. } => Some(text.clone()),
            _ => None,
        });
        assert!(sample.expect("was asked for").len() > 50);
        without_run(dir.path());
    }
}

/// Runs to the end in one go, and stopped behind step 5 and continued; the same bits must come out.
fn continues_to_the_same_bits(keys: &[(&str, &str)]) {
    continues(keys, 2);
}

/// With a model of `layers` layers.
fn continues(keys: &[(&str, &str)], layers: usize) {
    let dir = folder();
    deep(dir.path(), layers);
    let all = [keys, &[("train.steps", "9")]].concat();
    let backend = cpu(2);
    let whole = run_on(&settings(dir.path(), "deep.json", &all), backend.clone(), |_| false);
    let moved = backend.memory().peak.get(MemoryOwner::HostWorkspace);
    assert_eq!(moved > 0, keys.contains(&("train.offload", "all")), "{keys:?}: {moved}");
    whole.end.as_ref().unwrap_or_else(|e| panic!("{e}"));
    let (wanted, losses) = (state(dir.path(), 9), whole.losses());
    without_run(dir.path());
    let resumed = [&all[..], &[("checkpoint.resume", "auto")]].concat();
    let settings = settings(dir.path(), "deep.json", &resumed);
    let first = run_on(&settings, cpu(1), |event| matches!(event, TrainEvent::Step(report) if report.step == 5));
    assert_eq!(first.end.unwrap_or_else(|e| panic!("{e}")), RunEnd::Stopped { step: 5 });
    let second = run_on(&settings, cpu(3), |_| false);
    second.end.as_ref().unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(second.losses(), losses[5..], "{keys:?}");
    assert!(state(dir.path(), 9) == wanted, "{keys:?}: the weights and moments are the same bits");
}

#[test]
fn a_run_that_continues_has_the_bits_of_one_that_was_not_stopped() {
    continues_to_the_same_bits(&[]);
}

#[test]
fn so_has_one_in_bf16_with_dropout_accumulation_and_a_running_mean() {
    continues_to_the_same_bits(&[
        ("train.precision", "bf16"),
        ("model.dropout", "0.1"),
        ("model.attention_dropout", "0.1"),
        ("train.accumulation", "2"),
        ("optimizer.ema", "0.9"),
    ]);
}

#[test]
fn so_has_one_that_offloads() {
    // A model of two layers has no activations that stay away long enough to be moved.
    continues(&[("train.precision", "bf16"), ("train.offload", "all"), ("optimizer.ema", "0.9")], 8);
}

#[test]
fn so_have_those_in_f16_and_in_bf16_without_masters() {
    for precision in ["f16", "bf16_stochastic", "bf16_kahan"] {
        continues_to_the_same_bits(&[("train.precision", precision), ("train.z_loss", "1e-4")]);
    }
}

#[test]
fn accumulated_micro_batches_are_one_batch() {
    let dir = folder();
    let mut last = Vec::new();
    for (batch, parts) in [("4", "1"), ("2", "2"), ("1", "4")] {
        let keys = [("train.batch_size", batch), ("train.accumulation", parts), ("train.steps", "5")];
        let ran = run(&settings(dir.path(), "gpt2.json", &keys));
        ran.end.as_ref().unwrap_or_else(|e| panic!("{e}"));
        last.push(ran.losses());
        without_run(dir.path());
    }
    for losses in &last[1..] {
        for (a, b) in losses.iter().zip(&last[0]) {
            assert!((a - b).abs() < 2e-4, "{losses:?} beside {:?}", last[0]);
        }
    }
}

#[test]
fn recomputed_activations_take_less_memory_and_losses_stay() {
    let dir = folder();
    deep(dir.path(), 6);
    let with = |keys: &[(&str, &str)]| settings(dir.path(), "deep.json", keys);
    let backend = cpu(2);
    let workspace = |keys: &[(&str, &str)]| {
        let mut prepared = Prepared::new(with(keys), &NEVER)?;
        prepared.step.fit(&backend, &NEVER)?;
        let memory = prepared.step.memory(&ProgramCache::new(backend.clone()))?;
        let [all, states] = [memory.on_device(), memory.get(MemoryOwner::States)].map(|bytes| bytes as u64);
        Ok::<_, ridge_train::TrainError>((prepared.step.recompute.to_string(), all, all - states))
    };
    let kinds = ["none", "selective", "full"].map(|kind| [("train.recomputation", kind), ("train.steps", "6")]);
    let of_kinds = kinds.map(|keys| workspace(&keys).expect("fits"));
    let bytes = of_kinds.clone().map(|(_, _, workspace)| workspace);
    assert!(bytes[0] * 20 > bytes[1] * 21 && bytes[1] * 2 > bytes[2] * 3, "{bytes:?}");

    let losses = kinds.map(|keys| {
        let losses = run(&with(&keys)).losses();
        without_run(dir.path());
        losses
    });
    for other in &losses[1..] {
        let close = losses[0].iter().zip(other).all(|(a, b)| (a - b).abs() < 1e-4 * a);
        assert!(close && other.len() == 6, "{losses:?}");
    }

    // A budget between two levels takes the higher, one below all is refused with what is needed.
    let [none, _, full] = of_kinds.map(|(_, total, _)| total);
    let within = |bytes: u64| workspace(&[("train.memory", &format!("{bytes}B"))]);
    assert_eq!(within(none).expect("fits").0, "no activations");
    let (level, total, _) = within(u64::midpoint(none, full)).expect("fits");
    assert!(level.ends_with("of 6 layers") || level.contains("norms"), "{level}");
    assert!(total <= u64::midpoint(none, full) && total > full, "{total} of {none} and {full}");
    // The backward pass begins with the last layer, so that to compute it again frees nothing here.
    let (level, least, _) = within(full).expect("fits");
    assert!(level == "all activations of 5 of 6 layers" && least < full, "{level}, {least} of {full}");
    assert_eq!(within(full - 1).expect("fits").0, level);
    let error = within(least - 1).expect_err("does not fit").to_string();
    assert!(error.contains("that a step needs with all layers recomputed; raise it"), "{error}");
}

#[test]
fn every_optimiser_lowers_the_loss() {
    let dir = folder();
    for (name, rate) in
        [("adamw8bit", "1e-2"), ("sgd", "0.3"), ("adafactor", "0.05"), ("lion", "3e-3"), ("muon", "1e-2")]
    {
        let keys = [("optimizer.name", name), ("optimizer.learning_rate", rate), ("train.steps", "25")];
        let ran = run(&settings(dir.path(), "llama.json", &keys));
        ran.end.as_ref().unwrap_or_else(|e| panic!("{name}: {e}"));
        let losses = ran.losses();
        assert!(losses[24] < 0.9 * losses[0], "{name}: {losses:?}");
        without_run(dir.path());
    }
}

#[test]
fn rules_say_which_checkpoints_stay() {
    let dir = folder();
    let keys = [
        ("train.steps", "10"),
        ("checkpoint.every", "1"),
        ("checkpoint.keep", "2"),
        ("checkpoint.keep_every", "5"),
        ("checkpoint.keep_best", "false"),
        ("checkpoint.export", "false"),
    ];
    run(&settings(dir.path(), "gpt2.json", &keys)).end.unwrap_or_else(|e| panic!("{e}"));
    let names = || {
        let entries = std::fs::read_dir(dir.path().join("run/checkpoints")).expect("is there");
        let mut names: Vec<_> = entries.map(|e| e.expect("reads").file_name().into_string().expect("text")).collect();
        names.sort();
        names
    };
    assert_eq!(names(), ["step-00000005", "step-00000009", "step-00000010"]);
    // What a writer that was killed has left goes with the next checkpoint.
    std::fs::create_dir(dir.path().join("run/checkpoints/.step-00000011.1.part")).expect("is made");
    let more = [&keys[1..], &[("train.steps", "11"), ("checkpoint.resume", "auto")]].concat();
    run(&settings(dir.path(), "gpt2.json", &more)).end.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(names(), ["step-00000005", "step-00000010", "step-00000011"]);
}

fn error(settings: &Settings) -> String {
    run(settings).end.expect_err("cannot be done").to_string()
}

#[test]
fn a_damaged_checkpoint_is_passed_over_and_a_foreign_one_refused() {
    let dir = folder();
    let base = [("train.steps", "8"), ("checkpoint.export", "false")];
    let ran = run(&settings(dir.path(), "gpt2.json", &base));
    ran.end.as_ref().unwrap_or_else(|e| panic!("{e}"));
    let fresh = error(&settings(dir.path(), "gpt2.json", &base));
    assert!(fresh.contains("it holds the checkpoints of a run; continue it with checkpoint.resume = auto"), "{fresh}");

    let auto = [&base[..], &[("checkpoint.resume", "auto")]].concat();
    for (keys, wanted) in [
        (("train.seed", "2"), "it is of another run: train.seed was 1, and is 2; continue with the settings"),
        (("optimizer.name", "sgd"), "optimizer.name was adamw, and is sgd"),
        (("data.vocabulary", "bytes"), "it is of another run: "),
        (("data.validation_fraction", "0.2"), "it is of another run: the data was"),
    ] {
        let text = error(&settings(dir.path(), "gpt2.json", &[&auto[..], &[keys]].concat()));
        assert!(text.contains(wanted), "{text}");
    }
    let text = error(&settings(dir.path(), "llama.json", &auto));
    assert!(text.contains("of config.json was"), "{text}");

    // A truncated file: the one before it is taken, and comes to the same end.
    let wanted = state(dir.path(), 8);
    let path = checkpoint(dir.path(), 8).join("state.safetensors");
    std::fs::write(&path, &wanted[..wanted.len() / 2]).expect("writes");
    let again = run(&settings(dir.path(), "gpt2.json", &auto));
    again.end.as_ref().unwrap_or_else(|e| panic!("{e}"));
    let note = again.events.iter().find_map(|event| match event {
        TrainEvent::Note { text } => Some(text.clone()),
        _ => None,
    });
    let note = note.expect("says so");
    assert!(note.contains("state.safetensors: it is damaged"), "{note}");
    assert_eq!(again.losses(), ran.losses()[4..]);
    assert!(state(dir.path(), 8) == wanted);

    let path = dir.path().join("run/checkpoints").display().to_string();
    let named = [&base[..], &[("checkpoint.resume", path.as_str())]].concat();
    let text = error(&settings(dir.path(), "gpt2.json", &named));
    assert!(text.contains("it is no checkpoint: it has no checkpoint.json"), "{text}");
}

/// What a server has learnt of a run has an end, though training never begins.
#[test]
fn a_server_learns_of_a_run_that_fails_while_it_starts() {
    let dir = folder();
    let base = [("train.steps", "2"), ("checkpoint.export", "false"), ("checkpoint.resume", "auto")];
    run(&settings(dir.path(), "gpt2.json", &base)).end.unwrap_or_else(|e| panic!("{e}"));
    let server = JsonServer::start(|request, _| {
        let body = match request.target.split('?').next().and_then(|path| path.rsplit('/').next()) {
            Some("get-by-name") => json!({ "experiment": { "experiment_id": "1" } }),
            Some("create") => json!({ "run": { "info": { "run_id": "r" }, "data": {} } }),
            _ => json!({}),
        };
        JsonReply::Body(200, body.to_string())
    });
    let url = server.url();
    let keys = [&base[..], &[("train.seed", "2"), ("log.mlflow", url.as_str())]].concat();
    assert!(error(&settings(dir.path(), "gpt2.json", &keys)).contains("train.seed was 1"));
    let seen = server.seen();
    let last = seen.last().expect("the server is told");
    assert!(last.target.ends_with("runs/update") && last.body.contains("FAILED"), "{} {}", last.target, last.body);
}

#[test]
fn mistakes_are_told_with_what_to_do() {
    let dir = folder();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).expect("writes");
    write("empty.txt", b"");
    write("latin.txt", b"caf\xe9");
    write("short.txt", b"abc");
    write(
        "small.json",
        br#"{"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
        "layer_norm_epsilon": 1e-5, "vocab_size": 10}"#,
    );
    write("tokens.bin", &[1, 0, 255, 255]);
    let path = |name: &str| dir.path().join(name).display().to_string();
    for (keys, wanted) in [
        ([("data.train", path("empty.txt")), ("data.vocabulary", "bytes".into())], "it has no tokens"),
        (
            [("data.train", path("latin.txt")), ("data.vocabulary", "bytes".into())],
            "it is not UTF-8 at byte 3; save it",
        ),
        (
            [("data.train", path("short.txt")), ("data.vocabulary", "bytes".into())],
            "to train on, and a sequence takes 33",
        ),
        ([("data.train", path("none.txt")), ("data.vocabulary", "bytes".into())], "cannot open the data"),
        ([("model.config", path("small.json")), ("train.steps", "1".into())], "vocab_size = 10: is less than the"),
        ([("data.sequence_length", "65".into()), ("train.steps", "1".into())], "is more than the 64 positions"),
        (
            [("data.train", path("tokens.bin")), ("data.vocabulary", "bytes".into())],
            "the token 65535, and the vocabulary has 257",
        ),
    ] {
        let keys: Vec<(&str, &str)> = keys.iter().map(|(key, value)| (*key, value.as_str())).collect();
        let text = error(&settings(dir.path(), "gpt2.json", &keys));
        assert!(text.contains(wanted), "{text}");
    }
    // A file stands where the folder of the run should be.
    write("file", b"");
    let text = error(&settings(dir.path(), "gpt2.json", &[("checkpoint.folder", &path("file"))]));
    assert!(text.contains("cannot make the folder"), "{text}");
}

#[test]
fn a_loss_that_is_no_number_ends_the_run_and_leaves_the_checkpoints() {
    let dir = folder();
    let keys =
        [("optimizer.learning_rate", "1e18"), ("train.clip", "0"), ("optimizer.warmup", "0"), ("train.patience", "3")];
    let good = [("train.steps", "4"), ("checkpoint.export", "false")];
    run(&settings(dir.path(), "gpt2.json", &good)).end.unwrap_or_else(|e| panic!("{e}"));
    let kept = state(dir.path(), 4);
    let more = [&keys[..], &[("train.steps", "40"), ("checkpoint.resume", "auto"), ("checkpoint.every", "0")]].concat();
    let ran = run(&settings(dir.path(), "gpt2.json", &more));
    let text = ran.end.expect_err("diverges").to_string();
    assert!(text.contains("3 steps in a row were refused; lower optimizer.learning_rate"), "{text}");
    assert!(state(dir.path(), 4) == kept);
    let rolled = [&more[..], &[("train.guard", "rollback")]].concat();
    let ran = run(&settings(dir.path(), "gpt2.json", &rolled));
    assert!(ran.events.contains(&TrainEvent::RolledBack { step: 4 }), "{:?}", ran.events);
    ran.end.expect_err("diverges again");
}
