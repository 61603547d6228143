//! A forward pass over the packed weights.

use super::Inference;
use super::weights::{Embedding, Layer, LayerAttention, LayerDeltaNet, LayerMixer, LayerMlp, Matrix, Norm, Weight};
use crate::decoder::autodiff_ops::{sigmoid, without_gates};
use crate::decoder::experts::routed;
use crate::decoder::host::read;
use crate::decoder::rope::RopeTables;
use crate::decoder::tape::no_such_part;
use grpo_backend_cpu::layers::{Add, HeadNorms};
use grpo_decoder::{BlockSpec, LayerOps, Mlp, Projection, Residual, block};
use grpo_policy::{Error, Result};
use std::mem::take;
use std::rc::Rc;

/// A layer in a forward pass. `attend` computes the attention `[N, A D]` of a layer from queries, keys and values after the rotary embedding,
/// `recur` the output `[N, Hv Dv]` of a Gated DeltaNet from its projected input; both have the caches. Both get the index of the layer among the layers
/// with the same mixer.
struct Eager<'a, A, R> {
    model: &'a Inference,
    /// The index of the layer.
    number: usize,
    ropes: RopeTables,
    positions: &'a [usize],
    /// The rows, in ascending order, that the caller reads after the last layer.
    wanted: &'a [usize],
    attend: A,
    recur: R,
    /// The experts `[N, R, k]` of all rows in the R layers with experts, if they are recorded.
    recorded: Vec<u16>,
    memory: Memory,
}

/// The largest activations of a layer, whose memory the next layer uses.
#[derive(Default)]
struct Memory {
    gate_up: Vec<f32>,
    gated: Vec<f32>,
}

impl<'a, A, R> Eager<'a, A, R> {
    fn layer(&self) -> &'a Layer {
        &self.model.layers[self.number]
    }

    fn attention_part(&self) -> Result<&'a LayerAttention> {
        match &self.layer().mixer {
            LayerMixer::Attention { attention, .. } => Ok(attention),
            LayerMixer::GatedDeltaNet { .. } => no_such_part("attention"),
        }
    }

    fn norm(&self, norm: grpo_decoder::Norm) -> &'a Option<Norm> {
        let Layer { input_norm, attn_output_norm, post_norm, mlp_output_norm, .. } = self.layer();
        match norm {
            grpo_decoder::Norm::BeforeMixer => input_norm,
            grpo_decoder::Norm::AfterMixer => attn_output_norm,
            grpo_decoder::Norm::BeforeMlp => post_norm,
            grpo_decoder::Norm::AfterMlp => mlp_output_norm,
        }
    }

    /// Records the chosen experts `[N, k]` of the layer.
    fn record(&mut self, chosen: &[u32], top: usize) {
        let router = self.model.config.routers_before(self.number);
        let width = self.model.recorded_width();
        if width > 0 {
            for (row, chosen) in self.recorded.chunks_exact_mut(width).zip(chosen.chunks_exact(top)) {
                let own = &mut row[router * top..(router + 1) * top];
                // A model has at most 2^12 experts.
                own.iter_mut().zip(chosen).for_each(|(to, id)| *to = *id as u16);
            }
        }
    }
}

