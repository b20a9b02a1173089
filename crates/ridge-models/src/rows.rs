//! A decoder's graph over rows that the device keeps: the form in which an engine runs it.
//!
//! A family's graph takes what a step needs of its sequences as step inputs, one element or line for each row of the step:
//! lengths, blocks, settings of the sampler. [`with_rows`] puts tables on the device in their place, whose rows sequences
//! own for as long as they run: a step says which rows it has, and reads the rest. What the host changes of a row travels
//! through a graph of its own ([`row_changes`]), so that a step costs what changed and not what is there. Lengths and last
//! tokens are written by the steps themselves, so that a step can be queued before the host knows what the last one
//! sampled.

use ridge_graph::{Arg, Builder, DType, Dim, Graph, GraphError, Result as GraphResult, Role, Shape, Sym, Type, Var};

use crate::model::{LAST_HIDDEN, symbols};

/// The column with the number of a sequence's tokens that are in the cache, which steps move.
pub const LENGTH: &str = "lengths";

/// The column with the token that a sequence's last step sampled, which steps write.
pub const LAST_TOKEN: &str = "last_token";

/// The step input of a graph over rows that says which row of the tables each row of the step is: i32 `[seqs]`, negative
/// for padding.
pub const ROWS: &str = "rows";

/// The scope of the tables.
const SCOPE: &str = "rows";

/// A state `[rows, columns]` with a row for each sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowTable {
    /// Its name: the state is `rows.` and this.
    pub name: String,
    /// Dtype of its elements.
    pub dtype: DType,
    /// The step inputs that its columns take the place of, and [`LAST_TOKEN`]; of a wide table the one input whose columns
    /// it has.
    pub columns: Vec<String>,
    /// Elements of a row.
    pub width: usize,
    /// What is added to values, so that 0 is what an unused element has.
    pub bias: i64,
}

impl RowTable {
    fn ty(&self) -> Type {
        Type::state(self.dtype, Shape(vec![Dim::sym(symbols::ROWS), self.width.into()]))
    }

    /// Names of the step inputs of [`row_changes`] for it: how many changes there are, their places and their values.
    pub fn inputs(&self) -> [String; 3] {
        ["count", "places", "values"].map(|what| format!("{SCOPE}.{}.{what}", self.name))
    }
}

/// The tables of a graph's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowTables {
    /// One for each dtype, and one for each list.
    pub tables: Vec<RowTable>,
}

/// How wide the tables of lists are: the most elements of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowWidths {
    /// Blocks of a sequence, in the pool of each group.
    pub blocks: usize,
    /// Logit biases.
    pub biases: usize,
    /// Tokens that DRY does not go over.
    pub breakers: usize,
}

impl RowWidths {
    /// The width of the list whose elements this symbol counts.
    fn of(self, symbol: &Sym) -> Option<usize> {
        match symbol.name() {
            symbols::TABLE => Some(self.blocks),
            symbols::BIASES => Some(self.biases),
            symbols::BREAKERS => Some(self.breakers),
            _ => None,
        }
    }
}

impl RowTables {
    /// The tables for the step inputs of `graph`: a column for each input of `[seqs]`, and a table of its own for each list,
    /// of `[seqs, table]`, `[seqs, biases]` or `[seqs, breakers]`.
    pub fn of(graph: &Graph, widths: RowWidths) -> Self {
        let mut tables: Vec<RowTable> = Vec::new();
        let mut add = |dtype: DType, column: &str| match tables.iter_mut().find(|table| table.dtype == dtype) {
            Some(table) => {
                table.columns.push(column.to_owned());
                table.width += 1;
            }
            None => tables.push(RowTable {
                name: dtype.to_string(),
                dtype,
                columns: vec![column.to_owned()],
                width: 1,
                bias: 0,
            }),
        };
        let column = [Dim::sym(symbols::SEQS)];
        for arg in graph.args(Role::StepInput).filter(|arg| arg.ty.shape.0 == column) {
            add(arg.ty.dtype, &arg.name);
        }
        add(DType::I32, LAST_TOKEN);
        for arg in graph.args(Role::StepInput) {
            let Some(width) = list(arg).and_then(|symbol| widths.of(symbol)) else { continue };
            let name = arg.name.to_string();
            // Blocks and tokens are counted from 1, so that 0 is none.
            let bias = i64::from(arg.ty.dtype == DType::I32);
            tables.push(RowTable { name: name.clone(), dtype: arg.ty.dtype, columns: vec![name], width, bias });
        }
        Self { tables }
    }

