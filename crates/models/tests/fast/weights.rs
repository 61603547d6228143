//! Weights in one file and in shards, valid and damaged.

use crate::support::{Folder, Tensor, Tensors, qwen2, says, with};
use grpo_models::{Dtype, Weights};
use safetensors::Dtype as FileDtype;
use serde_json::{Value, json};

const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const Q: &str = "model.layers.0.self_attn.q_proj.weight";

#[test]
fn weights_are_read_in_every_dtype_and_in_slices() {
    for (file, dtype) in [(FileDtype::F32, Dtype::F32), (FileDtype::BF16, Dtype::Bf16), (FileDtype::F16, Dtype::F16)] {
        let folder = Folder::new(qwen2());
        folder.safetensors("model.safetensors", &folder.tensors(file));
        let weights = folder.open().unwrap().weights().unwrap();
        weights.check(&folder.model()).unwrap();
        weights.check_finite().unwrap();
        let tensor = weights.tensor(Q).unwrap();
        assert_eq!((tensor.name(), tensor.dtype(), tensor.shape()), (Q, dtype, &[16, 16][..]));
        assert_eq!(tensor.bytes().len(), 256 * dtype.size());
        let place = folder.model().parameters().iter().position(|p| p.name == Q).unwrap();
        let expected: Vec<f32> = (0..256).map(|index| ((place * 31 + index * 7) % 255) as f32 / 64.0 - 2.0).collect();
        assert_eq!(tensor.to_vec(), expected);
        let mut piece = [0.0; 100];
        tensor.read(150, &mut piece).unwrap();
        assert_eq!(piece, expected[150..250]);
        let error = tensor.read(200, &mut piece).unwrap_err().to_string();
        says(&error, &[Q, "at most 56 from index 200 on", "got 100"]);
    }
}

#[test]
fn shards_load_with_and_without_an_index() {
    let folder = Folder::sharded();
    let read = || {
        let weights = folder.open().unwrap().weights().unwrap();
        weights.check(&folder.model()).unwrap();
        weights.names().map(|name| (name.to_owned(), weights.tensor(name).unwrap().to_vec())).collect::<Vec<_>>()
    };
    let sharded = read();
    assert_eq!(sharded.len(), folder.model().parameters().len());
    std::fs::remove_file(folder.file(INDEX)).unwrap();
    assert_eq!(read(), sharded);
    std::fs::remove_file(folder.file(FIRST)).unwrap();
    says(&folder.refused(), &["the shard model-00001-of-00002.safetensors is missing", INDEX]);
}

#[test]
fn a_missing_shard_is_named() {
    let folder = Folder::sharded();
    std::fs::remove_file(folder.file(SECOND)).unwrap();
    says(&folder.refused(), &["the shard model-00002-of-00002.safetensors is missing", "it holds 15 of 27 tensors"]);
}

#[test]
fn a_truncated_shard_is_an_error_with_both_lengths() {
    let folder = Folder::sharded();
    let bytes = std::fs::read(folder.file(SECOND)).unwrap();
    for length in [bytes.len() - 1, bytes.len() / 2] {
        std::fs::write(folder.file(SECOND), &bytes[..length]).unwrap();
        let expected = format!("the header describes {} bytes and the file has {length}", bytes.len());
        says(&folder.refused(), &[SECOND, "truncated", &expected]);
    }
    for length in [100, 5] {
        std::fs::write(folder.file(SECOND), &bytes[..length]).unwrap();
        says(&folder.refused(), &[SECOND, "truncated"]);
    }
    std::fs::write(folder.file(SECOND), "").unwrap();
    says(&folder.refused(), &[SECOND, "the file is empty"]);
    std::fs::write(folder.file(SECOND), [bytes.as_slice(), &[0; 8]].concat()).unwrap();
    says(&folder.refused(), &[SECOND, "longer than its header says"]);
}

#[test]
fn invalid_safetensors_files_are_refused() {
    let folder = Folder::whole();
    std::fs::write(
        folder.file("model.safetensors"),
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    )
    .unwrap();
    says(&folder.refused(), &["model.safetensors", "git lfs pull"]);
    std::fs::write(
        folder.file("model.safetensors"),
        [b"\x10\0\0\0\0\0\0\0".as_slice(), b"{\"a\": no json}  "].concat(),
    )
    .unwrap();
    says(&folder.refused(), &["model.safetensors", "not readable as safetensors"]);
}

