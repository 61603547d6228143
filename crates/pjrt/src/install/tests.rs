//! Installs small wheels that the tests create.

use super::*;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use zip::write::SimpleFileOptions;

/// Two wheels, because the CUDA plugin has several.
struct Wheels {
    folder: tempfile::TempDir,
    wheels: Vec<Wheel>,
}

impl Wheels {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut wheels = vec![];
        let contents: [(&'static str, &'static [&'static str]); 2] =
            [("plugin==1", &["lib/plugin.so"]), ("tools==2", &["bin/a", "bin/b"])];
        for (requirement, members) in contents {
            let path = folder.path().join(requirement);
            let mut archive = zip::ZipWriter::new(File::create(&path).expect("a file"));
            for member in members {
                archive.start_file(*member, SimpleFileOptions::default()).expect("a member");
                archive.write_all(member.repeat(500).as_bytes()).expect("written");
            }
            archive.finish().expect("an archive");
            let sha256 = digest::sha256(&path).expect("a digest").leak();
            wheels.push(Wheel { requirement, tags: &[], sha256, members });
        }
        Self { folder, wheels }
    }

    fn place(&self) -> PluginFolder<'_> {
        PluginFolder { name: "cpu", directory: self.folder.path().join("cache/cpu-1"), wheels: &self.wheels }
    }

    /// Returns the previous state and the number of downloaded wheels.
    fn install(&self, force: bool) -> Result<(Before, usize)> {
        let mut fetched = 0;
        let mut fetch = |wheel: &Wheel, into: &Path| {
            fetched += 1;
            make_directory(into)?;
            let file = into.join("a.whl");
            fs::copy(self.folder.path().join(wheel.requirement), &file).map_err(failed(&file))?;
            Ok(file)
        };
        let (path, before) = self.place().install(force, &mut fetch, &mut |_| {})?;
        assert_eq!(fs::read_to_string(path).expect("the library"), "lib/plugin.so".repeat(500));
        assert_eq!(self.place().find().expect("what was installed is whole").as_ref(), Some(&self.library()));
        let names = fs::read_dir(self.folder.path().join("cache")).expect("a folder");
        assert_eq!(names.count(), 2, "the plugin and its lock, and nothing that was left over");
        Ok((before, fetched))
    }

    fn library(&self) -> PathBuf {
        self.place().directory.join("lib/plugin.so")
    }
}

#[test]
fn intact_installations_stay_and_damaged_ones_are_replaced() {
    let wheels = Wheels::new();
    assert!(wheels.place().find().expect("nothing is there yet").is_none());
    assert_eq!(wheels.install(false).expect("installed"), (Before::Nothing, 2));
    assert_eq!(wheels.install(false).expect("already there"), (Before::Whole, 0));
    assert!(matches!(wheels.install(true).expect("forced"), (Before::Replaced(_), 2)));

    for damaged in ["lib/plugin.so", "bin/b"] {
        let path = wheels.place().directory.join(damaged);
        fs::write(&path, fs::read_to_string(&path).expect("a file").replacen('b', "c", 1)).expect("written");
        let text = wheels.place().find().expect_err("it is damaged").to_string();
        let listed = fs::read_to_string(wheels.place().directory.join(manifest::NAME)).expect("a list");
        let line = listed.lines().find(|line| line.ends_with(damaged)).expect("a line");
        let (expected, _) = line.split_once(' ').expect("a digest");
        let found = digest::sha256(&path).expect("a digest");
        for words in [expected, &found, damaged, "`grpo plugin install cpu --force`"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        match wheels.install(false).expect("replaced") {
            (Before::Replaced(reason), 2) => assert!(reason.contains(damaged) && reason.contains(&found), "{reason}"),
            other => panic!("{other:?}"),
        }
    }
    fs::remove_file(wheels.library()).expect("removed");
    assert!(matches!(wheels.place().find(), Err(Error::Damaged { .. })));
    assert!(matches!(wheels.install(false), Ok((Before::Replaced(_), 2))));
}

#[test]
fn installations_without_a_list_are_replaced() {
    let wheels = Wheels::new();
    wheels.install(false).expect("installed");
    fs::remove_file(wheels.place().directory.join(manifest::NAME)).expect("removed");
    let text = wheels.place().find().expect_err("nobody knows what it is").to_string();
    assert!(text.contains("`grpo plugin install cpu --force`"), "{text}");
    assert!(matches!(wheels.install(false), Ok((Before::Replaced(_), 2))));
}

#[test]
fn a_cache_that_others_may_write_to_is_refused() {
    let wheels = Wheels::new();
    wheels.install(false).expect("installed");
    let mode = |place: &Path, mode| fs::set_permissions(place, fs::Permissions::from_mode(mode)).expect("a mode");
    let cache = wheels.folder.path().join("cache");
    for (place, open, closed) in [(&cache, 0o777, 0o755), (&wheels.library(), 0o757, 0o755)] {
        mode(place, open);
        for error in [wheels.place().find().expect_err("found"), wheels.install(false).expect_err("installed")] {
            let text = error.to_string();
            let place = place.canonicalize().expect("a path");
            assert!(text.contains(&format!("`chmod go-w {}`", place.display())), "{text}");
        }
        mode(place, closed);
        assert_eq!(wheels.install(false).expect("fixed"), (Before::Whole, 0));
    }
    // `force` replaces a file that others may write to, but refuses a folder that they may write to.
    mode(&wheels.library(), 0o757);
    assert!(matches!(wheels.install(true), Ok((Before::Replaced(_), 2))));
    mode(&cache, 0o777);
    assert!(matches!(wheels.install(true), Err(Error::Exposed { .. })));
}

#[test]
fn files_are_synced_before_renaming() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (from, to) = (folder.path().join("scratch/unpacked"), folder.path().join("plugin"));
    fs::create_dir_all(from.join("lib")).expect("a folder");
    fs::write(from.join("lib/plugin.so"), "code").expect("a file");
    fs::write(from.join("manifest.txt"), "list").expect("a file");
    let mut synced = vec![];
    publish(&from, &to, &mut |place: &Path| {
        synced.push((place.to_path_buf(), to.exists()));
        sync(place)
    })
    .expect("published");
    let last = synced.pop().expect("calls");
    assert_eq!(last, (folder.path().to_path_buf(), true));
    assert!(synced.iter().all(|(_, is_visible)| !is_visible), "{synced:?}");
    let place = |path: &str| synced.iter().position(|(place, _)| *place == from.join(path)).expect("it was synced");
    assert!(place("lib/plugin.so") < place("lib") && place("lib") < place("") && place("manifest.txt") < place(""));
    assert_eq!(fs::read_to_string(to.join("lib/plugin.so")).expect("a file"), "code");
    // If syncing fails, the folder is not renamed.
    fs::create_dir_all(&from).expect("a folder");
    let target = folder.path().join("other");
    assert!(publish(&from, &target, &mut |_: &Path| Err(io::Error::other("full"))).is_err());
    assert!(!target.exists());
}
