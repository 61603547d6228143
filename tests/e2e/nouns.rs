//! One of a thing is said in the singular.

use crate::support::{Call, Runs, assert_has, batch, grpo};

const PLURALS: [&str; 18] = [
    "rows",
    "prompts",
    "problems",
    "steps",
    "completions",
    "tokens",
    "weights",
    "threads",
    "files",
    "comparisons",
    "runs",
    "texts",
    "micro-batches",
    "failures",
    "updates",
    "shards",
    "checkpoints",
    "sequences",
];

/// The plurals that follow a 1, perhaps behind a word or two that belong to them: `1 held-out problems`.
fn wrong(text: &str) -> Vec<String> {
    text.lines().flat_map(|line| wrong_in(&line.split_whitespace().collect::<Vec<_>>())).collect()
}

fn wrong_in(words: &[&str]) -> Vec<String> {
    let bare = |word: &str| word.trim_matches(|c: char| !c.is_alphanumeric()).to_owned();
    let ones = (0..words.len()).filter(|at| words[*at].trim_start_matches('(') == "1");
    let found = ones.filter_map(|at| {
        let behind = words.get(at + 1..words.len().min(at + 4))?;
        // A count of its own, or the end of a clause, ends what belongs to the 1.
        let ends = |word: &&&str| !word.ends_with([',', ';', ':', ')']);
        let clause = behind.iter().take_while(ends).count();
        let noun = behind.iter().take(clause + 1).position(|word| PLURALS.contains(&bare(word).as_str()))?;
        let is_other = behind[..noun]
            .iter()
            .any(|word| ["of", "x", "to", "in", "per"].contains(word) || word.contains(char::is_numeric));
        (!is_other).then(|| words[at..=at + 1 + noun].iter().map(|word| bare(word)).collect::<Vec<_>>().join(" "))
    });
    found.collect()
}

#[test]
fn wrong_nouns_are_seen() {
    assert_eq!(wrong("pass@1 50 % on 1 held-out problems, and 1 rows"), ["1 held-out problems", "1 rows"]);
    assert_eq!(wrong("1 row of 2 rows, 11 rows, step 1 of 3 steps, (1 file), 1, rows"), [""; 0]);
}

#[test]
fn commands_say_one_of_a_thing_in_the_singular() {
    let runs = Runs::small();
    let row = |i: usize| format!("{{\"question\": \"What is {i} + 1?\", \"answer\": \"{}\"}}\n", i + 1);
    runs.write("a.jsonl", row(1));
    runs.write("b.jsonl", row(2));
    let run = |call: Call| {
        let call = call.at(&runs.path("")).env("RAYON_NUM_THREADS", "1").env("GRPO_LOG", "info");
        let text = call.exit(0).to_string();
        assert_eq!(wrong(&text), [""; 0], "{text}");
        text
    };
    let settings = [
        "data.eval_files=b.jsonl",
        "grpo.max_steps=1",
        "grpo.prompts_per_step=1",
        "grpo.gradient_accumulation_steps=1",
        "rollout.max_completion_length=1",
        "eval.eval_steps=1",
        "eval.num_generations=1",
        "warmup.steps=1",
        "warmup.batch_size=1",
    ];
    let text = run(grpo(["init", "--model", "model", "--data", "a.jsonl"]).set(settings));
    assert_has(&text, &["1 row with the columns `question` (1 text)"]);
    let text = run(grpo(["data", "--config", "train.yaml"]));
    assert_has(&text, &["a.jsonl: 1 row, ", "tokens of 1 right completion: "]);
    let text = run(grpo(["train", "train.yaml", "--run-dir", "a"]));
    assert_has(
        &text,
        &[
            "a.jsonl: 1 row, ",
            "of up to 1 token",
            "1 prompt x 8",
            "1 micro-batch",
            "this CPU, 1 thread",
            "1 held-out row, every step",
            " on 1 held-out problem\n",
            "1 GRPO step after 1 warm-up step, ",
        ],
    );
    let card = runs.read("a/model/README.md");
    assert!(card.contains("trained with GRPO for 1 step on ") && wrong(&card).is_empty(), "{card}");
    assert_has(&run(grpo(["report", "a"])), &["(1 run, "]);
    let parity = grpo(["parity", &batch("c01_grpo_token_full"), "--implementation", "fused"]);
    assert_has(&run(parity), &["PASS: 1 file, "]);
}