/// A header of a few bytes could name 2^40 experts without values, and each expert would become a tensor.
#[test]
fn tensors_of_experts_without_values_are_refused() {
    let folder = Folder::whole();
    let path = folder.file("model.safetensors");
    let open = |tensors: Value| {
        let header = tensors.to_string();
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
        Weights::open_file(&path).unwrap_err().to_string()
    };
    let tensor = |dtype: &str, shape: &[u64]| json!({"dtype": dtype, "shape": shape, "data_offsets": [0, 0]});
    for shape in [[1 << 40, 0, 0], [0, 1 << 40, 2]] {
        let error = open(json!({"layers.0.mlp.experts.gate_up_proj": tensor("BF16", &shape)}));
        says(&error, &["`layers.0.mlp.experts.gate_up_proj`", &format!("{shape:?}"), "sizes of at least 1"]);
    }
    for [experts, outputs, groups] in [[0, 2, 1 << 59], [1 << 59, 0, 2]] {
        let error = open(json!({
            "mlp.experts.down_proj_blocks": tensor("U8", &[experts, outputs, groups, 16]),
            "mlp.experts.down_proj_scales": tensor("U8", &[experts, outputs, groups]),
        }));
        says(&error, &["`mlp.experts.down_proj_blocks`", "each at least 1"]);
    }
}

#[test]
fn a_tensor_in_two_shards_is_named() {
    let folder = Folder::sharded();
    let (first, mut second) = folder.halves();
    second.insert(Q.into(), first[Q].clone());
    folder.shards(&first, &second);
    says(&folder.refused(), &[Q, "is in two shards", FIRST, SECOND]);
}

#[test]
fn an_index_and_its_shards_must_agree() {
    let folder = Folder::sharded();
    std::fs::copy(folder.file(FIRST), folder.file("model-00003-of-00003.safetensors")).unwrap();
    says(&folder.refused(), &["there is a shard model-00003-of-00003.safetensors", "does not name"]);

    let folder = Folder::sharded();
    let (mut first, second) = folder.halves();
    folder.shards(&first, &second);
    let tensor = first.remove(Q).unwrap();
    folder.safetensors(FIRST, &first);
    says(&folder.refused(), &[INDEX, Q, FIRST, "it does not"]);

    first.insert(Q.into(), tensor.clone());
    first.insert("model.extra".into(), tensor);
    folder.safetensors(FIRST, &first);
    says(&folder.refused(), &[FIRST, "`model.extra`", "the index does not name"]);

    for (map, parts) in [
        (json!({}), ["names no tensor"].as_slice()),
        (json!({"a": "../a.safetensors"}), &["`a`", "../a.safetensors", "expected a file name"]),
        (json!({"a": 1}), &["`a`", "expected a file name"]),
    ] {
        folder.json(INDEX, &json!({"weight_map": map}));
        says(&folder.refused(), &[&[INDEX], parts].concat());
    }
    folder.json(INDEX, &json!({"metadata": {}}));
    says(&folder.refused(), &[INDEX, "`weight_map` is missing"]);
}

#[test]
fn ambiguous_weight_files_are_refused() {
    let folder = Folder::sharded();
    std::fs::copy(folder.file(FIRST), folder.file("model.safetensors")).unwrap();
    says(&folder.refused(), &["there are both model.safetensors and", INDEX]);
}

/// Returns the error of a folder with one tensor replaced.
fn refused_with(name: &str, others: FileDtype, tensor: Tensor) -> String {
    let folder = Folder::whole();
    let mut tensors = folder.tensors(others);
    tensors.insert(name.into(), tensor);
    folder.safetensors("model.safetensors", &tensors);
    folder.refused()
}

#[test]
fn a_wrong_shape_is_an_error_with_both_shapes() {
    let text = refused_with(Q, FileDtype::F32, Tensor::of(FileDtype::F32, &[16, 8], &[0.0; 128]));
    says(&text, &["model.safetensors", Q, "is [16, 8]", "its configuration makes it [16, 16]"]);
}

#[test]
fn an_unsupported_dtype_is_refused() {
    for (dtype, name) in [(FileDtype::I8, "I8"), (FileDtype::F64, "F64")] {
        let text = refused_with(Q, FileDtype::F32, Tensor::of(dtype, &[16, 16], &[0.0; 256]));
        says(&text, &[Q, &format!("is {name}"), "supported: F32, BF16, F16"]);
    }
}

