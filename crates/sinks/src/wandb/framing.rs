//! The framing of a `.wandb` file: LevelDB's log format with a different file header and zlib's CRC-32.
//!
//! The file consists of blocks of 32 KiB. A record is stored in one block or in parts; every part has a header of 7
//! bytes: checksum of type and bytes, length, type. Bytes at the end of a block that cannot hold a header are zero.

use crc::{CRC_32_ISO_HDLC, Crc, Table};

static CRC32: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISO_HDLC);

/// `:W&B`, a magic number, version 0.
pub(super) const FILE_HEADER: [u8; 7] = [b':', b'W', b'&', b'B', 0xe1, 0xbe, 0];
const BLOCK: usize = 1 << 15;
const HEADER: usize = 7;
const FULL: u8 = 1;
const FIRST: u8 = 2;
const MIDDLE: u8 = 3;
const LAST: u8 = 4;

/// Returns the bytes of a record at the end of a file of `offset` bytes.
pub(super) fn frame(mut record: &[u8], mut offset: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(record.len() + 2 * HEADER);
    let mut is_first = true;
    loop {
        let mut left = BLOCK - (offset % BLOCK as u64) as usize;
        if left < HEADER {
            out.resize(out.len() + left, 0);
            offset += left as u64;
            left = BLOCK;
        }
        let (part, rest) = record.split_at(record.len().min(left - HEADER));
        let kind = match (is_first, rest.is_empty()) {
            (true, true) => FULL,
            (true, false) => FIRST,
            (false, false) => MIDDLE,
            (false, true) => LAST,
        };
        out.extend(checksum(kind, part).to_le_bytes());
        // The length is less than a block.
        out.extend((part.len() as u16).to_le_bytes());
        out.push(kind);
        out.extend(part);
        if rest.is_empty() {
            return out;
        }
        offset += (HEADER + part.len()) as u64;
        (record, is_first) = (rest, false);
    }
}

/// Returns the records of a file and the end of the last complete one; `None` if the file has another format.
pub(super) fn records(file: &[u8]) -> Option<(Vec<Vec<u8>>, u64)> {
    if !file.starts_with(&FILE_HEADER) {
        // The header is incomplete.
        return FILE_HEADER.starts_with(file).then_some((Vec::new(), 0));
    }
    let (mut offset, mut end) = (FILE_HEADER.len(), FILE_HEADER.len());
    let mut records: Vec<Vec<u8>> = Vec::new();
    let mut begun: Option<Vec<u8>> = None;
    while let Some((kind, part, next)) = part_at(file, offset) {
        let record = match (kind, begun.take()) {
            (FULL | FIRST, None) => part.to_vec(),
            (MIDDLE | LAST, Some(begun)) => [begun, part.to_vec()].concat(),
            _ => break,
        };
        offset = next;
        if matches!(kind, FULL | LAST) {
            records.push(record);
            end = offset;
        } else {
            begun = Some(record);
        }
    }
    Some((records, end as u64))
}

/// Returns type and bytes of the part at `offset`, and the start of the next one; `None` if the part is incomplete.
fn part_at(file: &[u8], mut offset: usize) -> Option<(u8, &[u8], usize)> {
    let left = BLOCK - offset % BLOCK;
    if left < HEADER {
        offset += left;
    }
    let (header, rest) = file.get(offset..)?.split_first_chunk::<HEADER>()?;
    let [c0, c1, c2, c3, l0, l1, kind] = *header;
    let length = u16::from_le_bytes([l0, l1]) as usize;
    let part = rest.get(..length)?;
    (checksum(kind, part) == u32::from_le_bytes([c0, c1, c2, c3])).then_some((kind, part, offset + HEADER + length))
}

fn checksum(kind: u8, part: &[u8]) -> u32 {
    let mut digest = CRC32.digest();
    digest.update(&[kind]);
    digest.update(part);
    digest.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn file(lengths: &[usize]) -> Vec<u8> {
        let mut file = FILE_HEADER.to_vec();
        for (k, length) in lengths.iter().enumerate() {
            let record: Vec<u8> = (0..*length).map(|i| ((i + k) % 251) as u8).collect();
            file.extend(frame(&record, file.len() as u64));
        }
        file
    }

    #[test]
    fn wandb_framing_matches_the_sdk() {
        // Written by the DataStore of wandb 0.28.
        let expected = [0x3a, 0x57, 0x26, 0x42, 0xe1, 0xbe, 0, 0x14, 0xe8, 0xed, 0x6e, 3, 0, 1, 0, 1, 2];
        assert_eq!(file(&[3]), expected);
    }

    /// Lengths of files and their CRC-32 from the DataStore of wandb 0.28.
    #[rstest]
    #[case::fills_the_block(&[32754], 32768, 0xc4bc_bd96)]
    #[case::one_byte_goes_to_the_next_block(&[32755], 32776, 0xfeb8_9184)]
    #[case::six_bytes_are_left(&[32741, 10], 32779, 0x1c9c_48d6)]
    #[case::room_for_a_header_only(&[32747, 10], 32785, 0xa7a7_90fd)]
    #[case::four_blocks(&[100_000, 10], 100_052, 0xe77c_1676)]
    fn wandb_block_ends_match_the_sdk(#[case] lengths: &[usize], #[case] bytes: usize, #[case] crc: u32) {
        let file = file(lengths);
        assert_eq!((file.len(), CRC32.checksum(&file)), (bytes, crc));
        let (records, end) = records(&file).unwrap();
        assert_eq!(records.iter().map(Vec::len).collect::<Vec<_>>(), lengths);
        assert_eq!(end as usize, file.len());
    }

    #[test]
    fn wandb_reader_stops_at_incomplete_or_damaged_records() {
        let whole = file(&[10, 70_000, 20]);
        let first_two = file(&[10, 70_000]).len();
        for end in [whole.len() - 1, first_two + 3, first_two] {
            let (found, good) = records(&whole[..end]).unwrap();
            assert_eq!((found.len(), good as usize), (2, first_two), "{end}");
        }
        let (found, good) = records(&whole[..40_000]).unwrap();
        assert_eq!((found.len(), good as usize), (1, 7 + 7 + 10));
        let mut damaged = whole;
        damaged[20] ^= 1;
        assert_eq!(records(&damaged).unwrap(), (Vec::new(), 7));
        assert_eq!(records(&FILE_HEADER[..4]).unwrap(), (Vec::new(), 0));
        assert_eq!(records(b"PK"), None);
    }
}
