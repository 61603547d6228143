//! Writing of model folders.

use crate::support::{Folder, qwen2, says, whole_text, with};
use grpo_models::{
    Dtype, ExportOptions, Family, FolderWriter, GenerationDefaults, ModelCard, ModelConfig, ModelFolder, RopeScaling,
};
use safetensors::tensor::TensorView;
use safetensors::{Dtype as FileDtype, SafeTensors};
use serde_json::{Value, json};
use std::path::Path;

fn options(dtype: Dtype) -> ExportOptions {
    ExportOptions { dtype, ..ExportOptions::default() }
}

/// Writes every tensor of `source`, the last first, because the order does not matter.
fn write_all(mut writer: FolderWriter, source: &ModelFolder) -> grpo_models::Result<()> {
    let weights = source.weights()?;
    for parameter in source.config().parameters().iter().rev() {
        writer.write(&parameter.name, &weights.tensor(&parameter.name)?.to_vec())?;
    }
    writer.finish()
}

fn names(folder: &Path) -> Vec<String> {
    let list = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = list.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn an_exported_folder_equals_its_source() {
    let folder = Folder::whole();
    folder.json("generation_config.json", &json!({"eos_token_id": [7, 2]}));
    let template = "{% for message in messages %}{{ message }}\r\n{% endfor %}";
    std::fs::write(folder.file("chat_template.jinja"), template).unwrap();
    std::fs::write(folder.file("tokenizer.json"), "{ \"not\": \"touched\" }").unwrap();
    std::fs::create_dir(folder.file("additional_chat_templates")).unwrap();
    std::fs::write(folder.file("additional_chat_templates/tools.jinja"), "tools").unwrap();
    std::fs::write(folder.file("README.md"), "of the base model").unwrap();
    std::fs::write(folder.file("training_args.bin"), "not the model's").unwrap();
    let source = folder.open().unwrap();
    let place = tempfile::tempdir().unwrap();
    for (dtype, limit) in [(Dtype::F32, 5_000_000_000), (Dtype::Bf16, 3000)] {
        let target = place.path().join(dtype.to_string());
        let card = ModelCard { base_model: Some("a/\"b\"".into()), text: "# A model\n".into() };
        let options = ExportOptions { max_shard_size: limit, card: Some(card), ..options(dtype) };
        write_all(FolderWriter::create(&target, source.config(), Some(&source), options).unwrap(), &source).unwrap();
        let made = ModelFolder::open(&target).unwrap();
        assert_eq!(
            (made.config(), made.dtype(), made.generation()),
            (source.config(), Some(dtype), source.generation())
        );
        let (before, after) = (source.weights().unwrap(), made.weights().unwrap());
        after.check(made.config()).unwrap();
        for name in before.names() {
            let tensor = after.tensor(name).unwrap();
            assert_eq!((tensor.dtype(), tensor.to_vec()), (dtype, before.tensor(name).unwrap().to_vec()), "{name}");
        }
        let text = |name: &str| std::fs::read_to_string(target.join(name)).unwrap();
        for name in
            ["chat_template.jinja", "tokenizer.json", "generation_config.json", "additional_chat_templates/tools.jinja"]
        {
            assert_eq!(text(name), std::fs::read_to_string(folder.file(name)).unwrap(), "{name}");
        }
        let original = std::fs::read_to_string(folder.file("config.json")).unwrap();
        assert_eq!(text("config.json"), original.replace("\"bfloat16\"", &format!("\"{dtype}\"")));
        let expected =
            "---\nlibrary_name: transformers\nbase_model: \"a/\\\"b\\\"\"\ntags:\n- grpo\n---\n\n# A model\n";
        assert_eq!(text("README.md"), expected);
        assert!(!target.join("training_args.bin").exists());
    }
    let sharded = place.path().join("bfloat16");
    let shards: Vec<String> = names(&sharded).into_iter().filter(|name| name.ends_with(".safetensors")).collect();
    assert!(shards.len() > 2 && shards[0] == format!("model-00001-of-{:05}.safetensors", shards.len()), "{shards:?}");
    for shard in &shards {
        // The limit does not count a shard's header, and a single tensor may exceed it.
        assert!(std::fs::metadata(sharded.join(shard)).unwrap().len() < 3000 + 2000, "{shard}");
    }
    let index = std::fs::read_to_string(sharded.join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_str(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], 2 * source.config().parameter_count());
    assert_eq!(names(place.path()), ["bfloat16", "float32"]);
}

#[test]
fn a_separate_head_unties_the_exported_configuration() {
    let folder = Folder::new(with(qwen2(), json!({"tie_word_embeddings": true})));
    folder.safetensors("model.safetensors", &folder.tensors(FileDtype::F32));
    let source = folder.open().unwrap();
    let untied = ModelConfig { tie_word_embeddings: false, ..source.config().clone() };
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("model");
    let mut writer = FolderWriter::create(&target, &untied, Some(&source), options(Dtype::F32)).unwrap();
    for parameter in untied.parameters() {
        writer.write(&parameter.name, &vec![0.25; parameter.len()]).unwrap();
    }
    writer.finish().unwrap();
    let made = ModelFolder::open(&target).unwrap();
    assert!(!made.config().tie_word_embeddings);
    made.weights().unwrap().check(made.config()).unwrap();
    let other = ModelConfig { rope_theta: 5.0, ..untied };
    let error = FolderWriter::create(&place.path().join("b"), &other, Some(&source), options(Dtype::F32)).unwrap_err();
    says(&error.to_string(), &["config.json", "rope_theta: 5.0"]);
}

#[test]
fn a_new_configuration_is_exported_as_the_family_with_its_features() {
    let place = tempfile::tempdir().unwrap();
    let scaling = RopeScaling { factor: 8.0, original_max_position_embeddings: 32, ..RopeScaling::default() };
    let base = ModelConfig { num_hidden_layers: 1, initializer_range: 0.02, ..ModelConfig::default() };
    for (family, config) in [
        (Family::Qwen2, ModelConfig { tie_word_embeddings: true, ..base.clone() }),
        (Family::Qwen2, ModelConfig { head_dim: Some(32), ..base.clone() }),
        (Family::Qwen3, ModelConfig { attention_bias: false, qk_norm: true, head_dim: Some(32), ..base.clone() }),
        (Family::Llama, ModelConfig { attention_bias: false, rope_scaling: Some(scaling.clone()), ..base.clone() }),
    ] {
        let target = place.path().join("model");
        let generation = GenerationDefaults {
            eos_token_id: vec![2, 1],
            pad_token_id: Some(0),
            temperature: Some(0.5),
            ..GenerationDefaults::default()
        };
        let options = ExportOptions { replace: true, generation: generation.clone(), ..options(Dtype::F16) };
        let mut writer = FolderWriter::create(&target, &config, None, options).unwrap();
        for parameter in config.parameters() {
            writer.write(&parameter.name, &vec![1.5; parameter.len()]).unwrap();
        }
        writer.finish().unwrap();
        let made = ModelFolder::open(&target).unwrap();
        assert_eq!((made.family(), made.config(), made.dtype()), (family, &config, Some(Dtype::F16)));
        assert_eq!(*made.generation(), generation);
        made.weights().unwrap().check(made.config()).unwrap();
    }
    // Qwen3's field is always written, because its class has another default.
    let config = ModelConfig { attention_bias: false, qk_norm: true, ..base.clone() };
    drop(FolderWriter::create(&place.path().join("b"), &config, None, options(Dtype::F32)).unwrap());
    let both = ModelConfig { qk_norm: true, attention_bias: true, ..base };
    let error = FolderWriter::create(&place.path().join("b"), &both, None, options(Dtype::F32)).unwrap_err();
    says(&error.to_string(), &["model.qk_norm", "attention_bias"]);
    assert_eq!(names(place.path()), ["model"]);
}

#[test]
fn a_failed_export_leaves_no_folder() {
    let source = Folder::whole();
    let source = source.open().unwrap();
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("model");
    let begin = || FolderWriter::create(&target, source.config(), Some(&source), options(Dtype::F16)).unwrap();
    let norm = "model.norm.weight";

    let mut writer = begin();
    writer.write(norm, &[1.0; 16]).unwrap();
    says(&writer.write(norm, &[1.0; 16]).unwrap_err().to_string(), &[norm, "expected it once"]);
    says(&writer.write("norm.weight", &[1.0; 16]).unwrap_err().to_string(), &["`norm.weight`", norm]);
    says(&writer.finish().unwrap_err().to_string(), &["lacks 26 of the model's tensors", "..."]);
    assert!(names(place.path()).is_empty());

    let mut writer = begin();
    says(&writer.write(norm, &[1.0; 15]).unwrap_err().to_string(), &[norm, "expected 16 values, got 15"]);
    // 70000 is finite in f32 and infinite in f16.
    for (value, shown) in [(f32::NAN, "NaN"), (70000.0, "70000")] {
        let mut values = [1.0; 16];
        values[3] = value;
        says(&writer.write(norm, &values).unwrap_err().to_string(), &[norm, &format!("{shown} at index 3")]);
    }
    drop(writer);
    assert!(names(place.path()).is_empty());

    std::fs::create_dir(&target).unwrap();
    std::fs::write(target.join("mine"), "").unwrap();
    let error = FolderWriter::create(&target, source.config(), Some(&source), options(Dtype::F32)).unwrap_err();
    says(&whole_text(error), &["cannot create the folder", "model", "not empty"]);
    assert_eq!(names(&target), ["mine"]);
    let replace = ExportOptions { replace: true, ..options(Dtype::F32) };
    write_all(FolderWriter::create(&target, source.config(), Some(&source), replace).unwrap(), &source).unwrap();
    assert_eq!(
        (names(&target), names(place.path())),
        (vec!["config.json".into(), "model.safetensors".into()], vec!["model".into()])
    );
}

/// Published folders of Qwen3.5 have a layer that predicts further tokens, which its class of transformers ignores.
#[test]
fn a_layer_of_further_predictions_is_carried_along() {
    let checkpoint = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/checkpoints/qwen3_5"));
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(checkpoint.join("config.json"), folder.path().join("config.json")).unwrap();
    let bytes = std::fs::read(checkpoint.join("model.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    let (values, name) = ([1, 2, 3, 4, 5, 6, 7, 8], "mtp.fc.weight");
    let further = TensorView::new(FileDtype::F32, vec![1, 2], &values).unwrap();
    let tensors = stored.tensors().into_iter().chain([(name.to_owned(), further)]);
    safetensors::serialize_to_file(tensors, None, &folder.path().join("model.safetensors")).unwrap();

    let source = ModelFolder::open(folder.path()).unwrap();
    source.weights().unwrap().check(source.config()).unwrap();
    let target = folder.path().join("exported");
    let writer = FolderWriter::create(&target, source.config(), Some(&source), options(Dtype::F32)).unwrap();
    write_all(writer, &source).unwrap();
    let exported = std::fs::read(target.join("model.safetensors")).unwrap();
    let exported = SafeTensors::deserialize(&exported).unwrap();
    assert_eq!(exported.tensor(name).unwrap().data(), values);
    assert_eq!(exported.len(), stored.len() + 1);
}
