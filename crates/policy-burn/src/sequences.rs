//! The hidden states that predict the completion tokens of sequences.

use crate::decoder::{Decoder, PaddedBatch};
use burn::tensor::{Int, Tensor, TensorData};
use policy::{Error, Result, Sequence};

/// The hidden states `[N, H]` of the positions that predict the completion tokens, end to end.
///
/// # Errors
/// [`Error::Argument`] for an empty prompt or completion; otherwise those of [`Decoder::forward`].
pub fn completion_hidden(model: &Decoder, sequences: &[Sequence]) -> Result<Tensor<2>> {
    if sequences.iter().any(|s| s.prompt.is_empty() || s.completion.is_empty()) {
        return Err(Error::argument(
            "completion_hidden",
            "prompts and completions of at least one token",
            "an empty one",
        ));
    }
    // The last token predicts nothing.
    let inputs: Vec<Vec<u32>> =
        sequences.iter().map(|s| [&s.prompt[..], &s.completion[..s.completion.len() - 1]].concat()).collect();
    let batch = PaddedBatch::right_padded(&inputs)?;
    let rows: Vec<i32> = sequences
        .iter()
        .enumerate()
        .flat_map(|(b, s)| {
            let first = b * batch.columns + s.prompt.len() - 1;
            (first..first + s.completion.len()).map(|row| row as i32)
        })
        .collect();
    let hidden = model.forward(&batch)?;
    let [b, t, h] = hidden.dims();
    let count = rows.len();
    let rows = Tensor::<1, Int>::from_data(TensorData::new(rows, [count]), &hidden.device());
    Ok(hidden.reshape([b * t, h]).select(0, rows))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::to_host;
    use burn::tensor::Device;
    use models::ModelConfig;
    use policy::token_batch;

    #[test]
    fn rows_are_those_that_predict_the_completion() {
        let model = Decoder::new(&ModelConfig::default(), 1, &Device::flex()).unwrap();
        let sequences = [
            Sequence { prompt: vec![1, 5, 6], completion: vec![7, 2] },
            Sequence { prompt: vec![1, 9], completion: vec![8, 10, 2] },
        ];
        let hidden = to_host(completion_hidden(&model, &sequences).unwrap());
        let h = model.config().hidden_size;
        let row = |ids: &[u32]| {
            let all = to_host(model.forward(&PaddedBatch::right_padded(&[ids]).unwrap()).unwrap());
            all[all.len() - h..].to_vec()
        };
        let want = [row(&[1, 5, 6]), row(&[1, 5, 6, 7]), row(&[1, 9]), row(&[1, 9, 8]), row(&[1, 9, 8, 10])].concat();
        assert_eq!(hidden.len(), want.len());
        assert!(hidden.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5));
        let batch = token_batch(&sequences).unwrap();
        assert_eq!(batch.targets(), [7, 2, 8, 10, 2]);
        assert_eq!(batch.offsets(), [0, 2, 5]);
    }
}
