//! Memory as blocks of bytes, and as elements of plain types.

/// Memory of one operand during a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryBlock {
    pub(crate) ptr: *mut u8,
    pub(crate) bytes: usize,
}

/// Plain old data that operands consist of.
///
/// # Safety
/// Every bit pattern is a value, and there is no padding. (Booleans are handled as `u8`.)
pub unsafe trait Pod: Copy + 'static {}

macro_rules! pod {
    ($($t:ty),*) => {$(
        // SAFETY: a number without padding, for which every bit pattern is a value.
        unsafe impl Pod for $t {}
    )*};
}
pod!(u8, i8, u16, i16, u32, i32, i64, u64, f32, f64, half::f16, half::bf16);

/// Memory as elements of `T`, of which any bits are one.
pub(crate) fn view<T: Pod>(bytes: &[u8]) -> &[T] {
    assert!((bytes.as_ptr() as usize).is_multiple_of(align_of::<T>()));
    // SAFETY: inside of the bytes, aligned as just checked, and any bits are an element.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// As [`view`], to be written.
pub(crate) fn cast<T: Pod>(bytes: &mut [u8]) -> &mut [T] {
    assert!((bytes.as_ptr() as usize).is_multiple_of(align_of::<T>()));
    // SAFETY: inside of the bytes, aligned as just checked, and any bits are an element.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// The bits of floats, to be written.
#[cfg(target_arch = "x86_64")]
pub(crate) fn bits_of(floats: &mut [f32]) -> &mut [u32] {
    // SAFETY: of one size and alignment, and any bits are an f32.
    unsafe { std::slice::from_raw_parts_mut(floats.as_mut_ptr().cast(), floats.len()) }
}
