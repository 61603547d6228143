//! Programs on packed rows against the same programs on rows of one sequence, in f64, in the interpreter.

mod losses;

use super::super::packing::Packing;
use super::super::rows::Rows as BatchRows;
use super::*;
use crate::decoder::{ATTENTION, Adapters, Attention};
use grpo_backend_tpu::TokenTables;
use grpo_core::aggregate::token_weights;
use grpo_core::backend_api::evaluate::Evaluator;
use grpo_models::LoraConfig;
use grpo_policy::{Sequence, token_batch};
use grpo_stablehlo::Array;
use proptest::prelude::*;
use std::num::NonZeroUsize;

/// Tokens of a row: the minimum of all programs.
const LENGTH: usize = 16;
const VOCAB: u32 = 11;

/// Generates sequences and a random packing: rows with one, several or no sequences.
fn packed() -> impl Strategy<Value = (Vec<Sequence>, Packing)> {
    let tokens = |most: usize| prop::collection::vec(0..VOCAB, 1..=most);
    let sequence = (tokens(5), tokens(6)).prop_map(|(prompt, completion)| Sequence { prompt, completion });
    let sequences = prop::collection::vec(sequence, 2..6).prop_flat_map(|sequences| {
        let order = Just((0..sequences.len()).collect::<Vec<_>>()).prop_shuffle();
        let breaks = prop::collection::vec(prop::bool::weighted(0.25), sequences.len());
        (Just(sequences), order, breaks)
    });
    sequences.prop_map(|(sequences, order, breaks)| {
        let (mut rows, mut room) = (vec![vec![]], LENGTH);
        for (i, is_break) in order.into_iter().zip(breaks) {
            let length = sequences[i].prompt.len() + sequences[i].completion.len() - 1;
            if is_break || length > room {
                rows.push(vec![]);
                room = LENGTH;
            }
            room -= length;
            let row = rows.len() - 1;
            rows[row].push(i);
        }
        (sequences, Packing { length: LENGTH, rows })
    })
}

fn alone(sequences: &[Sequence]) -> Packing {
    Packing { length: LENGTH, rows: (0..sequences.len()).map(|i| vec![i]).collect() }
}

fn attention(is_blockwise: bool) -> Attention {
    match is_blockwise {
        true => Attention::Blockwise { block: NonZeroUsize::new(5).unwrap() },
        false => Attention::Materialised,
    }
}

/// Creates programs of a decoder with all optional parts of a layer; with adapters and a value head if `extended`.
fn modules(attention: Attention, extended: bool) -> TrainPrograms {
    let config = ModelConfig {
        vocab_size: VOCAB as usize,
        hidden_size: 8,
        intermediate_size: 6,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        rope_theta: 30.0,
        qk_norm: true,
        ..ModelConfig::default()
    };
    let mut decoder = Decoder::new(&config, Compute::F32).with_attention(attention);
    if extended {
        let lora = LoraConfig { r: 2, ..LoraConfig::default() };
        decoder = decoder.with_adapters(Adapters::new(&config, &lora).unwrap()).with_value_head();
    }
    TrainPrograms::new(decoder, Save::Carry)
}

fn floats(shape: &[usize], numbers: impl IntoIterator<Item = f32>) -> Array {
    Array::floats(Dtype::F32, shape, numbers.into_iter().map(f64::from)).unwrap()
}

/// Returns the first arguments of programs.
fn weights(modules: &TrainPrograms) -> Vec<Array> {
    let table = modules.decoder().parameters();
    let values = |p: &Parameter| grpo_rng::uniform_weights(p.shape.iter().product(), 0.7, 5, p.name());
    table.iter().map(|p| floats(&p.shape, values(p))).collect()
}

/// Returns the row arguments of programs.
fn rows_of(modules: &TrainPrograms, rows: &BatchRows) -> Vec<Array> {
    let numbers = [&rows.ids, &rows.predicting, &rows.predicts, &rows.positions];
    let arrays = modules.row_types(rows.shape).into_iter().zip(numbers);
    let array = |((_, ty), numbers): ((_, TensorType), &Vec<i32>)| {
        Array::ints(ty.dtype, ty.shape, numbers.iter().map(|x| i64::from(*x))).unwrap()
    };
    arrays.map(array).collect()
}

fn tables_of(spec: &Spec, tables: &TokenTables) -> [Array; 3] {
    let shape = |role| spec.type_of(role).shape;
    [
        Array::ints(Dtype::I32, shape(Role::TokenIds), tables.ids.iter().map(|x| i64::from(*x))).unwrap(),
        floats(&shape(Role::TokenNumbers), tables.numbers.iter().copied()),
        Array::preds([], [tables.on_policy]).unwrap(),
    ]
}

