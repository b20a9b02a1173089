//! The orientation that EXIF data say (Exif 3.0, section 4.6.5.1, tag 274): how the stored image is to be turned and
//! mirrored to be upright.

/// The orientation of an image, 1 to 8; 1 if `exif`, a TIFF file with or without `Exif\0\0` before it, does not say one.
pub(crate) fn orientation(exif: &[u8]) -> u8 {
    read(exif).filter(|value| (1..=8).contains(value)).unwrap_or(1)
}

fn read(exif: &[u8]) -> Option<u8> {
    const ORIENTATION: u16 = 0x0112;
    const SHORT: u16 = 3;
    let tiff = exif.strip_prefix(b"Exif\0\0").unwrap_or(exif);
    let little = match tiff.get(..2)? {
        b"II" => true,
        b"MM" => false,
        _ => return None,
    };
    let short = |at: usize| {
        let bytes: [u8; 2] = tiff.get(at..at.checked_add(2)?)?.try_into().ok()?;
        Some(if little { u16::from_le_bytes(bytes) } else { u16::from_be_bytes(bytes) })
    };
    let long = |at: usize| {
        let bytes: [u8; 4] = tiff.get(at..at.checked_add(4)?)?.try_into().ok()?;
        usize::try_from(if little { u32::from_le_bytes(bytes) } else { u32::from_be_bytes(bytes) }).ok()
    };
    let directory = long(4)?;
    // Twelve bytes an entry: tag, type, count and value.
    (0..usize::from(short(directory)?))
        .filter_map(|i| directory.checked_add(2 + 12 * i))
        .find(|at| short(*at) == Some(ORIENTATION) && short(at + 2) == Some(SHORT))
        .and_then(|at| short(at + 8))
        .and_then(|value| u8::try_from(value).ok())
}

/// Where the pixel at `(x, y)` of the upright image of `width` x `height` pixels is stored: its column and row.
pub(crate) fn stored_at(orientation: u8, (x, y): (usize, usize), (width, height): (usize, usize)) -> (usize, usize) {
    let (right, down) = (width - 1 - x, height - 1 - y);
    match orientation {
        2 => (right, y),
        3 => (right, down),
        4 => (x, down),
        5 => (y, x),
        6 => (y, right),
        7 => (down, right),
        8 => (down, x),
        _ => (x, y),
    }
}

/// Are width and height exchanged?
pub(crate) fn is_on_its_side(orientation: u8) -> bool {
    orientation >= 5
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A TIFF file of one entry.
    fn tiff(little: bool, tag: u16, value: u16) -> Vec<u8> {
        let short = |v: u16| if little { v.to_le_bytes() } else { v.to_be_bytes() };
        let long = |v: u32| if little { v.to_le_bytes() } else { v.to_be_bytes() };
        let mut bytes = if little { b"II".to_vec() } else { b"MM".to_vec() };
        bytes.extend(short(42));
        bytes.extend(long(8));
        for field in [short(1), short(tag), short(3)] {
            bytes.extend(field);
        }
        bytes.extend(long(1));
        bytes.extend([short(value), short(0)].concat());
        bytes
    }

    #[test]
    fn the_orientation_is_read_in_both_byte_orders_and_cut_anywhere() {
        for little in [true, false] {
            let whole = tiff(little, 0x0112, 6);
            assert_eq!(orientation(&whole), 6);
            assert_eq!(orientation(&[b"Exif\0\0", &whole[..]].concat()), 6);
            for end in 0..whole.len() - 2 {
                assert_eq!(orientation(&whole[..end]), 1);
            }
            assert_eq!(orientation(&tiff(little, 0x0112, 9)), 1);
            assert_eq!(orientation(&tiff(little, 0x0113, 6)), 1);
        }
    }

    #[test]
    fn each_orientation_is_undone() {
        // Stored as a, b / c, d / e, f: two columns, three rows.
        let stored = [["a", "b"], ["c", "d"], ["e", "f"]];
        let upright = |orientation: u8| {
            let (width, height) = if is_on_its_side(orientation) { (3, 2) } else { (2, 3) };
            let pixel = |x, y| {
                let (column, row) = stored_at(orientation, (x, y), (width, height));
                stored[row][column]
            };
            (0..height).map(|y| (0..width).map(|x| pixel(x, y)).collect::<String>()).collect::<Vec<_>>().join("/")
        };
        assert_eq!([1, 2, 3, 4].map(upright), ["ab/cd/ef", "ba/dc/fe", "fe/dc/ba", "ef/cd/ab"]);
        assert_eq!([5, 6, 7, 8].map(upright), ["ace/bdf", "eca/fdb", "fdb/eca", "bdf/ace"]);
    }
}
