//! The whole policy: embedding, blocks, final norm, LM head.

use super::batch::PackedBatch;
use super::block::Block;
use super::build::{Builder, Initial, Seed, Source};
use super::hugging_face::{Stored, StoredAdapter, export_parts};
use super::inference::Inference;
use super::layers::{Linear, RmsNorm};
use super::lora::{Adapted, LowRank, is_adapter};
use super::params::{Which, for_each_parameter, load_parameters, named_parameters, to_host};
use super::rope::Rope;
use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use models::{AdaptedMatrix, LoraConfig, ModelConfig, NamedTensor, Weights};
use policy::{Error, Result, TensorSink};

/// A decoder of the families Qwen2, Qwen3 and Llama 3. Hidden states and LM head are exposed apart because the loss takes them apart.
///
/// ```
/// use policy_burn::decoder::{Decoder, PackedBatch};
///
/// # fn main() -> policy::Result<()> {
/// let decoder = Decoder::new(&models::ModelConfig::default(), 0, &burn::tensor::Device::flex())?;
/// let hidden = decoder.forward(&PackedBatch::new(&[vec![1, 5, 9], vec![1, 7]])?)?;
/// assert_eq!(hidden.dims(), [5, 64]);
/// # Ok(())
/// # }
/// ```
#[derive(Module, Debug)]
pub struct Decoder {
    /// The embedding `[V, H]`.
    pub embed_tokens: Param<Tensor<2>>,
    /// The layers.
    pub layers: Vec<Block>,
    /// The norm before the LM head.
    pub norm: RmsNorm,
    /// The LM head `[V, H]`; `None` when the embedding serves as head.
    pub lm_head: Option<Param<Tensor<2>>>,
    /// The adapter of the LM head.
    pub lora_head: Option<LowRank>,
    #[module(skip)]
    adapted: Adapted,
    #[module(skip)]
    rope: Rope,
    #[module(skip)]
    config: ModelConfig,
}

impl Decoder {
    /// A decoder with initial weights that depend on `config` and `seed` only. On a device with autodiff it trains.
    ///
    /// # Errors
    /// [`Error::Model`] for an illegal configuration.
    pub fn new(config: &ModelConfig, seed: u64, device: &Device) -> Result<Self> {
        Self::build(config, &mut Seed(seed), device)
    }

    /// A decoder of stored weights, which are read tensor by tensor in f32. On a device with autodiff it trains.
    ///
    /// # Errors
    /// [`Error::Model`] for an illegal configuration, for weights that are not those of the configuration, and for weights that are
    /// not finite.
    pub fn from_weights(config: &ModelConfig, weights: &Weights, device: &Device) -> Result<Self> {
        weights.check(config)?;
        Self::build(config, &mut Stored { config, weights }, device)
    }

    /// A decoder whose values come from `source`.
    ///
    /// # Errors
    /// [`Error::Model`] for an illegal configuration, and those of the source.
    pub(crate) fn build(config: &ModelConfig, source: &mut dyn Source, device: &Device) -> Result<Self> {
        config.validate()?;
        let mut of = Builder { config, device, source };
        let (matrix, initial) =
            ([config.vocab_size, config.hidden_size], Initial::Normal { std: config.initializer_range });
        let embed_tokens = of.parameter("embed_tokens", matrix, initial)?;
        let layers = (0..config.num_hidden_layers).map(|i| Block::new(&mut of, &format!("layers.{i}")));
        let layers = layers.collect::<Result<_>>()?;
        let norm = RmsNorm::new(&mut of, "norm", config.hidden_size, config.rms_norm_eps)?;
        let lm_head = if config.tie_word_embeddings { None } else { Some(of.parameter("lm_head", matrix, initial)?) };
        let (rope, config) = (Rope::new(config), config.clone());
        Ok(Self { embed_tokens, layers, norm, lm_head, lora_head: None, adapted: Adapted::default(), rope, config })
    }

    /// This decoder with fresh adapters, which change nothing yet and are all that is trained from here on: the weights beneath them are
    /// frozen and shared with every copy. Values depend on `seed` only.
    ///
    /// # Errors
    /// [`Error::Model`] for an illegal configuration or targets that the model does not have.
    pub fn with_lora(self, lora: &LoraConfig, seed: u64) -> Result<Self> {
        let matrices = lora.resolve(&self.config)?;
        self.adapt(lora, matrices, &mut Seed(seed))
    }

    /// This decoder with stored adapters, as [`Decoder::with_lora`].
    ///
    /// # Errors
    /// [`Error::Model`] for an adapter that is not of this model.
    pub fn with_adapter(self, adapter: &models::Adapter) -> Result<Self> {
        let matrices = adapter.matrices().to_vec();
        let adapted = Adapted { matrices: matrices.clone() };
        self.adapt(adapter.config(), matrices, &mut StoredAdapter { adapted, adapter })
    }

