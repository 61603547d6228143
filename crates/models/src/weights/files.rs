//! Finds the weight files of a folder.

use crate::error::{Error, Result};
use crate::folder::fields::Fields;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The file of an unsharded model.
pub(crate) const SINGLE: &str = "model.safetensors";
/// The index of a sharded model, which maps tensors to files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The weight files of a folder.
pub(crate) struct WeightFiles {
    /// The names of the files, sorted.
    pub(crate) names: Vec<String>,
    /// The file of every tensor according to the index, if there is one.
    pub(crate) index: Option<BTreeMap<String, String>>,
}

impl WeightFiles {
    /// Finds `model.safetensors`, or an index and its shards, or shards without an index.
    pub(crate) fn find(folder: &Path) -> Result<Self> {
        let present = entries(folder)?;
        let shards: Vec<String> = present.iter().filter(|name| shard_number(name).is_some()).cloned().collect();
        let fault = |reason: String| Error::weights(folder, reason);
        match (present.contains(SINGLE), present.contains(INDEX)) {
            (true, false) if shards.is_empty() => Ok(Self { names: vec![SINGLE.into()], index: None }),
            (true, has_index) => {
                let other = if has_index { INDEX } else { &shards[0] };
                Err(fault(format!("there are both {SINGLE} and {other}; which of them is the model? Remove the other")))
            }
            (false, true) => Self::of_index(folder, &shards),
            (false, false) if !shards.is_empty() => {
                complete(&shards).map_err(fault)?;
                Ok(Self { names: shards, index: None })
            }
            (false, false) => Err(fault(nothing_found(&present))),
        }
    }

    fn of_index(folder: &Path, shards: &[String]) -> Result<Self> {
        let path = folder.join(INDEX);
        let fault = |reason: String| Error::weights(folder, reason);
        let of_index = |reason: String| Error::weights(&path, reason);
        let fields = Fields::read(&path)?;
        let map = fields.typed("weight_map", "an object", Value::as_object)?;
        let map = fields.required("weight_map", map, "an object with the file of every tensor")?;
        let mut index = BTreeMap::new();
        for (tensor, file) in map {
            // A file name with a folder could lead out of the model's folder.
            let plain = file.as_str().filter(|name| Path::new(name).file_name().is_some_and(|plain| plain == *name));
            let wrong = || of_index(format!("the index gives `{tensor}` the file {file}; expected a file name"));
            index.insert(tensor.clone(), plain.ok_or_else(wrong)?.to_owned());
        }
        let names: BTreeSet<String> = index.values().cloned().collect();
        if names.is_empty() {
            return Err(of_index("the index names no tensor".into()));
        }
        if let Some(extra) = shards.iter().find(|name| !names.contains(*name)) {
            return Err(fault(format!(
                "there is a shard {extra} that {INDEX} does not name: the shards are of two models, or the index is old"
            )));
        }
        for name in &names {
            if !exists(&folder.join(name))? {
                let (count, all) = (index.values().filter(|file| *file == name).count(), index.len());
                let reason =
                    format!("the shard {name} is missing; {INDEX} says that it holds {count} of {all} tensors");
                return Err(fault(reason));
            }
        }
        Ok(Self { names: names.into_iter().collect(), index: Some(index) })
    }
}

/// Checks that shards without an index are complete, by their names.
fn complete(shards: &[String]) -> Result<(), String> {
    let numbers: Vec<(usize, usize)> = shards.iter().filter_map(|name| shard_number(name)).collect();
    let total = numbers[0].1;
    if numbers.iter().any(|&(_, other)| other != total) {
        return Err(format!("there is no {INDEX}, and the shards {} are of several models", shards.join(", ")));
    }
    match (1..=total).find(|number| !numbers.contains(&(*number, total))) {
        Some(missing) => Err(format!("the shard {} is missing, and so is {INDEX}", shard_name(missing, total))),
        None => Ok(()),
    }
}

/// Returns the name of shard `number`, counted from 1.
pub(crate) fn shard_name(number: usize, total: usize) -> String {
    format!("model-{number:05}-of-{total:05}.safetensors")
}

/// Parses a shard's number and the number of all shards from its name.
pub(crate) fn shard_number(name: &str) -> Option<(usize, usize)> {
    let (number, total) = name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten();
    Some((digits(number)?, digits(total)?))
}

/// Returns `true` if the path exists.
pub(crate) fn exists(path: &Path) -> Result<bool> {
    path.try_exists().map_err(|e| Error::io("look for", path, e))
}

fn entries(folder: &Path) -> Result<BTreeSet<String>> {
    let list = || std::fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect::<std::io::Result<Vec<_>>>();
    let names = list().map_err(|e| Error::io("read the folder", folder, e))?;
    Ok(names.into_iter().filter_map(|name| name.into_string().ok()).collect())
}

fn nothing_found(present: &BTreeSet<String>) -> String {
    if let Some(own) = present.iter().find(|name| name.starts_with("consolidated") && name.ends_with(".safetensors")) {
        return format!(
            "there is no {SINGLE} and no {INDEX}, only {own}, which has Mistral's own names of tensors: download model*.safetensors, \
             {INDEX}, config.json and tokenizer.json of the same repository, or convert the folder with \
             src/transformers/models/mistral/convert_mistral_weights_to_hf.py of the repository of transformers"
        );
    }
    let old = present.iter().find(|name| {
        let name = name.as_str();
        (name.starts_with("pytorch_model") && name.ends_with(".bin"))
            || [".pt", ".pth", ".gguf"].iter().any(|end| name.ends_with(end))
    });
    match old {
        Some(name) => format!(
            "there is no {SINGLE} and no {INDEX}, only {name}, which is not read here; transformers converts what it reads \
             with `AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)`"
        ),
        None => format!("there is no {SINGLE} and no {INDEX}"),
    }
}
