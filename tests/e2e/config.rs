//! Help, layers of the configuration, exit codes.

use crate::support::{Runs, assert_has, grpo, names, refuse, repository, succeed, tiny};

fn printed(file: &str, settings: &[&str]) -> String {
    grpo(["train", "--print-config", file]).set(settings).succeed()
}

#[test]
fn help_lists_commands_options_and_exit_codes() {
    let help = succeed(&["--help"]);
    assert_has(&help, &["Train:", "Check the loss:", "Plan for devices:", "Measure:", "Exit codes", "3 stopped by"]);
    let options = ["[CONFIG]", "--set", "--print-config", "--resume", "--run-dir", "GRPO__", "may be changed"];
    assert_has(&succeed(["train", "--help"]), &options);
    assert!(succeed(&["--version"]).starts_with("grpo "));
}

#[test]
fn bad_usage_ends_with_2() {
    for arguments in [&[][..], &["trian"], &["train", "--nonsense"], &["train", "--resume", "x", "--config", "y"]] {
        assert_has(&grpo(arguments).exit(2).stderr, &["Usage"]);
    }
}

#[test]
fn the_default_configuration_is_built_in() {
    let elsewhere = tempfile::tempdir().expect("a folder");
    let text = grpo(["train", "--print-config"]).at(elsewhere.path()).succeed();
    assert_has(&text, &["name: arithmetic"]);
}

#[test]
fn every_configuration_that_users_copy_is_legal() {
    let folder = repository("configs/train");
    let files = names(folder.as_ref());
    assert!(files.len() >= 3, "{files:?}");
    for file in files {
        let name = file.strip_suffix(".yaml").expect("YAML");
        assert_has(&printed(&format!("{folder}/{file}"), &[]), &[&format!("name: {name}\n")]);
    }
}

#[test]
fn a_printed_configuration_reads_back_to_itself() {
    let first = printed(&tiny(), &["loss.delta=2.5", "seed=12"]);
    assert_eq!(printed(&Runs::new(&[]).write("config.yaml", &first), &[]), first);
}

#[test]
fn set_wins_over_the_environment_and_that_over_the_file() {
    let folder = Runs::new(&[]);
    let file = folder.write("a.yaml", "seed: 1\ngrpo: {max_steps: 1, num_generations: 3}\nloss: {beta: 0.5}\n");
    let call = grpo(["train", "--print-config", "--config", &file]);
    let call = call.set(["seed=3", "model.tie_word_embeddings=true", "loss.epsilon_high=null"]);
    let call = call.env("GRPO__SEED", "2").env("GRPO__GRPO__MAX_STEPS", "2").env("GRPO__LOSS__BETA", "0");
    let text = call.env("GRPO_LOG", "error").succeed();
    for line in [
        "seed: 3",
        "max_steps: 2",
        "num_generations: 3",
        "beta: 0.0",
        "tie_word_embeddings: true",
        "epsilon_high: null",
    ] {
        assert!(text.lines().any(|l| l.trim() == line), "{line} is not in\n{text}");
    }
}

#[test]
fn unknown_keys_are_errors_that_say_which_key_was_meant() {
    let text = grpo(["train"]).set(["grpo.max_step=3"]).refuse();
    assert_has(&text, &["`grpo.max_step`", "did you mean `max_steps`?"]);
    let text = grpo(["train", "--print-config"]).env("GRPO__LOSS__BETTA", "1").refuse();
    assert_has(&text, &["GRPO__LOSS__BETTA", "did you mean `beta`?"]);
}

#[test]
fn a_key_in_the_wrong_section_names_the_right_one() {
    for (setting, meant) in [
        ("learning_rate=1", "optimizer.learning_rate"),
        ("grpo.learning_rate=1", "optimizer.learning_rate"),
        ("max_steps=1", "grpo.max_steps"),
        ("loss.lora_alpha=1", "lora.lora_alpha"),
        ("warmup.learning_rate=1", "warmup.optimizer.learning_rate"),
        ("data.chat_template_kwarg=1", "chat_template_kwargs"),
    ] {
        assert_has(&grpo(["train"]).set([setting]).refuse(), &[&format!("did you mean `{meant}`?")]);
    }
}

