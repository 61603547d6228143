//! Attributes of operations.

use super::Number;
use crate::types::Dtype;
use strum::{Display, IntoStaticStr, VariantArray};

/// A loop over slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scan {
    /// The number of iterations.
    pub trips: usize,
    /// The number of carried operands.
    pub carry: usize,
    /// The number of operands that are sliced along their first dimension.
    pub xs: usize,
    /// `true` if iterations run from the last slice to the first.
    pub reverse: bool,
    /// The residuals that the derivative saves.
    pub save: Save,
}

/// The values that the forward pass saves for the derivative; the backward pass recomputes the rest.
///
/// The choice applies to the operations of the body itself. A loop inside of the body has its own choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Save {
    /// Only the inputs of each iteration: least memory, about a third more work.
    #[default]
    Carry,
    /// The inputs of every nth iteration of a scan, where n divides the number of iterations. The backward pass first
    /// recomputes the n iterations of a group, so an iteration runs forward up to three times in all. Memory is least
    /// with n near the square root of the number of iterations.
    Every(usize),
    /// Also the values that [`crate::Value::named`] gave one of these names.
    Named(Vec<String>),
    /// Also the results of [`Kind::DotGeneral`](crate::Kind::DotGeneral), which are expensive to recompute.
    Products,
    /// All values that the derivative reads.
    Everything,
}

/// Element-wise operations of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
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
    Cosine,
    Sine,
    IsFinite,
    Not,
}

/// Element-wise operations of two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case", prefix = "stablehlo.")]
#[allow(missing_docs)] // named after what they compute
pub enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Display, VariantArray)]
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

/// The operation that combines two elements in a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, VariantArray)]
#[allow(missing_docs)] // named after what they compute
pub enum Reducer {
    Add,
    Max,
    Min,
    And,
    Or,
}

/// Dimensions of a product: each field is a pair of lists, for the left and the right operand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DotDimensions {
    /// Batch dimensions, which both operands share.
    pub batch: (Vec<usize>, Vec<usize>),
    /// Dimensions that are summed over.
    pub contract: (Vec<usize>, Vec<usize>),
}

impl DotDimensions {
    /// Contracts dimension `left` of the left operand with dimension `right` of the right one, without batch
    /// dimensions.
    pub fn contract(left: usize, right: usize) -> Self {
        Self { batch: (vec![], vec![]), contract: (vec![left], vec![right]) }
    }
}

/// The precision of products of f32 operands: by default, TPUs round operands to bf16 and GPUs to tf32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Display)]
#[strum(serialize_all = "UPPERCASE")]
pub enum Precision {
    /// Operands are rounded to the precision that is fastest on the device.
    #[default]
    Default,
    /// Operands keep their full precision.
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

/// A call to code that the target provides under a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CustomCall {
    /// The name of the code.
    pub target: String,
    /// Configuration for the target; for `tpu_custom_call`, [`crate::mosaic`] writes it.
    pub backend_config: String,
    /// `true` if the code must run even if its results are unused.
    pub has_side_effect: bool,
    /// (result, operand) pairs that share a buffer.
    pub aliases: Vec<(usize, usize)>,
    /// `true` if operands and results must be row-major, so that the compiler cannot choose another layout.
    pub row_major: bool,
}

impl From<&GatherDimensions> for ScatterDimensions {
    /// Returns the scatter into the windows that the gather reads.
    fn from(gather: &GatherDimensions) -> Self {
        Self {
            update_window_dims: gather.offset_dims.clone(),
            inserted_window_dims: gather.collapsed_slice_dims.clone(),
            input_batching_dims: gather.operand_batching_dims.clone(),
            scatter_indices_batching_dims: gather.start_indices_batching_dims.clone(),
            scatter_dims_to_operand_dims: gather.start_index_map.clone(),
            index_vector_dim: gather.index_vector_dim,
        }
    }
}

impl Reducer {
    /// Returns the identity element: combined with it, an operand stays unchanged.
    pub fn identity(self, dtype: Dtype) -> Number {
        let [least, most] = Number::range(dtype);
        match self {
            Self::Add | Self::Or => Number::zero(dtype),
            // All bits set.
            Self::And if dtype.is_integer() && !dtype.is_unsigned() => Number::Int(-1),
            Self::And => most,
            Self::Max => least,
            Self::Min => most,
        }
    }

    /// Returns `true` if the reducer supports elements of `dtype`.
    pub fn fits(self, dtype: Dtype) -> bool {
        !matches!(self, Self::And | Self::Or) || !dtype.is_float()
    }

    /// Returns the operation on two scalars.
    pub fn binary(self) -> Binary {
        match self {
            Self::Add => Binary::Add,
            Self::Max => Binary::Maximum,
            Self::Min => Binary::Minimum,
            Self::And => Binary::And,
            Self::Or => Binary::Or,
        }
    }
}
