//! The output of a model, checked against the batch and converted from burn tensors.

use crate::custom_op::Operand;
use crate::error::{Error, Result};
use crate::operand::{Head, dtype, elements, same_dtype};
use burn::backend::autodiff::ops::NodeGuard;
use burn::tensor::{DType, Tensor};
use grpo_core::{GradientSpec, HeadLayout, PolicyInput, PolicySpec, TokenBatch};

/// Hidden states, head and bias.
pub(crate) struct HiddenInput {
    pub(crate) hidden: Operand,
    pub(crate) head: Head,
    pub(crate) head_node: NodeGuard,
    pub(crate) bias: Operand,
    pub(crate) spec: PolicySpec,
    pub(crate) tracked: GradientSpec,
}

impl HiddenInput {
    /// `layout` is the layout of `lm_head` as passed.
    pub(crate) fn new<const D: usize>(
        hidden: Tensor<D>,
        lm_head: Tensor<2>,
        bias: Option<Tensor<1>>,
        batch: &TokenBatch,
        layout: HeadLayout,
    ) -> Result<Self> {
        let dtype = dtype("hidden", &hidden)?;
        // A frozen head may be stored in bf16 with hidden states in f32.
        let is_frozen = !(lm_head.is_autodiff() && lm_head.is_tracked());
        if !(is_frozen && lm_head.dtype() == DType::BF16) {
            same_dtype("lm_head", &lm_head, dtype)?;
        }
        bias.as_ref().map_or(Ok(()), |b| same_dtype("bias", b, dtype))?;
        let size = columns("hidden", &hidden, batch.tokens())?;
        let vocab = head_vocab(&lm_head, size, layout)?;
        if let Some(bias) = bias.as_ref().filter(|b| b.dims() != [vocab]) {
            let expected = format!("[V] with V = {vocab}, as lm_head has");
            return Err(Error::Shape { tensor: "bias", expected, found: bias.dims().to_vec() });
        }
        let has_bias = bias.is_some();
        let hidden = Operand::new("hidden", rows(hidden, [batch.tokens(), size]))?.row_major();
        let lm_head = Operand::new("lm_head", lm_head)?;
        let bias = bias.map_or_else(|| Ok(Operand::absent()), |b| Operand::new("bias", b))?.row_major();
        let head = Head::new(lm_head.storage, layout);
        let tracked = GradientSpec { hidden: hidden.tracked, lm_head: lm_head.tracked, bias: bias.tracked };
        let spec = PolicySpec::Hidden { hidden: size, vocab, dtype, layout: head.layout, bias: has_bias };
        Ok(Self { hidden, head, head_node: lm_head.node, bias, spec, tracked })
    }

    /// Returns the gradients to compute; `None` if autodiff tracks no tensor.
    pub(crate) fn wanted(&self) -> Option<GradientSpec> {
        let GradientSpec { hidden, lm_head, bias } = self.tracked;
        (hidden || lm_head || bias).then_some(self.tracked)
    }

    /// Returns the policy's output for the backend.
    pub(crate) fn policy(&self) -> Result<PolicyInput<'_>> {
        let has_bias = matches!(self.spec, PolicySpec::Hidden { bias: true, .. });
        Ok(PolicyInput::Hidden {
            hidden: elements("hidden", &self.hidden.storage)?,
            lm_head: elements("lm_head", &self.head.storage)?,
            bias: if has_bias { Some(elements("bias", &self.bias.storage)?) } else { None },
        })
    }
}

/// Checked logits.
pub(crate) struct LogitsInput {
    pub(crate) logits: Operand,
    pub(crate) spec: PolicySpec,
}

impl LogitsInput {
    pub(crate) fn new<const D: usize>(logits: Tensor<D>, batch: &TokenBatch) -> Result<Self> {
        let dtype = dtype("logits", &logits)?;
        let vocab = columns("logits", &logits, batch.tokens())?;
        let logits = Operand::new("logits", rows(logits, [batch.tokens(), vocab]))?.row_major();
        Ok(Self { logits, spec: PolicySpec::Logits { vocab, dtype } })
    }
}

/// Returns the last dimension of `[N, C]` or `[.., C]`. The product of the other dimensions must be the number of tokens.
fn columns<const D: usize>(name: &'static str, tensor: &Tensor<D>, tokens: usize) -> Result<usize> {
    let dims = tensor.dims();
    match dims.split_last() {
        Some((columns, leading)) if D >= 2 && leading.iter().product::<usize>() == tokens => Ok(*columns),
        _ => Err(Error::Shape {
            tensor: name,
            expected: format!("[N, C] or [B, T, C] with N = B x T = {tokens}, the tokens of the batch"),
            found: dims.to_vec(),
        }),
    }
}

/// Reshapes `[.., C]` to `[N, C]`.
fn rows<const D: usize>(tensor: Tensor<D>, shape: [usize; 2]) -> Tensor<2> {
    // A reshape would record a step in the graph. With two dimensions only the static type changes.
    if D == 2 { Tensor::from_dispatch(tensor.into_dispatch()) } else { tensor.reshape(shape) }
}

/// Returns V after checking H.
fn head_vocab(lm_head: &Tensor<2>, hidden: usize, layout: HeadLayout) -> Result<usize> {
    let dims = lm_head.dims();
    let (vocab, size, name) = match layout {
        HeadLayout::VocabHidden => (dims[0], dims[1], "[V, H]"),
        HeadLayout::HiddenVocab => (dims[1], dims[0], "[H, V]"),
    };
    if size == hidden {
        return Ok(vocab);
    }
    Err(Error::Shape {
        tensor: "lm_head",
        expected: format!("{name} with H = {hidden}, as hidden has (the layout is GrpoLossBuilder::head_layout's)"),
        found: dims.to_vec(),
    })
}
