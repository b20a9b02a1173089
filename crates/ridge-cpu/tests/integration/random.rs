//! Random graphs of integers, whose results must be equal to the graph's meaning to the last bit: whatever the fused
//! programs, the planner, views, states, calls or threads do. Of floats, which jump, results must not depend on how
//! they are run.

use std::sync::{Arc, LazyLock};

use crate::common::{poisoned, run, same_bits};
use crate::random_graphs::case;
use proptest::prelude::*;
use ridge_graph::{DType, Precision, Tensor, evaluate};
use ridge_runtime::Backend;
use ridge_runtime::late::Late;

static BACKENDS: LazyLock<[Arc<dyn Backend>; 3]> =
    LazyLock::new(|| [poisoned(1), poisoned(3), Arc::new(Late::new(poisoned(2), 1))]);

proptest! {
    #![proptest_config(ProptestConfig { cases: 800, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn integers_are_equal_to_the_meaning(case in case(DType::I32)) {
        let meaning = evaluate(&case.graph, &|arg| Some(case.value(arg)), &case.bindings, Precision::Exact);
        let meaning = meaning.map_err(|e| TestCaseError::fail(e.to_string()))?;
        for backend in &*BACKENDS {
            let got = run(backend, &case.graph, &case.bindings, &|arg| case.value(arg));
            let got = got.map_err(|e| TestCaseError::fail(e.to_string()))?;
            for ((name, wanted), got) in meaning.iter().zip(&got) {
                prop_assert_eq!(got, wanted.tensor(), "{} on {} in\n{}", name, backend.name(), case.graph);
            }
        }
    }

    #[test]
    fn floats_are_the_same_however_they_are_run(case in case(DType::F32)) {
        let results: Vec<Vec<Tensor>> = BACKENDS
            .iter()
            .map(|backend| run(backend, &case.graph, &case.bindings, &|arg| case.value(arg)))
            .collect::<Result<_, _>>()
            .map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert!(results.iter().all(|r| same_bits(r, &results[0])), "results differ in\n{}", case.graph);
    }
}
