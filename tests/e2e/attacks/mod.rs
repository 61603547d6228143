//! What befalls a run and its files: kills and signals at any moment, disks that are full, folders that somebody has
//! edited, files with arbitrary bytes. Bounded versions of longer attacks: the same faults, fewer of them, from fixed seeds.

mod disk;
mod kills;
mod mutations;
mod tampering;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::path::{Path, PathBuf};
use std::process::{Child, Output};
use std::time::{Duration, Instant};

fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Waits for a process that should not take long; one that hangs is killed and fails the test.
fn finish(mut child: Child, what: &str) -> Output {
    let limit = Instant::now() + Duration::from_secs(120);
    // Pipes hold what such a process prints.
    while child.try_wait().expect("the process can be asked").is_none() {
        if Instant::now() > limit {
            child.kill().expect("SIGKILL");
            panic!("{what}: no end after two minutes");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.wait_with_output().expect("the process has ended")
}

/// Every file below `folder`, sorted.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("the folder can be read") {
            let path = entry.expect("an entry").path();
            match path.is_dir() && !path.is_symlink() {
                true => folders.push(path),
                false => found.push(path),
            }
        }
    }
    found.sort();
    found
}

/// A copy of the folder `from`.
fn copy(from: &Path, to: &Path) {
    for file in files(from) {
        let target = to.join(file.strip_prefix(from).expect("a file below it"));
        std::fs::create_dir_all(target.parent().expect("a folder")).expect("created");
        std::fs::copy(&file, target).expect("copied");
    }
}
