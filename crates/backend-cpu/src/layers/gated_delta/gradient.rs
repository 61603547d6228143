//! The backward pass of a key head; see the [parent module](super) for the formulas of the forward pass.
//!
//! With E = dL/dS' of the state after a chunk, and K' = exp(G_c - G) K:
//!
//! ```text
//! du       = (D * Q K^T)^T do + K' E
//! dr       = (1 + A)^-T du                     r = b (v - exp(G) K S)
//! dA       = -dr u^T, strictly lower           d(D * Q K^T) = do u^T, lower
//! d(K S)   = -b exp(G) dr                      d(Q S) = exp(G) do
//! dS       = exp(G_c) E + K^T d(K S) + Q^T d(Q S)
//! ```
//!
//! Every exponential above adds its gradient to dG, and dL/dg of a row is the sum of dG over this row and all later ones of the chunk.

use super::Span;
use super::chunk::{ValueChunk, decayed_keys, solve_transposed};
use super::head::{Before, Chunk, Head, Sequence, sigmoid, silu_gradient};
use crate::arch::{MulAdd, simd_dispatch};
use crate::gemm::{KAxis, MatMut};
use crate::layers::linear::add_to;
use crate::layers::product::{Operand, multiply_here};

/// The gradients of a key head.
pub(super) struct HeadGradient {
    /// The number of columns that the head reads.
    pub(super) width: usize,
    /// dL/dx of these columns `[N, width]`: query, key, values, gates, strengths, decays.
    pub(super) dx: Vec<f32>,
    /// Gradient of the weights of the convolution `[L, channels of the head]`.
    pub(super) dconv: Vec<f32>,
    /// Gradient of the logarithms of the decays' factors `[R]`.
    pub(super) da_log: Vec<f32>,
    /// Gradient of the bias of the decays `[R]`.
    pub(super) ddt_bias: Vec<f32>,
    /// Gradient of the weight of the output's norm `[Dv]`.
    pub(super) dnorm: Vec<f32>,
}

/// The gradients of the shared values of a chunk.
struct ChunkGradient {
    /// Of the convolution's outputs after SiLU `[c, channels of the head]`.
    dactivated: Vec<f32>,
    /// Of keys, then of queries `[2c, Dk]`.
    dkeys_queries: Vec<f32>,
    /// Of their products with the keys `[2c, c]`.
    dproducts: Vec<f32>,
}

/// The gradients of scalars of the rows of a chunk and a value head.
struct RowGradient {
    /// Of G, the sums of the logarithms of the decays `[c]`.
    dsums: Vec<f32>,
    /// Of the strengths b `[c]`.
    dstrengths: Vec<f32>,
}

