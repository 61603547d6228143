//! The section `export` of a run: number types and sizes of the files that it leaves.

use crate::support::{Runs, grpo, json, names, succeed};
use crate::tiny_model::{tensors, train};
use half::bf16;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::Path;

/// The files of weights in a model folder: each tensor's number type, and the file that it is in.
fn stored(folder: &Path) -> BTreeMap<String, (Dtype, String)> {
    let mut stored = BTreeMap::new();
    for file in names(folder).into_iter().filter(|name| name.ends_with(".safetensors")) {
        let bytes = std::fs::read(folder.join(&file)).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            assert!(stored.insert(name, (tensor.dtype(), file.clone())).is_none(), "a tensor is in one file");
        }
    }
    stored
}

#[test]
fn weights_have_the_number_type_and_the_shards_that_are_asked_for_and_are_read_again() {
    let runs = Runs::small();
    let limit = 20_000;
    train(&runs, "model", "a", &["export.dtype=bfloat16", &format!("export.max_shard_size={limit}")]);
    let left = runs.path("a/model");
    let found = stored(&left);
    assert!(found.values().all(|(dtype, _)| *dtype == Dtype::BF16), "{found:?}");
    assert_eq!(json(&left.join("config.json"))["torch_dtype"], "bfloat16");
    let shards: Vec<String> = names(&left).into_iter().filter(|name| name.ends_with(".safetensors")).collect();
    let total = shards.len();
    assert!(total >= 2, "{shards:?}");
    for (number, shard) in shards.iter().enumerate() {
        assert_eq!(*shard, format!("model-{:05}-of-{total:05}.safetensors", number + 1));
        let bytes = std::fs::read(left.join(shard)).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let size: usize = tensors.tensors().iter().map(|(_, tensor)| tensor.data().len()).sum();
        assert!(size <= limit, "{shard} has {size} bytes of weights");
    }
    let index = json(&left.join("model.safetensors.index.json"));
    let places = index["weight_map"].as_object().unwrap();
    assert_eq!(places.len(), found.len());
    for (name, (_, file)) in &found {
        assert_eq!(places[name], **file, "{name}");
    }

    // They are those that were trained, rounded once.
    let wide = ["export.dtype=float32", "export.max_shard_size=5000000000"];
    grpo(["export", &runs.text("a"), "--to", &runs.text("whole")]).set(wide).succeed();
    let whole = runs.path("whole");
    assert!(stored(&whole).values().all(|(dtype, file)| *dtype == Dtype::F32 && file == "model.safetensors"));
    assert!(!whole.join("model.safetensors.index.json").exists());
    let rounded = |values: Vec<f32>| values.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect::<Vec<_>>();
    let trained = tensors(&whole);
    assert_ne!(trained, tensors(&left), "there is something to round");
    assert!(trained.into_iter().map(rounded).collect::<Vec<_>>() == tensors(&left));

    // The next run begins with the shards. Its number type is the model's, unless another one is asked for.
    for (name, settings, dtype) in [("kept", &[][..], Dtype::BF16), ("wide", &["export.dtype=float32"][..], Dtype::F32)]
    {
        train(&runs, "a/model", name, settings);
        let next = runs.path(name).join("model");
        let found = stored(&next);
        assert!(found.values().all(|(of, file)| *of == dtype && file == "model.safetensors"), "{name}: {found:?}");
        let torch = if dtype == Dtype::F32 { "float32" } else { "bfloat16" };
        assert_eq!(json(&next.join("config.json"))["torch_dtype"], torch, "{name}");
        let first = runs.text(&format!("{name}-first"));
        succeed(&["export", &runs.text(name), "--from", "step-000000", "--to", &first]);
        assert!(tensors(Path::new(&first)) == tensors(&left), "{name}");
        assert!(tensors(&next) != tensors(&left), "{name}: it was trained");
    }
}
