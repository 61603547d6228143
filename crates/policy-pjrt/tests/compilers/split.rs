//! Programs sharded over four or eight chips, compiled for TPU.

use grpo_backend_tpu::devices::mesh_order;
use grpo_core::Tiling;
use grpo_models::ModelConfig;
use grpo_pjrt::hlo::Shape;
use grpo_pjrt::install::{Kind, install};
use grpo_pjrt::{ArrayType, Collective, CompileOptions, DType, Executable, OptimizationLevel, Plugin, Topology};
use grpo_policy::Sampling;
use grpo_policy_pjrt::decoder::{Attention, Axis, AxisRules, Compute, Decoder, Parameter, parameters};
use grpo_policy_pjrt::{RequestOptions, RolloutOptions, RolloutPrograms, RolloutSizes, TrainPrograms, TrainShape};
use grpo_stablehlo::{Dtype, Mesh, Module, Save};
use std::collections::BTreeSet;
use std::sync::LazyLock;

fn slice(name: &str) -> Topology {
    let installed = install(Kind::Tpu, |_| {}).expect("the TPU compiler can be installed");
    Plugin::load(installed.path).and_then(|plugin| plugin.topology(name, &[])).expect("a topology")
}

fn compile(module: &Module) -> Executable {
    static CHIPS: LazyLock<[Topology; 2]> = LazyLock::new(|| ["v6e:2x2", "v6e:2x4"].map(slice));
    let [four, eight] = &*CHIPS;
    let chips = if module.partitions == 4 { four } else { eight };
    let of_mesh = CompileOptions::shardy(module.partitions);
    let options = CompileOptions { optimization_level: Some(OptimizationLevel::O0), ..of_mesh };
    chips.compile(module.to_string(), &options).unwrap_or_else(|error| panic!("{error}\n{module}"))
}

/// All sizes differ, and none is a multiple of the block size of attention, so that shapes identify tensors.
const ROWS: usize = 4;
const LAYERS: usize = 3;
const VOCAB: usize = 4096;
/// A row has two blocks.
const BLOCK: usize = 384;
const TOKENS: usize = 640;
/// The tokens of a chunk of logits.
const CHUNK: usize = TOKENS / 2;

fn shape() -> TrainShape {
    TrainShape { rows: ROWS, length: 2 * BLOCK, tokens: TOKENS, ..TrainShape::default() }
}

fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: VOCAB,
        num_hidden_layers: LAYERS,
        num_key_value_heads: 2,
        max_position_embeddings: 2 * BLOCK,
        ..crate::config()
    }
}

/// Returns `true` if an array has two dimensions of row tokens, as attention scores have.
fn has_scores(dims: &[usize]) -> bool {
    dims.iter().filter(|size| size.is_multiple_of(BLOCK)).count() > 1
        || dims.iter().any(|size| size.is_multiple_of(BLOCK * BLOCK))
}

/// Returns the numbers of columns of the logits that a device makes, in chunks or for all tokens.
fn columns_of_logits(executable: &Executable) -> BTreeSet<usize> {
    fn arrays(shape: &Shape) -> Vec<&[i64]> {
        std::iter::once(&shape.dims[..]).chain(shape.tuple.iter().flat_map(arrays)).collect()
    }
    let module = executable.optimized_program().expect("a program").module().expect("a program in HLO");
    let instructions = module.computations.iter().flat_map(|computation| &computation.instructions);
    let arrays = instructions.filter_map(|instruction| instruction.shape.as_ref()).flat_map(arrays);
    let has = |dims: &[i64], sizes: &[usize]| sizes.iter().any(|size| dims.contains(&(*size as i64)));
    let of_tokens: Vec<&[i64]> = arrays.filter(|dims| has(dims, &[CHUNK, TOKENS])).collect();
    let columns = [VOCAB, VOCAB / 2, VOCAB / 4].into_iter();
    columns.filter(|columns| of_tokens.iter().any(|dims| has(dims, &[*columns]))).collect()
}

