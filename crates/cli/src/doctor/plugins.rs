//! PJRT plugins and their devices. Each plugin is loaded in a process of its own.

use super::check::Check;
use super::spawn;
use crate::plugin::{Listed, State, look_elsewhere};
use grpo_backend_tpu::plugins::{Kind, VARIABLE};
use grpo_files::counted;
use grpo_pjrt::install;
use serde_json::json;
use std::path::Path;
use std::time::Duration;

/// Loads the plugins of all kinds at the same time.
pub(super) fn look(limit: Duration) -> Vec<(Kind, Listed)> {
    std::thread::scope(|scope| {
        let started = Kind::ALL.map(|kind| (kind, spawn(scope, move || look_elsewhere(kind, limit))));
        started.map(|(kind, result)| (kind, result())).into()
    })
}

/// Returns `true` if a plugin must be downloaded: a device has none, or the installed one is unusable.
pub(super) fn needs_install(plugins: &[(Kind, Listed)]) -> bool {
    let needs = |(kind, listed): &(Kind, Listed)| match listed.state {
        State::NotInstalled => device(*kind).is_some(),
        State::Unusable => !matches!(install::find(*kind), Err(grpo_pjrt::Error::Exposed { .. })),
        State::OtherPlatform | State::TimedOut | State::NoDevices | State::Ready => false,
    };
    !is_named() && plugins.iter().any(needs)
}

pub(super) fn checks(plugins: &[(Kind, Listed)]) -> Vec<Check> {
    if !is_named() {
        return plugins.iter().map(|(kind, listed)| installed(*kind, listed, device(*kind))).collect();
    }
    // The variable names one plugin for all kinds, and each kind has tried it.
    plugins.iter().max_by_key(|(_, listed)| listed.state).map(|(_, listed)| named(listed)).into_iter().collect()
}

/// Returns `true` if the environment names the file of a plugin.
fn is_named() -> bool {
    std::env::var_os(VARIABLE).is_some_and(|value| !value.is_empty())
}

/// Returns the file with which the driver of a device shows that this machine has one; `None` without a device.
fn device(kind: Kind) -> Option<&'static str> {
    let file = match kind {
        Kind::Cpu => return None,
        Kind::Cuda => "/dev/nvidiactl",
        Kind::Tpu => "/dev/accel0",
    };
    Path::new(file).exists().then_some(file)
}

/// Judges the installed plugin of a kind; `device` is the file of a device of that kind.
fn installed(kind: Kind, listed: &Listed, device: Option<&str>) -> Check {
    let (id, name) = (format!("plugins.{}", kind.name()), kind.name());
    let check = match (listed.state, device) {
        (State::Ready, _) => Check::ok(id, format!("{}, {}", kind.version(), described(listed))),
        (State::NotInstalled, None) => Check::note(id, format!("not installed (`grpo plugin install {name}`)")),
        (State::NotInstalled, Some(file)) => Check::problem(
            id,
            format!("not installed, and this machine has a device ({file})"),
            format!("run `grpo plugin install {name}`"),
        ),
        (State::NoDevices, None) => {
            Check::note(id, format!("{}, {}; compiling needs no device", kind.version(), described(listed)))
        }
        (State::NoDevices, Some(file)) => Check::problem(
            id,
            format!("{}, {}, although {file} exists", kind.version(), described(listed)),
            match kind {
                Kind::Cuda => {
                    "compare the driver (`nvidia-smi`) with the plugin's CUDA 13, and end programs that hold the GPU"
                }
                Kind::Cpu | Kind::Tpu => "end other programs that hold the device",
            },
        ),
        (State::TimedOut, _) => Check::problem(
            id,
            described(listed),
            format!(
                "end programs that hold the device, raise --time-limit, or run `grpo plugin install {name} --force`"
            ),
        ),
        (State::OtherPlatform | State::Unusable, _) => {
            let (found, remedy) = (described(listed), remedy(kind));
            // Errors of installed files end with the remedy.
            Check::problem(id, found.trim_end_matches(&format!(": {remedy}")), remedy)
        }
    };
    check.with(json!(listed))
}

/// Returns the remedy for an installed plugin that is unusable.
fn remedy(kind: Kind) -> String {
    match install::find(kind) {
        Err(grpo_pjrt::Error::Exposed { remedy, .. }) => remedy,
        _ => format!("run `grpo plugin install {} --force`", kind.name()),
    }
}

/// Judges the plugin that the environment names.
fn named(listed: &Listed) -> Check {
    const ID: &str = "plugins.named";
    let described = described(listed);
    let found = if described.contains(VARIABLE) { described } else { format!("{VARIABLE}: {described}") };
    match listed.state {
        State::Ready => Check::ok(ID, found),
        State::NoDevices => Check::note(ID, format!("{found}; compiling needs no device")),
        State::NotInstalled | State::OtherPlatform | State::Unusable | State::TimedOut => {
            Check::problem(ID, found, format!("set {VARIABLE} to the file of a PJRT plugin, or unset it"))
        }
    }
    .with(json!(listed))
}

/// Returns the API version, the devices, the path, and the reason if the plugin opens no devices.
fn described(listed: &Listed) -> String {
    // Plugins print traces below the first line.
    let reason = listed.note.as_deref().map(|note| note.lines().next().unwrap_or_default());
    let mut parts = vec![];
    parts.extend(listed.api_version.as_ref().map(|version| format!("PJRT API {version}")));
    if let [first, ..] = listed.devices.as_slice() {
        // ID KIND
        let kind = first.split_once(' ').map_or(first.as_str(), |(_, kind)| kind);
        parts.push(format!("{} ({kind})", counted(listed.devices.len(), "device")));
    }
    // Most errors name the path.
    let is_said = |path: &&String| reason.is_some_and(|reason| reason.contains(path.as_str()));
    parts.extend(listed.path.as_ref().filter(|path| !is_said(path)).cloned());
    let facts = Some(parts.join(", ")).filter(|facts| !facts.is_empty());
    facts.into_iter().chain(reason.map(str::to_owned)).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;

    fn listed(state: State) -> Listed {
        let note = (state != State::Ready).then(|| "the reason\n  at a trace".to_owned());
        let api_version = Some("0.81".to_owned());
        Listed { kind: "cuda".into(), state, note, api_version, path: Some("/a.so".into()), ..Listed::default() }
    }

    #[test]
    fn a_device_without_a_usable_plugin_is_a_problem() {
        let of = |state, device| installed(Kind::Cuda, &listed(state), device);
        for (state, without, with) in [
            (State::Ready, Status::Ok, Status::Ok),
            (State::NotInstalled, Status::Note, Status::Problem),
            (State::NoDevices, Status::Note, Status::Problem),
            (State::Unusable, Status::Problem, Status::Problem),
            (State::TimedOut, Status::Problem, Status::Problem),
        ] {
            assert_eq!(
                (of(state, None).status, of(state, Some("/dev/nvidiactl")).status),
                (without, with),
                "{state:?}"
            );
        }
        let found = of(State::NoDevices, None).found;
        assert!(found.contains("PJRT API 0.81, /a.so; the reason") && !found.contains("trace"), "{found}");
        let missing = of(State::NotInstalled, Some("/dev/nvidiactl"));
        assert_eq!(missing.advice.as_deref(), Some("run `grpo plugin install cuda`"));
    }
}
