//! Parsing of batch files: the shape of every tensor is checked against B, T, H and V.

use super::{BatchFile, BatchLoss, FORMAT, expected_shapes, with_columns};
use crate::backend_api::strict::{UniqueKeys, nearest};
use crate::batch::{Advantages, SamplingMask, TokenBatch};
use crate::error::{Error, Result};
use crate::parity::Values;
use crate::policy::PolicyOutput;
use crate::tensor::Tensor;
use half::bf16;
use safetensors::tensor::{Dtype as FileDtype, SafeTensors, TensorView};

impl BatchFile {
    /// Parses the bytes of a file. Memory use is limited to a small multiple of their number.
    ///
    /// # Errors
    /// [`Error::Format`] that names the expected and the given content; the errors of [`BatchLoss`] and [`TokenBatch`].
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let bad = |e: safetensors::SafeTensorError| Error::Format(format!("not readable as safetensors: {e}"));
        let (header_bytes, header) = SafeTensors::read_metadata(bytes).map_err(bad)?;
        // `SafeTensors` keeps the last of several entries with one name. It has checked that the header lies within the file.
        if let Some(text) = bytes.get(8..).and_then(|rest| rest.get(..header_bytes)) {
            serde_json::from_slice::<UniqueKeys>(text).map_err(|e| Error::Format(format!("header: {e}")))?;
        }
        let metadata = header.metadata().clone().unwrap_or_default();
        let file = Reader { tensors: SafeTensors::deserialize(bytes).map_err(bad)? };
        let get = |key: &str| metadata.get(key).cloned();
        match get("format").as_deref() {
            Some(FORMAT) => {}
            Some(other) => return Err(Error::Format(format!("__metadata__.format is `{other}`, expected `{FORMAT}`"))),
            None => return Err(Error::Format(format!("__metadata__.format is missing, expected `{FORMAT}`"))),
        }
        let loss = get("loss").ok_or_else(|| {
            Error::Format("__metadata__.loss is missing: it holds the loss configuration as JSON".into())
        })?;
        let BatchLoss { loss, step } = BatchLoss::from_json(&loss)?;

        let shape = file.shape_of("targets")?;
        // With an empty dimension the other dimension could be of any size without data in the file.
        if shape.contains(&0) {
            return Err(Error::Format(format!("targets: expected at least one token, got shape {shape:?}")));
        }
        let offsets = match (&shape[..], file.has("offsets")) {
            (&[b, t], false) => (0..=b).map(|sequence| sequence * t).collect(),
            (&[_], true) => file.unsigned("offsets", &file.shape_of("offsets")?)?,
            (_, has_offsets) => {
                let expected =
                    if has_offsets { "[N], because there are `offsets`" } else { "[B, T], or [N] with `offsets`" };
                return Err(Error::Format(format!("targets: expected shape {expected}, got {shape:?}")));
            }
        };
        let (policy, hidden, vocab) = file.policy(&shape)?;
        let mut batch = TokenBatch::packed(file.i64s("targets", &shape)?, offsets)?;
        if shape.len() > 1 || file.has("mask") {
            batch = batch.with_mask(&file.mask(&shape)?)?;
        }
        batch = batch.with_step(step)?;
        let (shape, sequences) = (&shape[..], batch.sequences());
        batch = batch.with_advantages(match file.per_sequence("advantages", shape, sequences)? {
            Some(list) => Advantages::PerSequence(list),
            None => Advantages::PerToken(file.f32s("advantages", shape)?),
        })?;
        if file.has("old_logp") {
            batch = batch.with_old_logp(file.f32s("old_logp", shape)?)?;
        }
        if file.has("ref_logp") {
            batch = batch.with_ref_logp(file.f32s("ref_logp", shape)?)?;
        }
        if file.has("sampler_logp") {
            batch = batch.with_sampler_logp(file.f32s("sampler_logp", shape)?)?;
        }
        if file.has("temperatures") {
            let temperatures = match file.per_sequence("temperatures", shape, sequences)? {
                Some(list) => {
                    let rows = |(sequence, of): (usize, &f32)| std::iter::repeat_n(*of, batch.range(sequence).len());
                    list.iter().enumerate().flat_map(rows).collect()
                }
                None => file.f32s("temperatures", shape)?,
            };
            batch = batch.with_temperatures(temperatures)?;
        }
        if file.has("sampling_mask.ids") || file.has("sampling_mask.offsets") {
            let mask = file.sampling_mask(batch.tokens())?;
            batch = batch.with_sampling_mask(mask)?;
        }
        let expected = file.expected(shape, hidden, vocab)?;
        // An expected result of a tensor that the policy lacks would never be compared.
        let absent = [
            ("grad_hidden", expected.grad_hidden.is_some() && hidden == 0),
            ("grad_lm_head", expected.grad_lm_head.is_some() && hidden == 0),
            ("grad_bias", expected.grad_bias.is_some() && !policy.has_bias()),
        ];
        if let Some((name, _)) = absent.into_iter().find(|(_, absent)| *absent) {
            return Err(Error::Format(format!("expected.{name} is there, but the policy has no such tensor")));
        }
        file.refuse_unknown_tensors()?;
        Ok(Self {
            name: get("name").unwrap_or_default(),
            source: get("source").unwrap_or_default(),
            loss,
            hidden,
            vocab,
            policy,
            batch,
            expected,
        })
    }
}

