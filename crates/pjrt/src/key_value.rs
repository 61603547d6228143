//! The key-value store by which the processes of a plugin find each other.

use std::time::Duration;

use crate::error::Code;

/// A key-value store that all processes of a run share, see [`Plugin::client_with_store`](crate::Plugin::client_with_store).
///
/// A plugin calls it from several threads at once, as long as the process runs. Implementations prefix the keys if the store is also used
/// for something else.
///
/// ```
/// use std::collections::HashMap;
/// use std::sync::{Condvar, Mutex};
/// use std::time::Duration;
/// use grpo_pjrt::{Code, KeyValueError, KeyValueStore};
///
/// /// The store of a single process.
/// #[derive(Default)]
/// struct Local(Mutex<HashMap<String, Vec<u8>>>, Condvar);
///
/// impl KeyValueStore for Local {
///     fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KeyValueError> {
///         let values = self.0.lock().unwrap();
///         let (values, _) = self.1.wait_timeout_while(values, timeout, |values| !values.contains_key(key)).unwrap();
///         values.get(key).cloned().ok_or_else(|| KeyValueError::new(Code::DeadlineExceeded, format!("no value for {key}")))
///     }
///     fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>, KeyValueError> {
///         Ok(self.0.lock().unwrap().get(key).cloned())
///     }
///     fn put(&self, key: &str, value: &[u8]) -> Result<(), KeyValueError> {
///         self.0.lock().unwrap().insert(key.to_owned(), value.to_vec());
///         self.1.notify_all();
///         Ok(())
///     }
/// }
/// ```
pub trait KeyValueStore: Send + Sync {
    /// Returns the value of a key, and waits for it up to `timeout`.
    ///
    /// # Errors
    /// [`Code::DeadlineExceeded`] after the timeout; other errors of the store.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, KeyValueError>;

    /// Returns the value of a key; `None` if it has none.
    ///
    /// # Errors
    /// Errors of the store.
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>, KeyValueError>;

    /// Sets the value of a key.
    ///
    /// # Errors
    /// Errors of the store.
    fn put(&self, key: &str, value: &[u8]) -> Result<(), KeyValueError>;
}

/// An error of a [`KeyValueStore`], which the plugin reports.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} ({code:?})")]
pub struct KeyValueError {
    /// The kind of error.
    pub code: Code,
    /// The message.
    pub message: String,
}

impl KeyValueError {
    /// Returns an error.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}
