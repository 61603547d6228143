//! Measures this machine's peak: multiply-adds per second in registers, and memory bandwidth.
//!
//! Benchmarks derive lower bounds of step times from these rates. [`Multiply`] keeps as many independent accumulators as registers hold, which
//! hides the latency of a multiply-add on any x86-64 processor. [`Stream`] accesses buffers far larger than the caches,
//! in huge pages if the kernel grants them.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use crate::arch::x86_64::{avx2, avx512};
use crate::arch::{Isa, amx, generic};
use crate::threads::most_threads;
use grpo_core::Dtype;
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::Instant;

/// A kind of multiply-add.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// `tdpbf16ps`: products of bf16 tiles.
    Amx,
    /// `vdpbf16ps`: two products of bf16 into each of 16 f32.
    Avx512Bf16,
    /// `vfmadd` on 16 f32.
    Avx512Fma,
    /// `vfmadd` on 8 f32.
    Avx2Fma,
    /// f32 multiplication and addition with the compiler's baseline for this target.
    Portable,
}

impl Unit {
    /// Returns all units of this machine.
    pub fn available() -> Vec<Self> {
        let all = [Self::Amx, Self::Avx512Bf16, Self::Avx512Fma, Self::Avx2Fma, Self::Portable];
        all.into_iter().filter(|unit| unit.is_here()).collect()
    }

    fn is_here(self) -> bool {
        let isa = match self {
            Self::Amx => Isa::Amx,
            Self::Avx512Bf16 => Isa::Avx512Bf16,
            Self::Avx512Fma => Isa::Avx512,
            Self::Avx2Fma => Isa::Avx2,
            Self::Portable => Isa::Portable,
        };
        isa.is_available()
    }

    /// Returns the name of the unit in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Amx => "amx_bf16",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Avx512Fma => "avx512_fma",
            Self::Avx2Fma => "avx2_fma",
            Self::Portable => "portable",
        }
    }

    /// Returns the dtype of its operands; bf16 operands may also be widened and multiplied as f32.
    pub fn dtype(self) -> Dtype {
        if matches!(self, Self::Amx | Self::Avx512Bf16) { Dtype::Bf16 } else { Dtype::F32 }
    }

    /// Returns the floating-point operations of one iteration.
    fn flops(self) -> usize {
        match self {
            Self::Amx => amx::SPIN_FLOPS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => avx512::SPIN_BF16_FLOPS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Fma => avx512::SPIN_FMA_FLOPS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Fma => avx2::SPIN_FLOPS,
            _ => generic::SPIN_FLOPS,
        }
    }

    /// Runs the loop and returns one of its sums, so that the compiler cannot remove it.
    fn spin(self, iterations: usize) -> f32 {
        match self {
            Self::Amx => amx::spin(iterations),
            // SAFETY: a `Multiply` is created only for units that `is_here` has detected.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => unsafe { avx512::spin_bf16(iterations) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Fma => unsafe { avx512::spin_fma(iterations) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Fma => unsafe { avx2::spin_fma(iterations) },
            _ => generic::spin(iterations),
        }
    }
}

/// Returns the peak of multiply-adds of `dtype` on `threads` threads in flop/s: the best of a few short runs, which take about 0.1 s once per
/// process. The peak of bf16 is at least the peak of f32, because bf16 values can be multiplied in f32.
pub fn flops(dtype: Dtype, threads: usize) -> f64 {
    static MEASURED: Mutex<Vec<(Dtype, usize, f64)>> = Mutex::new(Vec::new());
    // Other threads wait, because simultaneous measurements disturb each other.
    let mut measured = MEASURED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = measured.iter().find(|(of, on, _)| (*of, *on) == (dtype, threads)).map(|(.., peak)| *peak);
    known.unwrap_or_else(|| {
        let peak = measure(dtype, threads);
        measured.push((dtype, threads, peak));
        peak
    })
}

