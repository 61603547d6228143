//! Planning: budgets, missing plugins, threads, illegal requests.

use crate::evaluation::check;
use crate::{SMALL, backend, chunks, client, grpo, gspo, panels};
use grpo_backend_tpu::PjrtBackend;
use grpo_backend_tpu::plugins::Kind;
use grpo_backend_tpu::program::{MeshShape, MosaicBlocks};
use grpo_core::{Backend, Error, Implementation, LoopOrder, PlanRequest, Tiling};
use grpo_testkit::{Case, Shape};
use rstest::rstest;
use std::process::Command;

fn with_budget(workspace_budget: usize, loop_order: Option<LoopOrder>) -> Tiling {
    Tiling { workspace_budget, loop_order, ..Tiling::default() }
}

/// The compiler's allocation is within the budget, and the results are the same.
#[rstest]
#[ignore = "GRPO_TESTS=all"]
#[case::roomy(1 << 20, None)]
#[case::chunks(400_000, Some(LoopOrder::TokenChunks))]
#[case::panels(400_000, Some(LoopOrder::VocabPanels))]
fn compiled_workspace_is_within_the_budget(#[case] budget: usize, #[case] order: Option<LoopOrder>) {
    for loss in [grpo(), gspo()] {
        let case = Case::new(&loss, &Shape { lengths: &[20, 0, 15, 26, 3], v: 1500, ..SMALL }, 5);
        let request = case.request(&loss, Implementation::Fused, with_budget(budget, order));
        let mut plan = backend().plan(&request).unwrap();
        let memory = plan.memory();
        println!("{:?} within {budget}: {memory:?}", loss.loss_type);
        assert!(memory.workspace <= budget, "{memory:?}");
        assert!(
            memory.inputs >= 4 * (64 * 12 + 1500 * 12) && memory.outputs >= 4 * (64 * 12 + 1500 * 12),
            "{memory:?}"
        );
        check(&format!("within {budget} bytes"), &mut *plan, &case, &loss, request.gradients);
    }
}

#[rstest]
fn impossible_budget_is_an_error(
    #[values(None, Some(LoopOrder::TokenChunks), Some(LoopOrder::VocabPanels))] order: Option<LoopOrder>,
    #[values(1, 100, 2000)] budget: usize,
) {
    let case = Case::new(&grpo(), &SMALL, 5);
    let error = backend().plan(&case.request(&grpo(), Implementation::Fused, with_budget(budget, order))).err();
    match error.expect("no tile fits") {
        Error::Budget { budget: b, minimum, .. } => assert!(b == budget && minimum > budget),
        error => panic!("{error}"),
    }
}

/// The budget is for tiles; implementations without tiles ignore it.
#[rstest]
fn dense_programs_ignore_budgets(#[values(Implementation::Reference, Implementation::Logits)] dense: Implementation) {
    let case = Case::new(&grpo(), &SMALL, 5);
    assert!(backend().plan(&case.request(&grpo(), dense, with_budget(100, None))).is_ok());
}

/// A tile size of the other loop order is refused; the budget applies to panels as to chunks.
#[test]
fn tile_size_of_the_other_loop_order_is_refused() {
    let case = Case::new(&grpo(), &Shape { lengths: &[20, 0, 15, 26, 3], v: 1500, ..SMALL }, 5);
    let panels = with_budget(400_000, Some(LoopOrder::VocabPanels));
    let plan = |tiling| backend().plan(&case.request(&grpo(), Implementation::Fused, tiling));
    let both = Tiling { token_chunk: Some(4), ..panels.clone() };
    assert!(matches!(plan(both), Err(Error::Unsupported { .. })));
    let plan = plan(panels).unwrap();
    assert!(plan.memory().workspace <= 400_000, "{:?}", plan.memory());
}

#[test]
fn illegal_plan_requests_are_refused() {
    let case = Case::new(&grpo(), &SMALL, 5);
    let request = case.request(&grpo(), Implementation::Fused, chunks(0));
    assert!(matches!(backend().plan(&request), Err(Error::Shape { .. })));
    let logits = crate::logits::request(&case, &grpo(), Implementation::Fused);
    assert!(matches!(backend().plan(&logits), Err(Error::Unsupported { .. })));
    let none = PlanRequest { max_tokens: 0, ..case.request(&grpo(), Implementation::Fused, chunks(3)) };
    assert!(matches!(backend().plan(&none), Err(Error::Shape { .. })));
    for (data, tensor) in [(3, 3), (9, 1)] {
        let error = backend().on_mesh(MeshShape { data, tensor }).expect_err("there are eight devices");
        assert!(matches!(&error, Error::Unsupported { what, .. } if what.contains("mesh")), "{error}");
    }
    for (data, tensor) in [(0, 1), (1, 0), (usize::MAX, 2)] {
        let error = backend().on_mesh(MeshShape { data, tensor }).expect_err("no mesh");
        assert!(matches!(&error, Error::Config(text) if text.contains("mesh")), "{error}");
    }
    let error = backend().with_mosaic(MosaicBlocks::default()).expect_err("this is no TPU");
    assert!(matches!(error, Error::Unsupported { .. }));
    let unknown = backend().with_compile_flag("xla_no_such_flag", true);
    let error = unknown.plan(&case.request(&grpo(), Implementation::Fused, chunks(3))).err().expect("no such flag");
    assert!(matches!(&error, Error::Backend { message, .. } if message.contains("xla_no_such_flag")), "{error}");
}

/// Plans of one backend, and calls of plans, in several threads at the same time.
#[test]
fn threads_share_a_backend() {
    let shared: PjrtBackend = backend();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let shared = &shared;
            scope.spawn(move || {
                let loss = if thread % 2 == 0 { grpo() } else { gspo() };
                let tiling = if thread < 2 { chunks(5) } else { panels(16) };
                let case = Case::new(&loss, &SMALL, thread);
                let request = case.request(&loss, Implementation::Fused, tiling);
                let mut plan = shared.plan(&request).unwrap();
                for _ in 0..5 {
                    check(&format!("thread {thread}"), &mut *plan, &case, &loss, request.gradients);
                }
            });
        }
    });
    drop(client());
}

/// Set in the child process of [`a_missing_plugin_says_what_to_run`].
const CHILD: &str = "GRPO_TEST_WITHOUT_PLUGINS";

#[test]
fn a_missing_plugin_says_what_to_run() {
    if std::env::var_os(CHILD).is_some() {
        for kind in Kind::ALL {
            println!("{}", PjrtBackend::open(kind, None).expect_err("nothing is installed"));
        }
        return;
    }
    let cache = std::env::temp_dir().join(format!("grpo-no-plugins-{}", std::process::id()));
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["plans::a_missing_plugin_says_what_to_run", "--exact", "--nocapture"]);
    child.env(CHILD, "1").env("XDG_CACHE_HOME", &cache).env_remove(grpo_backend_tpu::plugins::VARIABLE);
    let output = child.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    for kind in ["cpu", "cuda"] {
        assert!(said.contains(&format!("`grpo plugin install {kind}`")), "{said}");
    }
    assert!(said.contains("`grpo plugin install tpu`") || said.contains("this machine has no TPU"), "{said}");
    // The error names a path that does not exist.
    let error = PjrtBackend::open(Kind::Cpu, Some("/no/such/plugin.so".as_ref())).expect_err("there is no such file");
    assert!(error.to_string().contains("/no/such/plugin.so"), "{error}");
}
