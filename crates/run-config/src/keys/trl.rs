//! Options of TRL, transformers and PEFT, for errors about unknown keys.
//!
//! The tables of docs/from-trl.md are the only list of such options. In each, a column whose head begins with `TRL` or `PEFT` has their names, and the
//! column `grpo` the keys of a run.

use super::keys;

/// The page with the tables.
const PAGE: &str = include_str!("../../from-trl.md");

/// A row of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row<'a> {
    /// The options.
    options: &'a str,
    /// The keys of a run, or `none`.
    keys: &'a str,
    /// A remark; may be empty.
    remark: &'a str,
}

/// Returns what the page says of an option, as the end of an error about an unknown key; `None` for an option that is not on the page.
pub(super) fn hint(option: &str) -> Option<String> {
    let row = rows(PAGE).find(|row| names(row.options).any(|name| name == option))?;
    let remark = if row.remark.is_empty() { String::new() } else { format!("; {}", without_links(row.remark)) };
    if row.keys.starts_with("none") {
        return Some(format!("`{option}` of TRL, transformers or PEFT has no counterpart{remark}"));
    }
    // Of several keys, the one with the option's name; otherwise all of them.
    let same = code(row.keys).find(|key| key.rsplit('.').next() == Some(option));
    let key = same.map_or_else(|| without_links(row.keys), |key| format!("`{key}`"));
    Some(format!("the counterpart of `{option}` of TRL, transformers or PEFT is {key}{remark}"))
}

/// Returns `true` if a section has a key of this name.
pub(super) fn is_key(name: &str) -> bool {
    keys().iter().any(|key| !key.path.contains('*') && key.path.rsplit('.').next() == Some(name))
}

/// Returns the rows of all tables of a page that have a column of options and one of keys.
fn rows(page: &str) -> impl Iterator<Item = Row<'_>> {
    let mut columns: Option<[usize; 2]> = None;
    page.lines().filter_map(move |line| {
        let cells: Option<Vec<&str>> = line
            .trim()
            .strip_prefix('|')
            .and_then(|line| line.strip_suffix('|'))
            .map(|line| line.split('|').map(str::trim).collect());
        let Some(cells) = cells else {
            columns = None;
            return None;
        };
        let Some([options, keys]) = columns else {
            let of = |starts: &[&str]| cells.iter().position(|cell| starts.iter().any(|start| cell.starts_with(start)));
            columns = of(&["TRL", "PEFT"]).zip(of(&["grpo"])).map(|(options, keys)| [options, keys]);
            return None;
        };
        let is_rule = cells.iter().all(|cell| cell.starts_with("--"));
        let remark = cells.get(keys + 1).copied().unwrap_or_default();
        (!is_rule && cells.len() > keys).then(|| Row { options: cells[options], keys: cells[keys], remark })
    })
}

/// Returns the text in backticks outside of parentheses, which have defaults.
fn code(cell: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_usize;
    cell.split('`').enumerate().filter_map(move |(at, part)| {
        if at % 2 == 1 {
            return (depth == 0).then_some(part);
        }
        depth = part.chars().fold(depth, |depth, char| match char {
            '(' => depth + 1,
            ')' => depth.saturating_sub(1),
            _ => depth,
        });
        None
    })
}

/// Returns the names in the code of a cell, without texts in quotes.
fn names(cell: &str) -> impl Iterator<Item = &str> {
    let is_name = |char: char| char.is_ascii_alphanumeric() || char == '_';
    code(cell)
        .flat_map(move |code| code.split('"').step_by(2).flat_map(move |code| code.split(move |char| !is_name(char))))
}

