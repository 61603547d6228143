//! Models of images and text: reading, export and adapters of their text decoders.

use crate::support::{Folder, says, with};
use grpo_models::{
    Adapter, AdapterOptions, AdapterWriter, Dtype, ExportOptions, Family, FolderWriter, LoraConfig, ModelConfig,
    ModelFolder, RopeType, TargetModules, Wrapper,
};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The checkpoints that transformers made, with their decoders and the number of tensors that are not the decoder's.
const CHECKPOINTS: [(&str, Wrapper, Family, bool); 7] = [
    ("gemma3_vision", Wrapper::Gemma3, Family::Gemma3, true),
    ("gemma4_vision", Wrapper::Gemma4, Family::Gemma4, true),
    ("qwen2_5_vl", Wrapper::Qwen2_5Vl, Family::Qwen2, false),
    ("qwen3_vl", Wrapper::Qwen3Vl, Family::Qwen3, true),
    ("qwen3_5_vision", Wrapper::Qwen3_5, Family::Qwen3_5, true),
    ("mistral3", Wrapper::Mistral3, Family::Mistral, false),
    ("ministral3_vision", Wrapper::Mistral3, Family::Ministral3, true),
];

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/checkpoints").join(name)
}

/// Dtype, shape and bytes of the tensors in the files of a folder.
fn stored(folder: &Path) -> BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let weights = files.filter(|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with("model") && name.ends_with(".safetensors")
    });
    let mut tensors = BTreeMap::new();
    for file in weights {
        let bytes = std::fs::read(file).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        tensors.extend(
            file.tensors()
                .into_iter()
                .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))),
        );
    }
    tensors
}

