//! `config.json` and `generation_config.json`.

use crate::support::{Folder, qwen2, says, whole_text, with};
use grpo_models::{Dtype, Family, GenerationDefaults, RopeScaling};
use serde_json::{Value, json};

fn refused(fields: Value) -> String {
    Folder::new(with(qwen2(), fields)).open().expect_err("not supported").to_string()
}

/// Returns the config.json of Llama 3.2 as transformers 5 writes it.
fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "dtype": "float32",
        "bos_token_id": 1, "eos_token_id": [2, 3], "head_dim": 8, "hidden_act": "silu", "hidden_size": 16,
        "initializer_range": 0.02, "intermediate_size": 24, "max_position_embeddings": 4096, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "pad_token_id": null, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 1024,
            "rope_theta": 500000.0, "rope_type": "llama3"
        },
        "tie_word_embeddings": true, "transformers_version": "5.0.0", "use_cache": true, "vocab_size": 32
    })
}

#[test]
fn config_json_of_transformers_4_and_5_is_read() {
    let folder = Folder::new(qwen2());
    let old = folder.open().unwrap();
    let config = old.config();
    assert_eq!((old.family(), old.dtype()), (Family::Qwen2, Some(Dtype::Bf16)));
    assert_eq!((config.rope_theta, &config.rope_scaling, config.attention_bias), (1e6, &None, true));
    assert_eq!((config.head_dim(), config.rms_norm_eps, config.tie_word_embeddings), (4, 1e-6, false));
    let new = with(
        qwen2(),
        json!({
            "rope_theta": null, "torch_dtype": null, "dtype": "bfloat16",
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "layer_types": ["full_attention", "full_attention"], "pad_token_id": null
        }),
    );
    let new = Folder::new(new).open().unwrap();
    assert_eq!((new.config(), new.dtype()), (config, old.dtype()));
}

#[test]
fn llama_3_rope_scaling_is_read() {
    let folder = Folder::new(llama()).open().unwrap();
    let scaling = RopeScaling {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 1024,
        ..RopeScaling::default()
    };
    let config = folder.config();
    assert_eq!((folder.family(), config.rope_theta), (Family::Llama, 500_000.0));
    assert_eq!(config.rope_scaling, Some(scaling));
    assert_eq!((config.head_dim(), config.attention_bias, config.qk_norm), (8, false, false));
    assert!(config.tie_word_embeddings && config.parameters().iter().all(|p| p.name != "lm_head.weight"));

    let mut rope = llama()["rope_parameters"].clone();
    rope.as_object_mut().unwrap().remove("rope_theta");
    let old = with(llama(), json!({"rope_parameters": null, "rope_scaling": rope, "rope_theta": 500000.0}));
    assert_eq!(Folder::new(old).model(), *config);
}

#[test]
fn qwen3_has_norms_and_a_width_of_its_own() {
    let qwen3 = with(qwen2(), json!({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}));
    let folder = Folder::new(qwen3.clone()).open().unwrap();
    assert_eq!((folder.family(), folder.config().head_dim()), (Family::Qwen3, 8));
    let names: Vec<String> = folder.config().parameters().into_iter().map(|p| p.name).collect();
    assert!(names.contains(&"model.layers.1.self_attn.k_norm.weight".to_owned()));
    assert!(names.iter().all(|name| !name.ends_with(".bias")));
    // transformers' class has 128 columns by default.
    assert_eq!(Folder::new(with(qwen3.clone(), json!({"head_dim": null}))).model().head_dim(), 128);
}

#[test]
fn parameters_are_counted() {
    // Qwen2.5-0.5B has 494032768 weights (0.49B on its model card).
    let config = Folder::new(with(
        qwen2(),
        json!({
            "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": true
        }),
    ));
    assert_eq!(config.model().parameter_count(), 494_032_768);
}