fn measure(dtype: Dtype, threads: usize) -> f64 {
    let unit_flops = |unit: Unit| {
        let work = Multiply::new(unit, threads, 0.005)?;
        let seconds = (0..5).map(|_| work.run()).fold(f64::INFINITY, f64::min);
        Some(work.flops() / seconds)
    };
    units(dtype).filter_map(unit_flops).fold(0.0, f64::max)
}

/// Returns the units that multiply values of `dtype`.
fn units(dtype: Dtype) -> impl Iterator<Item = Unit> {
    Unit::available().into_iter().filter(move |unit| [Dtype::F32, dtype].contains(&unit.dtype()))
}

/// A fixed number of multiply-adds of one kind.
#[derive(Clone, Copy, Debug)]
pub struct Multiply {
    unit: Unit,
    threads: usize,
    iterations: usize,
}

impl Multiply {
    /// Plans multiply-adds of `unit` on `threads` threads (0: one per core; at most [`most_threads`]) for a run of
    /// about `seconds`. `None` if this machine lacks the unit.
    pub fn new(unit: Unit, threads: usize, seconds: f64) -> Option<Self> {
        if !unit.is_here() {
            return None;
        }
        let mut work = Self { unit, threads: count(threads), iterations: 1 << 12 };
        loop {
            // The best of three, because other processes may delay a run.
            let found = (0..3).map(|_| work.run()).fold(f64::INFINITY, f64::min);
            if found >= 0.1 * seconds || work.iterations >= 1 << 40 {
                let scale = (seconds / found.max(1e-9)).clamp(0.01, 100.0);
                work.iterations = ((work.iterations as f64 * scale) as usize).max(1);
                return Some(work);
            }
            work.iterations *= 4;
        }
    }

    /// Returns the floating-point operations of a run, over all threads.
    pub fn flops(&self) -> f64 {
        self.iterations as f64 * self.unit.flops() as f64 * self.threads as f64
    }

    /// Runs it and returns the seconds.
    pub fn run(&self) -> f64 {
        seconds_of(
            self.threads,
            |_| (),
            |()| {
                black_box(self.unit.spin(self.iterations));
            },
        )
    }
}

/// A kind of memory access to every word of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Traffic {
    /// Every byte is read.
    Read,
    /// Every byte is copied to another buffer.
    Copy,
    /// Every byte is read, changed and written back: the minimum for a gradient in place of its logits.
    Update,
}

/// A pass over memory.
#[derive(Debug)]
pub struct Stream {
    traffic: Traffic,
    threads: usize,
    source: Vec<u64>,
    target: Vec<u64>,
}

impl Stream {
    /// Allocates `bytes` bytes, and as many again for a copy, to be accessed by `threads` threads (0: one per core; at
    /// most [`most_threads`]).
    pub fn new(traffic: Traffic, threads: usize, bytes: usize) -> Self {
        let words = bytes.div_ceil(8).max(1);
        let target = if traffic == Traffic::Copy { huge(words) } else { vec![] };
        Self { traffic, threads: count(threads), source: huge(words), target }
    }

    /// Returns the bytes that a run moves; reads and writes count separately.
    pub fn bytes(&self) -> f64 {
        let ways = if self.traffic == Traffic::Read { 1.0 } else { 2.0 };
        ways * 8.0 * self.source.len() as f64
    }

    /// Runs it and returns the seconds.
    pub fn run(&mut self) -> f64 {
        let part = self.source.len().div_ceil(self.threads);
        let mut parts = self.source.chunks_mut(part);
        let mut targets = self.target.chunks_mut(part);
        let traffic = self.traffic;
        seconds_of(
            self.threads,
            |_| (parts.next().unwrap_or_default(), targets.next().unwrap_or_default()),
            |(source, target)| match traffic {
                Traffic::Read => {
                    black_box(source.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word)));
                }
                Traffic::Copy => target.copy_from_slice(source),
                Traffic::Update => source.iter_mut().for_each(|word| *word = word.wrapping_add(1)),
            },
        )
    }
}

