//! The materialised baseline computes the same as the implementation that it is compared with.

use backend_tpu::program::{Blocking, Mesh, Numerics, Pass, Program, Role, Spec};
use grpo_core::backend_api::token_columns::TokenColumns;
use grpo_core::{Dtype, GradientSpec, HeadLayout, Implementation, LossConfig, PolicySpec, TemperatureMode};
use pjrt::install::{Kind, install};
use pjrt::{Buffer, Client, CompileOptions, Plugin};
use std::collections::HashMap;
use testkit::xla_cpu::QUICK;

const N: usize = 6;
const H: usize = 8;
const V: usize = 13;

fn spec(policy: PolicySpec, temperature_mode: TemperatureMode, final_logit_softcapping: Option<f64>) -> Spec {
    let logit_scale = if final_logit_softcapping.is_some() { 1.5 } else { 1.0 };
    Spec {
        loss: LossConfig {
            temperature_mode: Some(temperature_mode),
            logit_scale,
            final_logit_softcapping,
            ..LossConfig::default()
        }
        .into(),
        implementation: Implementation::Reference,
        tokens: N,
        policy,
        gradients: GradientSpec::default(),
        blocking: Blocking::TokenChunks(N),
        mosaic: None,
        numerics: Numerics { entropy: false, ..Numerics::default() },
        mesh: Mesh::default(),
    }
}

/// Pseudo-random numbers in [-1, 1).
fn numbers(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2048) as f32 / 1024.0 - 1.0).collect()
}

fn argument(client: &Client, spec: &Spec, role: Role) -> Buffer {
    let device = &client.addressable_devices()[0];
    let ty = spec.type_of(role);
    let upload = |data: &[f32]| client.buffer_from_host(data, &ty.shape, device).expect("an upload");
    match role {
        // Two sequences; the second token is masked.
        Role::TokenIds => {
            let ids: [i32; 2 * N] = [3, -1, 12, 0, 7, 7, 0, 0, 0, 1, 1, 1];
            client.buffer_from_host(&ids, &ty.shape, device).expect("an upload")
        }
        // Ratios on both sides of the clip range.
        Role::TokenNumbers => {
            let advantages = [0.8, 0.0, -1.2, 0.5, -0.4, 1.0];
            let columns = TokenColumns {
                advantage: advantages,
                token_advantage: advantages,
                policy_weight: [0.2, 0.0, 0.3, 0.1, 0.2, 0.2],
                policy_factor: [1.0; N],
                log_ratio_scale: [1.0; N],
                share: [0.5, 0.0, 0.5, 0.3, 0.3, 0.4],
                clip_share: [1.0, 0.0, 1.0, 1.0, 1.0, 1.0],
                old_logp: [-2.5, 0.0, -2.7, -6.0, -1.0, -3.1],
                reciprocal_temperature: [1.4, 0.0, 1.4, 0.7, 1.0, 1.4],
                ..TokenColumns::default()
            };
            upload(&columns.iter().flatten().copied().collect::<Vec<f32>>())
        }
        Role::OnPolicy => client.buffer_from_host(&[false], &ty.shape, device).expect("an upload"),
        Role::Hidden | Role::LmHead | Role::Logits => upload(&numbers(ty.elements(), role as usize + 1)),
        _ => upload(&vec![0.0; ty.elements()]),
    }
}

fn run(client: &Client, spec: &Spec, program: &Program) -> HashMap<Role, Vec<f32>> {
    let options = QUICK.iter().fold(CompileOptions::default(), |options, (flag, value)| options.with(flag, *value));
    let executable = client.compile(program.module.to_string(), &options).expect("it compiles");
    let arguments: Vec<Buffer> = program.arguments.iter().map(|role| argument(client, spec, *role)).collect();
    let outputs = executable.execute(&[&arguments.iter().collect::<Vec<_>>()]).expect("it runs");
    let values = outputs[0].iter().map(|buffer| buffer.to_vec().expect("a download"));
    program.results.iter().copied().zip(values).collect()
}

#[test]
fn the_baseline_agrees_with_the_reference() {
    let plugin = install(Kind::Cpu, |_| {}).expect("the plugin can be installed").path;
    let client = Plugin::load(plugin).and_then(|plugin| plugin.client(&[])).expect("the CPU opens");
    let hidden = |layout| PolicySpec::Hidden { hidden: H, vocab: V, dtype: Dtype::F32, layout, bias: false };
    for policy in [
        hidden(HeadLayout::VocabHidden),
        hidden(HeadLayout::HiddenVocab),
        PolicySpec::Logits { vocab: V, dtype: Dtype::F32 },
    ] {
        for (mode, cap) in [TemperatureMode::ScaleLogits, TemperatureMode::ScaleLogprobs]
            .into_iter()
            .flat_map(|mode| [None, Some(3.0)].map(|cap| (mode, cap)))
        {
            let spec = spec(policy, mode, cap);
            let reference = run(&client, &spec, &spec.program(Pass::Gradient).expect("a program"));
            let baseline = run(&client, &spec, &spec.materialised_baseline().expect("a program"));
            assert_eq!(baseline.len(), reference.len());
            for (role, expected) in &reference {
                let found = &baseline[role];
                let largest = expected.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
                assert!(largest > 0.01 || *role == Role::Entropy, "{role:?} exercises nothing: {expected:?}");
                let worst = expected.iter().zip(found).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(worst <= 2e-6 * largest.max(1.0), "{policy:?} {mode:?} {role:?}: {worst} of {largest}");
            }
        }
    }
}
