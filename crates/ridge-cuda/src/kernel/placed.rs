//! The same work on operands at other places.

use super::{DeviceAction, KernelCandidate, LaunchArg, OperandSlot, SlotOffset};

/// Where an operand is.
type Place<'a> = &'a dyn Fn(OperandSlot) -> SlotOffset;

fn moved((slot, offset): SlotOffset, place: Place<'_>) -> SlotOffset {
    let (slot, base) = place(slot);
    (slot, base + offset)
}

impl LaunchArg {
    fn placed(self, place: Place<'_>) -> Self {
        match self {
            Self::Pointer(slot, offset) => {
                let (slot, offset) = moved((slot, offset), place);
                Self::Pointer(slot, offset)
            }
            Self::Pointers(all) => Self::Pointers(all.into_iter().map(|at| moved(at, place)).collect()),
            Self::Matrix { at, dtype, extents, tile } => Self::Matrix { at: moved(at, place), dtype, extents, tile },
            Self::Groups { at, dtype, extents, groups } => {
                Self::Groups { at: moved(at, place), dtype, extents, groups }
            }
            Self::CodeRows { at, dtype, extents, rows } => {
                Self::CodeRows { at: moved(at, place), dtype, extents, rows }
            }
            Self::Numbers(_) | Self::Float(_) => self,
        }
    }
}

impl DeviceAction {
    /// The action with each operand where `place` says that it is.
    ///
    /// # Errors
    /// When the action cannot begin within an operand.
    pub(crate) fn placed(self, place: Place<'_>) -> Result<Self, String> {
        let all = |actions: Vec<Self>| actions.into_iter().map(|a| a.placed(place)).collect::<Result<Vec<_>, _>>();
        let whole = |slot| match place(slot) {
            (slot, 0) => Ok(slot),
            (slot, offset) => Err(format!("an action takes {slot:?} as a whole, not from byte {offset}")),
        };
        Ok(match self {
            Self::Launch { source, grid, threads, shared, args, prefetched } => Self::Launch {
                source,
                grid,
                threads,
                shared,
                args: args.into_iter().map(|arg| arg.placed(place)).collect(),
                prefetched: prefetched.into_iter().map(|slot| place(slot).0).collect(),
            },
            Self::Product { shape, x, w, r, bias, aux, y, scales, otherwise } => Self::Product {
                shape,
                x: moved(x, place),
                w: moved(w, place),
                r: r.map(|at| moved(at, place)),
                bias: bias.map(|at| moved(at, place)),
                aux: aux.map(|at| moved(at, place)),
                y: moved(y, place),
                scales: scales.map(|both| both.map(|at| moved(at, place))),
                otherwise: all(otherwise)?,
            },
            Self::Autotuned { key, operands, candidates } => Self::Autotuned {
                key,
                operands: operands.into_iter().map(|(at, dtype, n)| (moved(at, place), dtype, n)).collect(),
                candidates: candidates
                    .into_iter()
                    .map(|c| Ok(KernelCandidate { actions: all(c.actions)?, ..c }))
                    .collect::<Result<_, String>>()?,
            },
            Self::ByArch { arch, actions, otherwise } => {
                Self::ByArch { arch, actions: all(actions)?, otherwise: all(otherwise)? }
            }
            Self::Copy { from, to, to_offset, bytes } => {
                let (to, to_offset) = moved((to, to_offset), place);
                Self::Copy { from: whole(from)?, to, to_offset, bytes }
            }
            Self::Constant { bytes, to } => Self::Constant { bytes, to: whole(to)? },
            Self::Collective(_) => return Err("what is communicated is not a part of a group".into()),
        })
    }
}
