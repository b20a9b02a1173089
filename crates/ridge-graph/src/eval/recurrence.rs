//! Linear recurrences whose state is a matrix, and their gradients.

use std::ops::Range;

use super::precision::Precision;
use crate::tensor::{Data, Tensor};
use crate::why::Why;

/// The operands of [`Prim::LinearRecurrence`](crate::Prim::LinearRecurrence).
struct Operands<'a> {
    inputs: &'a [&'a Tensor],
    precision: Precision,
    groups: usize,
    heads: usize,
    key: usize,
    value: usize,
}

/// Those of one token of one head.
struct HeadToken<'a> {
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    /// What stays of each key's row of the state.
    kept: Vec<f64>,
    /// `erase` and `write`, if there is a part of low rank.
    low_rank: Option<[&'a [f64]; 2]>,
}

impl<'a> Operands<'a> {
    fn of(inputs: &'a [&'a Tensor], precision: Precision) -> Result<Self, Why> {
        let [q, _, v, _, _, _, ..] = inputs else { return Err("takes six inputs or eight".into()) };
        let (groups, key) = (q.shape[1], q.shape[2]);
        Ok(Self { inputs, precision, groups, heads: v.shape[1], key, value: v.shape[2] })
    }

    fn round(&self, x: f64) -> f64 {
        if self.precision == Precision::Exact { x } else { f64::from(x as f32) }
    }

    /// The tokens of each row.
    fn rows(&self) -> impl Iterator<Item = Range<usize>> {
        let tokens = self.inputs[0].shape[0];
        let bounds = self.inputs[5].ints().windows(2);
        bounds.map(move |pair| pair[0].max(0) as usize..(pair[1].max(0) as usize).min(tokens))
    }

    fn token(&self, token: usize, head: usize) -> HeadToken<'a> {
        let (key, at) = (self.key, token * self.heads + head);
        let of_group = (token * self.groups + head * self.groups / self.heads) * key;
        let (decays, rates) = (self.inputs[3].shape[2], self.inputs[3].floats());
        let kept = |i: usize| self.round(rates[at * decays + if decays == 1 { 0 } else { i }].exp());
        HeadToken {
            q: &self.inputs[0].floats()[of_group..][..key],
            k: &self.inputs[1].floats()[of_group..][..key],
            v: &self.inputs[2].floats()[at * self.value..][..self.value],
            kept: (0..key).map(kept).collect(),
            low_rank: (self.inputs.len() == 8).then(|| [6, 7].map(|i| &self.inputs[i].floats()[at * key..][..key])),
        }
    }

    /// The elements of a head's state of a row.
    fn state(&self, row: usize, head: usize) -> Range<usize> {
        let from = (row * self.heads + head) * self.key * self.value;
        from..from + self.key * self.value
    }

    /// `sum` and a product.
    fn add(&self, sum: f64, product: f64) -> f64 {
        self.round(sum + if self.precision.fuses_recurrences() { product } else { self.round(product) })
    }

    /// The sum of `count` products.
    fn sum(&self, count: usize, product: impl Fn(usize) -> f64) -> f64 {
        self.precision.order(count).fold(0.0, |sum, i| self.add(sum, product(i)))
    }

    /// `x^T S`, for one column.
    fn over_keys(&self, x: &[f64], s: &[f64], column: usize) -> f64 {
        self.sum(self.key, |i| x[i] * s[i * self.value + column])
    }

    /// `S x`, for one key.
    fn over_values(&self, s: &[f64], x: &[f64], i: usize) -> f64 {
        self.sum(self.value, |column| s[i * self.value + column] * x[column])
    }

    /// The state behind a token.
    fn advance(&self, at: &HeadToken<'_>, s: &mut [f64]) {
        for column in 0..self.value {
            let erased = at.low_rank.map(|[erase, write]| (self.over_keys(erase, s, column), write));
            for i in 0..self.key {
                let x = &mut s[i * self.value + column];
                *x = self.round(at.kept[i] * *x);
                if let Some((erased, write)) = erased {
                    *x = self.add(*x, write[i] * erased);
                }
                *x = self.add(*x, at.k[i] * at.v[column]);
            }
        }
    }
}

