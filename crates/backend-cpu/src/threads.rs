//! How many threads there may be.

/// The most threads that anybody is given on this machine: four for each core that the process may use, so that waiting for
/// memory can be hidden, and never less than 64, so that results can be compared over numbers of threads on a small machine.
/// More would only take turns; a hundred thousand would stop the machine.
pub fn most_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    cores.saturating_mul(4).max(64)
}
