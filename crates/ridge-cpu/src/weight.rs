//! Weights, each in the layout that was settled for it, or in rows as steps want them.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use ridge_runtime::{MemoryLedger, MemoryOwner, Result, WeightData};

use crate::bytes::MemoryBlock;
use crate::memory::{ALIGN, AlignedMemory, SMALL};
use crate::packing::Packing;
use crate::placement::Placement;

/// A weight. What is made of it is made once, by all threads: panels when they are settled for it, rows when a step that
/// wants them is prepared.
pub(crate) struct StoredWeight {
    bytes: usize,
    /// Bytes of its rows, and where what is behind them begins: scales of codes, which stay behind them when those are packed.
    rows: usize,
    behind: usize,
    /// How it may be packed.
    packing: Option<Packing>,
    placement: Placement,
    ledger: Arc<MemoryLedger>,
    forms: Mutex<WeightForms>,
}

/// What there is of a weight: never nothing, and rows that can be made again from the rest are kept no longer than somebody
/// uses them.
struct WeightForms {
    /// Where it lies, such as in a mapped file, if it stays there.
    given: Option<WeightData>,
    /// Row-major, on cache lines and huge pages, if there is nothing to make it from.
    rows: Option<Arc<AlignedMemory>>,
    /// The like, if somebody uses it.
    used_rows: Weak<AlignedMemory>,
    /// Packed, with the elements of a row.
    panels: Option<(Arc<AlignedMemory>, usize)>,
}

/// A weight in the form that a step wants it in.
pub(crate) enum BoundWeight {
    Given(WeightData),
    Rows(Arc<AlignedMemory>),
    Panels(Arc<AlignedMemory>),
}

impl BoundWeight {
    pub(crate) fn block(&self) -> MemoryBlock {
        match self {
            Self::Rows(memory) | Self::Panels(memory) => memory.block(),
            Self::Given(data) => {
                let bytes = data.bytes();
                MemoryBlock { ptr: bytes.as_ptr().cast_mut(), bytes: bytes.len() }
            }
        }
    }

    /// The bytes of panels, if it is those: more than the weight has.
    pub(crate) fn bytes_of_panels(&self) -> Option<usize> {
        match self {
            Self::Panels(memory) => Some(memory.block().bytes),
            Self::Rows(_) | Self::Given(_) => None,
        }
    }
}

impl StoredWeight {
    /// A file's bytes stay where they are, if they are many; others are copied to huge pages, which small ones share.
    ///
    /// # Errors
    /// When memory runs out.
    pub(crate) fn new(
        data: WeightData,
        packing: Option<Packing>,
        placement: Placement,
        ledger: &Arc<MemoryLedger>,
    ) -> Result<Self> {
        let bytes = data.bytes().len();
        let stays = bytes > SMALL && matches!(data, WeightData::Shared(..));
        let rows = if stays { None } else { Some(copied(data.bytes(), &placement, ledger)?) };
        let forms =
            Mutex::new(WeightForms { given: stays.then_some(data), rows, used_rows: Weak::new(), panels: None });
        Ok(Self { bytes, rows: bytes, behind: bytes, packing, placement, ledger: Arc::clone(ledger), forms })
    }

    /// Of `rows` bytes of codes, and of scales from byte `behind` on.
    pub(crate) fn with_scales(
        memory: AlignedMemory,
        [rows, behind]: [usize; 2],
        packing: Option<Packing>,
        placement: Placement,
        ledger: &Arc<MemoryLedger>,
    ) -> Self {
        let bytes = memory.block().bytes;
        let rows_of = Some(Arc::new(memory));
        let forms = Mutex::new(WeightForms { given: None, rows: rows_of, used_rows: Weak::new(), panels: None });
        Self { bytes, rows, behind, packing, placement, ledger: Arc::clone(ledger), forms }
    }

