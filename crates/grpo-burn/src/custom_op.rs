//! Operations of one's own on burn's CPU backend Flex: a value made by any code, with a derivative of its own.
//!
//! The GRPO loss is one. Others take the same three steps: [`Operand::new`] takes each tensor apart, any code makes the output from
//! the [`values`], and [`record`] puts it into the graph with its [`Derivative`].
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use grpo_burn::custom_op::{Derivative, Graph, Operand, record, tensor, values};
//!
//! /// dL/dx = 3 x^2 dL/dy.
//! #[derive(Clone, Debug)]
//! struct CubeGrad(Vec<f32>);
//! impl Derivative<1> for CubeGrad {
//!     fn gradients(self, upstream: burn::backend::flex::FlexTensor, _: [bool; 1]) -> [Option<burn::backend::flex::FlexTensor>; 1] {
//!         let dy = values("dy", &upstream).expect("f32").to_vec();
//!         let dx = self.0.iter().zip(&dy).map(|(x, dy)| 3.0 * x * x * dy).collect::<Vec<_>>();
//!         [Some(tensor(dx, [self.0.len()]))]
//!     }
//! }
//!
//! fn cube(x: Tensor<1>) -> grpo_burn::Result<Tensor<1>> {
//!     let graph = Graph::default().join("x", &x)?;
//!     let x = Operand::new("x", x)?;
//!     let input = values("x", &x.storage)?.to_vec();
//!     let output = tensor(input.iter().map(|x| x.powi(3)).collect(), [input.len()]);
//!     Ok(record(graph, output, [x.node], CubeGrad(input)))
//! }
//!
//! let x = Tensor::<1>::from_data([2.0], &Device::flex().autodiff()).require_grad();
//! let gradients = cube(x.clone())?.backward();
//! assert_eq!(x.grad(&gradients).expect("tracked").into_data().try_to_vec::<f32>().expect("f32"), [12.0]);
//! # Ok::<(), grpo_burn::Error>(())
//! ```

use crate::error::{Error, Result};
use crate::operand::{row_major, slice};
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, NoCheckpointing};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Flex};
use burn::tensor::{Bytes, DType, GradientCheckpointingStrategy, PrimitiveConversionError, Shape, Tensor};
use grpo_core::TensorRef;
use std::fmt::Debug;
use std::marker::PhantomData;

type AutodiffTensor = FloatTensor<Autodiff<Flex>>;

/// The gradient-checkpointing strategy that all graphs of one call share.
#[derive(Clone, Copy, Debug, Default)]
pub struct Graph(Option<GradientCheckpointingStrategy>);

impl Graph {
    /// Takes the graph of one more tensor in; a tensor without autodiff is a constant and fits any graph.
    ///
    /// # Errors
    /// [`Error::Checkpointing`] when the graphs differ in their strategy.
    pub fn join<const D: usize>(self, name: &'static str, tensor: &Tensor<D>) -> Result<Self> {
        match (self.0, tensor.gradient_checkpointing_strategy()) {
            (Some(ours), Some(theirs)) if ours != theirs => Err(Error::Checkpointing { tensor: name }),
            (ours, theirs) => Ok(Self(ours.or(theirs))),
        }
    }

    /// A tensor of this graph.
    fn tensor<const D: usize>(self, primitive: AutodiffTensor) -> Tensor<D> {
        match self.0.unwrap_or_default() {
            GradientCheckpointingStrategy::Disabled => Tensor::from_primitive::<Autodiff<Flex>>(primitive),
            GradientCheckpointingStrategy::Balanced => {
                Tensor::from_primitive::<Autodiff<Flex, BalancedCheckpointing>>(primitive)
            }
        }
    }
}

/// A tensor taken apart: storage, place in the graph, and whether the graph wants its gradient.
#[derive(Debug)]
pub struct Operand {
    /// The storage, which may be shared and of any layout.
    pub storage: FlexTensor,
    /// The place in the graph.
    pub node: NodeGuard,
    /// Whether the graph wants its gradient.
    pub tracked: bool,
}

