//! Parquet files written by pyarrow (fixtures/make_parquet.py).

use crate::support::{config, file, open, without_split};
use data::{DataConfig, Dataset};
use std::path::Path;

#[test]
fn parquet_rows_match_pyarrow() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/rows.parquet");
    let (mut rows, report) = open(&DataConfig { shuffle: false, ..without_split(path) }).unwrap();
    assert_eq!(report.files[0].rows, 3);
    let items = rows.next_batch(3).unwrap();
    assert_eq!(items[0].prompt.to_string(), "user: naïve 你好\nassistant: ja\nuser: 6 x 7?");
    assert_eq!((items[0].answer.as_deref(), items[0].columns["level"].as_f64()), (Some("42"), Some(2.5)));
    assert_eq!(items[2].prompt.to_string(), "user: third");
    assert!(items[1].columns["tags"].as_array().is_some_and(|tags| tags.len() == 2));
}

#[test]
fn an_invalid_parquet_file_is_an_error() {
    let (_folder, path) = file("rows.parquet", "PAR1 is not enough");
    let text = open(&config(path)).err().unwrap().to_string();
    assert!(text.contains("rows.parquet: expected a Parquet file"), "{text}");
}