    fn adapt(self, lora: &LoraConfig, matrices: Vec<AdaptedMatrix>, source: &mut dyn Source) -> Result<Self> {
        let device = self.device();
        let mut model = self.without_adapters().no_grad();
        model.adapted = Adapted { matrices };
        let (adapted, config) = (model.adapted.clone(), model.config.clone());
        let mut of = Builder { config: &config, device: &device, source };
        for (i, layer) in model.layers.iter_mut().enumerate() {
            let attn = &mut layer.attn;
            let d = attn.heads().width;
            let (queries, keys) = (attn.heads().query * d, attn.heads().key_value * d);
            let modules: [(&str, &mut Linear, &[(&str, usize)]); 4] = [
                (
                    "attn.qkv_proj",
                    &mut attn.qkv_proj,
                    &[("q_proj", 0), ("k_proj", queries), ("v_proj", queries + keys)],
                ),
                ("attn.o_proj", &mut attn.o_proj, &[("o_proj", 0)]),
                (
                    "mlp.gate_up_proj",
                    &mut layer.mlp.gate_up_proj,
                    &[("gate_proj", 0), ("up_proj", config.intermediate_size)],
                ),
                ("mlp.down_proj", &mut layer.mlp.down_proj, &[("down_proj", 0)]),
            ];
            for (module, linear, columns) in modules {
                for (j, matrix) in adapted.of_layer(&i.to_string(), module).into_iter().enumerate() {
                    let first = columns.iter().find(|(part, _)| matrix.name.ends_with(part)).map_or(0, |(_, at)| *at);
                    let name = format!("layers.{i}.{module}.adapters.{j}");
                    linear.adapters.push(LowRank::new(&mut of, &name, lora, matrix, first)?);
                }
            }
        }
        let head = adapted.matrices.iter().find(|matrix| matrix.name == "lm_head");
        model.lora_head = head.map(|matrix| LowRank::new(&mut of, "lora_head", lora, matrix, 0)).transpose()?;
        Ok(model)
    }

    /// This decoder without its adapters: the weights beneath them, which are shared and not copied.
    #[must_use]
    pub fn without_adapters(mut self) -> Self {
        for layer in &mut self.layers {
            let Block { attn, mlp, .. } = layer;
            for linear in [&mut attn.qkv_proj, &mut attn.o_proj, &mut mlp.gate_up_proj, &mut mlp.down_proj] {
                linear.adapters.clear();
            }
        }
        (self.lora_head, self.adapted) = (None, Adapted::default());
        self
    }

    /// Whether there are adapters, which alone are then trained.
    pub fn has_adapters(&self) -> bool {
        !self.adapted.matrices.is_empty()
    }

    /// The configuration that the decoder was made from.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The device that holds the weights.
    pub fn device(&self) -> Device {
        self.embed_tokens.val().device()
    }

    /// The LM head, `[V, H]`: logits are `hidden x lm_head^T`. With an adapter of the head it is a tensor of its own, made for every call.
    ///
    /// # Errors
    /// [`Error::Other`] when the weights are not on burn's CPU backend.
    pub fn lm_head(&self) -> Result<Tensor<2>> {
        let head = self.lm_head.as_ref().unwrap_or(&self.embed_tokens).val();
        match &self.lora_head {
            Some(adapter) => adapter.adapted_head(head),
            None => Ok(head),
        }
    }

    /// Hidden states after the final norm, `[N, H]`.
    ///
    /// # Errors
    /// [`Error::TooLong`], [`Error::Model`] for an unknown token.
    pub fn forward(&self, batch: &PackedBatch) -> Result<Tensor<2>> {
        self.norm.forward(self.run(batch)?)
    }

    /// [`Decoder::forward`] of the rows `rows` alone, which may repeat.
    ///
    /// # Errors
    /// As [`Decoder::forward`].
    pub(crate) fn forward_rows(&self, batch: &PackedBatch, rows: &[usize]) -> Result<Tensor<2>> {
        let x = self.run(batch)?;
        let rows: Vec<i32> = rows.iter().map(|row| *row as i32).collect();
        let count = rows.len();
        let rows = Tensor::<1, Int>::from_data(TensorData::new(rows, [count]), &x.device());
        self.norm.forward(x.select(0, rows))
    }

    /// The weights in the form in which tokens are sampled; those of now, whatever becomes of the decoder.
    ///
    /// # Errors
    /// [`Error::Other`] when the weights are not on burn's CPU backend.
    pub fn inference(&self) -> Result<Inference> {
        Inference::new(self)
    }

