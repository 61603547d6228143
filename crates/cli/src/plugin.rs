//! `grpo plugin`: installs and lists PJRT plugins.

use crate::output::{Outcome, emit, emit_document, emit_json};
use crate::{child, table::Sheet};
use anyhow::Context;
use clap::Subcommand;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use grpo_backend_tpu::plugins::{self, Kind};
use grpo_pjrt::install::{self, Step};
use serde::{Deserialize, Serialize};
use std::io::{IsTerminal, Write};
use std::process::Command;
use std::time::Duration;

/// The time limit of `grpo plugin list` for each plugin: a client of several GPUs takes seconds to open.
const LIMIT: Duration = Duration::from_secs(60);

/// Arguments of `grpo plugin`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Download a pinned plugin with this machine's pip, check its SHA-256, and unpack it into the user's cache.
    Install {
        /// Kind of device.
        #[arg(value_parser = kinds())]
        kind: Kind,
        /// Download it again even if it is installed.
        #[arg(long)]
        force: bool,
    },
    /// Show the available plugins and their devices.
    List {
        /// Print one JSON document instead of a table.
        #[arg(long)]
        json: bool,
        /// Inspect one plugin in this process, for the parent process.
        #[arg(long, hide = true, value_parser = kinds())]
        worker: Option<Kind>,
    },
}

/// Returns the parser of a kind of device.
fn kinds() -> impl TypedValueParser<Value = Kind> {
    let named = |name: String| Kind::ALL.into_iter().find(|kind| kind.name() == name).expect("a possible value");
    PossibleValuesParser::new(Kind::ALL.map(Kind::name)).map(named)
}

/// A plugin in the document of `--json`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Listed {
    pub(crate) kind: String,
    pub(crate) state: State,
    /// The path of the plugin's file; `None` if there is none.
    pub(crate) path: Option<String>,
    /// The version of the PJRT C API.
    pub(crate) api_version: Option<String>,
    /// The name and version of the platform according to the plugin.
    pub(crate) platform: Option<String>,
    pub(crate) platform_version: Option<String>,
    /// The devices; empty if the plugin finds none.
    pub(crate) devices: Vec<String>,
    /// The missing file, or the reason why there are no devices. This is not an error, because compiling needs no device.
    pub(crate) note: Option<String>,
}

/// The state of a plugin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    /// There is no file.
    #[default]
    NotInstalled,
    /// The plugin loads, and serves devices of another kind.
    OtherPlatform,
    /// The file is damaged or no plugin, or another user may write to it, or the plugin ends the process that loads it.
    Unusable,
    /// The plugin does not load, or opens no device, within the time limit.
    TimedOut,
    /// The plugin loads, and opens no device.
    NoDevices,
    /// The plugin has opened its devices.
    Ready,
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    match args.action {
        Action::Install { kind, force } => install(kind, force)?,
        Action::List { worker: Some(kind), .. } => emit_document(&serde_json::to_string(&look(kind))?)?,
        Action::List { json, worker: None } => {
            let plugins: Vec<Listed> = Kind::ALL.into_iter().map(|kind| look_elsewhere(kind, LIMIT)).collect();
            match json {
                true => emit_json(&plugins)?,
                false => emit(&text(&plugins))?,
            }
        }
    }
    Ok(Outcome::Done)
}

fn install(kind: Kind, force: bool) -> anyhow::Result<()> {
    // Downloads take minutes, so progress is shown on a terminal.
    let shows = std::io::stderr().is_terminal();
    let progress = |step: Step| {
        let (Step::Download(what) | Step::Verify(what) | Step::Unpack(what)) = step;
        let verb = match step {
            Step::Download(_) => "downloading",
            Step::Verify(_) => "checking the SHA-256 of",
            Step::Unpack(_) => "unpacking",
        };
        tracing::info!("{verb} {what}");
        if shows {
            let _ = writeln!(std::io::stderr(), "{verb} {what} ...");
        }
    };
    let installed = if force { install::reinstall(kind, progress) } else { install::install(kind, progress) };
    let installed = installed.with_context(|| format!("cannot install the plugin `{}`", kind.name()))?;
    let verb = match &installed.replaced {
        Some(reason) => {
            writeln!(std::io::stderr(), "the previous installation was replaced: {reason}")?;
            "installed again:"
        }
        None if installed.fresh => "installed",
        None => "already there:",
    };
    emit(&format!(
        "{verb} {} {}, wheel SHA-256 {}\n{}\n",
        kind.name(),
        installed.version,
        installed.sha256,
        installed.path.display()
    ))
    .with_context(|| format!("the plugin in {} is complete", installed.path.display()))
}

