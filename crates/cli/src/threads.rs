//! Limits the number of threads of this process.
//!
//! rayon starts as many threads as RAYON_NUM_THREADS asks for without a limit; a hundred thousand of them would stop a machine. If the
//! number is too large, the global pool is therefore created here with a smaller one.

use grpo_backend_cpu::most_threads;
use grpo_files::counted;

/// rayon's variables; the second is an older name of the first.
pub(crate) const VARIABLES: [&str; 2] = ["RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"];

/// Limits the threads of this process to [`most_threads`], and warns unless it is `quiet`.
pub(crate) fn hold_to_machine(quiet: bool) {
    let variable = VARIABLES.iter().find_map(|name| Some((*name, std::env::var_os(name)?.into_string().ok()?)));
    let Some((name, value)) = variable else { return };
    match judge(&value, most_threads()) {
        Verdict::Fine => {}
        Verdict::NoNumber if quiet => {}
        Verdict::NoNumber => tracing::warn!("{name}={value} is no number of threads, and is ignored"),
        Verdict::TooMany(most) => {
            if !quiet {
                let (threads, are) = (counted(most, "thread"), if most == 1 { "is" } else { "are" });
                tracing::warn!("{name}={value} is more than this machine can use: {threads} {are} started");
            }
            // Fails only if the pool already exists, and nothing has used it yet.
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

/// Interprets a variable's value; rayon uses its default for an empty value and for 0.
fn judge(value: &str, most: usize) -> Verdict {
    let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    match value.parse::<usize>() {
        Ok(threads) if threads > most => Verdict::TooMany(most),
        Ok(_) => Verdict::Fine,
        // Too many digits for an integer.
        Err(_) if digits => Verdict::TooMany(most),
        Err(_) if value.is_empty() => Verdict::Fine,
        Err(_) => Verdict::NoNumber,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_threads_is_limited() {
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