    /// Row-major: where it lies if that begins on a cache line, as vectors want it.
    ///
    /// # Errors
    /// When memory runs out.
    pub(crate) fn rows(&self) -> Result<BoundWeight> {
        let forms = &mut *self.forms.lock().unwrap_or_else(PoisonError::into_inner);
        let on_lines = |data: &&WeightData| data.bytes().as_ptr().addr().is_multiple_of(ALIGN);
        if let Some(data) = forms.given.as_ref().filter(on_lines) {
            return Ok(BoundWeight::Given(data.clone()));
        }
        self.copy_of(forms).map(BoundWeight::Rows)
    }

    /// Row-major in memory of its own.
    fn copy_of(&self, forms: &mut WeightForms) -> Result<Arc<AlignedMemory>> {
        if let Some(rows) = forms.rows.clone().or_else(|| forms.used_rows.upgrade()) {
            return Ok(rows);
        }
        let rows = match (&forms.given, &forms.panels) {
            (Some(data), _) => copied(data.bytes(), &self.placement, &self.ledger)?,
            (None, Some((panels, inner))) => {
                let rows = AlignedMemory::zeroed(&self.ledger, MemoryOwner::Weights, self.bytes)?;
                // SAFETY: the rows were just allocated, and panels are not written once they are made.
                let (panels, to) = unsafe { (panels.bytes(), rows.bytes_mut()) };
                if let Some(packing) = self.packing {
                    let [pieces, piece] = packing.pieces(self.rows, *inner);
                    let (panels, behind) = panels.split_at(pieces * piece);
                    packing.unpack(panels, *inner, &mut to[..self.rows]);
                    to[self.behind..].copy_from_slice(behind);
                }
                Arc::new(rows)
            }
            (None, None) => unreachable!("a weight has a form"),
        };
        forms.used_rows = Arc::downgrade(&rows);
        Ok(rows)
    }

    /// Is it packed, with rows of `inner` elements?
    pub(crate) fn is_in_panels(&self, inner: usize) -> bool {
        self.forms.lock().unwrap_or_else(PoisonError::into_inner).panels.as_ref().is_some_and(|p| p.1 == inner)
    }

    /// The name of the layout that it may be packed in.
    pub(crate) fn layout(&self) -> Option<&'static str> {
        self.packing.map(Packing::layout)
    }

    /// Packed, its rows `inner` elements long; in rows where it has no packing. Rows in memory of its own are given up for
    /// panels.
    ///
    /// # Errors
    /// When memory runs out.
    pub(crate) fn panels(&self, inner: usize) -> Result<BoundWeight> {
        let Some(packing) = self.packing else { return self.rows() };
        let forms = &mut *self.forms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((panels, _)) = forms.panels.as_ref().filter(|p| p.1 == inner) {
            return Ok(BoundWeight::Panels(Arc::clone(panels)));
        }
        let aligned = |data: &&WeightData| data.bytes().as_ptr().addr().is_multiple_of(2);
        let given = forms.given.clone();
        let mut own = None;
        let rows = match given.as_ref().filter(aligned) {
            Some(data) => data.bytes(),
            None => {
                let own = own.insert(self.copy_of(forms)?);
                // SAFETY: rows are not written once they are made.
                unsafe { own.bytes() }
            }
        };
        let (rows, behind) = (&rows[..self.rows], &rows[self.behind..]);
        let [pieces, piece] = packing.pieces(rows.len(), inner);
        let made = AlignedMemory::zeroed(&self.ledger, MemoryOwner::Weights, pieces * piece + behind.len())?;
        // SAFETY: just allocated.
        let (to, scales) = unsafe { made.bytes_mut() }.split_at_mut(pieces * piece);
        scales.copy_from_slice(behind);
        let share = pieces.div_ceil(self.placement.threads()).max(LEAST.div_ceil(piece.max(1))).max(1);
        self.placement.for_each_part(to.chunks_mut((share * piece).max(1)), |nth, to| {
            packing.pack(rows, inner, nth * share, to);
        });
        // Panels hold whole rows: elements behind the last are nowhere else.
        let whole = forms.given.is_some() || rows.len().is_multiple_of(packing.row_bytes(inner).max(1));
        let made = Arc::new(made);
        forms.panels = Some((Arc::clone(&made), inner));
        if let Some(own) = own {
            forms.used_rows = Arc::downgrade(&own);
            forms.rows = (!whole).then_some(own);
        }
        Ok(BoundWeight::Panels(made))
    }
}

