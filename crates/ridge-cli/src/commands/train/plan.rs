//! What `--dry-run` prints behind the settings, as comments of the configuration.

use std::fmt::Write as _;

use ridge::train::TrainPlan;
use ridge_hw::units::Bytes;

use crate::output::grouped;

/// Memory, what is stored in which dtype, and the precision of each op.
pub(super) fn text(plan: &TrainPlan) -> String {
    let total = Bytes(plan.states.0 + plan.workspace.0);
    let available = plan.available.map_or_else(String::new, |bytes| format!(" of {bytes} available"));
    let mut text = format!(
        "\n# {} parameters; memory {total}{available}: weights, gradients and optimizer {}, activations {}\n# recomputed: {}\n",
        grouped(plan.parameters),
        plan.states,
        plan.workspace,
        plan.recomputed
    );
    let [states, values] = plan.offloaded;
    if states.0 + values.0 > 0 {
        let all = Bytes(states.0 + values.0);
        let _ = writeln!(text, "# offloaded to host memory: {all}: optimizer {states}, activations {values}");
    }
    let mut stored: Vec<[String; 3]> =
        plan.stored.iter().map(|of| [of.kind.clone(), of.dtype.name().to_owned(), grouped(of.bytes)]).collect();
    let row = |what: &str, bytes| [what.to_owned(), "-".to_owned(), grouped(bytes)];
    stored.push(row("activations", plan.workspace.0));
    if states.0 + values.0 > 0 {
        stored.extend([row("offloaded activations", values.0), row("all in host memory", states.0 + values.0)]);
    }
    stored.push(row("all, aligned", total.0));
    text.push_str(&table(["stored", "dtype", "bytes"], stored));
    for (stage, ops) in &plan.precisions {
        let rows = ops.iter().map(|(of, times)| {
            let sums = if of.sums { "f32" } else { "-" };
            [of.op.clone(), of.operands.join(", "), sums.to_owned(), of.results.join(", "), times.to_string()]
        });
        text.push_str(&table([stage, "operands", "sums in", "results", "times"], rows.collect()));
    }
    text
}

/// Columns under their names, as comments.
fn table<const N: usize>(head: [&str; N], rows: Vec<[String; N]>) -> String {
    let mut all = vec![head.map(str::to_owned)];
    all.extend(rows);
    let widths: [usize; N] =
        std::array::from_fn(|column| all.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    let line = |row: &[String; N]| {
        let cells: String = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}  ")).collect();
        format!("# {}\n", cells.trim_end())
    };
    format!("#\n{}", all.iter().map(line).collect::<String>())
}
