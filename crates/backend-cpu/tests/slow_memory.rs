//! Compares the memory report with a counting allocator, and proves that the fused head never allocates N x V, nor attention T x T.

use grpo_backend_cpu::CpuBackend;
use grpo_backend_cpu::layers::{AttentionGrad, Heads, Layers, Mixed, Scores, Span};
use grpo_core::*;
use grpo_testkit::allocations::{Allocated, Counting, measured};
use grpo_testkit::cpu::*;
use grpo_testkit::*;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Measures everything from the plan to the gradients; inputs exist before.
fn check(backend: &CpuBackend, case: &Case, request: &PlanRequest, name: &str) {
    let once = || {
        let mut plan = backend.plan(request).unwrap();
        let mut hidden = vec![0.0_f32; case.hidden.len()];
        let mut lm_head = vec![0.0_f32; case.lm_head.len()];
        let mut bias = vec![0.0_f32; case.bias.as_ref().map_or(0, |bias| bias.len())];
        let grads = GradsMut {
            hidden: Some(hidden.as_mut_slice().into()),
            lm_head: Some(lm_head.as_mut_slice().into()),
            bias: case.bias.is_some().then_some(bias.as_mut_slice().into()),
            logits: None,
        };
        plan.value_and_grad(case.policy(), &case.batch, grads).unwrap();
        plan.memory()
    };
    // The first call allocates memory that lives as long as the process, such as the threads' queues.
    once();
    let (report, Allocated { peak, largest }) = measured(once);
    let reported = report.outputs + report.workspace;
    let off = reported as f64 / peak as f64 - 1.0;
    println!("{name}: peak {peak}, reported {reported} ({:+.2} %), largest allocation {largest}", 100.0 * off);
    assert!(off.abs() <= 0.05, "{name}: reported {reported} bytes, measured {peak} ({:+.2} %)", 100.0 * off);
    if request.implementation == Implementation::Fused {
        assert!(report.workspace <= request.tiling.workspace_budget, "{name}");
        let gradient = 4 * case.lm_head.len();
        let dense = 4 * case.batch.tokens() * case.v;
        assert!(largest < dense / 2 || largest == gradient, "{name}: one allocation of {largest}, N x V is {dense}");
        assert!(report.workspace < dense / 2, "{name}: workspace {} beside N x V {dense}", report.workspace);
    }
}

// A single test, because the counters are per process.
#[test]
fn memory_is_as_reported() {
    let backend = CpuBackend::with_threads(2).unwrap();
    let [of_tokens, of_sequences] = [(Dtype::F32, HeadLayout::VocabHidden), (Dtype::Bf16, HeadLayout::HiddenVocab)];
    for ((dtype, layout), loss_type) in [(of_tokens, "grpo"), (of_sequences, "gspo")] {
        let shape = |lengths| Shape { lengths, h: 64, v: 12_000, dtype, layout, ..Shape::default() };
        let case = Case::new(&loss("grpo"), &shape(&[100, 220, 130]), 59);
        let short = Case::new(&loss("grpo"), &shape(&[20, 10]), 59);
        let mut loss = loss(loss_type);
        loss.beta = 0.0;
        let calls = [
            (&short, Implementation::Reference, None, None, 0),
            (&case, Implementation::Logits, None, None, 0),
            (&case, Implementation::Fused, None, None, 8 << 20),
            (&case, Implementation::Fused, Some(LoopOrder::TokenChunks), None, 8 << 20),
            (&case, Implementation::Fused, Some(LoopOrder::VocabPanels), None, 8 << 20),
            (&case, Implementation::Fused, Some(LoopOrder::TokenChunks), Some(64), 8 << 20),
            (&case, Implementation::Fused, Some(LoopOrder::TokenChunks), None, 4 << 20),
            (&case, Implementation::Fused, Some(LoopOrder::VocabPanels), None, 4 << 20),
        ];
        for implementation in Implementation::ALL {
            assert!(calls.iter().any(|call| call.1 == implementation), "{implementation:?} is not measured");
        }
        for (case, implementation, order, chunk, budget) in calls {
            let tiling =
                Tiling { workspace_budget: budget, loop_order: order, token_chunk: chunk, ..Tiling::default() };
            let request = case.request(&loss, implementation, tiling);
            let name = format!("{loss_type} {dtype:?} {layout:?} {implementation:?} {order:?} {chunk:?} {budget}");
            check(&backend, case, &request, &name);
        }
    }
    given_logits(&backend);
    attention_of_a_long_sequence();
}

