//! A forward pass over the packed weights.

use super::Inference;
use super::weights::{Embedding, LayerAttention, LayerDeltaNet, LayerMixer, LayerMlp, Matrix, Norm, Weight};
use crate::decoder::params::read;
use backend_cpu::layers::{Add, HeadNorms, Heads};
use policy::Result;
use std::borrow::Cow;
use std::mem::take;

impl Inference {
    /// Returns the rows `wanted`, which ascend, of the residual stream `[N, H]` after the last layer, and the experts `[N, L, k]` of all rows if they are recorded. `attend` computes
    /// the attention `[N, A D]` of a layer from queries, keys and values after the rotary embedding, `recur` the output `[N, Hv Dv]` of a Gated
    /// DeltaNet from its projected input. Both get the index of the layer among the layers with the same mixer.
    pub(super) fn run(
        &self,
        ids: &[u32],
        positions: &[usize],
        wanted: &[usize],
        mut attend: impl FnMut(usize, &LayerAttention, Vec<f32>) -> Result<Vec<f32>>,
        mut recur: impl FnMut(usize, &LayerDeltaNet, Vec<f32>) -> Result<Vec<f32>>,
    ) -> Result<(Vec<f32>, Vec<u16>)> {
        let (kernels, h) = (self.kernels, self.config.hidden_size);
        let mut x: Vec<f32> = match &self.embed_tokens {
            Embedding::Stored(table) => table.rows(ids)?,
            Embedding::Parameter(table) => {
                let table = read(table)?;
                ids.iter().flat_map(|id| &table[*id as usize * h..(*id as usize + 1) * h]).copied().collect()
            }
        };
        scale(&mut x, self.config.embedding_multiplier);
        let width = self.recorded_width();
        let (mut recorded, mut memory) = (vec![0; ids.len() * width], Memory::default());
        let ropes = self.ropes.tables(positions.iter().max().map_or(0, |position| position + 1))?;
        for (number, layer) in self.layers.iter().enumerate() {
            let normed = self.optionally_normalised(&x, &layer.input_norm)?;
            let (mut mixed, project) = match &layer.mixer {
                LayerMixer::Attention { index, attention } => {
                    let heads = attention.heads;
                    let mut qkv = self.linear(Vec::new(), &normed, &attention.qkv, None)?;
                    let gates = attention.has_gates.then(|| take_gates(&mut qkv, heads));
                    if let Some(values) = attention.values {
                        qkv = values.forward(&qkv)?.0;
                    }
                    if let Some([query, key]) = &attention.head_norms {
                        let norms = HeadNorms { query: &query.weight, key: &key.weight, eps: query.eps };
                        qkv = kernels.norm_heads(&qkv, heads, norms)?.0;
                    }
                    if let Some(rope) = ropes.get(attention.rope) {
                        kernels.rotate(&mut qkv, heads, rope, positions)?;
                    }
                    let mut values = attend(*index, attention, qkv)?;
                    if let Some(gates) = gates {
                        values.iter_mut().zip(gates).for_each(|(value, gate)| *value /= 1.0 + (-gate).exp());
                    }
                    (values, &attention.o)
                }
                LayerMixer::GatedDeltaNet { index, net } => {
                    (recur(*index, net, self.linear(Vec::new(), &normed, &net.in_proj, None)?)?, &net.out_proj)
                }
            };
            drop(normed);
            // No later operation mixes rows, so the last layer computes only those that the caller reads.
            if number + 1 == self.layers.len() && width == 0 {
                [&mut x, &mut mixed].into_iter().for_each(|rows| keep_rows(rows, ids.len(), wanted));
            }
            x = self.added(x, &mut mixed, project, &layer.attn_output_norm)?;
            let normed = self.optionally_normalised(&x, &layer.post_norm)?;
            match &layer.mlp {
                LayerMlp::Dense { gate_up, down } => {
                    let gate_up = self.linear(take(&mut memory.gate_up), &normed, gate_up, None)?;
                    let width = self.config.intermediate_size;
                    let mut mixed = kernels.gated_in(take(&mut memory.gated), &gate_up, self.activation, width)?;
                    drop(normed);
                    x = self.added(x, &mut mixed, down, &layer.mlp_output_norm)?;
                    memory = Memory { gate_up, gated: mixed };
                }
                LayerMlp::Experts { router, gate_up, down, spec } => {
                    let logits = self.linear(Vec::new(), &normed, router, None)?;
                    let routing =
                        kernels.route(&logits, spec.num_experts, spec.num_experts_per_tok, spec.norm_topk_prob)?;
                    if width > 0 {
                        let top = spec.num_experts_per_tok;
                        let rows = recorded.chunks_exact_mut(width).zip(routing.chosen().chunks_exact(top));
                        rows.for_each(|(row, chosen)| {
                            let of_layer = &mut row[number * top..(number + 1) * top];
                            // A model has at most 2^12 experts.
                            of_layer.iter_mut().zip(chosen).for_each(|(to, id)| *to = *id as u16);
                        });
                    }
                    let (update, _) =
                        kernels.experts(&normed, &routing, &gate_up.view(), &down.view(), self.activation)?;
                    drop(normed);
                    x = self.plus(x, update, &layer.mlp_output_norm)?;
                }
            }
            scale(&mut x, layer.factor);
        }
        if x.len() > wanted.len() * h {
            keep_rows(&mut x, ids.len(), wanted);
        }
        Ok((x, recorded))
    }

