//! Sharded training and rollout programs compute the same as on one device.

use crate::checkpoint::Checkpoint;
use crate::mesh::{meshes, run};
use crate::support::blocks_of;
use grpo_backend_tpu::TokenTables;
use grpo_backend_tpu::plugins::Kind;
use grpo_backend_tpu::program::Role;
use grpo_core::aggregate::token_weights;
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_core::objective::ValueLossConfig;
use grpo_core::{Advantages, ImportanceSamplingLevel, LossConfig, Tiling};
use grpo_models::{LoraConfig, Weights};
use grpo_policy::{LogitsProcessors, Sampling, Sequence, token_batch};
use grpo_policy_pjrt::decoder::{Adapters, Attention, AxisRules, Compute, Decoder, Parameter};
use grpo_policy_pjrt::{RequestOptions, RolloutOptions, RolloutPrograms, RolloutSizes, TrainPrograms, TrainShape};
use grpo_rng::Purpose;
use grpo_stablehlo::{Array, Dtype, Mesh, Module, Save, TensorType};
use grpo_testkit::margin::{assert_below, largest_difference};
use rstest::rstest;

/// Rows and completion tokens divisible by four.
const ROWS: usize = 4;
const LENGTH: usize = 12;
const TOKENS: usize = 32;

/// Returns one or two sequences per row.
fn sequences(vocab: usize, shared: bool) -> Vec<Sequence> {
    let lengths: &[[usize; 2]] = match shared {
        true => &[[2, 5], [3, 3], [1, 7], [3, 2], [6, 1], [2, 4], [1, 4], [4, 5]],
        false => &[[2, 9], [3, 8], [6, 4], [1, 10]],
    };
    let mut next = 5;
    let mut ids = |count: usize| -> Vec<u32> {
        (0..count)
            .map(|_| {
                next = (next * 17 + 3) % 251;
                next % vocab as u32
            })
            .collect()
    };
    lengths.iter().map(|[prompt, completion]| Sequence { prompt: ids(*prompt), completion: ids(*completion) }).collect()
}

fn floats(shape: &[usize], numbers: impl IntoIterator<Item = f32>) -> Array {
    Array::floats(Dtype::F32, shape, numbers.into_iter().map(f64::from)).unwrap()
}

fn ints(shape: &[usize], numbers: &[i32]) -> Array {
    Array::ints(Dtype::I32, shape, numbers.iter().map(|x| i64::from(*x))).unwrap()
}

/// Returns the row arguments of programs.
fn rows_of(sequences: &[Sequence]) -> Vec<Array> {
    let (mut ids, mut positions, mut predicting) = (vec![0; ROWS * LENGTH], vec![0; ROWS * LENGTH], vec![]);
    let in_row = sequences.len() / ROWS;
    for (row, sequences) in sequences.chunks(in_row).enumerate() {
        let mut at = row * LENGTH;
        for Sequence { prompt, completion } in sequences {
            let begin = at;
            for id in prompt.iter().chain(completion).take(prompt.len() + completion.len() - 1) {
                (ids[at], positions[at]) = (*id as i32, (at - begin) as i32);
                at += 1;
            }
            predicting.extend((begin + prompt.len() - 1..at).map(|token| token as i32));
        }
        assert!(at <= (row + 1) * LENGTH);
    }
    let mut predicts = vec![TOKENS as i32; ROWS * LENGTH];
    predicting.iter().zip(0..).for_each(|(token, n)| predicts[*token as usize] = n);
    predicting.resize(TOKENS, 0);
    let of_tokens = |numbers: &[i32]| ints(&[ROWS, LENGTH], numbers);
    let mut rows = vec![of_tokens(&ids), ints(&[TOKENS], &predicting), of_tokens(&predicts)];
    if in_row > 1 {
        rows.push(ints(&[ROWS, LENGTH], &positions));
    }
    rows
}

fn weights(table: &[Parameter], weights: Option<&Weights>) -> Vec<Array> {
    let values = |p: &Parameter| match weights.filter(|_| p.role.is_of_model()) {
        Some(weights) => p.tensors().flat_map(|(_, name)| weights.tensor(&name).unwrap().to_vec()).collect(),
        None => grpo_rng::uniform_weights(p.shape.iter().product(), 0.1, 5, p.name()),
    };
    table.iter().map(|p| floats(&p.shape, values(p))).collect()
}

