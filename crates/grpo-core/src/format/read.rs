//! Parsing of batch files: the shape of every tensor is checked against B, T, H and V.

use super::{BatchFile, BatchLoss, FORMAT, expected_shapes};
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
        let [b, t] = <[usize; 2]>::try_from(shape.as_slice())
            .map_err(|_| Error::Format(format!("targets: expected shape [B, T], got {shape:?}")))?;
        // With an empty dimension the other dimension could be of any size without data in the file.
        if b == 0 || t == 0 {
            return Err(Error::Format(format!("targets: expected at least one token, got shape {shape:?}")));
        }
        let (policy, hidden, vocab) = file.policy(b, t)?;
        let mut batch = TokenBatch::padded(&file.targets(b, t)?, &file.mask(b, t)?, [b, t])?.with_step(step)?;
        batch = batch.with_advantages(match file.per_sequence("advantages", b, t)? {
            Some(list) => Advantages::PerSequence(list),
            None => Advantages::PerToken(file.f32s("advantages", &[b, t])?),
        })?;
        if file.has("old_logp") {
            batch = batch.with_old_logp(file.f32s("old_logp", &[b, t])?)?;
        }
        if file.has("ref_logp") {
            batch = batch.with_ref_logp(file.f32s("ref_logp", &[b, t])?)?;
        }
        if file.has("sampler_logp") {
            batch = batch.with_sampler_logp(file.f32s("sampler_logp", &[b, t])?)?;
        }
        if file.has("temperatures") {
            batch = batch.with_temperatures(match file.per_sequence("temperatures", b, t)? {
                Some(list) => list.iter().flat_map(|of| std::iter::repeat_n(*of, t)).collect(),
                None => file.f32s("temperatures", &[b, t])?,
            })?;
        }
        if file.has("sampling_mask.ids") || file.has("sampling_mask.offsets") {
            batch = batch.with_sampling_mask(file.sampling_mask(b * t)?)?;
        }
        let expected = file.expected([b, t], hidden, vocab)?;
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
            shape: [b, t],
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

    /// Returns the list if its shape is `[B]` or `[B, 1]`, `None` if it is `[B, T]`.
    fn per_sequence(&self, name: &str, b: usize, t: usize) -> Result<Option<Vec<f32>>> {
        match self.shape_of(name)?.as_slice() {
            [_] => self.f32s(name, &[b]).map(Some),
            [_, 1] if t > 1 => self.f32s(name, &[b, 1]).map(Some),
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

    fn mask(&self, b: usize, t: usize) -> Result<Vec<f32>> {
        let dtypes = [FileDtype::F32, FileDtype::BOOL, FileDtype::U8, FileDtype::I32, FileDtype::I64];
        let view = self.expect("mask", &[b, t], &dtypes)?;
        Ok(match view.dtype() {
            FileDtype::F32 => decode(view.data(), f32::from_le_bytes),
            FileDtype::I32 => decode(view.data(), |bytes| i32::from_le_bytes(bytes) as f32),
            FileDtype::I64 => decode(view.data(), |bytes| i64::from_le_bytes(bytes) as f32),
            _ => view.data().iter().map(|byte| f32::from(*byte)).collect(),
        })
    }

    fn targets(&self, b: usize, t: usize) -> Result<Vec<i64>> {
        self.i64s("targets", &[b, t])
    }

    fn i64s(&self, name: &str, shape: &[usize]) -> Result<Vec<i64>> {
        let view = self.expect(name, shape, &[FileDtype::I64, FileDtype::I32])?;
        Ok(match view.dtype() {
            FileDtype::I32 => decode(view.data(), |bytes| i64::from(i32::from_le_bytes(bytes))),
            _ => decode(view.data(), i64::from_le_bytes),
        })
    }

    fn sampling_mask(&self, tokens: usize) -> Result<SamplingMask> {
        let (ids, offsets) = ("sampling_mask.ids", "sampling_mask.offsets");
        let count = self.shape_of(ids)?.iter().product();
        fn unsigned<T: TryFrom<i64>>(name: &str, values: Vec<i64>) -> Result<Vec<T>> {
            let wrong = |value| Error::Format(format!("{name}: expected numbers from 0, got {value}"));
            values.into_iter().map(|value| T::try_from(value).map_err(|_| wrong(value))).collect()
        }
        let of_tokens = unsigned(offsets, self.i64s(offsets, &[tokens + 1])?)?;
        SamplingMask::new(&of_tokens, &unsigned(ids, self.i64s(ids, &[count])?)?)
    }

    /// Returns the policy with H (0 for logits) and V.
    fn policy(&self, b: usize, t: usize) -> Result<(PolicyOutput<Tensor>, usize, usize)> {
        let last = |name: &str, rank: usize| match self.shape_of(name)?.as_slice() {
            shape if shape.len() == rank && shape[rank - 1] > 0 => Ok(shape[rank - 1]),
            shape => {
                Err(Error::Format(format!("{name}: expected {rank} dimensions, the last not empty, got {shape:?}")))
            }
        };
        if self.has("logits") {
            if let Some(name) = ["hidden", "lm_head", "bias"].into_iter().find(|name| self.has(name)) {
                return Err(Error::Format(format!("the file holds both logits and {name}: keep one of them")));
            }
            let v = last("logits", 3)?;
            return Ok((PolicyOutput::Logits(self.float("logits", &[b, t, v])?), 0, v));
        }
        if !self.has("hidden") {
            return Err(Error::Format("neither `hidden` with `lm_head` nor `logits` is there".into()));
        }
        let h = last("hidden", 3)?;
        let v = match self.shape_of("lm_head")?.as_slice() {
            [v, columns] if *columns == h && *v > 0 => *v,
            shape => return Err(Error::Format(format!("lm_head: expected shape [V, {h}], got {shape:?}"))),
        };
        let hidden = self.float("hidden", &[b, t, h])?;
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

    fn expected(&self, shape: [usize; 2], h: usize, v: usize) -> Result<Values> {
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
        for (name, shape) in expected_shapes(shape, h, v) {
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
        const KNOWN: [&str; 20] = [
            "hidden",
            "lm_head",
            "bias",
            "logits",
            "targets",
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
