//! What `nvidia-smi topo -m` prints: a matrix of the paths between GPUs and network cards of one machine, with the CPUs and
//! the NUMA node near each GPU. Versions of it differ in their columns and name cards in the matrix or in a legend.

use std::fmt;

use serde::Serialize;

use super::nodes::parse_cpu_list;
use crate::error::HwError;

/// What a path between two devices of one machine crosses, nearest first, as `nvidia-smi topo -m` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum PathType {
    /// The device itself.
    X,
    /// A bonded set of so many NVLinks.
    NvLink(u32),
    /// At most one PCIe bridge.
    Pix,
    /// Several PCIe bridges, without the host bridge.
    Pxb,
    /// A PCIe host bridge.
    Phb,
    /// From one host bridge to another of the same NUMA node.
    Node,
    /// From one NUMA node to another.
    Sys,
}

impl fmt::Display for PathType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::X => f.pad("X"),
            Self::NvLink(links) => f.pad(&format!("NV{links}")),
            Self::Pix => f.pad("PIX"),
            Self::Pxb => f.pad("PXB"),
            Self::Phb => f.pad("PHB"),
            Self::Node => f.pad("NODE"),
            Self::Sys => f.pad("SYS"),
        }
    }
}

impl PathType {
    fn parse(cell: &str) -> Option<Self> {
        Some(match cell {
            "X" => Self::X,
            "PIX" => Self::Pix,
            "PXB" => Self::Pxb,
            "PHB" => Self::Phb,
            "NODE" => Self::Node,
            // SOC until 2017.
            "SYS" | "SOC" => Self::Sys,
            _ => Self::NvLink(cell.strip_prefix("NV")?.parse().ok()?),
        })
    }
}

/// A GPU of the matrix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MatrixGpu {
    /// Its label, such as `GPU0`.
    pub label: String,
    /// Its number: what `CUDA_VISIBLE_DEVICES` takes while `CUDA_DEVICE_ORDER` is `PCI_BUS_ID`.
    pub index: usize,
    /// Logical CPUs near to it, as printed, such as `0-31,64-95`; `None` where the matrix does not state it.
    pub cpus: Option<String>,
    /// NUMA node near to it.
    pub numa: Option<usize>,
}

/// A network card of the matrix.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MatrixNic {
    /// Its label in the matrix, such as `NIC0` or `mlx5_0`.
    pub label: String,
    /// The name of its device, by the legend if there is one.
    pub device: String,
}

/// A machine's matrix: symmetric, each device at no distance from itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Matrix {
    /// GPUs, by the order of columns.
    pub gpus: Vec<MatrixGpu>,
    /// Network cards, by the order of columns.
    pub nics: Vec<MatrixNic>,
    /// `between[i][j]`: the path from GPU i to GPU j.
    pub between: Vec<Vec<PathType>>,
    /// `to_nic[i][n]`: the path from GPU i to card n.
    pub to_nic: Vec<Vec<PathType>>,
}

/// NVLinks that a GPU has at most, from Hopper on.
const MAX_LINKS: u32 = 18;
/// Devices of a matrix at most: far above any machine, and few enough for every search over them.
const MAX_DEVICES: usize = 128;
/// Columns beside devices.
const AFFINITIES: [&str; 3] = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"];

/// A line of text as cells, and its number from 1.
struct MatrixRow<'a> {
    line: usize,
    cells: Vec<&'a str>,
}

fn refused(line: usize, problem: impl Into<String>, remedy: &str) -> HwError {
    HwError::Topology { line, problem: problem.into(), remedy: remedy.to_owned() }
}

const WHOLE: &str = "give the whole text of `nvidia-smi topo -m`, from its header on";
const CORRUPT: &str = "the text was changed or mixed with another machine's; run `nvidia-smi topo -m` again";

