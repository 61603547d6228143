//! Help, layers of the configuration, exit codes.

use crate::support::{command, grpo, names, refuse, refused, stderr, stdout, succeed, tiny};

fn printed(arguments: &[&str]) -> String {
    succeed(&[&["train", "--print-config"], arguments].concat())
}

#[test]
fn help_lists_commands_options_and_exit_codes() {
    let help = succeed(&["--help"]);
    for word in ["train", "Exit codes", "3 stopped by"] {
        assert!(help.contains(word), "{help}");
    }
    let help = succeed(&["train", "--help"]);
    for word in ["[CONFIG]", "--set", "--print-config", "--resume", "--run-dir", "GRPO__", "may change"] {
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
