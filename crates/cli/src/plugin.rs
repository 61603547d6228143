//! `grpo plugin`: installs and lists PJRT plugins.

use crate::{Outcome, emit, emit_document, emit_json, table::Sheet};
use anyhow::Context;
use backend_tpu::plugins::{self, Kind};
use clap::Subcommand;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use pjrt::install::{self, Step};
use serde::{Deserialize, Serialize};
use std::io::{IsTerminal, Write};
use std::process::{Command, Stdio};

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
#[derive(Debug, Default, Serialize, Deserialize)]
struct Listed {
    kind: String,
    /// The path of the plugin's file; `None` if there is none.
    path: Option<String>,
    /// The version of the PJRT C API.
    api_version: Option<String>,
    /// The name and version of the platform according to the plugin.
    platform: Option<String>,
    platform_version: Option<String>,
    /// The devices; empty if the plugin finds none.
    devices: Vec<String>,
    /// The missing file, or the reason why there are no devices. This is not an error, because compiling needs no device.
    note: Option<String>,
}

pub(crate) fn run(args: Args) -> anyhow::Result<Outcome> {
    match args.action {
        Action::Install { kind, force } => install(kind, force)?,
        Action::List { worker: Some(kind), .. } => emit_document(&serde_json::to_string(&look(kind))?)?,
        Action::List { json, worker: None } => {
            let plugins: Vec<Listed> = Kind::ALL.into_iter().map(look_elsewhere).collect();
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
}

/// Loads the plugin of `kind` and opens its devices.
fn look(kind: Kind) -> Listed {
    let mut listed = Listed { kind: kind.name().into(), ..Listed::default() };
    let path = match plugins::find(kind, None) {
        Ok(path) => path,
        Err(error) => return Listed { note: Some(error.to_string()), ..listed },
    };
    listed.path = Some(path.display().to_string());
    let plugin = match plugins::load(kind, None) {
        Ok(plugin) => plugin,
        Err(error) => return Listed { note: Some(error.to_string()), ..listed },
    };
    let (major, minor) = plugin.api_version();
    listed.api_version = Some(format!("{major}.{minor}"));
    // By default the client would reserve most of a GPU's memory.
    let options: &[(&str, pjrt::NamedValue)] = match kind {
        Kind::Cuda => &[("preallocate", pjrt::NamedValue::Bool(false))],
        Kind::Cpu | Kind::Tpu => &[],
    };
    let client = match plugins::client(kind, None, options) {
        Ok(client) => client,
        Err(error) => return Listed { note: Some(format!("no devices here: {error}")), ..listed },
    };
    let devices = client.addressable_devices().iter().map(|device| match device.description() {
        Ok(description) => format!("{} {}", description.id, description.kind),
        Err(error) => error.to_string(),
    });
    Listed {
        platform: Some(client.platform_name().into()),
        platform_version: Some(client.platform_version().into()),
        devices: devices.collect(),
        ..listed
    }
}

/// Runs [`look`] in a separate process, because a plugin that aborts ends its process.
fn look_elsewhere(kind: Kind) -> Listed {
    let output = std::env::current_exe().and_then(|binary| {
        let mut command = Command::new(binary);
        command.args(["plugin", "list", "--worker", kind.name()]).stdin(Stdio::null());
        command.output()
    });
    let failed = |note: String| Listed { kind: kind.name().into(), note: Some(note), ..Listed::default() };
    match output {
        Ok(output) => serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| failed(format!("the plugin has ended its process ({})", output.status))),
        Err(error) => failed(format!("cannot start a process: {error}")),
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
