//! Files with arbitrary bytes: an error that says so or a legal file, never a panic, never a hang, never an allocation that
//! the file's size does not justify.

use super::rng;
use crate::support::{files, grpo, repository};
use grpo_core::LossConfig;
use grpo_files::Layers;
use grpo_trainer::TrainConfig;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// One to four of: a flipped bit, a byte of a number or bracket, a cut, a repeated part, another header length.
fn mutated(bytes: &[u8], header: usize, rng: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..rng.random_range(1..5) {
        if bytes.is_empty() {
            break;
        }
        // Mostly in the header: the rest is numbers, all of which are legal.
        let end = if rng.random_range(0..5) > 0 { header.min(bytes.len()).max(1) } else { bytes.len() };
        let at = rng.random_range(0..end);
        match rng.random_range(0..6) {
            0 => bytes[at] ^= 1 << rng.random_range(0..8),
            1 => bytes[at] = b"0123456789-{}[]\",:enull"[rng.random_range(0..23)],
            2 => bytes.truncate(at),
            3 => {
                let part = bytes[at..bytes.len().min(at + rng.random_range(1..40))].to_vec();
                bytes.splice(at..at, part);
            }
            4 => {
                bytes.drain(at..bytes.len().min(at + rng.random_range(1..40)));
            }
            _ => {
                let length: u64 = [0, 1, 8, u64::MAX, 1 << 40, rng.random_range(0..4096)][rng.random_range(0..6)];
                let some = bytes.len().min(8);
                bytes[..some].copy_from_slice(&length.to_le_bytes()[..some]);
            }
        }
    }
    bytes
}

/// Length of a safetensors header with its length.
fn header(bytes: &[u8]) -> usize {
    8 + bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length) as usize)
}

#[test]
fn batch_files_on_the_command_line() {
    let (folder, mut rng) = (tempfile::tempdir().expect("a folder"), rng(4));
    let (path, out) = (folder.path().join("batch.safetensors"), folder.path().join("out.safetensors"));
    let (path, out) = (path.display().to_string(), out.display().to_string());
    let bytes = std::fs::read(repository("tests/golden/trl_dapo_everything.safetensors")).expect("a golden file");
    let mut codes = std::collections::BTreeMap::new();
    for turn in 0..80 {
        std::fs::write(&path, mutated(&bytes, header(&bytes), &mut rng)).expect("written");
        let _ = std::fs::remove_file(&out);
        let arguments = if turn % 2 == 0 { vec!["parity", &path] } else { vec!["loss", &path, "--out", &out] };
        let output = grpo(arguments).output();
        let (code, said) = (output.code.expect("no signal"), output.stderr);
        assert!(!said.contains("panicked"), "{said}");
        assert!((0..=2).contains(&code), "{code}: {said}");
        if code == 2 {
            assert!(said.starts_with("error: ") && said.lines().count() == 1 && said.contains(&*path), "{said}");
        }
        // What could not be evaluated has left nothing behind.
        let there = std::path::Path::new(&out).exists();
        assert_eq!(there, turn % 2 == 1 && code == 0, "turn {turn}, exit {code}");
        *codes.entry(code).or_insert(0) += 1;
    }
    assert!(codes[&2] > 30 && codes.contains_key(&0), "{codes:?}");
}

#[test]
#[ignore = "GRPO_TESTS=all"]
fn configurations() {
    let (folder, mut rng) = (tempfile::tempdir().expect("a folder"), rng(5));
    let path = folder.path().join("config.yaml");
    let (mut legal, mut illegal) = (0, 0);
    let of_run = |layers: Layers| TrainConfig::from_layers(layers).is_ok_and(|config| config.validate().is_ok());
    let of_loss = |layers: Layers| layers.resolve::<LossConfig>().is_ok_and(|config| config.validate().is_ok());
    let run: (_, _, &dyn Fn(Layers) -> bool) = ("configs/train", 200, &of_run);
    for (folder, count, is_legal) in [run, ("configs/loss", 50, &of_loss)] {
        for file in files(repository(folder).as_ref()) {
            let text = std::fs::read(&file).expect("a configuration");
            for _ in 0..count {
                std::fs::write(&path, mutated(&text, text.len(), &mut rng)).expect("written");
                let ok = Layers::new().file(&path).is_ok_and(is_legal);
                *if ok { &mut legal } else { &mut illegal } += 1;
            }
        }
    }
    assert!(legal > 100 && illegal > 500, "{legal} legal, {illegal} illegal");
}