/// A loss whose ratios are on both sides of the clip range, and the arguments of its program.
struct Case {
    loss: LossConfig,
    of_values: Option<ValueLossConfig>,
    shape: TrainShape,
    arguments: Vec<Array>,
    /// Number of results that are gradient accumulators.
    gradients: usize,
}

impl Case {
    fn new(loss: LossConfig, modules: &TrainPrograms, parameters: Vec<Array>, shared: bool) -> Self {
        let (decoder, vocab) = (modules.decoder(), modules.decoder().config().vocab_size);
        let sequences = sequences(vocab, shared);
        let batch = token_batch(&sequences).unwrap();
        let n = batch.tokens();
        let number = |scale: f32, shift: f32| (0..n).map(|t| scale * (t as f32 + shift).cos()).collect::<Vec<_>>();
        let likely = (vocab as f32).ln();
        let batch = batch.with_old_logp(number(1.0, 0.5).into_iter().map(|x| x.min(0.6) - likely).collect()).unwrap();
        let batch = batch.with_advantages(Advantages::PerToken(number(1.0, 2.0))).unwrap();
        let of_tokens = token_weights(&loss, &batch).unwrap();
        let batch = batch.with_weights(of_tokens).unwrap();
        let evaluator = Evaluator::new(&loss, &batch).unwrap();

        let shape = TrainShape { rows: ROWS, length: LENGTH, tokens: TOKENS, shared, ..TrainShape::default() };
        let spec = modules.head(&loss, TOKENS).unwrap();
        let tables = TokenTables::new(&spec, &batch, Some(&evaluator));
        let trained = decoder.trained();
        let mut arguments = parameters;
        // Accumulators of an earlier micro-batch.
        let sum =
            |p: &Parameter| floats(&p.shape, grpo_rng::uniform_weights(p.shape.iter().product(), 1e-3, 6, p.name()));
        arguments.extend(trained.iter().map(sum));
        arguments.extend(rows_of(&sequences));
        arguments.push(ints(&spec.type_of(Role::TokenIds).shape, &tables.ids));
        arguments.push(floats(&spec.type_of(Role::TokenNumbers).shape, tables.numbers));
        arguments.push(Array::preds([], [tables.on_policy]).unwrap());
        let of_values = decoder.has_value_head().then(|| {
            let column = |mut column: Vec<f32>| {
                column.resize(TOKENS, 0.0);
                column
            };
            let table = [number(0.3, 1.0), number(1.0, 0.0), vec![1.0 / n as f32; n]].map(column).concat();
            arguments.push(floats(&[3, TOKENS], table));
            ValueLossConfig { vf_coef: 0.4, cliprange_value: Some(0.2) }
        });
        Self { loss, of_values, shape, arguments, gradients: trained.len() }
    }

    fn module(&self, modules: &TrainPrograms) -> Module {
        modules.gradient(&self.loss, self.of_values.as_ref(), self.shape).unwrap()
    }
}

fn sharded(decoder: &Decoder, mesh: &Mesh) -> Decoder {
    decoder.clone().with_axis_rules(AxisRules::new(mesh)).unwrap()
}

/// Asserts that every result of a program equals the result on one device within 1e-5 of its largest number.
fn agree(what: &str, module: &Module, found: &[Array], expected: &[Array]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for ((found, expected), result) in found.iter().zip(expected).zip(&module.main.results) {
        assert_close(&format!("{what}, {}", result.name), found, expected);
    }
}

fn assert_close(what: &str, found: &Array, expected: &Array) {
    let (found, expected) = (found.to_floats(), expected.to_floats());
    let largest = expected.iter().filter(|x| x.is_finite()).fold(0.0_f64, |m, x| m.max(x.abs()));
    assert!(largest > 0.0, "{what}: nothing to compare");
    assert_below(what, largest_difference(&found, &expected) / largest, 1e-5);
}

