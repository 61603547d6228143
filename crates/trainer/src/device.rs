//! The devices of policies, and the options of a policy there.

use crate::Result;
use backend_tpu::plugins::Kind;
use distributed::Store;
use models::ModelConfig;
use policy_pjrt::decoder::{ATTENTION, Attention, AxisRules, Compute};
use policy_pjrt::{PjrtPolicyOptions, RolloutOptions, Runtime};
use run_config::{PolicyAttention, PolicyConfig, PolicyDevice, PolicyDtype, RecomputeGranularity, TrainConfig, check};
use stablehlo::Save;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens the first device of `kind` for a policy, or the devices of a mesh, with the plugin `plugin`, or the one that
/// [`backend_tpu::plugins::find`] finds. Compiled programs are cached in `compile_cache`, or in [`compile_cache()`].
///
/// # Errors
/// An error if the plugin is missing or opens too few devices.
pub fn open(
    kind: Kind,
    plugin: Option<&Path>,
    compile_cache: Option<&Path>,
    rules: Option<AxisRules>,
) -> Result<Runtime> {
    let runtime = match rules {
        Some(rules) => Runtime::open_mesh(kind, plugin, rules),
        None => Runtime::open(kind, plugin),
    };
    Ok(with_cache(runtime.map_err(policy::Error::from)?, compile_cache))
}

/// Opens the devices of all processes of a run, for a mesh over them, if the plugin of `kind` connects the processes: XLA's CPU plugin does not.
///
/// # Errors
/// The errors of [`Runtime::open_process`].
pub(crate) fn open_process(
    kind: Kind,
    plugin: Option<&Path>,
    compile_cache: Option<&Path>,
    store: Option<&Arc<Store>>,
) -> Result<Option<Runtime>> {
    let Some(store) = store.filter(|store| store.num_processes() > 1 && kind != Kind::Cpu) else { return Ok(None) };
    let runtime = Runtime::open_process(kind, plugin, store).map_err(policy::Error::from)?;
    Ok(Some(with_cache(runtime, compile_cache)))
}

fn with_cache(runtime: Runtime, compile_cache: Option<&Path>) -> Runtime {
    match compile_cache.map(Path::to_owned).or_else(self::compile_cache) {
        Some(folder) => runtime.with_compile_cache(folder),
        None => runtime,
    }
}

/// Returns the default folder of compiled programs: `programs`, next to the installed plugins. `None` if the user has no cache folder.
pub fn compile_cache() -> Option<PathBuf> {
    Some(pjrt::install::cache_dir().ok()?.with_file_name("programs"))
}

/// Returns the kind of a PJRT device; `None` for this CPU without a plugin.
pub(crate) fn kind(device: PolicyDevice) -> Option<Kind> {
    match device {
        PolicyDevice::Host => None,
        PolicyDevice::PjrtCpu => Some(Kind::Cpu),
        PolicyDevice::PjrtCuda => Some(Kind::Cuda),
        PolicyDevice::PjrtTpu => Some(Kind::Tpu),
    }
}

/// Returns the options of the policy of a run on a device, for a model of this shape.
///
/// # Errors
/// [`run_config::Error::Key`] if `policy.recompute_num_layers` does not divide the number of layers.
pub fn options(config: &TrainConfig, shape: &ModelConfig) -> Result<PjrtPolicyOptions> {
    Ok(PjrtPolicyOptions {
        compute: match config.policy.dtype {
            PolicyDtype::Float32 => Compute::F32,
            PolicyDtype::Bfloat16 => Compute::Bf16,
        },
        attention: match config.policy.attention {
            PolicyAttention::Auto => Attention::Auto,
            PolicyAttention::Materialised => Attention::Materialised,
            PolicyAttention::Blockwise => Attention::Blockwise { block: Attention::BLOCK },
        },
        save: saved(&config.policy, shape.num_hidden_layers)?,
        can_roll_back: config.keeps_state_to_roll_back(),
        rollout: RolloutOptions { slots: config.rollout.batch_size, ..RolloutOptions::default() },
        ..PjrtPolicyOptions::default()
    })
}

/// Returns the activations that are saved for a model with this number of layers.
fn saved(policy: &PolicyConfig, layers: usize) -> Result<Save> {
    let group = policy.recompute_num_layers;
    Ok(match policy.recompute_granularity {
        RecomputeGranularity::Full if group == 1 => Save::Carry,
        RecomputeGranularity::Full => {
            let expected = format!("a number that the model's {layers} layers are a multiple of");
            check(layers.is_multiple_of(group), "policy.recompute_num_layers", &expected, group)?;
            Save::Every(group)
        }
        RecomputeGranularity::ExceptAttention => Save::Named(vec![ATTENTION.into()]),
        RecomputeGranularity::Selective => Save::Products,
        RecomputeGranularity::None => Save::Everything,
    })
}
