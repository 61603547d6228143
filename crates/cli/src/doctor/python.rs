//! Python and pip, with which `grpo plugin install` downloads plugins. Nothing else needs them.
//!
//! Messages of pip are not shown, because they may contain the address of an index with its password.

use super::check::{Check, Status};
use crate::child::{self, Ended};
use grpo_backend_tpu::plugins::Kind;
use grpo_pjrt::install::{index_command, python};
use serde_json::{Value, json};
use std::io::ErrorKind;
use std::process::Command;
use std::time::Duration;

/// The findings, in the order in which each needs the one before it.
pub(super) struct Python {
    /// The path of the interpreter, which may be empty, and its version.
    interpreter: Result<(String, String), Missing>,
    /// The version of pip; `None` without an interpreter.
    pip: Option<Result<String, Missing>>,
    /// The plugin's version in pip's index; `None` without pip, and on systems without plugins to install.
    index: Option<Result<String, Missing>>,
}

/// A missing part, with its remedy.
#[derive(Debug)]
struct Missing {
    found: String,
    advice: String,
}

fn missing(found: impl Into<String>, advice: impl Into<String>) -> Missing {
    Missing { found: found.into(), advice: advice.into() }
}

/// Runs the interpreter, pip, and a request of pip to its index.
pub(super) fn look(limit: Duration) -> Python {
    let interpreter = interpreter(limit);
    let pip = interpreter.is_ok().then(|| pip(limit));
    let installs = cfg!(all(target_os = "linux", target_arch = "x86_64"));
    let index = matches!(pip, Some(Ok(_))) && installs;
    Python { interpreter, pip, index: index.then(|| index_has_plugin(limit)) }
}

fn interpreter(limit: Duration) -> Result<(String, String), Missing> {
    const INSTALL: &str = "install Python 3 with pip; only `grpo plugin install` needs it";
    let program = python();
    let python = program.display();
    let script = "import sys; print(sys.executable); print('%d.%d.%d' % sys.version_info[:3])";
    let ended = match child::run(Command::new(&program).args(["-c", script]), limit) {
        Ok(ended) => ended,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(missing(format!("there is no `{python}` on PATH"), INSTALL));
        }
        Err(error) => return Err(missing(format!("`{python}` does not start: {error}"), INSTALL)),
    };
    match (succeeded(&ended), ended.stdout.lines().collect::<Vec<_>>().as_slice()) {
        (true, [path, version]) => Ok(((*path).to_owned(), (*version).to_owned())),
        _ => Err(missing(format!("`{python}` does not work: {}", end(&ended, limit)), INSTALL)),
    }
}

fn pip(limit: Duration) -> Result<String, Missing> {
    const INSTALL: &str = "install pip, for example as the package `python3-pip`";
    let program = python();
    let python = program.display();
    let ended = child::run(Command::new(&program).args(["-m", "pip", "--version"]), limit)
        .map_err(|error| missing(format!("`{python}` does not start: {error}"), INSTALL))?;
    // pip VERSION from FOLDER (python VERSION)
    let version = ended.stdout.split_whitespace().nth(1).filter(|_| succeeded(&ended));
    version.map(str::to_owned).ok_or_else(|| match ended.stderr.contains("No module named pip") {
        true => missing(format!("{python} has no pip"), INSTALL),
        false => missing(format!("pip does not work: {}", end(&ended, limit)), INSTALL),
    })
}

/// Asks pip's index for the smallest plugin.
fn index_has_plugin(limit: Duration) -> Result<String, Missing> {
    let (mut command, version) = (index_command(Kind::Cpu), Kind::Cpu.version());
    let shown = format!("{command:?}").replace('"', "");
    let python = python();
    let advice = format!(
        "check the network, and pip's index and proxy (`{} -m pip config list`); `{shown}` shows pip's messages",
        python.display()
    );
    let ended = child::run(&mut command, limit).map_err(|error| missing(error.to_string(), advice.clone()))?;
    if succeeded(&ended) {
        let mut versions = ended.stdout.split([' ', ',', '\n', '(', ')']);
        return match versions.any(|found| found == version) {
            true => Ok(version.to_owned()),
            false => Err(missing(format!("the index of pip lacks version {version} of the plugin `cpu`"), advice)),
        };
    }
    Err(match ended.stderr.contains("unknown command") {
        true => {
            missing("this pip cannot query its index", "pip from 21.2 on can: `python3 -m pip install --upgrade pip`")
        }
        false => missing(format!("pip finds no plugins in its index: {}", end(&ended, limit)), advice),
    })
}

fn succeeded(ended: &Ended) -> bool {
    ended.status.is_some_and(|status| status.success())
}

/// Describes the end of a program that failed.
fn end(ended: &Ended, limit: Duration) -> String {
    match ended.status {
        Some(status) => status.to_string(),
        None => format!("no end within {} s", limit.as_secs_f64()),
    }
}

/// Judges the findings: a missing part is a problem if a plugin `is_needed`.
pub(super) fn checks(python: &Python, is_needed: bool) -> Vec<Check> {
    let status = if is_needed { Status::Problem } else { Status::Note };
    let judge = |id: &str, finding: Result<String, &Missing>, values: Value| match finding {
        Ok(found) => Check::ok(id, found).with(values),
        Err(missing) => Check { status, ..Check::note(id, &missing.found) }.advise(&missing.advice).with(values),
    };
    let interpreter = python.interpreter.as_ref();
    let values = json!({ "path": interpreter.ok().map(|(path, _)| path), "version": interpreter.ok().map(|(_, version)| version) });
    let mut checks = vec![judge(
        "python.interpreter",
        interpreter.map(|(path, version)| format!("{version}, {path}").trim_end_matches(", ").to_owned()),
        values,
    )];
    if let Some(pip) = &python.pip {
        let pip = pip.as_ref();
        checks.push(judge("python.pip", pip.cloned(), json!({ "version": pip.ok() })));
    }
    if let Some(index) = &python.index {
        let index = index.as_ref();
        let found = index.map(|version| format!("has the plugin `cpu`, version {version}"));
        checks.push(judge("python.index", found, json!({ "is_reachable": index.is_ok() })));
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_is_a_problem_only_if_a_plugin_must_be_installed() {
        let python = Python { interpreter: Err(missing("none", "install it")), pip: None, index: None };
        let status = |is_needed| checks(&python, is_needed).iter().map(|check| check.status).collect::<Vec<_>>();
        assert_eq!((status(false), status(true)), (vec![Status::Note], vec![Status::Problem]));
        let found = Ok(("/bin/python3".to_owned(), "3.11.7".to_owned()));
        let python = Python { interpreter: found, pip: Some(Err(missing("no pip", "install it"))), index: None };
        let found = checks(&python, true);
        assert_eq!(found.iter().map(|check| check.status).collect::<Vec<_>>(), [Status::Ok, Status::Problem]);
        assert_eq!(found[0].found, "3.11.7, /bin/python3");
    }
}
