//! Environments outside of this process: programs and servers.

mod openenv;
mod programs;
