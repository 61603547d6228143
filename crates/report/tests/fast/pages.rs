//! The contents of pages.

use crate::support::{Folder, Page, read, rows};
use base64::Engine;
use serde_json::json;
use sha2::{Digest, Sha256};

const EVIL: &str = "</script><script>alert(1)</script><!-- <img src=x onerror='alert(2)'> & \" ]]>";

#[test]
fn text_from_a_run_stays_text() {
    let folder = Folder::new();
    let quoted = serde_json::to_string(EVIL).unwrap();
    let completion = format!(
        "{{\"step\":1,\"prompt\":{quoted},\"completion\":{quoted},\"task\":{quoted},{quoted}:{quoted},\"reward\":null}}\n"
    );
    let metrics = format!("{{\"phase\":{quoted},\"step\":1,{quoted}:1}}\n{}", rows("eval", "eval/<b>", [1.0]));
    let files = [
        ("metrics.jsonl", metrics),
        ("completions.jsonl", completion),
        ("config.yaml", format!("{quoted}: {quoted}\nlist: [{quoted}]\n")),
        ("changes.jsonl", format!("{{\"checkpoint\":{quoted},\"key\":{quoted},\"from\":{quoted},\"to\":1}}\n")),
    ];
    let run = folder.run("<img src=x onerror=alert(3)>", &files);
    let other = folder.run("other", &[("config.yaml", "list: []\n")]);
    for report in [read(&[&run, &other]), read(&[&run]).with_defaults(json!({ "list": EVIL }))] {
        let page = Page::of(&report);
        // Every element in the markup comes from this program, and nothing else is loaded or run.
        let elements = |name: &str| page.html.to_lowercase().matches(name).count();
        assert_eq!([elements("<script"), elements("</script"), elements("<img"), elements("<!--")], [2, 2, 0, 0]);
        assert!(page.texts("code").iter().any(|text| text == EVIL), "{}", page.markup);
        assert_eq!(page.data["runs"][0]["samples"][0]["fields"]["completion"], EVIL);
        assert!(!["href=\"http", "url(", "@import"].iter().any(|word| page.markup.contains(word)));
    }
}

#[test]
fn only_the_script_and_the_style_of_the_page_may_run() {
    let folder = Folder::new();
    let page = Page::of(&read(&[&folder.run("a", &[("config.yaml", "{}")])]));
    for (open, close, directive) in [("<style>", "</style>", "style-src"), ("<script>", "</script>", "script-src")] {
        let (_, rest) = page.html.split_once(open).unwrap();
        let (text, _) = rest.split_once(close).unwrap();
        let hash = base64::engine::general_purpose::STANDARD.encode(Sha256::digest(text));
        assert!(page.markup.contains(&format!("{directive} &#39;sha256-{hash}&#39;")), "{}", page.markup);
        assert_eq!(text.matches("http").count(), text.matches("http://www.w3.org/2000/svg").count());
    }
    // The content security policy forbids `style` attributes.
    assert!(page.markup.contains("default-src &#39;none&#39;") && !page.markup.contains(" style=\""));
    assert!(!include_str!("../../src/page/page.js").contains("innerHTML"));
}

#[test]
fn long_runs_make_small_pages_with_all_extremes() {
    let folder = Folder::new();
    let steps = 20_000u32;
    let value = |step: u32| if step == 12_345 { 1e9 } else { f64::from(step % 17) };
    let completion = "x".repeat(5000);
    let samples: String =
        (1..=1000).map(|step| format!("{{\"step\":{},\"completion\":\"{completion}\"}}\n", step * 20)).collect();
    let metrics = rows("grpo", "reward", (1..=steps).map(value));
    let report = read(&[&folder.run("long", &[("metrics.jsonl", &metrics), ("completions.jsonl", &samples)])]);
    let page = Page::of(&report);
    assert!(page.html.len() < 3_000_000, "{} bytes", page.html.len());
    let grpo = &page.data["runs"][0]["phases"]["grpo"];
    let high = grpo["curves"]["reward"]["high"].as_array().unwrap();
    assert!(high.len() <= 1000 && high.iter().filter(|value| value.as_f64() == Some(1e9)).count() == 1);
    assert_eq!(grpo["steps"][0]["last"].as_array().unwrap().last().unwrap(), steps);
    let shown = page.data["runs"][0]["samples"].as_array().unwrap();
    assert!(shown.len() > 300 && shown.len() < 1000);
    assert_eq!((&shown[0]["step"], &shown.last().unwrap()["step"]), (&json!(20), &json!(20_000)));
    let left = page.data["runs"][0]["left_out"].as_str().unwrap();
    assert!(left.starts_with(&format!("{} of 1000 samples are left out", 1000 - shown.len())), "{left}");
}

