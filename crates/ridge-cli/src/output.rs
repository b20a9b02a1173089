//! Output: text on standard output, everything else on standard error.

use std::borrow::Cow;
use std::error::Error as _;
use std::ffi::OsStr;
use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use ridge::{LoadNote, LoadObserver};

use crate::error::{Error, Result, refused};

/// Whether another process writes to standard output.
static SILENT: AtomicBool = AtomicBool::new(false);

/// Disables output: of several identical ranks, only the first prints.
pub(crate) fn be_silent() {
    SILENT.store(true, Ordering::Relaxed);
}

/// Writes to standard output and flushes it, so that text is streamed.
///
/// The text may come from a model or an untrusted file. Control characters except newline and tab are removed if the output is a
/// terminal, because escape sequences could change its state or inject input. A file or pipe gets the text unchanged.
pub(crate) fn print(text: &str) -> Result<()> {
    if SILENT.load(Ordering::Relaxed) {
        return Ok(());
    }
    let mut out = io::stdout().lock();
    let written = match out.is_terminal() && text.contains(is_unsafe) {
        true => out.write_all(without_controls(text).as_bytes()),
        false => out.write_all(text.as_bytes()),
    };
    written.and_then(|()| out.flush()).map_err(Error::Stdout)
}

/// Whether it is a control character that a terminal may interpret.
fn is_unsafe(c: char) -> bool {
    c.is_control() && !matches!(c, '\n' | '\t')
}

fn without_controls(text: &str) -> String {
    text.chars().filter(|c| !is_unsafe(*c)).collect()
}

/// Maximum length of a word in a message. Names in files can have any length.
const MAX_WORD: usize = 256;

/// A message in printable form: control characters are escaped as in Rust, and long words are truncated in the middle.
/// Messages may contain names from untrusted files.
fn shown(message: &str) -> String {
    let mut text = String::with_capacity(message.len());
    for part in message.split_inclusive(char::is_whitespace) {
        let length = part.chars().count();
        let mut push = |characters: &mut dyn Iterator<Item = char>| {
            for c in characters {
                if is_unsafe(c) { text.extend(c.escape_default()) } else { text.push(c) }
            }
        };
        if length <= MAX_WORD {
            push(&mut part.chars());
            continue;
        }
        push(&mut part.chars().take(MAX_WORD / 2));
        push(&mut format!("[{} characters]", length - MAX_WORD).chars());
        push(&mut part.chars().skip(length - MAX_WORD / 2));
    }
    text
}

/// Writes a JSON value to standard output.
pub(crate) fn print_json(value: &serde_json::Value) -> Result<()> {
    print(&format!("{value:#}\n"))
}

/// Writes a file, such as a plot or a trace, under a temporary name and renames it, so that no partial file is ever visible.
///
/// # Errors
/// When it cannot be written, or is an input of the command.
pub(crate) fn write_file(path: &Path, text: &str) -> Result<()> {
    let failed = |cause| Error::Write { path: path.display().to_string(), cause };
    if is_read(path) {
        return Err(refused("the output", path.display(), "is an input of this command; give another name"));
    }
    // The target of a link is replaced; special files such as pipes are written directly.
    let path = &path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if path.metadata().is_ok_and(|there| !there.is_file()) {
        return std::fs::write(path, text).map_err(failed);
    }
    let mut name = path.file_name().map(OsStr::to_owned).unwrap_or_default();
    name.push(format!(".{}.part", std::process::id()));
    let part = path.with_file_name(name);
    let written = std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    written.map_err(failed)
}

/// Whether the file is named by another argument, or is a model file in a folder named by one.
fn is_read(path: &Path) -> bool {
    let Ok(target) = path.canonicalize() else { return false };
    let of_model = ["json", "safetensors", "gguf", "jinja", "model"];
    let of_model = target.extension().is_some_and(|e| of_model.iter().any(|known| e.eq_ignore_ascii_case(known)));
    let args = std::env::args_os().skip(1).filter_map(|arg| {
        let text = arg.to_string_lossy().into_owned();
        let value = text.split_once('=').filter(|_| text.starts_with('-')).map(|(_, value)| value.to_owned());
        Path::new(&value.map_or(arg, Into::into)).canonicalize().ok()
    });
    let args: Vec<_> = args.collect();
    args.iter().filter(|arg| **arg == target).count() > 1
        || of_model && args.iter().any(|arg| target.parent() == Some(arg.as_path()))
}

