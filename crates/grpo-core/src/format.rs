//! The batch file `grpo-batch/1`: one safetensors file with everything one loss evaluation needs, and, if known, what it
//! should give. Any trainer that can write safetensors can dump its batch and have its loss checked.
//!
//! Legend: B sequences, T tokens each (padded), H hidden size, V vocabulary.
//!
//! | tensor | dtype | shape |
//! |---|---|---|
//! | `hidden` and `lm_head`, or `logits` | F32, BF16 | `[B, T, H]` and `[V, H]`, or `[B, T, V]` |
//! | `bias` (optional) | as `hidden` | `[V]` |
//! | `targets` | I64, I32 | `[B, T]` |
//! | `mask` | F32, BOOL, U8, I32, I64 | `[B, T]` |
//! | `advantages` | F32, F64 (rounded) | `[B]`, `[B, 1]` or `[B, T]` |
//! | `old_logp` (optional; without it the ratio is 1), `ref_logp` (when beta is not 0) | F32, F64 (rounded) | `[B, T]` |
//! | `sampler_logp` (optional, for the sampler's correction; NaN where the sampler gave none: ratio 1) | F32, F64 (rounded) | `[B, T]` |
//! | `temperatures` (optional; replaces the configuration's `temperature`) | F32 | `[B]`, `[B, 1]` or `[B, T]` |
//! | `expected.{loss,logp,entropy,grad_hidden,grad_lm_head,grad_bias,grad_logits}` (optional) | F64, F32 | of what they mirror |
//!
//! `__metadata__`: `format` = `grpo-batch/1`, `loss` = the loss configuration as JSON, optional `name` and `source`.

use crate::backend::{HeadLayout, PolicyInput, PolicySpec};
use crate::batch::{Advantages, TokenBatch};
use crate::config::LossConfig;
use crate::error::{Error, Result};
use crate::parity::Values;
use crate::strict::{UniqueKeys, nearest};
use crate::tensor::{Dtype, TensorRef};
use half::bf16;
use safetensors::tensor::{Dtype as FileDtype, SafeTensors, TensorView};
use std::collections::HashMap;

/// The format's name and version.
pub const FORMAT: &str = "grpo-batch/1";

/// A tensor that owns its values.
#[derive(Clone, Debug, PartialEq)]
pub enum Tensor {
    /// f32.
    F32(Vec<f32>),
    /// bf16.
    Bf16(Vec<bf16>),
}

impl Tensor {
    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.as_ref().dtype()
    }

    /// As a view.
    pub fn as_ref(&self) -> TensorRef<'_> {
        match self {
            Self::F32(v) => TensorRef::F32(v),
            Self::Bf16(v) => TensorRef::Bf16(v),
        }
    }

    /// The values in another dtype: widened exactly, or rounded to nearest even.
    pub fn to_dtype(&self, dtype: Dtype) -> Self {
        match (self, dtype) {
            (Self::F32(v), Dtype::Bf16) => Self::Bf16(v.iter().map(|x| bf16::from_f32(*x)).collect()),
            (Self::Bf16(v), Dtype::F32) => Self::F32(v.iter().map(|x| x.to_f32()).collect()),
            (same, _) => same.clone(),
        }
    }
}

/// The policy's output.
#[derive(Clone, Debug, PartialEq)]
pub enum Policy {
    /// Logits `[B, T, V]`.
    Logits(Tensor),
    /// Hidden states `[B, T, H]`, head `[V, H]`, bias `[V]`.
    Hidden {
        /// `[B, T, H]`.
        hidden: Tensor,
        /// `[V, H]`.
        lm_head: Tensor,
        /// `[V]`.
        bias: Option<Tensor>,
    },
}