#[test]
fn unknown_tensors_are_errors_with_the_nearest_name() {
    let folder = Folder::whole();
    let mut tensors = folder.tensors(FileDtype::F32);
    let tensor = tensors.remove(Q).unwrap();
    folder.safetensors("model.safetensors", &tensors);
    says(&folder.refused(), &["lacks 1 of the model's tensors", Q]);
    let add = |mut tensors: Tensors, name: &str| {
        tensors.insert(name.into(), tensor.clone());
        folder.safetensors("model.safetensors", &tensors);
    };
    add(tensors.clone(), "layers.0.self_attn.q_proj.weight");
    says(&folder.refused(), &["`layers.0.self_attn.q_proj.weight`", &format!("the nearest name is `{Q}`")]);
    tensors.insert(Q.into(), tensor.clone());
    add(tensors.clone(), "score.weight");
    let text = folder.refused();
    says(&text, &["does not ask for: `score.weight`"]);
    assert!(!text.contains("nearest"), "{text}");
    // A tensor of old Llama checkpoints that is recomputed instead of loaded.
    add(tensors, "model.layers.0.self_attn.rotary_emb.inv_freq");
    folder.open().unwrap().weights().unwrap().check(&folder.model()).unwrap();

    let weights = Weights::open(folder.path()).unwrap();
    let text = weights.tensor("model.layer.0.self_attn.q_proj.weight").unwrap_err().to_string();
    says(&text, &["has no tensor `model.layer.0.self_attn.q_proj.weight`", Q]);
}

#[test]
fn non_finite_weights_are_found() {
    for (dtype, value, shown) in [
        (FileDtype::F32, f32::NAN, "NaN"),
        (FileDtype::BF16, f32::INFINITY, "inf"),
        (FileDtype::F16, f32::NEG_INFINITY, "-inf"),
    ] {
        let mut values = vec![1.0; 32 * 16];
        values[300] = value;
        values[400] = f32::NAN;
        let text = refused_with("lm_head.weight", dtype, Tensor::of(dtype, &[32, 16], &values));
        says(&text, &["`lm_head.weight`", &format!("holds {shown} at index 300")]);
    }
}

#[test]
fn a_stored_tied_head_must_equal_the_embedding() {
    let folder = Folder::new(with(qwen2(), json!({"tie_word_embeddings": true})));
    let mut tensors = folder.tensors(FileDtype::F32);
    assert!(!tensors.contains_key("lm_head.weight"));
    let check = || folder.open().unwrap().weights().unwrap().check(&folder.model());
    folder.safetensors("model.safetensors", &tensors);
    check().unwrap();
    let embedding = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".into(), embedding.clone());
    folder.safetensors("model.safetensors", &tensors);
    check().unwrap();
    // The same values in another dtype.
    let values: Vec<f32> = embedding.bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    tensors.insert("lm_head.weight".into(), Tensor::of(FileDtype::BF16, &[32, 16], &values));
    folder.safetensors("model.safetensors", &tensors);
    check().unwrap();
    let mut other = values;
    other[511] += 1.0;
    tensors.insert("lm_head.weight".into(), Tensor::of(FileDtype::F32, &[32, 16], &other));
    folder.safetensors("model.safetensors", &tensors);
    says(&check().unwrap_err().to_string(), &["tie_word_embeddings: true", "lm_head.weight differs"]);
}

#[test]
fn a_folder_without_weights_names_unsupported_files() {
    let folder = Folder::new(qwen2());
    says(&folder.refused(), &["there is no model.safetensors and no model.safetensors.index.json"]);
    std::fs::write(folder.file("pytorch_model.bin"), "").unwrap();
    says(&folder.refused(), &["only pytorch_model.bin", "save_pretrained"]);
    // Mistral's own format.
    std::fs::write(folder.file("consolidated.safetensors"), "").unwrap();
    let own = "only consolidated.safetensors, which has Mistral's own names of tensors: download model*.safetensors";
    says(&folder.refused(), &[own, "convert_mistral_weights_to_hf.py"]);
    std::fs::remove_file(folder.file("config.json")).unwrap();
    assert!(!folder.open().unwrap_err().to_string().contains("Mistral"));
    std::fs::write(folder.file("params.json"), "{}").unwrap();
    says(&folder.open().unwrap_err().to_string(), &["no config.json, only params.json of Mistral's own format"]);
}

/// Returns an empty folder of Qwen3-MoE with two experts, or of gpt-oss.
fn experts(family: &str) -> Folder {
    let (kind, class) = match family {
        "qwen" => ("qwen3_moe", "Qwen3MoeForCausalLM"),
        _ => ("gpt_oss", "GptOssForCausalLM"),
    };
    let fields = json!({
        "model_type": kind, "architectures": [class], "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 4,
        "moe_intermediate_size": 24, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "rope_theta": null,
        "use_sliding_window": null, "sliding_window": null, "layer_types": ["full_attention"], "torch_dtype": "float32"
    });
    Folder::new(with(qwen2(), fields))
}

