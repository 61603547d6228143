//! Memory, its limits, and the other limits of a process that a run may reach.

use super::check::Check;
use grpo_bench::report::Machine;
use grpo_core::readable_bytes;
use grpo_models::MemoryLimits;
use serde_json::json;

/// Memory in bytes below which a run is a problem: the smallest model needs it, with its tokenizer and data.
const LEAST: u64 = 256 << 20;
/// Limit of open files below which doctor prints a note. A model in many files maps each of them.
const FEWEST_FILES: u64 = 256;

pub(super) fn checks() -> Vec<Check> {
    let limits = MemoryLimits::of_this_process();
    let pages = huge_pages(Machine::here().huge_pages.as_deref());
    vec![available(&limits), control_group(&limits), process_limits(), pages]
}

fn available(limits: &MemoryLimits) -> Check {
    const ID: &str = "memory.available";
    let values =
        json!({ "total_bytes": limits.total, "available_bytes": limits.available, "left_bytes": limits.left() });
    let (Some(total), Some(available), Some(left)) = (limits.total, limits.available, limits.left()) else {
        return Check::note(ID, "the system does not report it, and runs are not checked against it").with(values);
    };
    let mut found = format!("{} of {} free", readable_bytes(available), readable_bytes(total));
    if left < available {
        found += &format!(", and this process may use {} of it", readable_bytes(left));
    }
    match left < LEAST {
        true => Check::problem(ID, found, "end other programs, or raise the limit of the container"),
        false => Check::ok(ID, found),
    }
    .with(values)
}

fn control_group(limits: &MemoryLimits) -> Check {
    const ID: &str = "memory.control_group";
    match &limits.control_group {
        None => Check::ok(ID, "no limit").with(json!({ "limit_bytes": null, "left_bytes": null, "file": null })),
        Some(limit) => {
            let (bytes, left) = (readable_bytes(limit.bytes), readable_bytes(limit.left));
            let file = limit.file.display().to_string();
            Check::ok(ID, format!("limited to {bytes}, of which {left} are left ({file})"))
                .with(json!({ "limit_bytes": limit.bytes, "left_bytes": limit.left, "file": file }))
        }
    }
}

#[cfg(unix)]
fn process_limits() -> Check {
    use rustix::process::{Resource, getrlimit};
    const LIMITS: [(Resource, &str, &str); 6] = [
        (Resource::As, "address_space_bytes", "-v"),
        (Resource::Data, "data_bytes", "-d"),
        (Resource::Fsize, "file_bytes", "-f"),
        (Resource::Cpu, "cpu_seconds", "-t"),
        (Resource::Nofile, "open_files", "-n"),
        (Resource::Nproc, "processes", "-u"),
    ];
    let found: Vec<_> = LIMITS.map(|(resource, name, flag)| (name, flag, getrlimit(resource).current)).into();
    judge_limits(&found)
}

#[cfg(not(unix))]
fn process_limits() -> Check {
    Check::note("memory.ulimits", "not known on this system")
}

/// Judges the limits of `ulimit`: key, flag, and value.
#[cfg(unix)]
fn judge_limits(limits: &[(&str, &str, Option<u64>)]) -> Check {
    const ID: &str = "memory.ulimits";
    let text = |(name, _, value): &(&str, &str, Option<u64>)| {
        let value = (*value)?;
        let name = name.replace('_', " ");
        Some(match name.strip_suffix(" bytes") {
            Some(name) => format!("{name} {}", readable_bytes(value)),
            None => format!("{name} {value}"),
        })
    };
    let is_tight = |(name, _, value): &&(&str, &str, Option<u64>)| match (*name, value) {
        (_, None) => false,
        // Every system limits these.
        ("processes", _) => false,
        ("open_files", Some(files)) => *files < FEWEST_FILES,
        _ => true,
    };
    let texts: Vec<String> = limits.iter().filter_map(text).collect();
    let found = if texts.is_empty() { "no limits".to_owned() } else { texts.join(", ") };
    let values = limits.iter().map(|(name, _, value)| ((*name).to_owned(), json!(value))).collect();
    let flags: Vec<String> = limits.iter().filter(is_tight).map(|(_, flag, _)| format!("`ulimit {flag}`")).collect();
    let check = match flags.is_empty() {
        true => Check::ok(ID, found),
        false => {
            Check::note(ID, found).advise(format!("a run that reaches a limit fails: {} raises it", flags.join(", ")))
        }
    };
    check.with(serde_json::Value::Object(values))
}

/// Judges the system's setting for huge pages, which kernels ask for; `None` if the system does not report one.
fn huge_pages(setting: Option<&str>) -> Check {
    const ID: &str = "memory.huge_pages";
    match setting {
        None => Check::note(ID, "the system does not report its setting"),
        Some("never") => Check::note(ID, "never: memory traffic of large models is slower")
            .advise("as root, run `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`"),
        Some(setting) => Check::ok(ID, setting),
    }
    .with(json!({ "setting": setting }))
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;
    use grpo_models::MemoryLimit;

    #[test]
    fn a_tight_control_group_is_named_and_too_little_memory_is_a_problem() {
        let of = |left: u64| MemoryLimits {
            total: Some(24 << 30),
            available: Some(20 << 30),
            control_group: Some(MemoryLimit { bytes: 1 << 30, left, file: "/sys/fs/cgroup/memory.max".into() }),
            address_space: None,
        };
        let wide = of(800 << 20);
        assert_eq!(available(&wide).status, Status::Ok);
        assert!(available(&wide).found.contains("may use 838.9 MB"), "{:?}", available(&wide));
        let group = control_group(&wide);
        assert_eq!((group.status, &group.values["limit_bytes"]), (Status::Ok, &json!(1 << 30)));
        assert!(group.found.contains("limited to 1.07 GB") && group.found.contains("memory.max"), "{group:?}");
        let tight = available(&of(100 << 20));
        assert!(tight.status == Status::Problem && tight.advice.is_some(), "{tight:?}");
        assert_eq!(available(&MemoryLimits::default()).status, Status::Note);
        assert_eq!(control_group(&MemoryLimits::default()).status, Status::Ok);
    }

    #[test]
    #[cfg(unix)]
    fn limits_of_ulimit_are_notes() {
        let of = |file, files| judge_limits(&[("file_bytes", "-f", file), ("open_files", "-n", Some(files))]);
        assert_eq!(of(None, 1024).status, Status::Ok);
        let tight = of(Some(1_000_000), 100);
        assert_eq!((tight.status, tight.found.as_str()), (Status::Note, "file 1.0 MB, open files 100"));
        assert!(tight.advice.is_some_and(|advice| advice.contains("`ulimit -f`, `ulimit -n`")));
    }

    #[test]
    fn huge_pages_that_are_off_are_a_note() {
        let status = [None, Some("madvise"), Some("never")].map(|setting| huge_pages(setting).status);
        assert_eq!(status, [Status::Note, Status::Ok, Status::Note]);
    }
}
