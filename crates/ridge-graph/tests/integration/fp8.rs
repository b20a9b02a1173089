//! Linears whose products take 8-bit floats: the pass that makes them, and their gradient, beside loops over values that are
//! rounded as formats say.

use ridge_graph::format::{CodeType, Format, ScaleLayout, ScaledFormat};
use ridge_graph::grad::Differentiated;
use ridge_graph::ops::Fp8Scaling;
use ridge_graph::passes::{FP8_AMAX, group_linears, with_fp8};
use ridge_graph::sample::Rng;
use ridge_graph::{Arg, Bindings, Builder, DType, Graph, Precision, Role, Shape, Tensor, Type, Value, evaluate};

const ROWS: usize = 21;
const K: usize = 144;
const N: [usize; 2] = [32, 160];

/// The sum of two linears of x by constants `c`, in a function that main calls.
fn graph() -> Graph {
    let mut g = Builder::new();
    let f32s = |shape: &[usize]| Type::tensor(DType::F32, Shape::new(shape.iter().copied()));
    let layer = g
        .function("layer", |g| {
            let x = g.arg("x", f32s(&[ROWS, K]));
            let mut sums = Vec::new();
            for (i, n) in N.into_iter().enumerate() {
                let y = g.scoped(&format!("l{i}"), |g| {
                    let w = g.weight("weight", f32s(&[n, K]))?;
                    let b = g.weight("bias", f32s(&[n]))?;
                    g.linear_bias(x, w, Some(b))
                })?;
                let c = g.step_input(&format!("c{i}"), f32s(&[ROWS, n]))?;
                let y = g.mul(y, c)?;
                let sum = g.reduce_sum(y, 1)?;
                let sum = g.reduce_sum(sum, 0)?;
                sums.push(g.reshape(sum, Shape::default())?);
            }
            Ok(vec![g.add(sums[0], sums[1])?])
        })
        .unwrap();
    let x = g.weight("x", f32s(&[ROWS, K])).unwrap();
    let loss = g.scoped("layers.0", |g| g.call(layer, &[x])).unwrap()[0];
    g.finish(vec![("loss".into(), loss)]).unwrap()
}

fn values(arg: &Arg) -> Tensor {
    let shape = arg.ty.shape.as_const().unwrap();
    if arg.name.ends_with(FP8_AMAX) {
        // Of x a large one, of the first weight none, of the others less than there is, so that some values are cut off.
        return Tensor::float(DType::F32, &shape, vec![6.0, 0.0, 2.0, 1.5, 2.5]);
    }
    let seed = arg.name.bytes().fold(7u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
    Rng::new(seed).normal(DType::F32, &shape)
}

/// `x` as `format` stores it, for values up to `amax` if that is given.
fn rounded(x: &[f64], shape: [usize; 2], format: ScaledFormat, amax: Option<f64>) -> Vec<f64> {
    if let Some(amax) = amax {
        let most = f64::from(format.codes.largest());
        let scale = if amax > 0.0 { amax / most } else { 1.0 };
        return x.iter().map(|x| format.codes.dtype().round((x / scale).clamp(-most, most)) * scale).collect();
    }
    let floats: Vec<f32> = x.iter().map(|x| *x as f32).collect();
    let parts = format.encode(&floats, &shape, None);
    let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
    format.values(&parts, &shape).into_iter().map(f64::from).collect()
}

/// `a[m, k] b[n, k]^T`, where elements of `b` are `b(n, k)`.
fn product(m: usize, n: usize, k: usize, a: impl Fn(usize, usize) -> f64, b: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    (0..m * n).map(|at| (0..k).map(|i| a(at / n, i) * b(at % n, i)).sum()).collect()
}

fn near(got: &[f64], wanted: &[f64], what: &str) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    let norm = wanted.iter().map(|v| v * v).sum::<f64>().sqrt();
    let error = got.iter().zip(wanted).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
    assert!(error <= 1e-6 * norm, "{what}: off by {error} of {norm}");
}