    /// Returns the residual stream plus the normalised `update` times the multiplier.
    fn plus(&self, mut x: Vec<f32>, update: Vec<f32>, norm: &Option<Norm>) -> Result<Vec<f32>> {
        let mut update = if let Some(norm) = norm { self.normalised(&update, norm)? } else { update };
        scale(&mut update, self.config.residual_multiplier);
        x.iter_mut().zip(update).for_each(|(x, update)| *x += update);
        Ok(x)
    }

    /// Returns the residual stream plus the normalised projection of `mixed`, times the multiplier.
    fn added(&self, x: Vec<f32>, mixed: &mut [f32], project: &Weight, norm: &Option<Norm>) -> Result<Vec<f32>> {
        if norm.is_none() && project.bias.is_none() {
            // The projection is linear.
            scale(mixed, self.config.residual_multiplier);
            return self.linear(Vec::new(), mixed, project, Some(&x));
        }
        let update = self.linear(Vec::new(), mixed, project, None)?;
        self.plus(x, update, norm)
    }

    /// Returns the logits `[N, V]` of x `[N, H]` after the final norm and the head. See [`backend_cpu::layers::Layers::linear_packed_in`] for `memory`.
    pub(super) fn logits(&self, memory: Vec<f32>, x: &[f32]) -> Result<Vec<f32>> {
        let n = x.len() / self.config.hidden_size;
        let mut hidden = self.normalised(x, &self.norm)?;
        scale(&mut hidden, 1.0 / self.config.logits_scaling);
        let mut logits = self.kernels.linear_packed_in(memory, &hidden, &self.head, Add::Nothing, n)?;
        cap(&mut logits, self.config.final_logit_softcapping);
        Ok(logits)
    }

    fn optionally_normalised<'a>(&self, x: &'a [f32], norm: &Option<Norm>) -> Result<Cow<'a, [f32]>> {
        match norm {
            Some(norm) => Ok(Cow::Owned(self.normalised(x, norm)?)),
            None => Ok(Cow::Borrowed(x)),
        }
    }

    fn normalised(&self, x: &[f32], norm: &Norm) -> Result<Vec<f32>> {
        Ok(self.kernels.rms_norm(x, &norm.weight, norm.eps)?.0)
    }

    /// Applies a linear layer; see [`backend_cpu::layers::Layers::linear_packed_in`] for `memory`.
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

/// The largest activations of a layer, whose memory the next layer uses.
#[derive(Default)]
struct Memory {
    gate_up: Vec<f32>,
    gated: Vec<f32>,
}

/// Keeps the rows `wanted`, which ascend, of `n` rows.
fn keep_rows(rows: &mut Vec<f32>, n: usize, wanted: &[usize]) {
    let width = rows.len() / n.max(1);
    for (to, from) in wanted.iter().enumerate() {
        rows.copy_within(from * width..(from + 1) * width, to * width);
    }
    rows.truncate(wanted.len() * width);
}

/// Removes the gates behind the query heads from rows `[N, (2A + 2K) D]`, which become `[N, (A + 2K) D]`, and returns them, `[N, A D]`.
fn take_gates(rows: &mut Vec<f32>, heads: Heads) -> Vec<f32> {
    let (d, queries) = (heads.width, heads.query * heads.width);
    let (mut gates, mut qkv) = (Vec::new(), Vec::new());
    for row in rows.chunks_exact((heads.row() + queries).max(1)) {
        let (of_queries, rest) = row.split_at(2 * queries);
        for head in of_queries.chunks_exact(2 * d) {
            qkv.extend_from_slice(&head[..d]);
            gates.extend_from_slice(&head[d..]);
        }
        qkv.extend_from_slice(rest);
    }
    *rows = qkv;
    gates
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
