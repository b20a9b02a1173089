//! What training and serving programs of today do with the operands of an op, which its graph cannot tell.

use std::collections::HashMap;
use std::sync::LazyLock;

use serde::Deserialize;

/// What is done with the operands of an op.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Habit {
    /// The op.
    op: String,
    /// Inputs that a backward pass keeps.
    pub(super) keeps: Vec<usize>,
    /// Does it keep the output?
    pub(super) keeps_output: bool,
    /// Passes over the first input beside those of the op's cost.
    pub(super) more_passes: f64,
}

#[derive(Deserialize)]
struct HabitTable {
    habit: Vec<Habit>,
}

static TABLE: LazyLock<HashMap<String, Habit>> = LazyLock::new(|| {
    let table: HabitTable =
        toml::from_str(include_str!("habits.toml")).expect("the embedded table parses, as a test shows");
    table.habit.into_iter().map(|habit| (habit.op.clone(), habit)).collect()
});

/// That of the op called `name`.
pub(super) fn of(name: &str) -> Option<&'static Habit> {
    TABLE.get(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_of_ops_that_there_are() {
        let ops = ridge_graph::ops::registry();
        for name in TABLE.keys() {
            let planned = ["linear_recurrence", "latent_attention", "mul"].contains(&name.as_str());
            assert!(planned || ops.get(name).is_some(), "there is no op {name}");
        }
        assert!(of("linear").is_some_and(|habit| habit.keeps == [0] && !habit.keeps_output));
    }
}
