//! Peak numbers of devices, as published by their makers.

use serde::Serialize;

/// A device as PJRT counts them: chips of TPU v4 and v7x are two devices.
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
    /// The bytes of memory that programs may use, by the compiler.
    pub usable_memory: u64,
    /// The bandwidth in bytes/s of a link to another device, in one direction.
    pub link_bandwidth: f64,
    /// The host of a GPU; `None` for TPUs, whose links connect hosts, too.
    pub host: Option<Host>,
    /// The clock in cycles/s, for compilers that estimate cycles. For v6e it is inferred from the peak of four 256 x
    /// 256 arrays.
    pub clock: Option<f64>,
}

/// A host of several GPUs, whose links reach all GPUs of the host and no other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Host {
    /// The largest number of GPUs.
    pub devices: usize,
    /// The bandwidth in bytes/s of the network adapter of each GPU, in one direction.
    pub network_bandwidth: f64,
}

const TERA: f64 = 1e12;
const GIGA: f64 = 1e9;
const GIB: u64 = 1 << 30;

impl Chip {
    /// Peaks, memory and bandwidth: for TPUs, docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; for GPUs, NVIDIA's
    /// data sheets (SXM, without sparsity), with bandwidth and memory of the target configurations in `targets/`.
    ///
    /// Links: the same pages have the bandwidth of all links of a chip in both directions (v5e 400, v5p 1200, v6e 800,
    /// tpu7x 1200 GB/s), of four links in a plane or six in a torus of three dimensions, so that a link of v6e moves 100
    /// GB/s one way; v4 has six links of 50 GB/s (arXiv 2304.01433). Two devices of a chip share its links. A
    /// GPU's NVLink (600, 900, 900, 1800 GB/s both ways) reaches all others of its host through a switch.
    ///
    /// Hosts: NVIDIA's data sheets of DGX A100, H100, H200 and B200, with eight GPUs and an InfiniBand adapter for each (200, 400, 400, 400
    /// Gbit/s).
    ///
    /// Usable memory: the available bytes in the error of libtpu 0.0.51 about a program that does not fit. XLA's GPU
    /// compiler states no limit.
    pub const ALL: [Self; 9] = [
        Self::new("v4", 275.0 / 2.0, 1200.0 / 2.0, 16 * GIB, 25.0).with_usable(15.25),
        Self::new("v5e", 197.0, 819.0, 16 * GIB, 50.0).with_usable(15.75),
        Self::new("v5p", 459.0, 2765.0, 95 * GIB, 100.0).with_usable(95.73),
        Self {
            clock: Some(918.0 * TERA / (4.0 * 2.0 * 256.0 * 256.0)),
            ..Self::new("v6e", 918.0, 1638.0, 32 * GIB, 100.0).with_usable(31.24)
        },
        Self::new("tpu7x", 2307.0 / 2.0, 7380.0 / 2.0, 96 * GIB, 50.0).with_usable(94.74),
        Self::new("a100", 312.0, 2039.0, 85_100_068_864, 300.0).with_network(25.0),
        Self::new("h100", 989.0, 3352.0, 84_942_979_072, 450.0).with_network(50.0),
        Self::new("h200", 989.0, 4800.0, 151_397_597_184, 450.0).with_network(50.0),
        Self::new("b200", 2250.0, 7672.0, 191_514_411_008, 900.0).with_network(50.0),
    ];

    const fn new(name: &'static str, teraflops: f64, gigabytes: f64, memory: u64, link: f64) -> Self {
        Self {
            name,
            peak_flops: teraflops * TERA,
            bandwidth: gigabytes * GIGA,
            memory,
            usable_memory: memory,
            link_bandwidth: link * GIGA,
            host: None,
            clock: None,
        }
    }

    const fn with_usable(mut self, gibibytes: f64) -> Self {
        self.usable_memory = (gibibytes * GIB as f64) as u64;
        self
    }

    const fn with_network(mut self, gigabytes: f64) -> Self {
        self.host = Some(Host { devices: 8, network_bandwidth: gigabytes * GIGA });
        self
    }

    /// Returns the chip of a device whose kind has this name in its plugin, such as `TPU v6 lite` or `NVIDIA H100 80GB HBM3`.
    pub fn of_kind(kind: &str) -> Option<Self> {
        let older_tpus =
            [("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5e", "v5e"), ("TPU v5", "v5p"), ("TPU v5p", "v5p")];
        let newer_tpus = [("TPU v6 lite", "v6e"), ("TPU v6e", "v6e"), ("TPU7x", "tpu7x"), ("TPU v7x", "tpu7x")];
        let tpu = older_tpus.into_iter().chain(newer_tpus).find(|(of, _)| *of == kind).map(|(_, name)| name);
        // H100 and H200 have lower peaks as PCIe and NVL cards, and the A100 does not.
        let words: Vec<String> = kind.split([' ', '-']).map(str::to_lowercase).collect();
        let is_other = words.iter().any(|word| ["pcie", "nvl"].contains(&word.as_str()));
        let named = |name: &&str| words.iter().any(|word| word == name);
        let gpu =
            || ["a100", "h100", "h200", "b200"].into_iter().find(named).filter(|name| *name == "a100" || !is_other);
        Self::from_name(tpu.or_else(gpu)?)
    }

    /// Returns the chip called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|chip| chip.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chips_are_found_by_the_kinds_of_plugins() {
        let name = |kind| Chip::of_kind(kind).map(|chip| chip.name);
        assert_eq!(name("TPU v6 lite"), Some("v6e"));
        assert_eq!(name("TPU v5 lite"), Some("v5e"));
        assert_eq!(name("TPU v5"), Some("v5p"));
        assert_eq!(name("NVIDIA H100 80GB HBM3"), Some("h100"));
        assert_eq!(name("NVIDIA H200"), Some("h200"));
        assert_eq!(name("NVIDIA A100-SXM4-80GB"), Some("a100"));
        assert_eq!(name("NVIDIA A100-PCIE-40GB"), Some("a100"));
        let others =
            ["cpu", "NVIDIA GeForce RTX 4090", "", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB"];
        assert_eq!(others.map(name), [None; 6]);
    }
}
