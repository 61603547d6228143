use super::*;

pub(crate) fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn concurrent_writes_of_files_that_differ_in_extension_do_not_collide() {
    let folder = tempfile::tempdir().unwrap();
    // A user's file with a name similar to a temporary file.
    std::fs::write(folder.path().join("r.tmp"), "mine").unwrap();
    let path = |name: &str| folder.path().join(name);
    std::thread::scope(|scope| {
        for (name, byte) in [("r.a", b'a'), ("r.b", b'b'), ("r.c", b'c')] {
            let path = path(name);
            scope.spawn(move || {
                for length in 1..60 {
                    let content = vec![byte; 500 * length];
                    write_output(&path, &content).unwrap();
                    assert!(std::fs::read(&path).unwrap() == content, "{name}: of another writer");
                }
            });
        }
    });
    assert_eq!(names(folder.path()), ["r.a", "r.b", "r.c", "r.tmp"], "no temporary file stays");
    assert_eq!(std::fs::read(path("r.tmp")).unwrap(), b"mine");
}

#[test]
fn a_failed_write_keeps_the_old_file_and_leaves_no_temporary_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("taken");
    std::fs::create_dir(&path).unwrap();
    for write in [write_atomically, write_output] {
        let error = write(&path, b"x").unwrap_err().to_string();
        assert!(error.starts_with("cannot write") && error.contains("taken"), "{error}");
    }
    assert_eq!(names(folder.path()), ["taken"]);
}

#[test]
fn outputs_can_be_checked_before_writing() {
    let folder = tempfile::tempdir().unwrap();
    check_output(&folder.path().join("new.json")).unwrap();
    assert!(names(folder.path()).is_empty(), "the check leaves nothing");
    let error = check_output(&folder.path().join("no/new.json")).unwrap_err();
    let Error::Io { path, source, .. } = error else { panic!("{error}") };
    assert!(path.ends_with("no/new.json") && source.to_string().contains("the folder"), "{source}");
    assert!(check_output(folder.path()).is_err(), "a folder is no file");
    std::fs::write(folder.path().join("file"), "").unwrap();
    assert!(make_folder(&folder.path().join("file/sub")).is_err());
    make_folder(&folder.path().join("a/b")).unwrap();
}

#[test]
fn a_header_of_safetensors_with_a_key_twice_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("batch.safetensors");
    let tensor = |name: &str, end: u64| {
        format!(r#""{name}": {{"dtype": "F32", "shape": [{}], "data_offsets": [0, {end}]}}"#, end / 4)
    };
    let write = |header: String| {
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 8]].concat();
        std::fs::write(&path, bytes).unwrap();
    };
    write(format!("{{{}}}", tensor("x", 8)));
    read_safetensors(&path).unwrap();
    let twice_within = tensor("x", 8).replace("\"dtype\"", "\"dtype\": \"F16\", \"dtype\"");
    for header in [format!("{{{}, {}}}", tensor("x", 4), tensor("x", 8)), format!("{{{twice_within}}}")] {
        write(header);
        let error = read_safetensors(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        assert!(error.to_string().contains("is there twice"), "{error}");
    }
}

#[test]
fn a_file_is_read_up_to_its_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    std::fs::write(&path, "12345").unwrap();
    assert_eq!(read_regular(&path, 5).unwrap(), b"12345");
    assert_eq!(read_regular(&path, 4).unwrap_err().kind(), ErrorKind::FileTooLarge);
    assert_eq!(read_regular(folder.path(), 9).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(read_regular(&folder.path().join("b"), 9).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_safetensors_file_is_as_long_as_its_header_says() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    let header = br#"{"__metadata__":{"a":"b"},"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let file = |data: usize| [&(header.len() as u64).to_le_bytes()[..], header, &vec![7; data]].concat();
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        read_safetensors(&path)
    };
    assert_eq!(read(&file(8)).unwrap(), file(8));
    assert_eq!(read(&file(3)).unwrap(), file(3), "what is missing is for the reader to find");
    let error = read(&file(9)).unwrap_err();
    assert!(error.kind() == ErrorKind::FileTooLarge && error.to_string().contains("header"), "{error}");
    // A sparse file of a terabyte.
    File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    assert_eq!(read_safetensors(&path).unwrap_err().kind(), ErrorKind::FileTooLarge);
    for garbage in [&b"abc"[..], &u64::MAX.to_le_bytes(), b"\x03\0\0\0\0\0\0\0{{{xxxxx"] {
        let read = read(garbage).unwrap();
        assert!(garbage.starts_with(&read) && read.len() <= 11, "{garbage:?}");
    }
}

#[cfg(unix)]
mod unix {
    use super::*;
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};

    fn fifo(path: &Path) {
        let made = std::process::Command::new("mkfifo").arg(path).status().unwrap();
        assert!(made.success());
    }

    #[test]
    fn a_pipe_is_written_to_and_stays_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        fifo(&path);
        check_output(&path).unwrap();
        let reader = std::thread::spawn({
            let path = path.clone();
            move || std::fs::read(path).unwrap()
        });
        write_output(&path, b"through").unwrap();
        assert_eq!(reader.join().unwrap(), b"through");
        assert!(std::fs::symlink_metadata(&path).unwrap().file_type().is_fifo());
        // The pipe has no writer: opening it would block forever.
        assert_eq!(read_regular(&path, 9).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert!(read_safetensors(&path).unwrap_err().to_string().contains("a pipe"));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn devices_are_written_to_and_not_read() {
        // Writing to this device fails, which shows that it was opened.
        let error = write_output(Path::new("/dev/full"), b"x").unwrap_err();
        assert!(matches!(&error, Error::Io { source, .. } if source.kind() == ErrorKind::StorageFull), "{error}");
        assert!(std::fs::symlink_metadata("/dev/full").unwrap().file_type().is_char_device());
        assert!(read_safetensors(Path::new("/dev/zero")).unwrap_err().to_string().contains("a device"));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn open_files_of_a_process_are_written_to() {
        use std::os::fd::AsRawFd;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("open");
        let file = File::create(&path).unwrap();
        write_output(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())), b"x").unwrap();
        assert!(FileId::of(&file.metadata().unwrap()).is_at(&path), "the same file, not another of its name");
        assert_eq!(std::fs::read(&path).unwrap(), b"x");
    }

    #[test]
    fn outputs_follow_links_and_own_files_replace_them() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        std::fs::write(&target, "old").unwrap();
        symlink("target", &link).unwrap();
        write_output(&link, b"new").unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(std::fs::read(&target).unwrap(), b"new");
        write_atomically(&link, b"mine").unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_file());
        assert_eq!(std::fs::read(&target).unwrap(), b"new");
        symlink("circle", folder.path().join("circle")).unwrap();
        assert!(write_output(&folder.path().join("circle"), b"x").is_err());
    }

    #[test]
    fn new_files_get_default_permissions_and_replaced_files_keep_theirs() {
        let folder = tempfile::tempdir().unwrap();
        let (plain, ours) = (folder.path().join("plain"), folder.path().join("ours"));
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode();
        std::fs::write(&plain, "x").unwrap();
        write_output(&ours, b"x").unwrap();
        assert_eq!(mode(&ours), mode(&plain));
        std::fs::set_permissions(&ours, Permissions::from_mode(0o640)).unwrap();
        for write in [write_output, write_atomically] {
            write(&ours, b"y").unwrap();
            assert_eq!(mode(&ours) & 0o777, 0o640);
        }
    }
}