impl Head<'_> {
    /// Computes the gradients from dy `[N, Hv Dv]`; `parents` has the index of the span that is the prefix of each span.
    pub(super) fn gradients(&self, spans: &[Span], parents: &[Option<usize>], dy: &[f32]) -> HeadGradient {
        let (n, shared) = (spans.last().map_or(0, |span| span.rows.end), self.heads.per_key());
        let width = self.columns.iter().map(|columns| columns.len()).sum();
        let mut to = HeadGradient {
            width,
            dx: vec![0.0; n * width],
            dconv: vec![0.0; self.conv.len()],
            da_log: vec![0.0; shared],
            ddt_bias: vec![0.0; shared],
            dnorm: vec![0.0; self.norm.len()],
        };
        let (mut states, mut all): (Vec<Vec<f32>>, Vec<Vec<Chunk>>) = (Vec::new(), Vec::new());
        for (span, parent) in spans.iter().zip(parents) {
            let zeros = || vec![0.0; self.heads.key_state_len()];
            let mut state = parent.map_or_else(zeros, |parent: usize| states[parent].clone());
            let sequence = Sequence { rows: span.rows.clone(), before: Before::Rows(span.prefix.clone()) };
            all.push(sequence.chunks().map(|rows| self.chunk(&sequence, rows, &mut state)).collect());
            states.push(state);
        }
        drop(states);
        let mut dstates: Vec<Vec<f32>> = vec![Vec::new(); spans.len()];
        while let Some(chunks) = all.pop() {
            let index = all.len();
            let mut dstate = std::mem::take(&mut dstates[index]);
            dstate.resize(self.heads.key_state_len(), 0.0);
            chunks.iter().rev().for_each(|chunk| self.chunk_gradient(chunk, dy, &mut dstate, &mut to));
            if let Some(parent) = parents[index] {
                dstates[parent].resize(dstate.len(), 0.0);
                add_to(self.gemm.isa(), &dstate, &mut dstates[parent]);
            }
        }
        to
    }

    /// Adds the gradients of a chunk, and replaces dL/dS `[R, Dk, Dv]` of the states after it by dL/dS of the states before it.
    fn chunk_gradient(&self, chunk: &Chunk, dy: &[f32], dstate: &mut [f32], to: &mut HeadGradient) {
        let (gemm, isa, c, channels) = (self.gemm, self.gemm.isa(), chunk.rows.len(), self.channels());
        let (width, size) = (self.heads.key_width, self.heads.key_width * self.heads.value_width);
        let mut of = ChunkGradient {
            dactivated: vec![0.0; c * channels],
            dkeys_queries: vec![0.0; 2 * c * width],
            dproducts: vec![0.0; 2 * c * c],
        };
        for ((r, value), dstate) in chunk.values.iter().enumerate().zip(dstate.chunks_exact_mut(size)) {
            self.value_gradient(chunk, r, value, dy, dstate, &mut of, to);
        }
        let ChunkGradient { mut dactivated, mut dkeys_queries, dproducts } = of;
        let keys = Operand::new(&chunk.keys_queries[..c * width], width, KAxis::Rows);
        let mut out = MatMut::new(&mut dkeys_queries, 2 * c, width, width);
        multiply_here(gemm, &Operand::new(&dproducts, c, KAxis::Columns), &keys, &mut out, true);
        let both = Operand::new(&chunk.keys_queries, width, KAxis::Rows);
        let mut out = MatMut::new(&mut dkeys_queries, c, width, width);
        multiply_here(gemm, &Operand::new(&dproducts, c, KAxis::Rows), &both, &mut out, true);

        // The norms: with y = f x and f = 1 / sqrt(x^2 + eps), dx = f (dy - y (y dy)).
        let scale = 1.0 / (width as f32).sqrt();
        for (i, to) in dactivated.chunks_exact_mut(channels).enumerate() {
            let (query, rest) = to.split_at_mut(width);
            for (at, to, scale) in [(i, &mut rest[..width], 1.0), (c + i, query, scale)] {
                let row = at * width..(at + 1) * width;
                let (y, dy, factor) = (&chunk.keys_queries[row.clone()], &dkeys_queries[row], chunk.factors[at]);
                // Queries are stored with their scale.
                let along = y.iter().zip(dy).map(|(y, dy)| y * dy).sum::<f32>() / (scale * scale);
                to.iter_mut().zip(y.iter().zip(dy)).for_each(|(to, (y, dy))| *to = factor * scale * (dy - y * along));
            }
        }
        silu_gradient(isa, &chunk.mixed, &mut dactivated);
        let mut dinputs = vec![0.0; chunk.inputs.len()];
        convolve_gradient(isa, &chunk.inputs, &self.conv, channels, &dactivated, &mut dinputs, &mut to.dconv);
        for (source, dinput) in chunk.sources.iter().zip(dinputs.chunks_exact(channels)) {
            if let Some(row) = source {
                add_to(isa, dinput, &mut to.dx[row * to.width..row * to.width + channels]);
            }
        }
    }

    /// Adds the gradients of value head `r`.
    #[allow(clippy::too_many_arguments)]
    fn value_gradient(
        &self,
        chunk: &Chunk,
        r: usize,
        value: &ValueChunk,
        dy: &[f32],
        dstate: &mut [f32],
        of: &mut ChunkGradient,
        to: &mut HeadGradient,
    ) {
        let (gemm, isa, c) = (self.gemm, self.gemm.isa(), chunk.rows.len());
        let (width, wide) = (self.heads.key_width, self.heads.value_width);
        let keys_queries = &chunk.keys_queries[..];

        // dr, then do `[2c, Dv]`, so that one product with u^T serves both. Later d(K S), then d(Q S).
        let mut dreads = vec![0.0; 2 * c * wide];
        let (dr, douts) = dreads.split_at_mut(c * wide);
        self.norm_gradient(chunk, r, value, dy, douts, to);
        let keys = decayed_keys(keys_queries, width, &value.decays);
        self.write_gradient(value, &keys, douts, dstate, dr);

        let mut dtriangles = vec![0.0; 2 * c * c];
        let mut out = MatMut::new(&mut dtriangles, 2 * c, c, c);
        multiply_here(
            gemm,
            &Operand::new(&dreads, wide, KAxis::Columns),
            &Operand::new(&value.writes, wide, KAxis::Columns),
            &mut out,
            false,
        );
        let mut rows = RowGradient { dsums: vec![0.0; c], dstrengths: vec![0.0; c] };
        let RowGradient { dsums, dstrengths } = &mut rows;
        triangles_gradient(isa, value, &chunk.products, &dtriangles, &mut of.dproducts, dsums, dstrengths);

        self.decay_gradient(value, &keys, dstate, &mut of.dkeys_queries[..c * width], dsums);
        self.read_gradient(r, value, &mut dreads, &mut of.dactivated, &mut rows);
        let mut out = MatMut::new(&mut of.dkeys_queries, 2 * c, width, width);
        multiply_here(
            gemm,
            &Operand::new(&dreads, wide, KAxis::Columns),
            &Operand::new(&value.state, wide, KAxis::Columns),
            &mut out,
            true,
        );
        let decay = value.decays.whole();
        dstate.iter_mut().for_each(|dstate| *dstate *= decay);
        multiply_here(
            gemm,
            &Operand::new(keys_queries, width, KAxis::Rows),
            &Operand::new(&dreads, wide, KAxis::Rows),
            &mut MatMut::new(dstate, width, wide, wide),
            true,
        );
        self.input_gradient(chunk, r, value, &rows, to);
    }

    /// Computes dr `[c, Dv]` from do `[c, Dv]` and the gradient of the state after the chunk; `keys` are K'.
    fn write_gradient(&self, value: &ValueChunk, keys: &[f32], douts: &[f32], dstate: &[f32], dr: &mut [f32]) {
        let (gemm, wide) = (self.gemm, self.heads.value_width);
        let c = dr.len() / wide;
        multiply_here(
            gemm,
            &Operand::new(&value.attention, c, KAxis::Rows),
            &Operand::new(douts, wide, KAxis::Rows),
            &mut MatMut::new(dr, c, wide, wide),
            false,
        );
        multiply_here(
            gemm,
            &Operand::new(keys, self.heads.key_width, KAxis::Columns),
            &Operand::new(dstate, wide, KAxis::Rows),
            &mut MatMut::new(dr, c, wide, wide),
            true,
        );
        solve_transposed(gemm.isa(), &value.system, c, wide, dr);
    }

    /// Adds the gradients of the decay of the state, and of what the rows write to it, to the gradients of keys
    /// `[c, Dk]` and of G `[c]`; `keys` are K'.
    fn decay_gradient(
        &self,
        value: &ValueChunk,
        keys: &[f32],
        dstate: &[f32],
        to_dkeys: &mut [f32],
        dsums: &mut [f32],
    ) {
        let (gemm, c, decays) = (self.gemm, dsums.len(), &value.decays);
        let (width, wide) = (self.heads.key_width, self.heads.value_width);
        let end = value.state.iter().zip(dstate).map(|(state, dstate)| state * dstate).sum::<f32>() * decays.whole();
        let mut dkeys = vec![0.0; c * width];
        let mut out = MatMut::new(&mut dkeys, c, width, width);
        multiply_here(
            gemm,
            &Operand::new(&value.writes, wide, KAxis::Columns),
            &Operand::new(dstate, wide, KAxis::Columns),
            &mut out,
            false,
        );
        dsums[c - 1] += end;
        for (i, dkey) in dkeys.chunks_exact_mut(width).enumerate() {
            let key = &keys[i * width..(i + 1) * width];
            let along = key.iter().zip(&*dkey).map(|(key, dkey)| key * dkey).sum::<f32>();
            dsums[i] -= along;
            dsums[c - 1] += along;
            dkey.iter_mut().for_each(|dkey| *dkey *= decays.to_end[i]);
        }
        add_to(gemm.isa(), &dkeys, to_dkeys);
    }

    /// Replaces dr, then do, in `dreads` `[2c, Dv]` by d(K S), then d(Q S), for r = b (v - exp(G) K S) and the reads of the
    /// outputs. Computes the gradients of the values of head `r`, and adds the gradients of G and b.
    fn read_gradient(
        &self,
        r: usize,
        value: &ValueChunk,
        dreads: &mut [f32],
        dactivated: &mut [f32],
        rows: &mut RowGradient,
    ) {
        let RowGradient { dsums, dstrengths } = rows;
        let (c, channels, decays) = (dsums.len(), self.channels(), &value.decays);
        let wide = self.heads.value_width;
        let first_value = 2 * self.heads.key_width + r * wide;
        for i in 0..c {
            let (strength, decay) = (decays.strengths[i], decays.from_start[i]);
            let row = i * wide..(i + 1) * wide;
            let (values, reads) = (&value.values[row.clone()], &value.reads[row.clone()]);
            let dvalues = &mut dactivated[i * channels + first_value..][..wide];
            for (((dread, dvalue), v), read) in dreads[row].iter_mut().zip(dvalues).zip(values).zip(reads) {
                dstrengths[i] += *dread * (v - decay * read);
                *dvalue = strength * *dread;
                *dread *= -strength * decay;
            }
            dreads[(c + i) * wide..(c + i + 1) * wide].iter_mut().for_each(|dread| *dread *= decay);
        }
        for (i, (dread, read)) in dreads.chunks_exact(wide).zip(value.reads.chunks_exact(wide)).enumerate() {
            dsums[i % c] += dread.iter().zip(read).map(|(dread, read)| dread * read).sum::<f32>();
        }
    }

    /// Computes the gradients of the inputs of b and G of value head `r`, and adds the gradients of their parameters.
    fn input_gradient(&self, chunk: &Chunk, r: usize, value: &ValueChunk, rows: &RowGradient, to: &mut HeadGradient) {
        let (shared, decays) = (self.heads.per_key(), &value.decays);
        let gates = self.channels() + shared * self.heads.value_width;
        let (strengths, logs) = (gates + r, gates + shared + r);
        let (rate, mut dlog) = (-self.a_log[r].exp(), 0.0);
        for (i, row) in chunk.rows.clone().enumerate().rev() {
            dlog += rows.dsums[i];
            let dinput = dlog * rate * sigmoid(self.part(row, 5)[r] + self.dt_bias[r]);
            let strength = decays.strengths[i];
            let dx = &mut to.dx[row * to.width..(row + 1) * to.width];
            dx[strengths] = rows.dstrengths[i] * strength * (1.0 - strength);
            dx[logs] = dinput;
            to.da_log[r] += dlog * decays.logs[i];
            to.ddt_bias[r] += dinput;
        }
    }

    /// Computes dL/do `[c, Dv]` of value head `r`, and the gradients of gates and norm.
    fn norm_gradient(
        &self,
        chunk: &Chunk,
        r: usize,
        value: &ValueChunk,
        dy: &[f32],
        douts: &mut [f32],
        to: &mut HeadGradient,
    ) {
        let (wide, values, width) = (self.heads.value_width, self.heads.values(), to.width);
        let channels = self.channels();
        // The output has a column per gate.
        let first = self.columns[3].start - self.heads.channels() + r * wide;
        for (i, (row, dout)) in chunk.rows.clone().zip(douts.chunks_exact_mut(wide)).enumerate() {
            let value_range = i * wide..(i + 1) * wide;
            let (outputs, gated, scale) =
                (&value.outputs[value_range.clone()], &value.gated[value_range], value.scales[i]);
            let dy = &dy[row * values + first..][..wide];
            let gates = &self.part(row, 3)[r * wide..(r + 1) * wide];
            let dgates = &mut to.dx[row * width + channels + r * wide..][..wide];
            let mut mean = 0.0;
            for j in 0..wide {
                let normed = outputs[j] * scale;
                dgates[j] = dy[j] * self.norm[j] * normed;
                to.dnorm[j] += dy[j] * gated[j] * normed;
                dout[j] = dy[j] * gated[j] * self.norm[j];
                mean += dout[j] * normed;
            }
            mean /= wide as f32;
            dout.iter_mut().zip(outputs).for_each(|(dout, output)| *dout = scale * (*dout - output * scale * mean));
            silu_gradient(self.gemm.isa(), gates, dgates);
        }
    }
}

