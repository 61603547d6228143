//! Quantised matrices equal those of bitsandbytes.

use grpo_models::{Dtype, Experts, ExportOptions, FolderWriter, ModelConfig, Quantization, QuantizedMatrix, Weights};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    table: Vec<f32>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    shape: [usize; 2],
    values: Vec<f32>,
    nf4: Nf4,
    int8: Int8,
}

#[derive(Deserialize)]
struct Nf4 {
    codes: Vec<u8>,
    scales: Vec<f32>,
    dequantized: Vec<f32>,
}

#[derive(Deserialize)]
struct Int8 {
    codes: Vec<i8>,
    scales: Vec<f32>,
}

#[test]
fn codes_scales_and_values_match_bitsandbytes() {
    let golden: Golden = serde_json::from_str(include_str!("../../../../tests/golden/quantization.json")).unwrap();
    assert_eq!(golden.table, Quantization::NF4_VALUES);
    for Case { shape, values, nf4, int8 } in golden.cases {
        let found = QuantizedMatrix::new(Quantization::Nf4, &values, shape);
        assert_eq!((found.codes(), found.scales()), (&nf4.codes[..], &nf4.scales[..]));
        assert_eq!(found.dequantized(), nf4.dequantized);
        let found = QuantizedMatrix::new(Quantization::Int8, &values, shape);
        let codes: Vec<u8> = int8.codes.iter().map(|code| *code as u8).collect();
        assert_eq!((found.codes(), found.scales()), (&codes[..], &int8.scales[..]));
        let rows = int8.codes.chunks(shape[1]).zip(&int8.scales);
        let expected: Vec<f32> =
            rows.flat_map(|(codes, scale)| codes.iter().map(move |c| f32::from(*c) * scale)).collect();
        assert_eq!(found.dequantized(), expected);
    }
}

/// More values than are read at a time, from a file in bf16.
#[test]
fn large_matrices_of_files_are_quantised_as_a_whole() {
    let config = ModelConfig { num_hidden_layers: 1, intermediate_size: 700, ..ModelConfig::default() };
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("model");
    let options = ExportOptions { dtype: Dtype::Bf16, ..ExportOptions::default() };
    let mut writer = FolderWriter::create(&target, &config, None, options).unwrap();
    for (seed, parameter) in config.parameters().iter().enumerate() {
        let value = |at: usize| ((at + seed) * 7919 % 2003) as f32 / 1000.0 - 1.0;
        writer.write(&parameter.name, &(0..parameter.len()).map(value).collect::<Vec<_>>()).unwrap();
    }
    writer.finish().unwrap();
    let weights = Weights::open(&target).unwrap();
    let tensor = weights.tensor("model.layers.0.mlp.gate_proj.weight").unwrap();
    for quantization in [Quantization::Int8, Quantization::Nf4] {
        let found = tensor.quantized(quantization).unwrap();
        assert_eq!(found, QuantizedMatrix::new(quantization, &tensor.to_vec(), [700, config.hidden_size]));
        let bytes = found.codes().len() + 4 * found.scales().len();
        assert_eq!(quantization.bytes(found.shape()), bytes as u64);
        // Released pages are read again.
        assert_eq!(tensor.quantized(quantization).unwrap(), found);
        let memory = quantization.memory(&config);
        let matrices = config.layer_matrices(0);
        let values = |matrix: &grpo_models::LayerMatrix| matrix.input * matrix.output;
        assert_eq!(memory.values, matrices.iter().map(values).sum::<usize>() as u64);
        let bytes = matrices.iter().map(|matrix| quantization.bytes([matrix.output, matrix.input])).sum::<u64>();
        assert_eq!(memory.bytes, bytes);
    }
    let norm = weights.tensor("model.norm.weight").unwrap().quantized(Quantization::Nf4).unwrap_err();
    assert!(norm.to_string().contains("`model.norm.weight`: expected a matrix"), "{norm}");
}

/// The reciprocal of their largest values is infinite.
#[test]
fn values_near_the_smallest_f32_become_zeros() {
    let tiny = f32::from_bits(1);
    for (quantization, values) in [(Quantization::Int8, [1e-37, -1e-38]), (Quantization::Nf4, [tiny, 0.0])] {
        let found = QuantizedMatrix::new(quantization, &values, [1, 2]).dequantized();
        assert_eq!(found, [0.0, 0.0], "{quantization:?}");
    }
}

#[test]
fn experts_are_refused_by_name() {
    let config = ModelConfig { experts: Some(Experts::default()), ..ModelConfig::default() };
    let error = Quantization::Nf4.check(&config).unwrap_err().to_string();
    assert!(error.contains("`policy.quantization`") && error.contains("num_experts"), "{error}");
    Quantization::Int8.check(&ModelConfig::default()).unwrap();
}