    /// Every parameter that is trained with its name and values, e.g. `layers.0.attn.qkv_proj.weight`.
    pub fn parameters(&self) -> Vec<NamedTensor> {
        named_parameters(self)
    }

    /// This decoder with the given values in place of its own; bit for bit what [`Decoder::parameters`] exported.
    ///
    /// # Errors
    /// [`Error::State`] when a name or shape does not fit.
    pub fn with_parameters(self, tensors: &[NamedTensor]) -> Result<Self> {
        load_parameters(self, tensors)
    }

    /// Hands every weight to `sink` under Hugging Face's name and in its layout, one by one: what `transformers` loads. Adapters are
    /// merged into their matrices.
    ///
    /// # Errors
    /// That of the sink; [`Error::Argument`] for an adapter of a head that is the embedding, too, and cannot take it.
    pub fn export(&self, sink: &mut dyn TensorSink) -> Result<()> {
        if self.lora_head.is_some() && self.lm_head.is_none() {
            let expected = "a head of its own (tie_word_embeddings: false) to merge the adapter of lm_head into";
            return Err(Error::argument("export", expected, "a head that is tied to the embedding"));
        }
        for_each_parameter(self, Which::All, |name, shape, values| {
            if is_adapter(name) {
                return Ok(());
            }
            let merged = match (name, self.linear(name)) {
                ("lm_head", _) if self.lora_head.is_some() => Some(to_host(self.lm_head()?)),
                (_, Some(linear)) if !linear.adapters.is_empty() => Some(linear.merged()?),
                _ => None,
            };
            export_parts(self, name, shape, merged.as_deref().unwrap_or(values), sink)
        })
    }

    /// The linear layer whose weight has this name.
    fn linear(&self, name: &str) -> Option<&Linear> {
        let (layer, rest) = name.strip_prefix("layers.")?.split_once('.')?;
        let Block { attn, mlp, .. } = self.layers.get(layer.parse::<usize>().ok()?)?;
        match rest {
            "attn.qkv_proj.weight" => Some(&attn.qkv_proj),
            "attn.o_proj.weight" => Some(&attn.o_proj),
            "mlp.gate_up_proj.weight" => Some(&mlp.gate_up_proj),
            "mlp.down_proj.weight" => Some(&mlp.down_proj),
            _ => None,
        }
    }

    /// Hands the adapters to `sink` under PEFT's names and in its layout, one by one; none where there are none.
    ///
    /// # Errors
    /// That of the sink.
    pub fn export_adapter(&self, sink: &mut dyn TensorSink) -> Result<()> {
        for_each_parameter(self, Which::All, |name, shape, values| {
            if is_adapter(name) { export_parts(self, name, shape, values, sink) } else { Ok(()) }
        })
    }

    /// The adapted matrices.
    pub(super) fn adapted(&self) -> &Adapted {
        &self.adapted
    }

    /// Hands values of the parameters under their names here, such as [`crate::GradientSum::parameters`], to `sink` under Hugging Face's
    /// names and in its layout; those of adapters under PEFT's.
    ///
    /// # Errors
    /// That of the sink.
    pub fn export_values(&self, values: &[NamedTensor], sink: &mut dyn TensorSink) -> Result<()> {
        for NamedTensor { name, shape, data } in values {
            export_parts(self, name, shape, data, sink)?;
        }
        Ok(())
    }

    /// The rotary positions.
    pub(super) fn rope(&self) -> &Rope {
        &self.rope
    }

    /// The residual stream `[N, H]` behind the last layer.
    fn run(&self, batch: &PackedBatch) -> Result<Tensor<2>> {
        check(&self.config, batch.ids(), batch.longest())?;
        let rope = self.rope.table(batch.longest())?;
        let ids: Vec<i32> = batch.ids().iter().map(|&id| id as i32).collect();
        let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [batch.ids().len()]), &self.device());
        let mut x = self.embed_tokens.val().select(0, ids);
        for layer in &self.layers {
            x = layer.forward(x, &rope, &batch.sequences)?;
        }
        Ok(x)
    }
}

/// Whether tokens are in the vocabulary and a sequence of `length` has positions.
pub(super) fn check(config: &ModelConfig, ids: &[u32], length: usize) -> Result<()> {
    let limit = config.max_position_embeddings;
    if length > limit {
        return Err(Error::TooLong { what: "sequence", length, limit });
    }
    match ids.iter().find(|id| **id as usize >= config.vocab_size) {
        Some(&id) => Err(models::Error::UnknownToken { id, vocab_size: config.vocab_size }.into()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
