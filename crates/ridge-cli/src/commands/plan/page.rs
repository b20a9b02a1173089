//! The output of a plan: text for the terminal, one JSON object, a figure, or a self-contained HTML file with all of them.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use ridge_hw::spec::DeviceSpec;
use ridge_hw::units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds};
use ridge_plan::efficiency::{Efficiency, Machine};
use ridge_plan::ledger::{Ledger, LedgerEntry};
use ridge_plan::plot::{Bar, Panel, draw};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::output::{columns, print, print_json, write_file};

/// Output flags.
#[derive(Debug, Args)]
pub(crate) struct PlanOutputArgs {
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,

    /// Show the formula and source of each figure
    #[arg(long, conflicts_with = "json", help_heading = "Output")]
    pub(crate) explain: bool,
}

impl PlanOutputArgs {
    /// Reports that `what` does not fit, and `why`. This is a result with its own exit code, not an error.
    pub(crate) fn does_not_fit(&self, what: &str, why: &str, mut json: Value) -> Result<()> {
        if self.json {
            json["fits"] = Value::Bool(false);
            json["why"] = Value::String(why.to_owned());
            print_json(&json)?;
        } else {
            print(&format!("{what}\n\ndoes not fit: {why}\n"))?;
        }
        Err(Error::DoesNotFit)
    }
}

/// Output files.
#[derive(Debug, Args)]
pub(crate) struct PageArgs {
    #[command(flatten)]
    pub(crate) shown: PlanOutputArgs,

    /// Write the figures as SVG
    #[arg(long, value_name = "FILE.svg", help_heading = "Output")]
    plot: Option<PathBuf>,

    /// Write a report with tables, figures, formulas and assumptions as one HTML file
    #[arg(long, value_name = "FILE.html", help_heading = "Output")]
    html: Option<PathBuf>,
}

/// The output of a plan.
#[derive(Debug, Default)]
pub(crate) struct Page {
    /// The question, in one line.
    pub(crate) title: String,
    /// The result in one line, if the terminal shows it as the first row of a table.
    pub(crate) lead: String,
    /// The results, in order.
    pub(crate) blocks: Vec<PageBlock>,
    /// Figures, stacked vertically.
    pub(crate) panels: Vec<Panel>,
    /// Sources of the figures, one line each.
    pub(crate) sources: Vec<String>,
    /// Assumptions: name, value, provenance (given, specified, measured or modelled) and source.
    pub(crate) assumptions: Vec<[String; 4]>,
    /// The same content as JSON.
    pub(crate) json: Value,
}

/// A part of a page; a blank line separates it from the previous part.
#[derive(Debug)]
pub(crate) enum PageBlock {
    /// The result, as lines.
    Answer(String),
    /// Remarks.
    Text(String),
    /// Preformatted text.
    Drawn(String),
    /// Rows of cells.
    Table(PageTable),
}

/// Rows of cells.
#[derive(Debug, Default)]
pub(crate) struct PageTable {
    /// The caption.
    pub(crate) caption: String,
    /// Names of the columns; may be empty.
    pub(crate) head: Vec<String>,
    /// Cells, and the formula or source of the row.
    pub(crate) rows: Vec<(Vec<String>, String)>,
    /// Shown in the terminal only with `--explain`.
    pub(crate) detail: bool,
}

impl PageTable {
    /// A table with column names.
    pub(crate) fn with_head<const N: usize>(caption: impl Into<String>, head: [&str; N]) -> Self {
        Self { caption: caption.into(), head: head.map(str::to_owned).to_vec(), ..Self::default() }
    }

    pub(crate) fn push(&mut self, cells: impl IntoIterator<Item = String>, formula: impl Into<String>) {
        self.rows.push((cells.into_iter().collect(), formula.into()));
    }

    fn text(&self, explain: bool) -> String {
        let head = (!self.head.is_empty()).then(|| self.head.clone());
        let rows = self.rows.iter().map(|(cells, formula)| {
            let formula = (explain && !formula.is_empty()).then(|| formula.clone());
            cells.iter().cloned().chain(formula).collect()
        });
        let caption = if self.caption.is_empty() { String::new() } else { format!("{}\n", self.caption) };
        caption + &columns(&head.into_iter().chain(rows).collect::<Vec<_>>())
    }
}

impl PageArgs {
    /// Whether figures are requested.
    pub(crate) fn draws(&self) -> bool {
        self.plot.is_some() || self.html.is_some()
    }

