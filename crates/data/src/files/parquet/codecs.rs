//! The decompression of pages, in Rust and with a limit on the result.

use ::parquet::basic::Compression;
use ruzstd::decoding::StreamingDecoder;
use std::io::Read;

/// The reason why a page cannot be decompressed.
pub(super) enum Fault {
    /// The result would have more bytes than allowed.
    TooLarge,
    /// The bytes are damaged, or the codec is not supported.
    Bytes(String),
}

/// Returns the decompressed bytes of a page, at most `limit`.
pub(super) fn decompressed(codec: Compression, bytes: &[u8], limit: usize) -> Result<Vec<u8>, Fault> {
    match codec {
        Compression::UNCOMPRESSED => Ok(bytes.to_vec()),
        Compression::SNAPPY => {
            let length = snap::raw::decompress_len(bytes).map_err(|e| damaged("Snappy", &e))?;
            if length > limit {
                return Err(Fault::TooLarge);
            }
            snap::raw::Decoder::new().decompress_vec(bytes).map_err(|e| damaged("Snappy", &e))
        }
        Compression::GZIP(_) => read("gzip", flate2::read::MultiGzDecoder::new(bytes), limit),
        Compression::BROTLI(_) => read("Brotli", brotli_decompressor::Decompressor::new(bytes, 1 << 12), limit),
        Compression::ZSTD(_) => zstd(bytes, limit),
        Compression::LZ4_RAW => lz4(bytes, limit),
        Compression::LZ4 => lz4_of_hadoop(bytes, limit),
        other => Err(Fault::Bytes(format!(
            "expected pages that are compressed with zstd, Snappy, gzip, Brotli or LZ4, got {other:?}: \
             `pyarrow.parquet.write_table(pyarrow.parquet.read_table(FILE), NEW, compression='snappy')` compresses them again"
        ))),
    }
}

fn damaged(name: &str, error: &dyn std::fmt::Display) -> Fault {
    Fault::Bytes(format!("expected a page that is compressed with {name}: {error}"))
}

fn read(name: &str, decoder: impl Read, limit: usize) -> Result<Vec<u8>, Fault> {
    let mut whole = vec![];
    decoder.take(limit as u64 + 1).read_to_end(&mut whole).map_err(|e| damaged(name, &e))?;
    if whole.len() > limit { Err(Fault::TooLarge) } else { Ok(whole) }
}

/// Decompresses the frames of zstd.
fn zstd(mut bytes: &[u8], limit: usize) -> Result<Vec<u8>, Fault> {
    let mut whole = vec![];
    while !bytes.is_empty() {
        let decoder = StreamingDecoder::new(&mut bytes).map_err(|e| damaged("zstd", &e))?;
        whole.extend(read("zstd", decoder, limit - whole.len())?);
    }
    Ok(whole)
}

/// Decompresses a block of LZ4, which does not have its decompressed size.
fn lz4(bytes: &[u8], limit: usize) -> Result<Vec<u8>, Fault> {
    use lz4_flex::block::{DecompressError, decompress};
    let mut size = bytes.len().saturating_mul(4).max(1 << 12).min(limit.max(1));
    loop {
        match decompress(bytes, size) {
            Ok(whole) => return Ok(whole),
            Err(DecompressError::OutputTooSmall { .. }) if size >= limit => return Err(Fault::TooLarge),
            Err(DecompressError::OutputTooSmall { .. }) => size = size.saturating_mul(4).min(limit),
            Err(error) => return Err(damaged("LZ4", &error)),
        }
    }
}

/// Decompresses Hadoop's blocks of LZ4, each with its decompressed and its compressed size before it. Some writers name their blocks without
/// sizes the same.
fn lz4_of_hadoop(bytes: &[u8], limit: usize) -> Result<Vec<u8>, Fault> {
    match hadoop_blocks(bytes) {
        None => lz4(bytes, limit),
        Some(blocks) => {
            let mut whole: Vec<u8> = vec![];
            for (size, block) in blocks {
                if size > limit - whole.len() {
                    return Err(Fault::TooLarge);
                }
                whole.extend(lz4_flex::block::decompress(block, size).map_err(|e| damaged("LZ4", &e))?);
            }
            Ok(whole)
        }
    }
}

/// Returns the decompressed size and the bytes of each of Hadoop's blocks; `None` if the sizes do not fit.
fn hadoop_blocks(mut bytes: &[u8]) -> Option<Vec<(usize, &[u8])>> {
    let mut blocks = vec![];
    while !bytes.is_empty() {
        let (whole, rest) = bytes.split_first_chunk::<4>()?;
        let (size, rest) = rest.split_first_chunk::<4>()?;
        let (block, behind) = rest.split_at_checked(u32::from_be_bytes(*size) as usize)?;
        blocks.push((u32::from_be_bytes(*whole) as usize, block));
        bytes = behind;
    }
    Some(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::parquet::basic::{BrotliLevel, GzipLevel, ZstdLevel};

    /// 2000 times `q`, compressed by pyarrow; Hadoop's blocks of LZ4 have their sizes before pyarrow's bytes.
    #[test]
    fn every_codec_stops_at_the_limit() {
        let gzip = Compression::GZIP(GzipLevel::default());
        let brotli = Compression::BROTLI(BrotliLevel::default());
        let lz4 = "1f710100ffffffffffffffbe507171717171";
        let snappy = format!("d00f0071{}3a0100", "fe0100".repeat(31));
        for (codec, compressed) in [
            (Compression::SNAPPY, snappy),
            (gzip, "1f8b08000000000002032b2c1c05a360148c8251300a46c15007000ea1fc83d0070000".into()),
            (brotli, "1bcf070024e2c2b1401207".into()),
            (Compression::ZSTD(ZstdLevel::default()), "28b52ffd60d0064d00001071710100cbff000b".into()),
            (Compression::LZ4_RAW, lz4.into()),
            (Compression::LZ4, lz4.into()),
            (Compression::LZ4, format!("000007d000000012{lz4}")),
        ] {
            let digits = |at: usize| u8::from_str_radix(&compressed[at..at + 2], 16).unwrap();
            let bytes: Vec<u8> = (0..compressed.len()).step_by(2).map(digits).collect();
            for limit in [2000, 1 << 30] {
                assert!(
                    decompressed(codec, &bytes, limit).is_ok_and(|whole| whole == [b'q'; 2000]),
                    "{codec:?} {limit}"
                );
            }
            for limit in [0, 1, 1999] {
                assert!(matches!(decompressed(codec, &bytes, limit), Err(Fault::TooLarge)), "{codec:?} {limit}");
            }
            let cut = decompressed(codec, &bytes[..bytes.len() / 2], 2000);
            assert!(!cut.is_ok_and(|whole| whole.len() == 2000), "{codec:?}");
        }
        assert!(
            matches!(decompressed(Compression::LZO, b"a", 9), Err(Fault::Bytes(reason)) if reason.contains("snappy"))
        );
    }
}
