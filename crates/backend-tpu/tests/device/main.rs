//! Tensors that stay on the devices of XLA's CPU.

use grpo_backend_tpu::aot::Variant;
use grpo_backend_tpu::plugins::{self, Kind};
use grpo_backend_tpu::program::{MeshShape, Numerics, Pass, Role, Spec};
use grpo_backend_tpu::{PjrtBackend, PjrtPlan, PjrtTensor};
use grpo_core::batch::{Advantages, TokenBatch};
use grpo_core::{
    Dtype, Error, GradientSpec, GradsMut, HeadLayout, Implementation, LossConfig, PlanRequest, PolicyInput, PolicySpec,
    TensorRef, Tiling,
};
use grpo_pjrt::Client;
use grpo_testkit::margin::{assert_below, largest_difference};
use grpo_testkit::xla_cpu::{flags, program_cache};
use half::bf16;

const N: usize = 6;
const H: usize = 3;
const V: usize = 5;

/// Opens a client with virtual devices.
fn client(devices: i64) -> Client {
    plugins::install(Kind::Cpu, |_| {}).expect("XLA's CPU plugin can be installed");
    plugins::client(Kind::Cpu, None, &[("cpu_device_count", devices.into())]).expect("there is a CPU")
}

fn backend() -> PjrtBackend {
    let backend = PjrtBackend::new(Kind::Cpu, client(1)).expect("there is a CPU").with_compile_cache(program_cache());
    flags().into_iter().fold(backend, |backend, (flag, value)| backend.with_compile_flag(flag, value))
}

fn request(dtype: Dtype) -> PlanRequest {
    PlanRequest {
        loss: LossConfig::default().into(),
        implementation: Implementation::Fused,
        tiling: Tiling { token_chunk: Some(2), ..Tiling::default() },
        max_tokens: N,
        policy: PolicySpec::Hidden { hidden: H, vocab: V, dtype, layout: HeadLayout::VocabHidden, bias: false },
        gradients: GradientSpec::default(),
    }
}

fn hidden() -> Vec<f32> {
    (0..N * H).map(|i| ((i * 7 % 11) as f32 - 5.0) / 4.0).collect()
}

fn lm_head() -> Vec<f32> {
    (0..V * H).map(|i| ((i * 5 % 13) as f32 - 6.0) / 4.0).collect()
}

fn batch() -> TokenBatch {
    let batch = TokenBatch::packed((0..N as i64).map(|i| i % V as i64).collect(), vec![0, 2, N]).expect("offsets");
    let batch = batch.with_advantages(Advantages::PerSequence(vec![1.0, -0.5])).expect("two sequences");
    batch.with_old_logp((0..N).map(|i| -1.0 - 0.3 * i as f32).collect()).expect("as many as tokens")
}

/// Uploads the inputs.
fn inputs(plan: &PjrtPlan) -> [PjrtTensor; 2] {
    let upload = |role, values: &[f32]| plan.upload(role, N, TensorRef::F32(values)).expect("the role's length");
    [upload(Role::Hidden, &hidden()), upload(Role::LmHead, &lm_head())]
}

fn policy(inputs: &[PjrtTensor; 2]) -> PolicyInput<'_> {
    PolicyInput::Hidden { hidden: TensorRef::Device(&inputs[0]), lm_head: TensorRef::Device(&inputs[1]), bias: None }
}

fn grads(sums: &mut [PjrtTensor; 2]) -> GradsMut<'_> {
    let [hidden, lm_head] = sums.each_mut().map(|tensor| Some(tensor.into()));
    GradsMut { hidden, lm_head, ..GradsMut::default() }
}

fn zeros(plan: &PjrtPlan) -> [PjrtTensor; 2] {
    [Role::GradHidden, Role::GradLmHead].map(|role| plan.zeros(role, N).expect("memory"))
}

fn assert_close(found: &[f32], expected: &[f32]) {
    let [found, expected] = [found, expected].map(|list| list.iter().copied().map(f64::from).collect::<Vec<_>>());
    let largest = expected.iter().fold(0.0_f64, |most, value| most.max(value.abs()));
    assert!(largest > 1e-3, "nothing to compare with");
    assert_below("gradients", largest_difference(&found, &expected) / largest, 1e-5);
}

#[test]
fn device_gradients_accumulate_in_the_dtype_of_the_plan() {
    let numerics = Numerics { gradients: Dtype::Bf16, ..Numerics::default() };
    let in_f32 = backend();
    let in_bf16 = in_f32.clone().with_numerics(numerics);
    let (mut plan, mut rounded) = (
        in_f32.plan_on_device(&request(Dtype::Bf16)).expect("f32"),
        in_bf16.plan_on_device(&request(Dtype::Bf16)).expect("bf16"),
    );
    let narrow = |values: Vec<f32>| -> Vec<bf16> { values.into_iter().map(bf16::from_f32).collect() };
    let inputs = [(Role::Hidden, narrow(hidden())), (Role::LmHead, narrow(lm_head()))]
        .map(|(role, values)| plan.upload(role, N, TensorRef::Bf16(&values)).expect("the role's length"));
    let (mut sums, mut rounded_sums) = (zeros(&plan), zeros(&rounded));
    plan.value_and_grad_on_device(policy(&inputs), &batch(), grads(&mut sums)).expect("a step");
    rounded.value_and_grad_on_device(policy(&inputs), &batch(), grads(&mut rounded_sums)).expect("a step");
    for (sum, rounded) in sums.iter().zip(&rounded_sums) {
        let (sum, rounded) = (sum.to_host().expect("on the host"), rounded.to_host().expect("on the host"));
        let scale = sum.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        assert!(sum.iter().zip(&rounded).all(|(a, b)| (a - b).abs() <= 0.02 * scale) && scale > 1e-3);
        assert!(rounded.iter().all(|value| bf16::from_f32(*value).to_f32() == *value) && rounded != sum);
    }
    let refused = rounded.value_and_grad_on_device(policy(&inputs), &batch(), grads(&mut sums));
    assert!(matches!(refused, Err(Error::Shape { .. })), "{refused:?}");
}

