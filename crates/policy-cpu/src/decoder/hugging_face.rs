//! Copies between the decoder's parameters and Hugging Face tensors, in both directions, for weights, gradients and moments.

use super::build::Source;
use super::names::{Adapted, Part, parts};
use super::weight::Stored;
use grpo_models::{ModelConfig, Quantization, Weights};
use grpo_policy::{Error, Result, TensorSource};
use rayon::prelude::*;

/// Number of rows that are read at once from a tensor that must be transposed.
const ROWS: usize = 64;

impl Part {
    /// Returns a copy of the tensor, given the parameter `values` of this many columns.
    pub(super) fn tensor(&self, values: &[f32], columns: usize) -> Vec<f32> {
        if self.columns.is_empty() {
            return values.to_vec();
        }
        if !self.transposed {
            return values[self.columns.clone()].to_vec();
        }
        let inputs = self.shape[1];
        let mut data = vec![0.0; self.columns.len() * inputs];
        let values = &values[self.first_row * columns..(self.first_row + inputs) * columns];
        let of_rows =
            data.par_chunks_mut((ROWS * inputs).max(1)).zip(self.columns.clone().into_par_iter().step_by(ROWS));
        of_rows.for_each(|(to, first)| {
            for (input, row) in values.chunks_exact(columns).enumerate() {
                for (to, value) in to[input..].iter_mut().step_by(inputs).zip(&row[first..self.columns.end]) {
                    *to = *value;
                }
            }
        });
        data
    }

    /// Copies the tensor's rows from `first` on into the parameter `values`, which has this many columns.
    fn put(&self, first: usize, rows: &[f32], values: &mut [f32], columns: usize) {
        if self.columns.is_empty() {
            values.copy_from_slice(rows);
        } else if self.transposed {
            let inputs = self.shape[1];
            let start = self.columns.start + first;
            let at = start..start + rows.len() / inputs;
            let values = &mut values[self.first_row * columns..(self.first_row + inputs) * columns];
            values.par_chunks_exact_mut(columns).enumerate().for_each(|(input, row)| {
                for (to, value) in row[at.clone()].iter_mut().zip(rows[input..].iter().step_by(inputs)) {
                    *to = *value;
                }
            });
        } else {
            values[self.columns.clone()].copy_from_slice(rows);
        }
    }
}

/// Tensors of transformers and PEFT, copied into parameters of a decoder.
pub(crate) struct Tensors<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) adapted: &'a Adapted,
    /// The prefix of the tensors' names.
    pub(crate) prefix: &'a str,
    pub(crate) tensors: &'a dyn TensorSource,
}

impl Tensors<'_> {
    /// Copies the tensors of the parameter `name`, of `shape`, to `values`.
    pub(crate) fn read(&self, name: &str, shape: &[usize], values: &mut [f32]) -> Result<()> {
        let columns = shape.last().copied().unwrap_or(1);
        for part in parts(self.config, self.adapted, name, shape) {
            let name = format!("{}{}", self.prefix, part.name);
            let (found, expected) = (self.tensors.values(&name)?, part.shape.iter().product::<usize>());
            if found.len() != expected {
                return Err(Error::state(name, format!("{expected} values"), format!("{} values", found.len())));
            }
            part.put(0, &found, values, columns);
        }
        Ok(())
    }
}

impl Source for Tensors<'_> {
    fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let mut values = vec![0.0; shape.iter().product()];
        self.read(name, shape, &mut values)?;
        Ok(values)
    }
}

/// Stored weights.
pub(crate) struct Read<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) weights: &'a Weights,
    /// `true` if matrices are used in place; otherwise they are copied into parameters.
    pub(crate) in_place: bool,
    /// The format of the matrices of layers, which are then not used in place.
    pub(crate) quantization: Option<Quantization>,
}

