//! The threads that kernels use, and the limits of processors.

use super::check::Check;
use grpo_files::counted;
use serde_json::json;

const ID: &str = "threads.number";

/// The processors of the machine and the threads of this process.
struct Counts {
    /// The processors that are switched on.
    online: Option<usize>,
    /// The processors that this process may run on (`taskset`, cpusets).
    allowed: Option<usize>,
    /// The threads that run at the same time: `allowed`, or less with a CPU quota of the control group.
    parallel: Option<usize>,
    /// The threads of rayon, or the reason why the system starts none.
    rayon: Result<usize, String>,
    /// The variable that sets `rayon`.
    variable: Option<&'static str>,
}

pub(super) fn checks() -> Vec<Check> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").ok();
    let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let counts = Counts {
        online: online.as_deref().and_then(processors),
        allowed: allowed.and_then(processors),
        parallel: std::thread::available_parallelism().ok().map(usize::from),
        rayon: rayon_threads(),
        variable: crate::threads::VARIABLES.into_iter().find(is_set),
    };
    vec![counts.check()]
}

/// Starts rayon's threads and returns their number, or the system's reason if it starts none.
fn rayon_threads() -> Result<usize, String> {
    // Otherwise the first use of the pool would panic. An error without a source is a pool that exists.
    match rayon::ThreadPoolBuilder::new().build_global().as_ref().map_err(std::error::Error::source) {
        Err(Some(cause)) => Err(cause.to_string()),
        Ok(()) | Err(None) => Ok(rayon::current_num_threads()),
    }
}

impl Counts {
    fn check(&self) -> Check {
        let values = json!({
            "threads": self.rayon.as_ref().ok(),
            "available_parallelism": self.parallel,
            "allowed_processors": self.allowed,
            "online_processors": self.online,
            "variable": self.variable,
        });
        match &self.rayon {
            Ok(threads) => self.judge(*threads),
            Err(cause) => Check::problem(
                ID,
                format!("the system starts no threads: {cause}"),
                "raise the limit of processes (`ulimit -u`, the container's pids limit) or of memory (`ulimit -v`)",
            ),
        }
        .with(values)
    }

    fn judge(&self, threads: usize) -> Check {
        let source = self.variable.map_or(String::new(), |name| format!(" ({name})"));
        let count = |count: Option<usize>| count.map_or("an unknown number".into(), |count| count.to_string());
        let mut found = format!(
            "{}{source}; {} of {} processors may be used",
            counted(threads, "thread"),
            count(self.allowed.or(self.parallel)),
            count(self.online.or(self.parallel))
        );
        if let Some((_, parallel)) = self.allowed.zip(self.parallel).filter(|(allowed, parallel)| parallel < allowed) {
            found += &format!(", and the control group's CPU quota is that of {parallel}");
        }
        match self.parallel {
            Some(parallel) if threads > parallel => Check::note(ID, found).advise(format!(
                "more threads than processors slow steps down: set RAYON_NUM_THREADS={parallel} or unset it"
            )),
            Some(parallel) if threads < parallel => {
                Check::note(ID, format!("{found}; {} idle", counted(parallel - threads, "processor")))
            }
            _ => Check::ok(ID, found),
        }
    }
}

/// Counts the processors in a list such as `0-3,8`; `None` if it cannot be parsed.
fn processors(list: &str) -> Option<usize> {
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
    };
    list.trim().split(',').map(count).sum()
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;

    fn counts(online: usize, allowed: usize, parallel: usize, rayon: usize) -> Check {
        let [online, allowed, parallel] = [online, allowed, parallel].map(Some);
        Counts { online, allowed, parallel, rayon: Ok(rayon), variable: None }.check()
    }

    #[test]
    fn processor_lists_are_counted() {
        for (list, count) in [("0", Some(1)), ("\t0-3,8\n", Some(5)), ("", None), ("3-1", None), ("all", None)] {
            assert_eq!(processors(list), count, "{list:?}");
        }
    }

    #[test]
    fn limits_of_processors_are_named() {
        assert_eq!(counts(8, 8, 8, 8).status, Status::Ok);
        let pinned = counts(8, 2, 2, 2);
        assert!(pinned.status == Status::Ok && pinned.found.contains("2 of 8 processors"), "{pinned:?}");
        let quota = counts(8, 8, 3, 3);
        assert!(quota.found.contains("CPU quota is that of 3"), "{quota:?}");
        let many = counts(8, 2, 2, 16);
        assert_eq!(many.status, Status::Note);
        assert!(many.advice.is_some_and(|advice| advice.contains("RAYON_NUM_THREADS=2")));
        assert_eq!(counts(8, 8, 8, 1).status, Status::Note);
        let unknown = Counts { online: None, allowed: None, parallel: None, rayon: Ok(4), variable: Some("A") }.check();
        assert!(unknown.found.contains("4 threads (A); an unknown number"), "{unknown:?}");
        let none =
            Counts { rayon: Err("no memory".into()), online: None, allowed: None, parallel: None, variable: None };
        assert!(none.check().status == Status::Problem && none.check().values["threads"].is_null());
    }
}