impl Operand {
    /// Takes a tensor of any rank apart without copying it.
    ///
    /// # Errors
    /// [`Error::NotFlex`] for a tensor of another backend.
    pub fn new<const D: usize>(name: &'static str, tensor: Tensor<D>) -> Result<Self> {
        let tracked = tensor.is_autodiff() && tensor.is_tracked();
        let primitive = match tensor.gradient_checkpointing_strategy() {
            None => tensor.try_into_primitive::<Flex>().map(AutodiffTensor::new),
            Some(GradientCheckpointingStrategy::Disabled) => tensor.try_into_primitive::<Autodiff<Flex>>(),
            Some(GradientCheckpointingStrategy::Balanced) => {
                tensor.try_into_primitive::<Autodiff<Flex, BalancedCheckpointing>>()
            }
        };
        let (storage, node) = primitive.map_err(|e| not_flex(name, e))?.into_parts();
        Ok(Self { storage, node, tracked })
    }

    /// The same with row-major storage: a copy where it was not that already.
    #[must_use]
    pub fn row_major(self) -> Self {
        Self { storage: row_major(self.storage), ..self }
    }

    /// Stands in for an argument that was not given.
    pub fn absent() -> Self {
        let nothing = FlexTensor::zeros(Shape::from([1]), DType::F32);
        let (storage, node) = AutodiffTensor::new(nothing).into_parts();
        Self { storage, node, tracked: false }
    }
}

fn not_flex(tensor: &'static str, error: PrimitiveConversionError) -> Error {
    let (PrimitiveConversionError::BackendMismatch(reason) | PrimitiveConversionError::KindMismatch(reason)) = error;
    Error::NotFlex { tensor, reason }
}

/// The derivative of an operation with N tensors, with what it keeps of the forward pass.
pub trait Derivative<const N: usize>: Clone + Send + Debug + 'static {
    /// The gradient of each tensor, in its shape and dtype, from that of the output; it is not looked at where the tensor is not
    /// tracked.
    ///
    /// `upstream` is row-major.
    fn gradients(self, upstream: FlexTensor, tracked: [bool; N]) -> [Option<FlexTensor>; N];
}

/// Puts `output` into the graph as a function of `parents`.
pub fn record<const N: usize, const D: usize, T: Derivative<N>>(
    graph: Graph,
    output: FlexTensor,
    parents: [NodeGuard; N],
    derivative: T,
) -> Tensor<D> {
    // Compute-bound operations are never recomputed, so the strategy of the graph plays no part here.
    let output = match Recorded(PhantomData).prepare::<NoCheckpointing>(parents).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(derivative, output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    };
    graph.tensor(output)
}

/// The backward step of an operation whose state is its derivative.
#[derive(Debug)]
struct Recorded<T>(PhantomData<T>);

impl<const N: usize, T: Derivative<N>> Backward<Flex, N> for Recorded<T> {
    type State = T;

    fn backward(self, ops: Ops<T, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let upstream = row_major(grads.consume::<Flex>(&ops.node));
        let tracked = ops.parents.each_ref().map(Option::is_some);
        for (parent, gradient) in ops.parents.into_iter().zip(ops.state.gradients(upstream, tracked)) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<Flex>(parent.id, gradient);
            }
        }
    }
}

/// The elements of a row-major f32 tensor.
///
/// # Errors
/// [`Error::Dtype`] for another dtype, [`Error::Storage`] for another layout.
pub fn values<'a>(name: &'static str, tensor: &'a FlexTensor) -> Result<&'a [f32]> {
    if tensor.dtype() != DType::F32 {
        return Err(Error::Dtype { tensor: name, expected: "f32", found: tensor.dtype() });
    }
    match slice(name, tensor)? {
        TensorRef::F32(values) => Ok(values),
        _ => Err(Error::Storage { tensor: name }),
    }
}

/// The elements of a row-major tensor, f32 or bf16, where they lie.
///
/// # Errors
/// [`Error::Storage`] for another dtype, layout or place.
pub fn elements<'a>(name: &'static str, tensor: &'a FlexTensor) -> Result<TensorRef<'a>> {
    slice(name, tensor)
}

/// A row-major f32 tensor that adopts `values`, as many as the shape says.
pub fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(Shape::from(shape)), DType::F32)
}