#[test]
fn experts_are_read_from_one_tensor_or_from_one_for_each() {
    let folder = experts("qwen");
    let apart = folder.tensors(FileDtype::F32);
    folder.safetensors("model.safetensors", &apart);
    let read = || {
        let weights = folder.open().unwrap().weights().unwrap();
        weights.check(&folder.model()).unwrap();
        let tensor = |p: grpo_models::Parameter| (weights.tensor(&p.name).unwrap().to_vec(), p.name);
        folder.model().parameters().into_iter().map(tensor).collect::<Vec<_>>()
    };
    let expected = read();
    let prefix = "model.layers.0.mlp.experts";
    let mut fused = apart.clone();
    fused.retain(|name, _| !name.contains("experts"));
    let bytes = |names: &[String]| -> Vec<u8> { names.iter().flat_map(|name| apart[name].bytes.clone()).collect() };
    let of = |parts: &[&str]| -> Vec<String> {
        (0..2).flat_map(|e| parts.iter().map(move |part| format!("{prefix}.{e}.{part}.weight"))).collect()
    };
    for (name, parts, shape) in
        [("gate_up_proj", &["gate_proj", "up_proj"][..], [2, 48, 32]), ("down_proj", &["down_proj"], [2, 32, 24])]
    {
        let tensor = Tensor { dtype: FileDtype::F32, shape: shape.to_vec(), bytes: bytes(&of(parts)) };
        fused.insert(format!("{prefix}.{name}"), tensor);
    }
    folder.safetensors("model.safetensors", &fused);
    assert_eq!(read(), expected);
    let twice = format!("{prefix}.1.up_proj.weight");
    fused.insert(twice.clone(), apart[&twice].clone());
    folder.safetensors("model.safetensors", &fused);
    says(&folder.refused(), &["experts.1.up_proj.weight", "twice"]);
}

#[test]
fn mxfp4_is_dequantised_exactly() {
    let folder = experts("gpt_oss");
    let mut tensors = folder.tensors(FileDtype::BF16);
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    tensors.remove(name);
    // Two experts with 64 columns and 32 rows; byte b of a row has the codes b % 16 and 15 - b % 16.
    let blocks: Vec<u8> = (0..2 * 64 * 16)
        .map(|at| {
            let code = (at % 16) as u8;
            code + 16 * (15 - code)
        })
        .collect();
    let scales: Vec<u8> = (0..2 * 64).map(|row| 127 - 64 + row as u8).collect();
    let mut put = |end: &str, shape: &[usize], bytes: &[u8]| {
        let tensor = Tensor { dtype: FileDtype::U8, shape: shape.to_vec(), bytes: bytes.to_vec() };
        tensors.insert(format!("{name}_{end}"), tensor);
        folder.safetensors("model.safetensors", &tensors);
    };
    put("blocks", &[2, 64, 1, 16], &blocks);
    put("scales", &[2, 64, 1], &scales);
    let weights = folder.open().unwrap().weights().unwrap();
    weights.check(&folder.model()).unwrap();
    weights.check_finite().unwrap();
    let tensor = weights.tensor(name).unwrap();
    assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::Bf16, &[2, 32, 64][..]));
    let values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let number = |code: usize| if code < 8 { values[code] } else { -values[code - 8] };
    for (at, found) in tensor.to_vec().into_iter().enumerate() {
        let (expert, row, column) = (at / (32 * 64), at / 64 % 32, at % 64);
        let code = if row % 2 == 0 { row / 2 } else { 15 - row / 2 };
        assert_eq!(f64::from(found), number(code) * 2f64.powi(expert as i32 * 64 + column as i32 - 64), "{at}");
    }
    put("scales", &[2, 32, 2], &scales);
    says(&folder.refused(), &["gate_up_proj_blocks", "[E, out, in / 32, 16]", "[2, 32, 2]"]);
    put("blocks", &[2, 64, 0, 16], &[]);
    put("scales", &[2, 64, 0], &[]);
    says(&folder.refused(), &["gate_up_proj_blocks", "[2, 64, 0, 16]"]);
    // A scale of 255 is NaN.
    put("blocks", &[2, 64, 1, 16], &blocks);
    put("scales", &[2, 64, 1], &[&[255], &scales[1..]].concat());
    let error = folder.open().unwrap().weights().unwrap().check_finite().unwrap_err().to_string();
    assert!(error.contains(name), "{error}");
}
