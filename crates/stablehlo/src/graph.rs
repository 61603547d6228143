//! The program as data: what [`crate::build`] makes, [`crate::print`] prints, and a transformation reads and rewrites.

use crate::types::{Dtype, TensorType};
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
    /// Devices over which the compiler is to split each copy, following [`Sharding`].
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
    /// Combines a value over the replicas of each group.
    AllReduce {
        /// The operation that combines the values of two replicas.
        reducer: Reducer,
        /// Replica ids; every group has the same size.
        groups: Vec<Vec<usize>>,
    },
    /// [`Kind::AllReduce`], of which each replica keeps its part.
    ReduceScatter {
        /// The operation that combines the values of two replicas.
        reducer: Reducer,
        /// Along which the result is split.
        dimension: usize,
        /// Replica ids; every group has the same size.
        groups: Vec<Vec<usize>>,
    },
    /// The values of the replicas of a group one after the other, on each of them.
    AllGather {
        /// Along which they follow one another.
        dimension: usize,
        /// Replica ids; every group has the same size.
        groups: Vec<Vec<usize>>,
    },
    /// Splits the value of each replica of a group, and gives part i of all to replica i.
    AllToAll {
        /// The dimension that is split.
        split: usize,
        /// The dimension along which the parts that arrive follow one another.
        concat: usize,
        /// Replica ids; every group has the same size.
        groups: Vec<Vec<usize>>,
    },
    /// Sends the value of one replica to another one; zeros where nothing arrives.
    CollectivePermute {
        /// (source, target) replica ids, each at most once on either side.
        pairs: Vec<(usize, usize)>,
    },
    /// The replica that this copy is: u32 scalar.
    ReplicaId,
    /// The partition that this is: u32 scalar.
    PartitionId,
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

/// A loop over slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scan {
    /// The number of turns.
    pub trips: usize,
    /// How many operands are carried.
    pub carry: usize,
    /// How many operands are sliced along their first dimension.
    pub xs: usize,
    /// Whether the last slice comes first, and the last part is made first.
    pub reverse: bool,
    /// What a derivative keeps.
    pub save: Save,
}

/// What the forward pass keeps for the derivative; the backward pass computes the rest again.
///
/// It is about values of the operations that stand in the body itself: a loop inside of the body has a policy of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Save {
    /// Nothing but what goes into each turn: least memory, about a third more work.
    #[default]
    Carry,
    /// Also values that [`crate::Value::named`] gave one of these names.
    Named(Vec<String>),
    /// Also the results of products ([`Kind::DotGeneral`]), which are dear to compute again.
    Products,
    /// Whatever the derivative reads.
    Everything,
}

/// Element-wise operations of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr)]
#[strum(serialize_all = "snake_case", prefix = "stablehlo.")]
#[allow(missing_docs)] // named after what they compute
pub enum Unary {
    Abs,
    Negate,
    Sign,
    Exponential,
    ExponentialMinusOne,
    Log,
    LogPlusOne,
    Logistic,
    Tanh,
    Sqrt,
    Rsqrt,
    Floor,
    Ceil,
    Cosine,
    Sine,
    IsFinite,
    Not,
}

/// Element-wise operations of two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr)]
#[strum(serialize_all = "snake_case", prefix = "stablehlo.")]
#[allow(missing_docs)] // named after what they compute
pub enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
    Remainder,
    Power,
    Maximum,
    Minimum,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRightLogical,
    ShiftRightArithmetic,
}

/// Directions of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr)]
#[strum(serialize_all = "UPPERCASE")]
#[allow(missing_docs)] // named after what they compare
pub enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

/// The operation by which a reduction combines two elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // named after what they compute
pub enum Reducer {
    Add,
    Multiply,
    Max,
    Min,
    And,
    Or,
}

/// Dimensions of a product: pairs of lists for the left and the right operand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DotDimensions {
    /// Kept, and shared by both.
    pub batch: (Vec<usize>, Vec<usize>),
    /// Dimensions that are summed over.
    pub contract: (Vec<usize>, Vec<usize>),
}

impl DotDimensions {
    /// A product without batch dimensions that sums over `left` of the one and `right` of the other.
    pub fn contract(left: usize, right: usize) -> Self {
        Self { batch: (vec![], vec![]), contract: (vec![left], vec![right]) }
    }
}

/// What a product may do to f32 operands: TPUs round them to bf16 by default, GPUs to tf32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, IntoStaticStr)]
#[strum(serialize_all = "UPPERCASE")]
pub enum Precision {
    /// Operands are rounded as is fastest for the device.
    #[default]
    Default,
    /// Operands keep more digits than [`Precision::Default`] leaves, and maybe not all.
    High,
    /// Operands keep all digits that they have.
    Highest,
}

/// Dimension numbers of a gather.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // named as the specification names them
pub struct GatherDimensions {
    pub offset_dims: Vec<usize>,
    pub collapsed_slice_dims: Vec<usize>,
    pub operand_batching_dims: Vec<usize>,
    pub start_indices_batching_dims: Vec<usize>,
    pub start_index_map: Vec<usize>,
    pub index_vector_dim: usize,
    pub slice_sizes: Vec<usize>,
}

