//! Batch files: round trips, refusals, and no panic on arbitrary bytes.

use grpo_core::batch::SamplingMask;
use grpo_core::parity::Values;
use grpo_core::{Advantages, BatchFile, LossConfig, TokenBatch};
use grpo_core::{PolicyOutput, Tensor};
use half::bf16;
use proptest::prelude::*;

fn case() -> BatchFile {
    let batch = TokenBatch::padded(&[1, -100, 2, 0], &[1.0, 0.0, 1.0, 1.0], [2, 2])
        .unwrap()
        .with_advantages(Advantages::PerToken(vec![0.5, 0.0, -1.0, 2.0]))
        .unwrap()
        .with_old_logp(vec![-1.0, 0.0, -2.0, -3.0])
        .unwrap()
        .with_sampler_logp(vec![f32::NAN, 0.0, -2.0, -3.0])
        .unwrap()
        .with_temperatures(vec![0.7, 0.0, 1.0, 1.5])
        .unwrap()
        .with_sampling_mask(SamplingMask::new(&[0, 2, 2, 2, 3], &[2, 1, 0]).unwrap())
        .unwrap();
    BatchFile {
        name: "case".into(),
        source: "by hand".into(),
        loss: LossConfig { epsilon_high: Some(0.28), ..LossConfig::default() },
        hidden: 2,
        vocab: 3,
        policy: PolicyOutput::Hidden {
            hidden: Tensor::F32((0..8).map(|i| i as f32).collect()),
            lm_head: Tensor::F32((0..6).map(|i| i as f32).collect()),
            bias: Some(Tensor::F32(vec![0.1, 0.2, 0.3])),
        },
        batch,
        expected: Values {
            loss: Some(0.25),
            logp: Some(vec![-1.0; 4]),
            grad_bias: Some(vec![0.0; 3]),
            ..Values::default()
        },
    }
}

#[test]
fn batch_file_round_trips() {
    for dtype in [grpo_core::Dtype::F32, grpo_core::Dtype::Bf16] {
        let mut file = case();
        file.policy = file.policy.to_dtype(dtype);
        let back = BatchFile::parse(&file.to_bytes().unwrap()).unwrap();
        assert_eq!((&back.name, &back.source, &back.loss), (&file.name, &file.source, &file.loss));
        assert_eq!((back.token_shape(), back.hidden, back.vocab), (vec![2, 2], 2, 3));
        assert_eq!((&back.policy, &back.expected), (&file.policy, &file.expected));
        assert_eq!(back.batch.active_rows(), [0, 2, 3]);
        assert_eq!(back.batch.targets(), file.batch.targets());
        assert_eq!(back.batch.advantages(), file.batch.advantages());
        assert_eq!(back.batch.old_logp(), file.batch.old_logp());
        assert_eq!(back.batch.temperatures(), file.batch.temperatures());
        assert_eq!(back.batch.sampling_mask(), file.batch.sampling_mask());
        assert_eq!((back.batch.kept(0), back.batch.kept(2)), (Some(&[1, 2][..]), None));
        assert!(back.batch.sampler_logp().unwrap()[0].is_nan());
    }
    let mut file = case();
    file.policy = PolicyOutput::Logits(Tensor::Bf16(vec![bf16::from_f32(1.5); 12]));
    (file.hidden, file.expected.grad_bias) = (0, None);
    let back = BatchFile::parse(&file.to_bytes().unwrap()).unwrap();
    assert_eq!((back.policy, back.vocab), (file.policy, 3));
}

/// Rewrites the header of a file.
fn with_header(bytes: &[u8], edit: impl Fn(&str) -> String) -> Vec<u8> {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = edit(std::str::from_utf8(&bytes[8..8 + length]).unwrap());
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(&bytes[8 + length..]);
    out
}