    /// Writes `page` in the requested form.
    pub(crate) fn show(&self, page: &Page) -> Result<()> {
        if let Some(path) = &self.plot {
            write_file(path, &draw(&page.panels))?;
        }
        if let Some(path) = &self.html {
            let asked: Vec<String> = std::env::args().skip(1).collect();
            write_file(path, &page.html(&asked))?;
        }
        if self.shown.json { print_json(&page.json) } else { print(&page.text(self.shown.explain)) }
    }
}

impl Page {
    /// Adds a given or default value to the assumptions.
    pub(crate) fn given(&mut self, what: &str, value: impl ToString, how: &str) {
        self.assumptions.push([what.to_owned(), value.to_string(), "given".to_owned(), how.to_owned()]);
    }

    /// Adds the assumptions of `machine`: its sheet and its efficiencies.
    pub(crate) fn assume(&mut self, machine: &Machine) {
        let name = &machine.name;
        let mut add = |what: String, value: String, provenance: String, source: &str| {
            self.assumptions.push([format!("{name}: {what}"), value, provenance, source.to_owned()]);
        };
        let e = &machine.efficiency;
        if let Ok(spec) = DeviceSpec::find(name) {
            let (memory, rate) = (&spec.memory, &spec.memory_bandwidth);
            add("memory".into(), memory.value.to_string(), memory.provenance.to_string(), &memory.source);
            add("memory bandwidth".into(), rate.value.to_string(), rate.provenance.to_string(), &rate.source);
            for (precision, rate) in &spec.dense_rates {
                let what = format!("dense rate, {precision}");
                add(what, rate.value.to_string(), rate.provenance.to_string(), &rate.source);
            }
            if let Some(link) = &spec.interconnect {
                add("link, one way".into(), link.value.to_string(), link.provenance.to_string(), &link.source);
            }
        } else {
            // A measured machine only has the sheet of its calibration.
            add("memory".into(), Bytes(machine.memory as u64).to_string(), "measured".into(), &e.source);
            add("rate of products".into(), FlopsPerSecond(machine.peak).to_string(), "measured".into(), &e.source);
        }
        let shipped = Efficiency::embedded(name).is_ok_and(|known| known.source == e.source);
        let shares = if shipped { "modelled" } else { "measured" };
        for (what, rate) in [
            ("achievable rate of elementwise passes", machine.bandwidth),
            ("achievable rate of reading weights and caches", machine.stream),
        ] {
            add(what.into(), BytesPerSecond(rate).to_string(), shares.into(), &e.source);
        }
        for (what, share) in [
            ("achievable share of the dense rate, products", e.matmul),
            ("achievable share of the dense rate, grouped products", e.experts),
            ("achievable share of the dense rate, fused attention", e.attention),
            ("achievable share of the link's rate", e.link),
        ] {
            add(what.into(), format!("{share:.2}"), shares.into(), &e.source);
        }
        let inside = &machine.fabric.inside;
        add("links in a node".into(), inside.name.to_owned(), "modelled".into(), inside.source);
        let outside = BytesPerSecond(machine.fabric.outside.rate).to_string();
        add("port to other nodes".into(), outside, "modelled".into(), machine.fabric.outside.source);
    }

    pub(crate) fn text(&self, explain: bool) -> String {
        let mut text = if self.title.is_empty() { String::new() } else { format!("{}\n\n", self.title) };
        let shown = |block: &&PageBlock| explain || !matches!(block, PageBlock::Table(table) if table.detail);
        for block in self.blocks.iter().filter(shown) {
            let part = match block {
                PageBlock::Answer(lines) | PageBlock::Text(lines) | PageBlock::Drawn(lines) => lines.clone(),
                PageBlock::Table(table) => table.text(explain),
            };
            let _ = write!(text, "{}\n\n", part.trim_end_matches('\n'));
        }
        text.truncate(text.trim_end_matches('\n').len());
        text.push('\n');
        if explain && !self.sources.is_empty() {
            text += "\nsources\n";
            text.extend(self.sources.iter().map(|line| format!("  {line}\n")));
        }
        text
    }

