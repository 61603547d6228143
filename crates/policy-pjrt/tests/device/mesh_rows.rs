//! Whole trainings on meshes, against one device: a table in which every pair of factors occurs, instead of their product.
//!
//! The default tier runs the first row, and another one that the commit chooses. The tier `all` runs every row.

use crate::mesh_models::{Model, of_experts};
use crate::mesh_support::{eight, loss, rules, with_moved_adapters};
use crate::mesh_training::{assert_within, train, train_beside};
use crate::support::{assert_close, runtime};
use grpo_models::{LoraConfig, TargetModules};
use grpo_policy_pjrt::decoder::{Attention, Axis, ExpertProducts};
use grpo_policy_pjrt::{PjrtPolicy, PjrtPolicyOptions, Runtime};
use std::collections::BTreeSet;
use std::num::NonZeroUsize;

/// The trained weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trained {
    Model,
    AdaptersOfLayers,
    AdaptersOfExperts,
}
use Trained::{AdaptersOfExperts, AdaptersOfLayers};

/// A training that is compared with the same training on one device, there with dense products of experts.
#[derive(Clone, Copy, Debug)]
struct Row {
    model: Model,
    trained: Trained,
    /// The sizes of `data`, `fsdp` and `tensor`.
    mesh: [usize; 3],
    /// Products of experts in blocks.
    grouped: bool,
    /// The mesh of the rollout, if it has one of its own.
    rollout: Option<[usize; 3]>,
    /// The experts are sharded over `tensor` alone, not over `fsdp`, too.
    over_tensor: bool,
}

const fn row(model: Model, trained: Trained, mesh: [usize; 3]) -> Row {
    Row { model, trained, mesh, grouped: false, rollout: None, over_tensor: false }
}

