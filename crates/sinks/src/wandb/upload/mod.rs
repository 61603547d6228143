//! Upload of a run with the official program `wandb`.

use super::earlier::{file_name, parts};
use crate::error::{Error, Result};
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Without a network, `wandb sync` retries for days.
const LIMIT: Duration = Duration::from_secs(600);
/// The servers of API keys, unless `WANDB_BASE_URL` names another.
const HOSTS: [&str; 2] = ["api.wandb.ai", "api.forge.coreweave.com"];

/// Uploads all parts of the run `id` in `dir` that are not uploaded yet, with the program `wandb` on `PATH`. Takes at most ten
/// minutes. The program's output is in `wandb/sync.log`.
///
/// # Errors
/// [`Error::NotUploaded`] with the missing requirement or the failure; [`Error::Io`].
pub fn upload(dir: &Path, id: &str) -> Result<()> {
    upload_with(dir, id, &environment, LIMIT)
}

/// Returns a line about a missing requirement of [`upload`] (the program or a key); `None` if nothing is missing.
pub fn obstacle() -> Option<String> {
    find_program(&environment).and_then(|_| find_key(&environment)).err()
}

/// Returns the command that does the same as [`upload`].
///
/// # Errors
/// [`Error::Io`].
pub fn sync_command(dir: &Path, id: &str) -> Result<String> {
    let quoted = pending(dir, id)?.iter().map(|part| quote(&part.display().to_string())).collect::<Vec<_>>();
    Ok(format!("wandb sync {}", quoted.join(" ")))
}

type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

fn environment(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn upload_with(dir: &Path, id: &str, environment: Environment<'_>, limit: Duration) -> Result<()> {
    let parts = pending(dir, id)?;
    if parts.is_empty() {
        return Ok(());
    }
    let command = sync_command(dir, id)?;
    let not_uploaded = |reason| Error::NotUploaded { reason, command };
    let program = match find_program(environment).and_then(|program| find_key(environment).map(|()| program)) {
        Ok(program) => program,
        Err(reason) => return Err(not_uploaded(reason)),
    };
    let log = dir.join("wandb/sync.log");
    let out = File::create(&log).map_err(Error::io("create", &log))?;
    let err = out.try_clone().map_err(Error::io("create", &log))?;
    let mut command = Command::new(&program);
    // The program writes its own log, which must not be created in the caller's folder.
    command.env("WANDB_DIR", dir).arg("sync").args(&parts).stdin(Stdio::null()).stdout(out).stderr(err);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(e) => return Err(not_uploaded(format!("{} does not start: {e}", program.display()))),
    };
    let began = Instant::now();
    let ended = loop {
        match child.try_wait() {
            Ok(None) if began.elapsed() < limit => std::thread::sleep(Duration::from_millis(50)),
            other => break other,
        }
    };
    let log_is = format!("its output is in {}", log.display());
    match ended {
        // The program marks uploaded parts. Its exit code is not sufficient, because it is 0 after partial uploads, too.
        Ok(Some(_)) if pending(dir, id)?.is_empty() => Ok(()),
        Ok(Some(status)) => {
            let said = complaint(&String::from_utf8_lossy(&std::fs::read(&log).unwrap_or_default()));
            Err(not_uploaded(format!("`wandb sync` ended with {status}: {said}; {log_is}")))
        }
        Ok(None) => {
            // The process may have exited in the meantime.
            let _ = child.kill();
            let _ = child.wait();
            Err(not_uploaded(format!("`wandb sync` did not end within {} s; {log_is}", limit.as_secs_f32())))
        }
        Err(e) => Err(not_uploaded(format!("`wandb sync` cannot be waited for: {e}; {log_is}"))),
    }
}

/// Returns the parts that the program has not marked as uploaded.
fn pending(dir: &Path, id: &str) -> Result<Vec<PathBuf>> {
    let mut parts = parts(dir, id)?;
    parts.retain(|part| {
        let file = part.join(file_name(id));
        file.metadata().is_ok_and(|m| m.len() > 0) && !file.with_added_extension("synced").exists()
    });
    Ok(parts)
}

fn find_program(environment: Environment<'_>) -> Result<PathBuf, String> {
    let name = format!("wandb{}", std::env::consts::EXE_SUFFIX);
    let path = environment("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(&name))
        .find(|program| program.is_file())
        .ok_or_else(|| "there is no program `wandb` on PATH (pip install wandb)".to_owned())
}

/// Checks that the official program will find credentials, without reading them.
fn find_key(environment: Environment<'_>) -> Result<(), String> {
    if environment("WANDB_API_KEY").is_some() || environment("WANDB_IDENTITY_TOKEN_FILE").is_some() {
        return Ok(());
    }
    let url = environment("WANDB_BASE_URL").map(|url| url.to_string_lossy().into_owned());
    let own = url.as_deref().map(|url| url.split_once("://").map_or(url, |(_, rest)| rest));
    let own = own.and_then(|rest| rest.split('/').next());
    let hosts = own.map_or(HOSTS.to_vec(), |host| vec![host]);
    let home = environment("HOME").map(PathBuf::from).unwrap_or_default();
    let netrc = match environment("NETRC") {
        Some(file) => vec![PathBuf::from(file)],
        None => vec![home.join(".netrc"), home.join("_netrc")],
    };
    let texts = netrc.iter().filter_map(|path| grpo_files::read_regular(path, 1 << 20).ok());
    let texts = texts.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let has_entry = |text: String| {
        let words: Vec<_> = text.split_whitespace().collect();
        words.windows(2).any(|pair| pair[0] == "machine" && hosts.contains(&pair[1].trim_matches(['"', '\''])))
    };
    if texts.into_iter().any(has_entry) {
        return Ok(());
    }
    Err(format!("there is no API key for {} (set WANDB_API_KEY, or call `wandb login`)", hosts.join(" or ")))
}

/// Returns the line of a log that describes the failure.
fn complaint(log: &str) -> String {
    let lines = || log.lines().map(str::trim).filter(|line| !line.is_empty());
    // The error follows a line that points to a log file.
    let error =
        lines().rev().find(|line| line.to_lowercase().contains("error") && !line.contains("detailed error logs"));
    error.or_else(|| lines().next_back()).unwrap_or("nothing").to_owned()
}

/// Quotes a path for a shell.
fn quote(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

// The tests use shell scripts as programs.
#[cfg(all(test, unix))]
mod tests;
