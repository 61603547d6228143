//! Checks that no other user can replace a library that this process loads.

use std::fs;
use std::io;
use std::path::Path;

use crate::error::Result;

/// Refuses `path`, which must be canonical, if anybody except root and the user of this process can change it or a
/// folder above it.
///
/// # Errors
///
/// [`Error::Exposed`](crate::Error::Exposed) with the command that fixes the permissions;
/// [`Error::Load`](crate::Error::Load) if a file or folder cannot be inspected.
#[cfg(unix)]
pub(crate) fn check(path: &Path) -> Result<()> {
    use crate::error::Error;
    use std::os::unix::fs::MetadataExt;

    let user = rustix::process::geteuid().as_raw();
    for place in path.ancestors() {
        let found = fs::symlink_metadata(place)
            .map_err(|error| Error::Load { path: place.to_path_buf(), reason: error.to_string() })?;
        let entry = Entry { mode: found.mode(), owner: found.uid(), group: found.gid(), is_folder: found.is_dir() };
        let writer = entry.other_writer(user, |group| is_private_group(group, user), is_unmapped);
        if let Some(writer) = writer {
            let place = place.display();
            let (who, remedy) = match writer {
                Writer::Everyone => ("every user".into(), format!("run `chmod go-w {place}`")),
                Writer::Group(group) => (format!("the group {group}"), format!("run `chmod go-w {place}`")),
                Writer::Owner(owner) => (
                    format!("the user {owner}, who owns it,"),
                    format!("use a copy in a folder of your own, or run `chown {user} {place}` as root"),
                ),
            };
            return Err(Error::Exposed { path: path.to_path_buf(), place: place.to_string(), who, remedy });
        }
    }
    Ok(())
}

/// Accepts every path: file owners are not checked on this system.
#[cfg(not(unix))]
pub(crate) fn check(_path: &Path) -> Result<()> {
    Ok(())
}

/// Creates `path` and missing parents, writable for the owner only, for any umask.
pub(crate) fn create_folder(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o755);
    builder.create(path)
}

/// The owner and the permissions of a file or folder.
#[cfg(unix)]
#[derive(Clone, Copy, Debug)]
struct Entry {
    mode: u32,
    owner: u32,
    group: u32,
    is_folder: bool,
}

/// A user or group with write access to a file or folder.
#[cfg(unix)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    Everyone,
    Group(u32),
    Owner(u32),
}

#[cfg(unix)]
impl Entry {
    /// Returns a writer other than root and `user`, if there is one.
    fn other_writer(
        self,
        user: u32,
        is_private_group: impl Fn(u32) -> bool,
        is_unmapped: impl Fn(u32) -> bool,
    ) -> Option<Writer> {
        const STICKY: u32 = 0o1000;
        // In a user namespace, root's folders outside of it (such as /home) have an unmapped owner. Such folders are
        // accepted, because every process in a namespace depends on them; files are not.
        let is_outside = self.is_folder && is_unmapped(self.owner);
        if self.owner != 0 && self.owner != user && !is_outside {
            return Some(Writer::Owner(self.owner));
        }
        // In a sticky folder, such as /tmp, users can only replace their own entries; entries below are checked separately.
        if self.is_folder && self.mode & STICKY != 0 {
            return None;
        }
        match self.mode & 0o022 {
            0 => None,
            // With umask 002, the default of Debian and Ubuntu, a user's files are writable for the group of the same
            // name, which has no other members.
            0o020 if is_private_group(self.group) => None,
            0o020 => Some(Writer::Group(self.group)),
            _ => Some(Writer::Everyone),
        }
    }
}

/// Returns `true` if the local account files list only `user` and root as members of `group`. Groups of a directory
/// service are not in these files; they count as shared, because their members are unknown here.
#[cfg(unix)]
fn is_private_group(group: u32, user: u32) -> bool {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    is_private(&read("/etc/passwd"), &read("/etc/group"), group, user)
}

#[cfg(unix)]
fn is_private(accounts: &str, groups: &str, group: u32, user: u32) -> bool {
    let number = |field: Option<&&str>| field.and_then(|field| field.parse::<u32>().ok());
    // NAME:PASSWORD:USER:GROUP:...
    let accounts: Vec<(&str, u32, u32)> = accounts
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            Some((*fields.first()?, number(fields.get(2))?, number(fields.get(3))?))
        })
        .collect();
    let is_own = |id: u32| id == user || id == 0;
    let belongs_to_user = accounts.iter().any(|(_, id, primary)| *id == user && *primary == group);
    let belongs_to_others = accounts.iter().any(|(_, id, primary)| !is_own(*id) && *primary == group);
    // NAME:PASSWORD:GROUP:MEMBER,MEMBER
    let members = groups.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        (number(fields.get(2)) == Some(group)).then(|| fields.get(3).copied().unwrap_or_default())
    });
    let Some(members) = members else { return false };
    let is_own_name = |name: &str| accounts.iter().any(|(account, id, _)| *account == name && is_own(*id));
    let has_others = members.split(',').map(str::trim).any(|name| !name.is_empty() && !is_own_name(name));
    belongs_to_user && !belongs_to_others && !has_others
}

