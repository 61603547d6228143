//! The requests that a run sends to a server, in the two protocols.

use crate::completion::Sampled;
use crate::error::{Error, Result};
use crate::http::{Fault, Http};
use crate::weights::Weights;
use grpo_policy::LogitsProcessors;

/// The name that both programs give to the weights with which they were started.
const UNCHANGED: &str = "default";

/// The completions of one prompt, to be sampled with one request.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) prompt: Vec<u32>,
    /// The number of completions to sample.
    pub(crate) count: usize,
    /// `None` for greedy completions.
    pub(crate) random: Option<Random>,
    pub(crate) max_tokens: usize,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) stop_texts: Vec<String>,
    /// `true` if completions need sampling masks.
    pub(crate) masks: bool,
    /// The largest number of ids that a server lists for a token, whether its mask is needed or not.
    pub(crate) listed: usize,
}

/// How tokens are drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Random {
    pub(crate) temperature: f64,
    pub(crate) processors: LogitsProcessors,
    /// The seed of the first completion; completion i has `seed + i`.
    pub(crate) seed: u64,
}

impl Job {
    /// Returns the largest length of a reply in bytes.
    pub(crate) fn max_reply(&self) -> u64 {
        let tokens = self.count.saturating_mul(self.max_tokens).saturating_add(self.prompt.len());
        // An id of a mask has at most 10 digits.
        let bytes = self.listed.saturating_mul(12).saturating_add(1 << 10);
        (tokens as u64).saturating_mul(bytes as u64).saturating_add(1 << 20)
    }
}

/// Facts that a server reports about itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts {
    /// The name of the model in requests.
    pub(crate) model: String,
    /// The version of the server's program.
    pub(crate) version: String,
    /// The largest number of tokens of a sequence.
    pub(crate) context: Option<usize>,
    /// The dtype of weights, with torch's name.
    pub(crate) dtype: Option<String>,
    /// The quantization of weights.
    pub(crate) quantization: Option<String>,
    /// `true` if [`Protocol::replace_weights`] leaves the old weights in a head that shares the embedding's.
    pub(crate) keeps_tied_head: bool,
    /// The name of the weights that the server has at the start, if it names them.
    pub(crate) weights: Option<String>,
    /// The limits of adapters; `None` if the server takes none.
    pub(crate) lora: Option<LoraLimits>,
    /// `true` if the server can return the ids that every token was sampled from.
    pub(crate) returns_masks: bool,
    /// `true` if the server refuses requests without top-k.
    pub(crate) needs_top_k: bool,
    /// Settings that the protocol requires and the server does not have: expected, found, and the flag.
    pub(crate) wrong: Option<(String, String, String)>,
}

/// The limits of a server for adapters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoraLimits {
    pub(crate) max_rank: Option<usize>,
    /// The number of adapters that requests of one batch may use.
    pub(crate) max_adapters: Option<usize>,
}

/// The flags of a server's program.
pub(crate) struct Flags {
    pub(crate) context: &'static str,
    pub(crate) max_rank: &'static str,
    pub(crate) max_adapters: &'static str,
    pub(crate) lora: &'static str,
    pub(crate) masks: Option<&'static str>,
}

/// The requests of a protocol.
pub(crate) trait Protocol: Send + Sync {
    /// The name of the program.
    fn program(&self) -> &'static str;

    fn flags(&self) -> Flags;

    /// Returns the command that starts a server of the model in a folder for a run, with the flag `port`.
    fn command(&self, model: &str, port: &str, needs: &Needs<'_>) -> String;

    /// Returns what the server reports about itself. `model` is the name to look for; without it, the server must have only one.
    fn facts(&self, http: &Http, model: Option<&str>) -> Result<Facts, Fault>;

    /// Replaces the weights of the model. On an error the server may be paused, with incomplete weights.
    fn replace_weights(&self, http: &Http, weights: &Weights) -> Result<(), Fault>;

    /// Returns the name of the weights that the server has, as set by [`Protocol::replace_weights`].
    fn weights_name(&self, http: &Http) -> Result<String, Fault>;

    /// Adds an adapter, which requests then name.
    fn load_adapter(&self, http: &Http, weights: &Weights) -> Result<(), Fault>;

    /// Removes an adapter.
    fn unload_adapter(&self, http: &Http, name: &str) -> Result<(), Fault>;

    /// Samples the completions of a job, with the adapter of this name or, without one, with the model's weights.
    fn sample(&self, http: &Http, facts: &Facts, job: &Job, adapter: Option<&str>) -> Result<Vec<Sampled>, Fault>;
}

/// The requirements of a run for its servers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs<'a> {
    /// The largest number of tokens of a prompt and its completion.
    pub(crate) max_tokens: usize,
    /// The rank of the adapters, and the number of adapters in use at a time.
    pub(crate) lora: Option<(usize, usize)>,
    /// `true` if the head of the model has the weights of its embedding.
    pub(crate) is_tied: bool,
    /// `true` if completions need sampling masks.
    pub(crate) masks: bool,
    /// The dtype in which the policy computes, with torch's name.
    pub(crate) dtype: &'a str,
}

