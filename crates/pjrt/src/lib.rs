//! A safe binding to the PJRT C API.
