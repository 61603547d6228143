//! Opens the input as a safetensors file, and reads every tensor.
#![no_main]

use grpo_models::Weights;
use libfuzzer_sys::fuzz_target;
use std::path::PathBuf;
use std::sync::LazyLock;

/// The file of the current input. The folder is removed by the system.
static FILE: LazyLock<PathBuf> =
    LazyLock::new(|| tempfile::tempdir().expect("a folder").keep().join("model.safetensors"));

fuzz_target!(|input: &[u8]| {
    std::fs::write(&*FILE, input).expect("the file can be written");
    for open in [Weights::open_file, Weights::open_as_stored] {
        let Ok(weights) = open(&FILE) else { continue };
        weights.mapped_dtype();
        for name in weights.names() {
            let stored = weights.bytes(name).map(|(_, bytes)| bytes.len());
            assert!(stored.is_none_or(|length| length <= input.len()));
            let Ok(tensor) = weights.tensor(name) else { continue };
            let values = tensor.to_vec();
            assert_eq!(values.len(), tensor.len());
            assert_eq!(tensor.bytes().len(), tensor.shared_bytes().len());
        }
    }
});
