//! The little of XLA's `HloModuleProto` that is read: the types of a program's parameters.

use prost::Message;

use crate::dtype::{ArrayType, DType};

/// Element type and shape of every parameter, if `code` is in a format that says so.
pub(crate) fn parameters(format: &str, code: &[u8]) -> Option<Vec<ArrayType>> {
    let module = match format {
        "hlo" => Module::decode(code).ok()?,
        "hlo_with_config" => ModuleWithConfig::decode(code).ok()?.module?,
        _ => return None,
    };
    module.host_program_shape?.parameters.iter().map(Shape::read).collect()
}

#[derive(Clone, PartialEq, prost::Message)]
struct ModuleWithConfig {
    #[prost(message, optional, tag = "1")]
    module: Option<Module>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Module {
    #[prost(message, optional, tag = "4")]
    host_program_shape: Option<ProgramShape>,
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
}

impl Shape {
    fn read(&self) -> Option<ArrayType> {
        // `PrimitiveType` counts like `PJRT_Buffer_Type` up to f64, its 12; bf16 is 16, and 13 a tuple.
        let dtype = match self.element_type {
            16 => DType::Bf16,
            code @ 1..=12 => DType::from_raw(code).ok()?,
            _ => return None,
        };
        let dims: Option<Vec<usize>> = self.dims.iter().map(|&dim| dim.try_into().ok()).collect();
        Some(ArrayType { dtype, dims: dims? })
    }
}
