//! What is needed next, brought to L2 while products are computed.
//!
//! Lines that come from memory wait in the same few buffers as those that tiles are loaded from L2 through. What the
//! machine fetches ahead by itself needs none, and it does so where lines of a page are asked for in their order, in many
//! pages at a time. So what is needed next is cut into as many streams as lines are to be asked for at each step of K, and
//! each step asks for the next line of each stream: then products wait for memory hardly longer than if all were in L2.

use super::config::LINE;

/// Ranges of memory, each to be brought by some of the products to come.
pub(crate) struct Ahead {
    ranges: [Range; RANGES],
    len: usize,
    /// The range that is brought now, and the steps for which it has been.
    now: usize,
    done: usize,
}

/// The most ranges at a time: a panel, and a share of x.
const RANGES: usize = 24;

#[derive(Clone, Copy, Default)]
struct Range {
    at: usize,
    lines: usize,
    /// Steps in which it is to be brought: so many lines has each stream.
    steps: usize,
}

/// What a product brings at each of its steps: the next lines of `count` streams, `apart` bytes from each other.
#[derive(Clone, Copy)]
pub(crate) struct Streams {
    pub(crate) at: *const u8,
    pub(crate) apart: usize,
    pub(crate) count: usize,
}

impl Ahead {
    /// `parts`, by `products` products of `steps` steps each: each part by as many of them as is its share.
    pub(crate) fn new<'a>(parts: impl Iterator<Item = &'a [u32]> + Clone, products: usize, steps: usize) -> Self {
        let lines_of = |part: &[u32]| size_of_val(part).div_ceil(LINE);
        let parts = parts.filter(|part| !part.is_empty()).take(RANGES);
        let mut left = (parts.clone().map(lines_of).sum::<usize>(), products, parts.clone().count());
        let mut ahead = Self { ranges: [Range::default(); RANGES], len: 0, now: 0, done: 0 };
        for part in parts {
            let lines = lines_of(part);
            let most = (left.1 + 1).saturating_sub(left.2).max(1);
            let of_part = ((lines * left.1 + left.0 / 2) / left.0).clamp(1, most);
            ahead.ranges[ahead.len] = Range { at: part.as_ptr().addr(), lines, steps: of_part * steps };
            ahead.len += 1;
            left = (left.0 - lines, left.1.saturating_sub(of_part), left.2 - 1);
        }
        ahead
    }

    /// What the next product of `steps` steps brings.
    pub(crate) fn take(&mut self, steps: usize) -> Streams {
        // More lines at a time would wait for each other.
        const MOST: usize = 32;
        let Some(range) = self.ranges[..self.len].get(self.now) else {
            return Streams { at: std::ptr::null(), apart: 0, count: 0 };
        };
        let at = std::ptr::with_exposed_provenance::<u8>(range.at).wrapping_add(self.done * LINE);
        let streams = Streams { at, apart: range.steps * LINE, count: range.lines.div_ceil(range.steps).min(MOST) };
        self.done += steps;
        if self.done >= range.steps {
            (self.now, self.done) = (self.now + 1, 0);
        }
        streams
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_asked_for() {
        let memory = vec![0u32; 16 * 5000];
        let parts = [&memory[..16 * 1024], &memory[16 * 1024..16 * 1536], &memory[16 * 1600..16 * 1601]];
        for (products, steps) in [(6, 64), (8, 32), (1, 64), (40, 64), (3, 7)] {
            let mut ahead = Ahead::new(parts.iter().copied(), products, steps);
            let mut asked = std::collections::HashSet::new();
            for _ in 0..products.max(parts.len()) {
                let streams = ahead.take(steps);
                for step in 0..steps {
                    for stream in 0..streams.count {
                        asked.insert(streams.at.addr() + stream * streams.apart + step * LINE);
                    }
                }
            }
            let wanted = parts.iter().flat_map(|p| (0..p.len() / 16).map(|line| p.as_ptr().addr() + line * LINE));
            let missing = wanted.filter(|line| !asked.contains(line)).count();
            // More than a few lines a step would wait for each other, and are left out.
            assert!(missing == 0 || products * steps * 32 < 1537, "{products} products of {steps}: {missing} missing");
        }
    }
}
