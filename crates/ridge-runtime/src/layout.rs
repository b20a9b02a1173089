//! One layout for each parameter, fixed over all programs that use it.
//!
//! Kernels' offers name the layouts that they request. A parameter gets a layout if all its readers request or accept it and one
//! requests it; a view, or a program that updates the parameter, requires row-major storage. A kernel gets all requested operands
//! or none, so an operand that stays row-major keeps the kernel's other operands row-major too.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ridge_graph::passes::{Extents, Kernel, Layout, OfferRequest};
use ridge_graph::{FuncId, Function, Graph, Group, GroupKind, Node, Op, Role, Var};

/// Settled layouts by the parameter's name.
pub(crate) type Layouts = HashMap<Arc<str>, Layout>;

/// The layouts of those parameters of lowered `programs` that are not among `settled`, which stand.
pub(crate) fn settle(programs: &[&Graph], kernels: &[Kernel], settled: &Layouts) -> Layouts {
    let is_open = |name: &Arc<str>| !settled.contains_key(name);
    let used = |graph: &&Graph| graph.args(Role::Weight).chain(graph.args(Role::State)).any(|arg| is_open(&arg.name));
    if !programs.iter().any(used) {
        return Layouts::new();
    }
    let mut readers = Vec::new();
    let mut accepted: Vec<(Arc<str>, Layout)> = Vec::new();
    let mut in_rows = HashSet::new();
    for graph in programs {
        let mut reads = Reads {
            graph,
            kernels,
            offered: HashMap::new(),
            wants: HashMap::new(),
            accepted: &mut accepted,
            in_rows: &mut in_rows,
        };
        let main = graph.main();
        let weight = |arg: &ridge_graph::Arg| (arg.role == Role::Weight).then(|| Arc::clone(&arg.name));
        reads.collect(graph.main, &main.args.iter().map(weight).collect::<Vec<_>>());
        readers.extend(reads.wants.into_values());
        in_rows.extend(graph.args(Role::State).map(|arg| Arc::clone(&arg.name)));
    }
    let mut layouts: Layouts = in_rows.into_iter().filter(is_open).map(|name| (name, Layout::Rows)).collect();
    for (name, layout) in readers.iter().flatten() {
        let Some(name) = name.as_ref().filter(|name| is_open(name)) else { continue };
        layouts.entry(Arc::clone(name)).or_insert_with(|| layout.clone());
    }
    for (name, layout) in &accepted {
        if let Some(settled) = layouts.get_mut(name).filter(|settled| *settled != layout) {
            *settled = Layout::Rows;
        }
    }
    loop {
        let fits = |(name, layout): &Want| {
            name.as_ref().and_then(|name| settled.get(name).or_else(|| layouts.get(name))) == Some(layout)
        };
        let refused = readers.iter().filter(|wants| !wants.iter().all(fits)).flatten();
        let refused: Vec<Arc<str>> = refused.filter_map(|(name, _)| name.clone()).collect();
        let mut changed = false;
        for name in refused {
            if let Some(layout) = layouts.get_mut(&name) {
                changed |= *layout != Layout::Rows;
                *layout = Layout::Rows;
            }
        }
        if !changed {
            return layouts;
        }
    }
}

/// An operand that a kernel wants in a layout: the parameter, if it is one.
type Want = (Option<Arc<str>>, Layout);

/// The layouts that a kernel wants inputs in, by their place, and those that it accepts.
type Offered = [Vec<(usize, Layout)>; 2];

/// What reads the parameters of one program.
struct Reads<'a> {
    graph: &'a Graph,
    kernels: &'a [Kernel],
    /// What the kernel of a node offers.
    offered: HashMap<(FuncId, usize), Offered>,
    /// Of each node that wants layouts, over all calls of its function.
    wants: HashMap<(FuncId, usize), Vec<Want>>,
    /// Parameters that something reads in this layout or in rows.
    accepted: &'a mut Vec<(Arc<str>, Layout)>,
    /// Parameters that something reads in rows.
    in_rows: &'a mut HashSet<Arc<str>>,
}

