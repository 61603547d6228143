//! Answers as written by policies and data sets: pairs of reference answer and completion, with the expected reward.

use crate::support::{rewards, score, total};
use grpo_data::Item;
use grpo_rewards::RewardInput;
use serde_json::json;
use std::time::{Duration, Instant};

/// A derivation before an answer, which makes a completion long.
const STEPS: &str = "The two parts are found first, one after the other, and then they are put together as asked.\n";

#[test]
fn completions_in_answers_tsv_have_their_rewards() {
    assert_eq!(checked(include_str!("answers.tsv")), 392);
}

#[test]
fn completions_in_forms_tsv_have_their_rewards() {
    assert_eq!(checked(include_str!("forms.tsv")), 1300);
}

#[test]
fn thoughts_count_without_answer_after_think() {
    let keys = |after: bool| json!({"math": 1.0, "answer_after_think": after});
    for completion in [
        "<|channel|>analysis<|message|>it is \\boxed{8}<|end|><|start|>assistant<|channel|>final<|message|>I cannot say.",
        "[THINK]so \\boxed{8}[/THINK] I do not know.",
        "<|channel>thought\nso \\boxed{8}<channel|> I do not know.",
        "<seed:think>so \\boxed{8}</seed:think> I do not know.",
        "◁think▷so \\boxed{8}◁/think▷ I do not know.",
        "[THINK]so \\boxed{8}",
        "<|channel|>analysis<|message|>it is \\boxed{8}",
    ] {
        let judged = [true, false].map(|after| total(keys(after), "8", completion).unwrap());
        assert_eq!(judged, [0.0, 1.0], "{completion}");
    }
}

