//! Rows from files, in an order that depends on a cursor, with a held-out split.

mod columns;
mod lines;
mod magic;
mod order;
#[cfg(feature = "parquet")]
mod parquet;
mod report;
mod row;

pub use columns::{Column, Columns};
pub(crate) use lines::check_file;
pub use report::{ANSWER_COLUMNS, DataReport, FileReport};

use crate::config::{DataConfig, DataFile};
use crate::dataset::{Dataset, Item};
use crate::error::{Error, Result};
use crate::open::PromptEncoder;
use crate::prompt::Prompt;
use crate::split::is_held_out;
use lines::{Lines, Place};
use order::Schedule;
use rng::Purpose;
use row::RowReader;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Rows of files. Every row is read once when the files are opened, so that invalid rows are reported before training; later, rows are read
/// when they are drawn, and only their positions are kept in memory.
///
/// Every epoch has another order, a function of the seed, the epoch and the row's number, so the whole state is a cursor.
///
/// ```no_run
/// use data::{DataConfig, DataFile, Dataset, FileDataset, PromptEncoder};
///
/// # fn main() -> data::Result<()> {
/// let config = DataConfig { files: vec![DataFile::new("train.jsonl")], ..Default::default() };
/// let (mut rows, report) = FileDataset::open(&config, 0, &PromptEncoder::none())?;
/// println!("{report}");
/// let batch = rows.next_batch(8)?;
/// # Ok(())
/// # }
/// ```
pub struct FileDataset {
    reader: RowReader,
    files: Vec<OpenFile>,
    /// The files with training rows.
    trained: Vec<usize>,
    /// The held-out rows by file and position, in the order of their hashes.
    held_out: Vec<(usize, Place)>,
    order: Schedule,
    seed: u64,
    cursor: u64,
}

/// A file with the positions of its training rows.
struct OpenFile {
    lines: Lines,
    source: Arc<str>,
    weight: Option<f64>,
    training: Vec<Place>,
}

/// The state of reading all rows once.
struct Opening<'a> {
    config: &'a DataConfig,
    reader: &'a RowReader,
    encoder: &'a PromptEncoder<'a>,
    files: Vec<OpenFile>,
    report: DataReport,
    /// The held-out rows with their hashes.
    held_out: Vec<(u64, usize, Place)>,
}

impl FileDataset {
    /// Opens the files of a configuration and reads every row once. `encoder` counts the tokens of prompts and has the properties of the
    /// model's chat template.
    ///
    /// # Errors
    /// [`Error::Config`]; [`Error::Io`] and [`Error::File`] for a file; [`Error::Row`] for a row that is not a JSON object in UTF-8, lacks
    /// its prompt, or cannot be encoded; [`Error::Empty`], with the reasons, if no row is left.
    pub fn open(config: &DataConfig, seed: u64, encoder: &PromptEncoder<'_>) -> Result<(Self, DataReport)> {
        config.validate()?;
        let reader = RowReader::new(config, encoder.has_chat_template)?;
        let (files, report) = (vec![], DataReport::default());
        let mut opening = Opening { config, reader: &reader, encoder, files, report, held_out: vec![] };
        // Held-out files come first, because their prompts must not be trained on.
        for file in &config.eval_files {
            opening.read(file, &Split::HeldOut)?;
        }
        let prompts = opening.held_out.iter().map(|(hash, _, _)| *hash).collect();
        let split = if config.eval_files.is_empty() { Split::Share } else { Split::Training(prompts) };
        for file in &config.files {
            opening.read(file, &split)?;
        }
        let Opening { files, mut report, mut held_out, .. } = opening;
        report.files.rotate_left(config.eval_files.len());
        if report.training() == 0 {
            return Err(Error::Empty { report });
        }
        // Sorted by hash instead of by file: the first rows are then a sample of all, independent of the seed.
        held_out.sort_by_key(|(hash, file, place)| (*hash, *file, place.line));
        let held_out = held_out.into_iter().map(|(_, file, place)| (file, place)).collect();
        let trained: Vec<usize> = (0..files.len()).filter(|file| !files[*file].training.is_empty()).collect();
        let order = Self::schedule(&files, &trained, seed, Purpose::TrainProblem, config.shuffle);
        Ok((Self { reader, files, trained, held_out, order, seed, cursor: 0 }, report))
    }

    fn row(&self, file: usize, place: Place) -> Result<Item> {
        let file = &self.files[file];
        let fields = file.lines.read(place)?;
        let item = self.reader.question(&fields).and_then(|question| self.reader.item(fields, question, &file.source));
        item.map_err(|reason| file.lines.row(u64::from(place.line), reason))
    }
}

/// The maximum number of columns that a report lists.
const MOST_COLUMNS: usize = 32;

/// The use of a file's rows.
enum Split {
    /// All rows are held out.
    HeldOut,
    /// All rows are trained on, except prompts with these hashes.
    Training(BTreeSet<u64>),
    /// A share is held out, selected by the hash of the prompt.
    Share,
}

