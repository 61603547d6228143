//! The program as data: what [`crate::build`] makes, [`crate::print`] prints, and a transformation reads and rewrites.

mod attributes;
mod literal;

pub use attributes::*;
pub use literal::*;

use crate::sharding::{Groups, Manual, MeshAxes, Sharding};
use crate::types::TensorType;
use strum::IntoStaticStr;

/// A value of a function: an argument, or a result of one of its operations. An index of [`Function::types`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub usize);

/// A module with one function, `main`, as compilers take it.
#[derive(Clone, Debug, PartialEq)]
pub struct Module {
    /// Shows in profiles and dumps.
    pub name: String,
    /// Copies of the program that run side by side and meet in collectives.
    pub replicas: usize,
    /// Devices over which the compiler is to split each copy, following [`Sharding`]: those of a mesh.
    pub partitions: usize,
    /// The function that compilers take as the entry.
    pub main: Function,
}

/// A function: operations in an order in which every value is defined before it is used.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// One per argument of the body.
    pub arguments: Vec<Argument>,
    /// One per result of the body.
    pub results: Vec<Output>,
    /// Arguments, operations and results.
    pub body: Region,
    /// The type of every value, those of nested regions included.
    pub types: Vec<TensorType>,
}

/// What is said about an argument besides its type.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Argument {
    /// The name of the argument in the text.
    pub name: String,
    /// The result that takes over the argument's buffer, which the caller donates.
    pub alias: Option<usize>,
    /// The split of the argument over partitions.
    pub sharding: Option<Sharding>,
    /// Whether it is row-major on the device, whatever the compiler would like better.
    pub row_major: bool,
}

/// What is said about a result besides its type.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// The name of the result in the text.
    pub name: String,
    /// The split of the result over partitions.
    pub sharding: Option<Sharding>,
    /// Whether it is row-major on the device, whatever the compiler would like better.
    pub row_major: bool,
}

/// A list of operations with arguments and results: the body of a function, of a loop, of a reduction.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Region {
    /// Values bound on entry.
    pub arguments: Vec<ValueId>,
    /// The operations, each after those whose results it reads.
    pub operations: Vec<Operation>,
    /// The values that the region hands back.
    pub results: Vec<ValueId>,
}

/// One operation of a region.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// The operation's kind, with its attributes.
    pub kind: Kind,
    /// The values that the operation reads.
    pub operands: Vec<ValueId>,
    /// The values that the operation defines.
    pub results: Vec<ValueId>,
    /// Nested code: condition and body of a loop, the function of a reduction.
    pub regions: Vec<Region>,
}

