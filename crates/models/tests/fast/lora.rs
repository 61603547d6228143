//! LoRA: the adapted matrices, and PEFT's folder.

use crate::support::{Folder, Tensor, Tensors, qwen2, says, whole_text, with};
use grpo_models::{
    Adapter, AdapterOptions, AdapterWriter, Experts, LayerSpec, LoraConfig, ModelCard, ModelConfig, SharedExpert,
    TargetModules,
};
use safetensors::Dtype as FileDtype;
use serde_json::{Value, json};
use std::path::Path;

const Q: &str = "model.layers.0.self_attn.q_proj";

fn lora(targets: Value) -> LoraConfig {
    serde_json::from_value(json!({"r": 2, "lora_alpha": 3.0, "target_modules": targets})).unwrap()
}

fn resolved(targets: Value) -> Vec<String> {
    let matrices = lora(targets).resolve(&Folder::new(qwen2()).model()).unwrap();
    matrices.into_iter().map(|matrix| matrix.name).collect()
}

#[test]
fn targets_are_resolved_as_peft_does() {
    assert_eq!(resolved(json!(["q_proj"])), [Q, "model.layers.1.self_attn.q_proj"]);
    assert_eq!(resolved(json!(["0.self_attn.q_proj", "lm_head"])), [Q, "lm_head"]);
    assert_eq!(
        resolved(json!(r"model\.layers\.1\.mlp\.(up|down)_proj")),
        ["model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"]
    );
    // A pattern has to match the whole name; `all-linear` excludes the head.
    assert_eq!(resolved(json!(".*0.*v_proj")), ["model.layers.0.self_attn.v_proj"]);
    let all = resolved(json!("all-linear"));
    assert_eq!((all.len(), all.contains(&"lm_head".into())), (14, false));
    assert_eq!(resolved(json!("lm_head")), ["lm_head"]);

    let model = Folder::new(qwen2()).model();
    for (targets, parts) in [
        (json!(["q_prj"]), &["\"q_prj\"", "the nearest is q_proj"][..]),
        (json!(["roj"]), &["\"roj\"", "no such matrix"]),
        (json!(["q_proj", "embed_tokens"]), &["\"embed_tokens\"", "`model.embed_tokens` is not a matrix"]),
        (json!(".*self_attn.*|.*norm"), &["`model.norm` is not a matrix"]),
        (json!("q_proj"), &["\"q_proj\"", "whole name of no matrix"]),
        (json!("(?!a)b"), &["not a regular expression", "look-around"]),
        (json!("("), &["LoRA target \"(\": not a regular expression", "not supported): unclosed group"]),
        (json!([]), &["lora.target_modules", "an empty list"]),
    ] {
        says(&lora(targets).resolve(&model).unwrap_err().to_string(), parts);
    }
    for (r, alpha, key) in [(0, 1.0, "lora.r"), (1, 0.0, "lora.lora_alpha"), (1, f64::NAN, "lora.lora_alpha")] {
        let config = LoraConfig { r, lora_alpha: alpha, ..LoraConfig::default() };
        says(&config.resolve(&model).unwrap_err().to_string(), &[key]);
    }
    let plain = LoraConfig { r: 4, lora_alpha: 6.0, ..LoraConfig::default() };
    assert_eq!((plain.scaling(), LoraConfig { use_rslora: true, ..plain }.scaling()), (1.5, 3.0));
}

/// Returns a model with three experts in each of two layers.
fn moe() -> ModelConfig {
    let experts = Experts { num_experts: 3, num_experts_per_tok: 2, moe_intermediate_size: 12, ..Experts::default() };
    let plain = ModelConfig { attention_bias: false, qk_norm: true, ..ModelConfig::default() };
    ModelConfig { experts: Some(experts), num_hidden_layers: 2, hidden_size: 32, ..plain }
}

fn lora_of_experts(modules: Value, parameters: &[&str]) -> LoraConfig {
    LoraConfig { target_parameters: parameters.iter().map(|name| (*name).to_owned()).collect(), ..lora(modules) }
}