fn export(source: &ModelFolder, config: &ModelConfig, to: &Path, options: ExportOptions) {
    let weights = source.weights().unwrap();
    let mut writer = FolderWriter::create(to, config, Some(source), options).unwrap();
    for parameter in config.parameters() {
        let name = if weights.contains(&parameter.name) { &parameter.name } else { "model.embed_tokens.weight" };
        writer.write(&parameter.name, &weights.tensor(name).unwrap().to_vec()).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn the_decoder_of_every_wrapper_is_read() {
    for (name, wrapper, family, is_tied) in CHECKPOINTS {
        let folder = ModelFolder::open(&checkpoint(name)).unwrap();
        assert_eq!((folder.wrapper(), folder.family(), folder.dtype()), (Some(wrapper), family, Some(Dtype::F32)));
        let (config, weights) = (folder.config(), folder.weights().unwrap());
        assert_eq!(config.tie_word_embeddings, is_tied, "{name}");
        weights.check(config).unwrap();
        weights.check_finite().unwrap();
        // Memory tables count the decoder's weights, and checks see no other tensors.
        assert_eq!(weights.names().count(), config.parameters().len(), "{name}");
        assert!(stored(folder.path()).len() > weights.names().count() + 10, "{name}");
        assert_eq!(folder.generation().eos_token_id, [2], "{name}");
    }
    let gemma3 = ModelFolder::open(&checkpoint("gemma3_vision")).unwrap();
    let config = gemma3.config();
    assert_eq!((config.num_attention_heads, config.num_key_value_heads), (8, 4), "the class's defaults");
    assert_eq!(config.rope_scaling.as_ref().map(|rope| (rope.rope_type, rope.factor)), Some((RopeType::Linear, 8.0)));
    for name in ["qwen2_5_vl", "qwen3_vl"] {
        let folder = ModelFolder::open(&checkpoint(name)).unwrap();
        assert_eq!(folder.config().rope_scaling, None, "{name}: positions of text are equal");
        assert_eq!(folder.config().rope_theta, if name == "qwen3_vl" { 5e6 } else { 1e6 });
    }
}

#[test]
fn a_head_of_its_own_unties_both_levels() {
    let place = tempfile::tempdir().unwrap();
    for name in ["qwen3_vl", "ministral3_vision"] {
        let source = ModelFolder::open(&checkpoint(name)).unwrap();
        let untied = ModelConfig { tie_word_embeddings: false, ..source.config().clone() };
        let target = place.path().join(name);
        export(&source, &untied, &target, ExportOptions { dtype: Dtype::F32, ..ExportOptions::default() });
        let made = ModelFolder::open(&target).unwrap();
        assert_eq!(*made.config(), untied);
        made.weights().unwrap().check(&untied).unwrap();
        let heads = stored(&target).into_keys().filter(|name| name.contains("lm_head")).count();
        assert_eq!(heads, 1);
    }
}

/// Returns the folder of a checkpoint with a changed config.json and with its weights.
fn changed(name: &str, change: impl FnOnce(&mut Value)) -> Folder {
    let text = std::fs::read_to_string(checkpoint(name).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    change(&mut config);
    let folder = Folder::new(config);
    std::fs::copy(checkpoint(name).join("model.safetensors"), folder.file("model.safetensors")).unwrap();
    folder
}

#[test]
fn tie_word_embeddings_is_read_from_both_levels() {
    let tie = |name: &str, outer: Value, inner: Value| {
        let folder = changed(name, |config| {
            *config = with(config.clone(), json!({"tie_word_embeddings": outer}));
            config["text_config"] = with(config["text_config"].clone(), json!({"tie_word_embeddings": inner}));
        });
        folder.model().tie_word_embeddings
    };
    for (outer, inner, expected) in [
        (json!(true), json!(false), true),
        (json!(false), json!(true), false),
        (Value::Null, json!(true), true),
        // The files have no head.
        (Value::Null, Value::Null, true),
    ] {
        assert_eq!(tie("qwen3_vl", outer.clone(), inner.clone()), expected, "{outer} {inner}");
        assert_eq!(tie("ministral3_vision", outer, inner), expected);
    }
    // The classes do not read the inner field, and have different defaults.
    assert!(!tie("qwen3_vl", Value::Null, json!(false)));
    for name in ["ministral3_vision", "gemma3_vision", "gemma4_vision"] {
        assert!(tie(name, Value::Null, json!(false)), "{name}");
    }
    // The files have a head.
    for inner in [Value::Null, json!(true)] {
        assert!(!tie("mistral3", Value::Null, inner));
    }
    // The class reads the inner field of files of version 4.
    let nested = changed("qwen2_5_vl", |config| {
        let text = with(config.clone(), json!({"vision_config": null, "architectures": null, "model_type": null}));
        config["text_config"] = with(text, json!({"tie_word_embeddings": true}));
        config["tie_word_embeddings"] = false.into();
    });
    assert!(nested.model().tie_word_embeddings);
}

#[test]
fn unsupported_wrappers_are_refused_by_field() {
    let refused = |name: &str, change: &dyn Fn(&mut Value), parts: &[&str]| {
        says(&changed(name, |config| change(config)).refused(), parts);
    };
    let text = |key: &'static str, value: Value| move |config: &mut Value| config["text_config"][key] = value.clone();
    refused("gemma3_vision", &text("model_type", json!("llama")), &["`text_config.model_type`", "gemma3_text"]);
    let softcap = text("final_logit_softcapping", json!(30.0));
    refused("gemma3_vision", &softcap, &["`text_config.final_logit_softcapping` is 30.0"]);
    let per_layer = text("hidden_size_per_layer_input", json!(256));
    refused("gemma4_vision", &per_layer, &["`text_config.hidden_size_per_layer_input` is 256"]);
    refused("qwen3_5_vision", &text("attention_bias", json!(true)), &["`text_config.attention_bias` is true"]);
    refused("qwen3_vl", &text("vocab_size", json!(63)), &["embed_tokens", "[63, 32]"]);
    refused("mistral3", &text("hidden_size", Value::Null), &["`text_config.hidden_size` is null"]);
    let rope = json!({"rope_type": "default", "mrope_section": [1, 1, 2]});
    refused("mistral3", &text("rope_parameters", rope), &["`text_config.rope_parameters.mrope_section`"]);
    refused("qwen3_vl", &|config| config["text_config"] = Value::Null, &["`text_config` is null", "an object"]);
    let quantised = |config: &mut Value| config["quantization_config"] = json!({"quant_method": "fp8"});
    refused("mistral3", &quantised, &["`quantization_config`", "not quantised"]);
    let other = |config: &mut Value| config["architectures"] = json!(["Qwen2_5_VLForConditionalGeneration"]);
    refused("qwen3_vl", &other, &["`architectures`", "Qwen3VLForConditionalGeneration for model_type qwen3_vl"]);
    let unknown = |config: &mut Value| {
        config["model_type"] = json!("llava");
        config["architectures"] = json!(["LlavaForConditionalGeneration"]);
    };
    refused(
        "mistral3",
        &unknown,
        &["`model_type` is \"llava\"", "gemma3, gemma4, qwen2_5_vl, qwen3_vl, qwen3_5, mistral3"],
    );
    let folder = changed("qwen3_vl", |_| {});
    std::fs::copy(checkpoint("qwen3_vl_lora").join("merged.safetensors"), folder.file("model.safetensors")).unwrap();
    // The names of a decoder alone are the third layout.
    folder.open().unwrap().weights().unwrap();
    std::fs::copy(checkpoint("qwen3_vl_lora/adapter_model.safetensors"), folder.file("model.safetensors")).unwrap();
    says(
        &folder.refused(),
        &["expected the embedding of the text decoder", "model.language_model.embed_tokens.weight"],
    );
}

#[test]
fn adapters_have_the_names_of_the_wrapper() {
    let place = tempfile::tempdir().unwrap();
    for name in ["gemma3_vision", "qwen3_vl"] {
        let base = ModelFolder::open(&checkpoint(name)).unwrap();
        let from = checkpoint(&format!("{name}_lora"));
        let adapter = Adapter::open(&from, base.config()).unwrap();
        let target = place.path().join(name);
        let mut writer =
            AdapterWriter::create(&target, adapter.config(), base.config(), Some(&base), AdapterOptions::default())
                .unwrap();
        for matrix in adapter.matrices() {
            assert!(matrix.name.starts_with("model.layers."), "{}", matrix.name);
            writer.write(&matrix.lora_a(), &adapter.lora_a(matrix).unwrap().to_vec()).unwrap();
            writer.write(&matrix.lora_b(), &adapter.lora_b(matrix).unwrap().to_vec()).unwrap();
        }
        writer.finish().unwrap();
        let tensors = |folder: &Path| {
            let bytes = std::fs::read(folder.join("adapter_model.safetensors")).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let tensors = file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec()));
            tensors.collect::<BTreeMap<_, _>>()
        };
        assert!(tensors(&target) == tensors(&from), "{name}");
        let json: Value = serde_json::from_slice(&std::fs::read(target.join("adapter_config.json")).unwrap()).unwrap();
        let modules: Vec<&str> = json["target_modules"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        assert_eq!(modules.len(), adapter.matrices().len());
        assert!(modules.iter().all(|name| name.starts_with("model.language_model.layers.")), "{modules:?}");
        assert!(target.join("preprocessor_config.json").exists());
        let again = Adapter::open(&target, base.config()).unwrap();
        assert_eq!(again.matrices(), adapter.matrices());
    }
    let config = ModelConfig::default();
    let names = |target_modules| LoraConfig { target_modules, ..LoraConfig::default() }.resolve(&config).unwrap();
    let q_proj = names(TargetModules::Names(vec!["language_model.layers.1.self_attn.q_proj".into()]));
    assert_eq!(q_proj[0].name, "model.layers.1.self_attn.q_proj");
    assert_eq!(names(TargetModules::Pattern(r"model\.language_model\..*\.1\..*q_proj".into())), q_proj);
}

/// Tests that take seconds: `cargo fast` skips modules of this name.
mod slow {
    use super::*;

    #[test]
    fn an_export_keeps_the_rest_of_the_folder_byte_for_byte() {
        let place = tempfile::tempdir().unwrap();
        for (name, ..) in CHECKPOINTS {
            let source = ModelFolder::open(&checkpoint(name)).unwrap();
            let before = stored(source.path());
            for limit in [5_000_000_000, 5000] {
                let target = place.path().join(format!("{name}-{limit}"));
                let options = ExportOptions { dtype: Dtype::F32, max_shard_size: limit, ..ExportOptions::default() };
                export(&source, source.config(), &target, options);
                assert!(stored(&target) == before, "{name}: the tensors differ");
                for file in ["config.json", "preprocessor_config.json"] {
                    assert_eq!(
                        std::fs::read(target.join(file)).unwrap(),
                        std::fs::read(checkpoint(name).join(file)).unwrap()
                    );
                }
                let made = ModelFolder::open(&target).unwrap();
                assert_eq!((made.config(), made.wrapper()), (source.config(), source.wrapper()));
                made.weights().unwrap().check(made.config()).unwrap();
            }
            // Another dtype changes the decoder's tensors and the field.
            let target = place.path().join(format!("{name}-bf16"));
            export(&source, source.config(), &target, ExportOptions::default());
            let own = source.weights().unwrap();
            let after = stored(&target);
            let kept = before.iter().filter(|(name, tensor)| after[*name] == **tensor).count();
            assert_eq!(kept, before.len() - own.names().count(), "{name}");
            let text = |folder: &Path| std::fs::read_to_string(folder.join("config.json")).unwrap();
            assert_eq!(text(&target), text(source.path()).replace("\"float32\"", "\"bfloat16\""), "{name}");
        }
    }
}
