//! Opens the input as a file of rows, and reads the rows. The first byte selects the format and the columns.
#![no_main]

use grpo_data::{Columns, DataConfig, DataFile, Dataset, FileDataset, FileFormat, PromptEncoder};
use libfuzzer_sys::fuzz_target;
use std::path::PathBuf;
use std::sync::LazyLock;

/// The file of the current input. The folder is removed by the system.
static FILE: LazyLock<PathBuf> = LazyLock::new(|| tempfile::tempdir().expect("a folder").keep().join("rows"));

fuzz_target!(|input: &[u8]| {
    let Some((options, rows)) = input.split_first() else { return };
    std::fs::write(&*FILE, rows).expect("the file can be written");
    let is = |bit: u8| options >> bit & 1 == 1;
    let format = Some(if is(0) { FileFormat::Json } else { FileFormat::Jsonl });
    let mut config = DataConfig { files: vec![DataFile { format, ..DataFile::new(&*FILE) }], ..DataConfig::default() };
    config.answer_column = is(1).then(|| "reward_model.ground_truth".into());
    config.messages_column = is(2).then(|| "messages".into());
    config.source_column = is(3).then(|| "source".into());
    config.system_prompt = is(4).then(|| "Be short.".into());
    config.prompts_are_rendered = Some(is(5));
    let encoder = PromptEncoder { has_chat_template: is(6), max_tokens: is(7).then_some(8), ..PromptEncoder::none() };
    let _ = Columns::read(&config.files);
    let Ok((mut dataset, report)) = FileDataset::open(&config, 1, &encoder) else { return };
    assert!(report.training() > 0, "{report}");
    // Rows that could be read once can be read again.
    let batch = dataset.next_batch(3).expect("rows of the file");
    if report.held_out() > 0 {
        assert_eq!(dataset.held_out(0).expect("rows of the file").len(), report.held_out());
    }
    let index = dataset.index().expect("an index");
    let mut again = FileDataset::with_index(&config, 1, is(6), index).expect("the index of this file");
    let other = again.next_batch(3).expect("rows of the file");
    assert_eq!(format!("{batch:?}"), format!("{other:?}"));
});
