//! A model that is split over several devices: what its calls do on the other ranks.

use std::sync::Arc;

use burn::tensor::{DType, Int, Tensor};
use burn_marlin::QuantSpec;
use marlin_nn::SequenceState;

use super::{CachePosition, KvCache, Model, Residual};
use crate::ModelError;
use crate::parallel::{Communicator, Parallel, ParallelError, RankState, Ranks, Session};

/// The caches of the other ranks that belong to a cache of rank 0. They are dropped with it.
#[derive(Debug)]
pub(crate) struct RankCaches {
    ranks: Arc<Ranks>,
    id: u64,
    /// The session in which the caches were made; an error if none could begin.
    session: Result<Session, ParallelError>,
}

impl Drop for RankCaches {
    fn drop(&mut self) {
        self.ranks.forget(self.id);
    }
}

impl Model {
    /// Returns the number of devices that the model is split over; 1 for a whole model.
    pub fn rank_count(&self) -> usize {
        self.parallel
            .as_ref()
            .map_or(1, |parallel| parallel.communicator.group().count())
    }

    /// Returns why a device of a split model failed; `None` if none has since the last engine,
    /// cache or pass without a cache began.
    pub fn failure(&self) -> Option<ParallelError> {
        self.communicator()?.group().failure()
    }

    /// Checks that no device of a split model has failed.
    pub(crate) fn check_ranks(&self) -> Result<(), ModelError> {
        self.failure().map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Returns the model as the part of a rank.
    pub(crate) fn with_parallel(self, parallel: Parallel) -> Self {
        Self {
            parallel: Some(parallel),
            ..self
        }
    }

    /// Returns the model as a whole one.
    pub(crate) fn without_parallel(self) -> Self {
        Self {
            parallel: None,
            ..self
        }
    }

    /// Returns true if the model is the part of a rank.
    pub(crate) fn is_split(&self) -> bool {
        self.parallel.is_some()
    }

    /// Returns the end of this rank in the exchanges of its group, of a split model.
    pub(crate) fn communicator(&self) -> Option<&Communicator> {
        Some(&self.parallel.as_ref()?.communicator)
    }

    /// Returns the threads of the other ranks, of a split model on rank 0.
    pub(crate) fn ranks(&self) -> Option<&Arc<Ranks>> {
        self.parallel.as_ref()?.ranks.as_ref()
    }

    /// Returns the number of ranks that share the memory of this one: all of them on the host.
    pub(crate) fn ranks_in_memory(&self) -> usize {
        match &self.parallel {
            Some(parallel) if parallel.is_host => self.rank_count(),
            _ => 1,
        }
    }

    /// Releases memory that the allocators of the devices keep, and returns the free bytes of the
    /// device with least; `None` if a device does not report it.
    pub(crate) fn free_memory(&self) -> Option<usize> {
        let of_others = self.ranks().map(|ranks| {
            let free = |state: &mut RankState| state.model.free_memory_of_rank();
            let session = ranks.session();
            session.and_then(|session| ranks.ask(session, free))
        });
        let own = self.free_memory_of_rank();
        match of_others {
            None => own,
            Some(Ok(others)) => others.into_iter().fold(own, |a, b| Some(a?.min(b?))),
            Some(Err(error)) => {
                tracing::error!(%error, "a device did not report its memory");
                None
            }
        }
    }

    /// Returns the free bytes of the device of this rank.
    fn free_memory_of_rank(&self) -> Option<usize> {
        let device = self.device();
        // Weights are read through buffers that the allocator keeps.
        self.stream().executes(|| device.memory_cleanup());
        burn_marlin::device::free_memory(&device)
    }

    /// Returns a residual stream of hidden states [.., hidden].
    pub(super) fn residual<const D: usize>(&self, hidden: Tensor<D>) -> Residual<D> {
        Residual::over(hidden, self.communicator().cloned())
    }

    /// Creates an empty cache for `slots` sequences of `max_len` positions, and its parts on the
    /// other ranks.
    pub(crate) fn cache_of(&self, slots: usize, max_len: usize) -> KvCache {
        let mut cache = self.own_cache(slots, max_len);
        cache.ranks = self.ranks().map(|ranks| {
            let id = ranks.new_id();
            let session = ranks.session().and_then(|session| {
                let keep = move |state: &mut RankState| {
                    let cache = state.model.own_cache(slots, max_len);
                    state.keep(id, cache);
                };
                ranks.run(session, keep, || session)
            });
            RankCaches {
                ranks: ranks.clone(),
                id,
                session,
            }
        });
        cache
    }

    /// Creates an empty cache of this rank.
    fn own_cache(&self, slots: usize, max_len: usize) -> KvCache {
        let (dtype, device) = (self.dtype(), self.device());
        KvCache::new(&self.config, slots, max_len, dtype, &device)
    }

    /// Returns the logits [batch, seq, vocab] of tokens [batch, seq] that follow the positions in
    /// the cache, or those of the last token alone, and appends the tokens' keys and values to the
    /// cache.
    pub(super) fn logits_after(
        &self,
        tokens: Tensor<2, Int>,
        cache: &mut KvCache,
        last: bool,
    ) -> Tensor<3> {
        let [batch, seq] = tokens.dims();
        let start = cache.len();
        let position = CachePosition { slot: 0, start };
        let logits = match self.ranks() {
            None => self.logits_at(tokens, cache, position, last),
            Some(ranks) => {
                let data = tokens.to_data();
                let (id, session) = caches_of(cache);
                let command = move |state: &mut RankState| {
                    if let Some((model, cache)) = state.kept::<KvCache>(id) {
                        let tokens = Tensor::from_data(data, &model.device());
                        model.logits_at(tokens, cache, position, last);
                    }
                };
                let count = if last { 1 } else { seq };
                let shape = [batch, count, self.config.vocab_size];
                let root = || self.logits_at(tokens, cache, position, last);
                self.logits_of_ranks(ranks, session, shape, command, root)
            }
        };
        cache.advance(seq);
        logits
    }

    /// Computes [`logits_after`](Self::logits_after) on this rank.
    fn logits_at(
        &self,
        tokens: Tensor<2, Int>,
        cache: &mut KvCache,
        position: CachePosition,
        last: bool,
    ) -> Tensor<3> {
        let hidden = self.hidden(tokens, Some((cache, position)));
        let seq = hidden.dims()[1];
        self.logits(match last {
            true => hidden.slice_dim(1, seq - 1..seq),
            false => hidden,
        })
    }

    /// Returns the logits [batch, seq, vocab] of whole sequences [batch, seq] without a cache.
    pub(super) fn logits_of_all(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let Some(ranks) = self.ranks() else {
            return self.logits(self.hidden(tokens, None));
        };
        let ([batch, seq], data) = (tokens.dims(), tokens.to_data());
        let command = move |state: &mut RankState| {
            let model = &state.model;
            let tokens = Tensor::from_data(data, &model.device());
            model.logits(model.hidden(tokens, None));
        };
        let shape = [batch, seq, self.config.vocab_size];
        let root = || self.logits(self.hidden(tokens, None));
        self.logits_of_ranks(ranks, ranks.session(), shape, command, root)
    }

    /// Returns the logits [.., vocab] of hidden states [.., hidden] after the last norm.
    pub(super) fn logits_of_hidden<const D: usize>(&self, hidden: Tensor<D>) -> Tensor<D> {
        let Some(ranks) = self.ranks() else {
            return self.logits(hidden);
        };
        let (mut shape, data, dtype) = (hidden.dims(), hidden.to_data(), hidden.dtype());
        shape[D - 1] = self.config.vocab_size;
        let command = move |state: &mut RankState| {
            let model = &state.model;
            model.logits(Tensor::<D>::from_data(data, (&model.device(), dtype)));
        };
        let root = || self.logits(hidden);
        self.logits_of_ranks(ranks, ranks.session(), shape, command, root)
    }

    /// Returns the logits [rows, vocab] of the tokens of prompts in `rows`, and writes their keys
    /// and values to the cache.
    pub(crate) fn row_logits(
        &self,
        rows: &[SequenceState],
        slots: usize,
        cache: &mut KvCache,
    ) -> Tensor<2> {
        let Some(ranks) = self.ranks() else {
            return self.row_logits_of_rank(rows, slots, cache);
        };
        let (id, session) = caches_of(cache);
        let sent = rows.to_vec();
        let command = move |state: &mut RankState| {
            if let Some((model, cache)) = state.kept::<KvCache>(id) {
                model.row_logits_of_rank(&sent, slots, cache);
            }
        };
        let shape = [rows.len(), self.config.vocab_size];
        let root = || self.row_logits_of_rank(rows, slots, cache);
        self.logits_of_ranks(ranks, session, shape, command, root)
    }

    /// Rounds the heads of the other ranks.
    pub(super) fn quantize_heads_of_ranks(
        &self,
        spec: &QuantSpec,
    ) -> Result<(), burn_marlin::Error> {
        let Some(ranks) = self.ranks() else {
            return Ok(());
        };
        let spec = *spec;
        let quantize =
            move |state: &mut RankState| Arc::make_mut(&mut state.model).quantize_own_head(&spec);
        let answers = ranks
            .session()
            .and_then(|session| ranks.ask(session, quantize));
        let failed = |error: ParallelError| burn_marlin::Error::Read {
            tensor: "the output head",
            reason: error.to_string(),
        };
        answers.map_err(failed)?.into_iter().collect()
    }

    /// Converts the weights of the other ranks to floats.
    pub(super) fn dequantize_ranks(&self) {
        let Some(ranks) = self.ranks() else {
            return;
        };
        let dequantize = |state: &mut RankState| Arc::make_mut(&mut state.model).dequantize_own();
        let ran = ranks
            .session()
            .and_then(|session| ranks.run(session, dequantize, || ()));
        if let Err(error) = ran {
            tracing::error!(%error, "the other devices keep their quantised weights");
        }
    }

    /// Returns the logits that rank 0 computes by `root` while the other ranks run `command`, or
    /// logits of NaN in this shape if a rank has failed.
    fn logits_of_ranks<const D: usize>(
        &self,
        ranks: &Ranks,
        session: Result<Session, ParallelError>,
        shape: [usize; D],
        command: impl FnOnce(&mut RankState) + Clone + Send + 'static,
        root: impl FnOnce() -> Tensor<D>,
    ) -> Tensor<D> {
        let nan = || Tensor::full(shape, f32::NAN, (&self.device(), DType::from(self.dtype())));
        session
            .and_then(|session| ranks.run(session, command, root))
            .unwrap_or_else(|_| nan())
    }
}

/// Returns the id and the session of a cache's parts on the other ranks.
///
/// # Panics
/// Panics if the cache has none.
fn caches_of(cache: &KvCache) -> (u64, Result<Session, ParallelError>) {
    match &cache.ranks {
        Some(caches) => (caches.id, caches.session.clone()),
        None => panic!("the cache of a split model must be one of `Model::new_cache`"),
    }
}
