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
    /// Bytes of the results on each device, without the operands of an asynchronous start operation.
    pub result_bytes: u64,
    /// The number of devices that communicate; `None` for all of the program.
    pub group: Option<usize>,
}

impl Collective {
    /// Returns the bytes that each device receives, if devices pass shards around a ring. `devices` is the number of devices of the
    /// program. A reduce-scatter that libtpu writes as the fusion of an all-reduce with a slice counts as an all-reduce, twice as much.
    pub fn received_bytes(&self, devices: usize) -> f64 {
        let (bytes, group) = (self.result_bytes as f64, self.group.unwrap_or(devices).max(1) as f64);
        let others = (group - 1.0) / group;
        match self.kind.as_str() {
            "all-reduce" => 2.0 * others * bytes,
            "reduce-scatter" => (group - 1.0) * bytes,
            "all-gather" | "all-to-all" | "ragged-all-to-all" => others * bytes,
            _ => bytes,
        }
    }
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
            let is_start = kind.len() < instruction.opcode.len();
            KINDS.contains(&kind).then(|| Collective {
                kind: kind.into(),
                types,
                result_bytes: instruction.shape.as_ref().map_or(0, |shape| shape.of_results(kind, is_start).bytes()),
                group: instruction.group(),
            })
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
    /// The groups of devices of a collective; in newer programs in one of the next fields.
    #[prost(message, repeated, tag = "49")]
    pub replica_groups: Vec<ReplicaGroup>,
    /// The groups of devices of a collective.
    #[prost(message, optional, tag = "87")]
    pub collective_device_list: Option<CollectiveDeviceList>,
    /// The groups of devices of a collective.
    #[prost(message, optional, tag = "92")]
    pub iota_collective_device_list: Option<IotaReplicaGroupList>,
    /// The groups of devices of a collective.
    #[prost(message, optional, tag = "93")]
    pub mesh_axes_replica_group_list: Option<MeshAxesReplicaGroupList>,
}

impl Instruction {
    /// Returns the number of devices of each group of a collective; `None` for all devices.
    fn group(&self) -> Option<usize> {
        let listed = |groups: &[ReplicaGroup]| groups.first().map(|group| group.replica_ids.len());
        let device_list = || self.collective_device_list.as_ref().and_then(|list| listed(&list.replica_groups));
        let iota_list = || usize::try_from(self.iota_collective_device_list.as_ref()?.num_devices_per_group).ok();
        let mesh_axes = || self.mesh_axes_replica_group_list.as_ref().and_then(MeshAxesReplicaGroupList::group);
        listed(&self.replica_groups).or_else(device_list).or_else(iota_list).or_else(mesh_axes).filter(|size| *size > 0)
    }
}

/// Groups of devices that differ along axes of a mesh.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MeshAxesReplicaGroupList {
    /// The mesh.
    #[prost(message, optional, tag = "1")]
    pub mesh: Option<Mesh>,
    /// The axes, or parts of axes.
    #[prost(message, repeated, tag = "2")]
    pub axes: Vec<AxisRef>,
}

impl MeshAxesReplicaGroupList {
    fn group(&self) -> Option<usize> {
        let axes = &self.mesh.as_ref()?.axes;
        let sizes = self.axes.iter().map(|axis| match &axis.sub_axis_info {
            Some(part) => Some(part.size),
            None => axes.get(usize::try_from(axis.mesh_axis_index).ok()?).map(|axis| axis.size),
        });
        usize::try_from(sizes.product::<Option<i64>>()?).ok()
    }
}

/// A mesh of devices.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Mesh {
    /// The axes.
    #[prost(message, repeated, tag = "1")]
    pub axes: Vec<MeshAxis>,
}

/// An axis of a mesh.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MeshAxis {
    /// The number of devices along the axis.
    #[prost(int64, tag = "2")]
    pub size: i64,
}

/// A reference to an axis of a mesh, or to a part of it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AxisRef {
    /// The index of the axis.
    #[prost(int64, tag = "1")]
    pub mesh_axis_index: i64,
    /// The part of the axis; the whole axis if `None`.
    #[prost(message, optional, tag = "2")]
    pub sub_axis_info: Option<SubAxis>,
}