    /// Where the column `name` is: the table and the place in its rows. The first column of a list.
    pub fn column(&self, name: &str) -> Option<(usize, usize)> {
        let place = |table: &RowTable| table.columns.iter().position(|column| column == name);
        self.tables.iter().enumerate().find_map(|(at, table)| Some((at, place(table)?)))
    }
}

/// What counts the elements of a row, if this is a step input with a list for each.
fn list(arg: &Arg) -> Option<&Sym> {
    let [rows, elements] = &arg.ty.shape.0[..] else { return None };
    match elements.parts() {
        (0, [(symbol, 1)]) if *rows == Dim::sym(symbols::SEQS) => Some(symbol),
        _ => None,
    }
}

/// What a step over rows writes back to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sampled<'a> {
    /// The output with the tokens that become the rows' last ones, if the step samples.
    pub output: Option<&'a str>,
    /// The most candidates of a row. Where there may be some, several rows of the step may be the same row of the tables:
    /// its tokens, then each candidate as one of its own. Further step inputs are then [`OFFSETS`] and [`PARENTS`].
    pub candidates: usize,
}

/// I32 `[seqs]`: tokens of the same row of the tables that stand before each row of the step in this step.
pub const OFFSETS: &str = "offsets";

/// I32 `[seqs]`: of a candidate the row of the step that it follows, as
/// [`AcceptCandidates`](ridge_graph::ops::AcceptCandidates) takes it.
pub const PARENTS: &str = "parents";

/// `graph` over rows of `tables`, which must be those [of](RowTables::of) it. Its step inputs are [`ROWS`], and those of
/// `graph` that are not columns; a token id of -1 is the last token of its row. The step moves the lengths of its rows, past
/// the candidates that are accepted, and writes what it sampled last as their last tokens.
///
/// # Errors
/// When the graph has no such output, or is none of a decoder.
pub fn with_rows(graph: &Graph, tables: &RowTables, sampled: Sampled<'_>) -> GraphResult<Graph> {
    let (tokens, seqs) = (Dim::sym(symbols::TOKENS), Dim::sym(symbols::SEQS));
    let (mut kept, mut tokens_asked) = (None, None);
    let (mut g, outputs) = Builder::behind(graph.clone(), |g| {
        let rows = g.step_input(ROWS, Type::tensor(DType::I32, [&seqs]))?;
        let (mut given, last) = read_all(g, tables, rows, graph)?;
        let length = place(&given, LENGTH)?;
        let lengths = &mut given[length].1;
        if sampled.candidates > 0 {
            let offsets = g.step_input(OFFSETS, Type::tensor(DType::I32, [&seqs]))?;
            *lengths = g.scoped(SCOPE, |g| g.add(*lengths, offsets))?;
        }
        kept = Some((rows, *lengths));
        let ids = g.step_input("token_ids", Type::tensor(DType::I32, [&tokens]))?;
        let of = g.step_input("seq_ids", Type::tensor(DType::I32, [&tokens]))?;
        tokens_asked = Some(ids);
        let ids = g.scoped(SCOPE, |g| {
            let last = g.gather(last, of, 0)?;
            let zero = g.constant(DType::I32, 0.0)?;
            let known = g.ge(ids, zero)?;
            g.select(known, ids, last)
        })?;
        given.push(("token_ids".into(), ids));
        Ok(given)
    })?;
    let ((mut rows, lengths), asked) = kept.zip(tokens_asked).expect("the rows are read first");
    let next =
        sampled.output.map(|name| outputs.iter().find(|(output, _)| output == name).map(|(_, var)| *var).ok_or(name));
    let next = next.transpose().map_err(|name| {
        let known: Vec<&str> = outputs.iter().map(|(name, _)| name.as_str()).collect();
        let why = format!("no output `{name}` to keep as the rows' last tokens; the graph has {}", known.join(", "));
        GraphError::Use { at: "rows".into(), why }
    })?;
    g.scoped(SCOPE, |g| -> GraphResult<()> {
        let starts = g.step_input("query_start", Type::tensor(DType::I32, [seqs.clone() + 1]))?;
        let from = g.slice(starts, 0, 0, &seqs)?;
        let to = g.slice(starts, 0, 1, &seqs)?;
        let added = g.sub(to, from)?;
        let lengths = g.add(lengths, added)?;
        if let Some(next) = next.filter(|_| sampled.candidates > 0) {
            let parents = g.step_input(PARENTS, Type::tensor(DType::I32, [&seqs]))?;
            let tokens = g.gather(asked, from, 0)?;
            let ends = g.accept_candidates(next, tokens, parents, sampled.candidates)?;
            let zero = g.constant(DType::I32, 0.0)?;
            let is_end = g.gt(ends, zero)?;
            let nowhere = g.constant(DType::I32, -1.0)?;
            rows = g.select(is_end, rows, nowhere)?;
        }
        write(g, tables, LENGTH, rows, lengths)?;
        let Some(next) = next else { return Ok(()) };
        write(g, tables, LAST_TOKEN, rows, next)?;
        let Some((_, hidden)) = outputs.iter().find(|(name, _)| name == LAST_HIDDEN) else { return Ok(()) };
        let state = last_hidden(g, &g.ty(*hidden)?.clone())?;
        g.table_write(state, *hidden, rows).map(|_| ())
    })?;
    g.finish(outputs)
}