/// Checks that the gradients match on these meshes, and returns the gradients of one device.
fn gradients_agree(
    what: &str,
    one: TrainPrograms,
    with: impl Fn(Decoder) -> TrainPrograms,
    case: &Case,
    meshes: &[Mesh],
) -> Vec<Array> {
    let module = case.module(&one);
    let expected = run(&module, &case.arguments);
    let sums = &case.arguments[one.decoder().parameters().len()..];
    for (before, after) in sums.iter().zip(&expected[..case.gradients]) {
        assert!(before != after, "{what}: no gradient");
    }
    for mesh in meshes {
        let what = format!("{what} on {mesh}");
        let module = case.module(&with(sharded(one.decoder(), mesh)));
        assert_eq!(module.partitions, 4);
        agree(&what, &module, &run(&module, &case.arguments), &expected);
    }
    expected[..case.gradients].to_vec()
}

/// Returns a tiling of the logits into two overlapping chunks.
fn tiling() -> Tiling {
    Tiling { token_chunk: Some(20), ..Tiling::default() }
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn sharded_gradients_of_every_family_match_one_device() {
    let attentions = [Attention::Materialised, blocks_of(5)];
    for (i, name) in ["qwen2_pad", "qwen3", "llama3", "qwen2_5_sharded"].into_iter().enumerate() {
        let checkpoint = Checkpoint::open(name);
        let decoder = Decoder::new(checkpoint.config(), Compute::F32).with_attention(attentions[i % 2]);
        let with = |decoder: Decoder| TrainPrograms::new(decoder, Save::Carry).with_tiling(tiling());
        let modules = with(decoder);
        let parameters = weights(&modules.decoder().parameters(), Some(&checkpoint.weights));
        let loss = LossConfig { entropy_coef: 0.1, ..LossConfig::default() };
        let case = Case::new(loss, &modules, parameters.clone(), i >= 2);
        let gradients = gradients_agree(name, modules.clone(), with, &case, &meshes());
        if i < 2 {
            updates_agree(name, &modules, &parameters, &gradients);
            steps_agree(name, &modules, with, &case);
        }
    }
}

/// Returns nonzero first and second moments.
fn moments(table: &[Parameter]) -> Vec<Array> {
    let of = |seed: u64, size: f64, of: fn(f32) -> f32| {
        let values = move |p: &Parameter| grpo_rng::uniform_weights(p.shape.iter().product(), size, seed, p.name());
        table.iter().map(move |p| floats(&p.shape, values(p).into_iter().map(of)))
    };
    of(7, 1e-2, |x| x).chain(of(8, 1e-1, |x| x * x)).collect()
}

/// Returns the scalars of a step: beta1, beta2, rate, root of the bias correction, epsilon, decay, clip, limit.
fn scalars() -> Array {
    floats(&[8], [0.9, 0.999, 1e-2, 0.5, 1e-6, 0.99, 1e-2, f32::MAX])
}

/// Replaces the parameters after a step by their changes.
fn steps_of(mut results: Vec<Array>, parameters: &[Array]) -> Vec<Array> {
    for (after, before) in results.iter_mut().zip(parameters) {
        let steps = after.to_floats().into_iter().zip(before.to_floats()).map(|(after, before)| after - before);
        *after = Array::floats(Dtype::F64, after.shape().to_vec(), steps).unwrap();
    }
    results
}

/// Checks the fused program of gradient and AdamW.
fn steps_agree(name: &str, one: &TrainPrograms, with: impl Fn(Decoder) -> TrainPrograms, case: &Case) {
    let table = one.decoder().trained();
    let (parameters, rest) = case.arguments.split_at(table.len());
    let batch = &rest[case.gradients..];
    let arguments: Vec<Array> = [parameters, &moments(&table), batch, &[scalars()]].concat();
    let results = |modules: &TrainPrograms| {
        let module = modules.step(&case.loss, case.of_values.as_ref(), case.shape).unwrap();
        let results = steps_of(run(&module, &arguments), parameters);
        (module, results)
    };
    let (_, expected) = results(one);
    let report = expected[3 * table.len()].to_floats();
    assert!(report[0] > 1e-2 && report[1..] == [1.0; 3], "{name}: {report:?} is not clipped");
    for mesh in meshes() {
        let (module, found) = results(&with(sharded(one.decoder(), &mesh)));
        assert_eq!(module.partitions, 4);
        agree(&format!("{name}, a step on {mesh}"), &module, &found, &expected);
    }
}

/// Checks an AdamW step on the gradients, with nonzero moments.
fn updates_agree(name: &str, one: &TrainPrograms, parameters: &[Array], gradients: &[Array]) {
    let table = one.decoder().trained();
    let arguments: Vec<Array> = [parameters, &moments(&table), gradients, &[scalars()]].concat();
    let programs = |modules: &TrainPrograms| [modules.optimizer().unwrap(), modules.optimizer_checked().unwrap()];
    let results = |module: &Module| {
        let mut results = run(module, &arguments);
        let zeros: Vec<Array> = results.drain(3 * table.len()..4 * table.len()).collect();
        assert!(zeros.iter().all(|zeros| zeros.to_floats().iter().all(|x| *x == 0.0)), "{name}: sums are not zero");
        steps_of(results, parameters)
    };
    let expected = programs(one).map(|module| results(&module));
    for mesh in meshes() {
        let sharded = TrainPrograms::new(sharded(one.decoder(), &mesh), Save::Carry);
        for (module, expected) in programs(&sharded).iter().zip(&expected) {
            let report = expected.last().unwrap().to_floats();
            assert!(report[0] > 1e-2 && report[1..3] == [1.0, 1.0], "{name}: {report:?} is not clipped");
            agree(&format!("{name}, AdamW on {mesh}"), module, &results(module), expected);
        }
    }
}

#[rstest]
#[case::fsdp_and_tensor(&meshes()[2..])]
#[ignore = "GRPO_TESTS=all"]
#[case::others(&meshes()[..2])]
fn sharded_gradients_of_adapters_a_value_head_and_a_sequence_level_loss_match_one_device(#[case] meshes: &[Mesh]) {
    let checkpoint = Checkpoint::open("qwen3");
    let config = checkpoint.config();
    let lora = LoraConfig { r: 2, ..LoraConfig::default() };
    let decoder = Decoder::new(config, Compute::F32).with_attention(blocks_of(5));
    let decoder = decoder.with_adapters(Adapters::new(config, &lora).unwrap()).with_value_head();
    let with = |decoder: Decoder| TrainPrograms::new(decoder, Save::Products).with_tiling(tiling());
    let modules = with(decoder);
    let parameters = weights(&modules.decoder().parameters(), Some(&checkpoint.weights));
    let loss =
        LossConfig { importance_sampling_level: Some(ImportanceSamplingLevel::Sequence), ..LossConfig::default() };
    let case = Case::new(loss, &modules, parameters, true);
    gradients_agree("adapters", modules, with, &case, meshes);
}

/// Prefill, admission, and one call of the decode loop.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::fsdp_and_tensor(&meshes()[2..])]
#[ignore = "GRPO_TESTS=all"]
#[case::others(&meshes()[..2])]
fn a_sharded_greedy_rollout_matches_one_device(#[case] meshes: &[Mesh]) {
    rollouts_agree(&Sampling::Greedy, meshes);
}

/// The programs of each kind of device read weights and cache in another layout. With sliding windows, and with sinks, too.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case("qwen3")]
#[ignore = "GRPO_TESTS=all"]
#[case("qwen2_window")]
#[case("gpt_oss")]
fn the_rollouts_of_all_kinds_of_devices_match(#[case] name: &str) {
    let checkpoint = Checkpoint::open(name);
    let decoder = Decoder::new(checkpoint.config(), Compute::F32);
    let parameters = weights(&decoder.parameters(), Some(&checkpoint.weights));
    let [tpu, cpu, cuda] =
        [Kind::Tpu, Kind::Cpu, Kind::Cuda].map(|kind| rollout(kind, &decoder, &parameters, &Sampling::Greedy));
    for (kind, found) in [(Kind::Cpu, cpu), (Kind::Cuda, cuda)] {
        let ids = assert_states_match(&format!("{name}, {}", kind.name()), &found, &tpu);
        assert!(ids.iter().any(|id| *id != ids[0]), "{name}: {ids:?}");
    }
}

/// Random numbers do not depend on the device that draws them.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_sharded_rollout_that_samples_matches_one_device() {
    let all = LogitsProcessors::default();
    let likeliest = LogitsProcessors { top_k: Some(9), top_p: Some(0.9), ..all };
    let [all, likeliest] = [all, likeliest].map(|processors| {
        let (seed, purpose) = (5, Purpose::Rollout);
        let sampling = Sampling::Random { temperature: 1.0, processors, seed, purpose, step: 3, first: 0 };
        rollouts_agree(&sampling, &meshes())
    });
    assert!(all != likeliest, "{all:?}");
}

