//! `config.json` of every family: its meaning, the fields that are refused, and the file of a new model.

use crate::support::{Folder, qwen2, says, with};
use grpo_models::{
    Activation, ClampedSwiglu, Experts, Family, LayerRope, LayerSpec, LoraConfig, ModelConfig, NormPlacement,
    RopeScaling, RopeType, SharedExpert, SigmoidRouter, TargetModules,
};
use serde_json::{Value, json};

/// Returns the config.json of a family with the sizes of the Qwen2 fixture.
pub(crate) fn of(family: Family, fields: Value) -> Value {
    let named = json!({
        "model_type": family.model_type(), "architectures": [family.architecture()], "use_sliding_window": null,
        "max_window_layers": null
    });
    let mut json = with(with(qwen2(), named), fields);
    // A missing field is the padding token of the class.
    json["pad_token_id"] = Value::Null;
    json
}

fn model(family: Family, fields: Value) -> ModelConfig {
    Folder::new(of(family, fields)).model()
}

pub(crate) fn refused(family: Family, fields: Value, parts: &[&str]) {
    let error = Folder::new(of(family, fields)).open().expect_err("not supported").to_string();
    says(&error, &[&["config.json"], parts].concat());
}

fn sliding(window: usize, rope: LayerRope) -> LayerSpec {
    LayerSpec { sliding_window: Some(window), rope, ..LayerSpec::default() }
}

#[test]
fn a_window_of_all_layers_is_read() {
    for family in [Family::Mistral, Family::Phi3] {
        assert_eq!(model(family, json!({"sliding_window": 16})).layers, [sliding(16, LayerRope::Global)], "{family}");
        assert!(model(family, json!({"sliding_window": null})).layers.is_empty(), "{family}");
        // A window of the whole context hides nothing.
        assert!(model(family, json!({"sliding_window": 64})).layers.is_empty(), "{family}");
        refused(family, json!({"sliding_window": 0}), &["`sliding_window` is 0", "at least 1"]);
        let mixed = json!({"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]});
        refused(family, mixed, &["`layer_types`", "all layers"]);
    }
    let qwen2 = json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1});
    assert_eq!(model(Family::Qwen2, qwen2).layers, [LayerSpec::default(), sliding(16, LayerRope::Global)]);
    // The class of Mistral has a window by default.
    let long = json!({"max_position_embeddings": 8192, "sliding_window": null});
    assert_eq!(model(Family::Mistral, long).layers, [sliding(4096, LayerRope::Global)]);
}

#[test]
fn ministral_3_has_yarn_and_growing_queries() {
    let rope = json!({
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1
    });
    let config = model(Family::Ministral3, json!({"rope_parameters": rope, "rope_theta": null}));
    let scaling = RopeScaling {
        rope_type: RopeType::Yarn,
        factor: 16.0,
        original_max_position_embeddings: 16,
        llama_4_scaling_beta: Some(0.1),
        ..RopeScaling::default()
    };
    assert_eq!((&config.rope_scaling, config.rope_theta), (&Some(scaling), 1e6));
    let growth = config.rotary(LayerRope::Global).and_then(|rotary| rotary.query_scaling).unwrap();
    assert_eq!((growth.at(15), growth.at(16)), (1.0, 1.0 + 0.1 * 2f64.ln()));
    let rope = json!({"rope_parameters": {"rope_type": "yarn", "factor": 16.0}});
    refused(Family::Ministral3, rope, &["`rope_parameters.llama_4_scaling_beta` is missing"]);
    let rope = json!({"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}});
    refused(Family::Ministral3, rope, &["`rope_parameters.rope_type`", "yarn"]);
    let rope = json!({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}});
    refused(Family::Ministral3, rope, &["`rope_parameters.rope_type`", "yarn"]);
    // The class has a rotary embedding of its own, whose theta the field does not change.
    refused(Family::Ministral3, json!({"rope_theta": 1e4}), &["`rope_theta` is 10000.0", "1000000"]);
}

#[test]
fn an_empty_rope_scaling_does_not_hide_rope_parameters() {
    let linear = json!({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0});
    let config = model(Family::Llama, json!({"rope_scaling": {}, "rope_parameters": linear}));
    assert_eq!(config.rope_scaling.map(|scaling| (scaling.rope_type, scaling.factor)), Some((RopeType::Linear, 2.0)));
}

/// The classes of `transformers` merge or ignore these fields.
#[test]
fn rotary_parameters_by_layer_type_are_complete_or_refused() {
    let nested = json!({"full_attention": {"rope_type": "default", "rope_theta": 5e5}});
    for (fields, parts) in [
        (
            json!({"rope_parameters": nested, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
            ["`rope_scaling`", "null beside rope_parameters"],
        ),
        (json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}), ["`rope_parameters`", "other keys"]),
        (json!({"rope_scaling": nested}), ["`rope_scaling`", "by layer type are rope_parameters"]),
        (
            json!({"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.0}}}),
            ["`rope_parameters.sliding_attention.type`", "default"],
        ),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}}),
            ["`rope_parameters.full_attention.partial_rotary_factor`", "1"],
        ),
        (json!({"rope_theta": 5e5, "sliding_window": null}), ["`sliding_window` is null", "at least 1"]),
    ] {
        let fields = with(json!({"num_hidden_layers": 4, "sliding_window": 8, "rope_theta": null}), fields);
        refused(Family::Olmo3, fields, &parts);
    }
}