impl Reads<'_> {
    /// Adds what `func` reads when its arguments are these parameters.
    fn collect(&mut self, func: FuncId, args: &[Option<Arc<str>>]) {
        let function = self.graph.function(func);
        for (index, node) in function.nodes.iter().enumerate() {
            match &node.op {
                Op::Arg(_) => {}
                Op::Call(callee) => {
                    let args: Vec<_> = node.inputs.iter().map(|var| param(function, args, *var)).collect();
                    self.collect(*callee, &args);
                }
                _ => self.add(function, args, node, (func, index)),
            }
        }
        self.in_rows.extend(function.outputs.iter().filter_map(|output| param(function, args, output.var)));
    }

    fn add(&mut self, function: &Function, args: &[Option<Arc<str>>], node: &Node, key: (FuncId, usize)) {
        let [wanted, accepted] = self.offered.entry(key).or_insert_with(|| offered(node, self.kernels));
        for (index, var) in node.inputs.iter().enumerate() {
            let operand = param(function, args, *var);
            let of = |layouts: &[(usize, Layout)]| layouts.iter().find(|(of, _)| *of == index).map(|of| of.1.clone());
            match (of(wanted), of(accepted)) {
                (Some(layout), _) => self.wants.entry(key).or_default().push((operand, layout)),
                (None, Some(layout)) => self.accepted.extend(operand.map(|name| (name, layout))),
                (None, None) => self.in_rows.extend(operand),
            }
        }
    }
}

/// The parameter that `var` is, given those that are the function's arguments. A view of one is none.
fn param(function: &Function, args: &[Option<Arc<str>>], var: Var) -> Option<Arc<str>> {
    match function.nodes[var.index()].op {
        Op::Arg(i) => args[i].clone(),
        _ => None,
    }
}

/// The layouts that the kernel of a node wants its inputs in, and those that it accepts.
fn offered(node: &Node, kernels: &[Kernel]) -> Offered {
    let Op::Group(group) = &node.op else { return Default::default() };
    let Group { kind: GroupKind::Kernel(name), body } = &**group else { return Default::default() };
    let Some(kernel) = kernels.iter().find(|kernel| kernel.name == *name) else { return Default::default() };
    let request = OfferRequest { body, target: &kernel.target, extents: Extents::Any };
    (kernel.offer)(&request).map_or_else(Default::default, |offer| [offer.layouts, offer.accepts])
}

#[cfg(test)]
mod tests {
    use ridge_graph::passes::{Numerics, Offer, Pattern};
    use ridge_graph::{Builder, DType, Dim, Type};

    use super::*;

    fn panels() -> Layout {
        Layout::Named("panels".into())
    }

    /// Kernels of linears want weights in panels.
    fn kernels() -> Vec<Kernel> {
        let wanting = |name, pattern, count| {
            Kernel::new(name, Pattern::parse(pattern), move |request| {
                let offer = request.at_efficiency(1.0, 1.0, Numerics::ByExtents);
                let layouts = (1..=count).map(|at| (at, panels())).collect();
                Some(Offer { layouts, ..offer })
            })
        };
        vec![
            wanting("linear", "linear(x, w)", 1),
            wanting("swiglu", "swiglu(g@linear_group(x, ...).0, g.1)", 2),
            Kernel::at_roofline("embedding", Pattern::parse("embedding(w, i)"), |_| true),
        ]
    }