simd_dispatch! {
    /// Adds the gradients of D, A and D * Q K^T to the gradients of the products `[2c, c]`, of G and of b `[c]`. `dtriangles` `[2c, c]` are -dA, then
    /// d(D * Q K^T).
    fn triangles_gradient(
        value: &ValueChunk, products: &[f32], dtriangles: &[f32], dproducts: &mut [f32], dsums: &mut [f32],
        dstrengths: &mut [f32],
    ) = triangles_gradient_body
}

#[inline(always)]
fn triangles_gradient_body<M: MulAdd>(
    value: &ValueChunk,
    products: &[f32],
    dtriangles: &[f32],
    dproducts: &mut [f32],
    dsums: &mut [f32],
    dstrengths: &mut [f32],
) {
    let c = dsums.len();
    let (key_dproducts, query_dproducts) = dproducts.split_at_mut(c * c);
    for i in 0..c {
        let strength = value.decays.strengths[i];
        let (first, row) = (i * c, i * c..i * c + i);
        let mut all = 0.0;
        for j in 0..i {
            let (dsystem, dattention) = (-dtriangles[first + j], dtriangles[c * c + first + j]);
            let between = value.between[first + j];
            let dlog = dsystem * value.system[first + j] + dattention * value.attention[first + j];
            dsums[j] -= dlog;
            all += dlog;
            dstrengths[i] += dsystem * between * products[first + j];
        }
        dsums[i] += all;
        for (j, (to, between)) in key_dproducts[row.clone()].iter_mut().zip(&value.between[row.clone()]).enumerate() {
            *to -= dtriangles[first + j] * strength * between;
        }
        let row = first..=first + i;
        for ((to, between), dattention) in
            query_dproducts[row.clone()].iter_mut().zip(&value.between[row.clone()]).zip(&dtriangles[c * c..][row])
        {
            *to = M::mul_add(*dattention, *between, *to);
        }
    }
}