/// Returns the gradient program and the bytes of its arguments on one device.
fn gradient(mesh: &Mesh) -> (Module, usize) {
    let decoder = Decoder::new(&config(), Compute::Bf16).with_axis_rules(AxisRules::new(mesh)).expect("even parts");
    let tiling = Tiling { token_chunk: Some(CHUNK), ..Tiling::default() };
    let module = TrainPrograms::new(decoder, Save::Carry).with_tiling(tiling).gradient(
        &grpo_core::LossConfig::default(),
        None,
        shape(),
    );
    let module = module.expect("a program");
    let all = module.main.body().arguments.iter().map(|id| module.main.type_of(*id).bytes()).sum();
    (module, all)
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn no_scores_or_logits_cross_chips_and_no_chip_makes_logits_of_the_whole_vocabulary() {
    for (axes, parts) in [([("data", 2), ("fsdp", 2)], 2), ([("fsdp", 2), ("tensor", 2)], 4)] {
        let mesh = Mesh::new("mesh", axes).expect("a mesh");
        let (module, all) = gradient(&mesh);
        let executable = compile(&module);
        let memory = executable.memory_stats().expect("statistics");
        // Replicated arguments are small, but padded on a TPU.
        let argument = usize::try_from(memory.argument).expect("a size");
        assert!(argument * parts < all * 11 / 10, "{mesh}: {memory:?} of {all}");

        assert_eq!(columns_of_logits(&executable), BTreeSet::from([VOCAB / parts]), "{mesh}");
        let collectives = executable.collectives().expect("a program").expect("a program in HLO");
        let is_vocab = |size: &usize| [VOCAB, VOCAB / 2, VOCAB / 4].contains(size);
        let is_completion_tokens = |size: &usize| [TOKENS, TOKENS / 2, TOKENS / 4, TOKENS / 8].contains(size);
        for Collective { kind, types, .. } in &collectives {
            for ArrayType { dtype, dims } in types {
                let count = |of: &dyn Fn(&usize) -> bool| dims.iter().filter(|size| of(size)).count();
                assert!(!has_scores(dims), "{mesh}: attention scores {dims:?} cross chips by {kind}");
                let of_logits = count(&is_vocab) > 0 && count(&is_completion_tokens) > 0;
                assert!(!of_logits, "{mesh}: logits {dims:?} cross chips by {kind}");
                assert!(!dims.contains(&LAYERS), "{mesh}: {dims:?} of all layers by {kind}");
                // Gradients are summed in f32; bf16 reductions are only of activations, which have a token dimension.
                let has_tokens = dims.iter().product::<usize>().is_multiple_of(BLOCK);
                let is_rounded = kind.contains("reduce") && *dtype == DType::Bf16 && !has_tokens;
                assert!(!is_rounded, "{mesh}: {dims:?} in bf16 by {kind}");
            }
        }
        // Weights of a layer are gathered, and their gradients reduced.
        let has = |kind: &str, dtype, dims: &[usize]| {
            let is_it = |ty: &ArrayType| ty.dtype == dtype && ty.dims.iter().filter(|d| **d > 1).eq(dims);
            collectives.iter().any(|collective| collective.kind == kind && collective.types.iter().any(is_it))
        };
        let columns = 2048 * 2 / parts;
        assert!(has("all-gather", DType::Bf16, &[columns, 512]), "{mesh}: {collectives:?}");
        let reduced = ["all-reduce", "reduce-scatter"].iter().any(|kind| has(kind, DType::F32, &[columns, 512]));
        assert!(reduced, "{mesh}: {collectives:?}");
    }
}

/// Control: with sharded head dimensions, scores are sums over chips, and the check above must find them.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn sharded_head_dimensions_need_collectives_of_scores() {
    let mesh = Mesh::new("mesh", [("fsdp", 2), ("tensor", 2)]).expect("a mesh");
    let rules = [(Axis::Kv, &[][..]), (Axis::Heads, &[]), (Axis::HeadDim, &["tensor"])];
    let rules = rules.into_iter().try_fold(AxisRules::new(&mesh), |rules, (axis, axes)| rules.with(axis, axes));
    let decoder = Decoder::new(&config(), Compute::Bf16).with_attention(Attention::Materialised);
    let decoder = decoder.with_axis_rules(rules.expect("axes of the mesh")).expect("even parts");
    let module = TrainPrograms::new(decoder, Save::Carry).score(&grpo_core::LossConfig::default(), shape());
    let collectives = compile(&module.expect("a program")).collectives().expect("a program").expect("HLO");
    let mut arrays = collectives.iter().flat_map(|collective| &collective.types);
    assert!(arrays.any(|array| has_scores(&array.dims)), "{collectives:?}");
}

/// Two key/value heads for four tensor shards, and a vocabulary that is padded.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn no_scores_cross_chips_that_hold_copies_of_a_key_value_head() {
    let mesh = Mesh::new("mesh", [("fsdp", 2), ("tensor", 4)]).expect("a mesh");
    let config = ModelConfig { vocab_size: VOCAB - 3, ..config() };
    let decoder = Decoder::new(&config, Compute::Bf16).with_axis_rules(AxisRules::new(&mesh)).expect("even parts");
    let module = TrainPrograms::new(decoder, Save::Carry).gradient(&grpo_core::LossConfig::default(), None, shape());
    let collectives = compile(&module.expect("a program")).collectives().expect("a program").expect("HLO");
    assert!(!collectives.is_empty());
    for Collective { kind, types, .. } in &collectives {
        for ArrayType { dims, .. } in types {
            assert!(!has_scores(dims), "attention scores {dims:?} cross chips by {kind}");
            let of_logits = dims.contains(&VOCAB) && [TOKENS, CHUNK].iter().any(|tokens| dims.contains(tokens));
            assert!(!of_logits, "logits {dims:?} cross chips by {kind}");
        }
    }
}