    /// What a program does with its weights; that of `a` is called `a.w`.
    enum Use {
        /// All in one function, which is called for each.
        Linears(&'static [&'static str]),
        Gate(&'static str, &'static str),
        LookUp(&'static str),
        Flat(&'static str),
        Update(&'static str),
    }

    fn weight(g: &mut Builder, scope: &str) -> Var {
        g.scoped(scope, |g| g.weight("w", Type::tensor(DType::F32, [8, 8]))).unwrap()
    }

    fn program(uses: &[Use]) -> Graph {
        let mut g = Builder::new();
        let x_ty = Type::tensor(DType::F32, [Dim::sym("rows"), 8.into()]);
        let x = g.step_input("x", x_ty.clone()).unwrap();
        let mut outputs = Vec::new();
        for of in uses {
            match of {
                Use::Linears(scopes) => {
                    let layer = g.function("layer", |g| {
                        let x = g.arg("x", x_ty.clone());
                        let w = g.weight("w", Type::tensor(DType::F32, [8, 8]))?;
                        Ok(vec![g.linear(x, w)?])
                    });
                    let layer = layer.unwrap();
                    for scope in *scopes {
                        outputs.extend(g.scoped(scope, |g| g.call(layer, &[x])).unwrap());
                    }
                }
                Use::Gate(gate, up) => {
                    let [gate, up] = [gate, up].map(|scope| weight(&mut g, scope));
                    let (gate, up) = (g.linear(x, gate).unwrap(), g.linear(x, up).unwrap());
                    outputs.push(g.swiglu(gate, up).unwrap());
                }
                Use::LookUp(scope) => {
                    let ids = g.step_input("ids", Type::tensor(DType::I32, [1])).unwrap();
                    let table = weight(&mut g, scope);
                    outputs.push(g.embedding(table, ids, DType::F32).unwrap());
                }
                Use::Flat(scope) => {
                    let w = weight(&mut g, scope);
                    let w = g.reshape(w, [4, 16]).unwrap();
                    outputs.push(g.add(w, w).unwrap());
                }
                Use::Update(scope) => {
                    let state = g.scoped(scope, |g| g.state("w", Type::tensor(DType::F32, [8, 8]))).unwrap();
                    let old = g.state_read(state).unwrap();
                    let new = g.add(old, old).unwrap();
                    g.state_write(state, new).unwrap();
                }
            }
        }
        let names: Vec<String> = (0..outputs.len()).map(|i| format!("y{i}")).collect();
        let graph = g.finish(names.iter().cloned().zip(outputs).collect()).unwrap();
        crate::lower(&graph, &names.iter().map(String::as_str).collect::<Vec<_>>(), &kernels()).unwrap()
    }

    /// The parameters in panels and those in rows, by name.
    fn settled(programs: &[&[Use]], known: &Layouts) -> (String, String) {
        let programs: Vec<Graph> = programs.iter().map(|uses| program(uses)).collect();
        let layouts = settle(&programs.iter().collect::<Vec<_>>(), &kernels(), known);
        let of = |wanted: &Layout| {
            let mut names: Vec<&str> =
                layouts.iter().filter(|(_, l)| *l == wanted).map(|(name, _)| name.trim_end_matches(".w")).collect();
            names.sort_unstable();
            names.join(" ")
        };
        (of(&panels()), of(&Layout::Rows))
    }

    fn pair(panels: &str, rows: &str) -> (String, String) {
        (panels.into(), rows.into())
    }

    #[test]
    fn a_parameter_gets_the_layout_that_all_its_readers_want() {
        let all: &[&[Use]] = &[&[Use::Linears(&["a", "b"]), Use::Gate("c", "d")], &[Use::Linears(&["b"])]];
        assert_eq!(settled(all, &Layouts::new()), pair("a b c d", ""));
        assert_eq!(settled(&[], &Layouts::new()), pair("", ""));
    }

    #[test]
    fn a_reader_of_rows_in_any_program_keeps_rows() {
        let alone: &[Use] = &[Use::Linears(&["a"]), Use::Gate("c", "d")];
        for other in [Use::LookUp("a"), Use::Flat("a"), Use::Update("a")] {
            assert_eq!(settled(&[alone, &[other]], &Layouts::new()), pair("c d", "a"));
        }
        assert_eq!(settled(&[&[Use::Linears(&["a"]), Use::LookUp("a")]], &Layouts::new()), pair("", "a"));
    }

    #[test]
    fn a_kernel_gets_all_its_operands_in_its_layouts_or_none() {
        // One kernel for both calls, one operand of two, and what follows from that in another program.
        let of = |uses: &[&[Use]]| settled(uses, &Layouts::new());
        assert_eq!(of(&[&[Use::Linears(&["a", "b"]), Use::LookUp("b")]]), pair("", "a b"));
        assert_eq!(of(&[&[Use::Gate("a", "b"), Use::LookUp("b")]]), pair("", "a b"));
        let chain: &[&[Use]] =
            &[&[Use::Gate("a", "b")], &[Use::Gate("b", "c")], &[Use::LookUp("c"), Use::Linears(&["d"])]];
        assert_eq!(of(chain), pair("d", "a b c"));
    }

    #[test]
    fn settled_layouts_stand_and_bind_what_is_settled_later() {
        let known: Layouts = [("a.w", panels()), ("b.w", Layout::Rows)].map(|(name, l)| (name.into(), l)).into();
        assert_eq!(settled(&[&[Use::LookUp("a"), Use::Linears(&["b"])]], &known), pair("", ""));
        assert_eq!(settled(&[&[Use::Gate("a", "c")], &[Use::Gate("b", "d")]], &known), pair("c", "d"));
    }
}