/// Checks that a server fits a run. A dtype other than the policy's is only logged: the loss corrects the difference.
///
/// # Errors
/// [`Error::Settings`] with the flag to set.
pub(crate) fn check_facts(server: &str, protocol: &dyn Protocol, facts: &Facts, needs: &Needs<'_>) -> Result<()> {
    let flags = protocol.flags();
    let refused = |expected: String, found: String, fix: String| {
        Err(Error::Settings { server: server.to_owned(), expected, found, fix })
    };
    let restart = |flag: String| format!("start {} with `{flag}`", protocol.program());
    let without = |flag: &str| format!("start {} without `{flag}`", protocol.program());
    if let Some((expected, found, fix)) = facts.wrong.clone() {
        return refused(expected, found, fix);
    }
    let Needs { max_tokens, lora, is_tied, masks, dtype } = *needs;
    if let Some(context) = facts.context.filter(|context| *context < max_tokens) {
        let expected = format!("room for {max_tokens} tokens, the longest prompt and its completion");
        let fix =
            format!("{}, or lower rollout.max_completion_length", restart(format!("{} {max_tokens}", flags.context)));
        return refused(expected, format!("a context of {context} tokens"), fix);
    }
    if let (true, false, Some(flag)) = (masks, facts.returns_masks, flags.masks) {
        let expected = "a server that returns the ids that tokens were sampled from, for rollout.replay_sampling_mask";
        return refused(expected.into(), "one that does not".into(), restart(flag.into()));
    }
    if !masks && facts.needs_top_k {
        let expected = "a server that samples without top_k, or rollout.replay_sampling_mask: true";
        return refused(expected.into(), "one that returns sampling masks".into(), without("--return-sampling-mask"));
    }
    if lora.is_some() && facts.weights.as_deref() != Some(UNCHANGED) {
        let expected = format!("the weights of the model below the adapters, called `{UNCHANGED}`");
        let (found, fix) = match &facts.weights {
            Some(name) => (
                format!("weights called `{}`", grpo_files::printable_line(name)),
                format!("restart {}: another run has replaced its weights", protocol.program()),
            ),
            // Adapters over other weights than the policy's would be another policy.
            None => ("no name of the weights".into(), format!("install a {} that reports it", protocol.program())),
        };
        return refused(expected, found, fix);
    }
    if let Some((rank, adapters)) = lora {
        let Some(limits) = facts.lora else {
            let fix = restart(format!("{} {} {rank} {} {adapters}", flags.lora, flags.max_rank, flags.max_adapters));
            return refused("a server that takes adapters, for `lora`".into(), "one that does not".into(), fix);
        };
        if let Some(most) = limits.max_rank.filter(|most| *most < rank) {
            let fix = restart(format!("{} {rank}", flags.max_rank));
            return refused(format!("adapters of rank {rank}, which is lora.r"), format!("at most rank {most}"), fix);
        }
        if let Some(most) = limits.max_adapters.filter(|most| *most < adapters) {
            let expected = format!("{adapters} adapters at a time, rollout.max_staleness + 1");
            return refused(expected, most.to_string(), restart(format!("{} {adapters}", flags.max_adapters)));
        }
    } else if let Some(quantization) = &facts.quantization {
        let fix = format!("start {} with the model as it is, or train `lora`", protocol.program());
        return refused("weights that are not quantized, to replace them".into(), quantization.clone(), fix);
    } else if facts.keeps_tied_head && is_tied {
        let expected =
            "a head with weights of its own, or `lora`: a reload on a CPU leaves a tied head at the old weights";
        let fix = "train `lora`, or serve the model on a GPU".into();
        return refused(expected.into(), "a model with tie_word_embeddings: true".into(), fix);
    }
    if let Some(found) = facts.dtype.as_deref().filter(|found| *found != dtype) {
        tracing::warn!(
            "{server} computes in {found} and the policy in {dtype}, so their log-probabilities differ: the loss corrects for it, and \
             sampling/sampling_logp_difference has the difference; `--dtype {dtype}` of {} makes them equal",
            protocol.program()
        );
    }
    Ok(())
}