/// `y` and the state after the step; see [`Prim::LinearRecurrence`](crate::Prim::LinearRecurrence).
pub(super) fn run(inputs: &[&Tensor], precision: Precision) -> Result<[Data; 2], Why> {
    let all = Operands::of(inputs, precision)?;
    let (mut y, mut after) = (vec![0.0; inputs[2].len()], inputs[4].floats().to_vec());
    for (row, tokens) in all.rows().enumerate() {
        for head in 0..all.heads {
            let s = &mut after[all.state(row, head)];
            for token in tokens.clone() {
                let at = all.token(token, head);
                all.advance(&at, s);
                let y = &mut y[(token * all.heads + head) * all.value..][..all.value];
                y.iter_mut().enumerate().for_each(|(column, y)| *y = all.over_keys(at.q, s, column));
            }
        }
    }
    Ok([Data::Float(y), Data::Float(after)])
}

/// The cotangents of the inputs; see [`Prim::LinearRecurrenceGradient`](crate::Prim::LinearRecurrenceGradient).
pub(super) fn gradient(inputs: &[&Tensor], precision: Precision) -> Result<Vec<Data>, Why> {
    let (forward, cotangents) = inputs.split_at(inputs.len().saturating_sub(2));
    let all = Operands::of(forward, precision)?;
    let (key, value, round) = (all.key, all.value, |x| all.round(x));
    let by_head = || vec![0.0; inputs[2].shape[0] * all.heads * key];
    let [mut dq, mut dk, mut derase, mut dwrite] = [(); 4].map(|()| by_head());
    let (mut dv, mut ddecay) = (vec![0.0; inputs[2].len()], vec![0.0; inputs[3].len()]);
    let mut dstate = cotangents[1].floats().to_vec();
    let decays = inputs[3].shape[2];
    for (row, tokens) in all.rows().enumerate() {
        for head in 0..all.heads {
            let mut states = vec![inputs[4].floats()[all.state(row, head)].to_vec()];
            for (nth, token) in tokens.clone().enumerate() {
                let mut s = states[nth].clone();
                all.advance(&all.token(token, head), &mut s);
                states.push(s);
            }
            let g = &mut dstate[all.state(row, head)];
            for (nth, token) in tokens.clone().enumerate().rev() {
                let (at, place) = (all.token(token, head), token * all.heads + head);
                let (before, after) = (&states[nth], &states[nth + 1]);
                let dy = &cotangents[0].floats()[place * value..][..value];
                for (i, g) in g.chunks_mut(value.max(1)).enumerate() {
                    g.iter_mut().zip(dy).for_each(|(g, dy)| *g = all.add(*g, at.q[i] * dy));
                }
                (0..value).for_each(|column| dv[place * value + column] = all.over_keys(at.k, g, column));
                let parts = at.low_rank.map(|[erase, write]| {
                    let erased = (0..value).map(|column| all.over_keys(erase, before, column)).collect::<Vec<_>>();
                    let back = (0..value).map(|column| all.over_keys(write, g, column)).collect::<Vec<_>>();
                    (erase, erased, back)
                });
                let kept_by = |i: usize| {
                    round(at.kept[i] * all.sum(value, |column| g[i * value + column] * before[i * value + column]))
                };
                match decays {
                    1 => ddecay[place] = all.sum(key, kept_by),
                    _ => (0..key).for_each(|i| ddecay[place * key + i] = kept_by(i)),
                }
                for i in 0..key {
                    dq[place * key + i] = all.over_values(after, dy, i);
                    dk[place * key + i] = all.over_values(g, at.v, i);
                    if let Some((_, erased, back)) = &parts {
                        derase[place * key + i] = all.over_values(before, back, i);
                        dwrite[place * key + i] = all.over_values(g, erased, i);
                    }
                }
                for (i, g) in g.chunks_mut(value.max(1)).enumerate() {
                    for (column, g) in g.iter_mut().enumerate() {
                        *g = round(at.kept[i] * *g);
                        if let Some((erase, _, back)) = &parts {
                            *g = all.add(*g, erase[i] * back[column]);
                        }
                    }
                }
            }
        }
    }
    let first = [dq, dk, dv, ddecay, dstate].into_iter();
    let low_rank = [derase, dwrite].into_iter().take(if forward.len() == 8 { 2 } else { 0 });
    Ok(first.chain(low_rank).map(Data::Float).collect())
}
