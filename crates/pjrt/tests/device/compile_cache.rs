//! The compile cache on the XLA CPU plugin.

use std::fs;

use crate::support::{DOUBLE, buffer, cpu, run};
use grpo_pjrt::{CacheOutcome, CompileCache, CompileOptions};

#[test]
fn programs_are_compiled_once_and_damaged_entries_replaced() {
    let client = cpu(1);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("not yet there");
    let cache = CompileCache::new(&path);
    let options = CompileOptions::default();
    let compile = |program: &str, options: &CompileOptions| {
        let (executable, outcome) = cache.compile(&client, program, options).unwrap();
        let output = run(&executable, &[&buffer(&client, &[1.0f32, 2.0, 3.0, 4.0], &[4])]);
        assert_eq!(output.to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0, 8.0]);
        outcome
    };
    assert_eq!(compile(DOUBLE, &options), CacheOutcome::Miss);
    assert_eq!(compile(DOUBLE, &options), CacheOutcome::Hit);
    let entry = fs::read_dir(&path).unwrap().next().unwrap().unwrap().path();

    // Other programs and other options have other entries.
    assert_eq!(compile(&DOUBLE.replace("%0", "%sum"), &options), CacheOutcome::Miss);
    assert_eq!(compile(DOUBLE, &options.clone().with("xla_cpu_enable_fast_math", true)), CacheOutcome::Miss);
    assert_eq!(fs::read_dir(&path).unwrap().count(), 3);

    let good = fs::read(&entry).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    // An intact entry of another program under this name.
    let others = fs::read_dir(&path).unwrap().map(|other| other.unwrap().path());
    let foreign = fs::read(others.into_iter().find(|other| *other != entry).unwrap()).unwrap();
    // An intact entry of another layout version, which is the last byte of the magic number.
    let mut older = good.clone();
    older[15] = b'0';
    for damaged in [&good[..good.len() / 2], &good[..20], &[], b"something else", &flipped, &foreign, &older] {
        fs::write(&entry, damaged).unwrap();
        assert_eq!(compile(DOUBLE, &options), CacheOutcome::Replaced);
        assert_eq!(compile(DOUBLE, &options), CacheOutcome::Hit);
    }
    assert_eq!(fs::read_dir(&path).unwrap().count(), 3, "no temporary file stays");
}

#[test]
fn entries_of_four_devices_are_not_used_with_eight() {
    let directory = tempfile::tempdir().unwrap();
    let cache = CompileCache::new(directory.path());
    let compile = |devices| cache.compile(&cpu(devices), DOUBLE, &CompileOptions::default()).unwrap().1;
    assert_eq!([compile(4), compile(8), compile(4), compile(8)], {
        use CacheOutcome::{Hit, Miss};
        [Miss, Miss, Hit, Hit]
    });
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
}

#[test]
#[cfg(unix)]
fn entries_that_others_may_write_to_are_refused() {
    use std::os::unix::fs::PermissionsExt;

    let client = cpu(1);
    let directory = tempfile::tempdir().unwrap();
    let cache = CompileCache::new(directory.path());
    let compile = || cache.compile(&client, DOUBLE, &CompileOptions::default()).map(|(_, outcome)| outcome);
    assert_eq!(compile().unwrap(), CacheOutcome::Miss);
    let entry = fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
    for place in [directory.path(), &entry] {
        let before = fs::metadata(place).unwrap().permissions();
        fs::set_permissions(place, fs::Permissions::from_mode(0o777)).unwrap();
        let error = compile().unwrap_err().to_string();
        assert!(error.contains(&format!("`chmod go-w {}`", place.canonicalize().unwrap().display())), "{error}");
        fs::set_permissions(place, before).unwrap();
    }
    assert_eq!(compile().unwrap(), CacheOutcome::Hit);
}

#[test]
fn a_cache_that_cannot_be_written_is_a_warning_and_the_program_runs() {
    // Not even root can create a folder below a file.
    let file = tempfile::NamedTempFile::new().unwrap();
    let folder = file.path().join("below a file");
    let (cache, client) = (CompileCache::new(&folder), cpu(1));
    for _ in 0..2 {
        let log = grpo_testkit::logged(|| {
            let (executable, outcome) = cache.compile(&client, DOUBLE, &CompileOptions::default()).unwrap();
            assert_eq!(outcome, CacheOutcome::Uncacheable);
            let output = run(&executable, &[&buffer(&client, &[1.0f32, 2.0, 3.0, 4.0], &[4])]);
            assert_eq!(output.to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0, 8.0]);
        });
        for part in ["WARN", &folder.display().to_string(), "cannot write", "Not a directory"] {
            assert!(log.contains(part), "{part:?} is not in: {log}");
        }
    }
}
