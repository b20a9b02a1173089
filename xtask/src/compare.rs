//! `cargo xtask compare`: Ridge beside llama.cpp on this machine's CPU, in alternating runs of one model.
//!
//! `compare/model.rs` writes a model of random weights; the rest is here: programs, what they print, the table.

mod model;

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::error::XtaskError;
use crate::run;
use crate::task::{Task, TaskOutcome, TaskRun};

pub(crate) const TASK: Task = Task {
    name: "compare",
    summary: "Compare prompts and generation with llama.cpp on this machine's CPU",
    help: "\
Measure Ridge and llama.cpp on this machine's CPU in alternating runs of the same GGUF files, and print tokens a second
and their ratios as a Markdown table that names the processor. Ridge is built with --release.

Usage: cargo xtask compare llama.cpp --bin DIR [--model FILE] [--threads N] [--rounds N] [--tokens P,N]

  --bin DIR      folder with llama-bench and llama-quantize, built for this machine (GGML_NATIVE=ON)
  --model FILE   a GGUF file in bf16 [default: random weights in the shape of Llama-3.2-1B, written to target/compare]
  --threads N    threads of both programs [default: the cores that this process may use]
  --rounds N     alternating runs of each [default: 2]
  --tokens P,N   tokens of the prompt and of the answer [default: 256,32]

Formats are bf16, Q8_0 and Q4_K_M, quantised by llama-quantize and kept in target/compare (4.5 GB of random weights).
The machine should be idle: the table says so where runs of one program differ by more than a tenth.
RIDGE_CPU_ISA selects the instruction set that Ridge uses, for a table of that level.
",
    run: TaskRun::All(compare),
};

/// What is compared, as llama-quantize calls it; `None` is the given file.
const FORMATS: [(&str, Option<&str>); 3] = [("bf16", None), ("Q8_0", Some("q8_0")), ("Q4_K_M", Some("q4_k_m"))];

/// Runs of one program that differ by more say that the machine was busy.
const NOISY: f64 = 0.1;

struct Settings {
    bin: PathBuf,
    model: Option<PathBuf>,
    threads: usize,
    rounds: usize,
    /// Of the prompt, and of the answer.
    tokens: [usize; 2],
}

