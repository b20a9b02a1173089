//! How many warps of a kernel a multiprocessor holds at once, and what keeps it from more.
//!
//! The rules are those of cuda_occupancy.h: registers are given to warps in units of 256, warps to four partitions,
//! shared memory to blocks in units of its granularity.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use crate::PlanError;

const WARP: u64 = 32;
const REGISTERS: u64 = 65_536;
const REGISTER_UNIT: u64 = 256;
const PARTITIONS: u64 = 4;

/// What a multiprocessor holds.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MultiprocessorLimits {
    threads: u64,
    blocks: u64,
    shared_bytes: u64,
    shared_bytes_per_block: u64,
    shared_granularity: u64,
    shared_reserved: u64,
    f32_lanes: u64,
}

static LIMITS: LazyLock<BTreeMap<String, MultiprocessorLimits>> =
    LazyLock::new(|| toml::from_str(include_str!("limits.toml")).expect("limits.toml is held by a test"));

/// What a kernel's launch asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelLaunch {
    /// Threads of a block, 1 to 1024.
    pub threads: u64,
    /// 32-bit registers of a thread, 1 to 255.
    pub registers: u64,
    /// Shared memory of a block, static and dynamic, in bytes.
    pub shared_bytes: u64,
}

/// What keeps a multiprocessor from holding one block more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Threads, as whole warps.
    Threads,
    /// Blocks, however small.
    Blocks,
    /// Registers.
    Registers,
    /// Shared memory.
    SharedMemory,
}

impl Limit {
    /// How many blocks it allows.
    pub fn formula(self) -> &'static str {
        match self {
            Self::Threads => "warps per multiprocessor / warps per block",
            Self::Blocks => "blocks per multiprocessor",
            Self::Registers => "65536 / registers per warp in units of 256, in whole warps of 4 partitions / warps",
            Self::SharedMemory => {
                "shared memory / that of a block including the system's reservation, in allocation units"
            }
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Threads => "threads",
            Self::Blocks => "blocks",
            Self::Registers => "registers",
            Self::SharedMemory => "shared memory",
        })
    }
}

/// Blocks and warps that are resident at once.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Occupancy {
    /// Blocks that fit by each limit alone.
    pub blocks_by: Vec<(Limit, u64)>,
    /// Blocks resident on a multiprocessor.
    pub blocks: u64,
    /// Warps resident on a multiprocessor.
    pub warps: u64,
    /// Warps that it could hold.
    pub max_warps: u64,
    /// The limits that are reached first.
    pub limited_by: Vec<Limit>,
}

impl Occupancy {
    /// Resident warps over those that it could hold.
    #[must_use]
    pub fn fraction(&self) -> f64 {
        self.warps as f64 / self.max_warps as f64
    }
}

/// The occupancy of `launch` on compute capability `capability`, such as `9.0`.
///
/// # Errors
///
/// An unknown capability, with the nearest; a launch that no multiprocessor takes, with what it would.
pub fn occupancy(capability: &str, launch: KernelLaunch) -> Result<Occupancy, PlanError> {
    let limits = find(capability)?;
    let within = |what: &str, value: u64, least: u64, most: u64| {
        if (least..=most).contains(&value) {
            return Ok(());
        }
        let nearest = value.clamp(least, most);
        Err(PlanError::setting(
            what,
            value,
            format!("is outside {least} to {most} on {capability}"),
            format!("the nearest is {nearest}"),
        ))
    };
    within("threads", launch.threads, 1, 1024)?;
    within("registers", launch.registers, 1, 255)?;
    within("shared_bytes", launch.shared_bytes, 0, limits.shared_bytes_per_block)?;

    let warps = launch.threads.div_ceil(WARP);
    let registers_of_warp = (launch.registers * WARP).next_multiple_of(REGISTER_UNIT);
    let warps_by_registers = REGISTERS / registers_of_warp / PARTITIONS * PARTITIONS;
    let shared = (launch.shared_bytes + limits.shared_reserved).next_multiple_of(limits.shared_granularity);
    let mut blocks_by = vec![
        (Limit::Threads, limits.threads / WARP / warps),
        (Limit::Blocks, limits.blocks),
        (Limit::Registers, warps_by_registers / warps),
    ];
    if launch.shared_bytes > 0 {
        blocks_by.push((Limit::SharedMemory, limits.shared_bytes / shared));
    }
    let blocks = blocks_by.iter().map(|(_, n)| *n).min().unwrap_or(0);
    if blocks == 0 {
        let registers = REGISTERS / (warps.next_multiple_of(PARTITIONS) * REGISTER_UNIT) * REGISTER_UNIT / WARP;
        return Err(PlanError::setting(
            "registers",
            launch.registers,
            format!("of {} threads exceed the {REGISTERS} registers per multiprocessor", launch.threads),
            format!("the maximum for this block is {registers}"),
        ));
    }
    let limited_by = blocks_by.iter().filter(|(_, n)| *n == blocks).map(|(limit, _)| *limit).collect();
    Ok(Occupancy { blocks_by, blocks, warps: blocks * warps, max_warps: limits.threads / WARP, limited_by })
}

