//! Other systems, as workers in Python. Their programs are embedded; a virtual environment has their packages.

use crate::Options;
use crate::config::BenchConfig;
use crate::error::{Error, Result};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Files that are written for Python.
const PROGRAMS: [(&str, &str); 4] = [
    ("protocol.py", include_str!("../peers/protocol.py")),
    ("torch_worker.py", include_str!("../peers/torch_worker.py")),
    ("jax_worker.py", include_str!("../peers/jax_worker.py")),
    ("model_worker.py", include_str!("../peers/model_worker.py")),
];

/// The inputs of a peer.
#[derive(Clone, Copy, PartialEq)]
enum Takes {
    Hidden,
    Logits,
    Either,
}

/// A peer: its name, its program, the program's name for it, its inputs, and whether it allocates in huge pages.
struct Known(&'static str, &'static str, &'static str, Takes, bool);

const KNOWN: [Known; 10] = [
    Known("torch_eager", "torch_worker.py", "eager", Takes::Either, false),
    Known("torch_eager_huge", "torch_worker.py", "eager", Takes::Either, true),
    Known("torch_compile", "torch_worker.py", "compile", Takes::Either, false),
    Known("torch_compile_huge", "torch_worker.py", "compile", Takes::Either, true),
    Known("torch_chunks", "torch_worker.py", "chunks", Takes::Hidden, true),
    Known("liger", "torch_worker.py", "liger", Takes::Hidden, false),
    Known("trl_fused", "torch_worker.py", "trl_fused", Takes::Hidden, false),
    Known("trl_selective", "torch_worker.py", "trl_selective", Takes::Logits, false),
    Known("jax", "jax_worker.py", "base", Takes::Either, false),
    Known("jax_chunks", "jax_worker.py", "chunks", Takes::Hidden, false),
];

/// A peer that can be started.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Name of the peer in reports.
    pub name: String,
    /// Program of the peer with its arguments.
    pub command: Vec<OsString>,
    /// `true` if the peer's process allocates in huge pages.
    pub huge_pages: bool,
}

/// Returns the names of all peers.
pub fn names() -> impl Iterator<Item = &'static str> {
    KNOWN.iter().map(|known| known.0)
}

/// Returns the peers that take the inputs of `config`, with the Python of the virtual environment `venv`. Writes their programs
/// to `folder`.
///
/// # Errors
/// [`Error::Argument`] if the environment does not exist, [`Error::File`] if `folder` cannot be written.
pub fn all(config: &BenchConfig, venv: &Path, folder: &Path) -> Result<Vec<Peer>> {
    let python = python(venv, folder)?;
    let given = if config.shape.hidden.is_some() { Takes::Hidden } else { Takes::Logits };
    let fitting = KNOWN.iter().filter(|Known(_, _, _, takes, _)| *takes == Takes::Either || *takes == given);
    let peer = |Known(name, program, argument, _, huge_pages): &Known| {
        let command = vec![python.clone().into(), folder.join(program).into(), (*argument).into()];
        Peer { name: (*name).to_owned(), command, huge_pages: *huge_pages }
    };
    Ok(fitting.map(peer).collect())
}

/// A system whose models are measured.
pub(crate) struct ModelPeer {
    pub(crate) name: &'static str,
    /// Program of the peer with its arguments, or the reason why it is missing.
    pub(crate) command: std::result::Result<Vec<OsString>, String>,
    /// `true` if one process measures several problems.
    pub(crate) is_shared: bool,
    /// `true` if it takes optimizer steps.
    pub(crate) updates: bool,
}

/// Returns the names of the peers of models.
pub(crate) fn model_names() -> impl Iterator<Item = &'static str> {
    ["transformers", "vllm"].into_iter()
}

/// Returns the peers of models, and writes their programs to `folder`.
///
/// # Errors
/// See [`all`].
pub(crate) fn of_models(options: &Options, folder: &Path) -> Result<Vec<ModelPeer>> {
    let venvs = [(&options.peers_venv, "--peers-venv"), (&options.vllm_venv, "--vllm-venv")];
    let peer = |(name, (venv, option)): (&'static str, (&Option<PathBuf>, &str))| {
        let command = match venv {
            None => Err(format!("not measured: name its Python environment with {option} (peers/README.md)")),
            Some(venv) => Ok(vec![python(venv, folder)?.into(), folder.join("model_worker.py").into(), name.into()]),
        };
        let is_vllm = name == "vllm";
        Ok(ModelPeer { name, command, is_shared: is_vllm, updates: !is_vllm })
    };
    model_names().zip(venvs).map(peer).collect()
}

/// Returns the interpreter of a virtual environment, and writes all programs to `folder`.
fn python(venv: &Path, folder: &Path) -> Result<PathBuf> {
    let python = venv.join("bin").join("python");
    if !python.is_file() {
        let found = format!("no {}", python.display());
        return Err(Error::argument("peers", "a virtual environment as described in peers/README.md", found));
    }
    for (name, text) in PROGRAMS {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|e| Error::io("write", &path, e))?;
    }
    Ok(python)
}
