use crate::{Configuration, Layers};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Example {
    seed: u64,
    small: u32,
    share: f64,
    name: Option<String>,
    is_on: bool,
    sizes: Vec<usize>,
    names: Vec<String>,
    path: std::path::PathBuf,
    programs: BTreeMap<String, Program>,
    kind: Kind,
    nested: Nested,
    choice: Option<Choice>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Program {
    command: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    #[default]
    Cosine,
    Linear,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Nested {
    plain: f64,
    #[serde(flatten)]
    flat: Flat,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
struct Flat {
    tau: f64,
    sizes: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a name, or a list of names")]
enum Choice {
    One(String),
    Many(Vec<String>),
}

impl Configuration for Example {}

/// Returns the error of a configuration file.
fn fault(text: &str) -> String {
    let error = Layers::new().text("a.yaml", text).unwrap().resolve::<Example>().unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(error.to_string(), "in a.yaml");
    cause
}

#[test]
fn type_errors_name_key_expected_type_and_value() {
    for (text, expected) in [
        ("seed: many", "key `seed`: expected a whole number that is not negative, got the text \"many\""),
        ("seed: -1", "key `seed`: expected a whole number that is not negative, got the number -1"),
        ("seed: 1.5", "key `seed`: expected a whole number that is not negative, got the number 1.5"),
        ("seed: [1]", "key `seed`: expected a whole number that is not negative, got a list"),
        ("seed: {a: 1}", "key `seed`: expected a whole number that is not negative, got a map"),
        ("seed: null", "key `seed`: expected a whole number that is not negative, got nothing (null)"),
        ("small: 5000000000", "key `small`: expected a whole number of at most 4294967295, got the number 5000000000"),
        ("share: true", "key `share`: expected a number, got true"),
        ("name: 3", "key `name`: expected a text, got the number 3"),
        ("is_on: 'true'", "key `is_on`: expected true or false, got the text \"true\""),
        ("path: 3", "key `path`: expected a path, got the number 3"),
        ("programs: judge.py", "key `programs`: expected a map of keys, got the text \"judge.py\""),
        ("nested: [1, 2]", "key `nested`: expected a map of keys, got a list"),
        ("nested: 3", "key `nested`: expected a map of keys, got the number 3"),
        ("kind: sine", "key `kind`: unknown variant `sine`, expected `cosine` or `linear`"),
        ("kind: 3", "key `kind`: expected `cosine` or `linear`, got the number 3"),
        ("programs: {x: {}}", "key `programs.x.command`: expected a value, and the key is missing"),
        ("nested: {tau: hot}", "key `nested.tau`: expected a number, got the text \"hot\""),
        (
            "nested: {plain: 1, tau: 2, sizes: 3}",
            "key `nested.sizes`: expected a list, got the number 3, e.g. `sizes: [3]`",
        ),
        ("choice: 3", "key `choice`: expected a name, or a list of names, got the number 3"),
        ("sizes: [1, two]", "key `sizes[1]`: expected a whole number that is not negative, got the text \"two\""),
    ] {
        assert_eq!(fault(text), expected, "{text}");
    }
}

#[test]
fn a_text_instead_of_a_list_is_an_error_with_the_list() {
    for (text, expected) in [
        ("names: judge", "got the text \"judge\", e.g. `names: [judge]`"),
        ("names: a, b c", "got the text \"a, b c\", e.g. `names: [a, \"b c\"]`"),
        ("names: a b", "e.g. `names: [a, b]`"),
        ("sizes: '1,8'", "key `sizes`: expected a list, got the text \"1,8\", e.g. `sizes: [1, 8]`"),
        ("sizes: 8", "key `sizes`: expected a list, got the number 8, e.g. `sizes: [8]`"),
        (
            "programs: {x: {command: python3 judge.py}}",
            "key `programs.x.command`: expected a list, got the text \"python3 judge.py\", e.g. `command: [python3, judge.py]`",
        ),
        ("programs: {x: {command: './my judge.sh'}}", "e.g. `command: [./my, judge.sh]`"),
        (
            "programs: {x: {command: \"'./judge.sh' -m mod.ule --fast\"}}",
            "e.g. `command: [./judge.sh, -m, mod.ule, --fast]`",
        ),
        ("programs: {x: {command: python3 'judge.py}}", "e.g. `command: [python3, \"(hidden)\"]`"),
        (
            "programs: {x: {command: 3}}",
            "key `programs.x.command`: expected a list, got the number 3, e.g. `command: [3]`",
        ),
    ] {
        let fault = fault(text);
        assert!(fault.ends_with(expected), "{text}: {fault}");
    }
    for text in ["names: ''", "names: {a: 1}", "names: true", "programs: {x: {command: ''}}"] {
        let fault = fault(text);
        assert!(fault.contains("expected a list, got ") && !fault.contains("e.g."), "{text}: {fault}");
    }
}

#[test]
fn examples_have_no_secrets() {
    for command in [
        "judge.py --key S3CR3T",
        "judge.py --key=S3CR3T",
        "KEY=S3CR3T judge.py",
        "judge.py S3CR3T",
        "sh -c 'curl -H S3CR3T'",
    ] {
        let fault = fault(&format!("programs: {{x: {{command: \"{command}\"}}}}"));
        assert!(!fault.contains("S3CR3T") && fault.contains("`programs.x.command`: expected a list"), "{fault}");
    }
}
