//! Faults around runs and files: kills and signals at any moment, full disks, edited folders, and files with arbitrary
//! bytes. They are bounded versions of longer attacks, with fixed seeds.

mod disk;
mod kills;
mod mutations;
mod tampering;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}