impl<A, R> LayerOps for Eager<'_, A, R>
where
    A: FnMut(usize, &LayerAttention, Vec<f32>) -> Result<Vec<f32>>,
    R: FnMut(usize, &LayerDeltaNet, Vec<f32>) -> Result<Vec<f32>>,
{
    type Tensor = Rc<Vec<f32>>;
    type Heads = Vec<f32>;
    type Error = Error;

    fn branch(&mut self, x: Self::Tensor, norm: Option<grpo_decoder::Norm>) -> Result<[Self::Tensor; 2]> {
        Ok(match norm.and_then(|norm| self.norm(norm).as_ref()) {
            Some(norm) => [Rc::new(self.model.normalised(&x, norm)?), x],
            None => [Rc::clone(&x), x],
        })
    }

    fn heads(&mut self, x: Self::Tensor) -> Result<(Vec<f32>, Option<Self::Tensor>)> {
        let attention = self.attention_part()?;
        let qkv = self.model.linear(Vec::new(), &x, &attention.qkv, None)?;
        if !attention.has_gates {
            return Ok((qkv, None));
        }
        let (qkv, gates) = without_gates(&qkv, attention.heads);
        Ok((qkv, Some(Rc::new(gates))))
    }

    fn complete_values(&mut self, qkv: Vec<f32>) -> Result<Vec<f32>> {
        match self.attention_part()?.values {
            Some(values) => Ok(values.forward(&qkv)?.0),
            None => Ok(qkv),
        }
    }

    fn norm_heads(&mut self, qkv: Vec<f32>) -> Result<Vec<f32>> {
        let attention = self.attention_part()?;
        let Some([query, key]) = &attention.head_norms else { return Ok(qkv) };
        let norms = HeadNorms { query: &query.weight, key: &key.weight, eps: query.eps };
        Ok(self.model.kernels.norm_heads(&qkv, attention.heads, norms)?.0)
    }

    fn rotate(&mut self, mut qkv: Vec<f32>) -> Result<Vec<f32>> {
        let attention = self.attention_part()?;
        if let Some(rope) = self.ropes.get(attention.rope) {
            self.model.kernels.rotate(&mut qkv, attention.heads, rope, self.positions)?;
        }
        Ok(qkv)
    }

    fn attention(&mut self, qkv: Vec<f32>) -> Result<Self::Tensor> {
        match &self.layer().mixer {
            LayerMixer::Attention { index, attention } => Ok(Rc::new((self.attend)(*index, attention, qkv)?)),
            LayerMixer::GatedDeltaNet { .. } => no_such_part("attention"),
        }
    }

    fn gate(&mut self, values: Self::Tensor, gates: Self::Tensor) -> Result<Self::Tensor> {
        let mut values = Rc::unwrap_or_clone(values);
        let columns = values.len() / gates.len().max(1);
        for (values, gate) in values.chunks_exact_mut(columns.max(1)).zip(&*gates) {
            let factor = sigmoid(*gate);
            values.iter_mut().for_each(|value| *value *= factor);
        }
        Ok(Rc::new(values))
    }

    fn gated_delta_net(&mut self, x: Self::Tensor) -> Result<Self::Tensor> {
        match &self.layer().mixer {
            LayerMixer::GatedDeltaNet { index, net } => {
                let rows = self.model.linear(Vec::new(), &x, &net.in_proj, None)?;
                Ok(Rc::new((self.recur)(*index, net, rows)?))
            }
            LayerMixer::Attention { .. } => no_such_part("a Gated DeltaNet"),
        }
    }

    fn gated_mlp(&mut self, x: Self::Tensor, mlp: Mlp) -> Result<Self::Tensor> {
        let (model, Memory { gate_up: memory, gated }) = (self.model, take(&mut self.memory));
        let [gate_up, down] = self.layer().mlp.gated(mlp)?;
        self.memory.gate_up = model.linear(memory, &x, gate_up, None)?;
        let width = down.matrix.dims()[0];
        Ok(Rc::new(model.kernels.gated_in(gated, &self.memory.gate_up, model.activation, width)?))
    }

    fn shared_gates(&mut self, x: Self::Tensor) -> Result<Self::Tensor> {
        match &self.layer().mlp {
            LayerMlp::Experts { shared_gate: Some(gate), .. } => {
                Ok(Rc::new(self.model.linear(Vec::new(), &x, gate, None)?))
            }
            _ => no_such_part("a gate of the shared expert"),
        }
    }

    fn experts(&mut self, x: Self::Tensor) -> Result<Self::Tensor> {
        let LayerMlp::Experts { router, gate_up, down, spec, correction_bias, .. } = &self.layer().mlp else {
            return no_such_part("a mixture of experts");
        };
        let (model, kernels) = (self.model, self.model.kernels);
        let logits = model.linear(Vec::new(), &x, router, None)?;
        let routing = routed(spec, correction_bias.as_deref(), &logits, |chosen| chosen)?;
        self.record(routing.chosen(), spec.num_experts_per_tok);
        Ok(Rc::new(kernels.experts(&x, &routing, &gate_up.view(), &down.view(), model.activation)?.0))
    }

    fn linear_add(
        &mut self,
        residual: Residual<Self::Tensor>,
        x: Self::Tensor,
        projection: Projection,
    ) -> Result<Self::Tensor> {
        let (model, layer) = (self.model, self.layer());
        let (mut stream, mut x) = (residual.stream, Rc::unwrap_or_clone(x));
        let project = match (projection, &layer.mixer) {
            (Projection::Mixer, LayerMixer::Attention { attention, .. }) => &attention.o,
            (Projection::Mixer, LayerMixer::GatedDeltaNet { net, .. }) => &net.out_proj,
            (Projection::Mlp(mlp), _) => layer.mlp.gated(mlp)?[1],
        };
        // No later operation mixes rows, so the last layer computes only those that the caller reads.
        if projection == Projection::Mixer && self.number + 1 == model.layers.len() && self.recorded.is_empty() {
            let rows = self.positions.len();
            keep_rows(Rc::make_mut(&mut stream), rows, self.wanted);
            keep_rows(&mut x, rows, self.wanted);
        }
        let is_linear = residual.norm.is_none() && project.bias.is_none();
        if is_linear {
            scale(&mut x, residual.factor);
        }
        let y = model.linear(Vec::new(), &x, project, is_linear.then(|| &stream[..]))?;
        if projection != Projection::Mixer {
            self.memory.gated = x;
        }
        if is_linear { Ok(Rc::new(y)) } else { self.add(Residual { stream, ..residual }, Rc::new(y)) }
    }

    fn add(&mut self, residual: Residual<Self::Tensor>, update: Self::Tensor) -> Result<Self::Tensor> {
        let mut update = match residual.norm.and_then(|norm| self.norm(norm).as_ref()) {
            Some(norm) => self.model.normalised(&update, norm)?,
            None => Rc::unwrap_or_clone(update),
        };
        scale(&mut update, residual.factor);
        let mut x = Rc::unwrap_or_clone(residual.stream);
        x.iter_mut().zip(update).for_each(|(x, update)| *x += update);
        Ok(Rc::new(x))
    }

    fn scale(&mut self, x: Self::Tensor) -> Result<Self::Tensor> {
        let mut x = Rc::unwrap_or_clone(x);
        scale(&mut x, self.layer().factor);
        Ok(Rc::new(x))
    }
}

