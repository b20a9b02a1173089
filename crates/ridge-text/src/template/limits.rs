//! Limits of one rendering.

/// What one rendering may use. The defaults render conversations of megabytes in well under a second, and stop a
/// template that would run forever within a few.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Steps: expressions evaluated and items walked over, and one for every 64 bytes read or written.
    pub steps: u64,
    /// Bytes of text and lists that are made, the intermediate ones included: also a bound on the memory used.
    pub bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { steps: 20_000_000, bytes: 512 << 20 }
    }
}
