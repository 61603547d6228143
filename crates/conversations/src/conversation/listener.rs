//! Environments answer the turns that are finished while the policy samples the others.

use super::check::Tools;
use super::episode::Talk;
use crate::{Error, Result};
use grpo_models::Tokenizer;
use grpo_policy::{Completion, Finished};
use grpo_rewards::programs::lock;
use grpo_run_config::MultiTurnConfig;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::Scope;

/// The turns of one request, and the tokenizer, tools and limits for their messages.
pub(super) struct Turns<'t, 'a> {
    talks: &'t [Mutex<&'t mut Talk<'a>>],
    /// The conversation of each completion of the request.
    open: &'t [usize],
    tokenizer: &'t dyn Tokenizer,
    tools: Mutex<&'t mut Tools<'a>>,
    limits: &'t MultiTurnConfig,
    /// Whether each turn has been taken.
    taken: Vec<AtomicBool>,
    failed: Mutex<Option<Error>>,
}

/// Receives finished turns, and sends their conversations to the threads of the environments: one thread for each worker.
pub(super) struct Listener<'t, 'a> {
    turns: &'t Turns<'t, 'a>,
    workers: BTreeMap<(Option<usize>, usize), Sender<usize>>,
}

impl<'t, 'a> Turns<'t, 'a> {
    pub(super) fn new(
        talks: &'t [Mutex<&'t mut Talk<'a>>],
        open: &'t [usize],
        tokenizer: &'t dyn Tokenizer,
        tools: &'t mut Tools<'a>,
        limits: &'t MultiTurnConfig,
    ) -> Self {
        let taken = open.iter().map(|_| AtomicBool::new(false)).collect();
        Self { talks, open, tokenizer, tools: Mutex::new(tools), limits, taken, failed: Mutex::new(None) }
    }

    /// Adds a finished turn to its conversation. Returns `true` if the environment has to answer.
    fn take(&self, conversation: usize, turn: Completion) -> bool {
        let mut talk = lock(&self.talks[conversation]);
        match talk.take_turn(turn, self.tokenizer, &mut lock(&self.tools), self.limits) {
            Ok(()) => talk.is_open(),
            Err(error) => {
                lock(&self.failed).get_or_insert(error);
                false
            }
        }
    }
}

impl<'t, 'a> Listener<'t, 'a> {
    /// Starts the threads of the environments if this process `asks` them. They end after the listener.
    pub(super) fn start<'scope>(turns: &'t Turns<'t, 'a>, asks: bool, scope: &'scope Scope<'scope, '_>) -> Self
    where
        't: 'scope,
    {
        let mut workers = BTreeMap::new();
        for conversation in turns.open.iter().filter(|_| asks) {
            workers.entry(lock(&turns.talks[*conversation]).worker()).or_insert_with(|| {
                let (sender, conversations) = mpsc::channel::<usize>();
                scope.spawn(move || conversations.into_iter().for_each(|index| lock(&turns.talks[index]).ask()));
                sender
            });
        }
        Self { turns, workers }
    }

    /// Ends the listener.
    ///
    /// # Errors
    /// The first error of a turn.
    pub(super) fn end(self) -> Result<()> {
        let failed = lock(&self.turns.failed).take();
        failed.map_or(Ok(()), Err)
    }
}

impl Finished for Listener<'_, '_> {
    fn finished(&self, index: usize, completion: &Completion) {
        let (Some(conversation), Some(taken)) = (self.turns.open.get(index), self.turns.taken.get(index)) else {
            return;
        };
        if taken.swap(true, Ordering::Relaxed) || !self.turns.take(*conversation, completion.clone()) {
            return;
        }
        let worker = lock(&self.turns.talks[*conversation]).worker();
        // The thread receives until the listener ends.
        if let Some(worker) = self.workers.get(&worker) {
            let _ = worker.send(*conversation);
        }
    }
}

impl fmt::Debug for Listener<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("turns", &self.turns.open.len()).finish()
    }
}