#[test]
fn unsupported_computations_are_refused_by_field() {
    for (fields, parts) in [
        (json!({"hidden_act": "gelu"}), &["`hidden_act` is \"gelu\"", "silu"][..]),
        (
            json!({"model_type": "qwen3_next"}),
            &["`model_type` is \"qwen3_next\"", "qwen2, qwen3, qwen3_moe, qwen3_5_text, gpt_oss"],
        ),
        (json!({"architectures": ["Qwen2ForSequenceClassification"]}), &["`architectures`", "Qwen2ForCausalLM"]),
        (json!({"architectures": ["LlamaForCausalLM"]}), &["`architectures`", "for model_type qwen2"]),
        (
            json!({"use_sliding_window": true, "max_window_layers": 1, "sliding_window": 0}),
            &["`sliding_window` is 0", "at least 1"],
        ),
        (
            json!({"use_sliding_window": true, "sliding_window": 16, "layer_types": ["sliding_attention", "chunked"]}),
            &["`layer_types`", "full_attention or sliding_attention"],
        ),
        (json!({"layer_types": ["full_attention"]}), &["`layer_types`", "one entry for each of the 2 layers"]),
        (
            json!({"layer_types": ["full_attention", "sliding_attention"]}),
            &["`layer_types`", "full_attention in every layer"],
        ),
        (json!({"quantization_config": {"quant_method": "gptq"}}), &["`quantization_config`", "gptq", "not quantised"]),
        (json!({"num_experts": 8}), &["`num_experts` is 8", "no mixture of experts"]),
        (
            json!({"rope_scaling": {"type": "proportional", "factor": 4.0}}),
            &["`rope_scaling.type` is \"proportional\"", "default, linear, dynamic, yarn, longrope, llama3"],
        ),
        (json!({"rope_parameters": {"rope_type": "linear"}}), &["`rope_parameters.factor` is missing"]),
        (
            json!({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0]}}),
            &["`rope_scaling.original_max_position_embeddings` is missing"],
        ),
        (
            json!({"rope_parameters": {
                "rope_type": "longrope", "short_factor": [1.0], "original_max_position_embeddings": 32
            }}),
            &["`rope_parameters`", "a short_factor of 2 numbers"],
        ),
        (
            json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
            &["`rope_parameters.full_attention`", "in every layer"],
        ),
        (json!({"rope_scaling": {"rope_type": "llama3", "factor": 8}}), &["`rope_scaling.low_freq_factor` is missing"]),
        (json!({"partial_rotary_factor": 0.5}), &["`partial_rotary_factor` is 0.5"]),
        (json!({"final_logit_softcapping": 30.0}), &["`final_logit_softcapping` is 30.0"]),
        (json!({"attention_dropout": 0.1}), &["`attention_dropout` is 0.1"]),
        (json!({"torch_dtype": "float64"}), &["`torch_dtype` is \"float64\"", "float32, bfloat16, float16"]),
        (json!({"hidden_size": "16"}), &["`hidden_size` is \"16\"", "a whole number"]),
        (json!({"hidden_size": null}), &["`hidden_size` is missing"]),
        (json!({"num_key_value_heads": 3}), &["`num_key_value_heads` is 3", "a divisor of num_attention_heads"]),
    ] {
        says(&refused(fields), &[&["config.json"], parts].concat());
    }
    let mlp_bias = Folder::new(with(llama(), json!({"mlp_bias": true}))).open().unwrap_err().to_string();
    says(&mlp_bias, &["`mlp_bias` is true"]);
}

#[test]
fn irrelevant_fields_are_ignored() {
    for fields in [
        json!({"use_sliding_window": true, "sliding_window": 64, "max_window_layers": 0}),
        json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 2}),
        json!({"use_sliding_window": false, "sliding_window": 16, "max_window_layers": 0}),
        json!({"quantization_config": {}, "partial_rotary_factor": 1.0, "some_new_field": [1, 2]}),
        json!({"hidden_act": "swish", "torch_dtype": "auto"}),
        json!({"rope_scaling": {"type": "default"}}),
    ] {
        let folder = Folder::new(with(qwen2(), fields.clone()));
        assert_eq!(folder.model(), Folder::new(qwen2()).model(), "{fields}");
    }
}

#[test]
fn stop_tokens_of_both_files_are_read() {
    let folder = Folder::new(qwen2());
    assert_eq!(folder.open().unwrap().generation().eos_token_id, [2]);
    folder.json(
        "generation_config.json",
        &json!({
            "bos_token_id": 1, "pad_token_id": 5, "do_sample": true, "eos_token_id": [7, 2, 9], "repetition_penalty": 1.1,
            "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.43.1"
        }),
    );
    let expected = GenerationDefaults {
        eos_token_id: vec![7, 2, 9],
        pad_token_id: Some(5),
        bos_token_id: Some(1),
        do_sample: Some(true),
        temperature: Some(0.7),
        top_k: Some(20),
        top_p: Some(0.8),
        min_p: None,
        repetition_penalty: Some(1.1),
        stop_strings: vec![],
    };
    assert_eq!(*folder.open().unwrap().generation(), expected);
    // A token that only config.json names also ends completions.
    folder.json("generation_config.json", &json!({"eos_token_id": 7}));
    assert_eq!(folder.open().unwrap().generation().eos_token_id, [7, 2]);
    for (json, parts) in [
        (
            json!({"eos_token_id": [7, 32]}),
            ["generation_config.json", "`eos_token_id` is [7,32]", "below vocab_size (32)"],
        ),
        (json!({"eos_token_id": "</s>"}), ["generation_config.json", "`eos_token_id`", "a token id"]),
        (json!({"top_p": 1.5}), ["generation_config.json", "`top_p` is 1.5", "between 0 and 1"]),
    ] {
        folder.json("generation_config.json", &json);
        says(&folder.open().unwrap_err().to_string(), &parts);
    }
}

#[test]
fn configuration_errors_have_file_line_and_column() {
    let folder = Folder::new(qwen2());
    std::fs::write(folder.file("config.json"), "{\n  \"hidden_size\": 16,\n  oops\n}").unwrap();
    says(&folder.open().unwrap_err().to_string(), &["config.json, line 3, column 3", "JSON object"]);
    std::fs::write(folder.file("config.json"), "[]").unwrap();
    says(&folder.open().unwrap_err().to_string(), &["config.json, line 1", "JSON object"]);
    std::fs::remove_file(folder.file("config.json")).unwrap();
    says(&whole_text(folder.open().unwrap_err()), &["cannot read", "config.json", "No such file"]);
}
