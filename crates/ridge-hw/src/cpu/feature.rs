//! Instruction sets that kernels choose by.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Serialize, Serializer};

/// Declares the features with the names that Linux gives them.
macro_rules! features {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// An instruction set extension.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Feature {
            $($(#[$doc])* $variant,)*
        }

        impl Feature {
            /// All of them, of all architectures.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Its name in `/proc/cpuinfo`, but `neon` and `dotprod` for what Linux calls `asimd` and `asimddp`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

features! {
    /// x86: SSE4.2.
    Sse42 = "sse4_2",
    /// x86: 256-bit integer vectors.
    Avx2 = "avx2",
    /// x86: fused multiply-add.
    Fma = "fma",
    /// x86: conversion between f16 and f32.
    F16c = "f16c",
    /// x86: 256-bit VNNI, int8 dot products.
    AvxVnni = "avx_vnni",
    /// x86: 512-bit vectors, foundation.
    Avx512f = "avx512f",
    /// x86: 512-bit bytes and words.
    Avx512bw = "avx512bw",
    /// x86: AVX-512 at 128 and 256 bits.
    Avx512vl = "avx512vl",
    /// x86: 512-bit doublewords and quadwords.
    Avx512dq = "avx512dq",
    /// x86: 512-bit VNNI, int8 dot products.
    Avx512Vnni = "avx512_vnni",
    /// x86: bf16 dot products.
    Avx512Bf16 = "avx512_bf16",
    /// x86: f16 arithmetic.
    Avx512Fp16 = "avx512_fp16",
    /// x86: AMX tiles. A process still has to ask the kernel for leave to use them.
    AmxTile = "amx_tile",
    /// x86: AMX int8 matrix products.
    AmxInt8 = "amx_int8",
    /// x86: AMX bf16 matrix products.
    AmxBf16 = "amx_bf16",
    /// Arm: 128-bit vectors.
    Neon = "neon",
    /// Arm: int8 dot products.
    Dotprod = "dotprod",
    /// Arm: int8 matrix products.
    I8mm = "i8mm",
    /// Arm: bf16 dot and matrix products.
    Bf16 = "bf16",
    /// Arm: scalable vectors.
    Sve = "sve",
}

/// A set of instruction set extensions. Shown as their names, with spaces between.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Features(u32);

const _: () = assert!(Feature::ALL.len() <= 32);

impl Features {
    /// The features that this process may use. `flags` are those of `/proc/cpuinfo`, which stands in where the
    /// standard library cannot tell (AMX).
    pub fn detect(flags: &BTreeSet<String>) -> Self {
        let amx = [Feature::AmxTile, Feature::AmxInt8, Feature::AmxBf16];
        executable().chain(amx.into_iter().filter(|feature| flags.contains(feature.name()))).collect()
    }

    /// Whether the set has `feature`.
    pub const fn has(self, feature: Feature) -> bool {
        self.0 & (1 << feature as u32) != 0
    }

    /// Whether the set has all of `features`.
    pub fn has_all(self, features: &[Feature]) -> bool {
        features.iter().all(|&feature| self.has(feature))
    }

    /// The features of the set, in the order of [`Feature::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.iter().copied().filter(move |&feature| self.has(feature))
    }
}

impl FromIterator<Feature> for Features {
    fn from_iter<I: IntoIterator<Item = Feature>>(features: I) -> Self {
        Self(features.into_iter().fold(0, |bits, feature| bits | 1 << feature as u32))
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.iter().map(Feature::name).collect::<Vec<_>>().join(" "))
    }
}

impl Serialize for Features {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter().map(Feature::name))
    }
}

/// What the standard library finds usable: by the processor, and by the operating system, which saves the registers.
#[cfg(target_arch = "x86_64")]
fn executable() -> impl Iterator<Item = Feature> {
    let found = [
        (Feature::Sse42, is_x86_feature_detected!("sse4.2")),
        (Feature::Avx2, is_x86_feature_detected!("avx2")),
        (Feature::Fma, is_x86_feature_detected!("fma")),
        (Feature::F16c, is_x86_feature_detected!("f16c")),
        (Feature::AvxVnni, is_x86_feature_detected!("avxvnni")),
        (Feature::Avx512f, is_x86_feature_detected!("avx512f")),
        (Feature::Avx512bw, is_x86_feature_detected!("avx512bw")),
        (Feature::Avx512vl, is_x86_feature_detected!("avx512vl")),
        (Feature::Avx512dq, is_x86_feature_detected!("avx512dq")),
        (Feature::Avx512Vnni, is_x86_feature_detected!("avx512vnni")),
        (Feature::Avx512Bf16, is_x86_feature_detected!("avx512bf16")),
        (Feature::Avx512Fp16, is_x86_feature_detected!("avx512fp16")),
    ];
    found.into_iter().filter_map(|(feature, usable)| usable.then_some(feature))
}

#[cfg(target_arch = "aarch64")]
fn executable() -> impl Iterator<Item = Feature> {
    use std::arch::is_aarch64_feature_detected;
    let found = [
        (Feature::Neon, is_aarch64_feature_detected!("neon")),
        (Feature::Dotprod, is_aarch64_feature_detected!("dotprod")),
        (Feature::I8mm, is_aarch64_feature_detected!("i8mm")),
        (Feature::Bf16, is_aarch64_feature_detected!("bf16")),
        (Feature::Sve, is_aarch64_feature_detected!("sve")),
    ];
    found.into_iter().filter_map(|(feature, usable)| usable.then_some(feature))
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn executable() -> impl Iterator<Item = Feature> {
    std::iter::empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_was_put_in_and_nothing_else() {
        let set: Features = [Feature::Avx2, Feature::AmxBf16].into_iter().collect();
        assert!(set.has(Feature::Avx2) && !set.has(Feature::Avx512f));
        assert!(set.has_all(&[Feature::AmxBf16, Feature::Avx2]));
        assert!(!set.has_all(&[Feature::AmxBf16, Feature::AmxTile]));
        assert_eq!(set.to_string(), "avx2 amx_bf16");
    }

    #[test]
    fn amx_is_taken_from_the_kernel_flags() {
        let flags = ["amx_tile", "amx_bf16", "avx"].map(str::to_owned).into();
        assert!(Features::detect(&flags).has_all(&[Feature::AmxTile, Feature::AmxBf16]));
        assert!(!Features::detect(&flags).has(Feature::AmxInt8));
        assert!(!Features::detect(&BTreeSet::new()).has(Feature::AmxTile));
    }

    #[test]
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    fn the_processor_and_the_kernel_agree() {
        let info = crate::cpu::parse_cpuinfo(&std::fs::read_to_string("/proc/cpuinfo").unwrap());
        for feature in Features::detect(&info.flags).iter() {
            assert!(info.flags.contains(feature.name()), "/proc/cpuinfo lacks {}", feature.name());
        }
    }
}