/// Writes a line to standard error. A closed standard error is not an error.
pub(crate) fn note(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", shown(line));
}

/// Writes an error and its causes to standard error.
pub(crate) fn report(error: &Error) {
    let mut text = format!("error: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!("\n  caused by: {error}");
        cause = error.source();
    }
    note(&text);
}

/// 1234567 as `1,234,567`.
pub(crate) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let head = digits.len() % 3;
    let groups = digits.as_bytes()[head..].chunks(3).map(|g| String::from_utf8_lossy(g).into_owned());
    let groups: Vec<String> =
        Some(digits[..head].to_owned()).filter(|h| !h.is_empty()).into_iter().chain(groups).collect();
    groups.join(",")
}

/// `1 token`, `2 tokens`.
pub(crate) fn count(n: usize, noun: &str) -> String {
    format!("{} {noun}{}", grouped(n as u64), if n == 1 { "" } else { "s" })
}

/// Maximum column width: that of the longest tensor names in published models.
const MAX_CELL: usize = 120;

/// Rows as aligned columns; the last column is not padded.
pub(crate) fn columns(rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = (0..rows.iter().map(Vec::len).max().unwrap_or(0))
        .map(|c| rows.iter().filter_map(|r| r.get(c)).map(|cell| cell.chars().count()).max().unwrap_or(0))
        // A single very long name does not widen the column for all rows.
        .map(|width| width.min(MAX_CELL))
        .collect();
    let mut text = String::new();
    for row in rows {
        let line: String = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  ")).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// A progress bar over bytes, tokens or requests, shown on a terminal after a noticeable delay.
pub(crate) struct Progress {
    what: &'static str,
    /// The template of the counts.
    counts: &'static str,
    total: u64,
    started: Instant,
    bar: Option<ProgressBar>,
}

/// Delay before the bar is shown.
const NOTICED: Duration = Duration::from_millis(300);

impl Progress {
    pub(crate) fn new(what: &'static str, total: u64) -> Self {
        Self::with(what, "{binary_bytes} of {binary_total_bytes}, {eta} left", total)
    }

    pub(crate) fn of_tokens(what: &'static str, total: u64) -> Self {
        Self::with(what, "{human_pos} of {human_len} tokens, {eta} left", total)
    }

    pub(crate) fn of_requests(what: &'static str, total: u64) -> Self {
        Self::with(what, "{human_pos} of {human_len} requests, {eta} left", total)
    }

    pub(crate) fn of_seconds(what: &'static str, total: u64) -> Self {
        Self::with(what, "{human_pos} of {human_len} s", total)
    }

    fn with(what: &'static str, counts: &'static str, total: u64) -> Self {
        Self { what, counts, total, started: Instant::now(), bar: None }
    }

    pub(crate) fn at(&mut self, done: u64) {
        if self.bar.is_none() && self.started.elapsed() > NOTICED && io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(Some(self.total), ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template(&template(self.counts, terminal_width())) {
                // Before any progress there is no estimate.
                let eta = |state: &ProgressState, to: &mut dyn fmt::Write| {
                    let _ = match state.pos() {
                        0 => to.write_str("-"),
                        _ => write!(to, "{:#}", HumanDuration(state.eta())),
                    };
                };
                bar.set_style(style.progress_chars("=> ").with_key("eta", eta));
            }
            bar.set_message(self.what);
            self.bar = Some(bar);
        }
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
    }
}

/// The template of a line for a terminal of this width: the bar takes the remaining columns; narrow terminals get neither bar
/// nor counts.
fn template(counts: &str, columns: usize) -> String {
    match columns {
        60.. => format!("{{msg}} [{{wide_bar}}] {counts}"),
        _ => "{msg} {percent} %, {eta} left".to_owned(),
    }
}

/// Columns of the terminal at standard error; 80 if unknown.
fn terminal_width() -> usize {
    rustix::termios::tcgetwinsize(io::stderr()).ok().map_or(80, |size| usize::from(size.ws_col)).max(1)
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Reports loading: a progress bar on a terminal, and notes if enabled.
pub(crate) struct LoadProgress {
    notes: bool,
    bar: Option<Progress>,
}

impl LoadProgress {
    pub(crate) fn new(notes: bool) -> Self {
        Self { notes, bar: None }
    }
}

impl LoadObserver for LoadProgress {
    fn loading(&mut self, done: u64, total: u64) {
        self.bar.get_or_insert_with(|| Progress::new("loading weights", total)).at(done);
        if done >= total {
            self.bar = None;
        }
    }

    fn note(&mut self, about: LoadNote) {
        if !self.notes {
            return;
        }
        note(&load_note(&about));
    }
}

/// What is said of what may be unexpected about a model that is loaded.
pub(crate) fn load_note(about: &LoadNote) -> String {
    match about {
        LoadNote::LeftOut { format, matrices, of, example, why } => {
            format!("--format {format} does not convert {matrices} of {of} matrices, such as {example}: {why}")
        }
        LoadNote::Unused { tensors, example } => {
            format!("the model does not use {} of the checkpoint, such as {example}", count(*tensors, "tensor"))
        }
        LoadNote::OnHost { tensors, bytes, of } => {
            format!("{bytes} of {of} of weights ({}) stay in host memory (--gpu-memory)", count(*tensors, "tensor"))
        }
    }
}

/// A spinner on a terminal. It advances only on calls, because a separate thread would disturb measurements.
pub(crate) struct Spinner(ProgressBar);

impl Spinner {
    pub(crate) fn new() -> Self {
        let spinner = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
            spinner.set_style(style);
        }
        Self(spinner)
    }

    pub(crate) fn now(&self, what: impl Into<Cow<'static, str>>) {
        self.0.set_message(what);
        self.0.tick();
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_stand_in_threes() {
        for (n, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (8_030_261_248, "8,030,261,248")] {
            assert_eq!(grouped(n), text);
        }
    }

    #[test]
    fn terminals_get_no_control_characters() {
        assert_eq!(without_controls("a\x1b[31mb\u{9b}0m\r\n\tc\x07\x7fé"), "a[31mb0m\n\tcé");
    }

    #[test]
    fn messages_show_control_characters_and_the_ends_of_long_words() {
        assert_eq!(shown("key \x1b]0;x\x07\u{9b}2J of\n\tx"), "key \\u{1b}]0;x\\u{7}\\u{9b}2J of\n\tx");
        let name = format!("{}end", "n".repeat(100_000));
        let text = shown(&format!("no tensor {name} there"));
        assert!(text.starts_with("no tensor nnn") && text.ends_with("nend there"), "{text}");
        assert!(text.contains("[99748 characters]") && text.len() < 320, "{text}");
        let fits = "m".repeat(MAX_WORD - 1) + " x";
        assert_eq!(shown(&fits), fits);
    }

    #[test]
    fn progress_fits_its_terminal() {
        let counts = "{human_pos} of {human_len} requests, {eta} left";
        for (columns, longest) in
            [(40, "downloading 100 %, 59m left"), (60, "reading [] 128,000 of 128,000 requests, 59m left")]
        {
            let template = template(counts, columns);
            let line = template.replace("{msg}", if columns == 40 { "downloading" } else { "reading" });
            let line = line.replace("{wide_bar}", "").replace("{percent}", "100").replace("{eta}", "59m");
            let line = line.replace("{human_pos}", "128,000").replace("{human_len}", "128,000");
            assert_eq!(line, longest);
            assert!(line.len() < columns, "{line}");
        }
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["a".into(), "µµµ".into(), "x".into()], vec!["bb".into(), "c".into(), "y".into()]];
        assert_eq!(columns(&rows), "a   µµµ  x\nbb  c    y\n");
    }
}