impl Opening<'_> {
    fn read(&mut self, file: &DataFile, split: &Split) -> Result<()> {
        let (lines, source) = (Lines::open(file)?, Arc::from(file.source()));
        let mut report = FileReport { path: lines.path().to_owned(), ..FileReport::default() };
        let (mut training, index) = (vec![], self.files.len());
        let limit = [
            self.config
                .max_prompt_length
                .map(|limit| (limit, format!("longer than data.max_prompt_length, {limit} tokens"))),
            self.encoder
                .max_tokens
                .map(|limit| (limit, format!("longer than the model's context allows, {limit} tokens"))),
        ];
        let limit = limit.into_iter().flatten().min_by_key(|(limit, _)| *limit);
        lines.for_each(|place, fields| {
            let fault = |reason: String| lines.row(u64::from(place.line), reason);
            report.rows += 1;
            for column in fields.keys() {
                if report.columns.len() < MOST_COLUMNS && !report.columns.contains(column) {
                    report.columns.insert(column.clone());
                }
            }
            let question = self.reader.question(&fields).map_err(fault)?;
            let hash = question.hash();
            let item = self.reader.item(fields, question, &source).map_err(fault)?;
            let mut tokens = 0;
            if let Some((limit, reason)) = &limit {
                let length = (self.encoder.count)(&item.prompt).map_err(|e| fault(format!("the prompt: {e}")))?;
                if length > *limit {
                    *report.dropped.entry(reason.clone()).or_default() += 1;
                    return Ok(());
                }
                if length == 0 {
                    *report.dropped.entry("a prompt without tokens".into()).or_default() += 1;
                    return Ok(());
                }
                tokens = length;
            }
            match split {
                Split::Training(held_out) if held_out.contains(&hash) => {
                    *report.dropped.entry("the same prompt is in data.eval_files".into()).or_default() += 1;
                    return Ok(());
                }
                Split::Share if !is_held_out(hash, self.config.held_out_fraction) => training.push(place),
                Split::Training(_) => training.push(place),
                Split::Share | Split::HeldOut => {
                    report.held_out += 1;
                    self.held_out.push((hash, index, place));
                }
            }
            report.longest_prompt = report.longest_prompt.max(tokens);
            if item.answer.as_deref().is_none_or(|answer| answer.trim().is_empty()) {
                report.without_answer += 1;
                report.first_without_answer.get_or_insert(u64::from(place.line));
            }
            report.text_prompts += usize::from(matches!(item.prompt, Prompt::Text(_)));
            Ok(())
        })?;
        report.training = training.len();
        self.report.files.push(report);
        self.files.push(OpenFile { lines, source, weight: file.weight, training });
        Ok(())
    }
}

impl FileDataset {
    /// Returns the order of the training rows for the stream with this purpose.
    fn schedule(files: &[OpenFile], trained: &[usize], seed: u64, purpose: Purpose, is_shuffled: bool) -> Schedule {
        let sizes = trained.iter().map(|file| (files[*file].training.len() as u64, files[*file].weight));
        Schedule::new(&sizes.collect::<Vec<_>>(), seed, purpose, is_shuffled)
    }

    /// Returns the training row for a position in a schedule.
    fn training_row(&self, (file, row): (usize, usize)) -> Result<Item> {
        let file = self.trained[file];
        self.row(file, self.files[file].training[row])
    }
}

impl Dataset for FileDataset {
    /// Returns the next `count` rows. Rows repeat in the next epoch, in another order.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Row`] if a file has changed.
    fn next_batch(&mut self, count: usize) -> Result<Vec<Item>> {
        let places: Vec<_> = (0..count as u64).map(|index| self.order.at(self.cursor + index)).collect();
        let items = places.into_iter().map(|place| self.training_row(place)).collect::<Result<_>>()?;
        self.cursor += count as u64;
        Ok(items)
    }

    /// Returns the first `count` held-out rows in an order that is independent of the seed; 0 returns all.
    ///
    /// # Errors
    /// [`Error::TooFewRows`] if there are fewer, or none.
    fn held_out(&self, count: usize) -> Result<Vec<Item>> {
        let found = self.held_out.len();
        if count.max(1) > found {
            return Err(Error::TooFewRows { wanted: count.max(1), found });
        }
        let count = if count == 0 { found } else { count };
        self.held_out[..count].iter().map(|(file, place)| self.row(*file, *place)).collect()
    }

    fn num_held_out(&self) -> Option<usize> {
        Some(self.held_out.len())
    }

    fn probe(&self, count: usize) -> Result<Vec<Item>> {
        let mut order = Self::schedule(&self.files, &self.trained, self.seed, Purpose::Probe, true);
        (0..count as u64).map(|position| self.training_row(order.at(position))).collect()
    }

    /// Returns the number of rows drawn from the training stream.
    fn cursor(&self) -> u64 {
        self.cursor
    }

    fn set_cursor(&mut self, cursor: u64) {
        self.cursor = cursor;
    }
}