impl Matrix {
    /// Reads what `nvidia-smi topo -m` prints; text before and behind the matrix does not matter.
    ///
    /// # Errors
    /// [`HwError::Topology`] with the line, where there is no matrix or one that contradicts itself.
    pub fn parse(text: &str) -> Result<Self, HwError> {
        let text = without_escapes(text);
        let lines: Vec<(usize, &str)> = text.lines().enumerate().map(|(i, line)| (i + 1, line)).collect();
        let header = lines.iter().position(|(_, line)| is_header(line));
        let Some(header) = header else {
            return Err(refused(1, "no line lists GPU0 and so on as columns", WHOLE));
        };
        let (line, columns) = (lines[header].0, columns(lines[header].1));
        // Cells may be empty where tabs divide them; text that was copied from a terminal has spaces.
        let tabs = lines[header].1.contains('\t');
        let devices: Vec<&str> = columns.iter().copied().filter(|c| !AFFINITIES.contains(c)).collect();
        if let Some(twice) = (1..devices.len()).find(|&i| devices[..i].contains(&devices[i])) {
            return Err(refused(line, format!("the column {} appears twice", devices[twice]), CORRUPT));
        }
        if devices.len() > MAX_DEVICES {
            let problem = format!("{} devices exceed the limit of {MAX_DEVICES}", devices.len());
            return Err(refused(line, problem, CORRUPT));
        }
        let mut rows: Vec<Option<MatrixRow<'_>>> = devices.iter().map(|_| None).collect();
        let mut last = line;
        for (number, text) in &lines[header + 1..] {
            let cells: Vec<&str> =
                if tabs { text.split('\t').map(str::trim).collect() } else { text.split_whitespace().collect() };
            let Some(label) = cells.first().filter(|label| !label.is_empty()) else {
                // An empty line ends the matrix once it has begun.
                if rows.iter().any(Option::is_some) && text.trim().is_empty() { break } else { continue }
            };
            if label.starts_with("Legend") || label.starts_with("NIC Legend") {
                break;
            }
            let Some(at) = devices.iter().position(|d| d == label) else {
                let problem = format!("the row {label:?} has no column; columns are {}", devices.join(", "));
                return Err(refused(*number, problem, CORRUPT));
            };
            if rows[at].is_some() {
                return Err(refused(*number, format!("the row {label} appears twice"), CORRUPT));
            }
            if cells.len() < devices.len() + 1 {
                let problem = format!("the row {label} has {} cells for {} devices", cells.len() - 1, devices.len());
                return Err(refused(*number, problem, "do not cut long lines"));
            }
            last = *number;
            rows[at] = Some(MatrixRow { line: *number, cells: cells[1..].to_vec() });
        }
        let mut complete = Vec::with_capacity(rows.len());
        for (row, device) in rows.into_iter().zip(&devices) {
            complete.push(row.ok_or_else(|| refused(last, format!("{device} has a column but no row"), WHOLE))?);
        }
        let ways = ways(&devices, &complete)?;
        let affinities = &columns[devices.len()..];
        Self::assemble(&devices, &complete, &ways, affinities, &legend(&lines[header..]))
    }