impl Inference {
    /// Returns the rows `wanted`, which ascend, of the residual stream `[N, H]` after the last layer, and the experts `[N, R, k]` of all rows if they
    /// are recorded.
    pub(super) fn run(
        &self,
        ids: &[u32],
        positions: &[usize],
        wanted: &[usize],
        attend: impl FnMut(usize, &LayerAttention, Vec<f32>) -> Result<Vec<f32>>,
        recur: impl FnMut(usize, &LayerDeltaNet, Vec<f32>) -> Result<Vec<f32>>,
    ) -> Result<(Vec<f32>, Vec<u16>)> {
        let h = self.config.hidden_size;
        let mut x: Vec<f32> = match &self.embed_tokens {
            Embedding::Stored(table) => table.rows(ids)?,
            Embedding::Parameter(table) => {
                let table = read(table)?;
                ids.iter().flat_map(|id| &table[*id as usize * h..(*id as usize + 1) * h]).copied().collect()
            }
        };
        scale(&mut x, self.config.embedding_multiplier);
        let ropes = self.ropes.tables(positions.iter().max().map_or(0, |position| position + 1))?;
        let (recorded, memory) = (vec![0; ids.len() * self.recorded_width()], Memory::default());
        let mut ops = Eager { model: self, number: 0, ropes, positions, wanted, attend, recur, recorded, memory };
        let mut x = Rc::new(x);
        for number in 0..self.layers.len() {
            ops.number = number;
            x = block(&mut ops, &BlockSpec::new(&self.config, self.config.layer(number)), x)?;
        }
        let mut x = Rc::unwrap_or_clone(x);
        if x.len() > wanted.len() * h {
            keep_rows(&mut x, ids.len(), wanted);
        }
        Ok((x, ops.recorded))
    }

    /// Returns the logits `[N, V]` of x `[N, H]` after the final norm and the head. See [`grpo_backend_cpu::layers::Layers::linear_packed_in`] for `memory`.
    pub(super) fn logits(&self, memory: Vec<f32>, x: &[f32]) -> Result<Vec<f32>> {
        let n = x.len() / self.config.hidden_size;
        let mut hidden = self.normalised(x, &self.norm)?;
        scale(&mut hidden, 1.0 / self.config.logits_scaling);
        let mut logits = self.kernels.linear_packed_in(memory, &hidden, &self.head, Add::Nothing, n)?;
        cap(&mut logits, self.config.final_logit_softcapping);
        Ok(logits)
    }

    fn normalised(&self, x: &[f32], norm: &Norm) -> Result<Vec<f32>> {
        Ok(self.kernels.rms_norm(x, &norm.weight, norm.eps)?.0)
    }

    /// Applies a linear layer; see [`grpo_backend_cpu::layers::Layers::linear_packed_in`] for `memory`.
    fn linear(&self, memory: Vec<f32>, x: &[f32], of: &Weight, residual: Option<&[f32]>) -> Result<Vec<f32>> {
        let n = x.len() / of.matrix.dims()[0];
        let add = match (&of.bias, residual) {
            (Some(bias), _) => Add::Rows(bias),
            (None, Some(residual)) => Add::Residual(residual),
            (None, None) => Add::Nothing,
        };
        let mut y = match &of.matrix {
            Matrix::Packed(weight) => self.kernels.linear_packed_in(memory, x, weight, add, n)?,
            Matrix::Quantized(weight) => self.kernels.linear_stored(x, &weight.view()?, add, n)?,
        };
        of.adapters.iter().try_for_each(|adapter| adapter.add_to(self.kernels, x, &mut y, n))?;
        Ok(y)
    }
}

/// Keeps the rows `wanted`, which ascend, of `n` rows.
fn keep_rows(rows: &mut Vec<f32>, n: usize, wanted: &[usize]) {
    let width = rows.len() / n.max(1);
    for (to, from) in wanted.iter().enumerate() {
        rows.copy_within(from * width..(from + 1) * width, to * width);
    }
    rows.truncate(wanted.len() * width);
}

/// Applies the softcap to logits, if there is one.
pub(crate) fn cap(logits: &mut [f32], cap: Option<f64>) {
    if let Some(cap) = cap.map(|cap| cap as f32) {
        logits.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
    }
}

/// Multiplies `x` by `factor`, unless it is 1.
fn scale(x: &mut [f32], factor: f64) {
    if factor != 1.0 {
        x.iter_mut().for_each(|x| *x *= factor as f32);
    }
}
