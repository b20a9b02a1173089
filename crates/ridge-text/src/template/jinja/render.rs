//! Rendering a parsed template.

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use super::ast::Template;
use super::fault::Res;
use super::renderer::{Bounds, Out, Renderer};
use super::strftime::Clock;
use super::value::{Frame, Value};

/// A rendered template.
pub(crate) struct Rendered {
    pub(crate) text: String,
    pub(crate) generations: Option<Vec<Range<usize>>>,
}

/// Renders `template` with these variables.
pub(crate) fn render(
    template: &Template,
    variables: HashMap<Arc<str>, Value>,
    clock: &Clock,
    bounds: Bounds,
) -> Res<Rendered> {
    let run = Renderer::new(variables, clock, bounds);
    let mut out = Out { text: String::new(), root: true };
    let frame = Rc::new(Frame::new(None));
    run.declare(&frame, &template.body.symbols);
    let result = run.nodes(&template.body.nodes, &frame, true, &mut out);
    run.take_apart();
    frame.clear();
    result?;
    Ok(Rendered { text: out.text, generations: run.generations.take() })
}
