//! Rows from files, in an order that depends on a cursor, with a held-out split.

mod columns;
mod index;
mod json;
mod lines;
mod magic;
mod order;
#[cfg(feature = "parquet")]
mod parquet;
mod report;
mod row;

pub use columns::{Column, Columns};
pub use index::RowIndex;
pub use report::{ANSWER_COLUMNS, DataReport, FileReport};

use crate::config::{DataConfig, DataFile};
use crate::dataset::{Dataset, Item};
use crate::error::{Error, Result};
use crate::prompt::{Prompt, PromptEncoder, is_held_out};
use grpo_rng::Purpose;
use lines::{Line, Lines, RowPosition};
use order::Schedule;
use rayon::prelude::*;
use row::{MOST_COLUMNS, RowReader, column_names};
use serde_json::{Map, Value};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::sync::Arc;

/// Rows of files. Every row is read once when the files are opened, so that invalid rows are reported before training; later, rows are read
/// when they are drawn, and only their positions are kept in memory.
///
/// Every epoch has another order, a function of the seed, the epoch and the row's number, so the whole state is a cursor.
///
/// ```no_run
/// use grpo_data::{DataConfig, DataFile, Dataset, FileDataset, PromptEncoder};
///
/// # fn main() -> grpo_data::Result<()> {
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
    index: RowIndex,
    /// The files with training rows.
    trained: Vec<usize>,
    order: Schedule,
    seed: u64,
    cursor: u64,
}

struct OpenFile {
    lines: Lines,
    source: Arc<str>,
    weight: Option<f64>,
}

impl OpenFile {
    fn open(file: &DataFile) -> Result<Self> {
        Ok(Self { lines: Lines::open(file)?, source: file.source().into(), weight: file.weight })
    }

    /// Returns a row and the hash that selects its split.
    fn item(&self, reader: &RowReader, fields: Map<String, Value>, place: RowPosition) -> Result<(u64, Item)> {
        reader.item(fields, &self.source).map_err(|reason| self.lines.row(place.line(), reason))
    }

    fn read(&self, reader: &RowReader, place: RowPosition) -> Result<Item> {
        Ok(self.item(reader, self.lines.read(place)?, place)?.1)
    }
}