    fn html(&self, asked: &[String]) -> String {
        let title = escaped(&self.title);
        let mut html = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
             content=\"width=device-width\">\n<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
             style-src 'unsafe-inline'\">\n<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{}</h1>\n",
            with_breaks(&self.title)
        );
        let typed: Vec<String> = std::iter::once("ridge".to_owned()).chain(asked.iter().map(|a| quoted(a))).collect();
        let _ = writeln!(html, "<p class=\"asked\">Asked: <code>{}</code></p>", escaped(&typed.join(" ")));
        // The result and its figures come first, then their derivation.
        let (answers, others): (Vec<_>, Vec<_>) = self.blocks.iter().partition(|b| matches!(b, PageBlock::Answer(_)));
        let lead = (!self.lead.is_empty()).then(|| PageBlock::Answer(self.lead.clone()));
        for block in lead.iter().chain(answers) {
            html += &block.html();
        }
        for panel in &self.panels {
            html += &format!("<figure>\n{}</figure>\n", draw(std::slice::from_ref(panel)));
        }
        for block in others {
            html += &block.html();
        }

        // Each source is listed once and cited by number.
        let mut cited: Vec<&str> = Vec::new();
        if !self.assumptions.is_empty() {
            let mut table = PageTable::with_head("", ["figure", "value", "provenance", "source"]);
            for [what, value, provenance, source] in &self.assumptions {
                let source = if source.chars().count() <= SHORT_SOURCE {
                    source.clone()
                } else {
                    let known = cited.iter().position(|known| known == source);
                    let at = known.unwrap_or_else(|| {
                        cited.push(source);
                        cited.len() - 1
                    });
                    format!("[{}]", at + 1)
                };
                table.push([what.clone(), value.clone(), provenance.clone(), source], "");
            }
            html += &format!("<h2>Assumptions</h2>\n{}", table.html());
        }
        let others: Vec<&String> = self.sources.iter().filter(|line| !cited.iter().any(|c| line.contains(c))).collect();
        if !cited.is_empty() || !others.is_empty() {
            html += "<h2>Sources</h2>\n";
            if !cited.is_empty() {
                let items = cited.iter().map(|source| format!("<li>{}</li>\n", escaped(source)));
                html += &format!("<ol class=\"cited\">\n{}</ol>\n", items.collect::<String>());
            }
            if !others.is_empty() {
                let items = others.iter().map(|line| format!("<li>{}</li>\n", escaped(line)));
                html += &format!("<ul>\n{}</ul>\n", items.collect::<String>());
            }
        }
        let version = env!("CARGO_PKG_VERSION");
        html + &format!(
            "<footer>Ridge {version}. Figures are estimates; cargo xtask accuracy reports their errors.</footer>\n</body>\n</html>\n"
        )
    }
}

impl PageBlock {
    fn html(&self) -> String {
        match self {
            Self::Answer(lines) => format!("<p class=\"answer\">{}</p>\n", with_breaks(lines)),
            Self::Text(lines) => format!("<p>{}</p>\n", with_breaks(lines)),
            Self::Drawn(text) => format!("<pre>{}</pre>\n", escaped(text)),
            Self::Table(table) => table.html(),
        }
    }
}

impl PageTable {
    fn html(&self) -> String {
        let explained = self.rows.iter().any(|r| !r.1.is_empty());
        let wide = self.rows.iter().map(|r| r.0.len()).max().unwrap_or(0).max(self.head.len());
        let mut html = String::new();
        if !self.caption.is_empty() {
            html += &format!("<h2>{}</h2>\n", escaped(&self.caption));
        }
        html += "<div class=\"wide\"><table>\n";
        if !self.head.is_empty() {
            let names: String = self.head.iter().map(|name| format!("<th>{}</th>", escaped(name))).collect();
            let formula = if explained { "<th>formula</th>" } else { "" };
            html += &format!("<tr>{names}{formula}</tr>\n");
        }
        for (cells, formula) in &self.rows {
            let empty = std::iter::repeat_n("<td></td>".to_owned(), wide - cells.len());
            let cells: String = cells.iter().map(|c| format!("<td>{}</td>", escaped(c))).chain(empty).collect();
            let formula =
                if explained { format!("<td class=\"formula\">{}</td>", escaped(formula)) } else { String::new() };
            html += &format!("<tr>{cells}{formula}</tr>\n");
        }
        html + "</table></div>\n"
    }
}

/// Maximum length of a source that is shown in the row itself.
const SHORT_SOURCE: usize = 40;

/// Seconds as text.
pub(crate) fn seconds(s: f64) -> String {
    Seconds(s).to_string()
}

/// The entries of a ledger as a table.
pub(crate) fn ledger_table(caption: impl Into<String>, entries: &[LedgerEntry]) -> PageTable {
    let mut table = PageTable { caption: caption.into(), ..PageTable::default() };
    for e in entries {
        table.push([e.what.to_owned(), e.bytes.to_string()], e.formula.clone());
    }
    table
}