impl Settings {
    fn parse(args: &[&str]) -> Result<Self, XtaskError> {
        let unexpected =
            |argument: &str| XtaskError::UnexpectedArgument { command: "compare".into(), argument: argument.into() };
        let missing = |argument| XtaskError::MissingArgument { command: "compare".into(), argument };
        let [peer, rest @ ..] = args else { return Err(missing("llama.cpp, the program to compare with")) };
        if *peer != "llama.cpp" {
            return Err(unexpected(peer));
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut settings = Self { bin: PathBuf::new(), model: None, threads, rounds: 2, tokens: [256, 32] };
        for pair in rest.chunks(2) {
            let [name, value] = pair else { return Err(missing("a value after each option")) };
            let number = |value: &str| value.parse().ok().filter(|n| *n > 0).ok_or_else(|| unexpected(value));
            match *name {
                "--bin" => settings.bin = value.into(),
                "--model" => settings.model = Some(value.into()),
                "--threads" => settings.threads = number(value)?,
                "--rounds" => settings.rounds = number(value)?,
                "--tokens" => {
                    let (prompt, answer) = value.split_once(',').ok_or_else(|| unexpected(value))?;
                    settings.tokens = [number(prompt)?, number(answer)?];
                }
                _ => return Err(unexpected(name)),
            }
        }
        if settings.bin.as_os_str().is_empty() {
            return Err(missing("--bin DIR with llama-bench and llama-quantize"));
        }
        Ok(settings)
    }
}

fn compare(root: &Path, args: &[&str]) -> Result<TaskOutcome, XtaskError> {
    let settings = Settings::parse(args)?;
    let built = run::cargo(root, &["build", "--release", "-p", "ridge-cli"])?;
    if built.code != Some(0) {
        return Err(XtaskError::NoReport(built.stderr));
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let (ridge, folder) = (target.join("release/ridge"), target.join("compare"));
    std::fs::create_dir_all(&folder).map_err(|source| XtaskError::Write { path: folder.clone(), source })?;
    let plain = match &settings.model {
        Some(model) => model.clone(),
        None => random_model(&ridge, &folder)?,
    };
    let mut rows = Vec::new();
    for (name, format) in FORMATS {
        let file = match format {
            None => plain.clone(),
            Some(format) => quantised(&settings.bin, &plain, &folder, format)?,
        };
        let mut samples = [const { Vec::new() }; 2];
        for round in 0..settings.rounds {
            eprintln!("{name}, round {} of {}", round + 1, settings.rounds);
            samples[0].push(of_ridge(&run::output(&mut ridge_bench(&ridge, &file, &settings))?)?);
            samples[1].push(of_llama_bench(&run::output(&mut llama_bench(&file, &settings))?)?);
        }
        rows.push((name, samples));
    }
    Ok(TaskOutcome { report: report(&processor(), &settings, &rows), passed: true })
}

/// Writes `file` by way of `write`, unless it is there. It is written under a temporary name and renamed when it is
/// complete: a run that was interrupted leaves no part of a model under the final name.
fn written(file: PathBuf, write: impl FnOnce(&Path) -> Result<(), XtaskError>) -> Result<PathBuf, XtaskError> {
    if !file.exists() {
        let part = file.with_extension("part.gguf");
        write(&part)?;
        std::fs::rename(&part, &file).map_err(|source| XtaskError::Write { path: file.clone(), source })?;
    }
    Ok(file)
}

/// The model of random weights in bf16.
fn random_model(ridge: &Path, folder: &Path) -> Result<PathBuf, XtaskError> {
    written(folder.join("random-1b.gguf"), |part| {
        let of_folder = folder.join("random-1b");
        model::write(&of_folder).map_err(|source| XtaskError::Write { path: of_folder.clone(), source })?;
        let mut convert = Command::new(ridge);
        // The temporary file of an interrupted run is replaced.
        convert.arg("convert").args([of_folder.as_path(), part]).args(["--dtype", "bf16", "--force", "--quiet"]);
        run::output(&mut convert)?;
        std::fs::remove_dir_all(&of_folder).map_err(|source| XtaskError::Write { path: of_folder, source })
    })
}

/// `plain` in `format`, by llama-quantize.
fn quantised(bin: &Path, plain: &Path, folder: &Path, format: &str) -> Result<PathBuf, XtaskError> {
    let stem = plain.file_stem().unwrap_or_default().to_string_lossy();
    written(folder.join(format!("{stem}-{format}.gguf")), |part| {
        run::output(Command::new(bin.join("llama-quantize")).args([plain, part]).arg(format)).map(drop)
    })
}

fn ridge_bench(ridge: &Path, file: &Path, settings: &Settings) -> Command {
    let [prompt, answer] = settings.tokens.map(|n| n.to_string());
    let threads = settings.threads.to_string();
    let mut command = Command::new(ridge);
    command.args(["bench", "--device", "cpu", "--model"]).arg(file);
    command.args(["--prompt", &prompt, "--generate", &answer, "--repeat", "3", "--threads", &threads, "--json"]);
    command
}

fn llama_bench(file: &Path, settings: &Settings) -> Command {
    let [prompt, answer] = settings.tokens.map(|n| n.to_string());
    let threads = settings.threads.to_string();
    let mut command = Command::new(settings.bin.join("llama-bench"));
    command.arg("-m").arg(file).args(["-p", &prompt, "-n", &answer, "-r", "3", "-t", &threads, "-o", "json"]);
    command
}

/// Tokens a second of a prompt and of generation.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rates {
    tokens_per_second: [f64; 2],
    /// The floor over the time, where the program has one.
    of_floor: [Option<f64>; 2],
}

fn unreadable(program: &str, what: &str) -> XtaskError {
    XtaskError::NoReport(format!("{program} printed no {what}; is it the version that this command is written for?"))
}

fn of_ridge(json: &str) -> Result<Rates, XtaskError> {
    let value: Value = serde_json::from_str(json).map_err(|_| unreadable("ridge bench", "JSON object"))?;
    let result = |kind: &str| {
        let results = value["results"].as_array().into_iter().flatten();
        results.clone().find(|r| r["kind"] == kind).ok_or_else(|| unreadable("ridge bench", kind))
    };
    let rate = |r: &Value| {
        let rate = r["measured"]["tokens_per_second"].as_f64();
        rate.ok_or_else(|| unreadable("ridge bench", "tokens_per_second"))
    };
    let results = [result("prompt")?, result("generate")?];
    Ok(Rates {
        tokens_per_second: [rate(results[0])?, rate(results[1])?],
        of_floor: results.map(|r| r["modelled"]["floor_over_time"].as_f64()),
    })
}

fn of_llama_bench(json: &str) -> Result<Rates, XtaskError> {
    let value: Value = serde_json::from_str(json).map_err(|_| unreadable("llama-bench", "JSON list"))?;
    let rate = |of: &str| {
        let tests = value.as_array().into_iter().flatten();
        let test = tests.clone().find(|test| test[of].as_u64().is_some_and(|n| n > 0));
        test.and_then(|test| test["avg_ts"].as_f64()).ok_or_else(|| unreadable("llama-bench", "avg_ts"))
    };
    Ok(Rates { tokens_per_second: [rate("n_prompt")?, rate("n_gen")?], of_floor: [None; 2] })
}

/// The processor's name, as Linux has it.
fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let of = |key: &str| {
        let mut lines = info.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_owned())
    };
    let name = of("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let ids = ["cpu family", "model", "stepping"].map(|key| of(key).unwrap_or_else(|| "?".into()));
    format!("{name} (family {}, model {}, stepping {})", ids[0], ids[1], ids[2])
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    f64::midpoint(sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2])
}

