//! The GRPO loss on any PJRT device.
#![forbid(unsafe_code)]