/// A ledger as a bar.
pub(crate) fn ledger_bar(name: impl Into<String>, ledger: &Ledger) -> Bar {
    let parts = ledger.entries.iter().map(|e| (e.what.to_owned(), e.bytes.as_f64())).collect();
    Bar { name: name.into(), parts }
}

const STYLE: &str = "\
body{font:15px/1.5 system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;max-width:60rem;margin:2rem auto;\
padding:0 1rem;color:#1b1f24;background:#fff}h1{font-size:1.35rem;line-height:1.3}h2{font-size:1.05rem;margin:1.8rem 0 .4rem}\
code,pre{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.85rem}pre,.wide{overflow-x:auto}\
code{overflow-wrap:anywhere}.asked{opacity:.8}.answer{font-size:1.1rem;border-left:4px solid #0072b2;padding:.2rem 0 .2rem .8rem}\
table{border-collapse:collapse;font-size:.85rem}th,td{text-align:left;padding:.25rem .9rem .25rem 0;vertical-align:top;\
border-bottom:1px solid #8884;font-variant-numeric:tabular-nums;white-space:nowrap}td.formula,td:nth-child(2):not(:last-child),td:last-child{white-space:normal}ol.cited{list-style:none;counter-reset:n;padding-left:2.2rem}ol.cited li{counter-increment:n}ol.cited li::before{content:\"[\" counter(n) \"] \";margin-left:-2.2rem;display:inline-block;width:2.2rem}td.formula{opacity:.75}figure{margin:1.5rem 0}\
svg{max-width:100%;height:auto}footer{margin-top:2rem;font-size:.8rem;opacity:.7}\
@media screen and (prefers-color-scheme:dark){body{color:#e6e8eb;background:#15181d}}\
@media print{body{margin:0;max-width:none;font-size:11px}figure,tr{break-inside:avoid}h2{break-after:avoid}}";

/// Text for HTML. Control characters are left out.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c if c.is_control() && !matches!(c, '\n' | '\t') => {}
            c => out.push(c),
        }
    }
    out
}

fn with_breaks(lines: &str) -> String {
    escaped(lines.trim_end()).replace('\n', "<br>\n")
}

/// An argument as a shell would need it.
fn quoted(argument: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=+@%~".contains(c);
    if !argument.is_empty() && argument.chars().all(plain) {
        return argument.to_owned();
    }
    format!("'{}'", argument.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        let mut table = PageTable::with_head("parts", ["what", "bytes"]);
        table.push(["weights <b>".to_owned(), "1 GiB".to_owned()], "n x 2 B");
        table.push(["a short row".to_owned()], "");
        Page {
            title: "A <script>alert(1)</script> & \"model\"".to_owned(),
            blocks: vec![PageBlock::Table(table), PageBlock::Answer("fits\ntwice".to_owned())],
            sources: vec!["a sheet".to_owned()],
            assumptions: vec![["rate", "1", "specified", "it's <here>"].map(str::to_owned)],
            ..Page::default()
        }
    }

    #[test]
    fn text_has_formulas_where_they_are_asked_for() {
        let text = page().text(false);
        assert!(
            text.ends_with("\n\nparts\nwhat         bytes\nweights <b>  1 GiB\na short row\n\nfits\ntwice\n"),
            "{text}"
        );
        let text = page().text(true);
        assert!(text.contains("weights <b>  1 GiB  n x 2 B\n") && text.ends_with("\nsources\n  a sheet\n"), "{text}");
    }

    #[test]
    fn html_escapes_everything_and_asks_the_network_for_nothing() {
        let asked = ["plan", "fit", "it's <a> model"].map(str::to_owned);
        let html = page().html(&asked);
        assert!(!html.contains("<script") && !html.contains("<b>") && !html.contains("<a>"), "{html}");
        assert!(
            !html.contains("http:") && !html.contains("https:") && !html.contains("src=") && !html.contains("url(")
        );
        assert!(html.contains("<code>ridge plan fit &#39;it&#39;\\&#39;&#39;s &lt;a&gt; model&#39;</code>"), "{html}");
        // The result comes before the tables.
        assert!(html.find("fits<br>").unwrap() < html.find("<table>").unwrap());
        assert_eq!(html.matches("<tr>").count(), html.matches("</tr>").count());
    }
}