struct Reader<'a> {
    tensors: SafeTensors<'a>,
}

impl Reader<'_> {
    fn has(&self, name: &str) -> bool {
        self.tensors.tensor(name).is_ok()
    }

    fn view(&self, name: &str) -> Result<TensorView<'_>> {
        self.tensors.tensor(name).map_err(|_| {
            let mut names = self.tensors.names();
            names.sort_unstable();
            Error::Format(format!("tensor `{name}` is missing; the file holds {}", names.join(", ")))
        })
    }

    fn shape_of(&self, name: &str) -> Result<Vec<usize>> {
        Ok(self.view(name)?.shape().to_vec())
    }

    fn expect(&self, name: &str, shape: &[usize], dtypes: &[FileDtype]) -> Result<TensorView<'_>> {
        let view = self.view(name)?;
        if view.shape() != shape {
            return Err(Error::Format(format!("{name}: expected shape {shape:?}, got {:?}", view.shape())));
        }
        if !dtypes.contains(&view.dtype()) {
            return Err(Error::Format(format!("{name}: expected dtype {dtypes:?}, got {:?}", view.dtype())));
        }
        Ok(view)
    }

    fn f32s(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let view = self.expect(name, shape, &[FileDtype::F32, FileDtype::F64])?;
        Ok(match view.dtype() {
            FileDtype::F64 => decode(view.data(), |bytes| f64::from_le_bytes(bytes) as f32),
            _ => decode(view.data(), f32::from_le_bytes),
        })
    }

    /// Returns the list if its shape is `[B]` or `[B, 1]`, `None` if it is the shape of the tokens.
    fn per_sequence(&self, name: &str, tokens: &[usize], sequences: usize) -> Result<Option<Vec<f32>>> {
        match self.shape_of(name)?.as_slice() {
            shape if shape == tokens => Ok(None),
            [_] => self.f32s(name, &[sequences]).map(Some),
            [_, 1] => self.f32s(name, &[sequences, 1]).map(Some),
            _ => Ok(None),
        }
    }

    fn float(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let view = self.expect(name, shape, &[FileDtype::F32, FileDtype::BF16])?;
        Ok(match view.dtype() {
            FileDtype::BF16 => Tensor::Bf16(decode(view.data(), bf16::from_le_bytes)),
            _ => Tensor::F32(decode(view.data(), f32::from_le_bytes)),
        })
    }

    fn mask(&self, tokens: &[usize]) -> Result<Vec<f32>> {
        let dtypes = [FileDtype::F32, FileDtype::BOOL, FileDtype::U8, FileDtype::I32, FileDtype::I64];
        let view = self.expect("mask", tokens, &dtypes)?;
        Ok(match view.dtype() {
            FileDtype::F32 => decode(view.data(), f32::from_le_bytes),
            FileDtype::I32 => decode(view.data(), |bytes| i32::from_le_bytes(bytes) as f32),
            FileDtype::I64 => decode(view.data(), |bytes| i64::from_le_bytes(bytes) as f32),
            _ => view.data().iter().map(|byte| f32::from(*byte)).collect(),
        })
    }

    fn i64s(&self, name: &str, shape: &[usize]) -> Result<Vec<i64>> {
        let view = self.expect(name, shape, &[FileDtype::I64, FileDtype::I32, FileDtype::U32])?;
        Ok(match view.dtype() {
            FileDtype::U32 => decode(view.data(), |bytes| i64::from(u32::from_le_bytes(bytes))),
            FileDtype::I32 => decode(view.data(), |bytes| i64::from(i32::from_le_bytes(bytes))),
            _ => decode(view.data(), i64::from_le_bytes),
        })
    }

    fn sampling_mask(&self, tokens: usize) -> Result<SamplingMask> {
        let (ids, offsets) = ("sampling_mask.ids", "sampling_mask.offsets");
        let count = self.shape_of(ids)?.iter().product();
        SamplingMask::new(&self.unsigned(offsets, &[tokens + 1])?, &self.unsigned(ids, &[count])?)
    }

    fn unsigned<T: TryFrom<i64>>(&self, name: &str, shape: &[usize]) -> Result<Vec<T>> {
        let wrong = |value| Error::Format(format!("{name}: expected numbers from 0, got {value}"));
        self.i64s(name, shape)?.into_iter().map(|value| T::try_from(value).map_err(|_| wrong(value))).collect()
    }

    /// Returns the policy with H (0 for logits) and V.
    fn policy(&self, tokens: &[usize]) -> Result<(PolicyOutput<Tensor>, usize, usize)> {
        let rank = tokens.len() + 1;
        let last = |name: &str| match self.shape_of(name)?.as_slice() {
            shape if shape.len() == rank && shape[rank - 1] > 0 => Ok(shape[rank - 1]),
            shape => {
                Err(Error::Format(format!("{name}: expected {rank} dimensions, the last not empty, got {shape:?}")))
            }
        };
        if self.has("logits") {
            if let Some(name) = ["hidden", "lm_head", "bias"].into_iter().find(|name| self.has(name)) {
                return Err(Error::Format(format!("the file holds both logits and {name}: keep one of them")));
            }
            let v = last("logits")?;
            return Ok((PolicyOutput::Logits(self.float("logits", &with_columns(tokens, v))?), 0, v));
        }
        if !self.has("hidden") {
            return Err(Error::Format("neither `hidden` with `lm_head` nor `logits` is there".into()));
        }
        let h = last("hidden")?;
        let v = match self.shape_of("lm_head")?.as_slice() {
            [v, columns] if *columns == h && *v > 0 => *v,
            shape => return Err(Error::Format(format!("lm_head: expected shape [V, {h}], got {shape:?}"))),
        };
        let hidden = self.float("hidden", &with_columns(tokens, h))?;
        let lm_head = self.float("lm_head", &[v, h])?;
        let bias = if self.has("bias") { Some(self.float("bias", &[v])?) } else { None };
        for (name, tensor) in [("lm_head", Some(&lm_head)), ("bias", bias.as_ref())] {
            if let Some(tensor) = tensor
                && tensor.dtype() != hidden.dtype()
            {
                let (found, wanted) = (tensor.dtype().name(), hidden.dtype().name());
                return Err(Error::Format(format!("{name} is {found} but hidden is {wanted}: one dtype for both")));
            }
        }
        Ok((PolicyOutput::Hidden { hidden, lm_head, bias }, h, v))
    }

    fn expected(&self, tokens: &[usize], h: usize, v: usize) -> Result<Values> {
        let read = |name: &str, shape: &[usize]| -> Result<Option<Vec<f64>>> {
            if !self.has(name) {
                return Ok(None);
            }
            let view = self.expect(name, shape, &[FileDtype::F64, FileDtype::F32])?;
            Ok(Some(match view.dtype() {
                FileDtype::F32 => decode(view.data(), |bytes| f64::from(f32::from_le_bytes(bytes))),
                _ => decode(view.data(), f64::from_le_bytes),
            }))
        };
        let mut lists = Vec::with_capacity(6);
        for (name, shape) in expected_shapes(tokens, h, v) {
            lists.push(read(name, &shape)?);
        }
        // torch and numpy write a loss as a scalar or as a list of one number.
        let listed = self.has("expected.loss") && self.shape_of("expected.loss")? == [1];
        let scalar: &[usize] = if listed { &[1] } else { &[] };
        let mut lists = lists.into_iter();
        let mut next = || lists.next().flatten();
        Ok(Values {
            loss: read("expected.loss", scalar)?.and_then(|v| v.first().copied()),
            logp: next(),
            entropy: next(),
            grad_hidden: next(),
            grad_lm_head: next(),
            grad_bias: next(),
            grad_logits: next(),
        })
    }

    /// Refuses unknown tensors, so that a misspelt optional tensor is not silently ignored.
    fn refuse_unknown_tensors(&self) -> Result<()> {
        const KNOWN: [&str; 21] = [
            "hidden",
            "lm_head",
            "bias",
            "logits",
            "targets",
            "offsets",
            "mask",
            "advantages",
            "old_logp",
            "ref_logp",
            "sampler_logp",
            "temperatures",
            "sampling_mask.ids",
            "sampling_mask.offsets",
            "expected.loss",
            "expected.logp",
            "expected.entropy",
            "expected.grad_hidden",
            "expected.grad_lm_head",
            "expected.grad_bias",
            "expected.grad_logits",
        ];
        for name in self.tensors.names() {
            if !KNOWN.contains(&name) {
                let hint = nearest(name, KNOWN.into_iter()).map_or(String::new(), |n| format!(", did you mean `{n}`?"));
                return Err(Error::Format(format!("unknown tensor `{name}`{hint}")));
            }
        }
        Ok(())
    }
}

fn decode<const N: usize, T>(bytes: &[u8], element: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|chunk| element(*chunk)).collect()
}
