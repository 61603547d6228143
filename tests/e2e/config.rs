//! Help, layers of the configuration, exit codes.

use crate::support::{command, grpo, names, refuse, refused, stderr, stdout, succeed, tiny};

fn printed(arguments: &[&str]) -> String {
    succeed(&[&["train", "--print-config"], arguments].concat())
}

#[test]
fn help_lists_commands_options_and_exit_codes() {
    let help = succeed(&["--help"]);
    for word in ["Train:", "Check the loss:", "Plan for devices:", "Measure:", "Exit codes", "3 stopped by"] {
        assert!(help.contains(word), "{help}");
    }
    let help = succeed(&["train", "--help"]);
    for word in ["[CONFIG]", "--set", "--print-config", "--resume", "--run-dir", "GRPO__", "may be changed"] {
        assert!(help.contains(word), "{word}: {help}");
    }
    assert!(succeed(&["--version"]).starts_with("grpo "));
}

#[test]
fn bad_usage_ends_with_2() {
    for arguments in [&[][..], &["trian"], &["train", "--nonsense"], &["train", "--resume", "x", "--config", "y"]] {
        let output = grpo(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&output).contains("Usage"), "{arguments:?} {}", stderr(&output));
    }
}

#[test]
fn the_default_configuration_is_built_in() {
    let elsewhere = tempfile::tempdir().expect("a temporary folder");
    let output = command(&["train", "--print-config"]).current_dir(elsewhere.path()).output().expect("starts");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("name: arithmetic"), "{}", stdout(&output));
}

#[test]
fn every_configuration_that_users_copy_is_legal() {
    let folder = tiny();
    let folder = folder.parent().expect("configs/train");
    let files = names(folder);
    assert!(files.len() >= 3, "{files:?}");
    for file in files {
        let text = printed(&["--config", &folder.join(&file).display().to_string()]);
        let name = file.strip_suffix(".yaml").expect("YAML");
        assert!(text.contains(&format!("name: {name}\n")), "{file}: {text}");
    }
}

#[test]
fn a_printed_configuration_reads_back_to_itself() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("config.yaml");
    let first = printed(&["--config", &tiny().display().to_string(), "--set", "loss.delta=2.5", "--set", "seed=12"]);
    std::fs::write(&file, &first).expect("written");
    assert_eq!(printed(&["--config", &file.display().to_string()]), first);
}

#[test]
fn set_wins_over_the_environment_and_that_over_the_file() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("a.yaml");
    std::fs::write(&file, "seed: 1\ngrpo: {max_steps: 1, num_generations: 3}\nloss: {beta: 0.5}\n").expect("written");
    let output = command(&["train", "--print-config", "--config", &file.display().to_string(), "--set", "seed=3"])
        .args(["--set", "model.tie_word_embeddings=true", "--set", "loss.epsilon_high=null"])
        .envs([("GRPO__SEED", "2"), ("GRPO__GRPO__MAX_STEPS", "2"), ("GRPO__LOSS__BETA", "0"), ("GRPO_LOG", "error")])
        .output()
        .expect("starts");
    let text = stdout(&output);
    for line in [
        "seed: 3",
        "max_steps: 2",
        "num_generations: 3",
        "beta: 0.0",
        "tie_word_embeddings: true",
        "epsilon_high: null",
    ] {
        assert!(text.lines().any(|l| l.trim() == line), "{line} is not in\n{text}{}", stderr(&output));
    }
}

#[test]
fn unknown_keys_are_errors_that_say_which_key_was_meant() {
    let text = refuse(&["train", "--set", "grpo.max_step=3"]);
    assert!(text.contains("`grpo.max_step`") && text.contains("did you mean `max_steps`?"), "{text}");
    let arguments = ["train", "--print-config"];
    let output = command(&arguments).env("GRPO__LOSS__BETTA", "1").output().expect("starts");
    let text = refused(&arguments, &output);
    assert!(text.contains("GRPO__LOSS__BETTA") && text.contains("did you mean `beta`?"), "{text}");
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
        let text = refuse(&["train", "--set", setting]);
        assert!(text.contains(&format!("did you mean `{meant}`?")), "{setting}: {text}");
    }
}

#[test]
fn a_printed_configuration_has_a_comment_for_every_key() {
    let text = printed(&["--set", "lora.r=4", "--set", "rewards.regex={vowel: {pattern: a}}"]);
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
        let text = refuse(&["train", "--set", setting]);
        assert!(words.iter().all(|word| text.contains(word)), "{setting}: {text}");
    }
}

