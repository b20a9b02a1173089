//! Fields of protocol buffers, and the checksums of the files that hold them.

/// A number in as few groups of 7 bits as it has.
pub(super) fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

/// A field that is an integer.
pub(super) fn integer(field: u64, value: u64) -> Vec<u8> {
    [varint(field << 3), varint(value)].concat()
}

/// A field that is text, bytes or a message.
pub(super) fn bytes(field: u64, value: &[u8]) -> Vec<u8> {
    [&varint(field << 3 | 2)[..], &varint(value.len() as u64), value].concat()
}

/// A field that is an f64.
pub(super) fn double(field: u64, value: f64) -> Vec<u8> {
    [&varint(field << 3 | 1)[..], &value.to_le_bytes()].concat()
}

/// A field that is an f32.
pub(super) fn float(field: u64, value: f32) -> Vec<u8> {
    [&varint(field << 3 | 5)[..], &value.to_le_bytes()].concat()
}

/// CRC-32C (Castagnoli; RFC 3720, appendix B.4).
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc(bytes, 0x82f6_3b78)
}

/// CRC-32 of Ethernet, gzip and PNG (ISO 3309).
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    crc(bytes, 0xedb8_8320)
}

/// By a polynomial whose highest power is the lowest bit.
fn crc(bytes: &[u8], polynomial: u32) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ (polynomial & 0_u32.wrapping_sub(crc & 1)))
    };
    !bytes.iter().fold(!0, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standards() {
        // RFC 3720, appendix B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }
}