/// The drafting `graph` of a model whose rows are in `tables`, over these rows: see [`DRAFTS`](crate::DRAFTS). The token of each row
/// is its last one. Step inputs are [`ROWS`], `seq_ids` and `query_start`.
///
/// # Errors
/// When the graph is none that drafts, or has inputs that rows do not have.
pub fn with_draft_rows(graph: &Graph, tables: &RowTables) -> GraphResult<Graph> {
    let hidden = graph.args(Role::StepInput).find(|arg| *arg.name == *LAST_HIDDEN);
    let hidden = hidden.ok_or_else(|| GraphError::Use { at: SCOPE.into(), why: "the graph drafts nothing".into() })?;
    let (g, outputs) = Builder::behind(graph.clone(), |g| {
        let rows = g.step_input(ROWS, Type::tensor(DType::I32, [&Dim::sym(symbols::SEQS)]))?;
        let (mut given, last) = read_all(g, tables, rows, graph)?;
        let of = g.step_input("seq_ids", Type::tensor(DType::I32, [&Dim::sym(symbols::TOKENS)]))?;
        g.scoped(SCOPE, |g| -> GraphResult<()> {
            given.push(("token_ids".into(), g.gather(last, of, 0)?));
            let state = last_hidden(g, &hidden.ty)?;
            let all = g.state_read(state)?;
            given.push((LAST_HIDDEN.into(), g.gather(all, rows, 0)?));
            Ok(())
        })?;
        Ok(given)
    })?;
    g.finish(outputs)
}

/// The state `[rows, hidden]` with the hidden state of each row's last complete token, which is of the type `of`, `[seqs, hidden]`.
fn last_hidden(g: &mut Builder, of: &Type) -> GraphResult<Var> {
    let shape = vec![Dim::sym(symbols::ROWS), of.shape.last()];
    g.state(LAST_HIDDEN, Type::state(of.dtype, Shape(shape)))
}