#[test]
fn a_wrong_type_says_its_key_what_was_expected_and_what_came() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("train.yaml");
    let mut missed = vec![];
    for (yaml, words) in [
        (
            "rewards: {programs: {x: {command: python3 judge.py}}}",
            "key `rewards.programs.x.command`: expected a list, got the text \"python3 judge.py\", e.g. `command: [python3, judge.py]`",
        ),
        (
            "rewards: {programs: {x: {command: \"./judge.py --model m.json --strict\"}}}",
            "e.g. `command: [./judge.py, --model, m.json, --strict]`",
        ),
        ("rewards: {programs: {x: {}}}", "key `rewards.programs.x.command`: expected a value, and the key is missing"),
        ("rewards: {programs: judge.py}", "key `rewards.programs`: expected a map of keys, got the text \"judge.py\""),
        (
            "rewards: {json: {required_keys: 'a, b'}}",
            "key `rewards.json.required_keys`: expected a list, got the text \"a, b\", e.g. `required_keys: [a, b]`",
        ),
        ("rewards: {correct: yes please}", "key `rewards.correct`: expected a number, got the text \"yes please\""),
        ("rewards: {answer_from: 3}", "key `rewards.answer_from`: expected one of `auto`"),
        ("eval: {pass_at: 8}", "key `eval.pass_at`: expected a list, got the number 8, e.g. `pass_at: [8]`"),
        ("wandb: {tags: a}", "key `wandb.tags`: expected a list, got the text \"a\", e.g. `tags: [a]`"),
        (
            "lora: {target_modules: 3}",
            "key `lora.target_modules`: expected `all-linear`, a regular expression, or a list of names of modules, got the number 3",
        ),
        ("lora: 16", "key `lora`: expected a map of keys, got the number 16"),
        (
            "data: {files: 3}",
            "key `data.files`: expected a file (a path, or an object with `path`), or a list of files, got the number 3",
        ),
        ("data: {shuffle: 1}", "key `data.shuffle`: expected true or false, got the number 1"),
        (
            "data: {max_prompt_length: long}",
            "key `data.max_prompt_length`: expected a whole number that is not negative, got the text",
        ),
        ("data: {few_shot: 1}", "key `data.few_shot`: expected a text or a list of messages, got 1"),
        (
            "data: {chat_template_kwargs: a}",
            "key `data.chat_template_kwargs`: expected a map of keys, got the text \"a\"",
        ),
        ("loss: {beta: much}", "key `loss.beta`: expected a number, got the text \"much\""),
        // A key of one loss, which is flattened into the section.
        (
            "loss: {loss_type: sapo, sapo_temperature_pos: hot}",
            "key `loss.sapo_temperature_pos`: expected a number, got the text \"hot\"",
        ),
        ("loss: {loss_type: 3}", "key `loss.loss_type`: expected one of `grpo`"),
        (
            "grpo: {num_generations: 4.5}",
            "key `grpo.num_generations`: expected a whole number that is not negative, got the number 4.5",
        ),
        (
            "grpo: {num_generations: 1e9}",
            "key `grpo.num_generations`: expected a whole number that is not negative, got the number ",
        ),
        ("rewards: {programs: [judge.py]}", "key `rewards.programs`: expected a map of keys, got a list"),
        ("lora: [16, 32]", "key `lora`: expected a map of keys, got a list"),
        ("grpo: [1]", "key `grpo`: expected a map of keys, got a list"),
        (
            "model: 3",
            "key `model`: expected a model folder, the name of a model, or a section with the shape of a new one, got the number 3",
        ),
        (
            "model: {hidden_size: big}",
            "key `model.hidden_size`: expected a whole number that is not negative, got the text \"big\"",
        ),
        ("policy: {device: gpu}", "key `policy.device`: unknown variant `gpu`"),
        ("seed: null", "key `seed`: expected a whole number that is not negative, got nothing (null)"),
        ("without_model: {seed: a}", "key `seed`: expected a whole number that is not negative, got the text \"a\""),
    ] {
        std::fs::write(&file, yaml).expect("written");
        let output = grpo(&["train", "--print-config", &file.display().to_string()]);
        let text = stderr(&output);
        let is_one_line = output.status.code() == Some(2) && text.lines().count() == 1;
        if !(is_one_line && text.contains(words) && text.contains("train.yaml")) {
            missed.push(format!("{yaml}: {text}"));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
    let text = refuse(&["train", "--set", "rewards.programs.x.command=python3 judge.py"]);
    assert!(text.contains("e.g. `command: [python3, judge.py]`"), "{text}");
    let arguments = ["train"];
    let output = command(&arguments).env("GRPO__EVAL__PASS_AT", "1 8").output().expect("starts");
    assert!(
        refused(&arguments, &output)
            .contains("`eval.pass_at`: expected a list, got the text \"1 8\", e.g. `pass_at: [1, 8]`")
    );
}

#[test]
fn files_that_are_not_there_or_not_yaml_are_named() {
    let text = refuse(&["train", "--config", "/nowhere/a.yaml"]);
    assert!(text.contains("/nowhere/a.yaml") && text.contains("No such file"), "{text}");
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("a.yaml");
    for (content, word) in [("seed: [1", "line 1"), ("- 1\n", "list"), ("seed: 1\nseed: 2\n", "duplicate")] {
        std::fs::write(&file, content).expect("written");
        let text = refuse(&["train", "--config", &file.display().to_string()]);
        assert!(text.contains("a.yaml") && text.contains(word), "{content:?}: {text}");
    }
    std::fs::write(&file, [0xff, 0xfe, 0, 1]).expect("written");
    refuse(&["train", "--config", &file.display().to_string()]);
    let text = refuse(&["train", "--resume", &folder.path().display().to_string()]);
    assert!(text.contains("no config.yaml"), "{text}");
}
