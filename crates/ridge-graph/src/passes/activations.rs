//! Quantises the activations of linears whose weights are codes.

use std::collections::BTreeMap;

use super::order::Draft;
use crate::dtype::DType;
use crate::format::{BlockFormat as _, CodeType, FormatRef, ScaleLayout, ScaledFormat, SignedBytes};
use crate::graph::{CompositeRef, Function, Graph, Node, Op, Var};
use crate::ops::{Linear, LinearGroup, Quantize};
use crate::types::Type;

/// How linears by weights that are codes take x.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Activations {
    /// As it is.
    #[default]
    Exact,
    /// As codes of 8 bits, 256 to a scale ([`ScaledFormat::INT8_G256`]), which a machine multiplies faster by weights that
    /// are whole numbers themselves: in blocks, or int8 with scales of rows or tensors; by floats of 8 bits as it is.
    Int8,
    /// By weights of 8-bit codes as such codes too, where tensor cores of GPUs take both
    /// ([`ScaledFormat::of_activations`]); by others as it is.
    Matched,
}

impl Activations {
    /// Name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Int8 => "int8",
            Self::Matched => "matched",
        }
    }
}

/// Puts a [`Quantize`] in front of the linears whose weights are all stored in formats that `activations` rounds x for and
/// whose K is a number, one for all that share an x and its format; leaves the graph as it is for exact activations.
pub fn round_activations(graph: &mut Graph, activations: Activations) {
    let rounded_for: RoundedFor = match activations {
        Activations::Exact => return,
        Activations::Int8 => {
            |weight, k| weight.downcast().is_none_or(|format| takes_int8(format, k)).then_some(ScaledFormat::INT8_G256)
        }
        Activations::Matched => {
            |weight, _| weight.downcast::<ScaledFormat>().and_then(|format| format.of_activations())
        }
    };
    // What tensor cores take: values of 16 bits become codes, of which they read 16 at a time.
    let fits = |x: &Type| {
        activations != Activations::Matched
            || (matches!(x.dtype, DType::BF16 | DType::F16) && x.shape.last().as_const().is_some_and(|k| k % 16 == 0))
    };
    for function in &mut graph.functions {
        let linears: Vec<(usize, Rounded)> = (0..function.nodes.len())
            .filter_map(|i| Some((i, rounded_x(function, i, rounded_for)?)))
            .filter(|(_, rounded)| fits(&rounded.ty))
            .collect();
        if linears.is_empty() {
            continue;
        }
        let first_new = function.nodes.len();
        let mut draft = Draft::new(std::mem::take(function));
        let mut quantised: BTreeMap<(Var, ScaledFormat), Var> = BTreeMap::new();
        let mut places = Vec::new();
        for (i, Rounded { ty, format }) in linears {
            let Some(mut node) = draft.nodes[i].take() else { continue };
            let x = node.inputs[0];
            node.inputs[0] = *quantised.entry((x, format)).or_insert_with(|| {
                places.push(i);
                draft.push(Node {
                    op: Op::Composite(CompositeRef::new(Quantize { format })),
                    inputs: vec![x],
                    outputs: vec![ty.stored_as(FormatRef::new(format))],
                    scope: node.scope.clone(),
                })[0]
            });
            draft.nodes[i] = Some(node);
        }
        *function = draft.finish(|i| i.checked_sub(first_new).map_or(i, |new| places[new]));
    }
}

/// The format that x is to have for a weight in this format, of rows of so many elements; `None` if x stays as it is.
type RoundedFor = fn(&FormatRef, usize) -> Option<ScaledFormat>;

/// Are weights in `format` multiplied as whole numbers, and scaled at last?
fn takes_int8(format: &ScaledFormat, k: usize) -> bool {
    let scaled_at_last = matches!(format.scales, ScaleLayout::Row | ScaleLayout::Tensor);
    format.codes == CodeType::Int8 && scaled_at_last && k.is_multiple_of(SignedBytes::ELEMENTS)
}

/// The x of a linear, and the format that it is to have.
struct Rounded {
    ty: Type,
    format: ScaledFormat,
}

/// The x of node `i`, if that is a linear to quantise x for.
fn rounded_x(function: &Function, i: usize, rounded_for: RoundedFor) -> Option<Rounded> {
    let node = &function.nodes[i];
    let Op::Composite(op) = &node.op else { return None };
    let count = match (op.downcast::<Linear>(), op.downcast::<LinearGroup>()) {
        (Some(_), _) => 1,
        (_, Some(group)) => group.count,
        _ => return None,
    };
    let ty = function.ty(node.inputs[0]);
    let k = ty.shape.last().as_const()?;
    let format_of = |w: &Var| function.ty(*w).format.as_ref().and_then(|format| rounded_for(format, k));
    let mut formats = node.inputs[1..=count].iter().map(format_of);
    let format = formats.next()??;
    let takes = ty.is_plain() && formats.all(|other| other == Some(format));
    takes.then(|| Rounded { ty: ty.clone(), format })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::graph::Builder;
    use crate::types::Type;

    #[test]
    fn x_stays_as_it_is_where_rows_of_int8_are_no_whole_parts() {
        let format = ScaledFormat { codes: CodeType::Int8, scales: ScaleLayout::Row };
        for (k, rounded) in [(64, true), (48, false)] {
            let mut g = Builder::new();
            let x = g.step_input("x", Type::tensor(DType::BF16, [2, k])).unwrap();
            let w = g.weight("w", Type::tensor(DType::BF16, [8, k]).stored_as(FormatRef::new(format))).unwrap();
            let y = g.linear(x, w).unwrap();
            let mut graph = g.finish(vec![("y".to_owned(), y)]).unwrap();
            round_activations(&mut graph, Activations::Int8);
            assert_eq!(graph.to_string().contains("quantize"), rounded, "{k}");
        }
    }
}