impl Policy {
    /// As the input of a loss call.
    pub fn as_input(&self) -> PolicyInput<'_> {
        match self {
            Self::Logits(logits) => PolicyInput::Logits(logits.as_ref()),
            Self::Hidden { hidden, lm_head, bias } => PolicyInput::Hidden {
                hidden: hidden.as_ref(),
                lm_head: lm_head.as_ref(),
                bias: bias.as_ref().map(Tensor::as_ref),
            },
        }
    }

    /// Shapes and dtypes, for a plan. `hidden` and `vocab` are those of the file that holds the policy.
    pub fn spec(&self, hidden: usize, vocab: usize) -> PolicySpec {
        match self {
            Self::Logits(logits) => PolicySpec::Logits { vocab, dtype: logits.dtype() },
            Self::Hidden { hidden: states, bias, .. } => PolicySpec::Hidden {
                hidden,
                vocab,
                dtype: states.dtype(),
                layout: HeadLayout::VocabHidden,
                bias: bias.is_some(),
            },
        }
    }

    /// The same in another dtype.
    pub fn to_dtype(&self, dtype: Dtype) -> Self {
        match self {
            Self::Logits(logits) => Self::Logits(logits.to_dtype(dtype)),
            Self::Hidden { hidden, lm_head, bias } => Self::Hidden {
                hidden: hidden.to_dtype(dtype),
                lm_head: lm_head.to_dtype(dtype),
                bias: bias.as_ref().map(|b| b.to_dtype(dtype)),
            },
        }
    }
}

/// A batch file, read and checked.
#[derive(Clone, Debug)]
pub struct BatchFile {
    /// Name of the case; empty if the file has none.
    pub name: String,
    /// Where its values come from; empty if the file does not say.
    pub source: String,
    /// The loss that the file was made for.
    pub loss: LossConfig,
    /// B and T.
    pub shape: [usize; 2],
    /// H (0 when the file has logits).
    pub hidden: usize,
    /// V.
    pub vocab: usize,
    /// The policy's output.
    pub policy: Policy,
    /// Targets, mask, advantages, recorded log-probabilities.
    pub batch: TokenBatch,
    /// What the evaluation should give, as far as the file knows.
    pub expected: Values,
}

impl BatchFile {
    /// The policy's shapes and dtypes, for a plan.
    pub fn policy_spec(&self) -> PolicySpec {
        self.policy.spec(self.hidden, self.vocab)
    }

    /// Reads a file's bytes. Allocates no more than a small multiple of their number.
    ///
    /// # Errors
    /// [`Error::Format`] that says what was expected and what came; the errors of [`LossConfig`] and [`TokenBatch`].
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let bad = |e: safetensors::SafeTensorError| Error::Format(format!("not readable as safetensors: {e}"));
        let (header_bytes, header) = SafeTensors::read_metadata(bytes).map_err(bad)?;
        // The reader keeps the last of several entries of one name. It has checked that the header lies in the file.
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
        let loss = LossConfig::from_json(&loss)?;

