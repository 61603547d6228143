//! The plugins that can be installed, by kind of device, and their wheels.

use super::wheel::Wheel;
use strum::{EnumCount, IntoStaticStr, VariantArray};

/// A plugin that can be installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumCount, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Kind {
    /// XLA for the CPU: `xla-cpu-pjrt`.
    Cpu,
    /// The runtime and compiler of TPUs, which can compile without a TPU: `libtpu`.
    Tpu,
    /// XLA for NVIDIA GPUs with the tools to compile without a GPU: `jax-cuda13-pjrt`, `ptxas`, `nvlink`, libdevice.
    Cuda,
}

impl Kind {
    /// All plugins that can be installed.
    pub const ALL: [Kind; Self::COUNT] = *Self::VARIANTS.first_chunk().unwrap();

    /// Returns `cpu`, `tpu` or `cuda`.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns the version that [`install`](super::install) downloads.
    pub fn version(self) -> &'static str {
        let (_, version) = self.wheels()[0].requirement.split_once("==").unwrap_or_default();
        version
    }

    /// Returns the wheels. The first wheel contains the plugin; its first member is the library.
    pub(super) fn wheels(self) -> &'static [Wheel] {
        match self {
            Kind::Cpu => &[Wheel {
                requirement: "xla-cpu-pjrt==0.0.1",
                tags: &["--platform", "manylinux_2_27_x86_64"],
                sha256: "55837b6b7b47daa717f2d9a5a03563ea0ceaa338d06a81a1e2d3f060d960decc",
                members: &["xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"],
            }],
            Kind::Tpu => &[Wheel {
                requirement: "libtpu==0.0.51",
                tags: &["--platform", "manylinux_2_31_x86_64", "--implementation", "cp", "--abi", "cp311"],
                sha256: "ba67ddbfdbac61c8da1fafc26cd51b93e9fe4d298016e2882eb986b1718cba34",
                members: &["libtpu/libtpu.so"],
            }],
            // The layout of the wheels is kept, so that the plugin finds the tools.
            Kind::Cuda => &[
                Wheel {
                    requirement: "jax-cuda13-pjrt==0.10.2",
                    tags: &["--platform", "manylinux_2_27_x86_64"],
                    sha256: "a97e9cabe0e21d8dbcc70bd909ca1c34cd546d3ce2d94b4cd907a8d4f6179f6a",
                    members: &["jax_plugins/xla_cuda13/xla_cuda_plugin.so"],
                },
                Wheel {
                    requirement: "nvidia-cuda-nvcc==13.5.37",
                    tags: &["--platform", "manylinux2014_x86_64"],
                    sha256: "f5c4f7ead5d964fb4af42bbf1e6d3ec3c1e6e9d83b53749f691d387e7fcaa3a7",
                    members: &["nvidia/cu13/bin/ptxas", "nvidia/cu13/bin/nvlink"],
                },
                Wheel {
                    requirement: "nvidia-nvvm==13.5.37",
                    tags: &["--platform", "manylinux2010_x86_64"],
                    sha256: "c41bfa362e407405163f103c2229f0765f8cc2ed7d148b754dc77f228bf7e070",
                    members: &["nvidia/cu13/nvvm/libdevice/libdevice.10.bc"],
                },
            ],
        }
    }
}
