//! Runs of Weights & Biases in the files of its SDK's offline mode.
//!
//! A run has one folder `wandb/offline-run-YYYYmmdd_HHMMSS-ID` per part: a resumed run gets another
//! folder with the same id, marked as a resumption. `wandb sync` uploads parts in the order of their times and creates config.yaml,
//! wandb-summary.json and wandb-metadata.json from the records; the folders do not contain them before.

mod earlier;
mod framing;
mod mode;
mod record;
mod upload;

use crate::Sink;
use crate::error::{Error, Result};
use crate::files::{Appender, host};
use crate::steps::Steps;
use earlier::Earlier;
use prost::Message;
use record::{
    Environment, Exit, Header, History, Item, Metric, MetricOptions, Record, Run, Step, Update, VersionInfo, What,
};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

pub use mode::Mode;
pub use upload::{obstacle, sync_command, upload};

/// The oldest program that can read these files, as in the SDK's own files.
const MIN_CONSUMER: &str = "0.70.0";

/// Names and location of a W&B run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The folder that contains `wandb/`.
    pub dir: PathBuf,
    /// The id of the run; see [`run_id`].
    pub id: String,
    /// The project of the run.
    pub project: String,
    /// The user or team; default the server's.
    pub entity: Option<String>,
    /// The displayed name.
    pub name: Option<String>,
    /// The group of the run.
    pub group: Option<String>,
    /// The tags of the run.
    pub tags: Vec<String>,
}

/// A sink that writes one part of a run.
#[derive(Debug)]
pub struct Wandb {
    file: Appender,
    /// Length of the file in bytes, which the framing needs.
    offset: u64,
    records: i64,
    steps: Steps,
    /// Series whose step metric this part has defined.
    defined: BTreeSet<String>,
    next_step: i64,
    began: SystemTime,
    seconds_before: f64,
}

impl Wandb {
    /// Opens a new part of the run with its configuration. Earlier parts in the same folder are continued. Incomplete records at
    /// their ends are truncated, because `wandb sync` fails on them.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Format`] if an earlier part has another format.
    pub fn open(options: &Options, config: &Map<String, Value>) -> Result<Self> {
        let earlier = Earlier::read(options)?;
        let began = SystemTime::now();
        let mut sink = Self {
            file: create(options)?,
            offset: 0,
            records: 0,
            steps: earlier.steps,
            defined: BTreeSet::new(),
            next_step: earlier.next_step,
            began,
            seconds_before: earlier.seconds,
        };
        let producer = concat!("grpo-sinks ", env!("CARGO_PKG_VERSION")).to_owned();
        let version_info = Some(VersionInfo { producer, min_consumer: MIN_CONSUMER.into() });
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let item = |(key, value): (&String, &Value)| Item {
            key: key.clone(),
            nested_key: Vec::new(),
            value_json: value.to_string(),
        };
        let run = Run {
            run_id: options.id.clone(),
            entity: text(&options.entity),
            project: options.project.clone(),
            config: Some(Update { update: config.iter().map(item).collect() }),
            run_group: text(&options.group),
            display_name: text(&options.name),
            tags: options.tags.clone(),
            host: host(),
            start_time: Some(began.into()),
            resume: earlier.parts > 0,
        };
        let environment = Environment {
            os: format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH),
            started_at: Some(began.into()),
            program: std::env::args().next().unwrap_or_default(),
            host: host(),
            cpu_count_logical: std::thread::available_parallelism().map_or(0, |n| n.get() as u32),
            writer_id: format!("{:032x}", rand::random::<u128>()),
        };
        sink.append(vec![What::Header(Header { version_info }), What::Run(run), What::Environment(environment)])?;
        Ok(sink)
    }

    /// Returns the folder of this part.
    pub fn folder(&self) -> &Path {
        self.file.path().parent().unwrap_or(Path::new("."))
    }

    fn append(&mut self, whats: Vec<What>) -> Result<()> {
        let mut bytes = if self.offset == 0 { framing::FILE_HEADER.to_vec() } else { Vec::new() };
        for what in whats {
            self.records += 1;
            let record = Record { num: self.records, what: Some(what) }.encode_to_vec();
            bytes.extend(framing::frame(&record, self.offset + bytes.len() as u64));
        }
        self.file.append(&bytes)?;
        self.offset += bytes.len() as u64;
        Ok(())
    }

    fn seconds(&self) -> f64 {
        self.seconds_before + self.began.elapsed().map_or(0.0, |elapsed| elapsed.as_secs_f64())
    }

    /// Returns the item with the seconds that W&B displays as the duration of a run.
    fn runtime(&self) -> Item {
        let nested_key = vec!["_wandb".into(), "runtime".into()];
        Item { key: String::new(), nested_key, value_json: (self.seconds() as u64).to_string() }
    }
}

