//! LoRA (arXiv 2106.09685) on the matrices of a decoder: a matrix W acts as W + s B A, and only A and B are trained. The matrices of experts
//! have an A and a B for each expert; PEFT stores the adapters of a layer as one A `[E r, I]`, expert by expert, and one B `[O, r E]`, in which the
//! columns of an expert are E apart.
//!
//! Legend: L layers, E experts, r rank, V vocabulary, H hidden size, O and I rows and columns of a matrix.

use super::parameters::{Names, Parameter, ParameterValues, parameters};
use super::{Compute, Decoder, Format, dot};
use grpo_models::{AdaptedMatrix, Axis, Experts, LoraConfig, Matrix, ModelConfig, Role};
use grpo_stablehlo::{Dtype, Value};

/// The adapters of a decoder: the adapted matrices, the rank and the scaling.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapters {
    rank: usize,
    scaling: f64,
    matrices: Vec<AdaptedMatrix>,
}

impl Adapters {
    /// Creates the adapters that `lora` configures for a model.
    ///
    /// ```
    /// use grpo_models::Axis;
    /// use grpo_policy_pjrt::decoder::Adapters;
    ///
    /// let config = grpo_models::ModelConfig::default();
    /// let adapters = Adapters::new(&config, &grpo_models::LoraConfig { r: 4, ..Default::default() })?;
    /// let a = &adapters.parameters(&config)[0];
    /// assert_eq!((&a.shape[..], &a.axes[..]), (&[2, 4, 64][..], &[Axis::Layer, Axis::Rank, Axis::Embed][..]));
    /// assert_eq!(a.tensors().last(), Some((1, "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight".to_owned())));
    /// # Ok::<(), grpo_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`LoraConfig::resolve`].
    pub fn new(config: &ModelConfig, lora: &LoraConfig) -> grpo_models::Result<Self> {
        Ok(Self { rank: lora.r, scaling: lora.scaling(), matrices: lora.resolve(config)? })
    }

    /// Returns A and B of every matrix, in the argument order of programs: stacked over the L layers of the matrix's stack, `[L, r, I]` and
    /// `[L, O, r]`, or `[L, E, r, I]` and `[L, O, r, E]` for experts, then A and B of the head.
    ///
    /// Layers without an adapter have zeros. If A = 0 and B = 0, both gradients are 0, so these layers never change.
    pub fn parameters(&self, config: &ModelConfig) -> Vec<Parameter> {
        let table = parameters(config);
        let mut all = Vec::new();
        // A matrix with two names in transformers comes with its second name after all others.
        let named =
            (0..2).flat_map(|at| Matrix::ALL.map(|(matrix, role)| (matrix, role, matrix.modules().get(at).copied())));
        for (matrix, role, module) in named {
            let Some(module) = module else { continue };
            if matrix.is_of_experts() {
                all.extend(config.experts.iter().flat_map(|experts| self.of_experts(config, experts, matrix, module)));
                continue;
            }
            // A tied head has the shape of the embedding.
            let is_own = |own: &&Parameter| own.role == role;
            let of_embedding = |own: &&Parameter| role == Role::LmHead && own.role == Role::EmbedTokens;
            let own: Vec<&Parameter> = table.iter().filter(is_own).collect();
            let weights = if own.is_empty() { table.iter().filter(of_embedding).collect() } else { own };
            for weight in weights {
                all.extend(self.of_weight(weight, matrix, module));
            }
        }
        all
    }

    /// Returns A and B of the matrices of a stack, or of the head; nothing if no matrix has an adapter.
    fn of_weight(&self, weight: &Parameter, matrix: Matrix, module: &str) -> Vec<Parameter> {
        let adapted = match weight.is_stacked() {
            true => self.of_layers(&weight.layers, module),
            false => self.named(module).map(|matrix| (0, matrix)).into_iter().collect(),
        };
        if adapted.is_empty() {
            return Vec::new();
        }
        let first = weight.axes.len() - 2;
        let [rows, columns] = [first, first + 1].map(|d| (weight.shape[d], weight.axes[d]));
        let rank = (self.rank, Axis::Rank);
        let parameter =
            |role, part, [rows, columns]: [(usize, Axis); 2], name: fn(&AdaptedMatrix) -> String| Parameter {
                role,
                number: weight.number,
                layers: weight.layers.clone(),
                shape: [&weight.shape[..first], &[rows.0, columns.0]].concat(),
                axes: [&weight.axes[..first], &[rows.1, columns.1]].concat(),
                padding: 0,
                path: match weight.number {
                    0 => format!("{module}.{part}.weight"),
                    number => format!("{module}.{part}.weight.{number}"),
                },
                format: Format::Values,
                names: Names::Listed(adapted.iter().map(|(at, matrix)| (*at, name(matrix))).collect()),
                stacked: weight.stacked,
            };
        vec![
            parameter(Role::LoraA(matrix), "lora_A", [rank, columns], AdaptedMatrix::lora_a),
            parameter(Role::LoraB(matrix), "lora_B", [rows, rank], AdaptedMatrix::lora_b),
        ]
    }

