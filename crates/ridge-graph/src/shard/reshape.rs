//! Which axis of a reshaped tensor is cut where an axis of the tensor is. `[T, H*D]` and `[T, H, D]` fall into groups
//! of axes with equal products, `[T] = [T]` and `[H*D] = [H, D]`; equal cuts of the outermost axis of a group are
//! equal cuts of the group's elements in row-major order, and so of the outermost axis on the other side.

use super::local::gcd;
use super::placement::{Placement, ShardingRule};
use crate::poly::Poly;
use crate::shape::Shape;

/// One rule for each group of axes whose outermost can be cut.
pub(super) fn rules(from: &Shape, to: &Shape) -> Vec<ShardingRule> {
    // Extents of 1 are in the way of nothing and are never cut.
    let axes = |s: &Shape| (0..s.rank()).filter(|a| !s.0[*a].is_one()).collect::<Vec<_>>();
    let (mut left, mut right) = (&axes(from)[..], &axes(to)[..]);
    let mut rules = Vec::new();
    while let Some((a, b)) = group(from, left, to, right) {
        rules.extend(group_rule(from, &left[..a], to, &right[..b]));
        (left, right) = (&left[a..], &right[b..]);
    }
    rules
}

fn product(shape: &Shape, axes: &[usize]) -> Poly {
    Poly::product(axes.iter().map(|a| &shape.0[*a]))
}

/// How many axes of each side make the smallest first group of equal products.
fn group(from: &Shape, left: &[usize], to: &Shape, right: &[usize]) -> Option<(usize, usize)> {
    let sizes = (1..=left.len()).flat_map(|a| (1..=right.len()).map(move |b| (a, b)));
    sizes.filter(|(a, b)| product(from, &left[..*a]) == product(to, &right[..*b])).min_by_key(|(a, b)| a + b)
}

fn group_rule(from: &Shape, left: &[usize], to: &Shape, right: &[usize]) -> Option<ShardingRule> {
    let (inner_left, inner_right) = (product(from, &left[1..]), product(to, &right[1..]));
    // The elements of a share must be whole steps of both outermost axes.
    let (by_left, by_right) = if inner_left == inner_right {
        (1, 1)
    } else {
        let number = |p: &Poly| p.as_const().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
        let (l, r) = (number(&inner_left)?, number(&inner_right)?);
        (r / gcd(l, r), l / gcd(l, r))
    };
    Some(ShardingRule {
        inputs: vec![Placement::Shard { dim: left[0], multiple: by_left }],
        outputs: vec![Placement::Shard { dim: right[0], multiple: by_right }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dim::Dim;

    fn texts(from: &[Dim], to: &[Dim]) -> Vec<String> {
        rules(&Shape(from.to_vec()), &Shape(to.to_vec())).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn heads_split_off_and_merge_back_in_units_of_a_head() {
        let (t, h, d) = (Dim::sym("tokens"), Dim::from(8), Dim::from(64));
        let (flat, split) = ([t.clone(), Dim::from(512)], [t, h, d]);
        assert_eq!(texts(&flat, &split), ["(shard(0)) -> (shard(0))", "(shard(1 by 64)) -> (shard(1))"]);
        assert_eq!(texts(&split, &flat), ["(shard(0)) -> (shard(0))", "(shard(1)) -> (shard(1 by 64))"]);
    }

    #[test]
    fn an_inner_axis_of_a_group_is_not_cut() {
        let dims = |d: &[usize]| d.iter().map(|n| Dim::from(*n)).collect::<Vec<_>>();
        assert_eq!(texts(&dims(&[6, 4]), &dims(&[24])), ["(shard(0)) -> (shard(0 by 4))"]);
        assert_eq!(texts(&dims(&[6, 4]), &dims(&[4, 6])), ["(shard(0 by 3)) -> (shard(0 by 2))"]);
        assert_eq!(
            texts(&dims(&[2, 1, 3]), &dims(&[1, 2, 3, 1])),
            ["(shard(0)) -> (shard(1))", "(shard(2)) -> (shard(2))"]
        );
    }
}