#[test]
fn batch_file_errors_name_expected_and_given_content() {
    let bytes = case().to_bytes().unwrap();
    let edits = [
        ("grpo-batch/1", "grpo-batch/9", "expected `grpo-batch/1`"),
        ("\"targets\"", "\"tarrgets\"", "tensor `targets` is missing"),
        ("\"old_logp\"", "\"old_logps\"", "did you mean `old_logp`"),
        ("\"lm_head\"", "\"lm_haed\"", "tensor `lm_head` is missing"),
        ("\"name\"", "\"source\"", "key `source` is there twice"),
        ("epsilon_high", "epsilon_hihg", "did you mean `epsilon_high`"),
        ("[2,2,2]", "[2,4,1]", "lm_head: expected shape [V, 1]"),
        ("[3,2]", "[2,3]", "lm_head: expected shape [V, 2], got [2, 3]"),
    ];
    for (from, to, reason) in edits {
        let edited = with_header(&bytes, |h| {
            assert!(h.contains(from), "{from} not in {h}");
            h.replace(from, to)
        });
        let message = BatchFile::parse(&edited).expect_err(to).to_string();
        assert!(message.contains(reason), "{to}: {message}");
    }
    assert!(BatchFile::parse(b"").is_err());
    let mut file = case();
    file.vocab = 4;
    assert!(file.to_bytes().unwrap_err().to_string().contains("lm_head [4, 2]"));
}

#[test]
fn batch_file_refuses_tensors_that_the_policy_lacks() {
    let refusal = |bytes: &[u8]| BatchFile::parse(bytes).unwrap_err().to_string();
    let mut file = case();
    let PolicyOutput::Hidden { bias, .. } = &mut file.policy else { panic!("hidden states") };
    *bias = None;
    let message = refusal(&file.to_bytes().unwrap());
    assert!(message.contains("expected.grad_bias"), "{message}");

    let policy = PolicyOutput::Logits(Tensor::F32(vec![0.5; 12]));
    let mut file = BatchFile { hidden: 0, policy, expected: Values::default(), ..case() };
    assert!(BatchFile::parse(&file.to_bytes().unwrap()).is_ok());
    let message = refusal(&with_header(&file.to_bytes().unwrap(), |h| h.replace("old_logp", "bias")));
    assert!(message.contains("both logits and bias"), "{message}");
    file.expected.grad_lm_head = Some(Vec::new());
    let message = refusal(&file.to_bytes().unwrap());
    assert!(message.contains("expected.grad_lm_head"), "{message}");
}

/// Writes one tensor of the test file in another dtype or shape.
fn with_tensor(name: &str, dtype: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let bytes = case().to_bytes().unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let old = header[name]["data_offsets"].clone();
    let (from, to) = (old[0].as_u64().unwrap() as usize, old[1].as_u64().unwrap() as usize);
    let moved = data.len() as i64 - (to - from) as i64;
    for (key, entry) in header.as_object_mut().unwrap() {
        if key == "__metadata__" {
            continue;
        }
        for end in entry["data_offsets"].as_array_mut().unwrap() {
            if end.as_u64().unwrap() as usize >= to && !(key == name && end.as_u64().unwrap() as usize == from) {
                *end = (end.as_i64().unwrap() + moved).into();
            }
        }
    }
    header[name]["dtype"] = dtype.into();
    header[name]["shape"] = serde_json::from_str(shape).unwrap();
    header[name]["data_offsets"] = serde_json::json!([from, from + data.len()]);
    let text = header.to_string();
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text.as_bytes());
    out.extend(&bytes[8 + length..8 + length + from]);
    out.extend(data);
    out.extend(&bytes[8 + length + to..]);
    out
}

