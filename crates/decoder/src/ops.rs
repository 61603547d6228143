//! The operations of a layer.

/// A norm of a layer, by its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// The norm of the mixer's input.
    BeforeMixer,
    /// The norm of the mixer's output.
    AfterMixer,
    /// The norm of the MLP's input.
    BeforeMlp,
    /// The norm of the MLP's output.
    AfterMlp,
}

impl Norm {
    /// All norms, in the order of [`grpo_models::NormPlacement::names`].
    pub const ALL: [Self; 4] = [Self::BeforeMixer, Self::AfterMixer, Self::BeforeMlp, Self::AfterMlp];
}

/// An MLP of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mlp {
    /// The MLP of a layer without experts.
    Dense,
    /// The shared expert, which computes every token in addition to its experts.
    SharedExpert,
}

/// An output projection of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    /// The mixer's output projection, `[A D, H]` or `[Hv Dv, H]`.
    Mixer,
    /// An MLP's output projection, `[I, H]`.
    Mlp(Mlp),
}

/// The residual stream before an update, and how the update is added: `stream + factor * norm(update)`.
#[derive(Clone, Copy, Debug)]
pub struct Residual<T> {
    /// The residual stream, `[N, H]`.
    pub stream: T,
    /// The norm of the update, if it has one.
    pub norm: Option<Norm>,
    /// The factor of the update.
    pub factor: f64,
}

/// The operations of a layer on a backend. The [crate documentation](crate) describes the implementations.
///
/// # Errors
/// Every operation returns the error of its backend.
pub trait LayerOps {
    /// Activations, `[N, ..]`.
    type Tensor;
    /// Queries, keys and values of the tokens.
    type Heads;
    /// The error of an operation.
    type Error;

    /// Returns the input of a mixer or an MLP, which is `x` `[N, H]`, normalised if it has a norm, and `x` for the residual stream.
    fn branch(&mut self, x: Self::Tensor, norm: Option<Norm>) -> Result<[Self::Tensor; 2], Self::Error>;

    /// Projects `x` `[N, H]` to queries, keys and values, and to the gates `[N, A D]` of the outputs, if the model has them.
    #[allow(clippy::type_complexity)]
    fn heads(&mut self, x: Self::Tensor) -> Result<(Self::Heads, Option<Self::Tensor>), Self::Error>;

    /// Completes the values: values without a projection are the keys of [`LayerOps::heads`], and values may be normalised.
    fn complete_values(&mut self, heads: Self::Heads) -> Result<Self::Heads, Self::Error>;

    /// Normalises queries and keys, each head alone or all heads together.
    fn norm_heads(&mut self, heads: Self::Heads) -> Result<Self::Heads, Self::Error>;

    /// Applies the rotary embedding of the tokens' positions to queries and keys.
    fn rotate(&mut self, heads: Self::Heads) -> Result<Self::Heads, Self::Error>;

    /// Computes softmax attention `[N, A D]` over the tokens and the cache, which gets the keys and values of the tokens.
    fn attention(&mut self, heads: Self::Heads) -> Result<Self::Tensor, Self::Error>;

    /// Multiplies `values` `[N, I]` by the sigmoid of their gates, `[N, I]`, or `[N, 1]` for the values of a row.
    fn gate(&mut self, values: Self::Tensor, gates: Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Computes the gated outputs `[N, Hv Dv]` of a Gated DeltaNet for `x` `[N, H]`, before the output projection, from the states of the
    /// cache, which become the states after the tokens.
    fn gated_delta_net(&mut self, x: Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Computes `activation(gate(x)) * up(x)` `[N, I]` of an MLP for `x` `[N, H]`, before the output projection.
    fn gated_mlp(&mut self, x: Self::Tensor, mlp: Mlp) -> Result<Self::Tensor, Self::Error>;

    /// Computes the gates `[N, 1]` of the shared expert for `x` `[N, H]`, before the sigmoid.
    fn shared_gates(&mut self, x: Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Computes the weighted sum `[N, H]` of the outputs of each token's experts for `x` `[N, H]`.
    fn experts(&mut self, x: Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Adds the projection of `x`, normalised and multiplied as `residual` says, to the residual stream.
    fn linear_add(
        &mut self,
        residual: Residual<Self::Tensor>,
        x: Self::Tensor,
        projection: Projection,
    ) -> Result<Self::Tensor, Self::Error>;

    /// Adds `update` `[N, H]`, normalised and multiplied as `residual` says, to the residual stream.
    fn add(&mut self, residual: Residual<Self::Tensor>, update: Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Multiplies `x` `[N, H]` by the factor of the layer's output.
    fn scale(&mut self, x: Self::Tensor) -> Result<Self::Tensor, Self::Error>;
}
