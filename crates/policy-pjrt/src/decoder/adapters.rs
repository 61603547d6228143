//! LoRA (arXiv 2106.09685) on the matrices of a decoder: a matrix W acts as W + s B A, and only A and B are trained.
//!
//! Legend: L layers, r rank, V vocabulary, H hidden size, O and I rows and columns of a matrix.

use super::parameters::{Axis, Names, Parameter, ParameterValues, Role, parameters};
use super::{Compute, Decoder, Format, dot};
use models::{AdaptedMatrix, LoraConfig, ModelConfig};
use stablehlo::{Dtype, Value};

/// A matrix that can have an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // named as in Hugging Face's folders
pub enum Matrix {
    QProj,
    KProj,
    VProj,
    QkvProj,
    OProj,
    InProjQkv,
    InProjZ,
    InProjB,
    InProjA,
    OutProj,
    GateProj,
    UpProj,
    GateUpProj,
    DownProj,
    LmHead,
}

impl Matrix {
    /// All matrices, with their roles in the decoder and their module names in a layer or a model.
    const ALL: [(Self, Role, &'static str); 15] = [
        (Self::QProj, Role::QProj, "self_attn.q_proj"),
        (Self::KProj, Role::KProj, "self_attn.k_proj"),
        (Self::VProj, Role::VProj, "self_attn.v_proj"),
        (Self::QkvProj, Role::QkvProj, "self_attn.qkv_proj"),
        (Self::OProj, Role::OProj, "self_attn.o_proj"),
        (Self::InProjQkv, Role::InProjQkv, "linear_attn.in_proj_qkv"),
        (Self::InProjZ, Role::InProjZ, "linear_attn.in_proj_z"),
        (Self::InProjB, Role::InProjB, "linear_attn.in_proj_b"),
        (Self::InProjA, Role::InProjA, "linear_attn.in_proj_a"),
        (Self::OutProj, Role::OutProj, "linear_attn.out_proj"),
        (Self::GateProj, Role::GateProj, "mlp.gate_proj"),
        (Self::UpProj, Role::UpProj, "mlp.up_proj"),
        (Self::GateUpProj, Role::GateUpProj, "mlp.gate_up_proj"),
        (Self::DownProj, Role::DownProj, "mlp.down_proj"),
        (Self::LmHead, Role::LmHead, "lm_head"),
    ];

    /// Returns the role of the matrix in the decoder.
    pub fn role(self) -> Role {
        Self::ALL[self as usize].1
    }

    /// Returns the matrix of this role, or `None` if it cannot have an adapter.
    pub fn of(role: Role) -> Option<Self> {
        Self::ALL.iter().find(|(_, of, _)| *of == role).map(|(matrix, ..)| *matrix)
    }
}

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
    /// use policy_pjrt::decoder::{Adapters, Axis};
    ///
    /// let config = models::ModelConfig::default();
    /// let adapters = Adapters::new(&config, &models::LoraConfig { r: 4, ..Default::default() })?;
    /// let a = &adapters.parameters(&config)[0];
    /// assert_eq!((&a.shape[..], &a.axes[..]), (&[2, 4, 64][..], &[Axis::Layer, Axis::Rank, Axis::Embed][..]));
    /// assert_eq!(a.tensors().last(), Some((1, "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight".to_owned())));
    /// # Ok::<(), models::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`LoraConfig::resolve`]; [`models::Error::Target`] for a parameter of experts.
    pub fn new(config: &ModelConfig, lora: &LoraConfig) -> models::Result<Self> {
        let matrices = lora.resolve(config)?;
        if let Some(matrix) = matrices.iter().find(|matrix| matrix.experts.is_some()) {
            let reason = "lora.target_parameters: the host alone computes adapters of experts (policy.device: host)";
            return Err(models::Error::Target { target: matrix.name.clone(), reason: reason.to_owned() });
        }
        Ok(Self { rank: lora.r, scaling: lora.scaling(), matrices })
    }

    /// Returns A and B of every matrix, in the argument order of programs: stacked over the L layers of the matrix's stack, `[L, r, I]` and
    /// `[L, O, r]`, then A and B of the head.
    ///
    /// Layers without an adapter have zeros. If A = 0 and B = 0, both gradients are 0, so these layers never change.
    pub fn parameters(&self, config: &ModelConfig) -> Vec<Parameter> {
        let table = parameters(config);
        let mut all = Vec::new();
        for (matrix, role, module) in Matrix::ALL {
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
        let named = |name: &str| self.matrices.iter().find(|matrix| matrix.name == name);
        let adapted: Vec<(usize, &AdaptedMatrix)> = match weight.is_stacked() {
            true => {
                let of_layer =
                    |(at, layer): (usize, &usize)| Some((at, named(&format!("model.layers.{layer}.{module}"))?));
                weight.layers.iter().enumerate().filter_map(of_layer).collect()
            }
            false => named(module).map(|matrix| (0, matrix)).into_iter().collect(),
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
}

/// Returns the parameters of a value head: a weight `[H, 1]` and a bias.
pub(super) fn value_head(config: &ModelConfig) -> [Parameter; 2] {
    let of = |role, shape: &[usize], axes: &[Axis], path: &str| Parameter {
        role,
        number: 0,
        layers: Vec::new(),
        shape: shape.to_vec(),
        axes: axes.to_vec(),
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

    /// Returns s B A `[O, I]` in f32, the weight update of an adapter, for A `[r, I]` and B `[O, r]`.
    pub(crate) fn low_rank(&self, [a, b]: [&Value; 2]) -> Value {
        // Full f32 precision, because the result is added to weights.
        let product = dot(b, a, (&[], &[]), (1, 0), Compute::F32);
        let scaling = self.adapters().map_or(0.0, |adapters| adapters.scaling);
        &product * product.like(scaling)
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
