//! Runtimes on the devices of several processes.
//!
//! Every process has the same mesh of all devices, and calls the same methods in the same order: it uploads the shards of its own devices,
//! launches every program, and reads whole tensors from its own devices. XLA's collectives move data between the processes. The [`Store`] of the
//! run carries the plugin's keys (topology, ids of NCCL), the comparison of devices, and executables.
//! A compiler may wait for the compilers of the other hosts (XLA's autotuning on GPUs), so either all processes compile a program, or all load
//! the executable of process 0.

use crate::error::{Error, Result};
use crate::modules::program_error;
use crate::runtime::{Runtime, warn_of_damage};
use grpo_backend_tpu::devices::{Argument, DeviceTensor, Layout, MeshProcesses, descriptions};
use grpo_backend_tpu::plugins::{self, Kind};
use grpo_distributed::Store;
use grpo_pjrt::{Client, Code, DeviceDescription, Element, KeyValueError, KeyValueStore, LoadedExecutable};
use grpo_stablehlo::{Builder, Dtype, Module, TensorType};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use strum::VariantArray;

/// The name of the barrier at which processes compare the devices.
const DEVICES: &str = "the devices of all processes";
/// The prefix of a plugin's keys in the store.
const PREFIX: &str = "pjrt/";

impl Runtime {
    /// Opens the devices of `kind` in one of the processes of `store`. The CUDA plugin connects the processes through the store; libtpu does so by
    /// itself, as its environment says. The runtime has one device until [`Runtime::on_mesh`] arranges the devices of all processes.
    ///
    /// This was not run on several hosts with TPUs or GPUs.
    ///
    /// # Errors
    /// [`Error::Loss`] if there is no plugin, or if it opens no device; see [`Runtime::of_process`].
    pub fn open_process(kind: Kind, path: Option<&Path>, store: &Arc<Store>) -> Result<Self> {
        let client = match kind {
            Kind::Cuda => {
                let options = [("node_id", store.process_id()), ("num_nodes", store.num_processes())];
                let options = options.map(|(name, value)| (name, (value as i64).into()));
                let callbacks = DeviceStore(Arc::downgrade(store));
                plugins::client_with_store(kind, path, &options, Arc::new(callbacks))?
            }
            Kind::Cpu | Kind::Tpu => plugins::client(kind, path, &[])?,
        };
        Self::of_process(kind, client, store)
    }

    /// Uses an open client in one of the processes of `store`. All processes call it.
    ///
    /// # Errors
    /// [`Error::Processes`] if the client has the devices of another number of processes; [`Error::Store`] if another process has other
    /// devices or another version of the plugin, and if it has failed.
    pub fn of_process(kind: Kind, client: Client, store: &Arc<Store>) -> Result<Self> {
        let all = descriptions(client.devices())?;
        let (found, expected) = (MeshProcesses::of_devices(&all).processes().len(), store.num_processes());
        if found != expected {
            let advice = match kind {
                Kind::Tpu => {
                    ": libtpu reads TPU_WORKER_ID, TPU_WORKER_HOSTNAMES and TPU_PROCESS_BOUNDS, or asks the metadata server of a TPU VM"
                }
                _ => "",
            };
            return Err(Error::Processes {
                device: format!("pjrt:{}", kind.name()),
                expected: format!("{} devices of {expected} processes, as the run has", kind.name()),
                found: format!("{} devices of {found}{advice}", all.len()),
            });
        }
        let token = token(&client, all);
        store.barrier(DEVICES, &token, store.options().initialization_timeout)?;
        let mut runtime = Self::first_device(kind, client)?;
        runtime.store = Some(Arc::clone(store));
        Ok(runtime)
    }

    /// Copies a tensor to the host, row-major. If the devices of a process do not have all of it, a program first copies it to every device:
    /// all processes call this method.
    ///
    /// # Errors
    /// See [`DeviceTensor::read`].
    pub fn read<T: Element>(&self, tensor: &DeviceTensor, what: &str) -> Result<Vec<T>> {
        match self.owner().processes().have_whole(tensor.layout())? {
            true => Ok(tensor.read(what)?),
            false => Ok(self.replicate(tensor)?.read(what)?),
        }
    }

