//! Every sharding rule of every op gives what the op gives unsharded.

use crate::support::sharding::{assert_same, check_rules, named, normal, tp};
use ridge_graph::conformance::is_selected;
use ridge_graph::sample::{Rng, Sample};
use ridge_graph::shard::{Placement, shard};
use ridge_graph::{
    Binary, CollectiveKind, Combine, Compare, DType, FormatRef, Literal, Op, Prim, Shape, Tensor, Unary, format, ops,
    passes,
};

#[test]
fn every_rule_of_every_composite_gives_the_unsharded_result() {
    for entry in ops::registry().iter().filter(|entry| is_selected(&entry.name)) {
        let samples = entry.samples(&mut Rng::new(11), DType::F32);
        let checked: usize = samples.iter().map(|s| check_rules(&entry.name, s, &tp()).len()).sum();
        assert!(checked >= samples.len(), "{}: replication at least", entry.name);
    }
}

/// What a composite's rule allows, propagation finds in its decomposition too, at worst with communication.
#[test]
fn decompositions_shard_to_the_unsharded_result() {
    let axis = tp();
    for entry in ops::registry().iter().filter(|entry| is_selected(&entry.name)) {
        for sample in entry.samples(&mut Rng::new(12), DType::F32) {
            for rule in check_rules(&entry.name, &sample, &axis) {
                let mut graph = sample.graph().expect("a valid sample");
                while passes::decompose(&mut graph, |_| false).expect("decomposes") {}
                let place = |arg: &ridge_graph::Arg| rule.inputs[arg.name.parse::<usize>().expect("a number")];
                let what = format!("{} {:?} decomposed, by {rule}", entry.name, sample.types());
                match shard(&graph, &axis, &place, &|_| false) {
                    Ok(sharded) => assert_same(&what, &graph, &sharded, &axis, &named(&sample)),
                    Err(e) => panic!("{what}: {e}"),
                }
            }
        }
    }
}

fn int(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::int(DType::I32, shape, values.to_vec())
}

/// Of even extents, where the registry's samples of primitives are odd on purpose.
fn elementwise(rng: &mut Rng) -> Vec<Sample> {
    let one = |op, x: Tensor| Sample::prim(op).input(x);
    let mut samples = vec![
        Sample::prim(Prim::Const(Literal { dtype: DType::F32, values: [1.0, 2.0].into(), vector: true })),
        Sample::prim(Prim::Iota { shape: Shape::from([2usize, 4]), axis: 1, dtype: DType::I32 }),
        one(Prim::Unary(Unary::Neg), normal(rng, &[4, 6])),
        one(Prim::Unary(Unary::Tanh), normal(rng, &[4, 6])),
        one(Prim::Cast(DType::F32), rng.normal(DType::BF16, &[2, 3])),
        one(Prim::Cast(DType::BF16), normal(rng, &[2, 3])),
        one(Prim::Cast(DType::I64), normal(rng, &[2, 3])),
        Sample::prim(Prim::Compare(Compare::Lt)).input(normal(rng, &[4, 2])).input(normal(rng, &[4, 2])),
        Sample::prim(Prim::Select)
            .input(Tensor::int(DType::Bool, &[2, 2], vec![1, 0, 0, 1]))
            .input(normal(rng, &[2, 2]))
            .input(normal(rng, &[2, 2])),
    ];
    for op in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Max] {
        samples.push(Sample::prim(Prim::Binary(op)).input(normal(rng, &[4, 6])).input(normal(rng, &[4, 6])));
        let mut ints = || rng.integers(DType::I32, &[4], 1, 50);
        samples.push(Sample::prim(Prim::Binary(op)).input(ints()).input(ints()));
    }
    let key = |rng: &mut Rng| rng.integers(DType::I64, &[4], 0, 100);
    let random = (0..4).fold(Sample::prim(Prim::Random { stream: 3 }), |s, _| s.input(key(rng)));
    samples.push(random);
    samples
}

fn reductions(rng: &mut Rng) -> Vec<Sample> {
    let mut samples = Vec::new();
    for axis in 0..2 {
        for op in [Combine::Sum, Combine::Max, Combine::Min] {
            samples.push(Sample::prim(Prim::Reduce { op, axis }).input(normal(rng, &[4, 6])));
            samples.push(Sample::prim(Prim::Scan { op, axis }).input(normal(rng, &[4, 6])));
        }
        samples.push(Sample::prim(Prim::ArgMax { axis }).input(normal(rng, &[4, 6])));
        let sort = Prim::Sort { axis, descending: true, keep: 3.into() };
        samples.push(Sample::prim(sort).input(normal(rng, &[4, 6])));
    }
    for (trans_a, trans_b) in [(false, false), (false, true), (true, false), (true, true)] {
        let of = |swap, rows, cols| if swap { [2, cols, rows] } else { [2, rows, cols] };
        samples.push(
            Sample::prim(Prim::MatMul { trans_a, trans_b, out: DType::F32 })
                .input(normal(rng, &of(trans_a, 4, 6)))
                .input(normal(rng, &of(trans_b, 6, 8))),
        );
    }
    samples
}