/// Checks that the states of two rollouts have the same tokens, and returns them; keys, values and log-probabilities are close.
fn assert_states_match(what: &str, found: &[Array], expected: &[Array]) -> Vec<i64> {
    // Of every cache `[L, B, K, S, D]`: keys, then values.
    let cached = expected.iter().take_while(|part| part.ty().shape.len() == 5).count();
    assert_eq!(found[cached].to_ints(), expected[cached].to_ints(), "{what}");
    for part in (0..cached).chain([cached + 1]) {
        assert_close(&format!("{what}, part {part}"), &found[part], &expected[part]);
    }
    expected[cached].to_ints()
}

/// Checks that the rollouts match on these meshes, and returns the tokens.
fn rollouts_agree(sampling: &Sampling, meshes: &[Mesh]) -> Vec<i64> {
    let checkpoint = Checkpoint::open("qwen3");
    let one = Decoder::new(checkpoint.config(), Compute::F32);
    let parameters = weights(&one.parameters(), Some(&checkpoint.weights));
    let expected = rollout(Kind::Tpu, &one, &parameters, sampling);
    let mut ids = assert_states_match("one device", &expected, &expected);
    assert!(ids.iter().any(|id| *id != ids[0]), "{ids:?}");
    for kind in [Kind::Tpu, Kind::Cuda] {
        for mesh in meshes {
            let found = rollout(kind, &sharded(&one, mesh), &parameters, sampling);
            ids = assert_states_match(&format!("{mesh}, {}", kind.name()), &found, &expected);
        }
    }
    ids
}