/// Loss and gradients by loops are those of the graph in f64, for every scaling.
#[test]
fn products_and_gradients_are_those_of_rounded_values() {
    let cases = [
        (Fp8Scaling::Tensor, CodeType::F8E5M2),
        (Fp8Scaling::Tensor, CodeType::F8E4M3),
        (Fp8Scaling::Delayed, CodeType::F8E5M2),
        (Fp8Scaling::Delayed, CodeType::F8E4M3),
        (Fp8Scaling::Blocks, CodeType::F8E4M3),
    ];
    for grouped in [false, true] {
        for (scaling, codes) in cases {
            if !(grouped || scaling != Fp8Scaling::Delayed) {
                // Names of magnitudes are for groups here.
                continue;
            }
            let mut graph = graph();
            if grouped {
                group_linears(&mut graph);
            }
            let graph = with_fp8(&graph, scaling, codes).unwrap();
            let names: Vec<String> = graph.args(Role::Weight).map(|arg| arg.name.to_string()).collect();
            let of: Vec<&str> = names.iter().map(String::as_str).collect();
            let step = Differentiated::new(&graph, "loss", &of).unwrap();
            let mut outputs = vec![("loss".to_owned(), step.output("loss").unwrap())];
            outputs.extend(step.parameters.iter().map(|p| (p.name.clone(), p.gradient)));
            let backward = step.finish(outputs).unwrap();
            let value = |arg: &Arg| Some(Value::Plain(values(arg)));
            let got = evaluate(&backward, &value, &Bindings::new(), Precision::Exact).unwrap();
            let output = |name: &str| {
                let found = got.iter().find(|(known, _)| known == name);
                found.unwrap_or_else(|| panic!("{name}")).1.tensor().floats().to_vec()
            };
            let given = |name: &str, shape: &[usize]| {
                let arg = Arg::new(name, Type::tensor(DType::F32, Shape::new(shape.iter().copied())), Role::Weight);
                values(&arg).floats().to_vec()
            };
            let what = format!("{scaling:?}, {codes:?}, grouped {grouped}");

            let [of_x, of_w] = scaling.formats();
            let of_dy = match scaling {
                Fp8Scaling::Blocks => of_x,
                _ => ScaledFormat::new(codes, ScaleLayout::Tensor),
            };
            let delayed = scaling == Fp8Scaling::Delayed;
            let amax = |value: f64| delayed.then_some(value);
            let x = given("x", &[ROWS, K]);
            let qx = rounded(&x, [ROWS, K], of_x, amax(6.0));
            let x_of_dw = if scaling == Fp8Scaling::Blocks { &x } else { &qx };
            let (mut loss, mut dx) = (0.0, vec![0.0; ROWS * K]);
            let mut magnitudes = vec![largest(&x)];
            let mut of_cotangents = Vec::new();
            for (i, n) in N.into_iter().enumerate() {
                let w = given(&format!("layers.0.l{i}.weight"), &[n, K]);
                let bias = given(&format!("layers.0.l{i}.bias"), &[n]);
                let dy = given(&format!("c{i}"), &[ROWS, n]);
                let qw = rounded(&w, [n, K], of_w, amax([0.0, 2.0][i]));
                let qdy = rounded(&dy, [ROWS, n], of_dy, amax([1.5, 2.5][i]));
                magnitudes.push(largest(&w));
                of_cotangents.push(largest(&dy));
                let y = product(ROWS, n, K, |r, k| qx[r * K + k], |c, k| qw[c * K + k]);
                loss += y.iter().zip(&dy).enumerate().map(|(at, (y, c))| (y + bias[at % n]) * c).sum::<f64>();
                let part = product(ROWS, K, n, |r, c| qdy[r * n + c], |k, c| qw[c * K + k]);
                dx.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
                let dy_of_dw = if scaling == Fp8Scaling::Blocks { &dy } else { &qdy };
                let dw = product(n, K, ROWS, |c, r| dy_of_dw[r * n + c], |k, r| x_of_dw[r * K + k]);
                near(&output(&format!("layers.0.l{i}.weight")), &dw, &format!("{what}: dw{i}"));
                let db: Vec<f64> = (0..n).map(|c| (0..ROWS).map(|r| dy[r * n + c]).sum()).collect();
                near(&output(&format!("layers.0.l{i}.bias")), &db, &format!("{what}: db{i}"));
            }
            near(&output("loss"), &[loss], &format!("{what}: loss"));
            near(&output("x"), &dx, &format!("{what}: dx"));
            if delayed {
                magnitudes.extend(of_cotangents);
                near(&output(&format!("layers.0.l0.weight{FP8_AMAX}")), &magnitudes, &format!("{what}: magnitudes"));
            }
        }
    }
}

fn largest(x: &[f64]) -> f64 {
    x.iter().fold(0f64, |most, x| most.max(x.abs()))
}

#[test]
fn a_graph_without_a_linear_of_multiples_of_16_is_refused() {
    let mut g = Builder::new();
    let layer = g.function("layer", |g| {
        let x = g.arg("x", Type::tensor(DType::F32, [3usize, 20]));
        let w = g.weight("weight", Type::tensor(DType::F32, [16usize, 20]))?;
        Ok(vec![g.linear(x, w)?])
    });
    let x = g.step_input("x", Type::tensor(DType::F32, [3usize, 20])).unwrap();
    let y = g.call(layer.unwrap(), &[x]).unwrap();
    let graph = g.finish(vec![("y".into(), y[0])]).unwrap();
    let error = with_fp8(&graph, Fp8Scaling::Tensor, CodeType::F8E5M2).expect_err("K is 20").to_string();
    assert!(error.contains("multiples of 16"), "{error}");
}
