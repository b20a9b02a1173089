//! What `ridge inspect` prints: tables, or one JSON object.

use ridge_graph::DType;
use ridge_hw::units::{Bytes, Flops};
use ridge_models::summary::{EncoderSummary, ImageClassifierSummary, ModuleSummary, Scope, StepCost, Summary};
use ridge_models::{ModelFiles, PredictionSummary};
use serde_json::{Value, json};

use crate::args::ModelSettings;
use crate::output::{columns, count, grouped};

/// The summary of a network.
pub(super) enum Inspected {
    /// A decoder, and the dtype of its cache.
    Decoder(Summary, DType),
    Encoder(EncoderSummary),
    ImageClassifier(ImageClassifierSummary),
}

impl Inspected {
    fn module(&self) -> &ModuleSummary {
        match self {
            Self::Decoder(summary, _) => &summary.module,
            Self::Encoder(summary) => &summary.module,
            Self::ImageClassifier(summary) => &summary.module,
        }
    }

    /// The step whose cost is shown, and its cost.
    fn step(&self) -> (String, &StepCost) {
        match self {
            Self::Decoder(s, _) => {
                (format!("One token at a context of {}", grouped(s.token.context as u64)), &s.token.step)
            }
            Self::Encoder(s) => (format!("One text of {}", count(s.tokens, "token")), &s.text),
            Self::ImageClassifier(s) => ("One image".to_owned(), &s.cost),
        }
    }

    /// What the step computes, as text.
    fn costs(&self) -> String {
        let computes = match self {
            Self::Decoder(..) => "generates one token",
            Self::Encoder(_) => "encodes one text",
            Self::ImageClassifier(_) => "classifies one image",
        };
        format!("modelled: sum over all ops of the step that {computes}")
    }

    /// One JSON object; `storage` is the provenance of storage figures, and `prediction` describes the module that predicts
    /// further tokens.
    pub(super) fn object(
        &self,
        files: &ModelFiles,
        settings: &ModelSettings,
        activations: DType,
        storage: &str,
        prediction: Option<&PredictionSummary>,
    ) -> Value {
        let mut sources = json!({ "parameters": "exact", "weight_bytes": storage });
        let mut used = json!({
            "format": settings.numbers.format.as_ref().map(|f| f.name()),
            "dtype": activations.name(),
        });
        let (kind, summary, cost) = match self {
            Self::Decoder(summary, cache) => {
                sources["kv_bytes_per_token"] = "exact".into();
                sources["state_bytes_per_sequence"] = "exact".into();
                used["cache_dtype"] = cache.name().into();
                ("decoder", json!(summary), "token")
            }
            Self::Encoder(summary) => ("encoder", json!(summary), "text"),
            Self::ImageClassifier(summary) => ("image_classifier", json!(summary), "cost"),
        };
        sources[cost] = self.costs().into();
        let mut object = json!({
            "model": files.to_string(), "kind": kind, "summary": summary, "sources": sources, "settings": used,
        });
        if let Some(module) = prediction {
            object["prediction"] = json!(module);
            object["sources"]["prediction"] = "exact, weights as the config publishes them; draft modelled".into();
        }
        object
    }