/// Defines [`ROWS`] and a test of each row.
macro_rules! rows {
    ($($(#[$attribute:meta])* $name:ident: $row:expr),* $(,)?) => {
        const ROWS: &[(&str, Row)] = &[$((stringify!($name), $row)),*];
        $(
            #[test]
            $(#[$attribute])*
            fn $name() {
                check(stringify!($name));
            }
        )*
    };
}

rows! {
    gpt_oss: Row { grouped: true, rollout: Some([4, 1, 2]), ..row(Model::GptOss, Trained::Model, [2, 2, 2]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    gpt_oss_adapters_of_experts: row(Model::GptOss, AdaptersOfExperts, [2, 4, 1]),
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    gpt_oss_adapters: row(Model::GptOss, AdaptersOfLayers, [1, 1, 4]),
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    gpt_oss_experts_over_tensor: Row { over_tensor: true, ..row(Model::GptOss, Trained::Model, [1, 4, 2]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    qwen3_moe: row(Model::Qwen3Moe, Trained::Model, [1, 2, 4]),
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    qwen3_moe_adapters_of_experts:
        Row { grouped: true, rollout: Some([2, 1, 1]), ..row(Model::Qwen3Moe, AdaptersOfExperts, [1, 1, 2]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    qwen3_moe_adapters: Row { grouped: true, ..row(Model::Qwen3Moe, AdaptersOfLayers, [8, 1, 1]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    qwen2_moe: row(Model::Qwen2Moe, Trained::Model, [1, 2, 4]),
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    qwen2_moe_adapters_of_experts:
        Row { grouped: true, rollout: Some([2, 1, 1]), ..row(Model::Qwen2Moe, AdaptersOfExperts, [1, 1, 2]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    qwen2_moe_adapters: Row { grouped: true, ..row(Model::Qwen2Moe, AdaptersOfLayers, [8, 1, 1]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    glm4_moe: Row { rollout: Some([2, 2, 2]), ..row(Model::Glm4Moe, Trained::Model, [1, 4, 2]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    glm4_moe_adapters_of_experts: Row { grouped: true, ..row(Model::Glm4Moe, AdaptersOfExperts, [2, 1, 1]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    glm4_moe_adapters: row(Model::Glm4Moe, AdaptersOfLayers, [8, 1, 1]),
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    dense: row(Model::Dense, Trained::Model, [4, 1, 2]),
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    dense_adapters: Row { rollout: Some([4, 1, 2]), ..row(Model::Dense, AdaptersOfLayers, [1, 8, 1]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    gated_delta_nets: Row { rollout: Some([4, 1, 2]), ..row(Model::GatedDeltaNets, Trained::Model, [1, 4, 2]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    gated_delta_nets_adapters: row(Model::GatedDeltaNets, AdaptersOfLayers, [8, 1, 1]),
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    other_heads: Row { rollout: Some([4, 1, 2]), ..row(Model::OtherHeads, Trained::Model, [2, 4, 1]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    other_heads_adapters: row(Model::OtherHeads, AdaptersOfLayers, [1, 1, 2]),
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    odd_vocab: Row { rollout: Some([4, 1, 2]), ..row(Model::OddVocab, Trained::Model, [1, 8, 1]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    odd_vocab_adapters: row(Model::OddVocab, AdaptersOfLayers, [4, 1, 2]),
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    few_kv_heads: Row { rollout: Some([1, 1, 8]), ..row(Model::FewKvHeads, Trained::Model, [1, 2, 4]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    few_kv_heads_adapters: row(Model::FewKvHeads, AdaptersOfLayers, [1, 1, 8]),
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    few_kv_heads_sampling: Row { rollout: Some([1, 1, 4]), ..row(Model::FewKvHeads, Trained::Model, [4, 1, 1]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    one_kv_head: Row { rollout: Some([1, 1, 4]), ..row(Model::OneKvHead, Trained::Model, [2, 1, 2]) },
    #[ignore = "GRPO_TESTS=all: one row of a table"]
    one_kv_head_adapters: row(Model::OneKvHead, AdaptersOfLayers, [1, 8, 1]),
}

/// Compares the training of a row with one device.
fn check(name: &str) {
    let (_, row) = ROWS.iter().find(|(of, _)| *of == name).expect("a row");
    println!("{name}: {row:?}");
    println!("cargo test -p grpo-policy-pjrt --test device -- --include-ignored --exact mesh_rows::{name}");
    row.check(name);
}

/// Checks one of the rows that the default tier omits; different commits check different rows.
#[test]
fn the_row_of_this_commit() {
    let others = &ROWS[1..];
    check(others[grpo_testkit::tier::of_commit(others.len())].0);
}

/// A value of one factor.
type Value = (&'static str, String);

impl Row {
    fn values(&self) -> [Value; 7] {
        let [data, fsdp, tensor] = self.mesh.map(|size| (size > 1).to_string());
        [
            ("model", format!("{:?}", self.model)),
            ("trained", format!("{:?}", self.trained)),
            ("data is sharded", data),
            ("fsdp is sharded", fsdp),
            ("tensor is sharded", tensor),
            ("grouped", self.grouped.to_string()),
            ("own mesh of the rollout", self.rollout.is_some().to_string()),
        ]
    }

    fn lora(&self) -> Option<LoraConfig> {
        // Larger factors of adapters amplify rounding errors, except in dense models.
        let lora_alpha = if self.model == Model::Dense { 32.0 } else { 2.0 };
        match self.trained {
            Trained::Model => None,
            AdaptersOfLayers => {
                let names = |names: &[&str]| TargetModules::Names(names.iter().map(|name| (*name).into()).collect());
                let target_modules = match self.model {
                    Model::OddVocab => names(&["q_proj", "lm_head"]),
                    Model::FewKvHeads => names(&["q_proj", "k_proj", "v_proj", "o_proj"]),
                    _ => LoraConfig::default().target_modules,
                };
                Some(LoraConfig { r: 2, lora_alpha, target_modules, ..LoraConfig::default() })
            }
            AdaptersOfExperts => Some(of_experts()),
        }
    }

    fn runtime(&self) -> Runtime {
        let mut rules = rules(&axes(&self.mesh));
        if self.over_tensor {
            rules = rules.with(Axis::Experts, &["tensor"]).unwrap();
        }
        eight().clone().on_mesh(rules).unwrap()
    }

    /// Creates the policy of the row, or its reference on one device.
    fn policy(&self, runtime: &Runtime) -> PjrtPolicy {
        let is_mesh = runtime.axis_rules().is_sharded();
        let expert_products = match self.grouped && is_mesh {
            true => ExpertProducts::Grouped { rows: NonZeroUsize::new(4) },
            false => ExpertProducts::Dense,
        };
        let rollout_rules = self.rollout.filter(|_| is_mesh).map(|mesh| rules(&axes(&mesh)));
        let router_aux_loss_coef = if self.has_aux_loss() { 0.1 } else { 0.0 };
        let attention = match self.model {
            Model::FewKvHeads => Attention::Blockwise { block: NonZeroUsize::new(3).expect("above 0") },
            _ => Attention::default(),
        };
        let options = PjrtPolicyOptions {
            attention,
            expert_products,
            rollout_rules,
            router_aux_loss_coef,
            ..PjrtPolicyOptions::default()
        };
        let policy = PjrtPolicy::new(runtime, &self.model.config(), 1, loss(), options).unwrap();
        with_moved_adapters(policy, self.lora().as_ref())
    }

    fn has_aux_loss(&self) -> bool {
        // Sigmoid routers have no load balancing loss.
        self.model.has_experts() && self.trained == Trained::Model && self.model != Model::Glm4Moe
    }

    fn check(&self, what: &str) {
        let expected = train(self.policy(runtime()));
        let policy = self.policy(&self.runtime());
        self.assert_sharding_of_experts(&policy);
        let found = train_beside(&expected, policy);
        assert_within(what, &found, &expected, self.model.bound());
        if self.model == Model::Dense {
            assert!(expected.completions.iter().any(|c| c.ids.len() > 16), "several calls of the decode program");
        }
        if self.has_aux_loss() {
            let [found, expected] = [&found, &expected].map(|trained| trained.aux_loss.unwrap() as f32);
            assert_close(&format!("{what}: aux_loss"), &[found], &[expected], 1e-5);
        }
        // Both sequences share a row; the others fill the shards.
        let [data, fsdp, _] = self.mesh;
        assert_eq!(found.rows_empty, Some(1.0 - 1.0 / (data * fsdp) as f64), "{what}");
    }

    /// Adapters of experts are sharded like the experts.
    fn assert_sharding_of_experts(&self, policy: &PjrtPolicy) {
        let [_, fsdp, tensor] = self.mesh;
        let expected = if self.over_tensor { tensor } else { fsdp * tensor };
        let weights = policy.weights().unwrap();
        let mut compared = 0;
        for (parameter, tensor) in weights.table().iter().zip(weights.tensors()) {
            if let Some(axis) = parameter.axes.iter().position(|axis| *axis == Axis::Experts) {
                let sharding = tensor.layout().sharding().expect("a sharding");
                assert_eq!(sharding.parts(axis), expected, "{self:?}: {}", parameter.name());
                compared += usize::from(!parameter.role.is_of_model());
            }
        }
        assert_eq!(compared > 0, self.trained == AdaptersOfExperts, "{self:?}");
    }
}

/// Returns the axes with more than one device.
fn axes([data, fsdp, tensor]: &[usize; 3]) -> Vec<(&'static str, usize)> {
    let all = [("data", *data), ("fsdp", *fsdp), ("tensor", *tensor)];
    all.into_iter().filter(|(_, size)| *size > 1).collect()
}

/// Returns `true` if a row could have these values: only models with experts have adapters and products of experts.
fn is_possible(pair: [&Value; 2]) -> bool {
    let has = |factor: &str, value: &str| pair.iter().any(|(name, of)| *name == factor && of == value);
    let with_experts = [Model::Qwen3Moe, Model::Qwen2Moe, Model::Glm4Moe, Model::GptOss]
        .iter()
        .any(|model| has("model", &format!("{model:?}")));
    let names_model = pair.iter().any(|(name, _)| *name == "model");
    !names_model || with_experts || !(has("trained", "AdaptersOfExperts") || has("grouped", "true"))
}

#[test]
fn every_possible_pair_and_every_size_is_in_the_table() {
    let rows: Vec<_> = ROWS.iter().map(|(_, row)| row.values()).collect();
    let mut factors: [BTreeSet<Value>; 7] = Default::default();
    rows.iter()
        .for_each(|row| factors.iter_mut().zip(row).for_each(|(factor, value)| _ = factor.insert(value.clone())));
    assert_eq!(factors.each_ref().map(BTreeSet::len), [Model::ALL.len(), 3, 2, 2, 2, 2, 2]);
    let mut missing = vec![];
    for (i, first) in factors.iter().enumerate() {
        for pair in first.iter().flat_map(|a| factors[i + 1..].iter().flatten().map(move |b| [a, b])) {
            let in_table = rows.iter().any(|row| pair.iter().all(|value| row.contains(value)));
            assert!(!in_table || is_possible(pair), "{pair:?} is in the table");
            missing.extend((!in_table && is_possible(pair)).then_some(pair));
        }
    }
    assert!(missing.is_empty(), "no row has {missing:?}");
    let sizes = [0, 1, 2].map(|axis| ROWS.iter().map(|(_, row)| row.mesh[axis]).collect::<BTreeSet<_>>());
    assert_eq!(sizes, [(); 3].map(|()| BTreeSet::from([1, 2, 4, 8])));
    for (_, row) in ROWS {
        let devices = |mesh: [usize; 3]| mesh.iter().product::<usize>();
        assert!(devices(row.mesh) > 1 && row.rollout.is_none_or(|rollout| devices(rollout) == devices(row.mesh)));
    }
}
