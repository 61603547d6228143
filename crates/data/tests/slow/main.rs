//! Parquet files that expand beyond a limit (fixtures/make_parquet.py).
#![cfg(feature = "parquet")]

// The fast tests use all of it.
#[allow(dead_code)]
#[path = "../fast/support.rs"]
mod support;

use std::path::{Path, PathBuf};
use support::{config, open};

grpo_testkit::tiers!();

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet").join(format!("{name}.parquet"))
}

#[test]
fn small_parquet_files_that_expand_beyond_the_limit_are_refused() {
    assert_refused("bomb-dictionary", "the rows up to this one");
    assert_refused("bomb-zstd", "column \"question\": ");
    assert_refused("bomb-list", "its values");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn more_small_parquet_files_that_expand_beyond_the_limit_are_refused() {
    assert_refused("bomb-brotli", "column \"question\": ");
    assert_refused("bomb-texts", "its values");
    assert_refused("bomb-prefixes", "the rows up to this one");
}

/// Fails unless a file of less than 50 kB is refused, whose contents would take from 300 MB to 4 GB.
fn assert_refused(name: &str, part: &str) {
    let text = open(&config(fixture(name))).err().unwrap().to_string();
    let limit = "expands to at most 256 MiB (32 times its size, or 256 MiB)";
    let parts = [&format!("{name}.parquet"), part, limit, "to_json(NEW)` writes lines of JSON"];
    assert!(parts.iter().all(|part| text.contains(*part)), "{text}");
}
