use super::*;
use grpo_core::LossConfig;
use proptest::prelude::*;
use serde::Deserialize;
use smart_default::SmartDefault;

impl Configuration for TestConfig {}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct TestConfig {
    seed: u64,
    grpo: Grpo,
    loss: LossConfig,
    optimizer: Optimizer,
}

#[derive(Clone, Debug, SmartDefault, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Grpo {
    #[default(450)]
    max_steps: u64,
    #[default(8)]
    num_generations: usize,
    is_on: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Optimizer {
    learning_rate: f64,
    weight_decay: f64,
}

fn resolve(layers: Result<Layers>) -> Result<TestConfig> {
    layers?.resolve()
}

/// Returns the error with its causes, as the command line prints it.
fn message(result: Result<TestConfig>) -> String {
    let mut text = Vec::new();
    let error = result.unwrap_err();
    let mut next: Option<&dyn std::error::Error> = Some(&error);
    while let Some(error) = next {
        text.push(error.to_string());
        next = error.source();
    }
    text.join(": ")
}

fn set(assignments: &[&str]) -> Result<Layers> {
    Layers::new().set(&assignments.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>())
}

fn env(variables: &[(&str, &str)]) -> Result<Layers> {
    Layers::new().env(variables.iter().map(|(k, v)| (k.into(), v.into())))
}

#[test]
fn later_layers_override_only_their_keys() {
    let layers = Layers::new()
        .text("file", "seed: 1\ngrpo:\n  max_steps: 10\n  num_generations: 4\nloss: {beta: 0.5}\n")
        .and_then(|l| l.env([("GRPO__GRPO__MAX_STEPS".into(), "20".into()), ("PATH".into(), "x".into())].into_iter()))
        .and_then(|l| l.set(&["loss.beta=0".into(), "loss.beta=0.25".into()]));
    let config = resolve(layers).unwrap();
    assert_eq!((config.seed, config.grpo.max_steps, config.grpo.num_generations), (1, 20, 4));
    assert_eq!(config.loss.beta, 0.25);
    assert_eq!(config.optimizer, TestConfig::default().optimizer);
}

