//! Reads libtpu's estimate of cycles from the HLO of an optimised program.

use grpo_pjrt::hlo::{Computation, Instruction, Module};
use std::collections::HashMap;

/// Returns the sum of `estimated_cycles` over the operations of the entry computation, its loops and calls, each
/// counted once. Returns `None` if the compiler has no such estimates, or if the program contains a Mosaic kernel,
/// which has none.
pub(super) fn estimated_cycles(module: &Module) -> Option<f64> {
    let computations: HashMap<i64, &Computation> = module.computations.iter().map(|c| (c.id, c)).collect();
    cycles(&computations, module.entry_computation_id).filter(|cycles| *cycles > 0.0)
}

fn cycles(computations: &HashMap<i64, &Computation>, id: i64) -> Option<f64> {
    let mut sum = 0.0;
    for instruction in &computations.get(&id)?.instructions {
        if instruction.custom_call_target == "tpu_custom_call" {
            return None;
        }
        sum += cycles_of(instruction);
        // A fusion has the estimate of its body.
        if ["while", "call", "conditional"].contains(&instruction.opcode.as_str()) {
            for id in &instruction.called_computation_ids {
                sum += cycles(computations, *id)?;
            }
        }
    }
    Some(sum)
}

fn cycles_of(instruction: &Instruction) -> f64 {
    let config: serde_json::Value = serde_json::from_slice(&instruction.backend_config).unwrap_or_default();
    // Huge estimates mean "unknown".
    let cycles = config["window_config"]["estimated_cycles"].as_str().and_then(|text| text.parse::<u64>().ok());
    cycles.filter(|cycles| *cycles < 1 << 40).map_or(0.0, |cycles| cycles as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction(opcode: &str, cycles: u64, called: &[i64]) -> Instruction {
        let backend_config = format!("{{\"window_config\":{{\"estimated_cycles\":\"{cycles}\"}}}}").into_bytes();
        let custom_call_target = if opcode == "custom-call" { "tpu_custom_call".into() } else { String::new() };
        Instruction {
            opcode: opcode.into(),
            custom_call_target,
            called_computation_ids: called.to_vec(),
            backend_config,
            ..Instruction::default()
        }
    }

    fn cycles_with_body(body: Vec<Instruction>) -> Option<f64> {
        let computation = |id, instructions| Computation { id, instructions };
        let entry = vec![instruction("fusion", 5, &[2]), instruction("while", u64::MAX >> 1, &[3])];
        let fused = vec![instruction("multiply", 1000, &[])];
        let computations = vec![computation(1, entry), computation(2, fused), computation(3, body)];
        estimated_cycles(&Module { computations, entry_computation_id: 1, ..Module::default() })
    }

    #[test]
    fn cycles_include_loop_bodies_but_not_fusion_bodies() {
        assert_eq!(cycles_with_body(vec![instruction("fusion", 7, &[2])]), Some(12.0));
    }

    #[test]
    fn unknown_cycles_give_none() {
        assert_eq!(cycles_with_body(vec![instruction("custom-call", 7, &[])]), None);
        assert_eq!(estimated_cycles(&Module::default()), None);
    }
}