/// Returns the message of an error without the name of the backend, which the kind of the plugin repeats.
fn reason(error: grpo_core::Error) -> String {
    match error {
        grpo_core::Error::Backend { message, .. } => message,
        error => error.to_string(),
    }
}

/// Loads the plugin of `kind` and opens its devices.
fn look(kind: Kind) -> Listed {
    let listed = Listed { kind: kind.name().into(), ..Listed::default() };
    let failed = |listed: Listed, state, note: String| Listed { state, note: Some(note), ..listed };
    let path = match plugins::find(kind, None) {
        Ok(path) => path,
        Err(error) => {
            let named = std::env::var_os(plugins::VARIABLE).is_some_and(|value| !value.is_empty());
            let missing = matches!(install::find(kind), Ok(None) | Err(grpo_pjrt::Error::NoCache));
            let state = if missing && !named { State::NotInstalled } else { State::Unusable };
            return failed(listed, state, reason(error));
        }
    };
    let listed = Listed { path: Some(path.display().to_string()), ..listed };
    let plugin = match plugins::load(kind, None) {
        Ok(plugin) => plugin,
        Err(error) => return failed(listed, State::Unusable, reason(error)),
    };
    let (major, minor) = plugin.api_version();
    let listed = Listed { api_version: Some(format!("{major}.{minor}")), ..listed };
    // By default the client would reserve most of a GPU's memory.
    let options: &[(&str, grpo_pjrt::NamedValue)] = match kind {
        Kind::Cuda => &[("preallocate", grpo_pjrt::NamedValue::Bool(false))],
        Kind::Cpu | Kind::Tpu => &[],
    };
    let client = match plugin.client(options) {
        Ok(client) => client,
        Err(error) => return failed(listed, State::NoDevices, format!("no devices here: {error}")),
    };
    let platform = client.platform_name();
    if !platform.eq_ignore_ascii_case(kind.name()) {
        return failed(listed, State::OtherPlatform, format!("it serves the platform `{platform}`"));
    }
    let devices = client.addressable_devices().iter().map(|device| match device.description() {
        Ok(description) => format!("{} {}", description.id, description.kind),
        Err(error) => error.to_string(),
    });
    Listed {
        state: State::Ready,
        platform: Some(platform.into()),
        platform_version: Some(client.platform_version().into()),
        devices: devices.collect(),
        ..listed
    }
}

/// Runs [`look`] in a separate process, because a plugin that aborts ends its process, and one that hangs is killed after `limit`.
pub(crate) fn look_elsewhere(kind: Kind, limit: Duration) -> Listed {
    let ended = std::env::current_exe().and_then(|binary| {
        let mut command = Command::new(binary);
        child::run(command.args(["plugin", "list", "--worker", kind.name()]), limit)
    });
    let failed = |state, note: String| {
        let path = plugins::find(kind, None).ok().map(|path| path.display().to_string());
        Listed { kind: kind.name().into(), state, path, note: Some(note), ..Listed::default() }
    };
    match ended {
        Ok(ended) => serde_json::from_str(ended.stdout.lines().last().unwrap_or_default()).unwrap_or_else(|_| {
            match ended.status {
                Some(status) => failed(State::Unusable, format!("the plugin has ended its process ({status})")),
                None => failed(State::TimedOut, format!("the plugin does not load within {} s", limit.as_secs_f64())),
            }
        }),
        Err(error) => failed(State::Unusable, format!("cannot start a process: {error}")),
    }
}

fn text(plugins: &[Listed]) -> String {
    let mut table = Sheet::new(["kind", "PJRT API", "platform", "devices", "path"], 0..0);
    let mut notes = String::new();
    for plugin in plugins {
        let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
        let devices = match plugin.devices.as_slice() {
            [] => "-".into(),
            [one] => one.clone(),
            [first, ..] => format!("{first} and {} more", plugin.devices.len() - 1),
        };
        table.row([
            plugin.kind.clone(),
            or_dash(&plugin.api_version),
            or_dash(&plugin.platform),
            devices,
            or_dash(&plugin.path),
        ]);
        if let Some(note) = &plugin.note {
            notes.push_str(&format!("{}: {}\n", plugin.kind, note.lines().next().unwrap_or_default()));
        }
    }
    let table = table.text();
    format!("{table}\n{}{notes}", if notes.is_empty() { "" } else { "\n" })
}