        let shape = file.shape_of("targets")?;
        let [b, t] = <[usize; 2]>::try_from(shape.as_slice())
            .map_err(|_| Error::Format(format!("targets: expected shape [B, T], got {shape:?}")))?;
        // An empty dimension would let the other one claim any size without a byte to show for it.
        if b == 0 || t == 0 {
            return Err(Error::Format(format!("targets: expected at least one token, got shape {shape:?}")));
        }
        let (policy, hidden, vocab) = file.policy(b, t)?;
        let mut batch = TokenBatch::padded(&file.targets(b, t)?, &file.mask(b, t)?, [b, t])?;
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
        let expected = file.expected([b, t], hidden, vocab)?;
        // What the policy does not have would never be compared.
        let has_bias = matches!(policy, Policy::Hidden { bias: Some(_), .. });
        let absent = [
            ("grad_hidden", expected.grad_hidden.is_some() && hidden == 0),
            ("grad_lm_head", expected.grad_lm_head.is_some() && hidden == 0),
            ("grad_bias", expected.grad_bias.is_some() && !has_bias),
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

    /// The bytes of the file. `expected` values are written as F64. Sequences must all have T tokens; aggregation
    /// weights are not part of the format.
    ///
    /// # Errors
    /// [`Error::Shape`] when a tensor does not have the shape that the other fields say it has.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let [b, t] = self.shape;
        let (h, v) = (self.hidden, self.vocab);
        let mut out = Writer::default();
        match &self.policy {
            Policy::Logits(logits) => out.tensor("logits", &[b, t, v], logits)?,
            Policy::Hidden { hidden, lm_head, bias } => {
                out.tensor("hidden", &[b, t, h], hidden)?;
                out.tensor("lm_head", &[v, h], lm_head)?;
                if let Some(bias) = bias {
                    out.tensor("bias", &[v], bias)?;
                }
            }
        }
        out.push(
            "targets",
            FileDtype::I64,
            &[b, t],
            self.batch.targets().iter().flat_map(|t| t.to_le_bytes()).collect(),
        )?;
        let mask: Vec<f32> = (0..self.batch.tokens()).map(|i| f32::from(u8::from(self.batch.is_active(i)))).collect();
        out.f32s("mask", &[b, t], &mask)?;
        match self.batch.advantages() {
            Advantages::PerSequence(a) => out.f32s("advantages", &[b], a)?,
            Advantages::PerToken(a) => out.f32s("advantages", &[b, t], a)?,
        }
        let lists = [
            ("old_logp", self.batch.old_logp()),
            ("ref_logp", self.batch.ref_logp()),
            ("sampler_logp", self.batch.sampler_logp()),
            ("temperatures", self.batch.temperatures()),
        ];
        for (name, list) in lists {
            if let Some(list) = list {
                out.f32s(name, &[b, t], list)?;
            }
        }
        let e = &self.expected;
        if let Some(loss) = e.loss {
            out.f64s("expected.loss", &[], &[loss])?;
        }
        let expected = expected_shapes([b, t], h, v);
        for ((name, shape), values) in
            expected.iter().zip([&e.logp, &e.entropy, &e.grad_hidden, &e.grad_lm_head, &e.grad_bias, &e.grad_logits])
        {
            if let Some(values) = values {
                out.f64s(name, shape, values)?;
            }
        }
        let mut metadata = HashMap::from([("format".to_owned(), FORMAT.to_owned())]);
        metadata.insert("name".into(), self.name.clone());
        metadata.insert("source".into(), self.source.clone());
        let loss = serde_json::to_string(&self.loss).map_err(|e| Error::Format(e.to_string()))?;
        metadata.insert("loss".into(), loss);
        out.finish(metadata)
    }
}

/// Names and shapes of the optional results, the scalar loss aside.
fn expected_shapes([b, t]: [usize; 2], h: usize, v: usize) -> [(&'static str, Vec<usize>); 6] {
    [
        ("expected.logp", vec![b, t]),
        ("expected.entropy", vec![b, t]),
        ("expected.grad_hidden", vec![b, t, h]),
        ("expected.grad_lm_head", vec![v, h]),
        ("expected.grad_bias", vec![v]),
        ("expected.grad_logits", vec![b, t, v]),
    ]
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

    /// The list, if its shape is `[B]` or `[B, 1]`; else it has to be `[B, T]`.
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
        let view = self.expect("targets", &[b, t], &[FileDtype::I64, FileDtype::I32])?;
        Ok(match view.dtype() {
            FileDtype::I32 => decode(view.data(), |bytes| i64::from(i32::from_le_bytes(bytes))),
            _ => decode(view.data(), i64::from_le_bytes),
        })
    }

    /// The policy with H (0 for logits) and V.
    fn policy(&self, b: usize, t: usize) -> Result<(Policy, usize, usize)> {
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
            return Ok((Policy::Logits(self.float("logits", &[b, t, v])?), 0, v));
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
        Ok((Policy::Hidden { hidden, lm_head, bias }, h, v))
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
        // torch and numpy write a loss as a scalar or as a list of one.
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

    /// A misspelt optional tensor must not be dropped in silence.
    fn refuse_unknown_tensors(&self) -> Result<()> {
        const KNOWN: [&str; 18] = [
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

    fn finish(self, metadata: HashMap<String, String>) -> Result<Vec<u8>> {
        let bad = |e: safetensors::SafeTensorError| Error::Format(e.to_string());
        let mut views = Vec::with_capacity(self.tensors.len());
        for (name, dtype, shape, bytes) in &self.tensors {
            views.push((name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).map_err(bad)?));
        }
        safetensors::serialize(views, Some(metadata)).map_err(bad)
    }
}
