//! The limit on the number of threads.

/// The most threads that a backend or a benchmark may use on this machine: four for each core that the process may use, so that waiting for
/// memory can be hidden, and never less than 64, so that results can be compared over numbers of threads on a small machine.
/// More would only wait for one another; a hundred thousand would bring the machine to a halt.
pub fn most_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    cores.saturating_mul(4).max(64)
}
