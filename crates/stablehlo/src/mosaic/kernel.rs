//! The data structure of a kernel: a graph of typed operations over windows of its operands.

use crate::graph::{Binary, Comparison, CustomCall, Number, Reducer, Unary, ValueId};
use crate::types::{Dtype, TensorType};
use base64::Engine;
use serde_json::json;

/// A kernel as plain data; [`super::Builder`] makes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// The name of the kernel in profiles.
    pub name: String,
    /// The sizes of the grid, outermost first; the last index changes fastest.
    pub grid: Vec<(usize, Semantics)>,
    /// Operands that the kernel only reads.
    pub inputs: Vec<Operand>,
    /// Operands that the kernel writes. A block is written back when the window leaves it, and must not be visited
    /// again after that.
    pub outputs: Vec<Operand>,
    /// Memory that persists between points of the grid; undefined at first.
    pub scratch: Vec<(TensorType, Space)>,
    /// (output, input) pairs that share a buffer.
    pub aliases: Vec<(usize, usize)>,
    /// The bytes of VMEM that the kernel may use; the compiler's default if `None`.
    pub vmem_limit: Option<usize>,
    /// The cost that the compiler assumes; without it, the compiler's estimates count a call as free.
    pub cost: Option<Cost>,
    /// `true` if the kernel must run even if its results are unused.
    pub has_side_effect: bool,
    /// The kernel's code, whose arguments are the grid indices, i32 scalars.
    pub(crate) body: Block,
    /// The type of every value, by [`ValueId`]; a scalar has an empty shape.
    pub(crate) types: Vec<TensorType>,
}

/// How points of the grid along a dimension depend on each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display)]
#[strum(serialize_all = "snake_case")]
pub enum Semantics {
    /// They are independent: scratch does not persist.
    Parallel,
    /// They run in order: scratch persists.
    Arbitrary,
}

/// The memory of a core that holds a block or scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::Display)]
#[strum(serialize_all = "snake_case")]
pub enum Space {
    /// VMEM, the memory for vectors.
    Vmem,
    /// SMEM, the memory for scalars.
    Smem,
}

/// A tensor in HBM and its window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operand {
    /// The type of the whole tensor, row-major.
    pub ty: TensorType,
    /// The window that selects a block at each point of the grid.
    pub window: Window,
    /// The memory that the block is copied to.
    pub space: Space,
}

/// Selects a block of a tensor for each point of the grid; the block starts at `index * block` in every dimension.
/// Elements beyond the tensor's edge are undefined when read, and dropped when written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// The sizes of the block.
    pub block: Vec<usize>,
    /// The index of the block, per dimension.
    pub index: Vec<Affine>,
}

impl Window {
    /// A window with blocks of these sizes at block `index`.
    pub fn new(block: impl Into<Vec<usize>>, index: impl Into<Vec<Affine>>) -> Self {
        Self { block: block.into(), index: index.into() }
    }
}

/// `constant + sum of factor * grid index`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Affine {
    /// The constant term.
    pub constant: usize,
    /// (dimension of the grid, factor).
    pub terms: Vec<(usize, usize)>,
}

impl Affine {
    /// Returns an index that is the same at every point of the grid.
    pub fn constant(constant: usize) -> Self {
        Self { constant, terms: vec![] }
    }

    /// Returns the grid index of a dimension.
    pub fn grid(dimension: usize) -> Self {
        Self { constant: 0, terms: vec![(dimension, 1)] }
    }

    /// Returns the value of the index at a point of the grid.
    pub fn at(&self, point: &[usize]) -> usize {
        self.terms.iter().map(|(d, factor)| factor * point.get(*d).copied().unwrap_or(0)).sum::<usize>() + self.constant
    }
}

/// The cost of a kernel, for the compiler's scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// The number of arithmetic operations.
    pub flops: u64,
    /// Bytes read from and written to HBM.
    pub bytes_accessed: u64,
    /// The number of exponentials and logarithms.
    pub transcendentals: u64,
}

/// The id of a memory: inputs first, then outputs, then scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RefId(pub usize);

/// A list of operations that run in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Block {
    /// Values that are bound on entry: the grid indices, or a loop's index.
    pub arguments: Vec<ValueId>,
    /// The operations, in the order in which they run.
    pub operations: Vec<Operation>,
}

/// One operation of a block.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// The operation's kind, with its attributes.
    pub kind: Kind,
    /// The values that the operation reads, except for values in offsets.
    pub operands: Vec<ValueId>,
    /// The value that the operation defines, if any.
    pub result: Option<ValueId>,
    /// The blocks that an operation of control flow runs.
    pub blocks: Vec<Block>,
}

/// The index at which a load or store begins in one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offset<V> {
    /// A constant, checked when the kernel is built.
    Fixed(usize),
    /// A value of the kernel, an i32 scalar.
    Value(V),
}

