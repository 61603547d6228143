//! Reads libtpu's estimate of cycles from XLA's `HloModuleProto` of an optimised program.
//!
//! Field numbers follow `xla/service/hlo.proto`.

use prost::Message;
use std::collections::HashMap;

/// Returns the sum of `estimated_cycles` over the operations of the entry computation, its loops and calls, each
/// counted once. Returns `None` if the compiler has no such estimates, or if the program contains a Mosaic kernel,
/// which has none.
pub(super) fn estimated_cycles(program: &pjrt::OptimizedProgram) -> Option<f64> {
    let module = match program.format.as_str() {
        "hlo" => Module::decode(program.code.as_slice()).ok()?,
        "hlo_with_config" => ModuleWithConfig::decode(program.code.as_slice()).ok()?.module?,
        _ => return None,
    };
    let computations: HashMap<i64, &Computation> = module.computations.iter().map(|c| (c.id, c)).collect();
    cycles(&computations, module.entry_computation_id).filter(|cycles| *cycles > 0.0)
}

fn cycles(computations: &HashMap<i64, &Computation>, id: i64) -> Option<f64> {
    let mut sum = 0.0;
    for instruction in &computations.get(&id)?.instructions {
        if instruction.custom_call_target == "tpu_custom_call" {
            return None;
        }
        sum += instruction.estimated_cycles();
        // A fusion has the estimate of its body.
        if ["while", "call", "conditional"].contains(&instruction.opcode.as_str()) {
            for id in &instruction.called_computation_ids {
                sum += cycles(computations, *id)?;
            }
        }
    }
    Some(sum)
}

#[derive(Clone, PartialEq, prost::Message)]
struct ModuleWithConfig {
    #[prost(message, optional, tag = "1")]
    module: Option<Module>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Module {
    #[prost(message, repeated, tag = "3")]
    computations: Vec<Computation>,
    #[prost(int64, tag = "6")]
    entry_computation_id: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Computation {
    #[prost(message, repeated, tag = "2")]
    instructions: Vec<Instruction>,
    #[prost(int64, tag = "5")]
    id: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Instruction {
    #[prost(string, tag = "2")]
    opcode: String,
    #[prost(string, tag = "28")]
    custom_call_target: String,
    #[prost(int64, repeated, tag = "38")]
    called_computation_ids: Vec<i64>,
    #[prost(bytes = "vec", tag = "43")]
    backend_config: Vec<u8>,
}

impl Instruction {
    fn estimated_cycles(&self) -> f64 {
        let config: serde_json::Value = serde_json::from_slice(&self.backend_config).unwrap_or_default();
        // Huge estimates mean "unknown".
        let cycles = config["window_config"]["estimated_cycles"].as_str().and_then(|text| text.parse::<u64>().ok());
        cycles.filter(|cycles| *cycles < 1 << 40).map_or(0.0, |cycles| cycles as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction(opcode: &str, cycles: u64, called: &[i64]) -> Instruction {
        let backend_config = format!("{{\"window_config\":{{\"estimated_cycles\":\"{cycles}\"}}}}").into_bytes();
        let custom_call_target = if opcode == "custom-call" { "tpu_custom_call".into() } else { String::new() };
        let called_computation_ids = called.to_vec();
        Instruction { opcode: opcode.into(), custom_call_target, called_computation_ids, backend_config }
    }

    fn cycles_of(body: Vec<Instruction>) -> Option<f64> {
        let computation = |id, instructions| Computation { id, instructions };
        let entry = vec![instruction("fusion", 5, &[2]), instruction("while", u64::MAX >> 1, &[3])];
        let fused = vec![instruction("multiply", 1000, &[])];
        let computations = vec![computation(1, entry), computation(2, fused), computation(3, body)];
        let code = ModuleWithConfig { module: Some(Module { computations, entry_computation_id: 1 }) }.encode_to_vec();
        estimated_cycles(&pjrt::OptimizedProgram { format: "hlo_with_config".into(), code })
    }

    #[test]
    fn cycles_include_loop_bodies_but_not_fusion_bodies() {
        assert_eq!(cycles_of(vec![instruction("fusion", 7, &[2])]), Some(12.0));
    }

    #[test]
    fn unknown_cycles_give_none() {
        assert_eq!(cycles_of(vec![instruction("custom-call", 7, &[])]), None);
        let damaged = pjrt::OptimizedProgram { format: "hlo".into(), code: vec![1, 2, 3] };
        assert_eq!(estimated_cycles(&damaged), None);
    }
}
