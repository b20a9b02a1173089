//! Ops of another crate: names made at run time, additions to the registry, and equality.

use std::fmt;

use ridge_graph::conformance::{expected, judge, samples_of};
use ridge_graph::ops::registry;
use ridge_graph::sample::{Rng, Sample};
use ridge_graph::{Builder, Composite, CompositeRef, Cost, DType, OpEntry, Precision, Result, Type, Var, Why, passes};

/// `x` times a power of two, named by it.
#[derive(Clone, Debug, PartialEq)]
struct Doubled {
    name: String,
    times: u32,
}

impl Doubled {
    fn new(times: u32) -> Self {
        Self { name: format!("doubled_{times}"), times }
    }
}

impl Composite for Doubled {
    fn name(&self) -> &str {
        &self.name
    }

    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
        Ok(inputs.to_vec())
    }

    fn decompose(&self, g: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
        let mut x = inputs[0];
        for _ in 0..self.times {
            x = g.add(x, x)?;
        }
        Ok(vec![x])
    }

    fn cost(&self, inputs: &[Type], outputs: &[Type]) -> Cost {
        Cost::moving(inputs, outputs)
    }
}

fn doubled(times: u32) -> OpEntry {
    OpEntry::new(format!("doubled_{times}"), move |rng: &mut Rng, dtype: DType| {
        vec![Sample::new(Doubled::new(times)).input(rng.normal(dtype, &[3, 5]))]
    })
}

#[test]
fn ops_named_at_run_time_join_the_registry_and_its_conformance() {
    let mut ops = registry();
    let built_in = ops.len();
    for times in 0..4 {
        ops.add(doubled(times)).expect("a new name");
    }
    assert_eq!(ops.len(), built_in + 4);
    let samples = samples_of(&ops, DType::F32, 5);
    for times in 0..4 {
        let name = format!("doubled_{times}");
        let (_, sample) = samples.iter().find(|(entry, _)| **entry == *name).expect("it has samples");
        let got = expected(sample, Precision::Rounded).expect("evaluates");
        let x = sample.inputs[0].tensor().floats()[0];
        assert_eq!(got[0].floats()[0], x * f64::from(1 << times));
        judge(sample, &got).expect("its own plain result is right");
        let text = sample.graph().expect("builds").to_string();
        assert!(text.contains(&format!("{name}(")), "{text}");
    }
}

#[test]
fn an_op_cannot_take_the_name_of_another() {
    let refused = registry().add(OpEntry::new("rms_norm", |_: &mut Rng, _| Vec::new())).unwrap_err();
    assert_eq!(refused.to_string(), "registry: op `rms_norm` is registered already; give the new op another name");
}

/// Two ops that say the same of themselves.
macro_rules! look_alike {
    ($op:ident) => {
        #[derive(PartialEq)]
        struct $op;

        impl fmt::Debug for $op {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("LookAlike")
            }
        }

        impl Composite for $op {
            fn name(&self) -> &str {
                "look_alike"
            }

            fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, Why> {
                Ok(inputs.to_vec())
            }

            fn decompose(&self, _: &mut Builder, inputs: &[Var]) -> Result<Vec<Var>> {
                Ok(inputs.to_vec())
            }

            fn cost(&self, _: &[Type], _: &[Type]) -> Cost {
                Cost::default()
            }
        }
    };
}

look_alike!(One);
look_alike!(Other);

#[test]
fn ops_of_two_types_differ_though_their_texts_agree() {
    let (one, other) = (CompositeRef::new(One), CompositeRef::new(Other));
    assert_eq!(format!("{} {one:?}", one.name()), format!("{} {other:?}", other.name()));
    assert!(one != other);
    assert!(one == CompositeRef::new(One));

    let mut g = Builder::new();
    let x = g.arg("x", Type::tensor(DType::F32, [4usize]));
    let [a, b, c] = [g.composite(One, &[x]), g.composite(Other, &[x]), g.composite(One, &[x])].map(|y| y.unwrap()[0]);
    let sum = g.add(a, b).and_then(|sum| g.add(sum, c)).unwrap();
    let mut graph = g.finish(vec![("sum".into(), sum)]).unwrap();
    passes::tidy(&mut graph);
    let left = graph.main().nodes.iter().filter(|n| n.op_name() == "look_alike").count();
    assert_eq!(left, 2, "only the two applications of one op are merged:\n{graph}");
}
