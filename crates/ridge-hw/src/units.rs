//! Quantities that cross Ridge's doors: each number carries its unit in its type.
//!
//! The field of each type is public, for none of them has an invariant beyond its unit. Products and quotients exist
//! where physics has them (`Bytes / BytesPerSecond = Seconds`) and nowhere else. `Display` is for people: three
//! significant digits, a fitting prefix (`1.22 GiB`, `31.2 GB/s`, `4.85 ms`); a precision (`{:.1}`) fixes the decimals.

mod human;
mod parse;
mod quantity;

pub use parse::UnitError;
pub use quantity::{Bytes, BytesPerSecond, Flops, FlopsPerByte, FlopsPerSecond, Seconds};
