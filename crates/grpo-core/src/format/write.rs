//! Serialisation of batch files.

use super::{BatchFile, FORMAT, expected_shapes, with_columns, with_metadata};
use crate::batch::Advantages;
use crate::error::{Error, Result};
use crate::policy::PolicyOutput;
use crate::tensor::Tensor;
use safetensors::tensor::{Dtype as FileDtype, TensorView};
use std::collections::BTreeMap;

impl BatchFile {
    /// Serialises the file. `expected` values are written as F64. Sequences of different lengths are packed
    /// ([`BatchFile::token_shape`]); aggregation weights are not part of the format.
    ///
    /// # Errors
    /// [`Error::Shape`] if a tensor does not have the shape that follows from the other fields.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let (tokens, sequences) = (&self.token_shape()[..], self.batch.sequences());
        let (h, v) = (self.hidden, self.vocab);
        let mut out = Writer::default();
        match &self.policy {
            PolicyOutput::Logits(logits) => out.tensor("logits", &with_columns(tokens, v), logits)?,
            PolicyOutput::Hidden { hidden, lm_head, bias } => {
                out.tensor("hidden", &with_columns(tokens, h), hidden)?;
                out.tensor("lm_head", &[v, h], lm_head)?;
                if let Some(bias) = bias {
                    out.tensor("bias", &[v], bias)?;
                }
            }
        }
        out.push(
            "targets",
            FileDtype::I64,
            tokens,
            self.batch.targets().iter().flat_map(|t| t.to_le_bytes()).collect(),
        )?;
        if tokens.len() == 1 {
            out.offsets("offsets", self.batch.offsets())?;
        }
        let mask: Vec<f32> = (0..self.batch.tokens()).map(|i| f32::from(u8::from(self.batch.is_active(i)))).collect();
        out.f32s("mask", tokens, &mask)?;
        match self.batch.advantages() {
            Advantages::PerSequence(a) => out.f32s("advantages", &[sequences], a)?,
            Advantages::PerToken(a) => out.f32s("advantages", tokens, a)?,
        }
        let lists = [
            ("old_logp", self.batch.old_logp()),
            ("ref_logp", self.batch.ref_logp()),
            ("sampler_logp", self.batch.sampler_logp()),
            ("temperatures", self.batch.temperatures()),
        ];
        for (name, list) in lists {
            if let Some(list) = list {
                out.f32s(name, tokens, list)?;
            }
        }
        if let Some(mask) = self.batch.sampling_mask() {
            let ids = mask.ids();
            let numbers = ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
            out.push("sampling_mask.ids", FileDtype::I64, &[ids.len()], numbers)?;
            out.offsets("sampling_mask.offsets", mask.offsets())?;
        }
        let e = &self.expected;
        if let Some(loss) = e.loss {
            out.f64s("expected.loss", &[], &[loss])?;
        }
        let expected = expected_shapes(tokens, h, v);
        for ((name, shape), values) in
            expected.iter().zip([&e.logp, &e.entropy, &e.grad_hidden, &e.grad_lm_head, &e.grad_bias, &e.grad_logits])
        {
            if let Some(values) = values {
                out.f64s(name, shape, values)?;
            }
        }
        let loss = serde_json::to_string(&self.batch_loss()).map_err(|e| Error::Format(e.to_string()))?;
        let metadata = [("name", self.name.clone()), ("source", self.source.clone()), ("loss", loss)];
        out.finish(&metadata.into_iter().chain([("format", FORMAT.to_owned())]).collect())
    }
}

#[derive(Default)]
struct Writer {
    tensors: Vec<(String, FileDtype, Vec<usize>, Vec<u8>)>,
}

impl Writer {
    fn push(&mut self, name: &str, dtype: FileDtype, shape: &[usize], bytes: Vec<u8>) -> Result<()> {
        let expected = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        if bytes.len() != expected {
            return Err(Error::shape("batch file", format!("bytes of {name} {shape:?}"), expected, bytes.len()));
        }
        self.tensors.push((name.to_owned(), dtype, shape.to_vec(), bytes));
        Ok(())
    }

    fn offsets(&mut self, name: &str, offsets: &[usize]) -> Result<()> {
        let numbers = offsets.iter().flat_map(|offset| (*offset as i64).to_le_bytes()).collect();
        self.push(name, FileDtype::I64, &[offsets.len()], numbers)
    }

    fn f32s(&mut self, name: &str, shape: &[usize], values: &[f32]) -> Result<()> {
        self.push(name, FileDtype::F32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    fn f64s(&mut self, name: &str, shape: &[usize], values: &[f64]) -> Result<()> {
        self.push(name, FileDtype::F64, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    fn tensor(&mut self, name: &str, shape: &[usize], tensor: &Tensor) -> Result<()> {
        match tensor {
            Tensor::F32(v) => self.f32s(name, shape, v),
            Tensor::Bf16(v) => {
                self.push(name, FileDtype::BF16, shape, v.iter().flat_map(|v| v.to_le_bytes()).collect())
            }
        }
    }

    fn finish(self, metadata: &BTreeMap<&str, String>) -> Result<Vec<u8>> {
        let bad = |e: safetensors::SafeTensorError| Error::Format(e.to_string());
        let mut views = Vec::with_capacity(self.tensors.len());
        for (name, dtype, shape, bytes) in &self.tensors {
            views.push((name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).map_err(bad)?));
        }
        with_metadata(&safetensors::serialize(views, None).map_err(bad)?, metadata)
    }
}
