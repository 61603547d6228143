//! Tiers of tests.
//!
//! `cargo test --workspace` runs the default tier. Tests with `#[ignore = "..."]` are products of cases, or need large downloads or much
//! memory: `GRPO_TESTS=all cargo test --workspace` runs them, too. Each test binary with such tests has [`tiers!`](crate::tiers), which
//! either runs them or prints their number and the variable.

use std::io::Write;
use std::process::{Command, Stdio};

/// The environment variable that chooses the tier.
const VARIABLE: &str = "GRPO_TESTS";

/// Adds a test that runs the ignored tests of this binary with `GRPO_TESTS=all`, and names them in one line without it.
#[macro_export]
macro_rules! tiers {
    () => {
        #[test]
        fn tests_of_the_tier_all() {
            $crate::tier::run(concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_CRATE_NAME")));
        }
    };
}

/// Returns `true` if the environment asks for all tests.
///
/// # Panics
/// Panics if the variable has an unknown value.
pub fn is_all() -> bool {
    match std::env::var(VARIABLE).as_deref() {
        Ok("all") => true,
        Ok("") | Err(_) => false,
        Ok(value) => panic!("{VARIABLE}: expected `all`, found `{value}`"),
    }
}

/// Returns a number below `count` that the hash of the checked-out commit determines: a test of one case among `count` has another one after
/// every commit. Without git, the number is 0.
///
/// # Panics
/// Panics if `count` is 0.
pub fn of_commit(count: usize) -> usize {
    let mut git = Command::new("git");
    let output = git.args(["-C", env!("CARGO_MANIFEST_DIR"), "rev-parse", "HEAD"]).output();
    let hash = output.ok().filter(|output| output.status.success()).map(|output| output.stdout);
    let first = hash.and_then(|hash| u64::from_str_radix(str::from_utf8(hash.get(..15)?).ok()?, 16).ok());
    (first.unwrap_or(0) % count as u64) as usize
}

/// Runs the ignored tests of this process's binary, or prints how many are omitted. See [`tiers!`](crate::tiers).
///
/// # Panics
/// Panics if an ignored test fails, or if there is none.
pub fn run(binary: &str) {
    let program = std::env::current_exe().expect("the path of the test binary");
    let listed = Command::new(&program).args(["--ignored", "--list", "--format", "terse"]).output().expect("a list");
    let count = String::from_utf8_lossy(&listed.stdout).lines().filter(|line| line.ends_with(": test")).count();
    assert!(count > 0, "{binary} has no ignored tests: remove `tiers!`");
    if !includes(&format!("{binary}: {count} tests")) {
        return;
    }
    print(&format!("{binary}: running the ignored tests"));
    let status = Command::new(&program).arg("--ignored").stdin(Stdio::null()).status().expect("the tests run");
    assert!(status.success(), "{binary}: tests of the tier `all` failed, see above ({status})");
}

/// Returns [`is_all`], and names `cases` as omitted if they are: for cases within a test.
///
/// # Panics
/// Panics if the variable has an unknown value.
pub fn includes(cases: &str) -> bool {
    let all = is_all();
    if !all {
        print(&format!("{cases} omitted, run with {VARIABLE}=all cargo test --workspace"));
    }
    all
}

/// Prints a line to standard error that, unlike a line of `println`, is not captured.
fn print(line: &str) {
    std::io::stderr().write_all(format!("{line}\n").as_bytes()).expect("standard error is open");
}