impl<V> From<usize> for Offset<V> {
    fn from(offset: usize) -> Self {
        Self::Fixed(offset)
    }
}

impl<'v> From<&'v super::Value> for Offset<&'v super::Value> {
    fn from(offset: &'v super::Value) -> Self {
        Self::Value(offset)
    }
}

/// The kinds of operations.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// A constant whose elements are all one number.
    Constant(Number),
    /// 0, 1, 2, ... along a dimension.
    Iota(usize),
    /// Loads a part of a memory, of the result's shape; a scalar from SMEM.
    Load(RefId, Vec<Offset<ValueId>>),
    /// Overwrites a part of a memory.
    Store(RefId, Vec<Offset<ValueId>>),
    /// An operation on every element of one operand.
    Unary(Unary),
    /// 2 to the power of every element.
    Exp2,
    /// An operation on pairs of elements of two operands.
    Binary(Binary),
    /// A comparison of pairs of elements; the results are predicates.
    Compare(Comparison),
    /// The second operand where the predicate holds, the third one elsewhere.
    Select,
    /// Converts the operand to the dtype of the result.
    Convert,
    /// A scalar, or dimensions of size 1, repeated.
    Broadcast,
    /// A reduction over a dimension, which stays with size 1.
    Reduce(Reducer, usize),
    /// The same elements in another shape.
    Reshape,
    /// The transpose of a matrix.
    Transpose,
    /// A part that begins at these indices.
    Slice(Vec<usize>),
    /// Runs its block if the operand, a scalar predicate, holds.
    If,
    /// Runs its block for each index 0, 1, ... below this number; the block's argument is the index.
    For(usize),
}

impl Kernel {
    /// Returns the call for a StableHLO program, with operands of [`Self::operand_types`] and results of
    /// [`Self::result_types`].
    pub fn custom_call(&self) -> CustomCall {
        CustomCall {
            target: "tpu_custom_call".into(),
            backend_config: self.backend_config(),
            has_side_effect: self.has_side_effect,
            aliases: self.aliases.clone(),
            row_major: true,
        }
    }

    /// Returns the `backend_config` of the call: JSON that contains the kernel's text in base64.
    pub fn backend_config(&self) -> String {
        let body = base64::engine::general_purpose::STANDARD.encode(self.to_string());
        let mut call = json!({ "body": body, "serialization_format": 1, "needs_layout_passes": true });
        if let Some(cost) = self.cost {
            call["cost_estimate"] = json!({
                "flops": cost.flops,
                "bytes_accessed": cost.bytes_accessed,
                "transcendentals": cost.transcendentals,
            });
        }
        let mut config = json!({ "custom_call_config": call });
        if let Some(limit) = self.vmem_limit {
            config["scoped_memory_configs"] = json!([{ "memory_space": 1, "offset": 0, "size": limit }]);
        }
        config.to_string()
    }

    /// Returns the types of the call's operands.
    pub fn operand_types(&self) -> Vec<TensorType> {
        self.inputs.iter().map(|operand| operand.ty.clone()).collect()
    }

    /// Returns the types of the call's results.
    pub fn result_types(&self) -> Vec<TensorType> {
        self.outputs.iter().map(|operand| operand.ty.clone()).collect()
    }

    /// Returns the bytes of VMEM for scratch and for blocks, which count twice because the next one is fetched during
    /// work on the current one. Registers that the compiler spills are not included.
    pub fn vmem_bytes(&self) -> usize {
        let windows = self.inputs.iter().chain(&self.outputs).filter(|operand| operand.space == Space::Vmem);
        let scratch = self.scratch.iter().filter(|(_, space)| *space == Space::Vmem);
        windows.map(|operand| 2 * padded_bytes(operand.ty.dtype, &operand.window.block)).sum::<usize>()
            + scratch.map(|(ty, _)| padded_bytes(ty.dtype, &ty.shape)).sum::<usize>()
    }

    /// Returns the type and space of a memory.
    pub(crate) fn memory(&self, id: RefId) -> Option<(TensorType, Space)> {
        let windows = self.inputs.iter().chain(&self.outputs);
        let block = |o: &Operand| (TensorType::new(o.ty.dtype, o.window.block.clone()), o.space);
        windows.map(block).chain(self.scratch.iter().cloned()).nth(id.0)
    }
}

/// Returns the bytes in VMEM, where the last dimension is padded to 128 lanes and the second to last to 32 bytes of
/// sublanes.
fn padded_bytes(dtype: Dtype, shape: &[usize]) -> usize {
    let (rest, last) = shape.split_at(shape.len().saturating_sub(2));
    let (rows, columns) = match last {
        [rows, columns] => (*rows, *columns),
        [columns] => (1, *columns),
        _ => (1, 1),
    };
    let sublanes = 32 / dtype.bytes().max(1);
    rest.iter().product::<usize>() * rows.next_multiple_of(sublanes) * columns.next_multiple_of(128) * dtype.bytes()
}