/// Returns the state of eight slots after the first four tokens of completions.
fn rollout(kind: Kind, decoder: &Decoder, parameters: &[Array], sampling: &Sampling) -> Vec<Array> {
    const SLOTS: usize = 8;
    let sizes = RolloutSizes {
        prompts: SLOTS,
        longest_prompt: 6,
        num_generations: 1,
        max_completion_length: 8,
        conversations: false,
    };
    let options = RolloutOptions { slots: SLOTS, tokens_per_call: 4 };
    let request = RequestOptions::new(sampling, 1);
    let modules = RolloutPrograms::of(kind, decoder, Dtype::F32, options, sizes, request).unwrap();
    let lengths: Vec<i32> = (0..SLOTS as i32).map(|row| 2 + row % 5).collect();
    let id = |row: usize, column: usize| ((row * 31 + column * 17 + 5) % decoder.config().vocab_size) as i32;
    let types = |module: &Module| -> Vec<TensorType> {
        module.main.body().arguments.iter().map(|id| module.main.type_of(*id).clone()).collect()
    };

    let prompt = types(&modules.prefill)[parameters.len()].shape[1];
    let ids: Vec<i32> = (0..SLOTS * prompt).map(|i| id(i / prompt, i % prompt)).collect();
    let prompts = [ints(&[SLOTS, prompt], &ids), ints(&[SLOTS], &lengths)];
    let prefilled = run(&modules.prefill, &[parameters, &prompts].concat());

    // An empty state; all slots begin.
    let state = types(&modules.admit).len() - prefilled.len() - 7;
    let mut arguments: Vec<Array> = types(&modules.admit)[..state].iter().map(zeros).collect();
    let numbers: Vec<i32> = (0..SLOTS as i32).collect();
    // Every shard of slots has a list of its own.
    let shards = types(&modules.admit)[state + prefilled.len()].elements();
    let slots = numbers.iter().map(|slot| slot % (SLOTS / shards) as i32).collect::<Vec<_>>();
    let last: Vec<i32> = lengths.iter().enumerate().map(|(row, length)| id(row, *length as usize - 1)).collect();
    arguments.extend(prefilled);
    arguments.push(ints(&[shards], &vec![(SLOTS / shards) as i32; shards]));
    arguments.extend([ints(&[SLOTS], &slots), ints(&[SLOTS], &numbers)]);
    arguments.push(Array::preds([SLOTS], [true; SLOTS]).unwrap());
    arguments.extend([ints(&[SLOTS], &last), ints(&[SLOTS], &lengths)]);
    // Every sample has its own random key.
    arguments.push(Array::ints(Dtype::U32, [SLOTS, 2], (0..2 * SLOTS as i64).map(|i| 1 + 77_773 * i)).unwrap());
    let state = run(&modules.admit, &arguments);

    let (_, decode) = &modules.decode[0];
    let [.., numbers, _, stop_ids, limit] = &types(decode)[..] else { panic!("four arguments behind the state") };
    let (top_k, top_p) = match sampling {
        Sampling::Random { processors, .. } => (processors.top_k.unwrap_or(0), processors.top_p.unwrap_or(1.0)),
        Sampling::Greedy => (0, 1.0),
    };
    // Temperature, repetition penalty, top_p, min_p.
    let numbers = floats(&numbers.shape, [1.0, 1.0, top_p as f32, 0.0]);
    let stop_ids = ints(&stop_ids.shape, &vec![-1; stop_ids.elements()]);
    let rest = [numbers, ints(&[], &[top_k as i32]), stop_ids, ints(&limit.shape, &vec![8; limit.elements()])];
    run(decode, &[parameters, &state, &rest].concat())
}