/// Tensors of another client are refused before anything is donated.
#[test]
fn tensors_of_another_client_are_refused_and_not_lost() {
    let (mine, other) = (backend(), backend());
    let mut plan = mine.plan_on_device(&request(Dtype::F32)).expect("a plan");
    let inputs = inputs(&plan);
    let mut sums = zeros(&plan);
    let mut foreign = zeros(&other.plan_on_device(&request(Dtype::F32)).expect("a plan"));
    let [hidden, lm_head] = [&mut sums[0], &mut foreign[1]].map(|tensor| Some(tensor.into()));
    let mixed = GradsMut { hidden, lm_head, ..GradsMut::default() };
    let refused = plan.value_and_grad_on_device(policy(&inputs), &batch(), mixed);
    assert!(matches!(&refused, Err(Error::Unsupported { what, .. }) if what.contains("grad_lm_head")), "{refused:?}");
    assert!(foreign.iter().chain(&sums).all(|sum| sum.to_host().expect("still there").iter().all(|g| *g == 0.0)));
    plan.value_and_grad_on_device(policy(&inputs), &batch(), grads(&mut sums)).expect("a step");
    // A clone of the backend has the same devices.
    let mut twin = mine.clone().plan_on_device(&request(Dtype::F32)).expect("a plan");
    twin.value_and_grad_on_device(policy(&inputs), &batch(), grads(&mut sums)).expect("a step");
}

#[test]
fn a_mesh_without_devices_is_refused() {
    for (data, tensor) in [(0, 1), (1, 0), (usize::MAX, 2)] {
        let mesh = MeshShape { data, tensor };
        assert!(matches!(backend().on_mesh(mesh), Err(Error::Config(_))), "{mesh:?}");
    }
    let variant = Variant {
        request: request(Dtype::F32),
        numerics: Numerics::default(),
        mosaic: None,
        mesh: MeshShape { data: 0, tensor: 1 },
        pass: Pass::Gradient,
        build: Spec::program,
    };
    assert!(matches!(variant.spec(), Err(Error::Config(text)) if text.contains("mesh.data")));
}

/// Each mesh runs with one of the requests.
#[test]
fn every_mesh_matches_the_gradients_of_one_device() {
    assert_meshes(&[&[(8, 1), (2, 4)], &[(1, 8), (3, 1)], &[(4, 2), (2, 2)]]);
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn every_mesh_matches_every_gradient_of_one_device() {
    let all = [(8, 1), (1, 8), (2, 4), (4, 2), (2, 2), (3, 1)];
    assert_meshes(&[&all; 3]);
}

/// Compares the gradients of three requests on their meshes. Shards are padded, because neither 6 tokens nor 5 entries divide evenly.
fn assert_meshes(meshes: &[&[(usize, usize)]; 3]) {
    let one = PjrtBackend::new(Kind::Cpu, client(8)).expect("a device").with_compile_cache(program_cache());
    let step = |backend: &PjrtBackend, request: &PlanRequest| {
        let mut plan = backend.plan_on_device(request).expect("a plan");
        let inputs = inputs(&plan);
        let mut sums = zeros(&plan);
        let output = plan.value_and_grad_on_device(policy(&inputs), &batch(), grads(&mut sums)).expect("a step");
        (output.loss, sums.map(|sum| sum.to_host().expect("on the host")))
    };
    let panels = Tiling { vocab_block: Some(2), ..Tiling::default() };
    let dense = PlanRequest { implementation: Implementation::Reference, ..request(Dtype::F32) };
    let requests = [request(Dtype::F32), PlanRequest { tiling: panels, ..request(Dtype::F32) }, dense];
    for (request, meshes) in requests.into_iter().zip(meshes) {
        let (loss, expected) = step(&one, &request);
        assert!(loss.abs() > 1e-3, "{loss}");
        for &(data, tensor) in *meshes {
            let backend = one.clone().on_mesh(MeshShape { data, tensor }).expect("eight devices");
            let (found_loss, found) = step(&backend, &request);
            assert_below("loss", (found_loss - loss).abs() / loss.abs(), 1e-5);
            found.iter().zip(&expected).for_each(|(found, expected)| assert_close(found, expected));
        }
    }
}

grpo_testkit::tiers!();

struct XlaCpu;

impl grpo_core::contract::Fixture for XlaCpu {
    type Backend = PjrtBackend;

    fn backend() -> PjrtBackend {
        backend()
    }
}

mod contract {
    grpo_core::contract_tests!(super::XlaCpu);
}