impl Source for Read<'_> {
    /// Reads tensors that must be transposed in blocks of rows, to avoid a second copy.
    fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let mut values = vec![0.0; shape.iter().product()];
        let columns = shape.last().copied().unwrap_or(1);
        for part in parts(self.config, &Adapted::default(), name, shape) {
            let tensor = self.weights.tensor(&part.name)?;
            if part.columns.is_empty() {
                tensor.read(0, &mut values)?;
            } else if part.transposed {
                let (rows, inputs) = (part.shape[0], part.shape[1]);
                let mut read = vec![0.0; ROWS.min(rows) * inputs];
                for first in (0..rows).step_by(ROWS) {
                    let read = &mut read[..ROWS.min(rows - first) * inputs];
                    tensor.read(first * inputs, read)?;
                    part.put(first, read, &mut values, columns);
                }
            } else {
                tensor.read(0, &mut values[part.columns])?;
            }
            tensor.check_finite()?;
        }
        Ok(values)
    }

    fn stored(&mut self, name: &str, shape: [usize; 2]) -> Result<Option<Stored>> {
        if !self.in_place {
            return Ok(None);
        }
        let mut tensors = Vec::new();
        for part in parts(self.config, &Adapted::default(), name, &shape) {
            let tensor = self.weights.tensor(&part.name)?;
            // gpt-oss stores all experts in one tensor, which is copied.
            if tensor.shape().len() != 2 {
                return Ok(None);
            }
            tensor.check_finite()?;
            tensors.push(tensor);
        }
        match self.quantization.filter(|_| name.starts_with("layers.")) {
            Some(quantization) => Ok(Some(Stored::quantized(&tensors, quantization)?)),
            None => Ok(Stored::new(&tensors)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::{Decoder, Mlp, PackedBatch, Weight, to_host};
    use burn::tensor::{Device, Tensor};
    use grpo_models::{Dtype, ExportOptions, FolderWriter};

    /// Writes the decoder to a model folder.
    fn stored(decoder: &Decoder, dtype: Dtype) -> (tempfile::TempDir, Weights) {
        let (place, mut tensors) = (tempfile::tempdir().unwrap(), Vec::new());
        decoder.export(&mut tensors).unwrap();
        let (target, options) = (place.path().join("model"), ExportOptions { dtype, ..ExportOptions::default() });
        let mut writer = FolderWriter::create(&target, decoder.config(), None, options).unwrap();
        tensors.iter().for_each(|tensor| writer.write(&tensor.name, &tensor.data).unwrap());
        writer.finish().unwrap();
        (place, Weights::open(&target).unwrap())
    }

    /// Large bf16 weights stay bf16 for sampling, with separate adapters.
    #[test]
    fn tokens_are_sampled_from_large_weights_in_bf16() {
        let config = ModelConfig {
            // Four times an L2 cache of 2 MiB.
            intermediate_size: 16384,
            num_hidden_layers: 1,
            initializer_range: 0.1,
            ..ModelConfig::default()
        };
        let (_folder, weights) = stored(&Decoder::new(&config, 3, &Device::flex()).unwrap(), Dtype::Bf16);
        let base = Decoder::mapped(&config, &weights, &Device::flex()).unwrap();
        let Mlp::Dense(mlp) = &base.layers[0].mlp else { panic!("a dense model") };
        let large = &mlp.gate_up_proj.weight;
        assert!(matches!(large, Weight::Stored(stored) if stored.view().unwrap().packs_narrow()));
        let targets = grpo_models::TargetModules::Pattern("all-linear".into());
        let lora = grpo_models::LoraConfig { r: 2, target_modules: targets, ..Default::default() };
        let fresh = base.clone().with_lora(&lora, 1).unwrap();
        let mut parameters = fresh.parameters();
        parameters.iter_mut().filter(|p| p.name.contains("lora_B")).enumerate().for_each(|(i, b)| {
            b.data = grpo_rng::normal_weights(0..b.data.len(), 0.1, i as u64, "b");
        });
        let ids = [1, 5, 9, 7];
        let of = |decoder: &Decoder| {
            let batch = PackedBatch::new(&[ids]).unwrap();
            let hidden = decoder.forward(&batch).unwrap();
            let head = Tensor::<2>::from_data(decoder.lm_head().unwrap().into_data().convert::<f32>(), &Device::flex());
            let all = to_host(hidden.matmul(head.transpose()));
            let sampled = decoder.inference().unwrap().prefill(&[ids], 1, 1).unwrap().0;
            let last = &all[all.len() - sampled.len()..];
            let largest = last.iter().fold(0f32, |m, x| m.max(x.abs()));
            let off = last.iter().zip(&sampled).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(off < 1e-5 * largest, "off by {off} of {largest}");
            sampled
        };
        assert_ne!(of(&fresh.clone().with_parameters(&parameters).unwrap()), of(&base));
        // A fresh adapter does not change the outputs.
        assert_eq!(of(&fresh), of(&base));
    }

    #[test]
    fn exported_weights_load_back_bit_for_bit() {
        let config = ModelConfig {
            // More columns than are read at once.
            head_dim: Some(24),
            intermediate_size: 70,
            qk_norm: true,
            attention_bias: false,
            num_hidden_layers: 1,
            ..ModelConfig::default()
        };
        let decoder = Decoder::new(&config, 3, &Device::flex()).unwrap();
        let (folder, weights) = stored(&decoder, Dtype::F32);
        let loaded = Decoder::from_weights(&config, &weights, &Device::flex()).unwrap();
        assert_eq!(loaded.parameters(), decoder.parameters());
        // The last value of the file belongs to the head.
        let mut bytes = std::fs::read(folder.path().join("model/model.safetensors")).unwrap();
        let end = bytes.len() - 4;
        bytes[end..].copy_from_slice(&f32::NAN.to_le_bytes());
        let damaged = folder.path().join("model.safetensors");
        std::fs::write(&damaged, bytes).unwrap();
        let damaged = Weights::open_file(&damaged).unwrap();
        let text = Decoder::from_weights(&config, &damaged, &Device::flex()).unwrap_err().to_string();
        assert!(text.contains("lm_head.weight") && text.contains("NaN"), "{text}");
    }
}
