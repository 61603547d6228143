//! A run folder in which somebody, or a failing disk, has changed a file: it is noticed or does not matter, nothing else is
//! touched when it is refused, and nothing panics or hangs.

use super::rng;
use crate::support::{Runs, copy, files, finish};
use rand::RngExt;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const SETTINGS: [&str; 5] =
    ["warmup.steps=2", "grpo.max_steps=4", "run.save_steps=2", "loss.beta=0.01", "run.log_completions_steps=1"];

const FAULTS: [&str; 8] =
    ["removed", "emptied", "truncated", "bit flipped", "garbage", "lengthened", "a folder", "an endless link"];

fn spoil(path: &Path, fault: &str, seed: u64) {
    let mut bytes = std::fs::read(path).expect("a file");
    let mut rng = rng(seed);
    match fault {
        "removed" => return std::fs::remove_file(path).expect("removed"),
        "emptied" => bytes.clear(),
        "truncated" => bytes.truncate(rng.random_range(0..bytes.len().max(1))),
        "bit flipped" if bytes.is_empty() => bytes.push(1),
        "bit flipped" => {
            let at = rng.random_range(0..bytes.len());
            bytes[at] ^= 1 << rng.random_range(0..8);
        }
        "garbage" => bytes.iter_mut().for_each(|byte| *byte = rng.random()),
        "lengthened" => bytes.extend(b"\n{\"phase\": \"grpo\", \"step\": 99}\n\0"),
        folder_or_link => {
            std::fs::remove_file(path).expect("removed");
            return match folder_or_link {
                "a folder" => std::fs::create_dir(path).expect("created"),
                _ => std::os::unix::fs::symlink("/dev/zero", path).expect("linked"),
            };
        }
    }
    std::fs::write(path, bytes).expect("written");
}

/// Returns the contents of all readable files, except the lock and failure.json.
fn contents(run: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let is_of_run = |path: &PathBuf| !path.ends_with(".lock") && !path.ends_with("failure.json");
    let regular = |path: &PathBuf| path.metadata().is_ok_and(|m| m.is_file()) && is_of_run(path);
    files(run).into_iter().filter(regular).map(|path| (path.clone(), std::fs::read(path).expect("read"))).collect()
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn every_file_spoilt_in_every_way() {
    let runs = Runs::new(&SETTINGS);
    runs.train("whole");
    let whole = runs.path("whole");
    let (mut refused, mut taken) = (0, 0);
    for (number, file) in files(&whole).into_iter().enumerate() {
        let name = file.strip_prefix(&whole).expect("a file of the run").to_owned();
        for fault in FAULTS {
            let what = format!("{} {fault}", name.display());
            let run = runs.path("spoilt");
            let _ = std::fs::remove_dir_all(&run);
            copy(&whole, &run);
            spoil(&run.join(&name), fault, number as u64);
            let before = contents(&run);
            let output = finish(runs.resume("spoilt").args(["--quiet"]).spawn(), &what);
            let said = output.stderr;
            match output.code {
                Some(0) => taken += 1,
                Some(2) => {
                    refused += 1;
                    assert!(said.starts_with("error: ") && said.lines().count() == 1, "{what}: {said}");
                    assert!(contents(&run) == before, "{what}: refused, and something was changed all the same");
                }
                code => panic!("{what}: {code:?}: {said}"),
            }
        }
    }
    // Whatever the newest checkpoint and the logs are made of is refused; what is only shown does not matter.
    assert!(refused > 30 && taken > 10, "{refused} refused, {taken} taken");
}
