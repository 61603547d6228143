//! How many threads this process may have.
//!
//! rayon starts as many as RAYON_NUM_THREADS says, whatever that is; a hundred thousand of them stop a machine. So the pool
//! that everything shares is made here when that is too many.

use backend_cpu::most_threads;
use grpo_files::counted;

/// rayon's own variables, the second of which is an old name of the first.
const VARIABLES: [&str; 2] = ["RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"];

/// Holds the threads of this process to [`most_threads`], and says so unless it is `quiet`.
pub(crate) fn hold_to_machine(quiet: bool) {
    let asked = VARIABLES.iter().find_map(|name| Some((*name, std::env::var_os(name)?.into_string().ok()?)));
    let Some((name, value)) = asked else { return };
    match judge(&value, most_threads()) {
        Verdict::Fine => {}
        Verdict::NoNumber if quiet => {}
        Verdict::NoNumber => tracing::warn!("{name}={value} is no number of threads, and is ignored"),
        Verdict::TooMany(most) => {
            if !quiet {
                let (threads, are) = (counted(most, "thread"), if most == 1 { "is" } else { "are" });
                tracing::warn!("{name}={value} is more than this machine can use: {threads} {are} started");
            }
            // It fails only if the pool is there already, and nothing has asked for it yet.
            let _ = rayon::ThreadPoolBuilder::new().num_threads(most).build_global();
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Fine,
    NoNumber,
    TooMany(usize),
}

/// The number that a variable's value means; rayon takes an empty one and 0 for its default.
fn judge(value: &str, most: usize) -> Verdict {
    let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    match value.parse::<usize>() {
        Ok(threads) if threads > most => Verdict::TooMany(most),
        Ok(_) => Verdict::Fine,
        // More digits than a number can have.
        Err(_) if digits => Verdict::TooMany(most),
        Err(_) if value.is_empty() => Verdict::Fine,
        Err(_) => Verdict::NoNumber,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_held_to_what_is_sensible() {
        for (value, verdict) in [
            ("", Verdict::Fine),
            ("0", Verdict::Fine),
            ("64", Verdict::Fine),
            ("65", Verdict::TooMany(64)),
            ("100000", Verdict::TooMany(64)),
            ("99999999999999999999999", Verdict::TooMany(64)),
            ("many", Verdict::NoNumber),
            ("-1", Verdict::NoNumber),
        ] {
            assert_eq!(judge(value, 64), verdict, "{value}");
        }
    }
}