    fn assemble(
        devices: &[&str],
        rows: &[MatrixRow<'_>],
        ways: &[Vec<PathType>],
        affinities: &[&str],
        legend: &[(&str, &str)],
    ) -> Result<Self, HwError> {
        let index = |label: &str| label.strip_prefix("GPU").and_then(|n| n.parse::<usize>().ok());
        let (of_gpus, of_nics): (Vec<usize>, Vec<usize>) =
            (0..devices.len()).partition(|&i| index(devices[i]).is_some());
        let mut gpus = Vec::with_capacity(of_gpus.len());
        for &i in &of_gpus {
            let MatrixRow { line, cells } = &rows[i];
            let cell = |name: &str| {
                let at = affinities.iter().position(|a| *a == name)?;
                cells.get(devices.len() + at).copied().filter(|c| !c.is_empty() && *c != "N/A")
            };
            let cpus = cell(AFFINITIES[0]);
            if let Some(cpus) = cpus.filter(|c| parse_cpu_list(c).is_none()) {
                let problem = format!("{}: {cpus:?} is not a list of CPUs such as 0-31,64-95", devices[i]);
                return Err(refused(*line, problem, CORRUPT));
            }
            let numa = cell(AFFINITIES[1]);
            // A GPU that is near to several nodes has a list of them; the first is as good as any.
            let first = numa.map(|n| n.split(['-', ',']).next().unwrap_or(n).parse::<usize>());
            let Ok(numa) = first.transpose() else {
                let problem = format!("{}: {:?} is not a NUMA node number", devices[i], numa.unwrap_or_default());
                return Err(refused(*line, problem, CORRUPT));
            };
            let label = devices[i].to_owned();
            gpus.push(MatrixGpu { index: index(&label).unwrap_or(i), label, cpus: cpus.map(str::to_owned), numa });
        }
        let nic = |&i: &usize| {
            let label = devices[i].to_owned();
            let device =
                legend.iter().find(|(name, _)| *name == label).map_or(&*label, |(_, device)| device).to_owned();
            MatrixNic { label, device }
        };
        let select = |columns: &[usize]| -> Vec<Vec<PathType>> {
            of_gpus.iter().map(|&i| columns.iter().map(|&j| ways[i][j]).collect()).collect()
        };
        let matrix =
            Self { nics: of_nics.iter().map(nic).collect(), between: select(&of_gpus), to_nic: select(&of_nics), gpus };
        matrix.check_links(rows, &of_gpus)?;
        Ok(matrix)
    }

    /// No GPU has more NVLinks than there are, and none to a card.
    fn check_links(&self, rows: &[MatrixRow<'_>], of_gpus: &[usize]) -> Result<(), HwError> {
        for (i, ways) in self.between.iter().enumerate() {
            let links: Vec<u32> =
                ways.iter().filter_map(|w| if let PathType::NvLink(n) = w { Some(*n) } else { None }).collect();
            let (line, label) = (rows[of_gpus[i]].line, &self.gpus[i].label);
            if let Some(n) = links.iter().find(|n| **n == 0 || **n > MAX_LINKS) {
                let problem = format!("{label}: NV{n}, but a GPU has 1 to {MAX_LINKS} NVLinks");
                return Err(refused(line, problem, CORRUPT));
            }
            // Behind a switch all GPUs are reached by all links; without one, each link leads to one of them.
            let switched = links.windows(2).all(|w| w[0] == w[1]);
            let sum: u32 = links.iter().sum();
            if !switched && sum > MAX_LINKS {
                let problem = format!("{label} has {sum} NVLinks in its row, but the maximum is {MAX_LINKS}");
                return Err(refused(line, problem, CORRUPT));
            }
            if let Some(n) = self.to_nic[i].iter().position(|w| matches!(w, PathType::NvLink(_))) {
                let problem = format!("{label}: {} to {}, a network card", self.to_nic[i][n], self.nics[n].label);
                return Err(refused(line, problem, CORRUPT));
            }
        }
        Ok(())
    }
}

/// The matrix of all devices, once each cell is a way, the diagonal X, and both halves agree.
fn ways(devices: &[&str], rows: &[MatrixRow<'_>]) -> Result<Vec<Vec<PathType>>, HwError> {
    let mut ways = Vec::with_capacity(rows.len());
    for (i, row) in rows.iter().enumerate() {
        let mut of_row = Vec::with_capacity(devices.len());
        for (j, cell) in row.cells[..devices.len()].iter().enumerate() {
            let between = format!("{} to {}", devices[i], devices[j]);
            let Some(way) = PathType::parse(cell) else {
                let problem = format!("{between}: {cell:?} is not one of X, NV#, PIX, PXB, PHB, NODE and SYS");
                return Err(refused(row.line, problem, CORRUPT));
            };
            if (way == PathType::X) != (i == j) {
                let (is, must) = if i == j { ("not X", "a device is itself") } else { ("X", "they are two devices") };
                return Err(refused(row.line, format!("{between} is {is} ({way}), but {must}"), CORRUPT));
            }
            of_row.push(way);
        }
        ways.push(of_row);
    }
    for i in 0..devices.len() {
        for j in 0..i {
            if ways[i][j] != ways[j][i] {
                let (a, b) = (devices[j], devices[i]);
                let problem = format!("{a} to {b} is {}, but {b} to {a} is {}", ways[j][i], ways[i][j]);
                return Err(refused(rows[i].line, problem, CORRUPT));
            }
        }
    }
    Ok(ways)
}

/// The text without the escape sequences that underline the header.
fn without_escapes(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\x1b') {
        clean.push_str(&rest[..at]);
        let sequence = &rest[at + 1..];
        let end = sequence.strip_prefix('[').map_or(0, |inside| {
            inside.find(|c: char| c.is_ascii_alphabetic()).map_or(sequence.len(), |letter| letter + 2)
        });
        rest = &sequence[end..];
    }
    clean + rest
}

fn is_header(line: &str) -> bool {
    let mut words = line.split_whitespace();
    let is_gpu = |word: &str| word.strip_prefix("GPU").is_some_and(|n| n.parse::<usize>().is_ok());
    // A row has a way behind its label.
    words.next().is_some_and(is_gpu) && words.next().is_none_or(|second| PathType::parse(second).is_none())
}

/// Names of the columns: devices, then affinities.
fn columns(header: &str) -> Vec<&str> {
    let mut devices = header;
    let mut affinities: Vec<(usize, &str)> = Vec::new();
    for name in AFFINITIES {
        if let Some(at) = header.find(name) {
            affinities.push((at, name));
            devices = &devices[..at.min(devices.len())];
        }
    }
    affinities.sort_unstable();
    devices.split_whitespace().chain(affinities.into_iter().map(|(_, name)| name)).collect()
}

/// Names of cards behind `NIC Legend:`, as pairs of label and device.
fn legend<'a>(lines: &[(usize, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let begin = lines.iter().position(|(_, line)| line.trim() == "NIC Legend:");
    let lines = begin.map_or(&[][..], |at| &lines[at + 1..]);
    lines
        .iter()
        .map(|(_, line)| line.trim())
        .skip_while(|line| line.is_empty())
        .map_while(|line| line.split_once(':'))
        .map(|(label, device)| (label.trim(), device.trim()))
        .collect()
}