/// The columns that `graph` asks for, for the rows of a step: each with its name and type as a step input of `graph` has it. And the
/// rows' last tokens.
fn read_all(g: &mut Builder, tables: &RowTables, rows: Var, graph: &Graph) -> GraphResult<(Vec<(String, Var)>, Var)> {
    let mut given = Vec::new();
    g.scoped(SCOPE, |g| -> GraphResult<()> {
        for table in &tables.tables {
            given.extend(read(g, table, rows, graph)?);
        }
        Ok(())
    })?;
    let last = given.swap_remove(place(&given, LAST_TOKEN)?).1;
    Ok((given, last))
}

/// The place of the column `name` among those read.
fn place(given: &[(String, Var)], name: &str) -> GraphResult<usize> {
    let at = given.iter().position(|(column, _)| column == name);
    at.ok_or_else(|| GraphError::Use { at: SCOPE.into(), why: format!("the rows have no column `{name}`") })
}

/// The columns of a table that `graph` asks for, and the last tokens; see [`read_all`].
fn read(g: &mut Builder, table: &RowTable, rows: Var, graph: &Graph) -> GraphResult<Vec<(String, Var)>> {
    let seqs = Dim::sym(symbols::SEQS);
    let asked = |name: &str| name == LAST_TOKEN || graph.args(Role::StepInput).any(|arg| *arg.name == *name);
    if !table.columns.iter().any(|name| asked(name)) {
        return Ok(Vec::new());
    }
    let state = g.state(&table.name, table.ty())?;
    let all = g.state_read(state)?;
    let lines = g.gather(all, rows, 0)?;
    let lists = graph.args(Role::StepInput).filter(|arg| list(arg).is_some());
    if let Some(list) = lists.into_iter().find(|arg| *table.columns == [arg.name.to_string()]) {
        let mut lines = g.slice(lines, 1, 0, list.ty.shape.last())?;
        if table.bias != 0 {
            let bias = g.constant(table.dtype, table.bias as f64)?;
            lines = g.sub(lines, bias)?;
        }
        return Ok(vec![(list.name.to_string(), lines)]);
    }
    let column = |(at, name): (usize, &String)| -> GraphResult<(String, Var)> {
        let column = g.slice(lines, 1, at, 1)?;
        Ok((name.clone(), g.reshape(column, [&seqs])?))
    };
    table.columns.iter().enumerate().filter(|(_, name)| asked(name)).map(column).collect()
}

/// Writes `values`, one for each of `rows`, to the column `name`. Rows below 0 are dropped.
fn write(g: &mut Builder, tables: &RowTables, name: &str, rows: Var, values: Var) -> GraphResult<()> {
    let (table, column) = tables.column(name).expect("the column was read");
    let table = &tables.tables[table];
    let state = g.state(&table.name, table.ty())?;
    let width = g.constant(DType::I32, table.width as f64)?;
    let column = g.constant(DType::I32, column as f64)?;
    let places = g.mul(rows, width)?;
    let places = g.add(places, column)?;
    g.table_write(state, values, places).map(|_| ())
}

/// A graph that changes elements of the tables, and nothing else. Step inputs are those of [`RowTable::inputs`]: i32 `[1]`,
/// the number of changes, i32 `[changes]`, their places counted through the table row by row, and their values. It has no
/// outputs.
///
/// # Errors
/// None for tables that [`RowTables::of`] gives.
pub fn row_changes(tables: &RowTables) -> GraphResult<Graph> {
    let mut g = Builder::new();
    let changes = Dim::from(Sym::new(symbols::CHANGES));
    g.scoped(SCOPE, |g| -> GraphResult<()> {
        for table in &tables.tables {
            let [count, places, values] = table.inputs();
            let count = g.step_input(&count, Type::tensor(DType::I32, [1]))?;
            let places = g.step_input(&places, Type::tensor(DType::I32, [&changes]))?;
            let values = g.step_input(&values, Type::tensor(table.dtype, [&changes]))?;
            let state = g.state(&table.name, table.ty())?;
            let number = g.iota([&changes], 0, DType::I32)?;
            let there = g.lt(number, count)?;
            let nowhere = g.constant(DType::I32, -1.0)?;
            let places = g.select(there, places, nowhere)?;
            g.table_write(state, values, places)?;
        }
        Ok(())
    })?;
    g.finish(Vec::new())
}
