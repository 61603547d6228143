//! Compiles for TPUs without having one, with libtpu.

use crate::support::array;
use grpo_pjrt::install::Kind;
use grpo_pjrt::{CompileOptions, DType, Error};

const MATMUL: &str = "
func.func @main(%a: tensor<1024x2048xbf16>, %b: tensor<2048x512xbf16>) -> tensor<1024x512xf32> {
  %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
    : (tensor<1024x2048xbf16>, tensor<2048x512xbf16>) -> tensor<1024x512xf32>
  return %0 : tensor<1024x512xf32>
}";

#[test]
fn a_program_compiles_for_eight_v6e() {
    let plugin = crate::support::plugin(Kind::Tpu);
    assert!(plugin.api_version() >= (0, 116));
    let topology = plugin.topology("v6e:2x4", &[]).unwrap();
    assert_eq!(topology.platform_name().unwrap(), "tpu");
    assert!(topology.platform_version().unwrap().contains("v6"));
    let devices = topology.devices().unwrap();
    assert_eq!((devices.len(), devices[0].kind.as_str()), (8, "TPU v6 lite"));

    let executable = topology.compile(MATMUL, &CompileOptions::default()).unwrap();
    assert_eq!(executable.outputs().unwrap(), [array(DType::F32, &[1024, 512])]);
    let parameters = [array(DType::Bf16, &[1024, 2048]), array(DType::Bf16, &[2048, 512])];
    assert_eq!(executable.parameters().unwrap().unwrap(), parameters);
    let memory = executable.memory_stats().unwrap();
    assert_eq!((memory.argument, memory.output), (2 * (1024 * 2048 + 2048 * 512), 4 * 1024 * 512));
    assert!(memory.generated_code > 0 && memory.temp < 1 << 20, "{memory:?}");
    let cost = executable.cost_analysis().unwrap();
    let flops = 2.0 * 1024.0 * 2048.0 * 512.0;
    assert!((cost["flops"] - flops).abs() < 0.01 * flops, "{cost:?}");
    assert!(cost["bytes accessed"] > 0.0 && cost["optimal_seconds"] > 0.0, "{cost:?}");
    assert!(executable.serialize().unwrap().len() > 1000);
    let optimized = executable.optimized_program().unwrap();
    assert_eq!(optimized.format, "hlo_with_config");
    let needle = b"estimated_cycles";
    assert!(optimized.code.windows(needle.len()).any(|window| window == needle));

    let replicas = topology.compile(MATMUL, &CompileOptions::replicas(8)).unwrap();
    assert_eq!(replicas.num_replicas().unwrap(), 8);
    let limited = CompileOptions::default().with("xla_tpu_scoped_vmem_limit_kib", "98304");
    assert!(topology.compile(MATMUL, &limited).is_ok());
}

#[test]
fn compile_errors_of_libtpu_are_returned() {
    let plugin = crate::support::plugin(Kind::Tpu);
    let error = plugin.topology("v6e:nonsense", &[]).err().unwrap();
    assert!(matches!(error, Error::Api { .. }), "{error}");
    let topology = plugin.topology("v6e:1x1", &[]).unwrap();
    let unknown = CompileOptions::default().with("xla_no_such_flag", "1");
    let error = topology.compile(MATMUL, &unknown).err().unwrap();
    assert!(error.to_string().contains("xla_no_such_flag"), "{error}");
}
