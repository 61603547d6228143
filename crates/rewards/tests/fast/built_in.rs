//! Every built-in reward, for right and wrong completions.

use crate::support::{refused, rewards, score, total};
use grpo_data::Item;
use serde_json::json;

#[test]
fn rewards_score_right_and_wrong_completions() {
    for (reward, answer, completion, expected) in [
        ("exact", "Paris", "<answer> Paris </answer>", 1.0),
        ("exact", "Paris", "paris", 0.0),
        ("exact", "Paris", "The answer is Paris.", 1.0),
        ("exact", "Paris", "", 0.0),
        ("numeric", "1200", "so she has 1,200 apples left in the end, which is what was asked for.", 1.0),
        ("numeric", "18", "He makes 9 * 2 = $18.00 a day.\n#### 18", 1.0),
        ("numeric", "18", "#### 19", 0.0),
        ("numeric", "18", "I do not know", 0.0),
        ("numeric", "0.25", "the answer is 25%", 1.0),
        ("numeric", "25", "the answer is 25%", 1.0),
        ("numeric", "-3", "\\boxed{\u{2212}3}", 1.0),
        ("numeric", "5", "-5", 0.0),
        ("numeric", "x = 72\n#### 72", "72", 1.0),
        ("correct", "\\frac{1}{2}", "Half of it, so $\\boxed{0.5}$.", 1.0),
        ("correct", "Evelyn", "The answer is \\text{Evelyn}", 1.0),
        ("correct", "Evelyn", "The answer is Eve", 0.0),
        ("correct", "#### 5", "5", 1.0),
        // The last number of a short sentence is also its answer, if there are words before it and it is not a formula or a list.
        ("correct", "1000", "It is 1,000.", 1.0),
        ("correct", "7", "I think **7**", 1.0),
        ("correct", "7", "I think it is 17", 0.0),
        ("correct", "2", "pi/2", 0.0),
        ("correct", "12", "\\sqrt{12}", 0.0),
        ("correct", "4", "3 and 4", 0.0),
        ("correct", "Room 12", "Room 12", 1.0),
        ("correct", "\\{1, 2\\}", "{2, 1}", 1.0),
        ("think_format", "", "<think>a\nb</think>\n<answer>c</answer>", 1.0),
        ("think_format", "", "<think></think><answer></answer>\n", 1.0),
        ("think_format", "", "Well: <think>a</think><answer>c</answer>", 0.0),
        ("think_format", "", "<think>a</think><answer>c</answer> done", 0.0),
        ("think_format", "", "<think>a</think>", 0.0),
        ("tag_count", "", "<think>a</think><answer>c</answer>", 1.0),
        ("tag_count", "", "<think><think>a</think><answer>c</answer>", 0.75),
        ("tag_count", "", "</think>", 0.25),
        ("tag_count", "", "", 0.0),
    ] {
        let found = total(json!({reward: 1.0}), answer, completion);
        assert_eq!(found, Some(expected), "{reward}: {completion:?} for {answer:?}");
    }
    assert_eq!(total(json!({"numeric": 1.0}), "no number", "5"), None, "there is nothing to compare with");
    assert_eq!(score(&rewards(json!({"correct": 1.0})), &Item::new("?"), &["5"])[0].total, None, "no reference");
}

#[test]
fn settings_change_scores() {
    let normalized = json!({"normalized": 1.0, "answer_from": "completion"});
    let loose = json!({"numeric": 1.0, "numeric_tolerance": 0.01});
    let (json, block) = (json!({"json": {}}), json!({"json": {"block": true, "required_keys": ["a"]}}));
    for (keys, answer, completion, expected) in [
        (&normalized, "The U.S. Senate", " the us  senate!", 1.0),
        (&normalized, "an apple", "Apple", 1.0),
        (&normalized, "two apples", "apple", 0.0),
        (&loose, "3.14159", "3.14", 1.0),
        (&loose, "3.14159", "3.0", 0.0),
        (&json, "", " {\"a\": [1, 2]}\n", 1.0),
        (&json, "", "{\"a\": [1, 2]", 0.0),
        (&json, "", "{'a': 1}", 0.0),
        (&block, "", "```json\n{\"b\": 1}\n```, or rather\n```json\n{\"a\": 1}\n```", 1.0),
        (&block, "", "```json\n{\"a\": 1}\n```, or rather\n```json\n{\"b\": 1}\n```", 0.0),
        (&block, "", "```json\n{\"a\": 1}", 0.0),
        (&block, "", "{\"a\": 1}", 0.0),
        (&block, "", "```json\n[1]\n```", 0.0),
    ] {
        assert_eq!(total(keys.clone(), answer, completion), Some(expected), "{keys}: {completion:?} for {answer:?}");
    }
}

