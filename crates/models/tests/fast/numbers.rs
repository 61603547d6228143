//! Numbers and names of config.json beyond sense.

use crate::families::{delta_net, moe, of, refused};
use crate::support::{Folder, says, with};
use grpo_models::Family;
use serde_json::{Value, json};

/// A list with an entry per layer would take 56 GB.
#[test]
fn sizes_are_refused_before_anything_is_allocated_by_them() {
    let huge = json!(1_000_000_000);
    for family in Family::ALL {
        for (key, most) in [
            ("num_hidden_layers", 1 << 10),
            ("vocab_size", 1 << 20),
            ("hidden_size", 1 << 16),
            ("intermediate_size", 1 << 18),
            ("num_attention_heads", 1 << 10),
            ("num_key_value_heads", 1 << 10),
            ("max_position_embeddings", 1 << 20),
        ] {
            let parts = [&format!("`{key}` is 1000000000"), &format!("between 1 and {most}") as &str];
            refused(family, json!({ key: huge }), &[parts[0], parts[1]]);
            refused(family, json!({ key: 0 }), &[&format!("`{key}` is 0"), parts[1]]);
        }
        refused(family, json!({"head_dim": huge}), &["`head_dim` is 1000000000", "between 2 and 4096"]);
    }
    for (key, most) in [("num_experts", 1 << 12), ("num_experts_per_tok", 4), ("moe_intermediate_size", 1 << 18)] {
        let of_experts = with(moe(), json!({"num_experts": 4, (key): huge}));
        refused(Family::Qwen3Moe, of_experts, &[&format!("`{key}` is 1000000000"), &format!("between 1 and {most}")]);
    }
    let many = with(moe(), json!({"num_hidden_layers": 1024, "num_experts": 4096}));
    refused(Family::Qwen3Moe, many, &["`num_experts` is 4096", "at most 131072 experts in all layers"]);
    for key in ["linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim"] {
        refused(Family::Qwen3_5, with(delta_net(), json!({ key: huge })), &[&format!("`{key}` is 1000000000")]);
    }
}

#[test]
fn numbers_beyond_sense_are_refused() {
    let (no, granite) = ("a number between", Family::Granite);
    for (family, key, values, supported) in [
        (Family::Qwen2, "rms_norm_eps", [0.0, -1e-6, 1e-30, 1.0, 1e300], "a number between 1e-12 and 0.1"),
        (Family::Qwen2, "rope_theta", [0.0, -1e4, 0.5, 1e30, 1e300], "a number between 1.0 and 1000000000000.0"),
        (Family::Gemma3, "rope_local_base_freq", [0.0, -1e4, 0.5, 1e30, 1e300], no),
        (
            Family::Gemma4,
            "final_logit_softcapping",
            [0.0, -30.0, 1e-9, 1e30, 1e300],
            "a number between 0.1 and 1000000.0",
        ),
        (granite, "embedding_multiplier", [0.0, -1.0, 1e-30, 1e30, 1e300], no),
        (granite, "residual_multiplier", [0.0, -1.0, 1e-30, 1e30, 1e300], no),
        (granite, "attention_multiplier", [0.0, -1.0, 1e-30, 1e30, 1e300], no),
        (granite, "logits_scaling", [0.0, -1.0, 1e-30, 1e30, 1e300], no),
    ] {
        for value in values {
            let fields = json!({"sliding_window": 16, "hidden_size_per_layer_input": 0, (key): value});
            let error = Folder::new(of(family, fields)).open().expect_err(key).to_string();
            says(&error, &["config.json", "supported: ", supported]);
        }
    }
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32});
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
    for (scaling, key) in [
        (&llama3, "factor"),
        (&llama3, "high_freq_factor"),
        (&llama3, "original_max_position_embeddings"),
        (&yarn, "factor"),
        (&yarn, "beta_fast"),
        (&yarn, "attention_factor"),
    ] {
        for value in [-1.0, 1e15] {
            let scaling = with(scaling.clone(), json!({ key: value }));
            let error = Folder::new(of(Family::Llama, json!({"rope_scaling": scaling}))).open().expect_err(key);
            says(&error.to_string(), &["config.json: `rope_scaling"]);
        }
    }
}

#[test]
fn a_second_architecture_is_read() {
    let family = |architectures: Value, kind: Value| {
        Folder::new(of(Family::Qwen2, json!({"architectures": architectures, "model_type": kind}))).open()
    };
    for (architectures, kind) in [
        (json!(["Qwen2ForCausalLM", "Qwen2ForSequenceClassification"]), json!("qwen2")),
        (json!(["Qwen2ForRewardModel", "Qwen2ForCausalLM"]), json!("qwen2")),
        (json!(["Qwen2ForCausalLM", "Qwen2ForCausalLM"]), Value::Null),
        (json!(["LlamaForCausalLM", "Qwen2ForCausalLM"]), json!("qwen2")),
    ] {
        assert_eq!(family(architectures, kind).unwrap().family(), Family::Qwen2);
    }
    let refused = |architectures: Value, kind: Value, parts: &[&str]| {
        says(&family(architectures, kind).unwrap_err().to_string(), parts);
    };
    let both = json!(["LlamaForCausalLM", "Qwen2ForCausalLM"]);
    refused(both, Value::Null, &["`model_type` is missing", "one, beside several architectures"]);
    refused(json!(["LlamaForCausalLM", "X"]), json!("qwen2"), &["`architectures`", "for model_type qwen2"]);
    refused(json!(["X", "Y"]), Value::Null, &["`architectures`", "one of Qwen2ForCausalLM"]);
}