/// Checks the rows of a table, and returns their number.
fn checked(rows: &str) -> usize {
    let (mut table, mut wrong, mut count) = (["", "", ""], Vec::new(), 0);
    for line in rows.lines().filter(|line| !line.starts_with('#')) {
        let [first, answer, last] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
        if first.starts_with('[') {
            table = [first, answer, last];
            continue;
        }
        let last = last.replace('⏎', "\n");
        let [title, form, functions] = table;
        let completion = match form {
            "whole" => last,
            "boxed" => format!("\\boxed{{{last}}}"),
            "prose" => format!("{STEPS}{last}"),
            other => panic!("{title}: {other}"),
        };
        for function in functions.split(' ') {
            let found = total(json!({function: 1.0}), answer, &completion);
            if found != first.parse().ok() {
                wrong.push(format!("{title} {function}: {first}, got {found:?}: {completion:?} for {answer:?}"));
            }
            count += 1;
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    count
}

#[test]
fn text_before_the_closing_think_tag_is_ignored() {
    let math = |keys: serde_json::Value, completion: &str| total(keys, "42", completion).unwrap();
    let on = || json!({"math": 1.0});
    let off = || json!({"math": 1.0, "answer_after_think": false});
    let inside = "<think> My answer is \\boxed{42} </think> Some other text.";
    assert_eq!((math(on(), inside), math(off(), inside)), (0.0, 1.0));
    assert_eq!(math(on(), "<think> perhaps \\boxed{99} </think>\n\nThe final answer is 42."), 1.0);
    let behind = "<think> perhaps \\boxed{99} </think>\n\nThe total is 42.";
    assert_eq!((math(on(), behind), math(off(), behind)), (1.0, 0.0));
    // The prompt ends with the opening tag.
    assert_eq!(math(on(), "perhaps \\boxed{99}</think> It is 42"), 1.0);
    // A thought without an end is no answer.
    let open = "<think> it is \\boxed{42}";
    assert_eq!((math(on(), open), math(off(), open)), (0.0, 1.0));
    assert_eq!(math(on(), "<think>\\boxed{42}</think>"), 0.0);
    for reward in ["correct", "exact", "normalized", "numeric"] {
        assert_eq!(total(json!({reward: 1.0}), "42", inside), Some(0.0), "{reward}");
        assert_eq!(total(json!({reward: 1.0}), "42", "<think>9</think><answer>42</answer>"), Some(1.0), "{reward}");
    }
    assert_eq!(total(json!({"choice": 1.0}), "B", "<think>The answer is A</think>B"), Some(1.0));
}

#[test]
fn a_truncated_thought_that_the_prompt_opened_is_no_answer() {
    let (item, rewards) = (Item::new("?").with_answer("42"), rewards(json!({"math": 1.0})));
    let judged = |completion: &str, opens_think: bool, truncated: bool| {
        let input = RewardInput { opens_think, truncated, ..RewardInput::new(&item, completion) };
        rewards.score(&[input]).remove(0).total.unwrap()
    };
    let text = "so it is \\boxed{42}, but";
    assert_eq!((judged(text, true, true), judged(text, true, false), judged(text, false, true)), (0.0, 1.0, 1.0));
    assert_eq!(judged("so it is 41</think>\\boxed{42}, but", true, true), 1.0);
}

#[test]
fn a_think_tag_at_the_end_of_the_prompt_counts_for_format_rewards() {
    let judged = |completion: &str, opens_think: bool| {
        let (item, rewards) = (Item::new("?"), rewards(json!({"think_format": 1.0, "tag_count": 1.0})));
        let input = RewardInput { opens_think, ..RewardInput::new(&item, completion) };
        let terms = rewards.score(&[input]).remove(0).terms;
        // In the order of names: `think_format`, `tag_count`.
        (terms[0].unwrap(), terms[1].unwrap())
    };
    let behind = "2 and 2.\n</think>\n<answer>4</answer>";
    assert_eq!((judged(behind, true), judged(behind, false)), ((1.0, 1.0), (0.0, 0.75)));
    let whole = "<think>2 and 2.</think><answer>4</answer>";
    assert_eq!((judged(whole, true), judged(whole, false)), ((1.0, 0.75), (1.0, 1.0)));
}

#[test]
fn any_of_several_reference_answers_is_correct() {
    let mut item = Item::new("?").with_answer("1");
    item.other_answers = vec!["one".into(), "\\frac{2}{2}".into(), "B".into()];
    let of = |reward: &str, completion: &str| {
        let judged = score(&rewards(json!({reward: 1.0})), &item, &[completion]);
        judged[0].total.unwrap()
    };
    for (reward, right, wrong) in [
        ("exact", "one", "two"),
        ("normalized", "One.", "two"),
        ("numeric", "\\boxed{1}", "\\boxed{2}"),
        ("math", "\\boxed{one}", "\\boxed{2}"),
        ("correct", "\\boxed{1}", "\\boxed{2}"),
        ("choice", "The answer is B", "The answer is C"),
        ("partial", "one", "xyz"),
    ] {
        assert_eq!((of(reward, right), of(reward, wrong)), (1.0, 0.0), "{reward}");
    }
}

/// Inputs that would take too long if comparisons were unbounded.
#[test]
fn adversarial_completions_are_scored_quickly() {
    let repeat = |text: &str, count: usize| text.repeat(count);
    let nested = |open: &str, inside: &str, close: &str, depth: usize| {
        format!("{}{inside}{}", open.repeat(depth), close.repeat(depth))
    };
    let pairs = [
        (nested("\\{", "1", "\\}", 39), nested("\\{", "1.0", "\\}", 39)),
        (nested("(", "1,2", ")", 39), nested("(", "1,2.0", ")", 39)),
        (nested("\\{1,\\{", "2", "\\}\\}", 19), nested("\\{1.0,\\{", "2", "\\}\\}", 19)),
        (repeat("400!,", 190) + "1", repeat("401!,", 190) + "1"),
        (repeat("2^{4000},", 100) + "1", repeat("2^{4001},", 100) + "1"),
        (repeat("x=400!;", 130) + "1", repeat("y=401!;", 130) + "1"),
        (repeat("9^", 490) + "9", repeat("9^", 489) + "9"),
        (repeat("9^{9^{", 19) + "9" + &repeat("}}", 19), "5".into()),
        (repeat("\\frac{1}{3^{2500}}+", 49) + "1", repeat("\\frac{1}{7^{1400}}+", 49) + "1"),
        (repeat("\\pm1,", 190) + "1", repeat("\\pm2,", 190) + "1"),
        (repeat("\\pm", 330) + "1", repeat("-", 990) + "1"),
        (repeat("400!+", 190) + "1", repeat("\\binom{9999999}{400}+", 45) + "1"),
        (repeat("|", 990), repeat("|x", 490)),
        (repeat("1/", 490) + "1", repeat("1-", 490) + "1"),
        ("1e999999999".into(), "1e-999999999".into()),
        (repeat("a", 999), repeat("b", 999)),
        (repeat("\\ln", 330) + "2", repeat("\\sqrt", 195) + "2"),
        (repeat("\\frac1", 160) + "1", repeat("9!", 490) + "!"),
        (repeat("\\sqrt", 195) + "\\ln2", "1*".to_owned() + &repeat("-", 990) + "1"),
    ];
    for (answer, inside) in &pairs {
        let began = Instant::now();
        total(json!({"math": 1.0}), answer, &format!("\\boxed{{{inside}}}"));
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}: {:.40}", began.elapsed(), inside);
    }
    for text in [
        repeat("\\boxed{", 20_000),
        repeat("\\boxed{1}, ", 20_000),
        repeat("$", 60_000),
        repeat("$1 ", 60_000),
        repeat("\\(", 60_000),
        repeat("<answer>", 20_000),
        repeat("The answer is ", 20_000),
        repeat("answer to ", 20_000),
        repeat("Option B is ", 20_000),
        repeat("1/", 60_000),
        repeat("1 ", 60_000),
        repeat("1,000", 20_000),
        format!("The answer is {}", repeat("1 is ", 20_000)),
        format!("<answer>{}</answer>", repeat("a is $1$, ", 20_000)),
        format!("<answer>{}</answer>", repeat("1, because ", 20_000)),
    ] {
        let began = Instant::now();
        total(json!({"math": 1.0, "choice": 1.0, "numeric": 1.0}), "B", &text);
        total(json!({"math": 1.0, "numeric": 1.0}), "7", &text);
        assert!(began.elapsed() < Duration::from_secs(2), "{:?} for two: {:.40}", began.elapsed(), text);
    }
}
