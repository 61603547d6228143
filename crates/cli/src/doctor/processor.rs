//! The build of the program, the processor, and the kernels that the loss chooses on it.

use super::check::Check;
use grpo_backend_cpu::Isa;
use grpo_bench::report::Machine;
use serde_json::json;

pub(super) fn checks() -> Vec<Check> {
    vec![build(), model(&Machine::here()), kernels()]
}

fn build() -> Check {
    let features =
        [("hub", cfg!(feature = "hub")), ("https", cfg!(feature = "https")), ("parquet", cfg!(feature = "parquet"))];
    let listed =
        |is_on: bool| features.iter().filter(|(_, on)| *on == is_on).map(|(name, _)| *name).collect::<Vec<_>>();
    let names = |names: Vec<&str>| if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let optimised = !cfg!(debug_assertions);
    let found = format!(
        "{} build; features: {}; not built: {}",
        if optimised { "optimised" } else { "development" },
        names(listed(true)),
        names(listed(false))
    );
    let check = match optimised {
        true => Check::ok("program.build", found),
        false => Check::note("program.build", found).advise("for speed, build with `cargo build --release`"),
    };
    check.with(json!({ "optimised": optimised, "features": listed(true) }))
}

fn model(machine: &Machine) -> Check {
    let values = json!({ "model": machine.cpu });
    match &machine.cpu {
        Some(model) => Check::ok("processor.model", model.as_str()),
        None => Check::note("processor.model", "the system does not name it"),
    }
    .with(values)
}

fn kernels() -> Check {
    let available: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect();
    let chosen = Isa::detect();
    let names: Vec<&str> = available.iter().map(|isa| isa.name()).collect();
    let found = format!(
        "f32 products with {}, bf16 with {}; available: {}",
        chosen.min(Isa::Avx512).name(),
        chosen.name(),
        names.join(", ")
    );
    judge(chosen, &available, &processor_flags(), found).with(json!({ "chosen": chosen.name(), "available": names }))
}

/// Returns the feature flags of the first processor; empty if the system does not list them.
fn processor_flags() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.lines().find(|line| line.starts_with("flags")).unwrap_or_default().to_owned()
}

fn judge(chosen: Isa, available: &[Isa], flags: &str, found: String) -> Check {
    const ID: &str = "processor.kernels";
    let has_amx = flags.split_whitespace().any(|flag| flag == "amx_bf16");
    if has_amx && !available.contains(&Isa::Amx) {
        return Check::note(ID, format!("{found}; the processor has AMX, but the system does not permit it"))
            .advise("AMX needs Linux 5.16, and a sandbox that permits arch_prctl");
    }
    if available.contains(&Isa::Avx512Bf16) && chosen < Isa::Avx512Bf16 {
        return Check::ok(ID, format!("{found}; avx512_bf16 was measured, and is slower here"));
    }
    match chosen {
        Isa::Portable if cfg!(target_arch = "x86_64") => {
            Check::note(ID, format!("{found}; without AVX2 and FMA, a step is several times slower"))
        }
        Isa::Portable => Check::note(ID, format!("{found}; there are no faster kernels for this architecture")),
        _ => Check::ok(ID, found),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Status;
    use super::*;

    #[test]
    fn amx_without_permission_is_a_note() {
        let all = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16];
        let status = |flags: &str| judge(Isa::Avx512Bf16, &all, flags, String::new()).status;
        assert_eq!(status("flags : fpu avx2 amx_tile"), Status::Ok);
        assert_eq!(status("flags : fpu amx_bf16 amx_tile"), Status::Note);
        assert_eq!(judge(Isa::Avx512, &all, "", String::new()).status, Status::Ok);
        assert!(judge(Isa::Avx512, &all, "", String::new()).found.contains("slower here"));
        assert_eq!(judge(Isa::Portable, &all[..1], "", String::new()).status, Status::Note);
    }
}
