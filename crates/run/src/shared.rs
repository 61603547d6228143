//! The state of a checkpoint in all processes of a run. Only the leader has the files.

use crate::checkpoint::{SavedState, StoredTensors};
use crate::error::Result;
use crate::processes::share;
use grpo_distributed::Store;
use grpo_policy::{Error, TensorSource};
use grpo_trainer::TrainState;
use std::borrow::Cow;
use std::sync::Arc;

/// A group of tensors that the leader reads and sends when their values are requested. All processes request the same tensors in the same
/// order.
pub(crate) struct SharedTensors<'a> {
    store: Arc<Store>,
    /// The tensors, on the leader.
    stored: Option<&'a StoredTensors>,
    shapes: Vec<(String, Vec<usize>)>,
}

impl<'a> SharedTensors<'a> {
    /// Shares the names and shapes of the leader's `stored` tensors.
    ///
    /// # Errors
    /// [`grpo_trainer::Error::Processes`].
    pub(crate) fn new(store: &Arc<Store>, stored: Option<&'a StoredTensors>) -> Result<Self> {
        let owned = |(name, shape): (&str, &[usize])| (name.to_owned(), shape.to_vec());
        let own = || Ok(stored.map(|tensors| tensors.shapes().into_iter().map(owned).collect()).unwrap_or_default());
        Ok(Self { shapes: share(store, "the shapes of a checkpoint", own)?, stored, store: Arc::clone(store) })
    }
}

impl TensorSource for SharedTensors<'_> {
    fn shapes(&self) -> Vec<(&str, &[usize])> {
        self.shapes.iter().map(|(name, shape)| (&**name, &**shape)).collect()
    }

    fn values(&self, name: &str) -> grpo_policy::Result<Cow<'_, [f32]>> {
        let Some((_, shape)) = self.shapes.iter().find(|(known, _)| known == name) else {
            return Err(Error::state(name, "a tensor", "none"));
        };
        let leader_values = self.stored.map(|stored| stored.values(name)).transpose()?;
        let bytes = self.store.broadcast(name, || {
            leader_values.iter().flat_map(|values| values.iter()).flat_map(|value| value.to_le_bytes()).collect()
        });
        let bytes = bytes.map_err(|error| Error::other(error.to_string()))?;
        if let Some(values) = leader_values {
            return Ok(values);
        }
        let expected = shape.iter().try_fold(4_usize, |bytes, size| bytes.checked_mul(*size));
        if expected != Some(bytes.len()) {
            let found = format!("{} bytes", bytes.len());
            return Err(Error::state(name, format!("the values of a tensor of shape {shape:?}"), found));
        }
        Ok(bytes.chunks_exact(4).map(|value| f32::from_le_bytes([value[0], value[1], value[2], value[3]])).collect())
    }
}

/// Shares the leader's checkpoint with all processes.
///
/// # Errors
/// [`grpo_trainer::Error::Processes`].
pub(crate) fn share_state<'a>(
    store: &Arc<Store>,
    saved: &SavedState,
    state: Option<&'a TrainState<StoredTensors>>,
) -> Result<TrainState<SharedTensors<'a>>> {
    let mut groups = [None; 3];
    if let Some(state) = state {
        groups = [Some(&state.policy), Some(&state.optimizer), Some(&state.ref_policy)];
    }
    let [policy, optimizer, ref_policy] = groups.map(|group| SharedTensors::new(store, group));
    Ok(TrainState {
        counters: saved.counters,
        policy: policy?,
        optimizer: optimizer?,
        ref_policy: ref_policy?,
        coefficients: saved.coefficients.clone(),
    })
}