#[test]
fn runs_are_compared_by_differing_keys() {
    let folder = Folder::new();
    let metrics = |first: f64, last: f64| {
        let eval = |step: u64, pass: f64| format!("{{\"phase\":\"eval\",\"step\":{step},\"eval/pass@1\":{pass}}}\n");
        format!("{}{}{}", eval(0, first), rows("grpo", "reward", [0.1, 0.2]), eval(2, last))
    };
    let config =
        |beta: &str| format!("seed: 1\nloss: {{ beta: {beta}, loss_type: grpo }}\nwandb: {{ api_key: hunter2 }}\n");
    let run = |name: &str, beta: &str, last: f64| {
        let metrics = ("metrics.jsonl", metrics(0.25, last));
        folder.run(name, &[metrics, ("config.recorded.yaml", config(beta)), ("config.yaml", "x: 1".to_owned())])
    };
    let (a, b) = (run("a", "0.0", 0.5), run("b", "0.04", 0.75));
    std::fs::write(b.join("summary.json"), "{\"seconds\":125.0,\"name\":\"b\"}").unwrap();
    let page = Page::of(&read(&[&a, &b]));
    let keys = page.texts("code");
    assert_eq!(keys, ["loss.beta"], "config.yaml is not what the run was continued with");
    let cells = page.texts("td");
    for text in ["0.04", "finished", "2 min 05 s", "25.0\u{a0}% → 75.0\u{a0}%", "75.0\u{a0}% at step 2", "+50.0 points"]
    {
        assert!(cells.iter().any(|cell| cell == text), "{text} is not in {cells:?}");
    }
    assert!(!page.html.contains("hunter2"), "pages are passed on");
    assert!(page.texts("pre")[1].contains("beta: 0.04"), "{:?}", page.texts("pre"));

    // A single run is compared with the defaults.
    let page = Page::of(&read(&[&b]).with_defaults(json!({ "seed": 1, "loss": { "beta": 0.0, "loss_type": "grpo" } })));
    assert_eq!(page.texts("code"), ["loss.beta", "wandb.api_key"]);
}

#[test]
fn every_metric_is_on_the_page_and_important_ones_come_first() {
    let folder = Folder::new();
    let metrics = "{\"phase\":\"grpo\",\"step\":1,\"zebra\":1,\"reward\":1,\"kl\":2,\"tokens\":10,\"step_time\":0.5}\n\
                   {\"phase\":\"warmup\",\"step\":1,\"loss\":3}\n{\"phase\":\"distill\",\"step\":1,\"loss\":4}\n";
    let page = Page::of(&read(&[&folder.run("a", &[("metrics.jsonl", metrics)])]));
    let phases = page.data["phases"].as_array().unwrap();
    let names: Vec<_> = phases.iter().map(|phase| phase["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["grpo", "warmup", "distill"]);
    assert_eq!(phases[0]["first"], json!(["reward", "kl", "tokens/s", "step_time"]));
    assert_eq!(phases[0]["rest"], json!(["tokens", "zebra"]));
    let cells = page.texts("th");
    for metric in ["zebra", "reward", "kl", "tokens", "tokens/s", "step_time", "loss"] {
        assert!(cells.iter().any(|cell| cell == metric), "{metric} is not in {cells:?}");
    }
}

#[test]
fn the_same_files_make_the_same_page() {
    let folder = Folder::new();
    let metrics = rows("grpo", "reward", [0.5, 1.0]);
    let run = folder.run("a", &[("metrics.jsonl", metrics.as_str()), ("config.yaml", "seed: 1")]);
    assert_eq!(read(&[&run]).html(), read(&[&run]).html());
}

#[test]
fn a_failed_run_shows_its_error_without_secrets() {
    let folders = Folder::new();
    let metrics = rows("grpo", "reward", [0.5, 0.75]);
    let config = "rewards: {http: {j: {url: 'http://u:S3CR3T@h/ok?k=S3CR3T', headers: {X-Key: S3CR3T}}}}";
    let change = r#"{"checkpoint":null,"key":"rewards.http.j.headers.X-Key","from":"S3CR3T","to":"S3CR3T-b"}"#;
    let files = [
        ("metrics.jsonl", metrics.as_str()),
        ("failure.json", r#"{"error": "the device <is> lost", "position": "step-000002"}"#),
        ("config.recorded.yaml", config),
        ("changes.jsonl", change),
    ];
    let run = folders.run("a", &files);
    let page = Page::of(&read(&[&run]));
    assert!(page.texts("pre").iter().any(|text| text == "the device <is> lost"), "{}", page.markup);
    assert!(page.texts("td").iter().any(|text| text == "failed"));
    assert!(!page.html.contains("S3CR3T") && page.html.contains("(hidden)"));
}

#[test]
fn shares_are_named_for_axes_from_0_to_100_percent() {
    let folders = Folder::new();
    let metrics = rows("eval", "eval/pass@1", [0.5])
        + &rows("grpo", "frac_reward_zero_std", [0.5])
        + &rows("grpo", "loss", [0.5]);
    let run = folders.run("a", &[("metrics.jsonl", &metrics)]);
    let page = Page::of(&read(&[&run]));
    assert_eq!(page.data["shares"], serde_json::json!(["eval/pass@1", "frac_reward_zero_std"]));
    assert!(page.html.contains("0.5000") && page.html.contains("50.0\u{a0}%"));
}