/// The table: each round's rates, and the ratio of the medians.
fn report(processor: &str, settings: &Settings, rows: &[(&str, [Vec<Rates>; 2])]) -> String {
    let isa = std::env::var("RIDGE_CPU_ISA").unwrap_or_else(|_| "the best that it has".to_owned());
    let [prompt, answer] = settings.tokens;
    let mut text = format!(
        "{processor}, {} threads; Ridge's instruction set: {isa}. Tokens a second, {} alternating rounds of 3 runs.\n\n\
         | weights | test | Ridge | of its floor | llama.cpp | ratio |\n|---|---|---|---|---|---|\n",
        settings.threads, settings.rounds
    );
    let mut noisy = false;
    for (name, [ridge, peer]) in rows {
        for (at, test) in [format!("prompt {prompt}"), format!("generate {answer}")].into_iter().enumerate() {
            let rates = |of: &[Rates]| of.iter().map(|r| r.tokens_per_second[at]).collect::<Vec<_>>();
            let (ridge_rates, peer_rates) = (rates(ridge), rates(peer));
            let shown = |rates: &[f64]| rates.iter().map(|r| format!("{r:.1}")).collect::<Vec<_>>().join(", ");
            let floors = ridge.iter().filter_map(|r| r.of_floor[at]).map(|of| format!("{:.0} %", 100.0 * of));
            text += &format!(
                "| {name} | {test} | {} | {} | {} | {:.2} |\n",
                shown(&ridge_rates),
                floors.collect::<Vec<_>>().join(", "),
                shown(&peer_rates),
                median(&ridge_rates) / median(&peer_rates),
            );
            for rates in [ridge_rates, peer_rates] {
                let (least, most) = rates.iter().fold((f64::MAX, 0f64), |(a, b), r| (a.min(*r), b.max(*r)));
                noisy |= most > least * (1.0 + NOISY);
            }
        }
    }
    if noisy {
        text += "\nRuns of one program differ by more than a tenth: the machine was busy with other work.\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_both_programs_rates_and_the_ratio_of_their_medians() {
        let ridge = |prompt: f64, answer: f64| {
            let of = |kind: &str, rate: f64| {
                format!(
                    r#"{{"kind": "{kind}", "measured": {{"tokens_per_second": {rate}}}, "modelled": {{"floor_over_time": 0.9}}}}"#
                )
            };
            of_ridge(&format!(r#"{{"results": [{}, {}]}}"#, of("prompt", prompt), of("generate", answer))).unwrap()
        };
        let peer = |prompt: f64, answer: f64| {
            let of = |p: usize, n: usize, rate: f64| format!(r#"{{"n_prompt": {p}, "n_gen": {n}, "avg_ts": {rate}}}"#);
            of_llama_bench(&format!("[{}, {}]", of(256, 0, prompt), of(0, 32, answer))).unwrap()
        };
        let settings = Settings::parse(&["llama.cpp", "--bin", "b", "--threads", "3", "--tokens", "256,32"]).unwrap();
        let rows =
            [("Q8_0", [vec![ridge(200.0, 30.0), ridge(220.0, 31.0)], vec![peer(100.0, 20.0), peer(110.0, 20.0)]])];
        let text = report("a processor", &settings, &rows);
        assert!(text.contains("| Q8_0 | prompt 256 | 200.0, 220.0 | 90 %, 90 % | 100.0, 110.0 | 2.00 |"), "{text}");
        assert!(text.contains("| Q8_0 | generate 32 | 30.0, 31.0 | 90 %, 90 % | 20.0, 20.0 | 1.52 |"), "{text}");
        assert!(text.contains("a processor, 3 threads") && !text.contains("busy"), "{text}");
        let rows =
            [("Q8_0", [vec![ridge(200.0, 30.0), ridge(230.0, 31.0)], vec![peer(100.0, 20.0), peer(100.0, 20.0)]])];
        assert!(report("a processor", &settings, &rows).contains("the machine was busy"));
    }

    #[test]
    fn arguments_that_say_nothing_are_refused() {
        for args in [
            &[][..],
            &["vllm"],
            &["llama.cpp"],
            &["llama.cpp", "--bin"],
            &["llama.cpp", "--bin", "b", "--threads", "0"],
            &["llama.cpp", "--bin", "b", "--tokens", "256"],
            &["llama.cpp", "--bin", "b", "--runs", "2"],
        ] {
            assert!(Settings::parse(args).is_err(), "{args:?}");
        }
    }
}
