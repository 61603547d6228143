//! Tests of the Python environment that all tests share.

use grpo_testkit::python::Python;

grpo_testkit::tiers!();

/// A script that prints each installed requirement of its arguments that is missing or has a wrong version, and each package that the folder
/// contains twice. CUDA requirements of torch are excluded.
const CHECK: &str = r#"
import sys
from importlib.metadata import PackageNotFoundError, distribution, distributions
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

seen, left = set(), [Requirement(name) for name in sys.argv[2:]]
while left:
    asked = left.pop()
    name = canonicalize_name(asked.name)
    try:
        found = distribution(name)
    except PackageNotFoundError:
        print(f"{asked} is not there")
        continue
    if not asked.specifier.contains(found.version, prereleases=True):
        print(f"{name} {found.version} for {asked}")
    for extra in {"", *asked.extras}:
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in found.requires or []:
            needs = Requirement(text)
            cuda = name == "torch" and canonicalize_name(needs.name).startswith(("nvidia-", "cuda-", "triton"))
            if not cuda and (needs.marker is None or needs.marker.evaluate({"extra": extra})):
                left.append(needs)
if sys.argv[1]:
    names = [canonicalize_name(d.metadata["Name"]) for d in distributions(path=[sys.argv[1]])]
    print(*(f"{name} is there twice" for name in sorted(set(names)) if names.count(name) > 1), sep="\n", end="")
print(f"{len(seen)} packages", file=sys.stderr)
"#;

#[test]
#[ignore = "GRPO_TESTS=all: Python packages"]
fn python_packages_are_consistent_and_installed_once() {
    let python = Python::install();
    let packages =
        ["wandb", "tensorboard", "math-verify", "reasoning-gym", "transformers", "torch", "peft", "accelerate"];
    let folder = python.python_path().unwrap_or("".as_ref());
    let output = python.command().args(["-c", CHECK]).arg(folder).args(packages).output().unwrap();
    let (said, seen) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.trim().is_empty(), "{said}{seen}");
    let seen: usize = seen.split_whitespace().next().unwrap().parse().unwrap();
    assert!(seen > 50, "only {seen} packages were looked at");
}