/// Operations, with the attributes that are not operands. Semantics are those of the StableHLO specification.
#[derive(Clone, Debug, PartialEq, IntoStaticStr)]
#[strum(serialize_all = "snake_case", prefix = "stablehlo.")]
pub enum Kind {
    /// A constant with the values of a literal.
    Constant(Literal),
    /// 0, 1, 2, ... along a dimension.
    Iota {
        /// The dimension along which the numbers grow.
        dimension: usize,
    },
    /// One operand, element by element.
    Unary(Unary),
    /// Two operands of one type, element by element.
    Binary(Binary),
    /// Two operands of one type to predicates.
    Compare(Comparison),
    /// Predicate, on true, on false.
    Select,
    /// Lower bound, operand, upper bound.
    Clamp,
    /// The operand in another dtype, that of the result.
    Convert,
    /// A product with f32, or narrower, accumulation as the result's dtype says.
    DotGeneral(DotDimensions, Precision),
    /// Operands, then one initial scalar each.
    Reduce {
        /// How elements combine, one per operand; all in one pass.
        reducers: Vec<Reducer>,
        /// The dimensions that are reduced, and that the result lacks.
        dimensions: Vec<usize>,
    },
    /// Operand dimension i becomes result dimension `dimensions[i]`.
    BroadcastInDim {
        /// The result dimension of every operand dimension, ascending.
        dimensions: Vec<usize>,
    },
    /// Same elements in row-major order.
    Reshape,
    /// Result dimension i is operand dimension `permutation[i]`.
    Transpose {
        /// The operand dimension of every result dimension.
        permutation: Vec<usize>,
    },
    /// Operands one after the other.
    Concatenate {
        /// The dimension along which operands follow one another.
        dimension: usize,
    },
    /// A window with static bounds.
    Slice {
        /// First index, per dimension.
        start: Vec<usize>,
        /// Past the last index, per dimension.
        limit: Vec<usize>,
        /// The step between indices, per dimension.
        stride: Vec<usize>,
    },
    /// Operand, then one start index per dimension; the start is clamped so that the window fits.
    DynamicSlice {
        /// The sizes of the window.
        sizes: Vec<usize>,
    },
    /// Operand, update, then one start index per dimension; clamped likewise.
    DynamicUpdateSlice,
    /// Operand and padding value.
    Pad {
        /// Elements before, per dimension; negative trims.
        low: Vec<i64>,
        /// Elements after, per dimension; negative trims.
        high: Vec<i64>,
        /// Elements between, per dimension.
        interior: Vec<usize>,
    },
    /// Operand and start indices `[..., index vector]`.
    Gather(GatherDimensions),
    /// Operand, indices, updates; updates combine with what is there.
    Scatter(ScatterDimensions, Reducer),
    /// The bits of the operand as another dtype of the same width, that of the result.
    BitcastConvert,
    /// Operands of one shape, which move together so that the first is sorted along a dimension.
    Sort {
        /// The dimension along which elements move.
        dimension: usize,
        /// Which element of the first operand comes first.
        order: Order,
        /// Whether elements with equal keys keep their order.
        stable: bool,
    },
    /// Operand and initial scalar: combines the elements of each window that slides over the operand. Positions outside
    /// of the operand hold the initial value.
    ReduceWindow(Window, Reducer),
    /// Regions: condition and body over the carried values.
    While,
    /// A scalar i32 that picks one of the regions, which bind nothing; the last one where there is no such region.
    Case,
    /// Combines a value over the devices of each group.
    AllReduce {
        /// The operation that combines the values of two devices.
        reducer: Reducer,
        /// The devices that meet.
        groups: Groups,
    },
    /// [`Kind::AllReduce`], of which each device keeps its part.
    ReduceScatter {
        /// The operation that combines the values of two devices.
        reducer: Reducer,
        /// Along which the result is split.
        dimension: usize,
        /// The devices that meet.
        groups: Groups,
    },
    /// The values of the devices of a group one after the other, on each of them.
    AllGather {
        /// Along which they follow one another.
        dimension: usize,
        /// The devices that meet.
        groups: Groups,
    },
    /// Splits the value of each device of a group, and gives part i of all to device i.
    AllToAll {
        /// The dimension that is split.
        split: usize,
        /// The dimension along which the parts that arrive follow one another.
        concat: usize,
        /// The devices that meet.
        groups: Groups,
    },
    /// Sends the value of one device to another one; zeros where nothing arrives.
    CollectivePermute {
        /// (source, target), each at most once on either side: replica ids, or places along `axes`.
        pairs: Vec<(usize, usize)>,
        /// In a [`Kind::Manual`]: the axes along which devices are a group.
        axes: Option<MeshAxes>,
    },
    /// The replica that this copy is: u32 scalar.
    ReplicaId,
    /// The partition that this is: u32 scalar.
    PartitionId,
    /// In a [`Kind::Manual`]: the place of this device along axes of its mesh: u32 scalar. [`Function::lowered`] computes it.
    AxisIndex(MeshAxes),
    /// The operand, which the partitioner is to split like this: `sdy.sharding_constraint`.
    Constrain(Sharding),
    /// The region's code, which reads nothing but its arguments, on every device's parts of the operands; its results are
    /// parts of the results: `sdy.manual_computation`.
    Manual(Manual),
    /// Keeps the compiler from moving or fusing computation across.
    OptimizationBarrier,
    /// Code that the target knows by name.
    CustomCall(CustomCall),
    /// A loop with a known number of turns over slices. Operands: carried values, then values to slice, then constants;
    /// the region, which reads nothing else, takes the same (with slices) and returns carried values, then parts of what
    /// is stacked. [`Function::lowered`] makes a loop of it.
    Scan(Scan),
    /// The region's code, of which a derivative keeps only what is said and computes the rest again. The region reads
    /// nothing but its arguments. [`Function::lowered`] puts the code in place.
    Remat(Save),
    /// Code with a derivative of its own. Regions, which read nothing but their arguments: forward, which takes the
    /// operands and returns the results, then residuals; backward, which takes residuals and the cotangents of
    /// floating-point results and returns those of floating-point operands. [`Function::lowered`] puts forward in place.
    CustomVjp {
        /// The number of results, before residuals.
        results: usize,
    },
    /// The operand, by a name that [`Save::Named`] knows. [`Function::lowered`] takes it away.
    Named(String),
    /// The operand, as a constant to derivatives. [`Function::lowered`] takes it away.
    StopGradient,
}

impl Operation {
    /// The values that the operation reads: its operands, and what its regions read of what is around them.
    pub fn reads(&self) -> Vec<ValueId> {
        fn outside(region: &Region, found: &mut Vec<ValueId>) {
            let begin = found.len();
            for operation in &region.operations {
                found.extend(&operation.operands);
                operation.regions.iter().for_each(|r| outside(r, found));
            }
            found.extend(&region.results);
            let own = region.operations.iter().flat_map(|op| &op.results).chain(&region.arguments);
            let own: std::collections::HashSet<&ValueId> = own.collect();
            let mut i = 0;
            found.retain(|id| {
                i += 1;
                i <= begin || !own.contains(id)
            });
        }
        let mut found = self.operands.clone();
        self.regions.iter().for_each(|region| outside(region, &mut found));
        found
    }
}

impl Function {
    /// Type of a value.
    pub fn type_of(&self, value: ValueId) -> &TensorType {
        &self.types[value.0]
    }

    /// Every operation, those of nested regions before the operation that holds them.
    pub fn visit(&self, mut see: impl FnMut(&Operation)) {
        fn region(r: &Region, see: &mut impl FnMut(&Operation)) {
            for operation in &r.operations {
                operation.regions.iter().for_each(|r| region(r, see));
                see(operation);
            }
        }
        region(&self.body, &mut see);
    }
}
