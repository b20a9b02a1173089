//! Which candidate tokens are accepted.
//!
//! Floor: a launch; a few integers a line.

use std::ops::Range;

use ridge_graph::ops;

use crate::io::KernelIo;
use crate::kernel::{CpuKernel, KernelEntry, KernelSpec};
use crate::scratch::Scratch;

pub(super) fn entries() -> [KernelEntry; 1] {
    [KernelEntry::new("accept_candidates", "accept_candidates(next, tokens, parents)", |_| true, make)]
}

struct AcceptCandidates {
    lines: usize,
    depth: usize,
}

fn make(spec: &KernelSpec<'_>) -> Result<Box<dyn CpuKernel>, String> {
    let op = spec.composite::<ops::AcceptCandidates>().ok_or("no accept_candidates in the group")?;
    Ok(Box::new(AcceptCandidates { lines: spec.inputs[0].len(), depth: op.depth }))
}

impl AcceptCandidates {
    /// Is the line reached from its root by tokens that were sampled?
    fn is_accepted(&self, [next, tokens, parents]: [&[i32]; 3], line: usize) -> bool {
        let mut at = line;
        for _ in 0..=self.depth {
            match usize::try_from(parents[at]) {
                Err(_) => return parents[at] == ops::AcceptCandidates::ROOT,
                Ok(parent) if parent < self.lines && next[parent] == tokens[at] => at = parent,
                Ok(_) => return false,
            }
        }
        false
    }
}

impl CpuKernel for AcceptCandidates {
    fn pieces(&self) -> usize {
        // One, since an accepted line takes the end of a path from another.
        usize::from(self.lines > 0)
    }

    fn nanos_per_piece(&self) -> f64 {
        10.0 * self.lines as f64
    }

    fn run(&self, io: &KernelIo<'_>, _pieces: Range<usize>, _scratch: &mut Scratch) {
        let inputs = [0, 1, 2].map(|i| io.input::<i32>(i));
        // SAFETY: the only piece.
        let ends = unsafe { io.output::<i32>(0).part(0..self.lines) };
        for (line, end) in ends.iter_mut().enumerate() {
            *end = i32::from(self.is_accepted(inputs, line));
        }
        // A line is no end where a child is accepted, which stays to be seen even where it is no end itself.
        for line in 0..self.lines {
            if let Some(parent) = usize::try_from(inputs[2][line]).ok().filter(|parent| *parent < self.lines)
                && ends[parent] != 0
                && self.is_accepted(inputs, line)
            {
                ends[parent] = 0;
            }
        }
    }
}
