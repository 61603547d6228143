//! The TFRecord format: length, masked CRC-32C of the length, bytes, masked CRC-32C of the bytes; all little-endian.

use crc::{CRC_32_ISCSI, Crc, Table};

static CRC32C: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISCSI);

pub(super) fn append(record: &[u8], out: &mut Vec<u8>) {
    let length = (record.len() as u64).to_le_bytes();
    out.extend(length);
    out.extend(masked(&length).to_le_bytes());
    out.extend(record);
    out.extend(masked(record).to_le_bytes());
}

/// Iterates over the records up to the first incomplete or damaged one.
pub(super) fn records(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, rest) = bytes.split_first_chunk::<8>()?;
        let (check, rest) = rest.split_first_chunk::<4>()?;
        if masked(length) != u32::from_le_bytes(*check) {
            return None;
        }
        let (record, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        let (check, rest) = rest.split_first_chunk::<4>()?;
        bytes = rest;
        (masked(record) == u32::from_le_bytes(*check)).then_some(record)
    })
    .fuse()
}

/// Masks a checksum, so that it can be stored together with its bytes.
fn masked(bytes: &[u8]) -> u32 {
    CRC32C.checksum(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_matches_rfc_3720() {
        // RFC 3720, B.4.
        assert_eq!(CRC32C.checksum(&[0; 32]), 0x8a91_36aa);
        assert_eq!(CRC32C.checksum(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(CRC32C.checksum(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn tfrecord_framing_matches_tensorflow() {
        let mut bytes = Vec::new();
        append(b"abc", &mut bytes);
        // The bytes that TensorBoard's RecordWriter writes.
        let expected = [[3, 0, 0, 0], [0, 0, 0, 0], [0xb0, 0x99, 0x49, 0x0e]].concat();
        assert_eq!(bytes, [&expected[..], b"abc", &[0x6e, 0x57, 0xf1, 0x21]].concat());
    }

    #[test]
    fn tfrecord_reader_stops_at_the_first_incomplete_record() {
        let mut bytes = Vec::new();
        for record in [&b"one"[..], b"", b"three"] {
            append(record, &mut bytes);
        }
        assert_eq!(records(&bytes).collect::<Vec<_>>(), [&b"one"[..], b"", b"three"]);
        for cut in 1..5 + 16 {
            assert_eq!(records(&bytes[..bytes.len() - cut]).count(), 2, "{cut} bytes less");
        }
        bytes[13] ^= 1;
        assert_eq!(records(&bytes).count(), 0);
        bytes[..8].copy_from_slice(&[0xff; 8]);
        assert_eq!(records(&bytes).count(), 0);
    }
}
