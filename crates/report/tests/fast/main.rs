//! Pages of small run folders.
