//! Products by every multiplier and in all pieces, of values whose sums are exact.

use super::block::{Block, GemmRoom, Sums};
use super::*;
use crate::bytes::MemoryBlock;

/// Numbers of bf16 between -1 and 1.
fn numbers(count: usize, seed: usize) -> Vec<bf16> {
    (0..count).map(|i| bf16::from_f32(((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0)).collect()
}

fn block<T>(of: &mut [T]) -> MemoryBlock {
    MemoryBlock { ptr: of.as_mut_ptr().cast(), bytes: size_of_val(of) }
}

/// All pieces of `gemm`, `at_once` together, in place or by the room.
fn product(gemm: &Gemm, inputs: &mut [Vec<bf16>], at_once: usize, in_place: bool) -> Vec<Vec<f32>> {
    let blocks: Vec<MemoryBlock> = inputs.iter_mut().map(|input| block(input)).collect();
    let mut results: Vec<Vec<f32>> = gemm.columns.iter().map(|n| vec![f32::NAN; gemm.rows() * n]).collect();
    let outputs: Vec<MemoryBlock> = results.iter_mut().map(|result| block(result)).collect();
    let mut prepared = vec![u32::MAX; gemm.preparation().bytes / size_of::<u32>()];
    let io = KernelIo { inputs: &blocks, outputs: &outputs, room: block(&mut prepared) };
    gemm.pack(&io, 0..gemm.preparation().pieces);
    let [packed, sums] = gemm.room(in_place);
    let (mut packed, mut sums) = (vec![u32::MAX; packed], vec![f32::NAN; sums]);
    let mut room = GemmRoom { packed: &mut packed, sums: &mut sums };
    let place = |block: &Block| {
        let columns = gemm.columns[block.result];
        let (first, size) = (block.rows.start * columns + block.columns.start, [block.rows.len(), block.columns.len()]);
        let out = io.output::<f32>(block.result);
        in_place.then(|| Sums { at: out.address(first, size, columns), stride: columns })
    };
    let copy = |block: &Block, sums: Sums| {
        let columns = gemm.columns[block.result];
        for (nth, row) in block.rows.clone().enumerate().filter(|_| !in_place) {
            let at = row * columns + block.columns.start;
            // SAFETY: one thread computes one piece after another, and sums have these rows.
            unsafe {
                let values = sums.row(nth, block.columns.len());
                io.output::<f32>(block.result).part(at..at + values.len()).copy_from_slice(values);
            }
        }
    };
    for first in (0..gemm.pieces()).step_by(at_once) {
        // SAFETY: places are those of the blocks, and all pieces are this thread's.
        unsafe { gemm.run(&io, first..gemm.pieces().min(first + at_once), &mut room, place, copy) };
    }
    results
}

/// Terms with operands in either order, and their data: one of A and one of B for each result.
fn terms(rows: usize, inner: &[usize], columns: &[usize], by_line: [bool; 2]) -> (Vec<Term>, Vec<Vec<bf16>>) {
    let mut inputs = Vec::new();
    let mut operand = |lines: usize, inner: usize, by_line: bool| {
        let input = inputs.len();
        inputs.push(numbers(lines * inner, 1 + input));
        if by_line {
            Operand::by_line(input, DType::BF16, lines, inner)
        } else {
            Operand::by_step(input, DType::BF16, lines)
        }
    };
    let mut term = |inner: &usize| {
        let a = operand(rows, *inner, by_line[0]);
        Term { inner: *inner, a, b: columns.iter().map(|n| operand(*n, *inner, by_line[1])).collect() }
    };
    (inner.iter().map(&mut term).collect(), inputs)
}

/// The products in f64, and the sums of the sizes of their terms.
fn exact(terms: &[Term], inputs: &[Vec<bf16>], result: usize, row: usize, column: usize) -> [f64; 2] {
    let mut sums = [0.0; 2];
    for term in terms {
        for step in 0..term.inner {
            let at = |of: &Operand, line: usize| {
                let lines = of.lines;
                inputs[of.input][line * lines.line_stride + step * lines.step_stride].to_f64()
            };
            let product = at(&term.a, row) * at(&term.b[result], column);
            sums = [sums[0] + product, sums[1] + product.abs()];
        }
    }
    sums
}

fn is_exact_and_the_same_in_all_pieces(micro: Micro) {
    for (rows, inner, columns, by_line) in [
        (1, &[1][..], &[1][..], [true, true]),
        (5, &[33, 7], &[70], [true, false]),
        (70, &[40, 0, 21], &[50], [true, false]),
        (100, &[31], &[13], [false, false]),
        (130, &[65], &[200, 49], [true, true]),
        (300, &[4100], &[49], [false, true]),
        (33, &[2100, 64], &[97], [true, false]),
        (3, &[0], &[2], [true, true]),
    ] {
        let (of, mut inputs) = terms(rows, inner, columns, by_line);
        let gemm = Gemm::by(micro, of);
        let all = product(&gemm, &mut inputs, usize::MAX, true);
        assert!(product(&gemm, &mut inputs, 1, true) == all, "{rows} x {inner:?} x {columns:?}, a piece at a time");
        assert!(product(&gemm, &mut inputs, 2, false) == all, "{rows} x {inner:?} x {columns:?}, not in place");
        for (result, all) in all.iter().enumerate() {
            for (i, got) in all.iter().enumerate().step_by(if inner[0] > 1000 { 37 } else { 1 }) {
                let (row, column) = (i / columns[result], i % columns[result]);
                let [sum, size] = exact(&gemm.terms, &inputs, result, row, column);
                assert!(
                    (f64::from(*got) - sum).abs() <= 1e-5 * size,
                    "{row}, {column} of {result}: {got} and not {sum}"
                );
            }
        }
    }
}

#[test]
fn products_of_f32_are_exact_and_the_same_in_all_pieces() {
    is_exact_and_the_same_in_all_pieces(Micro::in_vectors(Words::F32));
}

#[test]
fn products_of_pairs_are_exact_and_the_same_in_all_pieces() {
    if !Micro::multiplies_pairs() {
        ridge_testing::skip!("this machine has no products of bf16, or RIDGE_CPU_ISA leaves it out");
    }
    is_exact_and_the_same_in_all_pieces(Micro::new(Words::Pairs));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn products_on_emulated_tiles_are_exact_and_the_same_in_all_pieces() {
    is_exact_and_the_same_in_all_pieces(Micro::on_emulated_tiles());
}