    /// Returns a copy of a tensor that is whole on every device.
    fn replicate(&self, tensor: &DeviceTensor) -> Result<DeviceTensor> {
        const NAME: &str = "replicate";
        let layout = tensor.layout();
        let Some(dtype) = tensor.shards().first().map(grpo_pjrt::Buffer::dtype) else {
            return Err(grpo_policy::Error::argument(NAME, "a device of this process", "none").into());
        };
        let known = |(of, from, _): &&ReplicatingProgram| *of == dtype && from == layout;
        let found = self.replicating.lock().iter().find(known).map(|(_, _, executable)| Arc::clone(executable));
        let executable = match found {
            Some(executable) => executable,
            None => {
                let element = Dtype::VARIANTS.iter().find(|element| element.to_string() == dtype.to_string());
                let expected = || grpo_policy::Error::argument(NAME, "a dtype of StableHLO", dtype);
                let module = replicating(layout, *element.ok_or_else(expected)?).map_err(program_error(NAME))?;
                let executable = Arc::new(self.compile_executable(&module)?);
                self.replicating.lock().push((dtype, layout.clone(), Arc::clone(&executable)));
                executable
            }
        };
        let nothing = grpo_pjrt::Error::Nothing { operation: "PJRT_LoadedExecutable_Execute" };
        let whole = [Layout::new(layout.shape(), None).into()];
        let outputs = self.owner().run(&executable, vec![Argument::Borrowed(tensor)], &whole);
        outputs.and_then(|mut outputs| outputs.pop().ok_or(nothing)).map_err(Error::device(format!("running `{NAME}`")))
    }

    /// Compiles a program in all processes, or loads in all of them the executable that process 0 has in its cache: compilers of several
    /// processes may wait for each other, so none compiles alone.
    pub(crate) fn compile_together(&self, store: &Store, name: &str, text: &str) -> Result<LoadedExecutable> {
        let (client, Self { options, cache, .. }) = (self.client(), self);
        let of_device = || Error::device(format!("loading `{name}`"));
        let cache = cache.as_ref().filter(|_| store.is_leader());
        let cached = match cache {
            Some(cache) => cache.read(client, text, options).map_err(of_device())?,
            None => None,
        };
        let own = cached.and_then(|bytes| match client.load(&bytes) {
            Ok(executable) => Some((bytes, executable)),
            Err(error) => {
                tracing::debug!(%error, program = name, "loading a cached program");
                cache.iter().for_each(|cache| warn_of_damage(cache, name));
                None
            }
        });
        let (bytes, own) = own.unzip();
        let bytes = store.broadcast(&format!("the executable of `{name}`"), || bytes.unwrap_or_default())?;
        match own {
            Some(executable) => Ok(executable),
            None if !bytes.is_empty() => client.load(&bytes).map_err(of_device()),
            None => {
                let executable = client.compile(text, options).map_err(|cause| self.compile_error(name, cause))?;
                if let Some(cache) = cache {
                    cache.write(client, text, options, &executable).map_err(of_device())?;
                }
                Ok(executable)
            }
        }
    }
}

/// The programs of a runtime and its clones that copy tensors to every device, by dtype and layout.
#[derive(Clone, Default)]
pub(crate) struct Replicating(Arc<Mutex<Vec<ReplicatingProgram>>>);

type ReplicatingProgram = (grpo_pjrt::DType, Layout, Arc<LoadedExecutable>);

impl Replicating {
    fn lock(&self) -> MutexGuard<'_, Vec<ReplicatingProgram>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Replicating {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Replicating({} programs)", self.lock().len())
    }
}

/// Builds the program from a tensor of this layout to the same tensor, whole on every device.
fn replicating(layout: &Layout, dtype: Dtype) -> grpo_stablehlo::Result<Module> {
    let f = Builder::new();
    let tensor = f.argument("tensor", TensorType::new(dtype, layout.shape()));
    if let Some(sharding) = layout.sharding() {
        f.shard(&tensor, sharding);
        f.shard_result(0, &sharding.mesh().replicated(layout.shape().len()));
    }
    f.clone().finish("replicate", &[("whole", &tensor)])
}

/// Returns a text that is equal in all processes of a run: the platform, and the devices in the order of their ids.
fn token(client: &Client, mut devices: Vec<DeviceDescription>) -> Vec<u8> {
    devices.sort_by_key(|device| device.id);
    let of_device = |device: &DeviceDescription| {
        let coordinates = device.attributes.get("coords");
        format!("{} {} {} {coordinates:?}\n", device.id, device.process_index, device.kind)
    };
    let devices: String = devices.iter().map(of_device).collect();
    format!("{}\n{devices}", client.platform_version()).into_bytes()
}