#[test]
fn target_parameters_are_resolved_as_peft_does() {
    let model = moe();
    let both = lora_of_experts(json!(["q_proj"]), &["experts.down_proj", "mlp.experts.gate_up_proj"]);
    let names: Vec<String> = both.resolve(&model).unwrap().into_iter().map(|matrix| matrix.name).collect();
    let of_layer = |layer: usize| {
        ["self_attn.q_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            .map(|name| format!("model.layers.{layer}.{name}"))
    };
    assert_eq!(names, [of_layer(0), of_layer(1)].concat());
    // The wrapper of the second parameter encloses that of the first one.
    let tensors = |lora: &LoraConfig| {
        let parameters = lora.parameters(&model).unwrap().into_iter();
        parameters.map(|p| (p.name.replace("base_model.model.model.layers.", ""), p.shape)).collect::<Vec<_>>()
    };
    let of = |name: &str, shape: [usize; 2]| (name.to_owned(), shape.to_vec());
    assert_eq!(
        tensors(&both)[2..6],
        [
            of("0.mlp.experts.base_layer.lora_A.weight", [6, 32]),
            of("0.mlp.experts.base_layer.lora_B.weight", [24, 6]),
            of("0.mlp.experts.lora_A.weight", [6, 12]),
            of("0.mlp.experts.lora_B.weight", [32, 6]),
        ]
    );
    let one = lora_of_experts(json!([]), &["1.mlp.experts.gate_up_proj"]);
    assert_eq!(tensors(&one), [of("1.mlp.experts.lora_A.weight", [6, 32]), of("1.mlp.experts.lora_B.weight", [24, 6])]);
    assert_eq!(one.parameter_names(&model).unwrap(), ["model.layers.1.mlp.experts.gate_up_proj"]);
    assert_eq!(both.parameter_names(&model).unwrap(), ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]);
    assert_eq!(both.target_names(&model).unwrap(), ["q_proj"]);
    for (target, words) in [
        ("mlp.gate.weight", "parameters of experts: mlp.experts.gate_up_proj"),
        ("xperts.down_proj", "parameters of experts"),
        ("q_proj.weight", "parameters of experts"),
    ] {
        let error = lora_of_experts(json!([]), &[target]).resolve(&model).unwrap_err().to_string();
        says(&error, &[target, "lora.target_parameters", words]);
    }
    let dense = lora_of_experts(json!([]), &["down_proj"]).resolve(&Folder::new(qwen2()).model()).unwrap_err();
    says(&dense.to_string(), &["lora.target_parameters", "the model has no experts"]);
    let of_modules = lora(json!(["experts.down_proj"])).resolve(&model).unwrap_err().to_string();
    says(&of_modules, &["not a matrix that can have an adapter here", "for lora.target_parameters"]);
}

/// `mlp.experts.down_proj` is a parameter, and PEFT adapts modules of this name only.
#[test]
fn targets_select_shared_experts_and_layers_without_experts() {
    let shared_expert = Some(SharedExpert::default());
    let experts = Experts { num_experts: 3, shared_expert, ..Experts::default() };
    let dense = LayerSpec { dense_mlp: true, ..LayerSpec::default() };
    let layers = vec![dense, LayerSpec::default()];
    let model = ModelConfig { experts: Some(experts), layers, num_hidden_layers: 2, ..ModelConfig::default() };
    let names = |targets: Value| lora(targets).resolve(&model).unwrap().into_iter().map(|m| m.name).collect::<Vec<_>>();
    let expected = ["0.mlp.down_proj", "1.mlp.shared_expert.down_proj"].map(|name| format!("model.layers.{name}"));
    assert_eq!(names(json!(["down_proj"])), expected);
    assert_eq!(names(json!(".*down_proj")), expected);
    assert!(names(json!("all-linear")).contains(&"model.layers.1.mlp.shared_expert_gate".to_owned()));
    let of_parameters = LoraConfig { target_parameters: vec!["experts.down_proj".into()], ..lora(json!([])) };
    assert_eq!(of_parameters.parameter_names(&model).unwrap(), ["mlp.experts.down_proj"]);
    for target in ["experts.down_proj", "shared_expert", "gate"] {
        assert!(lora(json!([target])).resolve(&model).is_err(), "{target}");
    }
}

#[test]
fn adapters_of_experts_are_read_as_they_were_written() {
    let (model, place) = (moe(), tempfile::tempdir().unwrap());
    let target = place.path().join("adapter");
    for (modules, parameters) in
        [(json!(["q_proj"]), &["experts.down_proj", "experts.gate_up_proj"][..]), (json!([]), &["experts.down_proj"])]
    {
        let lora = lora_of_experts(modules, parameters);
        written(&target, &lora, &model, AdapterOptions { replace: true, ..AdapterOptions::default() });
        let adapter = Adapter::open(&target, &model).unwrap();
        assert_eq!(adapter.matrices(), lora.resolve(&model).unwrap());
        assert_eq!(adapter.config().target_parameters, lora.parameter_names(&model).unwrap());
        let last = adapter.matrices().last().unwrap();
        let (a, b) = (adapter.lora_a(last).unwrap(), adapter.lora_b(last).unwrap());
        assert_eq!((a.shape(), b.shape()), (&[6, 12][..], &[32, 6][..]));
    }
}