/// Attention over T rows, forward and backward, allocates far less than scores `[T, T]` of one head.
fn attention_of_a_long_sequence() {
    const T: usize = 4096;
    let (layers, heads) = (Layers::new(), Heads { query: 2, key_value: 1, width: 32 });
    let spans = [Span { rows: 0..100, prefix: 0..0 }, Span { rows: 100..T, prefix: 0..100 }];
    let qkv: Vec<f32> = (0..T * heads.row()).map(|i| (i % 89) as f32 / 45.0 - 1.0).collect();
    let dvalues = vec![0.5; T * 64];
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    let both = || {
        pool.install(|| {
            let Mixed { values, lse } = layers.attention(&qkv, heads, Scores::default(), &spans).unwrap();
            let of = AttentionGrad { qkv: &qkv, values: &values, lse: &lse, dvalues: &dvalues };
            layers.attention_grad(of, heads, Scores::default(), &spans).unwrap()
        })
    };
    both();
    let (_, Allocated { peak, largest }) = measured(both);
    let scores = 4 * T * T;
    println!("attention over {T} rows: peak {peak}, largest allocation {largest}, scores of a head {scores}");
    assert!(peak < scores / 4 && largest < scores / 16, "{peak} and {largest} beside {scores} bytes of scores");
}

fn given_logits(backend: &CpuBackend) {
    let loss = loss("grpo");
    let case = Case::new(&loss, &Shape { lengths: &[30, 34], h: 8, v: 12_000, ..Shape::default() }, 61);
    let (n, v) = (case.batch.tokens(), case.v);
    for implementation in Implementation::ALL.into_iter().filter(takes_logits) {
        let mut logits: Vec<f32> = (0..n * v).map(|i| (i % 97) as f32 / 20.0).collect();
        let request = logits_request(&loss, implementation, Tiling::default(), [n, v], Dtype::F32);
        let separate = || {
            let mut plan = backend.plan(&request).unwrap();
            let mut grad = vec![0.0_f32; n * v];
            let grads = GradsMut { logits: Some(grad.as_mut_slice().into()), ..GradsMut::default() };
            plan.value_and_grad(PolicyInput::Logits(logits.as_slice().into()), &case.batch, grads).unwrap();
            plan.memory()
        };
        separate();
        let (report, Allocated { peak, .. }) = measured(separate);
        let reported = report.outputs + report.workspace;
        let off = reported as f64 / peak as f64 - 1.0;
        println!("{implementation:?} of given logits: peak {peak}, reported {reported} ({:+.2} %)", 100.0 * off);
        assert!(off.abs() <= 0.05, "{implementation:?}: reported {reported} bytes, measured {peak}");
        // Only a chunk's exponentials grow with V; with a chunk of one token, nothing grows with N x V.
        let request = PlanRequest { tiling: Tiling { token_chunk: Some(1), ..Tiling::default() }, ..request };
        let (_, Allocated { peak, .. }) = measured(|| {
            let mut plan = backend.plan(&request).unwrap();
            plan.value_and_grad_in_place(logits.as_mut_slice().into(), &case.batch).unwrap();
        });
        if implementation == Implementation::Logits {
            assert!(peak < n * v / 10, "in place takes {peak} bytes beside {} of logits", 4 * n * v);
        }
    }
}
