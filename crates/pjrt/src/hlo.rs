//! The parts of XLA's `HloModuleProto` that this workspace reads: parameter types, collectives, and the compiler's configuration of
//! operations. Field numbers follow `xla/service/hlo.proto`.

use prost::Message;

use crate::dtype::{ArrayType, DType};
use crate::executable::OptimizedProgram;

/// A collective operation of a compiled program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collective {
    /// XLA's name of the operation: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute`
    /// and others.
    pub kind: String,
    /// The element types and shapes of the results on each device; several if the compiler has combined collectives.
    /// For an asynchronous start operation, the operands are included.
    pub types: Vec<ArrayType>,
}

impl OptimizedProgram {
    /// Returns the HLO module; `None` if the program has another format.
    pub fn module(&self) -> Option<Module> {
        match self.format.as_str() {
            "hlo" => Module::decode(self.code.as_slice()).ok(),
            "hlo_with_config" => ModuleWithConfig::decode(self.code.as_slice()).ok()?.module,
            _ => None,
        }
    }
}

impl Module {
    /// Returns the element type and shape of every parameter.
    pub(crate) fn parameters(&self) -> Option<Vec<ArrayType>> {
        self.host_program_shape.as_ref()?.parameters.iter().map(Shape::read).collect()
    }

    /// Returns the collectives; a collective in a loop is listed once.
    pub(crate) fn collectives(&self) -> Vec<Collective> {
        const KINDS: [&str; 7] = [
            "all-gather",
            "all-reduce",
            "all-to-all",
            "collective-broadcast",
            "collective-permute",
            "ragged-all-to-all",
            "reduce-scatter",
        ];
        let all = self.computations.iter().flat_map(|computation| &computation.instructions);
        let collectives = all.filter_map(|instruction| {
            let kind = instruction.opcode.strip_suffix("-start").unwrap_or(&instruction.opcode);
            let mut types = vec![];
            instruction.shape.as_ref().into_iter().for_each(|shape| shape.leaves(&mut types));
            KINDS.contains(&kind).then(|| Collective { kind: kind.into(), types })
        });
        collectives.collect()
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct ModuleWithConfig {
    #[prost(message, optional, tag = "1")]
    module: Option<Module>,
}

/// An HLO module.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Module {
    /// The computations: the entry computation, and the computations that instructions call.
    #[prost(message, repeated, tag = "3")]
    pub computations: Vec<Computation>,
    /// The types of parameters.
    #[prost(message, optional, tag = "4")]
    pub host_program_shape: Option<ProgramShape>,
    /// [`Computation::id`] of the entry computation.
    #[prost(int64, tag = "6")]
    pub entry_computation_id: i64,
}

/// A computation of a module.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Computation {
    /// The instructions, operands first.
    #[prost(message, repeated, tag = "2")]
    pub instructions: Vec<Instruction>,
    /// The id by which instructions refer to it.
    #[prost(int64, tag = "5")]
    pub id: i64,
}

/// An instruction of a computation.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Instruction {
    /// XLA's name of the operation.
    #[prost(string, tag = "2")]
    pub opcode: String,
    /// The type of the result.
    #[prost(message, optional, tag = "3")]
    pub shape: Option<Shape>,
    /// The target of a custom call; empty for other instructions.
    #[prost(string, tag = "28")]
    pub custom_call_target: String,
    /// Ids of the computations that it calls.
    #[prost(int64, repeated, tag = "38")]
    pub called_computation_ids: Vec<i64>,
    /// The compiler's own configuration; JSON for TPUs.
    #[prost(bytes = "vec", tag = "43")]
    pub backend_config: Vec<u8>,
}

/// The signature of a module.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProgramShape {
    /// The types of parameters.
    #[prost(message, repeated, tag = "1")]
    pub parameters: Vec<Shape>,
}

/// The type of an array or a tuple.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Shape {
    /// XLA's `PrimitiveType`.
    #[prost(int32, tag = "2")]
    pub element_type: i32,
    /// The dimensions of an array.
    #[prost(int64, repeated, tag = "3")]
    pub dims: Vec<i64>,
    /// The elements of a tuple.
    #[prost(message, repeated, tag = "4")]
    pub tuple: Vec<Shape>,
}

impl Shape {
    /// Adds the arrays of a shape, which may be a tuple; other types are skipped.
    fn leaves(&self, arrays: &mut Vec<ArrayType>) {
        arrays.extend(self.read());
        self.tuple.iter().for_each(|shape| shape.leaves(arrays));
    }

    fn read(&self) -> Option<ArrayType> {
        // `PrimitiveType` has the numbers of `PJRT_Buffer_Type` up to 12 (f64); 13 is a tuple, 16 is bf16.
        let dtype = match self.element_type {
            16 => DType::Bf16,
            code @ 1..=12 => DType::from_raw(code).ok()?,
            _ => return None,
        };
        let dims: Option<Vec<usize>> = self.dims.iter().map(|&dim| dim.try_into().ok()).collect();
        Some(ArrayType { dtype, dims: dims? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_decoded_from_both_hlo_formats() {
        let instruction = Instruction { opcode: "all-reduce-start".into(), ..Instruction::default() };
        let entry = Computation { instructions: vec![instruction], id: 7 };
        let module = Module { computations: vec![entry], entry_computation_id: 7, ..Module::default() };
        let of = |format: &str, code: Vec<u8>| OptimizedProgram { format: format.into(), code }.module();
        assert_eq!(of("hlo", module.encode_to_vec()), Some(module.clone()));
        let with_config = ModuleWithConfig { module: Some(module.clone()) };
        assert_eq!(of("hlo_with_config", with_config.encode_to_vec()), Some(module.clone()));
        assert_eq!(of("mlir", module.encode_to_vec()), None);
        assert_eq!(of("hlo", vec![1, 2, 3]), None);
        assert_eq!(module.collectives(), [Collective { kind: "all-reduce".into(), types: vec![] }]);
        assert_eq!(module.parameters(), None);
    }
}
