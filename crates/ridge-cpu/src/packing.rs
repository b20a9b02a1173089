//! The layouts that weights are repacked in when they are loaded, as kernels' offers name them.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use ridge_graph::format::{BlockFormat, CodeType, ScaleLayout, ScaledFormat, SignedBytes};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use ridge_graph::with_block_format;
use ridge_graph::{DType, FormatRef, Type};

#[cfg(target_arch = "x86_64")]
use crate::amx::panels;
use crate::bytes::{cast, view};
use crate::interleave::{Interleaving, Line};
use crate::kernel::OperandType;
use crate::simd::{Isa, isa};

/// A layout of a weight's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Of bf16, for matrix tiles (`amx/panels.rs`).
    #[cfg(target_arch = "x86_64")]
    Tiles,
    /// 16 rows word by word (`interleave.rs`), in blocks of so many elements and bytes.
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        expect(dead_code, reason = "only AVX2 and NEON have weights so")
    )]
    Words([usize; 2]),
}

/// Words of E4M3 codes.
#[cfg(target_arch = "x86_64")]
pub(crate) const FLOAT_CODES: [usize; 2] = [4, 4];

/// Elements and bytes of a block of `format`. Codes with scales are interleaved as blocks without: scales lie behind them. 8-bit floats
/// are so where they become pairs of bf16.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn block(isa: Isa, format: &FormatRef) -> Option<[usize; 2]> {
    use ScaleLayout::{Row, Tensor};
    match format.downcast::<ScaledFormat>() {
        Some(ScaledFormat { codes: CodeType::Int8, scales: Row | Tensor }) => {
            return Some([SignedBytes::ELEMENTS, SignedBytes::BYTES]);
        }
        #[cfg(target_arch = "x86_64")]
        Some(ScaledFormat { codes: CodeType::F8E4M3, scales: Row | Tensor | ScaleLayout::Block })
            if has_float_codes(isa) =>
        {
            return Some(FLOAT_CODES);
        }
        Some(_) => return None,
        None => {}
    }
    let _ = isa;
    with_block_format!(format.name(), B => Some([B::ELEMENTS, B::BYTES]), _ => None)
}

/// Are codes of E4M3 multiplied as pairs of bf16 with `isa`? Of processors with instructions for bf16 Cooper Lake alone has none
/// that look bytes up.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_float_codes(isa: Isa) -> bool {
    isa >= Isa::Avx512Bf16 && is_x86_feature_detected!("avx512vbmi")
}

impl Packing {
    /// How a weight of type `ty` is packed for products on this machine, if it is.
    pub(crate) fn of(ty: &Type) -> Option<Self> {
        Self::on(isa(), ty)
    }

    /// As [`Packing::of`], on an instruction set by its name.
    pub(crate) fn on_named(isa: &str, ty: &Type) -> Option<Self> {
        Isa::named(isa).and_then(|isa| Self::on(isa, ty))
    }

    /// As [`Packing::of`].
    pub(crate) fn of_operand(operand: &OperandType) -> Option<Self> {
        Self::by(isa(), operand.format.as_ref(), operand.dtype)
    }

    /// As [`Packing::of`], on an instruction set.
    pub(crate) fn on(isa: Isa, ty: &Type) -> Option<Self> {
        Self::by(isa, ty.format.as_ref(), ty.dtype)
    }

    fn by(isa: Isa, format: Option<&FormatRef>, dtype: DType) -> Option<Self> {
        match (isa, format, dtype) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx, None, DType::BF16) => Some(Self::Tiles),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, None, DType::BF16) => Some(Self::Words([1, 2])),
            #[cfg(target_arch = "x86_64")]
            (
                Isa::Avx2 | Isa::AvxVnni | Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 | Isa::Amx,
                Some(format),
                _,
            ) => block(isa, format).map(Self::Words),
            #[cfg(target_arch = "aarch64")]
            (Isa::NeonBf16, None, DType::BF16) => Some(Self::Words([1, 2])),
            #[cfg(target_arch = "aarch64")]
            (Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm | Isa::NeonBf16, Some(format), _) => {
                block(isa, format).map(Self::Words)
            }
            _ => None,
        }
    }

    /// As offers name it.
    pub(crate) fn layout(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Tiles => "panels",
            Self::Words(_) => "interleaved",
        }
    }

    /// Bytes of a row of `inner` elements before it is packed.
    pub(crate) fn row_bytes(self, inner: usize) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Tiles => 2 * inner,
            Self::Words(block) => Interleaving::new(inner, block).row_bytes(),
        }
    }

    /// How many pieces `bytes` bytes of rows of `inner` elements become, and the bytes of one.
    pub(crate) fn pieces(self, bytes: usize, inner: usize) -> [usize; 2] {
        let rows = bytes / self.row_bytes(inner).max(1);
        let [all, rows_of_piece] = match self {
            #[cfg(target_arch = "x86_64")]
            Self::Tiles => [panels::bytes([rows, inner]), crate::amx::COLUMNS],
            Self::Words(block) => [Interleaving::new(inner, block).bytes(rows), crate::interleave::ROWS],
        };
        let pieces = rows.div_ceil(rows_of_piece);
        [pieces, all / pieces.max(1)]
    }

    /// Bytes of `rows` rows of `inner` elements so packed.
    pub(crate) fn bytes(self, rows: usize, inner: usize) -> usize {
        let [pieces, piece] = self.pieces(rows * self.row_bytes(inner), inner);
        pieces * piece
    }

    /// Packs rows of `inner` elements into the pieces that `to` has room for, from piece `first` on.
    pub(crate) fn pack(self, rows: &[u8], inner: usize, first: usize, to: &mut [u8]) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Tiles => panels::pack(view(rows), inner, first, cast::<u32>(to).as_chunks_mut().0),
            Self::Words(block) => {
                Interleaving::new(inner, block).pack(rows, first, cast::<u32>(to).as_chunks_mut().0);
            }
        }
    }

    /// The rows of `inner` elements that `packed` holds, as many as `to` has room for.
    pub(crate) fn unpack(self, packed: &[u8], inner: usize, to: &mut [u8]) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Tiles => panels::unpack(view::<u32>(packed).as_chunks().0, inner, cast(to)),
            Self::Words(block) => {
                let interleaving = Interleaving::new(inner, block);
                let lines: &[Line] = view::<u32>(packed).as_chunks().0;
                for (row, to) in to.chunks_exact_mut(interleaving.row_bytes().max(1)).enumerate() {
                    interleaving.row(lines, row, to);
                }
            }
        }
    }
}