simd_dispatch! {
    /// Adds the gradients of a convolution to the gradients of its inputs `[L - 1 + c, channels]` and weights `[L, channels]`.
    fn convolve_gradient(
        inputs: &[f32], weights: &[f32], channels: usize, dy: &[f32], dinputs: &mut [f32], dweights: &mut [f32],
    ) = convolve_gradient_body
}

#[inline(always)]
fn convolve_gradient_body<M: MulAdd>(
    inputs: &[f32],
    weights: &[f32],
    channels: usize,
    dy: &[f32],
    dinputs: &mut [f32],
    dweights: &mut [f32],
) {
    for (i, dy) in dy.chunks_exact(channels).enumerate() {
        let input_rows =
            inputs[i * channels..].chunks_exact(channels).zip(dinputs[i * channels..].chunks_exact_mut(channels));
        let weight_rows = weights.chunks_exact(channels).zip(dweights.chunks_exact_mut(channels));
        for ((x, dx), (w, dw)) in input_rows.zip(weight_rows) {
            for ((((dx, dw), x), w), dy) in dx.iter_mut().zip(dw).zip(x).zip(w).zip(dy) {
                *dx = M::mul_add(*dy, *w, *dx);
                *dw = M::mul_add(*dy, *x, *dw);
            }
        }
    }
}
