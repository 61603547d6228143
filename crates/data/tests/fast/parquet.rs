//! Parquet files written by pyarrow (fixtures/make_parquet.py).

use crate::support::{config, file, open, without_split};
use grpo_data::{DataConfig, Dataset};
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet").join(format!("{name}.parquet"))
}

/// Every codec of pyarrow, with the first and the second version of data pages.
#[test]
fn parquet_rows_match_pyarrow_in_every_codec() {
    for codec in ["none", "snappy", "gzip", "brotli", "zstd", "lz4"] {
        for version in ["1.0", "2.0"] {
            let path = fixture(&format!("{codec}-{version}"));
            let (mut rows, report) = open(&DataConfig { shuffle: false, ..without_split(path) }).unwrap();
            assert_eq!(report.files[0].rows, 3, "{codec}");
            let items = rows.next_batch(3).unwrap();
            assert_eq!(items[0].prompt.to_string(), "user: naïve 你好\nassistant: ja\nuser: 6 x 7?");
            assert_eq!((items[0].answer.as_deref(), items[0].columns["level"].as_f64()), (Some("42"), Some(2.5)));
            assert_eq!(items[2].prompt.to_string(), "user: third");
            assert!(items[1].columns["tags"].as_array().is_some_and(|tags| tags.len() == 2));
        }
    }
}

#[test]
fn values_that_share_their_beginnings_are_read_from_parquet() {
    let path = fixture("prefixes");
    let (mut rows, _) = open(&DataConfig { shuffle: false, ..without_split(path) }).unwrap();
    let last = rows.next_batch(500).unwrap().pop().unwrap();
    assert_eq!((last.prompt.to_string().as_str(), last.answer.as_deref()), ("What is 6 x 499?", Some("2994")));
}

#[test]
fn an_invalid_parquet_file_is_an_error() {
    let (_folder, path) = file("rows.parquet", "PAR1 is not enough");
    let text = open(&config(path)).err().unwrap().to_string();
    assert!(text.contains("rows.parquet: expected a Parquet file"), "{text}");
}

#[test]
fn damaged_parquet_files_are_errors_and_no_panics() {
    assert_damaged_bytes_are_errors(23);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn parquet_files_with_any_damaged_byte_are_errors_and_no_panics() {
    assert_damaged_bytes_are_errors(1);
}

/// Every `step`th byte of pages and metadata is changed in turn. Some changes leave the rows as they are, or change a text.
fn assert_damaged_bytes_are_errors(step: usize) {
    for name in ["zstd-1.0", "gzip-2.0", "snappy-1.0", "lz4-2.0", "brotli-1.0", "none-2.0", "prefixes"] {
        let whole = std::fs::read(fixture(name)).unwrap();
        let mut refused = 0;
        for at in (4..whole.len()).step_by(step) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x55;
            let (_folder, path) = file("rows.parquet", &bytes);
            refused += usize::from(open(&config(path)).is_err());
        }
        let changed = whole.len() / step;
        assert!(20 * refused > 3 * changed, "{name}: {refused} of {changed}");
    }
}