#[test]
fn a_printed_configuration_has_a_comment_for_every_key() {
    let text = grpo(["train", "--print-config"]).set(["lora.r=4", "rewards.regex={vowel: {pattern: a}}"]).succeed();
    let lines: Vec<&str> = text.lines().collect();
    let mut keys = 0;
    for (number, line) in lines.iter().enumerate() {
        let is_key = line
            .trim_start()
            .split_once(':')
            .is_some_and(|(key, _)| !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'));
        // A name of the user's is no key.
        if is_key && line.trim() != "vowel:" {
            keys += 1;
            assert!(lines[number - 1].trim_start().starts_with("# "), "{line}");
        }
    }
    assert!(keys > 150, "{keys} keys:\n{text}");
}

#[test]
fn bad_values_name_their_key() {
    for (setting, words) in [
        ("grpo.max_steps=many", &["grpo.max_steps", "many"][..]),
        ("seed=-1", &["seed"]),
        ("loss.loss_type=ppo", &["loss.loss_type", "ppo", "grpo"]),
        ("loss.epsilon_low=7", &["epsilon_low", "[0, 1]"]),
        ("loss.loss_type=cispo", &["epsilon_high"]),
        ("loss.gradient_accumulation_steps=2", &["loss.gradient_accumulation_steps", "the trainer knows"]),
        ("loss.final_logit_softcapping=30.0", &["loss.final_logit_softcapping", "30"]),
        ("loss.logit_scale=0.5", &["loss.logit_scale", "0.5"]),
        ("model.hidden_size=30", &["model.hidden_size"]),
        ("run.name=../x", &["run.name"]),
        ("grpo.vf_coef=0.25", &["grpo.vf_coef", "gae"]),
        ("grpo.filter_groups={enable: true, metric: beauty}", &["grpo.filter_groups.metric", "reward, correct"]),
        ("grpo.max_steps", &["KEY=VALUE"]),
        ("data.held_out_fraction=.nan", &["--set data.held_out_fraction=.nan"]),
    ] {
        assert_has(&grpo(["train"]).set([setting]).refuse(), words);
    }
}

/// The messages of all kinds of values are tested in crates/files.
#[test]
fn a_wrong_type_says_its_key_what_was_expected_and_what_came() {
    let (folder, mut missed) = (Runs::new(&[]), vec![]);
    for (yaml, words) in [
        (
            "rewards: {programs: {x: {command: python3 judge.py}}}",
            "key `rewards.programs.x.command`: expected a list, got the text \"python3 judge.py\", e.g. `command: [python3, judge.py]`",
        ),
        ("rewards: {answer_from: 3}", "key `rewards.answer_from`: expected one of `auto`"),
        ("eval: {pass_at: 8}", "key `eval.pass_at`: expected a list, got the number 8, e.g. `pass_at: [8]`"),
        (
            "lora: {target_modules: 3}",
            "key `lora.target_modules`: expected `all-linear`, a regular expression, or a list of names of modules, got the number 3",
        ),
        ("lora: 16", "key `lora`: expected a map of keys, got the number 16"),
        (
            "data: {files: 3}",
            "key `data.files`: expected a file (a path, or an object with `path`), or a list of files, got the number 3",
        ),
        ("data: {few_shot: 1}", "key `data.few_shot`: expected a text or a list of messages, got 1"),
        // A key of one loss, which is flattened into the section.
        (
            "loss: {loss_type: sapo, sapo_temperature_pos: hot}",
            "key `loss.sapo_temperature_pos`: expected a number, got the text \"hot\"",
        ),
        ("loss: {loss_type: 3}", "key `loss.loss_type`: expected one of `grpo`"),
        (
            "model: 3",
            "key `model`: expected a model folder, the name of a model, or a section with the shape of a new one, got the number 3",
        ),
        (
            "model: {hidden_size: big}",
            "key `model.hidden_size`: expected a whole number that is not negative, got the text \"big\"",
        ),
        ("policy: {device: gpu}", "key `policy.device`: unknown variant `gpu`"),
        ("without_model: {seed: a}", "key `seed`: expected a whole number that is not negative, got the text \"a\""),
    ] {
        let text = grpo(["train", "--print-config", &folder.write("train.yaml", yaml)]).refuse();
        if !(text.contains(words) && text.contains("train.yaml")) {
            missed.push(format!("{yaml}: {text}"));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
    let text = grpo(["train"]).env("GRPO__EVAL__PASS_AT", "1 8").refuse();
    assert_has(&text, &["`eval.pass_at`: expected a list, got the text \"1 8\", e.g. `pass_at: [1, 8]`"]);
}

#[test]
fn files_that_are_not_there_or_not_yaml_are_named() {
    let text = refuse(&["train", "--config", "/nowhere/a.yaml"]);
    assert_has(&text, &["/nowhere/a.yaml", "No such file"]);
    let folder = Runs::new(&[]);
    for (content, word) in [
        (&b"seed: [1"[..], "line 1"),
        (b"- 1\n", "list"),
        (b"seed: 1\nseed: 2\n", "duplicate"),
        (&[0xff, 0xfe, 0, 1], "error"),
    ] {
        assert_has(&refuse(["train", "--config", &folder.write("a.yaml", content)]), &["a.yaml", word]);
    }
    assert_has(&folder.resume("").refuse(), &["no config.yaml"]);
}
