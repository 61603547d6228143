//! `policy.mesh`: a run on eight virtual devices of XLA's CPU plugin. No mesh divides the vocabulary of the new model, 53, or its key/value head.

use crate::pjrt_policy::{BESIDE_A_MODEL, SETTINGS, train_on_both};
use crate::support::{Call, assert_has, copy, grpo};
use crate::tiny_model::tensors;

#[test]
#[ignore = "GRPO_TESTS=all"]
fn a_run_learns_the_same_on_a_mesh_and_resumes_on_every_mesh() {
    let of_mesh = ["policy.mesh={data: 2, fsdp: 2, tensor: 2}"];
    let pair = train_on_both(&SETTINGS, &of_mesh, 1e-4, Call::quick_cpu);
    // The same run goes on on another mesh, on one device, and on the host.
    for (name, set) in [
        ("other", &["policy.mesh={fsdp: -1, tensor: 2}", "policy.devices=4", "rollout.mesh={data: 2, tensor: 2}"][..]),
        ("one", &["policy.mesh=null"]),
        ("host", &["policy.device=host", "policy.mesh=null"]),
    ] {
        let name = format!("to-{name}");
        copy(&pair.runs.path("whole"), &pair.runs.path(&name));
        let resumed = pair.runs.resume(&name).args(["--from", "step-000002"]).set(set.iter().copied());
        // Another cache: every program is compiled.
        let cache = format!("policy.compile_cache={}", pair.runs.text(&format!("{name}-programs")));
        let on_host = name == "to-host";
        let said = resumed.set((!on_host).then_some(cache)).quick_cpu().exit(0);
        assert_has(&said.stdout, &["continued from step-000002", "policy."]);
        let of_xla = said.stderr.lines().filter(|line| {
            let number = line.strip_prefix('I').and_then(|line| line.get(..4));
            number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
        });
        assert_eq!(of_xla.collect::<Vec<_>>(), Vec::<&str>::new());
        assert_eq!(pair.runs.metrics(&name).len(), pair.device.len());
    }
    // A model folder has whole tensors with the names of transformers.
    let exported = ["whole", "host"].map(|run| {
        let folder = pair.runs.text(&format!("{run}-exported"));
        grpo(["export", &pair.runs.text(run), "--to", &folder]).quick_cpu().succeed();
        tensors(folder.as_ref()).iter().map(Vec::len).collect::<Vec<_>>()
    });
    assert_eq!(exported[0], exported[1]);
}

#[test]
fn adapters_and_a_value_head_learn_on_a_mesh_with_a_rollout_of_its_own() {
    let of_mesh = ["policy.mesh={fsdp: 4, tensor: 2}", "rollout.mesh={data: 8}"];
    train_on_both(&BESIDE_A_MODEL, &of_mesh, 1e-4, Call::quick_cpu);
}

#[test]
fn a_mesh_that_does_not_fit_is_refused_before_a_plugin_is_loaded() {
    let on = ["policy.device=pjrt:cpu", "policy.plugin=/nowhere.so"];
    for (mesh, parts) in [
        ("policy.mesh={fsdp: 3}", &["policy.mesh.fsdp", "hidden_size 64", "32, 64, got 3"][..]),
        ("policy.mesh={tensor: 4, data: 0}", &["policy.mesh.data", "1 or more"]),
        ("policy.mesh={fsdp: -1, data: -1}", &["policy.mesh", "-1 on one axis"]),
        ("policy.mesh={sequence: 2}", &["policy.mesh.sequence", "unknown"]),
        ("policy.mesh=all", &["policy.mesh", "auto"]),
    ] {
        let error = grpo(["train"]).set(on).set([mesh]).refuse();
        assert_has(&error, parts);
        assert!(!error.contains("/nowhere.so"), "{error}");
    }
    let error = grpo(["train"]).set(["policy.mesh={data: 2}"]).refuse();
    assert_has(&error, &["policy.mesh", "policy.device"]);
    let error = grpo(["train"]).set(["policy.devices=2"]).set(["policy.device=pjrt:cpu"]).refuse();
    assert_has(&error, &["policy.devices", "policy.mesh"]);
}