/// The store of a run as a plugin reaches it, for as long as the run has it.
struct DeviceStore(Weak<Store>);

impl DeviceStore {
    fn with<T>(
        &self,
        call: impl FnOnce(&Store) -> grpo_distributed::Result<T>,
    ) -> std::result::Result<T, KeyValueError> {
        let Some(store) = self.0.upgrade() else { return Err(key_value_error(grpo_distributed::Error::Closed)) };
        call(&store).map_err(key_value_error)
    }
}

impl KeyValueStore for DeviceStore {
    fn get(&self, key: &str, timeout: Duration) -> std::result::Result<Vec<u8>, KeyValueError> {
        self.with(|store| store.get(&format!("{PREFIX}{key}"), timeout))
    }

    fn try_get(&self, key: &str) -> std::result::Result<Option<Vec<u8>>, KeyValueError> {
        self.with(|store| store.try_get(&format!("{PREFIX}{key}")))
    }

    fn put(&self, key: &str, value: &[u8]) -> std::result::Result<(), KeyValueError> {
        self.with(|store| store.put(&format!("{PREFIX}{key}"), value))
    }
}

/// Returns the error of the store as a plugin reports it.
fn key_value_error(error: grpo_distributed::Error) -> KeyValueError {
    use grpo_distributed::Error::{Closed, Exists, Full, Size, TimedOut};
    let code = match &error {
        TimedOut { .. } => Code::DeadlineExceeded,
        Exists { .. } => Code::AlreadyExists,
        Size { .. } => Code::InvalidArgument,
        Full { .. } => Code::ResourceExhausted,
        Closed => Code::Cancelled,
        _ => Code::Unavailable,
    };
    KeyValueError::new(code, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use grpo_distributed::Options;

    fn alone() -> Arc<Store> {
        Arc::new(Store::open(&Options::new("127.0.0.1:0", 1, 0), &[]).unwrap())
    }

    #[test]
    fn a_plugin_reads_and_sets_keys_of_its_own_in_the_store_of_the_run() {
        let store = alone();
        let plugin = DeviceStore(Arc::downgrade(&store));
        store.put("topology", b"of the run").unwrap();
        assert_eq!(plugin.try_get("topology").unwrap(), None);
        plugin.put("topology", b"of a device").unwrap();
        assert_eq!(plugin.try_get("topology").unwrap().unwrap(), b"of a device");
        assert_eq!(plugin.get("topology", Duration::ZERO).unwrap(), b"of a device");
        assert_eq!(store.try_get("topology").unwrap().unwrap(), b"of the run");
    }

    #[test]
    fn errors_of_the_store_have_the_codes_that_plugins_expect() {
        let store = alone();
        let plugin = DeviceStore(Arc::downgrade(&store));
        plugin.put("key", b"value").unwrap();
        let codes = [
            plugin.get("missing", Duration::from_millis(1)).unwrap_err(),
            plugin.put("key", b"another value").unwrap_err(),
            plugin.put(&"k".repeat(grpo_distributed::MAX_KEY), b"").unwrap_err(),
        ];
        let expected = [Code::DeadlineExceeded, Code::AlreadyExists, Code::InvalidArgument];
        assert_eq!(codes.each_ref().map(|error| error.code), expected, "{codes:?}");
        store.fail("a test");
        let failed = plugin.try_get("key").unwrap_err();
        assert!(failed.code == Code::Unavailable && failed.message.contains("a test"), "{failed}");
        drop(store);
        assert_eq!(plugin.try_get("key").unwrap_err().code, Code::Cancelled);
    }

    #[test]
    fn a_replicating_program_has_the_layout_of_its_tensor_and_a_whole_result() {
        let mesh = grpo_stablehlo::Mesh::new("mesh", [("data", 2), ("fsdp", 2)]).unwrap();
        let layout = Layout::new(&[8, 4], Some(&mesh.sharding(&[&["fsdp"], &[]]).unwrap()));
        let module = replicating(&layout, Dtype::I32).unwrap();
        let (main, ids) = (&module.main, &module.main.body().results);
        let of = |sharding: &Option<grpo_stablehlo::Sharding>| Layout::new(&[8, 4], sharding.as_ref());
        assert!(of(&main.arguments[0].sharding).is(&layout, 4));
        assert!(of(&main.results[0].sharding).is(&Layout::new(&[8, 4], None), 4));
        assert_eq!(main.type_of(ids[0]).to_string(), "tensor<8x4xi32>");
    }
}