#[test]
fn length_penalises_the_distance_from_the_target() {
    // A completion of n letters has n + 1 tokens here.
    let cases = |mode: &str| {
        let keys = json!({"length": {"target": 4, "mode": mode}});
        ["", "a", "abc", "abcd", "abcdefghijkl"].map(|text| total(keys.clone(), "", text).unwrap())
    };
    assert_eq!(cases("exact"), [-0.75, -0.5, 0.0, -0.25, -1.0]);
    assert_eq!(cases("max"), [0.0, 0.0, 0.0, -0.25, -1.0]);
    assert_eq!(cases("min"), [-0.75, -0.5, 0.0, 0.0, 0.0]);
}

#[test]
fn regular_expressions_have_names_and_weights() {
    let rewards = rewards(json!({"regex": {
        "polite": {"pattern": "(?i)thank you", "weight": 0.5},
        "digits": {"pattern": r"\A\d+\z"},
    }}));
    assert_eq!(rewards.names().collect::<Vec<_>>(), ["digits", "polite"]);
    let scored = score(&rewards, &Item::new("?"), &["42", "Thank You", "42 x"]);
    assert_eq!(scored.iter().map(|reward| reward.total.unwrap()).collect::<Vec<_>>(), [1.0, 0.5, 0.0]);
    let error = refused(json!({"regex": {"broken": {"pattern": "a(b"}}}));
    assert!(error.contains("rewards.regex.broken.pattern") && error.contains("unclosed group"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
}

#[test]
fn errors_of_invalid_settings_name_the_key() {
    for (keys, key) in [
        (json!({"numeric": 1.0, "numeric_tolerance": -1.0}), "rewards.numeric_tolerance"),
        (json!({"length": {"target": 0}}), "rewards.length.target"),
        (json!({"regex": {"a b": {"pattern": "x"}}}), "rewards.regex"),
        (json!({"exact": 1.0, "max_consecutive_failures": 0}), "rewards.max_consecutive_failures"),
        (json!({"http": {"judge": {"url": "localhost:80"}}}), "rewards.http.judge.url"),
        (json!({"http": {"judge": {"url": "http://a", "timeout": 0.0}}}), "rewards.http.judge.timeout"),
        (json!({"http": {"judge": {"url": "http://a", "concurrency": 0}}}), "rewards.http.judge.concurrency"),
        (json!({"programs": {"judge": {"command": []}}}), "rewards.programs.judge.command"),
        (json!({"programs": {"judge": {"command": ["sh"], "workers": 0}}}), "rewards.programs.judge.workers"),
        (json!({"programs": {"judge": {"command": ["sh"], "batch_size": 0}}}), "rewards.programs.judge.batch_size"),
    ] {
        let error = refused(keys);
        assert!(error.contains(&format!("`{key}`")), "{key}: {error}");
    }
}

/// Scores the reference answer as if it were the completion, as `grpo data` does.
#[test]
fn reference_answers_are_correct_in_every_comparing_reward() {
    let solution = "So $x = \\boxed{\\frac{3}{4}}$.";
    for answer in ["72", "1,080", "Half is 36.\n#### 36", solution, "\\text{(B)}", "(3, \\infty)", "Paris"] {
        for name in ["correct", "exact", "normalized", "math"] {
            assert_eq!(total(json!({name: 1.0}), answer, answer), Some(1.0), "{name}: {answer}");
        }
    }
}