    /// Tables, of what [`Inspected::object`] has.
    pub(super) fn text(&self, files: &ModelFiles, storage: &str, prediction: Option<&PredictionSummary>) -> String {
        let module = self.module();
        let mut rows = Vec::new();
        tree(&module.tree, 0, &mut rows);
        // Numbers end where those above and below end.
        for column in [2, 3] {
            let width = rows.iter().map(|r| r[column].len()).max().unwrap_or(0);
            for row in &mut rows {
                row[column] = format!("{:>width$}", row[column]);
            }
        }
        let title = format!("{files}: {}, {}\n\n", module.family, self.extents());
        let mut facts = vec![row("parameters", grouped(module.parameters), "exact")];
        facts.push(row("weights", bytes(module.weight_bytes), storage));
        if module.storage.len() > 1 {
            for part in &module.storage {
                let share = format!("{} parameters", grouped(part.parameters));
                facts.push(row(&format!("  {}", part.name), bytes(part.bytes), &share));
            }
        }
        if let Some(module) = prediction {
            let what =
                "exact: parameters not counted above, loaded with --speculate mtp; embedding and output are shared";
            facts.push(row("prediction module", grouped(module.parameters), what));
            facts.push(row("  weights", bytes(module.weight_bytes), "exact, as the config publishes them"));
            facts.push(row("  cache per token", bytes(module.kv_bytes_per_token), "exact"));
            let draft = &module.draft;
            let cost = format!("{}, {} read", Flops(draft.matrix_flops as f64), Bytes(draft.bytes_read));
            let what = format!("modelled: one token that attends to {}", grouped(module.context as u64));
            facts.push(row("  draft", cost, &what));
        }
        if let Self::Decoder(s, cache) = self {
            let source = format!("exact: keys and values in {cache} (--cache-dtype)");
            facts.push(row("cache per token", bytes(s.kv_bytes_per_token), &source));
            facts.push(row(&format!("cache of {}", grouped(s.token.context as u64)), bytes(s.token.kv_bytes), "exact"));
            if s.state_bytes_per_sequence > 0 {
                let of_sequence = bytes(s.state_bytes_per_sequence);
                facts.push(row("state per sequence", of_sequence, "exact: recurrent state, independent of the length"));
            }
        }
        let (step, cost) = self.step();
        let flops = |n: u64| Flops(n as f64).to_string();
        let costs = [
            row("matrix products", flops(cost.matrix_flops), &format!("= {}", cost.matrix_formula)),
            row("vector arithmetic", flops(cost.vector_flops), "elementwise, sums"),
            row("special functions", flops(cost.special_flops), "exponentials, roots, divisions"),
            row("bytes read", Bytes(cost.bytes_read).to_string(), "if each op reads each input once"),
            row("bytes written", Bytes(cost.bytes_written).to_string(), "if each op writes each output once"),
        ];
        let heading = format!("\n{step} ({}):\n", self.costs());
        let indented: String = columns(&costs).lines().map(|line| format!("  {line}\n")).collect();
        title + &columns(&rows) + "\n" + &columns(&facts) + &heading + &indented
    }

    /// Its inputs and outputs.
    fn extents(&self) -> String {
        match self {
            Self::Decoder(s, _) => {
                let context = count(s.max_context, "token");
                format!("vocabulary of {}, context of {context}", count(s.vocab_size, "token"))
            }
            Self::Encoder(s) => {
                let (words, text) = (count(s.vocab_size, "token"), count(s.max_context, "token"));
                format!("vocabulary of {words}, texts of up to {text}, vectors of {}", grouped(s.hidden_size as u64))
            }
            Self::ImageClassifier(s) => {
                let [channels, height, width] = s.image;
                let classes = grouped(s.labels as u64);
                let channels = count(channels, "channel");
                format!(
                    "images of {height} x {width} pixels and {channels}, {} positions, {classes} classes",
                    s.positions
                )
            }
        }
    }
}

fn bytes(n: u64) -> String {
    format!("{} ({})", Bytes(n), grouped(n))
}

fn row(name: &str, value: String, source: &str) -> Vec<String> {
    vec![name.to_owned(), value, source.to_owned()]
}

/// A line for each scope: name, type, parameters and bytes. A repeated scope is followed by one instance.
fn tree(scopes: &[Scope], depth: usize, rows: &mut Vec<Vec<String>>) {
    for scope in scopes {
        let repeats = if scope.repeats > 1 { format!(" x{}", scope.repeats) } else { String::new() };
        let ty = match &scope.ty {
            Some(ty) => ty.clone(),
            None if scope.repeats > 1 => "one instance below".to_owned(),
            None => String::new(),
        };
        let name = format!("{:indent$}{}{repeats}", "", scope.name, indent = 2 * depth);
        rows.push(vec![name, ty, grouped(scope.parameters), Bytes(scope.bytes).to_string()]);
        tree(&scope.children, depth + 1, rows);
    }
}