/// Bytes that a thread is started for.
const LEAST: usize = 4 << 20;

fn copied(from: &[u8], placement: &Placement, ledger: &Arc<MemoryLedger>) -> Result<Arc<AlignedMemory>> {
    let memory = AlignedMemory::zeroed(ledger, MemoryOwner::Weights, from.len())?;
    // SAFETY: just allocated; no step knows it.
    copy(from, unsafe { memory.bytes_mut() }, placement);
    Ok(Arc::new(memory))
}

/// Copies by as many threads as there are, where it is enough to start them for.
pub(crate) fn copy(from: &[u8], to: &mut [u8], placement: &Placement) {
    let share = from.len().div_ceil(placement.threads()).max(LEAST);
    let shares = from.chunks(share).zip(to.chunks_mut(share));
    placement.for_each_part(shares, |_, (from, to)| to.copy_from_slice(from));
}

#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests {
    use super::*;

    fn rows_of(weight: &StoredWeight) -> Vec<u8> {
        let rows = weight.rows().unwrap();
        let block = rows.block();
        // SAFETY: the rows live, and are not written.
        unsafe { std::slice::from_raw_parts(block.ptr, block.bytes) }.to_vec()
    }

    #[test]
    fn a_weight_has_the_same_rows_after_panels_of_any_width() {
        if crate::simd::isa() != crate::simd::Isa::Amx {
            ridge_testing::skip!("this machine has no AMX");
        }
        // Rows that fill panels and such that do not; elements that are left behind the last row of one width.
        for (rows, inner, other) in
            [(64, 64, 128), (33, 70, 32), (5, 2081, 33), (1, 40, 64), (0, 32, 64), (2100, 70, 35)]
        {
            let bytes: Vec<u8> = (0..2 * rows * inner).map(|i| (i * i / 7) as u8).collect();
            let file: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new([&[0; 3], &bytes[..]].concat());
            let shared = WeightData::Shared(file, 3..3 + bytes.len());
            for data in [WeightData::Owned(bytes.clone()), shared] {
                let weight =
                    StoredWeight::new(data, Some(Packing::Tiles), Placement::anywhere(3), &Arc::default()).unwrap();
                for inner in [inner, other, inner] {
                    let panels = weight.panels(inner).unwrap();
                    assert!(panels.bytes_of_panels() >= Some(bytes.len() / (2 * inner) * 2 * inner));
                    assert!(rows_of(&weight) == bytes, "{rows} rows of {inner}");
                }
            }
        }
    }

    #[test]
    fn rows_beside_panels_are_shared_while_they_are_used_and_then_given_up() {
        if crate::simd::isa() != crate::simd::Isa::Amx {
            ridge_testing::skip!("this machine has no AMX");
        }
        let data = WeightData::Owned(vec![7; 2 * 40 * 64]);
        let weight = StoredWeight::new(data, Some(Packing::Tiles), Placement::anywhere(1), &Arc::default()).unwrap();
        let before = weight.rows().unwrap();
        weight.panels(64).unwrap();
        let after = weight.rows().unwrap();
        assert_eq!(before.block().ptr, after.block().ptr);
        let kept = weight.forms.lock().unwrap().used_rows.clone();
        drop(before);
        assert!(kept.upgrade().is_some());
        drop(after);
        assert!(kept.upgrade().is_none());
    }
}
