//! The formats that Ridge has, by name.

use super::eight::Q8_0;
use super::five::{Q5_0, Q5_1};
use super::four::{Q4_0, Q4_1};
use super::k::{Q2K, Q3K, Q4K, Q5K, Q6K};
use super::layout::FormatRef;
use super::table::{Iq4Nl, Iq4Xs, Mxfp4};

/// Runs `$body` with `$block` as the [`BlockFormat`](super::BlockFormat) called `$name`, or `$other` where there is none.
#[macro_export]
macro_rules! with_block_format {
    ($name:expr, $block:ident => $body:expr, _ => $other:expr) => {
        $crate::with_block_format!(@ $name, $block, $body, $other,
            Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2K, Q3K, Q4K, Q5K, Q6K, Iq4Nl, Iq4Xs, Mxfp4)
    };
    (@ $name:expr, $block:ident, $body:expr, $other:expr, $($format:ident),*) => {
        match $name {
            $(name if name == <$crate::format::$format as $crate::format::BlockFormat>::NAME => {
                type $block = $crate::format::$format;
                $body
            })*
            _ => $other,
        }
    };
}

/// Every format with its standard attributes: what conformance tests walk and the command line offers.
pub fn all() -> Vec<FormatRef> {
    vec![
        FormatRef::new(Q8_0),
        FormatRef::new(Q4_0),
        FormatRef::new(Q4_1),
        FormatRef::new(Q5_0),
        FormatRef::new(Q5_1),
        FormatRef::new(Q2K),
        FormatRef::new(Q3K),
        FormatRef::new(Q4K),
        FormatRef::new(Q5K),
        FormatRef::new(Q6K),
        FormatRef::new(Iq4Nl),
        FormatRef::new(Iq4Xs),
        FormatRef::new(Mxfp4),
    ]
}

impl FormatRef {
    /// The built-in format called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        all().into_iter().find(|f| f.name() == name)
    }
}
