//! The threads of kernels: rayon's with the feature `rayon`, otherwise only the caller's.

use grpo_core::error::Result;

/// Returns the maximum threads of a backend or benchmark on this machine: four for each core that the process may use,
/// to hide memory latency, and at least 64, so that results can be compared over numbers of threads on a small machine.
/// More would only contend; a hundred thousand would stall the machine.
pub fn most_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    cores.saturating_mul(4).max(64)
}

#[cfg(feature = "rayon")]
mod implementation {
    use super::{Result, most_threads};
    use crate::error::NAME;
    use grpo_core::error::Error;
    pub(crate) use rayon::prelude as slices;
    use rayon::{ThreadPool, ThreadPoolBuilder};
    use std::sync::Arc;

    /// A backend's own pool, or the caller's.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Threads(Option<Arc<ThreadPool>>);

    impl Threads {
        /// # Errors
        /// [`Error::Backend`] for more than [`most_threads`], or if they cannot be started.
        pub(crate) fn new(threads: usize) -> Result<Self> {
            let most = most_threads();
            if threads > most {
                return Err(refused(format!("expected at most {most} threads on this machine, got {threads}")));
            }
            let pool = rayon_pool(threads).map_err(|e| refused(format!("no thread pool: {e}")))?;
            Ok(Self(Some(Arc::new(pool))))
        }

        pub(crate) fn count(&self) -> usize {
            self.0.as_ref().map_or_else(count, |pool| pool.current_num_threads())
        }

        /// Runs `f` on these threads.
        pub(crate) fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
            match &self.0 {
                Some(pool) => pool.install(f),
                None => f(),
            }
        }
    }

    fn refused(message: String) -> Error {
        Error::Backend { backend: NAME.into(), message }
    }

    fn rayon_pool(threads: usize) -> std::result::Result<ThreadPool, rayon::ThreadPoolBuildError> {
        ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("loss-{i}")).build()
    }

    /// Returns the number of threads of the caller's pool.
    pub(crate) fn count() -> usize {
        rayon::current_num_threads()
    }

    /// Runs `work` on all `slots` in parallel.
    pub(crate) fn for_each_slot<S: Send>(slots: &mut [S], work: impl Fn(&mut S) + Sync) {
        let work = &work;
        match slots {
            [slot] => work(slot),
            slots => rayon::scope(|scope| {
                for slot in slots {
                    scope.spawn(move |_| work(slot));
                }
            }),
        }
    }
}

#[cfg(not(feature = "rayon"))]
mod implementation {
    use super::Result;
    use crate::error::unsupported;

    /// The caller's thread.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Threads;

    impl Threads {
        /// # Errors
        /// [`grpo_core::Error::Unsupported`] for more than one thread.
        pub(crate) fn new(threads: usize) -> Result<Self> {
            if threads > 1 {
                return Err(unsupported(
                    format!("{threads} threads without the feature `rayon` of grpo-backend-cpu, expected at most 1"),
                    "build with that feature, which is on unless `default-features = false`, or ask for one thread",
                ));
            }
            Ok(Self)
        }

        pub(crate) fn count(&self) -> usize {
            1
        }

        /// Runs `f`.
        pub(crate) fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
            f()
        }
    }

    /// The caller's thread.
    pub(crate) fn count() -> usize {
        1
    }

    /// Runs `work` on all `slots` in order.
    pub(crate) fn for_each_slot<S: Send>(slots: &mut [S], work: impl Fn(&mut S) + Sync) {
        slots.iter_mut().for_each(work);
    }

    /// The methods of rayon's parallel slices, sequentially.
    pub(crate) mod slices {
        pub(crate) trait Chunked<T> {
            fn par_chunks(&self, size: usize) -> std::slice::Chunks<'_, T>;
            fn par_chunks_mut(&mut self, size: usize) -> std::slice::ChunksMut<'_, T>;
        }

        impl<T> Chunked<T> for [T] {
            fn par_chunks(&self, size: usize) -> std::slice::Chunks<'_, T> {
                self.chunks(size)
            }

            fn par_chunks_mut(&mut self, size: usize) -> std::slice::ChunksMut<'_, T> {
                self.chunks_mut(size)
            }
        }
    }
}

pub(crate) use implementation::{Threads, count, for_each_slot, slices};

#[cfg(all(test, feature = "rayon"))]
mod tests {
    use super::*;
    use crate::CpuBackend;

    #[test]
    fn more_threads_than_the_machine_can_use_are_refused() {
        let most = most_threads();
        assert!(most >= 64);
        let error = CpuBackend::with_threads(most + 1).expect_err("too many").to_string();
        assert!(error.contains(&format!("at most {most}")) && error.contains(&(most + 1).to_string()), "{error}");
        CpuBackend::with_threads(2).expect("a machine can use two");
        assert_eq!(Threads::new(2).expect("a machine can use two").count(), 2);
    }
}
