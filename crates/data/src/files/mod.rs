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
use lines::{Lines, RowPosition};
use order::Schedule;
use rayon::prelude::*;
use rng::Purpose;
use row::{MOST_COLUMNS, RowReader, column_names};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
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
    held_out: Vec<(usize, RowPosition)>,
    order: Schedule,
    seed: u64,
    cursor: u64,
    report: DataReport,
}

/// The result of reading files: the positions of training and held-out rows, and the report. It is valid only for the same files,
/// configuration and encoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowIndex {
    /// The positions of the training rows of each file, starting with `data.eval_files`.
    training: Vec<Vec<RowPosition>>,
    /// The held-out rows in order: file and position.
    held_out: Vec<(usize, RowPosition)>,
    report: DataReport,
}

impl RowIndex {
    /// The counts of rows.
    pub fn report(&self) -> &DataReport {
        &self.report
    }
}

/// A file with the positions of its training rows.
struct OpenFile {
    lines: Lines,
    source: Arc<str>,
    weight: Option<f64>,
    training: Vec<RowPosition>,
}

/// The state of reading all rows once.
struct Opening<'a> {
    config: &'a DataConfig,
    reader: &'a RowReader,
    encoder: &'a PromptEncoder<'a>,
    files: Vec<OpenFile>,
    report: DataReport,
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
        Ok((Self::of(config, seed, reader, files, held_out, report.clone()), report))
    }

    /// Opens the files of a configuration without reading rows. `index` is the result for the same files, configuration and model.
    ///
    /// # Errors
    /// [`Error::Config`]; [`Error::Io`] and [`Error::File`] for a file that cannot be opened, or for other files than those in the index.
    pub fn with_index(config: &DataConfig, seed: u64, has_chat_template: bool, index: RowIndex) -> Result<Self> {
        config.validate()?;
        let reader = RowReader::new(config, has_chat_template)?;
        let named: Vec<&DataFile> = config.eval_files.iter().chain(&config.files).collect();
        let RowIndex { training, held_out, report } = index;
        let has_place = held_out.iter().all(|(file, _)| *file < named.len());
        if training.len() != named.len() || !has_place || report.training() == 0 {
            let path = named.first().map(|file| file.path.clone()).unwrap_or_default();
            return Err(Error::File { path, reason: "the index is that of other files".into() });
        }
        let files = named.into_iter().zip(training).map(|(file, training)| {
            Ok(OpenFile { lines: Lines::open(file)?, source: file.source().into(), weight: file.weight, training })
        });
        let files = files.collect::<Result<_>>()?;
        Ok(Self::of(config, seed, reader, files, held_out, report))
    }

    fn of(
        config: &DataConfig,
        seed: u64,
        reader: RowReader,
        files: Vec<OpenFile>,
        held_out: Vec<(usize, RowPosition)>,
        report: DataReport,
    ) -> Self {
        let trained: Vec<usize> = (0..files.len()).filter(|file| !files[*file].training.is_empty()).collect();
        let order = Self::schedule(&files, &trained, seed, Purpose::TrainProblem, config.shuffle);
        Self { reader, files, trained, held_out, order, seed, cursor: 0, report }
    }

    fn row(&self, file: usize, place: RowPosition) -> Result<Item> {
        let file = &self.files[file];
        let fields = file.lines.read(place)?;
        let item = self.reader.question(&fields).and_then(|question| self.reader.item(fields, question, &file.source));
        item.map_err(|reason| file.lines.row(u64::from(place.line), reason))
    }
}

/// The number of rows at the start of a file whose prompts are always encoded. Of later rows, only prompts that may be too long are encoded
/// at first. At the end of the file, the [`LONGEST_ROWS`] prompts with the largest bounds are encoded to find the longest prompt.
const EXACT_ROWS: usize = 1 << 11;
const LONGEST_ROWS: usize = 1 << 9;

/// A parsed row.
struct Parsed {
    place: RowPosition,
    /// The hash of the prompt, which selects the split.
    hash: u64,
    item: Item,
    /// The columns that are not in the report yet.
    columns: Vec<String>,
}