#[test]
fn values_have_the_types_of_yaml() {
    let config = resolve(set(&[
        "seed=18446744073709551615",
        "loss.beta=0",
        "loss.delta=1e1",
        "grpo.is_on=true",
        "loss.loss_type=dr_grpo",
        "loss.epsilon_high=null",
        "optimizer={learning_rate: 1e-3, weight_decay: 0}",
    ]))
    .unwrap();
    assert_eq!(config.seed, u64::MAX);
    assert_eq!((config.loss.beta, config.loss.delta, config.loss.epsilon_high), (0.0, Some(10.0), None));
    assert_eq!((config.grpo.is_on, config.loss.loss_type), (true, grpo_core::LossType::DrGrpo));
    assert_eq!((config.optimizer.learning_rate, config.optimizer.weight_decay), (1e-3, 0.0));
    let config = resolve(env(&[("GRPO__SEED", "7"), ("GRPO__GRPO__IS_ON", "true")])).unwrap();
    assert_eq!((config.seed, config.grpo.is_on), (7, true));
    assert_eq!(resolve(Layers::new().text("a.json", r#"{"seed": 4, "loss": {"beta": 0.1}}"#)).unwrap().seed, 4);
}

#[test]
fn unknown_keys_name_the_layer_the_path_and_the_nearest_key() {
    let text = message(resolve(set(&["grpo.max_step=3"])));
    let expected = "in --set grpo.max_step=3: unknown key `grpo.max_step`, did you mean `max_steps`?";
    assert!(text.starts_with(expected), "{text}");
    let text = message(resolve(env(&[("GRPO__LOSS__BETTA", "3")])));
    assert!(text.starts_with("in environment variable GRPO__LOSS__BETTA: unknown key `loss.betta`"), "{text}");
    let text = message(resolve(Layers::new().text("a.yaml", "los:\n  beta: 1\n")));
    assert!(text.starts_with("in a.yaml: unknown key `los`, did you mean `loss`?"), "{text}");
    // Keys are literal: case matters, and a key is not parsed as a path.
    assert!(resolve(Layers::new().text("a.yaml", "Seed: 1")).is_err());
    assert!(resolve(Layers::new().text("a.yaml", "\"loss.beta\": 1")).is_err());
}

#[test]
fn invalid_assignments_and_maps_are_errors() {
    for bad in ["seed", "=3", ".seed=3", "grpo..beta=3", "loss[99999999999]=1", "seed=[1", "seed=*x"] {
        assert!(message(resolve(set(&[bad]))).starts_with(&format!("in --set {bad}: ")), "{bad}");
    }
    assert!(message(resolve(Layers::new().text("a.yaml", "[1, 2]"))).contains("expected a map of keys, got a list"));
    assert!(message(resolve(Layers::new().text("a.yaml", "seed: 1\nseed: 2\n"))).contains("duplicate"));
    let text = message(resolve(Layers::new().text("a.yaml", "grpo:\n\tmax_steps: 1\n")));
    assert!(text.contains("line 2") && !text.contains('\n'), "{text}");
    let text = message(Layers::new().file(Path::new("/nowhere/a.yaml")).and_then(Layers::resolve));
    assert!(text.starts_with("cannot read the configuration /nowhere/a.yaml: "), "{text}");
}

#[test]
fn empty_files_and_sections_change_nothing() {
    let default = TestConfig::default();
    assert_eq!(resolve(Layers::new().text("a.yaml", "")).unwrap(), default);
    assert_eq!(resolve(Layers::new().text("a.yaml", "# all\ngrpo:\n  # max_steps: 3\n")).unwrap(), default);
}

#[test]
fn a_resolved_configuration_round_trips_through_yaml() {
    let config =
        resolve(set(&["seed=18446744073709551615", "optimizer.learning_rate=0.1", "loss.epsilon_high=0.28"])).unwrap();
    let yaml = to_yaml(&config).unwrap();
    assert_eq!(resolve(Layers::new().text("config.yaml", &yaml)).unwrap(), config, "{yaml}");
}

#[test]
fn hostile_yaml_is_refused_within_budget() {
    let mut aliases = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n");
    for i in 1..12 {
        let list = vec![format!("*a{}", i - 1); 10].join(",");
        aliases += &format!("a{i}: &a{i} [{list}]\n");
    }
    for text in [aliases, "- ".repeat(100_000), "[".repeat(100_000), "{a: ".repeat(100_000), "? ".repeat(100_000)] {
        assert!(Layers::new().text("a.yaml", &text).is_err());
    }
}

proptest! {
    #[test]
    fn any_text_is_a_configuration_or_an_error(text in "\\PC{0,200}", yaml in "[-a-z: \\[\\]{}0-9.&*!|>'\"\n#,?%@]{0,80}") {
        for text in [&text, &yaml] {
            let _ = resolve(Layers::new().text("a.yaml", text));
            let _ = resolve(set(&[text]));
            let _ = resolve(set(&[&format!("seed={text}")]));
            let _ = resolve(env(&[(&format!("GRPO__{text}"), text)]));
        }
    }
}

#[test]
fn the_last_layer_that_sets_a_key_is_found() {
    let layers = Layers::new().text("file", "grpo: {max_steps: 1}\nseed: 4").unwrap();
    let layers = layers.set(&["grpo.max_steps=2".into(), "grpo.num_generations=3".into()]).unwrap();
    assert_eq!(layers.get("grpo.max_steps"), Some(&2.into()));
    assert_eq!((layers.get("seed"), layers.get("seed.a"), layers.get("loss")), (Some(&4.into()), None, None));
    assert!(layers.get("grpo").is_some());
}

#[test]
fn an_optional_section_overrides_its_layer_or_is_removed() {
    let text = "grpo: {max_steps: 1, num_generations: 4}\nextra: {grpo: {max_steps: 2}, seed: 5}\n";
    let resolved = |keep| {
        let layers = Layers::new().text("file", text).and_then(|layers| layers.set(&["seed=9".into()]));
        resolve(layers.and_then(|layers| layers.optional_section("extra", keep))).unwrap()
    };
    let (kept, left_out) = (resolved(true), resolved(false));
    assert_eq!((kept.grpo.max_steps, kept.grpo.num_generations, kept.seed), (2, 4, 9));
    assert_eq!((left_out.grpo.max_steps, left_out.grpo.num_generations, left_out.seed), (1, 4, 9));
    let misspelt = Layers::new().text("a.yaml", "extra: {grpo: {max_step: 2}}").unwrap();
    let text = message(resolve(misspelt.optional_section("extra", true)));
    assert!(text.contains("a.yaml: section `extra`") && text.contains("did you mean `max_steps`?"), "{text}");
    let scalar = Layers::new().text("a.yaml", "extra: 3").unwrap();
    assert!(message(resolve(scalar.optional_section("extra", false))).contains("expected a map of keys"));
}

#[test]
fn layers_are_stacked_over_other_layers_and_given_defaults() {
    let lower = Layers::new().text("lower", "{seed: 1, grpo: {max_steps: 1}}").unwrap();
    let upper = Layers::new().text("upper", "{grpo: {max_steps: 2}}").unwrap();
    let mut defaults = TestConfig::default();
    defaults.grpo.num_generations = 3;
    let config = upper.over(lower).resolve_over(defaults).unwrap();
    assert_eq!((config.seed, config.grpo.max_steps, config.grpo.num_generations), (1, 2, 3));
}

#[test]
fn errors_name_the_key_of_a_secret_without_its_value() {
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    struct Endpoint {
        url: String,
        headers: std::collections::BTreeMap<String, String>,
        command: Vec<String>,
    }
    impl Configuration for Endpoint {}
    let message = |layers: Result<Layers>| {
        let error = layers.and_then(|layers| layers.resolve::<Endpoint>()).unwrap_err();
        format!("{error}: {}", std::error::Error::source(&error).unwrap())
    };
    for bad in [
        "headers=S3CR3T",
        "headers=[S3CR3T]",
        "command=judge.py --key S3CR3T",
        "headers.A={b: S3CR3T}",
        "headers={A: S3CR3T",
        "url={a: S3CR3T}x",
        "command: [S3CR3T]",
        "url=[http://u:S3CR3T@h/]",
        "headers.A=[S3CR3T]",
    ] {
        let text = message(set(&[bad]));
        assert!(!text.contains("S3CR3T") && text.starts_with("in --set "), "{text}");
    }
    let text = message(Layers::new().text("a.yaml", "headers: S3CR3T"));
    assert_eq!(text, "in a.yaml: key `headers`: expected a map of keys, got the text \"(hidden)\"");
}

#[test]
fn published_yaml_has_no_secrets() {
    let config = serde_json::json!({ "rate": 0.1, "headers": { "A": "S3CR3T" } });
    assert_eq!(to_yaml(&config).unwrap(), "rate: 0.1\nheaders:\n  A: (hidden)\n");
    assert_eq!(to_yaml_with_secrets(&config).unwrap(), "rate: 0.1\nheaders:\n  A: S3CR3T\n");
}