/// Returns `true` if `owner` represents all users outside of this process's user namespace.
#[cfg(unix)]
fn is_unmapped(owner: u32) -> bool {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let overflow = read("/proc/sys/kernel/overflowuid").trim().parse() == Ok(owner);
    // Without a namespace, the map is the identity on all ids.
    overflow && read("/proc/self/uid_map").split_whitespace().ne(["0", "0", "4294967295"])
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    const USER: u32 = 1000;

    fn writer(mode: u32, owner: u32, is_folder: bool) -> Option<Writer> {
        Entry { mode, owner, group: 7, is_folder }.other_writer(USER, |group| group == 1000, |owner| owner == 65534)
    }

    #[test]
    fn entries_that_others_may_change_are_found() {
        assert_eq!(writer(0o755, USER, false), None);
        assert_eq!(writer(0o755, 0, true), None);
        assert_eq!(writer(0o757, USER, false), Some(Writer::Everyone));
        assert_eq!(writer(0o777, 0, true), Some(Writer::Everyone));
        assert_eq!(writer(0o775, USER, true), Some(Writer::Group(7)));
        assert_eq!(writer(0o700, 1001, true), Some(Writer::Owner(1001)));
        // The sticky bit protects the entries of a folder; it has no effect on files.
        assert_eq!(writer(0o1777, 0, true), None);
        assert_eq!(writer(0o1777, USER, false), Some(Writer::Everyone));
        assert_eq!(writer(0o1777, 1001, true), Some(Writer::Owner(1001)));
        // Folders with an owner outside of the user namespace.
        assert_eq!(writer(0o755, 65534, true), None);
        assert_eq!(writer(0o777, 65534, true), Some(Writer::Everyone));
        assert_eq!(writer(0o755, 65534, false), Some(Writer::Owner(65534)));
    }

    #[test]
    fn a_group_without_other_members_is_accepted() {
        let entry = Entry { mode: 0o775, owner: USER, group: 1000, is_folder: true };
        assert_eq!(entry.other_writer(USER, |group| group == 1000, |_| false), None);
        let everyone = Entry { mode: 0o777, ..entry };
        assert_eq!(everyone.other_writer(USER, |_| true, |_| false), Some(Writer::Everyone));

        let accounts = "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\nbob:x:1001:1001::/:/bin/sh\n";
        let private = |groups: &str| is_private(accounts, groups, 1000, USER);
        assert!(private("root:x:0:\nann:x:1000:\n"));
        assert!(private("ann:x:1000:ann,root\n"));
        assert!(!private("ann:x:1000:bob\n"));
        assert!(!private("ann:x:1000:ann,somebody\n"));
        // Not in the local files: a directory service may give it members.
        assert!(!private("bob:x:1001:\n"));
        let shared = format!("{accounts}eve:x:1002:1000::/:/bin/sh\n");
        assert!(!is_private(&shared, "ann:x:1000:\n", 1000, USER));
        // A group of another user.
        assert!(!is_private(accounts, "bob:x:1001:\n", 1001, USER));
    }

    #[test]
    fn exposed_parent_folders_are_refused_with_the_command_to_run() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let folder = root.path().join("folder");
        let file = folder.join("plugin.so");
        fs::create_dir(&folder).expect("a folder");
        fs::write(&file, "").expect("a file");
        let file = file.canonicalize().expect("a path");
        let folder = folder.canonicalize().expect("a path");
        fs::set_permissions(&file, Permissions::from_mode(0o644)).expect("a mode");
        fs::set_permissions(&folder, Permissions::from_mode(0o755)).expect("a mode");
        check(&file).expect("only its owner may write to it");
        for (place, mode, fixed) in [(&folder, 0o777, 0o755), (&file, 0o666, 0o644)] {
            fs::set_permissions(place, Permissions::from_mode(mode)).expect("a mode");
            let text = check(&file).expect_err("others may write to it").to_string();
            assert!(text.contains(&format!("`chmod go-w {}`", place.display())), "{text}");
            fs::set_permissions(place, Permissions::from_mode(fixed)).expect("a mode");
        }
        check(&file).expect("fixed");
    }
}
