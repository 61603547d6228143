use super::*;
use grpo_models::NamedTensor;
use grpo_policy::TensorSource;
use grpo_trainer::coefficients::Exact;
use proptest::prelude::*;
use std::sync::LazyLock;

/// Returns the same state with all tensors in memory, for comparison.
pub(crate) fn in_memory(state: &TrainState<StoredTensors>) -> TrainState {
    let read = |source: &StoredTensors| -> Vec<NamedTensor> {
        let tensors = source.shapes().into_iter().map(|(name, shape)| {
            let data = source.values(name).unwrap().into_owned();
            NamedTensor { name: name.to_owned(), shape: shape.to_vec(), data }
        });
        tensors.collect()
    };
    TrainState {
        counters: state.counters,
        policy: read(&state.policy),
        optimizer: read(&state.optimizer),
        ref_policy: read(&state.ref_policy),
        coefficients: state.coefficients.clone(),
    }
}

/// Writes `bytes` to a file and opens it.
fn parse_tensors(bytes: &[u8]) -> Result<StoredTensors, String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    StoredTensors::open(file.path()).map(|(tensors, ..)| tensors)
}

fn state() -> TrainState {
    let tensor = |name: &str, value: f32| NamedTensor {
        name: name.to_owned(),
        shape: vec![2, 2],
        data: vec![value, -0.0, f32::MIN_POSITIVE, f32::MAX],
    };
    TrainState {
        counters: Counters {
            warm: true,
            warmup_steps: 5,
            grpo_steps: 7,
            optimizer_steps: 7,
            skipped_in_a_row: 1,
            data_cursor: 900,
            num_tokens: 1234,
        },
        policy: vec![tensor("a", 1.5), tensor("b", 2.5)],
        optimizer: vec![tensor("exp_avg.a", 0.1)],
        ref_policy: vec![tensor("a", 3.5)],
        coefficients: CoefficientState { kl_coef: Some(Exact(0.1 + 0.2)), ..CoefficientState::default() },
    }
}

fn saved(position: CheckpointId) -> SavedState {
    SavedState {
        format: FORMAT.into(),
        position: position.to_string(),
        counters: state().counters,
        coefficients: state().coefficients,
        seed: u64::MAX,
        config_sha256: sha256(b"x"),
        threads: 2,
        seconds: 1.25,
        metrics_bytes: 10,
        completions_bytes: 20,
        best: None,
    }
}

fn write(steps: &[u64]) -> (tempfile::TempDir, Checkpoints) {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(folder.path().join("checkpoints"));
    for step in steps {
        save(&checkpoints, *step, &state()).unwrap();
    }
    (folder, checkpoints)
}

fn save(checkpoints: &Checkpoints, step: u64, state: &TrainState) -> Result<PathBuf> {
    let position = CheckpointId::Grpo(step);
    let export = |group, sink: &mut dyn grpo_policy::TensorSink| {
        let tensors = match group {
            StateGroup::Weights(Weights::Policy) => &state.policy,
            StateGroup::Weights(Weights::RefPolicy) => &state.ref_policy,
            StateGroup::Optimizer => &state.optimizer,
        };
        tensors.iter().try_for_each(|tensor| sink.tensor(tensor.clone()))
    };
    checkpoints.write(position, &saved(position), &export, |sums| {
        // A process that writes nothing computes the same digests.
        assert_eq!(sums, digests(0, &export)?);
        Ok(())
    })
}

#[test]
fn checkpoint_names_sort_in_the_order_of_a_run() {
    let positions =
        [CheckpointId::Warmup(50), CheckpointId::Grpo(0), CheckpointId::Grpo(9), CheckpointId::Grpo(1_000_000)];
    assert!(positions.is_sorted());
    for position in positions {
        assert_eq!(CheckpointId::from_name(&position.to_string()), Some(position));
    }
    for name in
        ["step-1", "step-0000001", "step-", "step-+00001", "warm-000001", ".tmp-step-000001", "step-000001.old-1"]
    {
        assert_eq!(CheckpointId::from_name(name), None, "{name}");
    }
}