/// Allocates a buffer of `words` words and writes it, in huge pages if the kernel grants them on request.
fn huge(words: usize) -> Vec<u64> {
    let mut buffer: Vec<u64> = Vec::with_capacity(words);
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 2 << 20;
        let (start, bytes) = (buffer.as_mut_ptr().cast::<u8>(), words * 8);
        let skip = start.align_offset(PAGE);
        if skip < bytes {
            // SAFETY: the range is within the allocation and starts at a page, and the advice changes no contents. If
            // the kernel refuses, pages stay small, which is only slower.
            unsafe { libc::madvise(start.add(skip).cast(), (bytes - skip) / PAGE * PAGE, libc::MADV_HUGEPAGE) };
        }
    }
    // Not 0: the allocator might return zero pages without touching them.
    buffer.resize(words, black_box(1));
    buffer
}

fn count(threads: usize) -> usize {
    if threads > 0 { threads.min(most_threads()) } else { std::thread::available_parallelism().map_or(1, usize::from) }
}

/// Returns the seconds from the start of the first of `threads` threads to the end of the last one. They start together
/// and read the clock themselves: an observing thread might be scheduled too late.
fn seconds_of<T: Send>(threads: usize, mut part: impl FnMut(usize) -> T, work: impl Fn(T) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let spans: Vec<(Instant, Instant)> = std::thread::scope(|scope| {
        let start = |thread| {
            let (mine, barrier, work) = (part(thread), &barrier, &work);
            scope.spawn(move || {
                barrier.wait();
                let began = Instant::now();
                work(mine);
                (began, Instant::now())
            })
        };
        let running: Vec<_> = (0..threads).map(start).collect();
        running.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let (began, ended) = (spans.iter().map(|span| span.0).min(), spans.iter().map(|span| span.1).max());
    began.zip(ended).map_or(0.0, |(began, ended)| (ended - began).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_kernels_do_every_multiplication() {
        assert!(Unit::available().contains(&Unit::Portable));
        for unit in Unit::available() {
            let (few, many) = (unit.spin(1), unit.spin(1000));
            let expected = match unit {
                // Not a sum but an iterated function: x / 2 + 1.5 has the fixed point 3.
                Unit::Portable => (1.5, 3.0),
                Unit::Avx512Bf16 => (1.5, 1500.0),
                // Products with 32 terms each.
                Unit::Amx => (24.0, 24_000.0),
                Unit::Avx512Fma | Unit::Avx2Fma => (0.75, 750.0),
            };
            assert_eq!((few, many), expected, "{}", unit.name());
            let work = Multiply::new(unit, 2, 1e-3).expect("a unit that is here");
            assert!(work.run() > 0.0 && work.flops() >= 2.0 * unit.flops() as f64);
        }
    }

    #[test]
    fn the_peak_of_bf16_includes_units_of_f32() {
        assert!(units(Dtype::F32).all(|unit| unit.dtype() == Dtype::F32));
        let single: Vec<Unit> = units(Dtype::F32).collect();
        assert!(!single.is_empty() && single.iter().all(|unit| units(Dtype::Bf16).any(|other| other == *unit)));
        assert!([Dtype::F32, Dtype::Bf16].into_iter().all(|dtype| flops(dtype, 1) > 1e7));
    }

    #[test]
    fn streams_touch_every_word() {
        for threads in [1, 3] {
            let mut update = Stream::new(Traffic::Update, threads, 8 * 1001);
            update.run();
            assert!(update.source.iter().all(|word| *word == 2));
            let mut copy = Stream::new(Traffic::Copy, threads, 8 * 1001);
            copy.source.iter_mut().enumerate().for_each(|(i, word)| *word = i as u64);
            copy.run();
            assert_eq!(copy.source, copy.target);
            assert_eq!((update.bytes(), Stream::new(Traffic::Read, 1, 80).bytes()), (16016.0, 80.0));
        }
        // More threads than words.
        assert!(Stream::new(Traffic::Read, 4, 8).run() >= 0.0);
    }
}