/// Control: with a vocabulary that is not sharded, every chip makes all logits, and the check above must find them.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn logits_of_a_whole_vocabulary_are_found() {
    let mesh = Mesh::new("mesh", [("data", 2), ("fsdp", 2)]).expect("a mesh");
    let rules = AxisRules::new(&mesh).with(Axis::Vocab, &[]).expect("a table");
    let decoder = Decoder::new(&config(), Compute::Bf16).with_axis_rules(rules).expect("even parts");
    let module = TrainPrograms::new(decoder, Save::Carry).score(&grpo_core::LossConfig::default(), shape());
    let columns = columns_of_logits(&compile(&module.expect("a program")));
    assert!(columns.contains(&VOCAB), "{columns:?}");
}

/// Devices exchange only sums of squares for the gradient norm; each updates its own shard.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn an_update_moves_no_weights_between_devices() {
    let mesh = Mesh::new("mesh", [("fsdp", 2), ("tensor", 2)]).expect("a mesh");
    let decoder = Decoder::new(&config(), Compute::Bf16).with_axis_rules(AxisRules::new(&mesh)).expect("even parts");
    let executable = compile(&TrainPrograms::new(decoder, Save::Carry).optimizer().expect("a program"));
    let memory = executable.memory_stats().expect("statistics");
    assert!(memory.alias > 0 && memory.alias >= memory.argument * 99 / 100, "{memory:?}");
    let collectives = executable.collectives().expect("a program").expect("a program in HLO");
    assert!(!collectives.is_empty());
    let numbers = |ty: &ArrayType| ty.dims.iter().product::<usize>();
    let moved: usize = collectives.iter().flat_map(|collective| &collective.types).map(numbers).sum();
    let all: usize = parameters(&config()).iter().map(Parameter::count).sum();
    assert!(moved < all / 100, "{moved} of {all}: {collectives:?}");
}

#[test]
fn chips_of_slices_are_in_the_order_of_a_ring() {
    for (name, expected) in [
        ("v6e:2x2", &[0, 1, 3, 2][..]),
        ("v6e:2x4", &[0, 2, 4, 6, 7, 5, 3, 1]),
        ("v5e:2x4", &[0, 2, 4, 6, 7, 5, 3, 1]),
        ("v5p:2x2x1", &[0, 1, 3, 2]),
        ("v5p:2x2x2", &[0, 1, 3, 2, 6, 7, 5, 4]),
    ] {
        let chips = slice(name).devices().expect("descriptions");
        let ids: Vec<i32> = mesh_order(grpo_backend_tpu::plugins::Kind::Tpu, &chips, chips.len())
            .into_iter()
            .map(|i| chips[i].id)
            .collect();
        assert_eq!(ids, expected, "{name}");
    }
}

/// Returns the numbers of the largest array in a collective of `module`.
fn largest_moved(module: &Module) -> usize {
    let collectives = compile(module).collectives().expect("a program").expect("a program in HLO");
    assert!(!collectives.is_empty(), "{}", module.name);
    let numbers = |ty: &ArrayType| ty.dims.iter().product::<usize>();
    collectives.iter().flat_map(|collective| &collective.types).map(numbers).max().unwrap_or(0)
}

/// Every device copies its own rows of the window and of prompts to its own slots.
#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_rollout_moves_neither_the_window_nor_the_kv_cache_between_devices() {
    // With four shards, two chips hold the same key/value head.
    for (data, tensor) in [(4, 2), (2, 4)] {
        check_rollout(data, tensor);
    }
}

fn check_rollout(data: usize, tensor: usize) {
    let mesh = Mesh::new("mesh", [("data", data), ("tensor", tensor)]).expect("a mesh");
    let decoder = Decoder::new(&config(), Compute::Bf16).with_axis_rules(AxisRules::new(&mesh)).expect("even parts");
    let sizes = RolloutSizes {
        prompts: 8,
        longest_prompt: 128,
        num_generations: 8,
        max_completion_length: 385,
        conversations: false,
    };
    let options = RolloutOptions::default();
    let programs = RolloutPrograms::of(
        Kind::Tpu,
        &decoder,
        Dtype::Bf16,
        options,
        sizes,
        RequestOptions::new(&Sampling::Greedy, 1),
    )
    .expect("programs");
    // Of one device: layers, slots, key/value heads, head dimension.
    let column = LAYERS * 64 / data * 128;
    let window = column * options.tokens_per_call;
    let (_, decode) = programs.decode.last().expect("a decode loop");
    let moved = largest_moved(decode);
    assert!(moved < window, "{mesh}: decode moves {moved} numbers, the window has {window}");
    // Keys or values of 8 prompts of 128 tokens, which any device may need.
    let prompts = LAYERS * 8 * 128 * 128;
    let moved = largest_moved(&programs.admit);
    assert!(moved <= prompts, "{mesh}: the admission moves {moved} numbers, prompts have {prompts}");
}