impl Parsed {
    /// Parses a row. `known` are the columns that are in the report.
    fn read(
        reader: &RowReader,
        lines: &Lines,
        place: RowPosition,
        text: &[u8],
        source: &Arc<str>,
        known: &BTreeSet<String>,
    ) -> Result<Self> {
        let fields = lines.parse(text, place.line)?;
        let columns = column_names(fields.iter().filter(|(column, _)| !known.contains(*column))).collect();
        let fault = |reason: String| lines.row(u64::from(place.line), reason);
        let question = reader.question(&fields).map_err(fault)?;
        let hash = question.hash();
        let item = reader.item(fields, question, source).map_err(fault)?;
        Ok(Self { place, hash, item, columns })
    }
}

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
        let (mut training, mut held_out, index) = (vec![], vec![], self.files.len());
        let mut longest = BinaryHeap::new();
        let limit = [
            self.config
                .max_prompt_length
                .map(|limit| (limit, format!("longer than data.max_prompt_length, {limit} tokens"))),
            self.encoder
                .max_tokens
                .map(|limit| (limit, format!("longer than the model's context allows, {limit} tokens"))),
        ];
        let limit = limit.into_iter().flatten().min_by_key(|(limit, _)| *limit);
        lines.for_each(|rows| {
            let known = &report.columns;
            let reader = self.reader;
            let parsed: Vec<Result<Parsed>> = rows
                .par_iter()
                .map(|(place, text)| Parsed::read(reader, &lines, *place, text, &source, known))
                .collect();
            // The rows before the first error.
            let good: Vec<&Parsed> = parsed.iter().map_while(|row| row.as_ref().ok()).collect();
            let prompts: Vec<&Prompt> = good.iter().map(|row| &row.item.prompt).collect();
            // The first rows are encoded exactly; for later rows, a bound below the limit is enough.
            let is_exact = self.encoder.is_exact || report.rows < EXACT_ROWS;
            let mut lengths = match &limit {
                Some((limit, _)) => (self.encoder.count)(&prompts, if is_exact { 0 } else { *limit }),
                None => vec![],
            }
            .into_iter();
            for row in parsed {
                let Parsed { place, hash, item, columns } = row?;
                report.rows += 1;
                for column in columns {
                    if report.columns.len() < MOST_COLUMNS {
                        report.columns.insert(column);
                    }
                }
                let mut tokens = 0;
                if let (Some((limit, reason)), Some(length)) = (&limit, lengths.next()) {
                    let fault = |e| lines.row(u64::from(place.line), format!("the prompt: {e}"));
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
                        longest.push(Reverse((tokens, <(u64, u32, u32)>::from(place))));
                        if longest.len() > LONGEST_ROWS {
                            longest.pop();
                        }
                    }
                }
                if item.answers().all(|answer| answer.trim().is_empty()) {
                    report.without_answer += 1;
                    report.first_without_answer.get_or_insert(u64::from(place.line));
                }
                report.text_prompts += usize::from(matches!(item.prompt, Prompt::Text(_)));
            }
            Ok(())
        })?;
        self.held_out.extend(held_out);
        let bounds = longest.into_iter().filter(|Reverse((bound, _))| *bound > report.longest_prompt);
        let items = bounds.map(|Reverse((_, place))| {
            let place = RowPosition::from(place);
            let fault = |reason: String| lines.row(u64::from(place.line), reason);
            let fields = lines.read(place)?;
            let question = self.reader.question(&fields).map_err(fault)?;
            self.reader.item(fields, question, &source).map_err(fault)
        });
        let items = items.collect::<Result<Vec<Item>>>()?;
        let counted = (self.encoder.count)(&items.iter().map(|item| &item.prompt).collect::<Vec<_>>(), 0);
        report.longest_prompt = counted.into_iter().flatten().fold(report.longest_prompt, usize::max);
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

    fn index(&self) -> Option<RowIndex> {
        let training = self.files.iter().map(|file| file.training.clone()).collect();
        Some(RowIndex { training, held_out: self.held_out.clone(), report: self.report.clone() })
    }

    /// Returns the number of rows drawn from the training stream.
    fn cursor(&self) -> u64 {
        self.cursor
    }

    fn set_cursor(&mut self, cursor: u64) {
        self.cursor = cursor;
    }
}