/// Bytes of shared memory that a block of compute capability `capability` can have.
///
/// # Errors
///
/// An unknown capability, with the nearest.
pub fn most_shared_bytes(capability: &str) -> Result<u64, PlanError> {
    Ok(find(capability)?.shared_bytes_per_block)
}

/// Multiply-adds in f32 that a multiprocessor of `capability` begins in a clock.
pub(super) fn f32_lanes(capability: &str) -> Option<u64> {
    find(capability).ok().map(|limits| limits.f32_lanes)
}

fn find(capability: &str) -> Result<MultiprocessorLimits, PlanError> {
    if let Some(limits) = LIMITS.get(capability) {
        return Ok(*limits);
    }
    let number = |name: &str| name.parse::<f64>().unwrap_or(0.0);
    let asked = number(capability);
    let mut known: Vec<&str> = LIMITS.keys().map(String::as_str).collect();
    known.sort_by(|a, b| number(a).total_cmp(&number(b)));
    let distance = |name: &&&str| (number(name) - asked).abs();
    let nearest = known.iter().min_by(|a, b| distance(a).total_cmp(&distance(b))).copied().unwrap_or_default();
    Err(PlanError::setting(
        "capability",
        capability,
        format!("is not one of {}", known.join(", ")),
        format!("the nearest is {nearest}"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(threads: u64, registers: u64, shared_bytes: u64) -> KernelLaunch {
        KernelLaunch { threads, registers, shared_bytes }
    }

    #[test]
    fn each_limit_can_be_the_one_that_is_reached() {
        for (shape, blocks, limit) in [
            (launch(1024, 32, 0), 2, Limit::Threads),
            (launch(32, 16, 0), 32, Limit::Blocks),
            (launch(256, 128, 0), 2, Limit::Registers),
            (launch(128, 32, 100 << 10), 2, Limit::SharedMemory),
        ] {
            let found = occupancy("9.0", shape).unwrap();
            assert_eq!(found.blocks, blocks, "{shape:?}");
            assert!(found.limited_by.contains(&limit), "{shape:?}: {found:?}");
        }
    }

    #[test]
    fn one_register_more_can_cost_an_eighth_of_the_warps() {
        assert_eq!(occupancy("8.0", launch(128, 64, 0)).unwrap().warps, 32);
        assert_eq!(occupancy("8.0", launch(128, 65, 0)).unwrap().warps, 28);
    }

    #[test]
    fn the_reserved_kilobyte_counts() {
        // Two blocks of 82 KiB are the 164 KiB of an A100 exactly, but each takes 1 KiB more.
        assert_eq!(occupancy("8.0", launch(128, 32, 82 << 10)).unwrap().blocks, 1);
        assert_eq!(occupancy("8.0", launch(128, 32, 81 << 10)).unwrap().blocks, 2);
    }

    #[test]
    fn what_cannot_be_launched_is_refused_with_the_nearest() {
        let message = |capability, shape| occupancy(capability, shape).unwrap_err().to_string();
        assert!(message("9.1", launch(128, 32, 0)).contains("the nearest is 9.0"));
        assert!(message("9.0", launch(2048, 32, 0)).contains("the nearest is 1024"));
        assert!(message("8.6", launch(128, 32, 163 << 10)).contains("101376"));
        assert!(message("9.0", launch(1024, 128, 0)).contains("the maximum for this block is 64"));
    }
}