#[test]
fn smollm_3_has_layers_without_rotary_embedding() {
    let none = LayerSpec { rope: LayerRope::None, ..LayerSpec::default() };
    let config = model(Family::SmolLm3, json!({"num_hidden_layers": 6}));
    assert_eq!(config.layers.len(), 4);
    assert_eq!([3, 4, 5].map(|layer| config.layer(layer)), [none, LayerSpec::default(), LayerSpec::default()]);
    assert!(config.rotary(LayerRope::None).is_none());
    let listed = model(Family::SmolLm3, json!({"no_rope_layers": [0, 1]}));
    assert_eq!(listed.layers, [none, LayerSpec::default()]);
    refused(Family::SmolLm3, json!({"no_rope_layers": [1]}), &["`no_rope_layers` is [1]", "each of the 2 layers"]);
    refused(Family::SmolLm3, json!({"no_rope_layers": [1, 2]}), &["`no_rope_layers`"]);
    refused(Family::SmolLm3, json!({"no_rope_layer_interval": 0}), &["`no_rope_layer_interval` is 0"]);
    refused(Family::SmolLm3, json!({"use_sliding_window": true}), &["`use_sliding_window` is true"]);
}

#[test]
fn olmo_normalises_outputs_and_all_heads_together() {
    let config = model(Family::Olmo2, json!({}));
    assert_eq!((config.norm_placement, config.qk_norm_over_heads), (NormPlacement::After, true));
    let names: Vec<String> = config.parameters().into_iter().map(|p| p.name).collect();
    assert!(names.contains(&"model.layers.0.post_feedforward_layernorm.weight".to_owned()));
    assert!(names.iter().all(|name| !name.contains("input_layernorm")), "{names:?}");
    assert_eq!(config.qk_norm_sizes(config.layer(0)), [16, 8]);

    let flat = json!({"num_hidden_layers": 4, "sliding_window": 8, "rope_theta": 500000.0});
    let config = model(Family::Olmo3, flat);
    assert_eq!(config.layers, [[sliding(8, LayerRope::Global); 3].as_slice(), &[LayerSpec::default()]].concat());
    let yarn =
        json!({"rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8});
    let nested = json!({
        "num_hidden_layers": 4, "sliding_window": 8, "rope_theta": null,
        "rope_parameters": {
            "full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}
        }
    });
    let config = model(Family::Olmo3, nested);
    assert_eq!(config.layers, [[sliding(8, LayerRope::Local); 3].as_slice(), &[LayerSpec::default()]].concat());
    let factor = config.rotary(LayerRope::Global).unwrap().attention_factor;
    assert!((factor - (0.1 * 8f64.ln() + 1.0)).abs() < 1e-12);
    assert_eq!(config.rotary(LayerRope::Local).unwrap().attention_factor, 1.0);
    refused(Family::Olmo3, json!({"rope_theta": 10000.0, "sliding_window": 8}), &["`rope_theta` is 10000.0", "500000"]);
    let scaled = json!({
        "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}, "rope_theta": null,
        "sliding_window": 8
    });
    refused(Family::Olmo3, scaled, &["`rope_parameters.sliding_attention.rope_type` is \"linear\""]);
    // The class does not take the base of full attention for sliding layers.
    let full = json!({
        "num_hidden_layers": 4, "sliding_window": 8, "rope_theta": null,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    });
    let config = model(Family::Olmo3, full.clone());
    assert_eq!((config.rope_theta, config.rope_local_theta), (10_000.0, Some(500_000.0)));
    refused(Family::Olmo3, with(full, json!({"rope_theta": 10000.0})), &["`rope_theta` is 10000.0", "500000"]);
}

#[test]
fn attention_bias_adds_biases_of_four_projections() {
    let plain = [Family::Llama, Family::Qwen3, Family::Olmo2, Family::Granite];
    let smollm3 = json!({"no_rope_layers": [1, 0]});
    let moe = json!({"num_experts": 2, "num_experts_per_tok": 1});
    let windows = json!({"sliding_window": 8, "rope_theta": 500000.0});
    let cases = plain.map(|family| (family, json!({}))).into_iter();
    let others = [
        (Family::SmolLm3, smollm3),
        (Family::Qwen3Moe, moe),
        (Family::Olmo3, windows.clone()),
        (Family::Gemma3, windows),
    ];
    for (family, fields) in cases.chain(others) {
        let config = model(family, with(fields.clone(), json!({"attention_bias": true})));
        let biased: Vec<&str> = config.layer_matrices(0).iter().filter(|m| m.biased).map(|m| m.name).collect();
        let projections = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"];
        assert_eq!(biased, projections, "{family}");
        assert_eq!(Family::of(&config).unwrap(), family);
        assert!(model(family, fields).layer_matrices(0).iter().all(|m| !m.biased), "{family}");
    }
}

#[test]
fn granite_has_four_factors() {
    let fields = json!({
        "embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.0156, "logits_scaling": 8.0
    });
    let config = model(Family::Granite, fields.clone());
    assert_eq!((config.embedding_multiplier, config.residual_multiplier), (12.0, 0.22));
    assert_eq!((config.attention_multiplier, config.logits_scaling), (Some(0.0156), 8.0));
    // The class divides scores by nothing unless the field says so.
    assert_eq!(model(Family::Granite, json!({})).attention_multiplier, Some(1.0));
    refused(Family::Qwen2, fields, &["`logits_scaling` is 8.0"]);
    refused(Family::Granite, json!({"logits_scaling": 0.0}), &["`logits_scaling` is 0.0", "a number between"]);
}

#[test]
fn phi_3_has_fused_projections_and_is_limited_to_the_original_context() {
    let fields = json!({
        "partial_rotary_factor": 0.5, "head_dim": 8, "max_position_embeddings": 64, "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    });
    let config = model(Family::Phi3, fields.clone());
    assert!(config.fused_projections);
    assert_eq!((config.rotary_dim(), config.max_position_embeddings), (4, 32));
    let rotary = config.rotary(LayerRope::Global).unwrap();
    assert_eq!(rotary.frequencies, [1.0, config.rope_theta.powf(-0.5) / 2.0]);
    assert_eq!(rotary.attention_factor, (1.0 + 2f64.ln() / 32f64.ln()).sqrt());
    let names: Vec<String> = config.parameters().into_iter().map(|p| p.name).collect();
    assert!(names.contains(&"model.layers.1.self_attn.qkv_proj.weight".to_owned()), "{names:?}");
    assert!(names.iter().all(|name| !name.contains("q_proj.") && !name.contains("up_proj.bias")));
    // The class takes its default, 4096, instead of a number in `rope_scaling`.
    let mut inner = fields;
    inner["original_max_position_embeddings"] = Value::Null;
    inner["rope_scaling"]["original_max_position_embeddings"] = json!(32);
    refused(Family::Phi3, inner, &["`rope_scaling.original_max_position_embeddings` is 32", "4096"]);
    let yarn = json!({"rope_scaling": {"type": "yarn", "factor": 2.0}});
    refused(Family::Phi3, yarn, &["`rope_scaling`", "default or longrope"]);
    refused(Family::Phi3, json!({"partial_rotary_factor": 0.1}), &["`partial_rotary_factor` is 0.1", "even number"]);
}

#[test]
fn gemma_3_is_read_from_transformers_4_and_5() {
    let shape = json!({
        "head_dim": 8, "hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 7,
        "query_pre_attn_scalar": 16, "rope_theta": null, "sliding_window": 8
    });
    let old = with(shape.clone(), json!({"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4}));
    let config = model(Family::Gemma3, old);
    assert_eq!(config.layers, [[sliding(8, LayerRope::Local); 5].as_slice(), &[LayerSpec::default()]].concat());
    assert_eq!((config.rope_theta, config.rope_local_theta), (1e6, Some(1e4)));
    assert_eq!((config.hidden_act, config.norm_placement), (Activation::GeluTanh, NormPlacement::Both));
    assert!(config.zero_centered_norms && config.qk_norm);
    assert_eq!((config.embedding_multiplier, config.attention_multiplier), (4.0, Some(0.25)));
    let sliding_layer = "sliding_attention";
    let new = json!({
        "layer_types": [sliding_layer, sliding_layer, sliding_layer, sliding_layer, sliding_layer, "full_attention",
            sliding_layer],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
        }
    });
    assert_eq!(model(Family::Gemma3, with(shape.clone(), new)), config);
    for (fields, parts) in [
        (json!({"hidden_activation": "gelu"}), ["`hidden_activation` is \"gelu\"", "gelu_pytorch_tanh"]),
        (json!({"final_logit_softcapping": 30.0}), ["`final_logit_softcapping` is 30.0", "softcap"]),
        (json!({"attn_logit_softcapping": 50.0}), ["`attn_logit_softcapping` is 50.0", "softcap"]),
        (json!({"use_bidirectional_attention": true}), ["`use_bidirectional_attention` is true", "causal"]),
    ] {
        refused(Family::Gemma3, with(shape.clone(), fields), &parts);
    }
}

#[test]
fn gemma_4_is_read_from_the_hub_and_from_transformers() {
    let shape = json!({
        "head_dim": 8, "hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 7,
        "rope_theta": null, "sliding_window": 8, "hidden_size_per_layer_input": 0, "attention_k_eq_v": true,
        "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"
    });
    let hub = with(shape.clone(), json!({"global_head_dim": 12, "num_global_key_value_heads": 1}));
    let config = model(Family::Gemma4, hub.clone());
    let full =
        LayerSpec { head_dim: Some(12), num_key_value_heads: Some(1), keys_are_values: true, ..LayerSpec::default() };
    // Five of six layers have a window; the last layer of the class has none.
    assert_eq!(config.layers, [[sliding(8, LayerRope::Local); 5].as_slice(), &[full; 2]].concat());
    assert_eq!((config.rope_theta, config.rope_local_theta), (1e6, Some(1e4)));
    assert_eq!((config.hidden_act, config.norm_placement), (Activation::GeluTanh, NormPlacement::Both));
    assert!(config.qk_norm && config.value_norm && config.layer_scalars && !config.zero_centered_norms);
    assert_eq!((config.embedding_multiplier, config.attention_multiplier), (4.0, Some(1.0)));
    assert_eq!(config.final_logit_softcapping, Some(30.0));
    // A quarter of the six pairs of a wide head are rotated, with the frequencies of a whole head.
    let frequencies = config.rotary(LayerRope::Global).unwrap().frequencies;
    assert_eq!(frequencies, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    let half = json!({"rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}
    }});
    let halves = model(Family::Gemma4, with(hub.clone(), half)).rotary(LayerRope::Global).unwrap().frequencies;
    assert_eq!(halves, [0.5, 0.5 * 1e6_f64.powf(-2.0 / 12.0), 0.5 * 1e6_f64.powf(-4.0 / 12.0), 0.0, 0.0, 0.0]);
    assert_eq!(config.rotary(LayerRope::Local).unwrap().frequencies.len(), 4);

    let own = json!({"head_dim": 12, "num_key_value_heads": 1});
    let saved = with(shape.clone(), json!({"per_layer_config": {"5": own, "6": own}}));
    assert_eq!(model(Family::Gemma4, saved), config);
    // Without shared keys, the class ignores the number of key heads of wide layers.
    let apart = model(Family::Gemma4, with(hub.clone(), json!({"attention_k_eq_v": false})));
    assert_eq!(apart.layer(5), LayerSpec { head_dim: Some(12), ..LayerSpec::default() });
    let shapes: Vec<_> = config.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
    for (name, shape) in [
        ("0.self_attn.v_proj.weight", &[16, 16][..]),
        ("5.self_attn.q_proj.weight", &[48, 16]),
        ("5.self_attn.k_proj.weight", &[12, 16]),
        ("5.self_attn.k_norm.weight", &[12]),
        ("5.layer_scalar", &[1]),
    ] {
        assert!(shapes.contains(&(format!("model.layers.{name}"), shape.to_vec())), "{name}: {shapes:?}");
    }
    assert!(!shapes.iter().any(|(name, _)| name == "model.layers.5.self_attn.v_proj.weight"));
    for (fields, parts) in [
        (json!({"hidden_size_per_layer_input": 8}), ["`hidden_size_per_layer_input` is 8", "0"]),
        (json!({"hidden_size_per_layer_input": null}), ["`hidden_size_per_layer_input` is missing", "256"]),
        (
            json!({"num_kv_shared_layers": 2}),
            ["`num_kv_shared_layers` is 2", "its own keys and values, as in Gemma 4 31B"],
        ),
        (json!({"enable_moe_block": true}), ["`enable_moe_block` is true", "no mixture of experts, as in Gemma 4 31B"]),
        (json!({"use_bidirectional_attention": "all"}), ["`use_bidirectional_attention` is \"all\"", "vision"]),
        (json!({"global_head_dim": 7}), ["`global_head_dim` is 7", "even number"]),
        (json!({"per_layer_config": {"0": own, "5": own, "6": own}}), ["`per_layer_config`", "full_attention"]),
        (json!({"per_layer_config": {"5": own}}), ["`per_layer_config`", "the same"]),
        (json!({"attention_bias": true}), ["`attention_bias` is true", "o_proj"]),
    ] {
        refused(Family::Gemma4, with(hub.clone(), fields), &parts);
    }
}

#[test]
fn adapters_of_values_are_of_layers_with_a_value_projection() {
    let shape = json!({
        "head_dim": 8, "hidden_act": null, "rope_theta": null, "sliding_window": 8, "hidden_size_per_layer_input": 0,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": true,
        "global_head_dim": 12, "num_global_key_value_heads": 1
    });
    let config = model(Family::Gemma4, shape);
    let of = |target: &str| {
        let lora = LoraConfig { target_modules: TargetModules::Names(vec![target.into()]), ..LoraConfig::default() };
        lora.resolve(&config)
    };
    let names = |target: &str| of(target).unwrap().into_iter().map(|matrix| matrix.name).collect::<Vec<_>>();
    assert_eq!(names("v_proj"), ["model.layers.0.self_attn.v_proj"]);
    assert_eq!(names("k_proj").len(), 2);
    let missing = of("layers.1.self_attn.v_proj").unwrap_err().to_string();
    says(&missing, &["layers.1.self_attn.v_proj"]);
    says(&of("v_norm").unwrap_err().to_string(), &["v_norm", "not a matrix that can have an adapter here"]);
}

#[test]
fn heads_of_layers_are_checked() {
    let layer = LayerSpec::default();
    let with = |layers: Vec<LayerSpec>| ModelConfig { layers, ..ModelConfig::default() };
    for (layers, part) in [
        (vec![LayerSpec { head_dim: Some(3), ..layer }], "even number"),
        (vec![LayerSpec { num_key_value_heads: Some(3), ..layer }], "divides num_attention_heads, 4"),
        (vec![LayerSpec { head_dim: Some(8), ..layer }, layer], "one head_dim in all layers with the same rope"),
        (vec![LayerSpec { keys_are_values: true, ..layer }], "keys_are_values: false"),
    ] {
        says(&with(layers).validate().unwrap_err().to_string(), &["model.layers", part]);
    }
    // The default model has biases.
    let shared = vec![LayerSpec { keys_are_values: true, ..layer }];
    let gated = ModelConfig { attention_bias: false, attention_output_gate: true, ..with(shared) };
    says(
        &gated.validate().unwrap_err().to_string(),
        &["model.layers", "keys_are_values: false", "attention_output_gate"],
    );
    ModelConfig { attention_output_gate: false, ..gated }.validate().unwrap();
    let wide = LayerSpec { head_dim: Some(8), rope: LayerRope::Local, ..layer };
    with(vec![wide, layer]).validate().unwrap();
}

#[test]
fn a_new_model_of_every_family_reads_back() {
    for family in Family::ALL {
        let fields = match family {
            Family::Qwen2 | Family::Qwen3 => {
                json!({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1})
            }
            Family::Mistral => json!({"sliding_window": 8}),
            Family::Ministral3 => json!({"rope_parameters": null, "head_dim": 8}),
            Family::SmolLm3 => json!({"no_rope_layer_interval": 2}),
            Family::Olmo3 => json!({"num_hidden_layers": 4, "sliding_window": 8, "rope_theta": 500000.0}),
            Family::Phi3 => json!({
                "partial_rotary_factor": 0.5, "head_dim": 8, "original_max_position_embeddings": 32,
                "rope_scaling": {"type": "longrope", "short_factor": [1.5, 2.5], "long_factor": [3.0, 4.0]}
            }),
            Family::Gemma3 => json!({
                "head_dim": 8, "hidden_act": null, "num_hidden_layers": 7, "query_pre_attn_scalar": 24, "sliding_window": 8
            }),
            Family::Gemma4 => json!({
                "head_dim": 8, "global_head_dim": 12, "hidden_act": null, "hidden_size_per_layer_input": 0, "sliding_window": 8,
                "num_hidden_layers": 7, "attention_k_eq_v": true, "num_global_key_value_heads": 1,
                "final_logit_softcapping": 30.0
            }),
            Family::Granite => json!({"residual_multiplier": 0.22, "attention_multiplier": 0.0156}),
            Family::Qwen2Moe | Family::Qwen3Moe => moe(),
            Family::Glm4Moe => glm4_moe(),
            Family::Qwen3_5 => delta_net(),
            Family::GptOss => json!({"sliding_window": 8, "swiglu_limit": 5.0, "rope_theta": null}),
            _ => json!({}),
        };
        let config = model(family, fields);
        assert_eq!(Family::of(&config).unwrap(), family);
    }
    let strange = ModelConfig { logits_scaling: 2.0, zero_centered_norms: true, ..ModelConfig::default() };
    says(&Family::of(&strange).unwrap_err().to_string(), &["`model`", "gemma3_text", "logits_scaling: 2.0"]);
}

pub(crate) fn moe() -> Value {
    json!({"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": true, "head_dim": 8})
}

#[test]
fn qwen_3_moe_has_experts_in_its_sparse_layers() {
    let config = model(Family::Qwen3Moe, moe());
    let experts = Experts { num_experts: 3, num_experts_per_tok: 2, moe_intermediate_size: 8, ..Experts::default() };
    assert_eq!((config.experts.as_ref(), config.qk_norm), (Some(&experts), true));
    let names: Vec<String> = config.parameters().into_iter().map(|p| p.name).collect();
    for name in ["mlp.gate.weight", "mlp.experts.0.gate_proj.weight", "mlp.experts.2.down_proj.weight"] {
        assert!(names.contains(&format!("model.layers.1.{name}")), "{name}: {names:?}");
    }
    assert!(!names.contains(&"model.layers.0.mlp.gate_proj.weight".to_owned()));
    // Sparse layers are multiples of the step, from 1 on, that are not in the list; 9 is no layer.
    for (fields, sparse) in [
        (json!({"num_hidden_layers": 5, "decoder_sparse_step": 2}), &[1, 3][..]),
        (json!({"num_hidden_layers": 5, "mlp_only_layers": [0, 9, -1]}), &[1, 2, 3, 4]),
        (json!({"num_hidden_layers": 6, "decoder_sparse_step": 3, "mlp_only_layers": [2]}), &[5]),
        (json!({"num_hidden_layers": 3, "decoder_sparse_step": 4}), &[]),
        (json!({"num_experts": 0}), &[]),
    ] {
        let config = model(Family::Qwen3Moe, with(moe(), fields));
        let found: Vec<usize> = (0..config.num_hidden_layers).filter(|at| config.experts_of(*at).is_some()).collect();
        let names: Vec<String> = config.parameters().into_iter().map(|p| p.name).collect();
        let has = |layer: usize, name: &str| names.contains(&format!("model.layers.{layer}.mlp.{name}.weight"));
        let routers = (0..config.num_hidden_layers).filter(|at| has(*at, "gate") != has(*at, "gate_proj"));
        assert_eq!((&found[..], routers.count()), (sparse, config.num_hidden_layers));
    }
    // transformers 5 writes the number of experts by another name.
    let renamed = with(moe(), json!({"num_experts": null, "num_local_experts": 3}));
    assert_eq!(model(Family::Qwen3Moe, renamed), config);
    for (fields, parts) in [
        (json!({"decoder_sparse_step": 0}), ["`decoder_sparse_step` is 0", "at least 1"]),
        (json!({"mlp_only_layers": [0.5]}), ["`mlp_only_layers` is [0.5]", "a list of whole numbers"]),
        (json!({"num_local_experts": 4}), ["`num_local_experts` is 4", "3, as num_experts"]),
        (json!({"num_experts_per_tok": 4}), ["`num_experts_per_tok` is 4", "between 1 and 3"]),
        (json!({"output_router_logits": true}), ["`output_router_logits` is true", "load balancing"]),
    ] {
        refused(Family::Qwen3Moe, with(moe(), fields), &parts);
    }
    refused(Family::Qwen3, moe(), &["`num_experts` is 3", "no mixture of experts"]);
}

fn glm4_moe() -> Value {
    json!({
        "num_hidden_layers": 4, "head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 8,
        "n_group": 3, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "use_qk_norm": true,
        "attention_bias": true, "num_nextn_predict_layers": 1
    })
}

#[test]
fn glm_4_moe_has_sigmoid_routers_in_groups() {
    let config = model(Family::Glm4Moe, glm4_moe());
    let experts = config.experts.as_ref().unwrap();
    let router = SigmoidRouter { n_group: 3, topk_group: 2, routed_scaling_factor: 1.5 };
    assert_eq!((experts.sigmoid, experts.norm_topk_prob), (Some(router), true));
    assert_eq!(experts.shared_expert, Some(SharedExpert { intermediate_size: 16, is_gated: false }));
    assert!(config.qk_norm && config.attention_bias && !config.attention_output_bias);
    assert_eq!((config.rotary_dim(), config.repetition(), config.routers()), (4, (1, 1), 3));
    let shapes: Vec<_> = config.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
    for (name, shape) in [
        ("0.mlp.gate_proj.weight", &[24, 16][..]),
        ("1.mlp.gate.weight", &[6, 16]),
        ("1.mlp.gate.e_score_correction_bias", &[6]),
        ("1.mlp.shared_experts.down_proj.weight", &[16, 16]),
    ] {
        assert!(shapes.contains(&(format!("model.layers.{name}"), shape.to_vec())), "{name}: {shapes:?}");
    }
    let partial = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}});
    assert_eq!(model(Family::Glm4Moe, with(glm4_moe(), partial)).rotary_dim(), 8);
    for (fields, parts) in [
        (json!({"n_group": 4}), ["`n_group` is 4", "a divisor of n_routed_experts, 6"]),
        (json!({"n_group": 6}), ["`n_group` is 6", "two experts in a group"]),
        (json!({"topk_group": 4}), ["`topk_group` is 4", "between 1 and n_group, 3"]),
        (json!({"topk_group": 1}), ["`num_experts_per_tok` is 3", "at most 2"]),
        (json!({"n_shared_experts": 0}), ["`n_shared_experts` is 0", "at least 1"]),
        (json!({"first_k_dense_replace": 4}), ["`first_k_dense_replace` is 4", "less than num_hidden_layers, 4"]),
        (json!({"routed_scaling_factor": 0}), ["`routed_scaling_factor` is 0", "a number between"]),
    ] {
        refused(Family::Glm4Moe, with(glm4_moe(), fields), &parts);
    }
}

#[test]
fn qwen_2_moe_has_a_shared_expert_with_a_gate() {
    let config = model(Family::Qwen2Moe, moe());
    let shared = config.experts.as_ref().unwrap().shared_expert.unwrap();
    assert_eq!((shared, config.attention_bias), (SharedExpert { intermediate_size: 5632, is_gated: true }, true));
    let named = json!({"shared_expert_intermediate_size": 20, "qkv_bias": false, "norm_topk_prob": null});
    let config = model(Family::Qwen2Moe, with(moe(), named));
    assert!(!config.attention_bias && !config.experts.as_ref().unwrap().norm_topk_prob);
    let shapes: Vec<_> = config.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
    for (name, shape) in [
        ("shared_expert.gate_proj", [20, 16]),
        ("shared_expert.up_proj", [20, 16]),
        ("shared_expert.down_proj", [16, 20]),
        ("shared_expert_gate", [1, 16]),
    ] {
        let name = format!("model.layers.1.mlp.{name}.weight");
        assert!(shapes.contains(&(name.clone(), shape.to_vec())), "{name}: {shapes:?}");
    }
    // A window is in every other layer before `max_window_layers`.
    let windows = json!({
        "num_hidden_layers": 6, "use_sliding_window": true, "sliding_window": 8, "max_window_layers": 3, "mlp_only_layers": [1]
    });
    let config = model(Family::Qwen2Moe, with(moe(), windows));
    let layers: Vec<_> = (0..6).map(|index| config.layer(index)).collect();
    assert_eq!(
        layers.iter().map(|layer| layer.sliding_window).collect::<Vec<_>>(),
        [Some(8), None, Some(8), None, None, None]
    );
    assert_eq!(
        layers.iter().map(|layer| layer.dense_mlp).collect::<Vec<_>>(),
        [false, true, false, false, false, false]
    );
    for (fields, parts) in [
        (json!({"shared_expert_intermediate_size": 0}), ["`intermediate_size`", "between 1 and"]),
        (json!({"output_router_logits": true}), ["`output_router_logits` is true", "load balancing"]),
    ] {
        refused(Family::Qwen2Moe, with(moe(), fields), &parts);
    }
}

pub(crate) fn delta_net() -> Value {
    json!({
        "num_hidden_layers": 5, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 3, "linear_value_head_dim": 5, "rope_theta": null, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]
        }
    })
}

#[test]
fn qwen_3_5_has_a_gated_delta_net_in_three_of_four_layers() {
    let config = model(Family::Qwen3_5, delta_net());
    let (recurrent, full) = (LayerSpec::GATED_DELTA_NET, LayerSpec::default());
    assert_eq!(config.layers, [recurrent, recurrent, recurrent, full]);
    assert_eq!((config.rope_theta, config.rotary_dim()), (1e7, 4));
    assert!(config.attention_output_gate && config.qk_norm && config.zero_centered_norms);
    let shapes: Vec<_> = config.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
    let has = |name: &str, shape: &[usize]| shapes.contains(&(format!("model.layers.{name}"), shape.to_vec()));
    for (name, shape) in [
        ("4.linear_attn.in_proj_qkv.weight", &[2 * 2 * 3 + 4 * 5, 16][..]),
        ("4.linear_attn.in_proj_z.weight", &[20, 16]),
        ("4.linear_attn.in_proj_a.weight", &[4, 16]),
        ("4.linear_attn.conv1d.weight", &[32, 1, 4]),
        ("4.linear_attn.A_log", &[4]),
        ("4.linear_attn.norm.weight", &[5]),
        ("4.linear_attn.out_proj.weight", &[16, 20]),
        // Queries and their gates.
        ("3.self_attn.q_proj.weight", &[2 * 4 * 8, 16]),
        ("3.self_attn.q_norm.weight", &[8]),
    ] {
        assert!(has(name, shape), "{name}: {shapes:?}");
    }
    let of_layer = |layer: &str| shapes.iter().filter(|(name, _)| name.contains(layer)).count();
    assert_eq!((of_layer("layers.3.linear_attn"), of_layer("layers.4.self_attn")), (0, 0));
    // Sizes, layers and the share of rotated columns that the class has without the fields.
    let bare = model(Family::Qwen3_5, json!({"rope_theta": null, "num_hidden_layers": 4}));
    let sizes = bare.linear_attention.unwrap();
    assert_eq!((sizes.linear_num_key_heads, sizes.linear_num_value_heads, sizes.linear_conv_kernel_dim), (16, 32, 4));
    assert_eq!((sizes.linear_key_head_dim, sizes.linear_value_head_dim, bare.head_dim()), (128, 128, 256));
    assert_eq!((bare.partial_rotary_factor, bare.layers.len()), (0.25, 4));
    let listed = model(Family::Qwen3_5, with(delta_net(), json!({"full_attention_interval": 2})));
    assert_eq!(listed.layers, [recurrent, full]);
    for (fields, parts) in [
        (json!({"layer_types": ["linear_attention"]}), ["`layer_types`", "each of the 5 layers"]),
        (json!({"layer_types": ["sliding_attention"]}), ["`layer_types`", "linear_attention or full_attention"]),
        (json!({"full_attention_interval": 0}), ["`full_attention_interval` is 0", "at least 1"]),
        (json!({"attn_output_gate": false}), ["`attn_output_gate` is false", "true"]),
        (json!({"attention_bias": true}), ["`attention_bias` is true", "o_proj"]),
        (json!({"linear_num_value_heads": 3}), ["`linear_num_value_heads` is 3", "a multiple of linear_num_key_heads"]),
        (json!({"linear_key_head_dim": 0}), ["`linear_key_head_dim` is 0", "between 1 and"]),
        (json!({"hidden_act": "gelu"}), ["`hidden_act` is \"gelu\"", "silu"]),
        (json!({"num_experts": 8}), ["`num_experts` is 8", "no mixture of experts"]),
    ] {
        refused(Family::Qwen3_5, with(delta_net(), fields), &parts);
    }
}

#[test]
fn adapters_of_a_gated_delta_net_are_of_its_projections() {
    let config = model(Family::Qwen3_5, delta_net());
    let of = |target: &str| {
        let lora = LoraConfig { target_modules: TargetModules::Names(vec![target.into()]), ..LoraConfig::default() };
        lora.resolve(&config)
    };
    // Five matrices of each of four layers, four of the layer with attention, three of every MLP.
    assert_eq!(LoraConfig::default().resolve(&config).unwrap().len(), 5 * 4 + 4 + 3 * 5);
    assert_eq!(of("in_proj_z").unwrap().len(), 4);
    assert_eq!(of("q_proj").unwrap()[0].output, 2 * 4 * 8);
    for target in ["conv1d", "linear_attn", "norm"] {
        says(&of(target).unwrap_err().to_string(), &[target, "not a matrix that can have an adapter here"]);
    }
}

#[test]
fn layers_and_sizes_of_a_gated_delta_net_belong_together() {
    let sizes = grpo_models::LinearAttention::default();
    let layers = vec![LayerSpec::GATED_DELTA_NET, LayerSpec::default()];
    let error = |config: ModelConfig| config.validate().unwrap_err().to_string();
    says(&error(ModelConfig { layers: layers.clone(), ..ModelConfig::default() }), &["`model.linear_attention`"]);
    let unused = ModelConfig { linear_attention: Some(sizes), ..ModelConfig::default() };
    says(&error(unused), &["`model.linear_attention`", "mixer: gated_delta_net"]);
    let turned = LayerSpec { rope: LayerRope::Global, ..LayerSpec::GATED_DELTA_NET };
    let turned = ModelConfig { layers: vec![turned], linear_attention: Some(sizes), ..ModelConfig::default() };
    says(&error(turned), &["`model.layers`", "rope: none, and neither sliding_window nor heads"]);
    let fused =
        ModelConfig { layers, linear_attention: Some(sizes), fused_projections: true, ..ModelConfig::default() };
    says(&error(fused), &["`model.fused_projections`", "model.linear_attention"]);
}

#[test]
fn modules_of_experts_have_no_adapters() {
    let config = model(Family::Qwen3Moe, moe());
    let matrices = LoraConfig::default().resolve(&config).unwrap();
    assert!(matrices.iter().all(|matrix| matrix.name.contains("self_attn")), "{matrices:?}");
    for target in ["gate", "gate_proj", "experts.1.down_proj", "experts"] {
        let lora = LoraConfig { target_modules: TargetModules::Names(vec![target.into()]), ..LoraConfig::default() };
        says(&lora.resolve(&config).unwrap_err().to_string(), &[target, "not a matrix that can have an adapter here"]);
    }
}

#[test]
fn gpt_oss_has_sinks_biases_and_clamped_experts() {
    let fields = json!({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8, "rope_theta": null});
    let config = model(Family::GptOss, fields.clone());
    let experts = config.experts.as_ref().unwrap();
    assert_eq!((experts.moe_intermediate_size, experts.clamped), (24, Some(ClampedSwiglu::default())));
    assert!(config.attention_sinks && config.attention_bias && config.attention_output_bias);
    assert_eq!(config.layers, [sliding(8, LayerRope::Global), LayerSpec::default()]);
    // Without the field, the class has scaled frequencies whose bounds are not rounded.
    let scaling = config.rope_scaling.as_ref().unwrap();
    assert_eq!(
        (scaling.rope_type, scaling.factor, scaling.truncate, config.rope_theta),
        (RopeType::Yarn, 32.0, false, 1.5e5)
    );
    let shapes: Vec<_> = config.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
    for (name, shape) in [
        ("mlp.router.bias", &[4][..]),
        ("mlp.experts.gate_up_proj", &[4, 16, 48]),
        ("mlp.experts.down_proj_bias", &[4, 16]),
        ("self_attn.sinks", &[4]),
        ("self_attn.o_proj.bias", &[16]),
    ] {
        assert!(shapes.contains(&(format!("model.layers.1.{name}"), shape.to_vec())), "{name}: {shapes:?}");
    }
    let plain = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}});
    assert!(model(Family::GptOss, with(fields.clone(), plain)).rope_scaling.is_none());
    for (more, parts) in [
        (
            json!({"quantization_config": {"quant_method": "bitsandbytes"}}),
            ["`quantization_config.quant_method`", "mxfp4"],
        ),
        (json!({"swiglu_limit": 0.0}), ["`swiglu_limit` is 0.0", "a number between 0.001 and"]),
        (json!({"sliding_window": 0}), ["`sliding_window` is 0", "at least 1"]),
    ] {
        refused(Family::GptOss, with(fields.clone(), more), &parts);
    }
}