/// The state of reading all rows once.
struct Opening<'a> {
    config: &'a DataConfig,
    reader: &'a RowReader,
    encoder: &'a PromptEncoder<'a>,
    files: Vec<OpenFile>,
    index: RowIndex,
    /// The held-out rows with their hashes.
    held_out: Vec<(u64, usize, RowPosition)>,
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
        let (files, index) = (vec![], RowIndex::default());
        let mut opening = Opening { config, reader: &reader, encoder, files, index, held_out: vec![] };
        // Held-out files come first, because their prompts must not be trained on.
        for file in &config.eval_files {
            opening.read(file, &Split::HeldOut)?;
        }
        let prompts = opening.held_out.iter().map(|(hash, _, _)| *hash).collect();
        let split = if config.eval_files.is_empty() { Split::Share } else { Split::Training(prompts) };
        for file in &config.files {
            opening.read(file, &split)?;
        }
        let Opening { files, mut index, mut held_out, .. } = opening;
        index.report.files.rotate_left(config.eval_files.len());
        if index.report.training() == 0 {
            return Err(Error::Empty { report: index.report });
        }
        // Sorted by hash instead of by file: the first rows are then a sample of all, independent of the seed.
        held_out.sort_by_key(|(hash, file, place)| (*hash, *file, place.line()));
        index.held_out = held_out.into_iter().map(|(_, file, place)| (file, place)).collect();
        let report = index.report.clone();
        Ok((Self::of(config, seed, reader, files, index), report))
    }

    /// Opens the files of a configuration without reading rows. `index` is the result for the same files, configuration and model.
    ///
    /// # Errors
    /// [`Error::Config`]; [`Error::Io`] and [`Error::File`] for a file that cannot be opened, or for other files than those in the index.
    pub fn with_index(config: &DataConfig, seed: u64, has_chat_template: bool, index: RowIndex) -> Result<Self> {
        config.validate()?;
        let reader = RowReader::new(config, has_chat_template)?;
        let named: Vec<&DataFile> = config.eval_files.iter().chain(&config.files).collect();
        let has_place = index.held_out.iter().all(|(file, _)| *file < named.len());
        if index.training.len() != named.len() || !has_place || index.report.training() == 0 {
            let path = named.first().map(|file| file.path.clone()).unwrap_or_default();
            return Err(Error::File { path, reason: "the index is that of other files".into() });
        }
        let files = named.into_iter().map(OpenFile::open).collect::<Result<_>>()?;
        Ok(Self::of(config, seed, reader, files, index))
    }

    fn of(config: &DataConfig, seed: u64, reader: RowReader, files: Vec<OpenFile>, index: RowIndex) -> Self {
        let trained: Vec<usize> = (0..files.len()).filter(|file| !index.training[*file].is_empty()).collect();
        let order = Schedule::new(&[], seed, Purpose::TrainProblem, config.shuffle);
        let mut data = Self { reader, files, index, trained, order, seed, cursor: 0 };
        data.order = data.schedule(Purpose::TrainProblem, config.shuffle);
        data
    }

    fn schedule(&self, purpose: Purpose, is_shuffled: bool) -> Schedule {
        let size = |file: &usize| (self.index.training[*file].len() as u64, self.files[*file].weight);
        Schedule::new(&self.trained.iter().map(size).collect::<Vec<_>>(), self.seed, purpose, is_shuffled)
    }

    fn row(&self, file: usize, place: RowPosition) -> Result<Item> {
        self.files[file].read(&self.reader, place)
    }

    fn training_row(&self, (file, row): (usize, usize)) -> Result<Item> {
        let file = self.trained[file];
        self.row(file, self.index.training[file][row])
    }
}

