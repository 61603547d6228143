//! Hidden states that predict the completion tokens of sequences.

use crate::decoder::{Decoder, EmbeddedRows, PackedBatch, Routers};
use burn::tensor::Tensor;
use grpo_policy::{Result, RoutedExperts, Sequence, SequenceBatch};

/// Returns the hidden states `[N, H]` at the positions that predict completion tokens, concatenated. Sequences with the same prompt share
/// its rows. Routers of experts replay `routed_experts`, if there are any.
pub(crate) fn completion_hidden(
    model: &Decoder,
    sequences: &[Sequence],
    routed_experts: &[RoutedExperts],
) -> Result<Tensor<2>> {
    let (batch, rows) = PackedBatch::of_completions(sequences, routed_experts)?;
    let mut routers = model.replaying(&batch, routed_experts, Routers::default())?;
    Ok(model.forward_rows(&batch, &rows, &mut routers)?.0)
}

/// The forward pass of a micro-batch.
pub(crate) struct Observed {
    /// The result of [`completion_hidden`].
    pub(crate) hidden: Tensor<2>,
    /// The observed routers of experts.
    pub(crate) routers: Routers,
    /// The rows of a trained embedding.
    pub(crate) embedded: Option<EmbeddedRows>,
}

/// Computes [`completion_hidden`] of a micro-batch with observers; `with_aux_loss` requests the load balancing loss of routers.
pub(crate) fn observed_hidden(
    model: &Decoder,
    SequenceBatch { sequences, routed_experts, .. }: &SequenceBatch<'_>,
    with_aux_loss: bool,
) -> Result<Observed> {
    let (batch, rows) = PackedBatch::of_completions(sequences, routed_experts)?;
    let mut routers = model.replaying(&batch, routed_experts, batch.routers(with_aux_loss))?;
    let (hidden, embedded) = model.forward_rows(&batch, &rows, &mut routers)?;
    Ok(Observed { hidden, routers, embedded })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::to_host;
    use burn::tensor::Device;
    use grpo_models::ModelConfig;
    use grpo_policy::token_batch;

    #[test]
    fn rows_predict_the_completion_tokens() {
        let model = Decoder::new(&ModelConfig::default(), 1, &Device::flex()).unwrap();
        let sequences = [
            Sequence { prompt: vec![1, 5, 6], completion: vec![7, 2] },
            Sequence { prompt: vec![1, 9], completion: vec![8, 10, 2] },
            Sequence { prompt: vec![1, 5, 6], completion: vec![9, 7, 2] },
        ];
        let hidden = to_host(completion_hidden(&model, &sequences, &[]).unwrap());
        let h = model.config().hidden_size;
        let row = |ids: &[u32]| {
            let all = to_host(model.forward(&PackedBatch::new(&[ids]).unwrap()).unwrap());
            all[all.len() - h..].to_vec()
        };
        let inputs: [&[u32]; 8] = [
            &[1, 5, 6],
            &[1, 5, 6, 7],
            &[1, 9],
            &[1, 9, 8],
            &[1, 9, 8, 10],
            &[1, 5, 6],
            &[1, 5, 6, 9],
            &[1, 5, 6, 9, 7],
        ];
        let want = inputs.map(row).concat();
        assert_eq!(hidden.len(), want.len());
        // Bit for bit: a row does not depend on other rows of the batch.
        assert_eq!(hidden, want);
        let batch = token_batch(&sequences).unwrap();
        assert_eq!(batch.targets(), [7, 2, 8, 10, 2, 9, 7, 2]);
        assert_eq!(batch.offsets(), [0, 2, 5, 8]);
    }
}
