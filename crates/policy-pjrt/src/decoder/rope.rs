//! Rotary position embeddings (arXiv 2104.09864).
//!
//! Legend: B rows, T tokens of a row, D head dimension.

use super::Decoder;
use crate::leaves::leaves;
use grpo_models::LayerRope;
use grpo_stablehlo::{Dtype, TensorType, Unary, Value};

/// Cosines and sines of the rotation angles of tokens, one angle per rotated pair of columns of a head.
#[derive(Clone, Debug)]
pub struct Rotary {
    /// `[B, pairs, T]`, or `[1, pairs, T]` if all rows have the same, f32; D / 2 pairs if all columns of a head are rotated.
    pub(crate) cos: Value,
    pub(crate) sin: Value,
    /// Factors of queries `[B, T]` or `[1, T]`, f32, if they depend on the position.
    pub(crate) queries: Option<Value>,
}

leaves!(Rotary { cos, sin, queries });

/// The rotations of tokens in all layers of a model.
#[derive(Clone, Debug)]
pub struct Rotaries {
    global: Option<Rotary>,
    local: Option<Rotary>,
}

leaves!(Rotaries { global, local });

impl Rotaries {
    /// Returns the rotations of layers with this rotary embedding; `None` if they have none.
    pub fn get(&self, rope: LayerRope) -> Option<&Rotary> {
        match rope {
            LayerRope::Global => self.global.as_ref(),
            LayerRope::Local => self.local.as_ref(),
            LayerRope::None => None,
        }
    }
}

impl Decoder {
    /// Computes the rotations of tokens at `positions` `[B, T]`, or `[1, T]` for the same positions in all rows, i32.
    pub fn rotaries(&self, positions: &Value) -> Rotaries {
        let layers = self.config.period();
        let [global, local] = [LayerRope::Global, LayerRope::Local].map(|rope| {
            let is_used = layers.iter().any(|layer| layer.rope == rope);
            Some(rotary(&self.config.rotary(rope).filter(|_| is_used)?, positions))
        });
        Rotaries { global, local }
    }
}

fn rotary(of: &grpo_models::Rotary, positions: &Value) -> Rotary {
    let frequencies = &of.frequencies;
    let builder = positions.builder();
    let shape = [positions.shape()[0], frequencies.len(), positions.shape()[1]];
    let table = builder.dense(frequencies.iter().copied(), TensorType::new(Dtype::F32, [frequencies.len()]));
    let wide = positions.convert(Dtype::F32).broadcast_in_dim(&shape, &[0, 2]);
    let angles = wide * table.broadcast_in_dim(&shape, &[1]);
    let scaled = |x: Value| if of.attention_factor == 1.0 { x } else { &x * x.like(of.attention_factor) };
    let queries = of.query_scaling.map(|scaling| {
        let periods = (positions / positions.like(scaling.original as i64)).convert(Dtype::F32);
        let growth = (&periods + periods.like(1.0)).log();
        &growth * growth.like(scaling.beta) + growth.like(1.0)
    });
    Rotary { cos: scaled(angles.unary(Unary::Cosine)), sin: scaled(angles.unary(Unary::Sine)), queries }
}

impl Rotary {
    /// Multiplies every query head of `x` `[B, ..., D, T]`, f32, by the factor of its position, and rotates it ([`Rotary::rotated`]).
    pub(crate) fn rotated_queries(&self, x: &Value, result: Dtype) -> Value {
        match &self.queries {
            Some(factors) => {
                let grown = x * factors.broadcast_in_dim(x.shape(), &[0, x.shape().len() - 1]);
                self.rotated(&grown, result)
            }
            None => self.rotated(x, result),
        }
    }

    /// Rotates every head of `x` `[B, ..., D, T]`, f32: of the rotated columns, column i of the first half with column i of the second, as
    /// `rotate_half` of transformers does. Further columns are unchanged. The halves are rounded to dtype `result` before they are joined, so
    /// that the derivative cuts cotangents before it widens them: libtpu would write wide cotangents of whole heads.
    pub(crate) fn rotated(&self, x: &Value, result: Dtype) -> Value {
        let (tokens, columns) = (x.shape().len() - 1, x.shape().len() - 2);
        let (width, pairs) = (x.shape()[columns], self.cos.shape()[1]);
        let part = |from: usize, to: usize| {
            let (mut start, mut limit) = (vec![0; tokens + 1], x.shape().to_vec());
            (start[columns], limit[columns]) = (from, to);
            x.slice(&start, &limit)
        };
        let (left, right) = (part(0, pairs), part(pairs, 2 * pairs));
        let wide = |table: &Value| table.broadcast_in_dim(left.shape(), &[0, columns, tokens]);
        let (cos, sin) = (wide(&self.cos), wide(&self.sin));
        let halves = [&left * &cos - &right * &sin, &right * &cos + &left * &sin];
        let rest = (2 * pairs < width).then(|| part(2 * pairs, width));
        let all: Vec<Value> = halves.iter().chain(&rest).map(|part| part.convert(result)).collect();
        x.builder().concatenate(&all.iter().collect::<Vec<_>>(), columns)
    }
}