fn movements(rng: &mut Rng) -> Vec<Sample> {
    let mut samples = Vec::new();
    let data = [4, 6, 2];
    for axis in 0..3 {
        for indices in [int(&[4], &[1, 0, -1, 1]), int(&[2, 2], &[0, 1, 9, 0])] {
            let mut picked = data.to_vec();
            picked.splice(axis..=axis, indices.shape.iter().copied());
            samples.push(Sample::prim(Prim::Gather { axis }).input(normal(rng, &data)).input(indices.clone()));
            for add in [false, true] {
                samples.push(
                    Sample::prim(Prim::Scatter { axis, add })
                        .input(normal(rng, &data))
                        .input(indices.clone())
                        .input(normal(rng, &picked)),
                );
            }
        }
        let whole = Prim::Slice { axis, start: 0.into(), len: data[axis].into() };
        let part = Prim::Slice { axis, start: 1.into(), len: 1.into() };
        let zeros = Prim::Pad { axis, before: 1.into(), after: 2.into(), value: 0.0 };
        let ones = Prim::Pad { axis, before: 0.into(), after: 1.into(), value: 1.0 };
        for prim in [whole, part, zeros, ones] {
            samples.push(Sample::prim(prim).input(normal(rng, &data)));
        }
        samples.push(Sample::prim(Prim::Concat { axis }).input(normal(rng, &data)).input(normal(rng, &data)));
    }
    for shape in [vec![4, 12], vec![24, 2], vec![2, 2, 6, 2], vec![1, 4, 6, 2], vec![48], vec![6, 4, 2]] {
        samples.push(Sample::prim(Prim::Reshape(Shape::new(shape))).input(normal(rng, &data)));
    }
    samples.push(Sample::prim(Prim::Transpose(vec![2, 0, 1])).input(normal(rng, &data)));
    let wide = Prim::Broadcast(Shape::from([2usize, 4, 6, 2]));
    samples.push(Sample::prim(wide).input(normal(rng, &[4, 1, 2])));
    samples.push(Sample::prim(Prim::StateRead).state(normal(rng, &data)));
    samples.push(Sample::prim(Prim::StateWrite).state(normal(rng, &data)).input(normal(rng, &data)));
    let stored = normal(rng, &[4, 1024]);
    for format in format::all() {
        for index in 0..format.components(&Shape::from([4usize, 1024])).len() {
            samples.push(Sample::prim(Prim::Component(index)).stored(&stored, &format));
        }
    }
    samples
}

#[test]
fn every_rule_of_every_primitive_gives_the_unsharded_result() {
    let mut rng = Rng::new(13);
    for sample in [elementwise(&mut rng), reductions(&mut rng), movements(&mut rng)].concat() {
        let Op::Prim(prim) = &sample.op else { unreachable!("primitives only") };
        let checked = check_rules(prim.name(), &sample, &tp());
        let fixed = sample.inputs.is_empty();
        assert!(fixed || checked.len() > 1, "{prim:?} has no rule but replication on {:?}", sample.types());
    }
}

/// Rules of a collective of another axis, whose values the mesh of one axis cannot hold: by name.
#[test]
fn collectives_of_other_axes_are_transparent() {
    let mesh = || "dp".into();
    let ty = [ridge_graph::Type::tensor(DType::F32, [4usize, 8])];
    let gather = Prim::Collective { kind: CollectiveKind::AllGather(0), mesh: mesh(), ranks: 2 };
    let texts = |prim: &Prim| -> Vec<String> {
        let out = prim.infer(&ty).expect("infers");
        let rules = ridge_graph::shard::rules(&Op::Prim(prim.clone()), &ty, &out, &tp());
        rules.iter().map(ToString::to_string).collect()
    };
    let through = ["(shard(1)) -> (shard(1))", "(partial) -> (partial)", "(replicate) -> (replicate)"];
    assert_eq!(texts(&gather), through);
    let reduce = Prim::Collective { kind: CollectiveKind::AllReduce, mesh: mesh(), ranks: 2 };
    assert_eq!(texts(&reduce)[0], "(shard(0)) -> (shard(0))");
}

#[test]
fn a_format_is_cut_between_its_blocks_only() {
    let q8 = FormatRef::from_name("q8_0").expect("known");
    let ty = ridge_graph::Type::tensor(DType::F32, [4usize, 96]).stored_as(q8);
    let out = Prim::Component(0).infer(std::slice::from_ref(&ty)).expect("infers");
    let rules = ridge_graph::shard::rules(&Op::Prim(Prim::Component(0)), &[ty], &out, &tp());
    // 96 are three blocks of 32, which two ranks cannot share.
    let places: Vec<Placement> = rules.iter().map(|r| r.inputs[0]).collect();
    assert_eq!(places, [Placement::shard(0), Placement::Replicate]);
}
