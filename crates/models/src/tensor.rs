//! Named tensors, by which parameters are exported from and loaded into a policy.

/// A tensor of f32 values in host memory, with the name of the parameter that it belongs to.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    /// The name of the parameter.
    pub name: String,
    /// The sizes of the dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The values in row-major order; as many as the product of the sizes.
    pub data: Vec<f32>,
}