impl Sink for Wandb {
    fn log(&mut self, series: &str, step: u64, values: &[(&str, f64)]) -> Result<()> {
        if !self.steps.lacks(series, step) {
            return Ok(());
        }
        let axis = axis(series);
        let mut whats = Vec::new();
        if self.defined.insert(series.to_owned()) {
            let options = Some(MetricOptions { step_sync: true, defined: true });
            whats.push(What::Metric(Metric { glob_name: format!("{series}/*"), step_metric: axis.clone(), options }));
        }
        let mut item: Vec<Item> =
            values.iter().map(|(name, value)| Item::number(format!("{series}/{name}"), *value)).collect();
        item.extend([
            Item::number(axis, step as f64),
            Item::number(earlier::STEP, self.next_step as f64),
            Item::number(earlier::RUNTIME, self.seconds()),
            Item::number("_timestamp", SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |t| t.as_secs_f64())),
        ]);
        // Like the SDK, write the last values as summary with every row, so that a killed run has a summary.
        let update = item.iter().cloned().chain([self.runtime()]).collect();
        whats.push(What::Summary(Update { update }));
        whats.push(What::History(History { item, step: Some(Step { num: self.next_step }) }));
        self.append(whats)?;
        self.next_step += 1;
        self.steps.add(series, step);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.file.sync()
    }

    fn finish(&mut self, exit_code: i32) -> Result<()> {
        let summary = Update { update: vec![self.runtime()] };
        let exit = Exit { exit_code, runtime: self.seconds() as i32 };
        self.append(vec![What::Summary(summary), What::Exit(exit)])?;
        self.file.sync()
    }
}

/// Returns the name of the step metric of a series, as in the Transformers integration.
fn axis(series: &str) -> String {
    format!("{series}/global_step")
}

/// Returns the id that all parts of a run share: the content of the file at `path`, or a new id that is written to it.
///
/// # Errors
/// [`Error::Io`]; [`Error::Format`] if the file has other content.
pub fn run_id(path: &Path) -> Result<String> {
    match grpo_files::read_regular(path, 1 << 12) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let id = text.trim();
            if (1..=64).contains(&id.len()) && id.bytes().all(|byte| ID_CHARACTERS.contains(&byte)) {
                return Ok(id.to_owned());
            }
            let reason = format!("expected the id of a W&B run, lowercase letters and digits, got {id:?}");
            Err(Error::Format { path: path.to_owned(), reason })
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let id: String =
                (0..8).map(|_| char::from(ID_CHARACTERS[rand::random_range(0..ID_CHARACTERS.len())])).collect();
            std::fs::write(path, format!("{id}\n")).map_err(Error::io("write", path))?;
            Ok(id)
        }
        Err(e) => Err(Error::io("read", path)(e)),
    }
}

const ID_CHARACTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyz0123456789";

/// Creates a folder with the empty file of a part. The second in its name is unique among the parts of a run.
fn create(options: &Options) -> Result<Appender> {
    let root = options.dir.join("wandb");
    std::fs::create_dir_all(&root).map_err(Error::io("create", &root))?;
    let mut time = jiff::Zoned::now();
    loop {
        let folder = root.join(format!("{}{}-{}", earlier::PREFIX, time.strftime("%Y%m%d_%H%M%S"), options.id));
        match std::fs::create_dir(&folder) {
            Ok(()) => {
                let files = folder.join("files");
                std::fs::create_dir(&files).map_err(Error::io("create", &files))?;
                return Appender::create(folder.join(earlier::file_name(&options.id)));
            }
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                time = time.saturating_add(jiff::SignedDuration::from_secs(1))
            }
            Err(e) => return Err(Error::io("create", &folder)(e)),
        }
    }
}

#[cfg(test)]
mod tests;
