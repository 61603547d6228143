//! The addresses and cache folders of repositories.

/// A repository of the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Repository<'a> {
    /// The name, `OWNER/NAME`, or a model's name without an owner.
    pub(super) name: &'a str,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Model,
    Dataset,
}

impl<'a> Repository<'a> {
    pub(super) fn model(name: &'a str) -> Self {
        Self { name, kind: Kind::Model }
    }

    pub(super) fn dataset(name: &'a str) -> Self {
        Self { name, kind: Kind::Dataset }
    }

    /// Returns the name of its folder in the cache.
    pub(super) fn cache_folder(self) -> String {
        let kind = match self.kind {
            Kind::Model => "models",
            Kind::Dataset => "datasets",
        };
        format!("{kind}--{}", self.name.replace('/', "--"))
    }

    /// Returns the path of the listing of a revision.
    #[cfg(feature = "hub")]
    pub(super) fn listing_path(self, revision: &str) -> String {
        let kind = match self.kind {
            Kind::Model => "models",
            Kind::Dataset => "datasets",
        };
        format!("/api/{kind}/{}/revision/{}", self.name, revision.replace('/', "%2F"))
    }

    /// Returns the path of a file. It has the commit, so that a concurrent push cannot mix two versions.
    #[cfg(feature = "hub")]
    pub(super) fn file_path(self, commit: &str, file: &str) -> String {
        let kind = match self.kind {
            Kind::Model => "",
            Kind::Dataset => "/datasets",
        };
        let mut path = format!("{kind}/{}/resolve/{commit}/", self.name);
        for byte in file.bytes() {
            match byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
                true => path.push(char::from(byte)),
                false => path.push_str(&format!("%{byte:02X}")),
            }
        }
        path
    }
}

/// Returns `true` for a relative path of a file whose parts are plain names, so that it stays in its folder.
pub(super) fn is_inside(name: &str) -> bool {
    const LONGEST: usize = 1024;
    const LONGEST_PART: usize = 255;
    let legal = |part: &str| {
        let characters = !part.chars().any(|c| c.is_control() || c == '\\');
        characters && (1..=LONGEST_PART).contains(&part.len()) && part != "." && part != ".."
    };
    name.len() <= LONGEST && name.split('/').all(legal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_leave_the_folder_are_not_inside() {
        for name in ["a", "data/train-0 (1).jsonl", ".gitattributes", "a/b/c..d", "é/x"] {
            assert!(is_inside(name), "{name}");
        }
        let long = "a".repeat(256);
        for name in ["", "/a", "a/", "a//b", "../a", "a/../../b", "./a", "a\\b", "a\nb", "a\0", &long] {
            assert!(!is_inside(name), "{name:?}");
        }
    }

    #[cfg(feature = "hub")]
    #[test]
    fn paths_of_files_are_percent_encoded() {
        let path = Repository::dataset("o/n").file_path("0123", "a b/c?d#e%é.json");
        assert_eq!(path, "/datasets/o/n/resolve/0123/a%20b/c%3Fd%23e%25%C3%A9.json");
        assert_eq!(Repository::model("o/n").file_path("0123", "config.json"), "/o/n/resolve/0123/config.json");
    }
}
