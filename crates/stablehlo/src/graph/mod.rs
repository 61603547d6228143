//! The program as data: [`crate::build`] makes it, [`crate::print`] prints it, and transformations rewrite it.

mod attributes;
mod literal;

pub use attributes::*;
pub use literal::*;

use crate::sharding::{Manual, Sharding};
use crate::types::TensorType;
use strum::{IntoStaticStr, VariantNames};

/// A value of a function: an argument, or a result of an operation. It is an index into the function's types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub usize);

/// A module with one function, `main`, the form that compilers take.
#[derive(Clone, Debug, PartialEq)]
pub struct Module {
    /// The name, which profiles and dumps show.
    pub name: String,
    /// The number of devices over which the compiler partitions the program, following [`Sharding`]; all devices of a
    /// mesh.
    pub partitions: usize,
    /// The entry function.
    pub main: Function,
}

/// A function. Its operations are ordered so that every value is defined before it is used.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// One per argument of the body.
    pub arguments: Vec<Argument>,
    /// One per result of the body.
    pub results: Vec<Output>,
    /// Arguments, operations and results.
    pub(crate) body: Region,
    /// The types of all values, including values of nested regions.
    pub(crate) types: Vec<TensorType>,
}

/// The attributes of an argument.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Argument {
    /// The name of the argument in the text.
    pub name: String,
    /// The result that reuses the argument's buffer, which the caller donates.
    pub alias: Option<usize>,
    /// The sharding of the argument over partitions.
    pub sharding: Option<Sharding>,
    /// `true` if the argument must be row-major on the device, so that the compiler cannot choose another layout.
    pub row_major: bool,
}

/// The attributes of a result.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// The name of the result in the text.
    pub name: String,
    /// The sharding of the result over partitions.
    pub sharding: Option<Sharding>,
    /// `true` if the result must be row-major on the device, so that the compiler cannot choose another layout.
    pub row_major: bool,
}

/// A list of operations with arguments and results: the body of a function, a loop or a reduction.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Region {
    /// Values bound on entry.
    pub arguments: Vec<ValueId>,
    /// The operations; each one comes after the operations whose results it reads.
    pub operations: Vec<Operation>,
    /// The values that the region returns.
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
    /// Nested code: condition and body of a loop, the code of a scan.
    pub regions: Vec<Region>,
}

/// Operations, with their attributes. Semantics follow the StableHLO specification.
#[derive(Clone, Debug, PartialEq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case", prefix = "stablehlo.")]
pub enum Kind {
    /// A constant with the values of a literal.
    Constant(Literal),
    /// 0, 1, 2, ... along a dimension.
    Iota {
        /// The dimension along which the numbers count.
        dimension: usize,
    },
    /// An element-wise operation of one operand.
    Unary(Unary),
    /// An element-wise operation of two operands of one type.
    Binary(Binary),
    /// Compares two operands of one type; the results are predicates.
    Compare(Comparison),
    /// Operands: predicate, on true, on false.
    Select,
    /// Operands: lower bound, operand, upper bound.
    Clamp,
    /// Converts the operand to the dtype of the result.
    Convert,
    /// A product; the result's dtype sets the accumulation, f32 or narrower.
    DotGeneral(DotDimensions, Precision),
    /// Reduces values. Operands: the values, then one initial scalar for each.
    Reduce {
        /// The reducers, one per operand; all run in one pass.
        reducers: Vec<Reducer>,
        /// The reduced dimensions, which the result lacks.
        dimensions: Vec<usize>,
    },
    /// Operand dimension i becomes result dimension `dimensions[i]`.
    BroadcastInDim {
        /// The result dimension of every operand dimension, ascending.
        dimensions: Vec<usize>,
    },
    /// The same elements in row-major order, in another shape.
    Reshape,
    /// Result dimension i is operand dimension `permutation[i]`.
    Transpose {
        /// The operand dimension of every result dimension.
        permutation: Vec<usize>,
    },
    /// Concatenates the operands.
    Concatenate {
        /// The dimension along which operands are concatenated.
        dimension: usize,
    },
    /// A window with static bounds.
    Slice {
        /// First index, per dimension.
        start: Vec<usize>,
        /// Past the last index, per dimension.
        limit: Vec<usize>,
    },
    /// Operands: the sliced value, then one start index per dimension. The start is clamped so that the window fits.
    DynamicSlice {
        /// The sizes of the window.
        sizes: Vec<usize>,
    },
    /// Operands: the updated value, the update, then one start index per dimension. The start is clamped so that the
    /// window fits.
    DynamicUpdateSlice,
    /// Operands: the padded value and the padding scalar.
    Pad {
        /// Elements before, per dimension.
        low: Vec<usize>,
        /// Elements after, per dimension.
        high: Vec<usize>,
    },
    /// Operands: the gathered value and start indices `[..., index vector]`.
    Gather(GatherDimensions),
    /// Operands: the value, indices and updates; each update is combined with the element that it meets.
    Scatter(ScatterDimensions, Reducer),
    /// Reinterprets the bits of the operand as the result's dtype, of the same width.
    BitcastConvert,
    /// The maximum along a dimension, which is removed, and its index, in one pass. Operands: the values, the indices
    /// of the elements (i32), and an initial scalar for each. NaN is larger than any number; among equal elements, the
    /// smallest index wins.
    #[strum(to_string = "reduce")]
    ArgMax {
        /// The dimension that is reduced.
        dimension: usize,
    },
    /// Repeats the body while the condition holds. Regions: condition and body, over the carried values.
    While,
    /// The operand with a sharding requested from the partitioner: `sdy.sharding_constraint`.
    Constrain(Sharding),
    /// Runs the region, which reads only its arguments, on every device's shards of the operands and returns shards of
    /// the results: `sdy.manual_computation`.
    Manual(Manual),
    /// Prevents the compiler from moving or fusing operations across.
    OptimizationBarrier,
    /// Calls code that the target provides under a name.
    CustomCall(CustomCall),
    /// A loop over slices with a fixed number of iterations. Operands: carried values, then values to slice, then
    /// constants. The region, which reads only its arguments, takes the same values (with slices) and returns carried
    /// values, then results to stack. [`Function::lowered`] turns it into a [`Kind::While`].
    Scan(Scan),
    /// Code with a custom derivative. Its regions read only their arguments. `forward` takes the operands and returns
    /// the results, then residuals; `backward` takes residuals and the cotangents of floating-point results and returns
    /// the cotangents of floating-point operands. [`Function::lowered`] inlines `forward`.
    CustomVjp {
        /// The number of results of `forward` before the residuals.
        results: usize,
    },
    /// The operand, under a name for [`Save::Named`]. [`Function::lowered`] removes it.
    Named(String),
    /// The operand, which derivatives treat as a constant. [`Function::lowered`] removes it.
    StopGradient,
}

impl Operation {
    /// Returns the values that the operation reads: its operands, and the outer values that its regions read.
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
    /// Returns the arguments, operations and results. They are read-only, so that every function passed the checks of
    /// [`Builder`](crate::Builder).
    pub fn body(&self) -> &Region {
        &self.body
    }

    /// Returns the type of a value.
    pub fn type_of(&self, value: ValueId) -> &TensorType {
        &self.types[value.0]
    }

    /// Calls `see` on every operation; operations of nested regions come before the operation that holds them.
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