/// Writes an adapter of `lora` with ascending values.
fn written(target: &Path, lora: &LoraConfig, model: &ModelConfig, options: AdapterOptions) {
    let mut writer = AdapterWriter::create(target, lora, model, None, options).unwrap();
    for (place, parameter) in lora.parameters(model).unwrap().iter().enumerate() {
        let values: Vec<f32> = (0..parameter.len()).map(|index| (place * 100 + index) as f32).collect();
        writer.write(&parameter.name, &values).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn target_modules_are_written_as_peft_matches_them() {
    let model = Folder::new(qwen2()).model();
    let names = |targets: Value| lora(targets).target_names(&model).unwrap();
    let all = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"];
    assert_eq!(names(json!("all-linear")), all);
    assert_eq!(names(json!(["q_proj", "lm_head"])), ["lm_head", "q_proj"]);
    assert_eq!(names(json!(".*[qv]_proj")), ["q_proj", "v_proj"]);
    let of_one_layer = ["model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"];
    assert_eq!(names(json!(r"model\.layers\.1\..*[qv]_proj")), of_one_layer);
}

#[test]
fn an_adapter_is_read_as_it_was_written() {
    let model = Folder::new(qwen2()).model();
    let place = tempfile::tempdir().unwrap();
    let target = place.path().join("adapter");
    for targets in [json!(["q_proj", "lm_head"]), json!("all-linear"), json!(".*o_proj")] {
        let lora = LoraConfig { use_rslora: true, ..lora(targets) };
        let card = ModelCard { base_model: Some("a/b".into()), text: "An adapter".into() };
        let options =
            AdapterOptions { base_model: Some("a/b".into()), replace: true, card: Some(card), ..Default::default() };
        written(&target, &lora, &model, options);
        let adapter = Adapter::open(&target, &model).unwrap();
        // PEFT finds the matrices by a list of names, whatever they were chosen by.
        let names = TargetModules::Names(lora.target_names(&model).unwrap());
        let expected = LoraConfig { target_modules: names, ..lora.clone() };
        assert_eq!((adapter.config(), adapter.base_model()), (&expected, Some("a/b")));
        assert_eq!(adapter.matrices(), lora.resolve(&model).unwrap());
        let last = adapter.matrices().last().unwrap();
        let (a, b) = (adapter.lora_a(last).unwrap(), adapter.lora_b(last).unwrap());
        assert_eq!((a.shape(), b.shape()), (&[2, last.input][..], &[last.output, 2][..]));
        assert_eq!(b.to_vec()[1] - a.to_vec()[0], 101.0);
        let card = std::fs::read_to_string(target.join("README.md")).unwrap();
        says(&card, &["library_name: peft", "base_model: \"a/b\"", "- grpo", "An adapter"]);
    }
}

/// A folder with PEFT's files: rank 2 on `q_proj` of two layers.
struct PeftFolder(Folder);

impl PeftFolder {
    fn new(fields: Value) -> Self {
        let folder = Folder::new(qwen2());
        let config = json!({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
            "bias": "none", "lora_dropout": 0.05, "rank_pattern": {}, "modules_to_save": null, "use_dora": false,
            "init_lora_weights": true, "base_model_name_or_path": "", "peft_version": "0.21.2"
        });
        folder.json("adapter_config.json", &with(config, fields));
        Self(folder)
    }

    fn tensors(&self) -> Tensors {
        let matrices = lora(json!(["q_proj"])).parameters(&self.0.model()).unwrap();
        matrices.into_iter().map(|p| (p.name, Tensor::of(FileDtype::F32, &p.shape, &[0.5; 32]))).collect()
    }

    fn write(&self, tensors: &Tensors) -> &Self {
        self.0.safetensors("adapter_model.safetensors", tensors);
        self
    }

    fn refused(&self) -> String {
        whole_text(Adapter::open(self.0.path(), &self.0.model()).expect_err("the adapter is damaged"))
    }
}

#[test]
fn unsupported_peft_features_are_refused_by_field() {
    for (fields, parts) in [
        (json!({"peft_type": "IA3"}), ["`peft_type` is \"IA3\"", "LORA"]),
        (json!({"task_type": "SEQ_CLS"}), ["`task_type`", "CAUSAL_LM"]),
        (json!({"bias": "all"}), ["`bias` is \"all\"", "none"]),
        (json!({"use_dora": true}), ["`use_dora` is true", "DoRA"]),
        (json!({"lora_bias": true}), ["`lora_bias` is true", "without biases"]),
        (json!({"rank_pattern": {"q_proj": 4}}), ["`rank_pattern` is {\"q_proj\":4}", "one rank"]),
        (json!({"modules_to_save": ["lm_head"]}), ["`modules_to_save`", "only the adapters"]),
        (json!({"init_lora_weights": "pissa"}), ["`init_lora_weights` is \"pissa\"", "gaussian"]),
        (json!({"layers_to_transform": [0]}), ["`layers_to_transform`", "pattern"]),
        (json!({"r": null}), ["`r` is missing", "whole number"]),
        (json!({"target_modules": null}), ["`target_modules` is missing", "a text or a list"]),
    ] {
        says(&PeftFolder::new(fields).refused(), &[&["adapter_config.json"], &parts[..]].concat());
    }
    says(&PeftFolder::new(json!({"target_modules": ["c_attn"]})).refused(), &["\"c_attn\"", "no such matrix"]);
}

#[test]
fn adapter_tensors_must_match_the_configuration() {
    let folder = PeftFolder::new(json!({}));
    let whole = folder.tensors();
    let name = format!("base_model.model.{Q}.lora_A.weight");
    assert!(whole.contains_key(&name));
    Adapter::open(folder.write(&whole).0.path(), &folder.0.model()).unwrap();
    let damaged = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = whole.clone();
        change(&mut tensors);
        folder.write(&tensors).refused()
    };
    says(&damaged(&|t| drop(t.remove(&name))), &["lacks 1", &name]);
    let renamed = |t: &mut Tensors| {
        let tensor = t.remove(&name).unwrap();
        t.insert(name.replace("lora_A", "lora_A.default"), tensor);
    };
    says(&damaged(&renamed), &["lora_A.default.weight", &format!("nearest name is `{name}`")]);
    let shape = |t: &mut Tensors| drop(t.insert(name.clone(), Tensor::of(FileDtype::F32, &[4, 8], &[0.5; 32])));
    says(&damaged(&shape), &[&name, "[4, 8]", "[2, 16]"]);
    let nan = |t: &mut Tensors| drop(t.insert(name.clone(), Tensor::of(FileDtype::F32, &[2, 16], &[f32::NAN; 32])));
    says(&damaged(&nan), &[&name, "NaN at index 0"]);

    std::fs::remove_file(folder.0.file("adapter_model.safetensors")).unwrap();
    says(&folder.refused(), &["cannot read", "adapter_model.safetensors"]);
    std::fs::write(folder.0.file("adapter_model.bin"), "").unwrap();
    says(&folder.refused(), &["only adapter_model.bin"]);
}

#[test]
fn a_stored_head_of_an_adapter_must_equal_the_models() {
    let folder = PeftFolder::new(json!({"target_modules": ["q_proj", "lm_head"]}));
    let model = folder.0.model();
    let base = folder.0.tensors(FileDtype::F32);
    folder.0.safetensors("model.safetensors", &base);
    let weights = folder.0.open().unwrap().weights().unwrap();
    let mut tensors = folder.tensors();
    for parameter in lora(json!(["lm_head"])).parameters(&model).unwrap() {
        tensors
            .insert(parameter.name.clone(), Tensor::of(FileDtype::F32, &parameter.shape, &vec![0.5; parameter.len()]));
    }
    let check = |tensors: &Tensors| Adapter::open(folder.write(tensors).0.path(), &model).unwrap().check_base(&weights);
    check(&tensors).unwrap();
    let stored = "base_model.model.lm_head.base_layer.weight";
    tensors.insert(stored.into(), base["lm_head.weight"].clone());
    check(&tensors).unwrap();
    tensors.insert(stored.into(), base["model.embed_tokens.weight"].clone());
    says(&check(&tensors).unwrap_err().to_string(), &[stored, "differs from the head"]);
}

#[test]
fn lora_configurations_use_pefts_names() {
    let config: LoraConfig = serde_json::from_value(json!({"target_modules": "all-linear", "r": 8})).unwrap();
    assert_eq!(config, LoraConfig { r: 8, ..LoraConfig::default() });
    assert_eq!(config.target_modules, TargetModules::Pattern("all-linear".into()));
    for zero in [json!(0), json!(0.0)] {
        serde_json::from_value::<LoraConfig>(json!({"lora_dropout": zero})).unwrap().validate().unwrap();
    }
    for dropout in [0.1, -0.1, f64::NAN] {
        let error = LoraConfig { lora_dropout: dropout, ..LoraConfig::default() }.validate().unwrap_err();
        says(&error.to_string(), &["`lora.lora_dropout`", "expected 0", "without dropout", &dropout.to_string()]);
    }
    let error = serde_json::from_value::<LoraConfig>(json!({"use_dora": true})).unwrap_err().to_string();
    says(&error, &["use_dora"]);
}
