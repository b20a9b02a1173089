//! Python's `sorted`: stable, with an error where two items have no order.

use super::fault::{Res, unsupported};
use super::renderer::Renderer;
use super::value::Value;

impl Renderer<'_> {
    /// Sorts by keys, each of which is taken once.
    pub(crate) fn sort<T>(&self, items: &mut Vec<T>, reverse: bool, key: impl Fn(&T) -> Res<Value>) -> Res<()> {
        let keys: Vec<Value> = items.iter().map(key).collect::<Res<_>>()?;
        let keyed = keys.into_iter().zip(std::mem::take(items)).collect();
        *items = self.merge_sort(keyed, reverse)?.into_iter().map(|(_, item)| item).collect();
        Ok(())
    }

    /// By hand, since a comparison may fail and the standard library's sort takes no such.
    fn merge_sort<T>(&self, mut items: Vec<(Value, T)>, reverse: bool) -> Res<Vec<(Value, T)>> {
        if items.len() < 2 {
            return Ok(items);
        }
        let right = items.split_off(items.len() / 2);
        let mut left = self.merge_sort(items, reverse)?.into_iter().peekable();
        let mut right = self.merge_sort(right, reverse)?.into_iter().peekable();
        let mut merged = Vec::with_capacity(left.len() + right.len());
        while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
            let Some(order) = self.compare("<", &b.0, &a.0)? else {
                return unsupported("sorting values that have no order (NaN) is not supported");
            };
            // Equal items keep their order, in reverse too.
            let from_right = if reverse { order.is_gt() } else { order.is_lt() };
            merged.extend(if from_right { right.next() } else { left.next() });
        }
        merged.extend(left);
        merged.extend(right);
        Ok(merged)
    }
}