/// Returns all results of the gradient program with their names; results of completion tokens without padding.
fn gradient(modules: &TrainPrograms, sequences: &[Sequence], packing: &Packing) -> Vec<(String, Vec<f64>)> {
    let loss = LossConfig { entropy_coef: 0.1, ..LossConfig::default() };
    let batch = token_batch(sequences).unwrap();
    let n = batch.tokens();
    let number = |scale: f32, shift: f32| (0..n).map(|t| scale * (t as f32 + shift).cos()).collect::<Vec<_>>();
    // Ratios on both sides of the clip range: log(11) is 2.4.
    let batch = batch.with_old_logp(number(1.0, 0.5).into_iter().map(|x| x.min(0.6) - 2.4).collect()).unwrap();
    let batch = batch.with_advantages(grpo_core::Advantages::PerToken(number(1.0, 2.0))).unwrap();
    let weights_of_tokens = token_weights(&loss, &batch).unwrap();
    let batch = batch.with_weights(weights_of_tokens).unwrap();
    let evaluator = Evaluator::new(&loss, &batch).unwrap();

    let rows = BatchRows::packed(sequences, packing, packing.shape(sequences));
    let spec = modules.head(&loss, rows.shape.tokens).unwrap();
    let trained = modules.decoder().trained();
    let mut arguments = weights(modules);
    arguments.extend(trained.iter().map(|p| floats(&p.shape, vec![0.0; p.shape.iter().product()])));
    arguments.extend(rows_of(modules, &rows));
    arguments.extend(tables_of(&spec, &TokenTables::new(&spec, &batch, Some(&evaluator))));
    let of_values = modules.decoder().has_value_head().then(|| {
        let column = |mut column: Vec<f32>| {
            column.resize(rows.shape.tokens, 0.0);
            column
        };
        let table = [number(0.3, 1.0), number(1.0, 0.0), vec![1.0 / n as f32; n]].map(column).concat();
        arguments.push(floats(&[3, rows.shape.tokens], table));
        ValueLossConfig { vf_coef: 0.4, cliprange_value: Some(0.2) }
    });
    let module = modules.gradient(&loss, of_values.as_ref(), rows.shape).unwrap();
    let results = module.interpret(&arguments).unwrap().into_iter().map(|result| result.to_floats());
    let of_loss = ["loss", "logp", "entropy", "values"];
    let named = trained.iter().map(Parameter::name).chain(of_loss).map(str::to_owned).zip(results);
    // Remove the padding after the completion tokens.
    let of_tokens = |name: &str| of_loss[1..].contains(&name);
    named
        .map(|(name, mut result)| {
            let count = if of_tokens(&name) { n } else { result.len() };
            result.truncate(count);
            (name, result)
        })
        .collect()
}

/// Returns log-probabilities and entropies of every sequence's tokens.
fn score(modules: &TrainPrograms, sequences: &[Sequence], packing: &Packing) -> Vec<Vec<[f64; 2]>> {
    let (loss, rows, batch) = (
        LossConfig::default(),
        BatchRows::packed(sequences, packing, packing.shape(sequences)),
        token_batch(sequences).unwrap(),
    );
    let spec = modules.head(&loss, rows.shape.tokens).unwrap();
    let mut arguments = weights(modules);
    arguments.extend(rows_of(modules, &rows));
    arguments.extend(tables_of(&spec, &TokenTables::new(&spec, &batch, None)));
    let results = modules.score(&loss, rows.shape).unwrap().interpret(&arguments).unwrap();
    let [logp, entropy] = [0, 1].map(|i: usize| results[i].to_floats());
    (0..batch.sequences()).map(|i| batch.range(i).map(|t| [logp[t], entropy[t]]).collect()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn packed_rows_match_rows_of_one_sequence(
        (sequences, packing) in packed(),
        is_blockwise in any::<bool>(),
        extended in any::<bool>(),
    ) {
        let modules = modules(attention(is_blockwise), extended);
        let found = gradient(&modules, &sequences, &packing);
        let expected = gradient(&modules, &sequences, &alone(&sequences));
        prop_assert_eq!(found.len(), modules.decoder().trained().len() + if extended { 4 } else { 3 });
        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
            let largest = expected.iter().filter(|x| x.is_finite()).fold(0.0, |m: f64, x| m.max(x.abs()));
            prop_assert!(largest > 1e-9, "{name}: nothing to compare");
            for (found, expected) in found.iter().zip(expected) {
                // Minimum and maximum of no ratios are infinite.
                let is_close = (found - expected).abs() <= 1e-10 * largest || found == expected;
                prop_assert!(is_close, "{name}: {found} {expected} of {largest}");
            }
        }
    }

    #[test]
    fn a_sequence_does_not_depend_on_others_in_its_row(
        (sequences, packing) in packed(),
        is_blockwise in any::<bool>(),
        which in any::<prop::sample::Index>(),
        shift in 1..VOCAB,
    ) {
        let modules = modules(attention(is_blockwise), false);
        let (which, mut changed) = (which.index(sequences.len()), sequences.clone());
        let Sequence { prompt, completion } = &mut changed[which];
        prompt.iter_mut().chain(completion).for_each(|id| *id = (*id + shift) % VOCAB);
        let [before, after] = [&sequences, &changed].map(|sequences| score(&modules, sequences, &packing));
        for (i, (before, after)) in before.iter().zip(&after).enumerate() {
            prop_assert!(before.iter().flatten().all(|x| x.is_finite()));
            // Bit for bit.
            prop_assert_eq!(before == after, i != which, "{}", i);
        }
    }
}

/// Blockwise attention is a loop inside the loop over layers.
#[test]
fn saved_attention_is_not_recomputed_in_the_backward_pass() {
    let loops = |save: Save| {
        let decoder = modules(attention(true), false).decoder().clone();
        let shape = TrainShape { rows: 2, length: LENGTH, tokens: 16, ..TrainShape::default() };
        let module = TrainPrograms::new(decoder, save).gradient(&LossConfig::default(), None, shape).unwrap();
        module.to_string().matches("stablehlo.while").count()
    };
    let kept = Save::Named(vec![ATTENTION.into()]);
    assert_eq!(loops(Save::Carry) - loops(kept), 1);
}