    /// Returns A and B of the matrices of experts, sharded like the experts; nothing if no layer has such adapters.
    fn of_experts(&self, config: &ModelConfig, experts: &Experts, matrix: Matrix, module: &str) -> Vec<Parameter> {
        let layers: Vec<usize> =
            (0..config.num_hidden_layers).filter(|layer| config.experts_of(*layer).is_some()).collect();
        let adapted = self.of_layers(&layers, module);
        let Some((_, AdaptedMatrix { output, input, .. })) = adapted.first() else { return Vec::new() };
        let of_input = if matrix == Matrix::ExpertDownProj { Axis::Mlp } else { Axis::Embed };
        let stack = (layers.len(), Axis::Layer);
        let (experts, rank) = ((experts.num_experts, Axis::Experts), (self.rank, Axis::Rank));
        let parameter = |role, part, dimensions: [(usize, Axis); 4], name: fn(&AdaptedMatrix) -> String| Parameter {
            role,
            number: 0,
            layers: layers.clone(),
            shape: dimensions.map(|(size, _)| size).to_vec(),
            axes: dimensions.map(|(_, axis)| axis).to_vec(),
            padding: 0,
            path: format!("{module}.{part}.weight"),
            format: Format::Values,
            names: Names::Listed(adapted.iter().map(|(at, matrix)| (*at, name(matrix))).collect()),
            stacked: 1,
        };
        let a = [stack, experts, rank, (*input, of_input)];
        let b = [stack, (*output, Axis::ExpertRows), rank, experts];
        vec![
            parameter(Role::LoraA(matrix), "lora_A", a, AdaptedMatrix::lora_a),
            parameter(Role::LoraB(matrix), "lora_B", b, AdaptedMatrix::lora_b),
        ]
    }

    /// Returns the adapted matrices `module` of these layers, each with the index of its layer.
    fn of_layers(&self, layers: &[usize], module: &str) -> Vec<(usize, &AdaptedMatrix)> {
        let of_layer =
            |(at, layer): (usize, &usize)| Some((at, self.named(&format!("model.layers.{layer}.{module}"))?));
        layers.iter().enumerate().filter_map(of_layer).collect()
    }

    fn named(&self, name: &str) -> Option<&AdaptedMatrix> {
        self.matrices.iter().find(|matrix| matrix.name == name)
    }
}

/// Returns the parameters of a value head: a weight `[H, 1]` and a bias.
pub(super) fn value_head(config: &ModelConfig) -> [Parameter; 2] {
    let of = |role, shape: &[usize], axes: &[Axis], path: &str| Parameter {
        role,
        number: 0,
        layers: Vec::new(),
        shape: shape.to_vec(),
        axes: axes.to_vec(),
        padding: 0,
        format: Format::Values,
        path: path.to_owned(),
        names: Names::Listed(vec![(0, path.to_owned())]),
        stacked: 0,
    };
    [
        of(Role::ValueHead, &[config.hidden_size, 1], &[Axis::Embed, Axis::Value], "value_head.weight"),
        of(Role::ValueHeadBias, &[1], &[Axis::Value], "value_head.bias"),
    ]
}

impl ParameterValues {
    /// Returns A and B of a matrix if it has an adapter.
    pub(crate) fn adapter(&self, matrix: Matrix) -> Option<[&Value; 2]> {
        Some([self.get(Role::LoraA(matrix))?, self.get(Role::LoraB(matrix))?])
    }
}

impl Decoder {
    /// Returns `x W^T + bias` `[..., O]` in f32 for `x` `[..., I]`, plus the output of the matrix's adapter, if any.
    #[track_caller]
    pub(crate) fn linear(&self, weights: &ParameterValues, x: &Value, matrix: Matrix, bias: Option<&Value>) -> Value {
        self.adapted(weights, x, matrix, self.project(weights, x, matrix.role(), bias))
    }

    /// Returns `product + s (x A^T) B^T` `[..., O]` in f32 for `x` `[..., I]`, or `product` if the matrix has no adapter.
    #[track_caller]
    pub(crate) fn adapted(&self, weights: &ParameterValues, x: &Value, matrix: Matrix, product: Value) -> Value {
        match self.low(weights, x, matrix) {
            Some(low) => product + self.product(weights, &low, Role::LoraB(matrix), Dtype::F32),
            None => product,
        }
    }

    /// Returns `s x A^T` `[..., r]` in f32 for `x` `[..., I]`, if the matrix has an adapter.
    #[track_caller]
    pub(crate) fn low(&self, weights: &ParameterValues, x: &Value, matrix: Matrix) -> Option<Value> {
        let (_, adapters) = weights.adapter(matrix).zip(self.adapters())?;
        let low = self.product(weights, x, Role::LoraA(matrix), Dtype::F32);
        Some(&low * low.like(adapters.scaling))
    }

    /// Returns s, the factor of B A; 0 without adapters.
    pub(crate) fn scaling(&self) -> f64 {
        self.adapters().map_or(0.0, |adapters| adapters.scaling)
    }

    /// Returns s B A `[O, I]` in f32, the weight update of an adapter, for A `[r, I]` and B `[O, r]`.
    pub(crate) fn low_rank(&self, [a, b]: [&Value; 2]) -> Value {
        // Full f32 precision, because the result is added to weights.
        let product = dot(b, a, (&[], &[]), (1, 0), Compute::F32);
        &product * product.like(self.scaling())
    }

    /// Returns s B A `[E, I, O]` in f32 of all experts, for A `[E, r, I]` and B `[O, r, E]`.
    pub(crate) fn low_rank_of_experts(&self, [a, b]: [&Value; 2]) -> Value {
        let product = dot(a, b, (&[0], &[2]), (1, 1), Compute::F32);
        &product * product.like(self.scaling())
    }

    /// Returns the values `[N]` in f32 of the hidden states `[N, H]` after the final norm.
    pub(crate) fn values(&self, weights: &ParameterValues, hidden: &Value) -> Value {
        let hidden = hidden.convert(Dtype::F32);
        let product = dot(&hidden, &weights[Role::ValueHead], (&[], &[]), (1, 0), Compute::F32);
        let product = product.reshape(&hidden.shape()[..1]);
        let bias = weights[Role::ValueHeadBias].reshape(&[]);
        &product + bias.broadcast_in_dim(product.shape(), &[])
    }
}