/// The number of rows at the start of a file whose prompts are always encoded. Of later rows, only prompts that may be too long are encoded
/// at first. At the end of the file, the [`LONGEST_ROWS`] prompts with the largest bounds are encoded to find the longest prompt.
const EXACT_ROWS: usize = 1 << 11;
const LONGEST_ROWS: usize = 1 << 9;

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
        let mut report = FileReport { path: file.path.clone(), ..FileReport::default() };
        let file = OpenFile::open(file)?;
        let (mut training, mut held_out, index) = (vec![], vec![], self.files.len());
        let mut longest = BinaryHeap::new();
        let limit = [
            (self.config.max_prompt_length, "data.max_prompt_length", ""),
            (self.encoder.max_tokens, "the model's context allows", " beside rollout.max_completion_length"),
        ];
        let limit = limit.into_iter().filter_map(|(limit, name, beside)| Some((limit?, name, beside)));
        let limit = limit.min_by_key(|(limit, ..)| *limit);
        let limit = limit.map(|(limit, name, beside)| (limit, format!("longer than {name}, {limit} tokens{beside}")));
        file.lines.for_each(|rows| {
            let (known, reader) = (&report.columns, self.reader);
            let parse = |(place, text): &Line| {
                let fields = file.lines.parse(text, place.line())?;
                let new = column_names(fields.iter().filter(|(column, _)| !known.contains(*column)));
                let columns: Vec<String> = new.collect();
                let (hash, item) = file.item(reader, fields, *place)?;
                Ok((*place, hash, item, columns))
            };
            let parsed: Vec<Result<_>> = rows.par_iter().map(parse).collect();
            // The prompts before the first error.
            let good = parsed.iter().map_while(|row| row.as_ref().ok());
            let prompts: Vec<&Prompt> = good.map(|(_, _, item, _)| &item.prompt).collect();
            // The first rows are encoded exactly; for later rows, a bound below the limit is enough.
            let is_exact = self.encoder.is_exact || report.rows < EXACT_ROWS;
            let mut lengths = match &limit {
                Some((limit, _)) => (self.encoder.count)(&prompts, if is_exact { 0 } else { *limit }),
                None => vec![],
            }
            .into_iter();
            for row in parsed {
                let (place, hash, item, columns) = row?;
                report.rows += 1;
                for column in columns {
                    if report.columns.len() < MOST_COLUMNS {
                        report.columns.insert(column);
                    }
                }
                let mut tokens = 0;
                if let (Some((limit, reason)), Some(length)) = (&limit, lengths.next()) {
                    let fault = |e| file.lines.row(place.line(), format!("the prompt: {e}"));
                    tokens = length.map_err(fault)?;
                    let dropped = match tokens {
                        0 => Some("a prompt without tokens".into()),
                        _ => (tokens > *limit).then(|| reason.clone()),
                    };
                    if let Some(reason) = dropped {
                        *report.dropped.entry(reason).or_default() += 1;
                        continue;
                    }
                }
                match split {
                    Split::Training(held_out) if held_out.contains(&hash) => {
                        *report.dropped.entry("the same prompt is in data.eval_files".into()).or_default() += 1;
                        continue;
                    }
                    Split::Share if !is_held_out(hash, self.config.held_out_fraction) => training.push(place),
                    Split::Training(_) => training.push(place),
                    Split::Share | Split::HeldOut => {
                        report.held_out += 1;
                        held_out.push((hash, index, place));
                    }
                }
                match is_exact {
                    true => report.longest_prompt = report.longest_prompt.max(tokens),
                    false => {
                        longest.push(Reverse((tokens, place)));
                        if longest.len() > LONGEST_ROWS {
                            longest.pop();
                        }
                    }
                }
                if item.answers().all(|answer| answer.trim().is_empty()) {
                    report.without_answer += 1;
                    report.first_without_answer.get_or_insert(place.line());
                }
                report.text_prompts += usize::from(matches!(item.prompt, Prompt::Text(_)));
            }
            Ok(())
        })?;
        self.held_out.extend(held_out);
        let bounds = longest.into_iter().filter(|Reverse((bound, _))| *bound > report.longest_prompt);
        let items = bounds.map(|Reverse((_, place))| file.read(self.reader, place)).collect::<Result<Vec<_>>>()?;
        let counted = (self.encoder.count)(&items.iter().map(|item| &item.prompt).collect::<Vec<_>>(), 0);
        report.longest_prompt = counted.into_iter().flatten().fold(report.longest_prompt, usize::max);
        report.training = training.len();
        self.index.report.files.push(report);
        self.index.training.push(training);
        self.files.push(file);
        Ok(())
    }
}

impl Dataset for FileDataset {
    fn next_batch(&mut self, count: usize) -> Result<Vec<Item>> {
        let places: Vec<_> = (0..count as u64).map(|index| self.order.at(self.cursor + index)).collect();
        let items = places.into_iter().map(|place| self.training_row(place)).collect::<Result<_>>()?;
        self.cursor += count as u64;
        Ok(items)
    }

    fn held_out(&self, count: usize) -> Result<Vec<Item>> {
        let found = self.index.held_out.len();
        if count.max(1) > found {
            return Err(Error::TooFewRows { wanted: count.max(1), found });
        }
        let count = if count == 0 { found } else { count };
        self.index.held_out[..count].iter().map(|(file, place)| self.row(*file, *place)).collect()
    }

    fn num_held_out(&self) -> Option<usize> {
        Some(self.index.held_out.len())
    }

    fn probe(&self, count: usize) -> Result<Vec<Item>> {
        let mut order = self.schedule(Purpose::Probe, true);
        (0..count as u64).map(|position| self.training_row(order.at(position))).collect()
    }

    fn index(&self) -> Option<RowIndex> {
        Some(self.index.clone())
    }

    /// Returns the number of rows drawn from the training stream.
    fn cursor(&self) -> u64 {
        self.cursor
    }

    fn set_cursor(&mut self, cursor: u64) {
        self.cursor = cursor;
    }
}
