//! The parts of XLA's `HloModuleProto` that this crate reads: parameter types and collectives.

use prost::Message;

use crate::dtype::{ArrayType, DType};

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

/// Returns the element type and shape of every parameter, if `code` is in a supported format.
pub(crate) fn parameters(format: &str, code: &[u8]) -> Option<Vec<ArrayType>> {
    module(format, code)?.host_program_shape?.parameters.iter().map(Shape::read).collect()
}

/// Returns the collectives; a collective in a loop is listed once.
pub(crate) fn collectives(format: &str, code: &[u8]) -> Option<Vec<Collective>> {
    const KINDS: [&str; 7] = [
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    ];
    let module = module(format, code)?;
    let all = module.computations.iter().flat_map(|computation| &computation.instructions);
    let collectives = all.filter_map(|instruction| {
        let kind = instruction.opcode.strip_suffix("-start").unwrap_or(&instruction.opcode);
        let mut types = vec![];
        instruction.shape.as_ref().into_iter().for_each(|shape| shape.leaves(&mut types));
        KINDS.contains(&kind).then(|| Collective { kind: kind.into(), types })
    });
    Some(collectives.collect())
}

fn module(format: &str, code: &[u8]) -> Option<Module> {
    match format {
        "hlo" => Module::decode(code).ok(),
        "hlo_with_config" => ModuleWithConfig::decode(code).ok()?.module,
        _ => None,
    }
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
    #[prost(message, optional, tag = "4")]
    host_program_shape: Option<ProgramShape>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Computation {
    #[prost(message, repeated, tag = "2")]
    instructions: Vec<Instruction>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Instruction {
    #[prost(string, tag = "2")]
    opcode: String,
    #[prost(message, optional, tag = "3")]
    shape: Option<Shape>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ProgramShape {
    #[prost(message, repeated, tag = "1")]
    parameters: Vec<Shape>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Shape {
    #[prost(int32, tag = "2")]
    element_type: i32,
    #[prost(int64, repeated, tag = "3")]
    dims: Vec<i64>,
    #[prost(message, repeated, tag = "4")]
    tuple: Vec<Shape>,
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