fn zeros(ty: &TensorType) -> Array {
    let count = ty.elements();
    match ty.dtype {
        Dtype::Pred => Array::preds(ty.shape.clone(), vec![false; count]),
        Dtype::F32 => Array::floats(ty.dtype, ty.shape.clone(), vec![0.0; count]),
        _ => Array::ints(ty.dtype, ty.shape.clone(), vec![0; count]),
    }
    .unwrap()
}

#[test]
fn uneven_shards_are_an_error_that_names_the_dimension() {
    let config = grpo_models::ModelConfig { vocab_size: 64, ..grpo_models::ModelConfig::default() };
    let rules = |axes: &[(&str, usize)]| AxisRules::new(&Mesh::new("mesh", axes.iter().copied()).unwrap());
    let of = |axes: &[(&str, usize)]| Decoder::new(&config, Compute::F32).with_axis_rules(rules(axes));
    let error = of(&[("fsdp", 3)]).unwrap_err().to_string();
    assert!(error.starts_with("the parameter `input_layernorm.weight`: ") && error.contains("3 parts"), "{error}");
    // Four query heads of two key/value heads: four shards have copies of key/value heads, eight have no head each.
    assert!(of(&[("tensor", 4)]).is_ok());
    let error = of(&[("tensor", 8)]).unwrap_err().to_string();
    assert!(error.starts_with("the query heads of key/value heads: "), "{error}");

    // A mesh of one device is none.
    assert!(!of(&[("data", 1), ("fsdp", 1), ("tensor", 1)]).unwrap().axis_rules().is_sharded());
    let decoder = of(&[("fsdp", 4)]).unwrap();
    let modules = TrainPrograms::new(decoder.clone(), Save::Carry);
    let shape = TrainShape { rows: 4, length: 16, tokens: 16, ..TrainShape::default() };
    let loss = LossConfig::default();
    assert!(modules.gradient(&loss, None, shape).is_ok());
    let error = modules.gradient(&loss, None, TrainShape { rows: 6, ..shape }).unwrap_err().to_string();
    assert!(error.starts_with("the rows of a micro-batch: ") && error.contains("size 6"), "{error}");
    let error = modules.score(&loss, TrainShape { tokens: 18, ..shape }).unwrap_err().to_string();
    assert!(error.starts_with("the completion tokens of a micro-batch: ") && error.contains("size 18"), "{error}");
    let sizes = RolloutSizes {
        prompts: 2,
        longest_prompt: 6,
        num_generations: 4,
        max_completion_length: 8,
        conversations: false,
    };
    // Prompts are padded: one row per device.
    let of_rollout = RolloutPrograms::of(
        Kind::Cpu,
        &decoder,
        Dtype::F32,
        RolloutOptions::default(),
        sizes,
        RequestOptions::new(&Sampling::Greedy, 1),
    );
    assert!(of_rollout.unwrap().prefill.to_string().contains("tensor<4x16xi32>"), "four rows of prompts");
}