/// Dimension numbers of a scatter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // named as the specification names them
pub struct ScatterDimensions {
    pub update_window_dims: Vec<usize>,
    pub inserted_window_dims: Vec<usize>,
    pub input_batching_dims: Vec<usize>,
    pub scatter_indices_batching_dims: Vec<usize>,
    pub scatter_dims_to_operand_dims: Vec<usize>,
    pub index_vector_dim: usize,
}

/// The order of a sort. Floats have their total order: -NaN, -inf, ..., -0, 0, ..., inf, NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// The smallest first.
    Ascending,
    /// The largest first.
    Descending,
}

/// A window that slides over an operand; one number per dimension.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// Elements that a window holds.
    pub sizes: Vec<usize>,
    /// The step from a window to the next.
    pub strides: Vec<usize>,
    /// Positions before the operand over which windows slide too.
    pub low: Vec<usize>,
    /// Positions after the operand.
    pub high: Vec<usize>,
}

/// Code that the target knows by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CustomCall {
    /// The name by which the target knows the code.
    pub target: String,
    /// Whatever the target understands; for `tpu_custom_call`, [`crate::mosaic`] writes it.
    pub backend_config: String,
    /// Whether it must run even if nobody reads its results.
    pub has_side_effect: bool,
    /// (result, operand) pairs that share a buffer.
    pub aliases: Vec<(usize, usize)>,
    /// Whether operands and results are row-major, whatever the compiler would like better.
    pub row_major: bool,
    /// The sharding of the call `Sharding`, which the partitioner reads.
    pub sharding: Option<Sharding>,
}

/// How a tensor is split over partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sharding {
    /// Whole on every device.
    Replicated,
    /// Each device's part is a tensor of its own to the program.
    Manual,
    /// The tensor is split evenly.
    Tiled {
        /// The number of parts along each dimension.
        tiles: Vec<usize>,
        /// Device of each part, row-major; trailing devices beyond the parts hold copies.
        devices: Vec<usize>,
    },
}

/// Values of a constant.
#[derive(Clone, Debug, PartialEq)]
pub enum Literal {
    /// All elements are one number.
    Splat(Number),
    /// Every element is given, row-major.
    Dense(Vec<Number>),
}

/// An element of a constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// An element of a predicate.
    Bool(bool),
    /// An element of an integer type.
    Int(i64),
    /// An element of a floating-point type, which is rounded to it when printed.
    Float(f64),
}

impl From<bool> for Number {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<i64> for Number {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<f64> for Number {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl Number {
    /// The zero of a dtype.
    pub fn zero(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Pred => Self::Bool(false),
            dtype if dtype.is_float() => Self::Float(0.0),
            _ => Self::Int(0),
        }
    }

    /// Whether it can be an element of `dtype`.
    pub fn fits(self, dtype: Dtype) -> bool {
        match self {
            Self::Bool(_) => dtype == Dtype::Pred,
            Self::Int(value) => match dtype {
                Dtype::I32 => i32::try_from(value).is_ok(),
                Dtype::U32 => u32::try_from(value).is_ok(),
                Dtype::I64 => true,
                _ => false,
            },
            Self::Float(_) => dtype.is_float(),
        }
    }
}

impl Reducer {
    /// What leaves the other operand as it is.
    pub fn identity(self, dtype: Dtype) -> Number {
        let least = match dtype {
            Dtype::I32 => Number::Int(i32::MIN.into()),
            Dtype::I64 => Number::Int(i64::MIN),
            Dtype::U32 => Number::Int(0),
            Dtype::Pred => Number::Bool(false),
            _ => Number::Float(f64::NEG_INFINITY),
        };
        let most = match dtype {
            Dtype::I32 => Number::Int(i32::MAX.into()),
            Dtype::I64 => Number::Int(i64::MAX),
            Dtype::U32 => Number::Int(u32::MAX.into()),
            Dtype::Pred => Number::Bool(true),
            _ => Number::Float(f64::INFINITY),
        };
        let of = |int: i64| match dtype {
            Dtype::Pred => Number::Bool(int != 0),
            d if d.is_integer() => Number::Int(int),
            _ => Number::Float(int as f64),
        };
        match self {
            Self::Add | Self::Or => of(0),
            Self::Multiply => of(1),
            // All bits.
            Self::And if dtype == Dtype::U32 => most,
            Self::And if dtype.is_integer() => Number::Int(-1),
            Self::And => of(1),
            Self::Max => least,
            Self::Min => most,
        }
    }

    /// Whether elements of `dtype` combine like this.
    pub fn fits(self, dtype: Dtype) -> bool {
        !matches!(self, Self::And | Self::Or) || !dtype.is_float()
    }

    /// The operation on two scalars.
    pub fn binary(self) -> Binary {
        match self {
            Self::Add => Binary::Add,
            Self::Multiply => Binary::Multiply,
            Self::Max => Binary::Maximum,
            Self::Min => Binary::Minimum,
            Self::And => Binary::And,
            Self::Or => Binary::Or,
        }
    }
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