/// A part of an axis.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SubAxis {
    /// The number of devices along the part.
    #[prost(int64, tag = "2")]
    pub size: i64,
}

/// A group of devices that communicate.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ReplicaGroup {
    /// The devices.
    #[prost(int64, repeated, tag = "1")]
    pub replica_ids: Vec<i64>,
}

/// Groups of devices, listed.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CollectiveDeviceList {
    /// The groups.
    #[prost(message, repeated, tag = "1")]
    pub replica_groups: Vec<ReplicaGroup>,
}

/// Groups of devices of equal size, by a rule.
#[derive(Clone, PartialEq, prost::Message)]
pub struct IotaReplicaGroupList {
    /// The number of devices of each group.
    #[prost(int64, tag = "2")]
    pub num_devices_per_group: i64,
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

    /// Returns the results of a collective. An asynchronous start operation of some kinds has a tuple of operands and results.
    fn of_results(&self, kind: &str, is_start: bool) -> &Self {
        match self.tuple.as_slice() {
            [_, results, ..] if is_start && !["all-reduce", "reduce-scatter"].contains(&kind) => results,
            _ => self,
        }
    }

    /// Returns the bytes of all arrays, without padding.
    fn bytes(&self) -> u64 {
        let mut arrays = vec![];
        self.leaves(&mut arrays);
        let bytes = |array: &ArrayType| array.dims.iter().product::<usize>() * array.dtype.size();
        arrays.iter().map(|array| bytes(array) as u64).sum()
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
        let none = Collective { kind: "all-reduce".into(), types: vec![], result_bytes: 0, group: None };
        assert_eq!(module.collectives(), [none]);
        assert_eq!(module.parameters(), None);
    }

    #[test]
    fn collectives_have_the_bytes_that_devices_receive() {
        let array = |dims: &[i64]| Shape { element_type: 16, dims: dims.to_vec(), ..Shape::default() };
        let tuple = |shapes: &[Shape]| Shape { element_type: 13, tuple: shapes.to_vec(), ..Shape::default() };
        let received = |opcode: &str, shape: Shape, iota: Option<i64>| {
            let instruction = Instruction {
                opcode: opcode.into(),
                shape: Some(shape),
                iota_collective_device_list: iota.map(|n| IotaReplicaGroupList { num_devices_per_group: n }),
                ..Instruction::default()
            };
            let entry = Computation { instructions: vec![instruction], id: 7 };
            let module = Module { computations: vec![entry], entry_computation_id: 7, ..Module::default() };
            module.collectives()[0].received_bytes(8)
        };
        // 1024 bytes of bf16.
        let gathered = array(&[64, 8]);
        assert_eq!(received("all-gather", gathered.clone(), Some(4)), 768.0);
        assert_eq!(received("all-gather-start", tuple(&[array(&[16, 8]), gathered.clone()]), Some(4)), 768.0);
        assert_eq!(received("all-gather", gathered.clone(), None), 896.0);
        assert_eq!(received("all-reduce", gathered.clone(), Some(2)), 1024.0);
        assert_eq!(received("reduce-scatter", array(&[16, 8]), Some(4)), 768.0);
        assert_eq!(received("collective-permute-start", tuple(&[gathered.clone(), gathered.clone()]), None), 1024.0);
        // Groups of four devices along the second axis of a mesh of 2 x 4.
        let axes = [2, 4].map(|size| MeshAxis { size }).to_vec();
        let second = AxisRef { mesh_axis_index: 1, sub_axis_info: None };
        let list = MeshAxesReplicaGroupList { mesh: Some(Mesh { axes }), axes: vec![second] };
        let half = AxisRef { mesh_axis_index: 1, sub_axis_info: Some(SubAxis { size: 2 }) };
        assert_eq!([list.group(), MeshAxesReplicaGroupList { axes: vec![half], ..list }.group()], [Some(4), Some(2)]);
        assert_eq!(received("all-to-all", tuple(&[gathered.clone(), gathered]), Some(2)), 1024.0);
    }
}
