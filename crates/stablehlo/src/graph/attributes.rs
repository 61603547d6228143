//! What is said about an operation besides its operands.

use super::Number;
use crate::types::Dtype;
use strum::IntoStaticStr;

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
/// It is about values of the operations that stand in the body itself: a loop inside of the body has a policy of its own, and
/// a [`Kind::Manual`](crate::Kind::Manual) is one operation, which keeps all or is computed again as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Save {
    /// Nothing but what goes into each turn: least memory, about a third more work.
    #[default]
    Carry,
    /// What goes into every nth turn of a scan, where n divides the number of turns. The n turns of a group run forward again before the
    /// derivative goes back through them, so that a turn is computed three times in all. Memory is least with n near the root of the number of
    /// turns. For [`crate::Builder::remat`], which has no turns, it is [`Save::Carry`].
    Every(usize),
    /// Also values that [`crate::Value::named`] gave one of these names.
    Named(Vec<String>),
    /// Also the results of products ([`Kind::DotGeneral`](crate::Kind::DotGeneral)), which are dear to compute again.
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
}

impl Reducer {
    /// What leaves the other operand as it is.
    pub fn identity(self, dtype: Dtype) -> Number {
        let least = match dtype {
            Dtype::I16 => Number::Int(i16::MIN.into()),
            Dtype::I32 => Number::Int(i32::MIN.into()),
            Dtype::I64 => Number::Int(i64::MIN),
            Dtype::U32 => Number::Int(0),
            Dtype::Pred => Number::Bool(false),
            _ => Number::Float(f64::NEG_INFINITY),
        };
        let most = match dtype {
            Dtype::I16 => Number::Int(i16::MAX.into()),
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
