//! The text of a kernel and of its custom call.

use super::kernels::*;
use base64::Engine;

#[test]
fn a_kernel_prints_as_generic_mlir() {
    insta::assert_snapshot!(row_max(true).expect("a kernel"));
}

#[test]
fn loops_scalars_and_moves_print() {
    insta::assert_snapshot!(movement().expect("a kernel"));
}

#[test]
fn the_custom_call_contains_text_and_settings() {
    let kernel = movement().expect("a kernel");
    let call = kernel.custom_call();
    assert_eq!((call.target.as_str(), call.has_side_effect, call.row_major), ("tpu_custom_call", true, true));
    let mut config: serde_json::Value = serde_json::from_str(&call.backend_config).expect("JSON");
    let body = config["custom_call_config"]["body"].take();
    let body = base64::engine::general_purpose::STANDARD.decode(body.as_str().expect("a string")).expect("base64");
    assert_eq!(String::from_utf8(body).expect("text"), kernel.to_string());
    let expected = serde_json::json!({
        "custom_call_config": {
            "body": null,
            "serialization_format": 1,
            "needs_layout_passes": true,
            "cost_estimate": { "flops": 1_000_000, "bytes_accessed": 2_000_000, "transcendentals": 3_000 },
        },
        "scoped_memory_configs": [{ "memory_space": 1, "offset": 0, "size": 8 << 20 }],
    });
    assert_eq!(config, expected);
    assert_eq!(in_place().expect("a kernel").custom_call().aliases, [(0, 0)]);
}

#[test]
fn vmem_counts_blocks_twice_and_pads_to_tiles() {
    // Two windows of [16, 128] f32, counted twice, and scratch.
    assert_eq!(row_max(true).expect("a kernel").vmem_bytes(), 5 * 16 * 128 * 4);
    assert_eq!(in_place().expect("a kernel").vmem_bytes(), 4 * 16 * 128 * 2);
}