/// Returns Markdown with the text of each link in place of the link.
fn without_links(text: &str) -> String {
    let mut parts = text.split("](");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        if let Some(label) = plain.rfind('[') {
            plain.remove(label);
        }
        plain.push_str(part.split_once(')').map_or(part, |(_, rest)| rest));
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TrainConfig;
    use grpo_files::Layers;

    /// The fields of TRL's, transformers' and PEFT's classes; scripts/trl_fields.py writes the file.
    const FIELDS: &str = include_str!("trl_fields.txt");

    #[test]
    fn from_trl_md_names_every_field() {
        let fields: Vec<&str> = FIELDS.lines().filter(|line| !line.starts_with('#')).collect();
        for field in ["per_device_train_batch_size", "vllm_group_port", "lora_dropout", "hub_revision", "lora_r"] {
            assert!(fields.contains(&field), "{field}");
        }
        let missing: Vec<&&str> = fields
            .iter()
            .filter(|field| !rows(PAGE).any(|row| names(row.options).any(|name| name == **field)))
            .collect();
        assert!(missing.is_empty(), "docs/from-trl.md has no row for {missing:?}");
    }

    #[test]
    fn rows_have_existing_keys_or_none() {
        let known: Vec<&str> = keys().iter().map(|key| key.path).collect();
        for row in rows(PAGE) {
            assert!(!row.keys.is_empty() && row.keys != "-", "{row:?}");
            let is_path = |path: &str| {
                path.chars().all(|char| char.is_ascii_lowercase() || char.is_ascii_digit() || "._".contains(char))
            };
            for path in code(row.keys)
                .map(|code| code.split(':').next().unwrap_or(code))
                .filter(|path| is_path(path) && *path != "pjrt")
            {
                assert!(known.contains(&path), "{row:?}: {path} is no key");
            }
        }
    }

    #[rstest::rstest]
    #[case("grpo", "report_to", &["`logging.tensorboard`", "`wandb.mode`"])]
    #[case("lora", "lora_r", &["is `lora.r`"])]
    #[case("lora", "use_dora", &["no counterpart", "other methods than LoRA"])]
    #[case("optimizer", "per_device_train_batch_size", &["`grpo.prompts_per_step`"])]
    #[case("rollout", "use_vllm", &["`rollout.engine: vllm`", "`vllm serve`", "engines has its flags"])]
    #[case("data", "vllm_tensor_parallel_size", &["no counterpart", "--tensor-parallel-size"])]
    #[case("loss", "epsilon", &["`loss.epsilon_low`"])]
    #[case("run", "logging_steps", &["no counterpart", "metrics.jsonl"])]
    #[case("policy", "load_in_4bit", &["`policy.quantization: nf4`"])]
    fn options_of_trl_have_hints_in_every_section(#[case] section: &str, #[case] option: &str, #[case] words: &[&str]) {
        let error = |key: &str| {
            let layers = Layers::new().set(&[format!("{key}=1")]).unwrap();
            let error = layers.resolve::<TrainConfig>().unwrap_err();
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            format!("{error}: {}", cause.unwrap_or_default())
        };
        for key in [option.to_owned(), format!("{section}.{option}")] {
            let error = error(&key);
            assert!(error.contains(&format!("unknown key `{key}`")), "{error}");
            words.iter().for_each(|words| assert!(error.contains(words), "{words}: {error}"));
            assert!(!error.contains("]("), "{error}");
        }
    }

    #[test]
    fn a_key_of_another_section_comes_before_the_page() {
        let error = Layers::new().set(&["grpo.learning_rate=1".into()]).unwrap().resolve::<TrainConfig>().unwrap_err();
        let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(cause.contains("did you mean `optimizer.learning_rate`"), "{cause}");
    }

    #[test]
    fn tables_without_both_columns_are_not_read() {
        let page = "| TRL (default) | grpo (default) | |\n|---|---|---|\n| `a` (`b`), `c=\"d\"` | `x.a` (1), `x.e` | see [e](f.md) |\n\n\
                    | a | b |\n|---|---|\n| `g` | `h` |\n";
        let all: Vec<Row<'_>> = rows(page).collect();
        assert_eq!(all.len(), 1);
        let of: Vec<&str> = names(all[0].options).filter(|name| !name.is_empty()).collect();
        assert_eq!((of, without_links(all[0].remark)), (vec!["a", "c"], "see e".to_owned()));
    }
}