#[test]
fn a_checkpoint_reads_back_bit_for_bit_and_its_files_do_not_change() {
    let (_folder, checkpoints) = write(&[3, 4]);
    let (read, tensors) = checkpoints.read(CheckpointId::Grpo(3)).unwrap();
    assert_eq!(read, saved(CheckpointId::Grpo(3)));
    assert_eq!(in_memory(&tensors), state());
    for name in [MODEL, OPTIMIZER, REF_POLICY] {
        let bytes = |step| std::fs::read(checkpoints.path(CheckpointId::Grpo(step)).join(name)).unwrap();
        assert_eq!(bytes(3), bytes(4));
    }
}

#[test]
fn codes_of_moments_are_stored_as_bytes() {
    let mut with_codes = state();
    let codes = |name: &str, data: Vec<f32>| NamedTensor { name: name.to_owned(), shape: vec![3], data };
    with_codes.optimizer = vec![
        codes("exp_avg_codes.model.layers.0.mlp.experts.gate_up_proj", vec![0.0, 127.0, 255.0]),
        codes("exp_avg_scales.model.layers.0.mlp.experts.gate_up_proj", vec![0.1, 0.2, 0.3]),
    ];
    let (_folder, checkpoints) = write(&[]);
    let path = save(&checkpoints, 3, &with_codes).unwrap();
    let file = std::fs::read(path.join(OPTIMIZER)).unwrap();
    let header = usize::try_from(u64::from_le_bytes(*file.first_chunk().unwrap())).unwrap();
    let (header, values) = file[8..].split_at(header);
    assert!(String::from_utf8_lossy(header).contains(r#""dtype":"U8""#));
    // Three bytes, and three words.
    assert_eq!((&values[..3], values.len()), (&[0, 127, 255][..], 15));
    assert_eq!(in_memory(&checkpoints.read(CheckpointId::Grpo(3)).unwrap().1), with_codes);
    // Codes with another dtype, and other tensors of bytes.
    let file = |name: &str, dtype: &str, shape: usize| {
        let header = format!(r#"{{"{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[0,4]}}}}"#);
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat()
    };
    assert!(parse_tensors(&file("exp_avg_codes.a", "U8", 4)).is_ok());
    for (name, dtype, shape) in [("exp_avg_codes.a", "F32", 1), ("exp_avg_scales.a", "U8", 4)] {
        let text = parse_tensors(&file(name, dtype, shape)).unwrap_err();
        assert!(text.contains(name) && text.contains("U8"), "{text}");
    }
    with_codes.optimizer[0].data[1] = 0.5;
    assert!(save(&checkpoints, 4, &with_codes).is_err(), "half a code");
}

#[test]
fn digests_match_sha256sum() {
    assert_eq!(sha256(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

#[test]
fn pruning_keeps_the_newest_and_the_best_checkpoint() {
    let (_folder, checkpoints) = write(&[1, 2, 3, 4]);
    std::fs::create_dir(checkpoints.folder.join(".tmp-step-000009")).unwrap();
    for (limit, best, left) in
        [(2, Some(2), &[2, 3, 4][..]), (0, None, &[2, 3, 4]), (2, None, &[3, 4]), (1, Some(4), &[4])]
    {
        checkpoints.prune(limit, best.map(CheckpointId::Grpo)).unwrap();
        let left: Vec<_> = left.iter().copied().map(CheckpointId::Grpo).collect();
        assert_eq!(checkpoints.list().unwrap(), left);
    }
    checkpoints.clean().unwrap();
    assert_eq!(checkpoints.names().unwrap().len(), 1);
}

#[test]
fn non_finite_state_is_neither_saved_nor_restored() {
    type Group = fn(&mut TrainState) -> &mut Vec<NamedTensor>;
    let groups: [(&str, Group); 3] =
        [(MODEL, |s| &mut s.policy), (OPTIMIZER, |s| &mut s.optimizer), (REF_POLICY, |s| &mut s.ref_policy)];
    for (file, group) in groups {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let (_folder, checkpoints) = write(&[1, 2]);
            let mut state = state();
            group(&mut state)[0].data[1] = value;
            let error = save(&checkpoints, 3, &state).unwrap_err();
            let is_not_finite =
                matches!(error, Error::Trainer(grpo_trainer::Error::Policy(grpo_policy::Error::NotFinite { .. })));
            assert!(is_not_finite, "{error}");
            assert_eq!(checkpoints.names().unwrap(), ["step-000001", "step-000002"]);
            // Another program has replaced the last value, with correct digests.
            let path = checkpoints.path(CheckpointId::Grpo(2));
            let good = std::fs::read(path.join(file)).unwrap();
            let bad = [&good[..good.len() - 4], &value.to_le_bytes()].concat();
            std::fs::write(path.join(file), &bad).unwrap();
            let sums = std::fs::read_to_string(path.join(SUMS)).unwrap();
            std::fs::write(path.join(SUMS), sums.replace(&sha256(&good), &sha256(&bad))).unwrap();
            let text = checkpoints.read(CheckpointId::Grpo(2)).unwrap_err().to_string();
            assert!(text.contains("not finite"), "{text}");
            assert_eq!(checkpoints.last_good(CheckpointId::Grpo(2)), Some(CheckpointId::Grpo(1)));
        }
    }
}

#[test]
fn a_removed_run_folder_is_not_recreated() {
    let (folder, checkpoints) = write(&[]);
    let missing = Checkpoints::new(folder.path().join("run/checkpoints"));
    assert!(save(&missing, 1, &state()).is_err());
    assert!(!folder.path().join("run").exists());
    save(&checkpoints, 1, &state()).unwrap();
}

#[test]
fn other_formats_and_renamed_checkpoints_are_refused() {
    let (_folder, checkpoints) = write(&[1]);
    std::fs::rename(checkpoints.path(CheckpointId::Grpo(1)), checkpoints.path(CheckpointId::Grpo(5))).unwrap();
    assert!(checkpoints.read(CheckpointId::Grpo(5)).unwrap_err().to_string().contains("was renamed"));
    assert!(parse_state(b"{\"format\": \"grpo-checkpoint/2\"}").unwrap_err().contains("this program reads"));
    assert!(parse_state(b"{\"format\": \"grpo-checkpoint/4\"}").unwrap_err().contains("missing field"));
    assert!(parse_state(b"[1]").unwrap_err().contains("no key `format`"));
}

#[test]
fn headers_that_exceed_the_file_are_refused() {
    let huge = br#"{"a":{"dtype":"F32","shape":[1073741824,1073741824],"data_offsets":[0,4611686018427387904]}}"#;
    let file = [&(huge.len() as u64).to_le_bytes()[..], huge].concat();
    assert!(parse_tensors(&file).is_err());
    assert!(parse_tensors(&u64::MAX.to_le_bytes()).is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_an_error_or_a_value(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = parse_state(&bytes);
        let _ = parse_sums(&bytes);
        let _ = parse_tensors(&bytes);
    }

    #[test]
    fn damaged_bytes_are_an_error_or_a_value(at in 0usize..10_000, value in any::<u8>(), cut in 0usize..10_000) {
        static FILES: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
            let (_folder, checkpoints) = write(&[1]);
            [STATE, MODEL].map(|file| std::fs::read(checkpoints.path(CheckpointId::Grpo(1)).join(file)).unwrap())
        });
        for mut bytes in FILES.clone() {
            let at = at % bytes.len();
            bytes[at] = value;
            bytes.truncate(1 + cut % bytes.len());
            let _ = parse_state(&bytes);
            if let Ok(read) = parse_tensors(&bytes) {
                let values = read.shapes().iter().map(|(name, _)| read.values(name).unwrap().len()).sum::<usize>();
                prop_assert!(4 * values <= bytes.len());
            }
        }
    }
}
