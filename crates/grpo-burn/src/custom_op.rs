//! Custom operations on burn's CPU backend Flex: values computed by any code, with custom derivatives.
//!
//! The GRPO loss is one of them. Others take the same three steps: [`Operand::new`] converts each tensor, any code computes the output from
//! the [`values`], and [`record`] adds it to the graph with its [`Derivative`].
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
pub use crate::operand::elements;
use crate::operand::row_major;
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

/// The gradient-checkpointing strategy that all tensors of one call share.
#[derive(Clone, Copy, Debug, Default)]
pub struct Graph(Option<GradientCheckpointingStrategy>);

impl Graph {
    /// Adds the graph of one more tensor; a tensor without autodiff is a constant and fits any graph.
    ///
    /// # Errors
    /// [`Error::Checkpointing`] if the graphs use different strategies.
    pub fn join<const D: usize>(self, name: &'static str, tensor: &Tensor<D>) -> Result<Self> {
        match (self.0, tensor.gradient_checkpointing_strategy()) {
            (Some(ours), Some(theirs)) if ours != theirs => Err(Error::Checkpointing { tensor: name }),
            (ours, theirs) => Ok(Self(ours.or(theirs))),
        }
    }

    /// Returns a tensor of this graph.
    fn tensor<const D: usize>(self, primitive: AutodiffTensor) -> Tensor<D> {
        match self.0.unwrap_or_default() {
            GradientCheckpointingStrategy::Disabled => Tensor::from_primitive::<Autodiff<Flex>>(primitive),
            GradientCheckpointingStrategy::Balanced => {
                Tensor::from_primitive::<Autodiff<Flex, BalancedCheckpointing>>(primitive)
            }
        }
    }
}

/// A tensor's storage, its node in the graph, and whether the graph tracks it.
#[derive(Debug)]
pub struct Operand {
    /// The storage, which may be shared and of any layout.
    pub storage: FlexTensor,
    /// The node in the graph.
    pub node: NodeGuard,
    /// `true` if the graph tracks its gradient.
    pub tracked: bool,
}

impl Operand {
    /// Converts a tensor of any rank without copying it.
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

    /// Returns the operand with row-major storage; copies it only if it is not row-major.
    #[must_use]
    pub fn row_major(self) -> Self {
        Self { storage: row_major(self.storage), ..self }
    }

    /// Creates a placeholder for an optional argument that is missing.
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

/// The derivative of an operation with N tensors, including its saved values of the forward pass.
pub trait Derivative<const N: usize>: Clone + Send + Debug + 'static {
    /// Returns the gradient of each tensor, in its shape and dtype, from the gradient of the output. Gradients of tensors that are not
    /// tracked are ignored.
    ///
    /// `upstream` is row-major.
    fn gradients(self, upstream: FlexTensor, tracked: [bool; N]) -> [Option<FlexTensor>; N];
}

/// Adds `output` to the graph as a function of `parents`.
pub fn record<const N: usize, const D: usize, T: Derivative<N>>(
    graph: Graph,
    output: FlexTensor,
    parents: [NodeGuard; N],
    derivative: T,
) -> Tensor<D> {
    // Compute-bound operations are never recomputed, so the strategy of the graph has no effect.
    let output = match Recorded(PhantomData).prepare::<NoCheckpointing>(parents).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(derivative, output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    };
    graph.tensor(output)
}

/// The backward step of an operation, whose state is its derivative.
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

/// Returns the elements of a row-major f32 tensor.
///
/// # Errors
/// [`Error::Dtype`] for another dtype, [`Error::Storage`] for another layout.
pub fn values<'a>(name: &'static str, tensor: &'a FlexTensor) -> Result<&'a [f32]> {
    if tensor.dtype() != DType::F32 {
        return Err(Error::Dtype { tensor: name, expected: "f32", found: tensor.dtype() });
    }
    match elements(name, tensor)? {
        TensorRef::F32(values) => Ok(values),
        _ => Err(Error::Storage { tensor: name }),
    }
}

/// Creates a row-major f32 tensor that takes ownership of `values`, whose number must match the shape.
pub fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(Shape::from(shape)), DType::F32)
}
