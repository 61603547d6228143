//! Peak numbers of devices, as published by their makers.

use serde::Serialize;

/// A device as PJRT counts them: a TPU v7x chip is two devices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Chip {
    /// The name of the chip on the command line.
    pub name: &'static str,
    /// The peak of dense bf16 products with f32 accumulation, in flop/s.
    pub peak_flops: f64,
    /// The memory bandwidth in bytes/s.
    pub bandwidth: f64,
    /// The bytes of memory.
    pub memory: u64,
    /// The clock in cycles/s, for compilers that estimate cycles. For v6e it is inferred from the peak of four 256 x
    /// 256 arrays.
    pub clock: Option<f64>,
}

const TERA: f64 = 1e12;
const GIGA: f64 = 1e9;
const GIB: u64 = 1 << 30;

impl Chip {
    /// Sources: for TPUs, docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; for GPUs, NVIDIA's data sheets (SXM,
    /// without sparsity), with bandwidth and memory of the target configurations in `targets/`.
    pub const ALL: [Self; 9] = [
        Self::new("v4", 275.0, 1200.0, 32 * GIB),
        Self::new("v5e", 197.0, 819.0, 16 * GIB),
        Self::new("v5p", 459.0, 2765.0, 95 * GIB),
        Self { clock: Some(918.0 * TERA / (4.0 * 2.0 * 256.0 * 256.0)), ..Self::new("v6e", 918.0, 1638.0, 32 * GIB) },
        Self::new("tpu7x", 2307.0 / 2.0, 7380.0 / 2.0, 96 * GIB),
        Self::new("a100", 312.0, 2039.0, 85_100_068_864),
        Self::new("h100", 989.0, 3352.0, 84_942_979_072),
        Self::new("h200", 989.0, 4800.0, 151_397_597_184),
        Self::new("b200", 2250.0, 7672.0, 191_514_411_008),
    ];

    const fn new(name: &'static str, teraflops: f64, gigabytes: f64, memory: u64) -> Self {
        Self { name, peak_flops: teraflops * TERA, bandwidth: gigabytes * GIGA, memory, clock: None }
    }

    /// Returns the chip called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|chip| chip.name == name)
    }
}