#[test]
fn batch_file_accepts_dtypes_and_shapes_of_torch_and_numpy() {
    let i64s: Vec<u8> = [1i64, 0, 1, 1].iter().flat_map(|m| m.to_le_bytes()).collect();
    let f32s: Vec<u8> = [0.5f32, -1.0].iter().flat_map(|a| a.to_le_bytes()).collect();
    for (dtype, data) in [("BOOL", &[1u8, 0, 1, 1][..]), ("U8", &[1, 0, 1, 1]), ("I64", &i64s)] {
        let file = BatchFile::parse(&with_tensor("mask", dtype, "[2,2]", data)).unwrap();
        assert_eq!(file.batch.active_rows(), [0, 2, 3], "{dtype}");
    }
    assert!(BatchFile::parse(&with_tensor("mask", "U8", "[2,2]", &[1, 0, 2, 1])).is_err());
    let file = BatchFile::parse(&with_tensor("advantages", "F32", "[2,1]", &f32s)).unwrap();
    assert_eq!(file.batch.advantages(), &Advantages::PerSequence(vec![0.5, -1.0]));
    for shape in ["[2]", "[2,1]"] {
        let of_sequences: Vec<u8> = [0.5f32, 2.0].iter().flat_map(|t| t.to_le_bytes()).collect();
        let file = BatchFile::parse(&with_tensor("temperatures", "F32", shape, &of_sequences)).unwrap();
        assert_eq!(file.batch.temperatures(), Some(&[0.5, 0.5, 2.0, 2.0][..]), "{shape}");
    }
    let refused = BatchFile::parse(&with_tensor("temperatures", "F32", "[2]", &f32s)).unwrap_err().to_string();
    assert!(refused.contains("temperatures") && refused.contains("token 2"), "{refused}");
    let file = BatchFile::parse(&with_tensor("expected.loss", "F64", "[1]", &0.25f64.to_le_bytes())).unwrap();
    assert_eq!(file.expected.loss, Some(0.25));
}

#[test]
fn batch_file_refuses_sizes_without_data() {
    let empty = r#"{"__metadata__":{"format":"grpo-batch/1","loss":"{}"},"targets":{"dtype":"I64","shape":[1152921504606846976,0],"data_offsets":[0,0]}}"#;
    let mut bytes = (empty.len() as u64).to_le_bytes().to_vec();
    bytes.extend(empty.as_bytes());
    assert!(BatchFile::parse(&bytes).unwrap_err().to_string().contains("at least one token"));
}

#[test]
fn a_packed_batch_file_round_trips() {
    let batch = TokenBatch::packed(vec![1_u32, 2, 0, 1], vec![0, 1, 1, 4]).unwrap();
    let batch = batch.with_advantages(vec![0.5, 0.0, -1.0]).unwrap().with_old_logp(vec![-1.0; 4]).unwrap();
    let expected = Values { logp: Some(vec![-1.0; 4]), grad_hidden: Some(vec![0.5; 8]), ..Values::default() };
    let file = BatchFile { batch, expected, ..case() };
    assert_eq!(file.token_shape(), [4]);
    let bytes = file.to_bytes().unwrap();
    let back = BatchFile::parse(&bytes).unwrap();
    assert_eq!((&back.batch, &back.policy, &back.expected), (&file.batch, &file.policy, &file.expected));
    // Sequences of one length are padded rows without padding.
    let even = TokenBatch::packed(vec![1, 2, 0, 1], vec![0, 2, 4]).unwrap().with_advantages(vec![0.5, -1.0]).unwrap();
    let even = BatchFile { batch: even, expected: Values::default(), ..case() };
    assert_eq!(BatchFile::parse(&even.to_bytes().unwrap()).unwrap().token_shape(), [2, 2]);
}

proptest! {
    #[test]
    fn any_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(BatchFile::parse(&bytes).is_err());
    }

    #[test]
    fn damaged_files_are_an_error_or_a_valid_batch(at in any::<prop::sample::Index>(), value in any::<u8>(), keep in any::<prop::sample::Index>(), cut in any::<bool>()) {
        let mut bytes = case().to_bytes().unwrap();
        let i = at.index(bytes.len());
        bytes[i] = value;
        if cut {
            bytes.truncate(keep.index(bytes.len()));
        }
        if let Ok(file) = BatchFile::parse(&bytes) {
            prop_assert_eq!(file.batch.tokens(), file.token_shape().iter().product::<usize>());
        }
    }
}
