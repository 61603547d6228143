//! Compiles for a GPU without having one, with the CUDA plugin.

use crate::support::array;
use grpo_pjrt::install::Kind;
use grpo_pjrt::{CompileOptions, DType};

/// The compiler's target description of an NVIDIA H100.
const TARGET: &str = r#"
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 3350000000000 l2_cache_size: 52428800 device_memory_size: 85520809984
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H100"
"#;

/// The exponential needs libdevice, and every kernel needs `ptxas`: the plugin finds both in the installation.
#[test]
#[ignore = "GRPO_TESTS=all: XLA's CUDA compiler"]
fn the_installed_plugin_compiles_for_a_gpu() {
    let plugin = crate::support::plugin(Kind::Cuda);
    let options = [("target_config", TARGET.into()), ("topology", "1x1x1".into())];
    let topology = plugin.topology("", &options).unwrap();
    assert_eq!(topology.platform_name().unwrap(), "cuda");
    assert_eq!(topology.devices().unwrap()[0].kind, "NVIDIA H100");
    let program = "
    func.func @main(%a: tensor<256x128xbf16>, %b: tensor<128x64xbf16>) -> tensor<256x64xf32> {
      %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
        : (tensor<256x128xbf16>, tensor<128x64xbf16>) -> tensor<256x64xf32>
      %1 = stablehlo.exponential %0 : tensor<256x64xf32>
      return %1 : tensor<256x64xf32>
    }";
    let executable = topology.compile(program, &CompileOptions::default()).unwrap();
    // The executable reports its parameters even after the topology is dropped.
    drop(topology);
    let parameters = [array(DType::Bf16, &[256, 128]), array(DType::Bf16, &[128, 64])];
    assert_eq!(executable.parameters().unwrap().unwrap(), parameters);
    let memory = executable.memory_stats().unwrap();
    assert_eq!((memory.argument, memory.output), (2 * (256 * 128 + 128 * 64), 4 * 256 * 64));
    assert!(executable.cost_analysis().unwrap_err().is_unsupported());
}
