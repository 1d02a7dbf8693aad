"""Takes the result of a step into the books: tokens, stop rules, keys for full blocks, freed blocks, deltas.

What a row's step computed and emitted, for a row that verified v of its drafts and kept a of them:

    [computed_len … query_len tokens … )     written; of a decoding row 1 + v
    [computed_len, computed_len + 1 + a)     final; the rest was rejected and is overwritten by the next step
    ids grow by a + 1                        the accepted drafts and the token behind them
"""

from __future__ import annotations

from lamella.engine.request import Delta, FinishReason, Logprob
from lamella.engine.scheduler.books import Books, InFlight, ending
from lamella.engine.sequence import Sequence
from lamella.runner_v2.step import StepOutput, TokenLogprobs
from lamella.specdec import AdaptiveLength

NOTHING_LEFT = (
    "allowed_token_ids, bad_words and min_tokens, which holds end and stop ids back, together leave no token to choose"
)


def commit(books: Books, output: StepOutput) -> list[Delta]:
    """Commit the oldest step in flight. Rows whose sequence has ended meanwhile are dropped.

    Everything that ends here has given its blocks back when this returns.
    """
    step = books.in_flight.popleft()
    assert step.step_id == output.step_id, f"step {output.step_id} came before {step.step_id}"
    books.committed_step = step.step_id
    books.stats.steps += 1
    books.stats.step_seconds += output.seconds
    books.stats.computed_tokens += sum(step.query_lens)
    books.stats.spec_draft_seconds += output.draft_seconds
    if any(step.verify_lens):
        books.stats.spec_verify_seconds += output.seconds - output.draft_seconds
    deltas = _Commit(books, step, output).run()
    if books.draining:
        books.finish_draining()
    return deltas


class _Commit:
    """One commit: the output's flat lists and how far they have been read."""

    __slots__ = (
        "_books",
        "_deltas",
        "_draft_lens",
        "_failed",
        "_methods",
        "_now",
        "_num_accepted",
        "_output",
        "_rejected",
        "_standing",
        "_step",
    )

    def __init__(self, books: Books, step: InFlight, output: StepOutput) -> None:
        self._books = books
        self._step = step
        self._output = output
        self._deltas: list[Delta] = []
        self._failed = dict(output.failed)
        self._now: float | None = None
        self._draft_lens: list[int] = []
        """Drafts that each row with any verified, and how many of them stood."""
        self._num_accepted: list[int] = []
        self._standing = self._rejected = 0
        """Of the row at hand."""
        self._methods = self._books.config.draft_methods or ("",)

    def run(self) -> list[Delta]:
        step, output, deltas = self._step, self._output, self._deltas
        num_tokens, token_ids, generations = output.num_tokens, output.token_ids, output.generations
        query_lens = step.query_lens
        num_drafts = output.num_drafts
        eventful = bool(self._failed) or output.prompt_logprobs is not None
        speculates = self._books.config.max_num_drafts > 0
        adaptive = self._books.adaptive
        if adaptive is not None:
            self._observe_cost(adaptive)
        num_emitted = end = drafts_end = 0
        for place, sequence in enumerate(step.sequences):
            count = num_tokens[place]
            start, end = end, end + count
            held = 0 if num_drafts is None else num_drafts[place]
            drafts_start, drafts_end = drafts_end, drafts_end + held
            if sequence.ghost or sequence.suspect:
                continue
            assert generations[place] == sequence.generation, f"row {sequence.row} has another owner"
            if not sequence.plain or eventful or not count:
                self._row(place, sequence, start, count)
            elif query_lens[place] == 1:
                # the steady state: one id for a decoding row
                token = token_ids[start]
                sequence.ids.append(token)
                computed_len = sequence.computed_len + 1
                sequence.computed_len = computed_len
                num_emitted += 1
                if token in sequence.stops or computed_len + 1 >= sequence.max_len:
                    self._end(sequence, [token], None)
                    continue
                if computed_len >= sequence.seal_at:
                    self._seal(sequence, computed_len)
                deltas.append(Delta(sequence.request_id, sequence.index, [token]))
            else:
                self._advance(place, sequence, count)
                self._emit(sequence, token_ids[start:end], None)
            if speculates:
                sequence.held_drafts = held
                if adaptive is not None:
                    emitted = token_ids[start:end]
                    acceptance = adaptive.by_method[sequence.held_method]
                    sequence.streak = acceptance.observe(sequence.streak, sequence.draft_ids, emitted)
                    sequence.draft_ids = [] if output.draft_ids is None else output.draft_ids[drafts_start:drafts_end]
                if output.draft_methods is not None:
                    sequence.held_method = output.draft_methods[place]
                if sequence.last_step == step.step_id:
                    sequence.drafts = held
        self._books.stats.generation_tokens += num_emitted
        if self._draft_lens:
            self._books.acceptance.observe(self._draft_lens, self._num_accepted)
        return deltas

    def _observe_cost(self, adaptive: AdaptiveLength) -> None:
        """What a step took that computed no prompt."""
        step = self._step
        num_rows, num_drafts = len(step.sequences), sum(step.verify_lens)
        if sum(step.query_lens) == num_rows + num_drafts:
            adaptive.cost.observe(num_rows, num_drafts, self._output.seconds)

    def _advance(self, place: int, sequence: Sequence, count: int) -> None:
        """Lengths of a row that emitted `count` ids."""
        verify_len = self._step.verify_lens[place]
        self._count_prompt(place, sequence)
        sequence.computed_len += self._step.query_lens[place] - verify_len + count - 1
        sequence.reach -= verify_len + 1 - count
        if verify_len and sequence.held_drafts:
            draft_len = min(verify_len, sequence.held_drafts)
            self._draft_lens.append(draft_len)
            self._num_accepted.append(count - 1)
            self._standing, self._rejected = count - 1, draft_len - (count - 1)
            method = self._methods[sequence.held_method]
            self._books.method_drafts[method] += draft_len
            self._books.method_accepted[method] += count - 1

    def _count_prompt(self, place: int, sequence: Sequence) -> None:
        """Of what this step computed, the prompt's part."""
        left = sequence.prompt_len - sequence.computed_len
        if left > 0:
            self._books.stats.computed_prompt_tokens += min(left, self._step.query_lens[place])

    def _row(self, place: int, sequence: Sequence, start: int, count: int) -> None:
        """Any row: a chunk, several tokens, log-probabilities, a failure."""
        books = self._books
        if sequence.row in self._failed:
            self._deltas.append(self._failure(sequence))
            books.finish(sequence, discard=True)
            return
        if self._output.prompt_logprobs is not None:
            self._take_prompt_entries(sequence)
        if not count:
            self._count_prompt(place, sequence)
            sequence.computed_len += self._step.query_lens[place]
            if sequence.computed_len >= sequence.seal_at:
                self._seal(sequence, sequence.computed_len)
            return
        self._advance(place, sequence, count)
        if not sequence.siblings.prompt_done:
            books.stats.prompt_tokens += sequence.prompt_len
            books.unpark(sequence.siblings)
        end = start + count
        logprobs = None
        if sequence.num_logprobs is not None and self._output.logprobs is not None:
            logprobs = [_logprob(entry) for entry in self._output.logprobs[start:end] if entry is not None]
        self._emit(sequence, self._output.token_ids[start:end], logprobs)

    def _failure(self, sequence: Sequence) -> Delta:
        """The last delta of a row that failed. Without a token to choose the request is to blame, if it forbids any."""
        row, params = sequence.row, sequence.params
        if row in self._output.forbidden and (params.allowed_ids is not None or params.bad_words or params.min_tokens):
            delta = ending(sequence, "error", NOTHING_LEFT)
            delta.error_status = 400
            return delta
        return ending(sequence, "error", self._failed[row])

    def _emit(self, sequence: Sequence, token_ids: list[int], logprobs: list[Logprob] | None) -> None:
        """Append ids up to the first that ends the sequence, and tell them."""
        ends = not sequence.stops.isdisjoint(token_ids) or len(sequence.ids) + len(token_ids) >= sequence.max_len
        if ends:
            token_ids = self._kept(sequence, token_ids)
            if logprobs is not None:
                del logprobs[len(token_ids) :]
        sequence.ids += token_ids
        self._books.stats.generation_tokens += len(token_ids)
        if ends:
            self._end(sequence, token_ids, logprobs)
            return
        if sequence.computed_len >= sequence.seal_at:
            self._seal(sequence, sequence.computed_len)
        self._tell(sequence, token_ids, logprobs)

    def _kept(self, sequence: Sequence, token_ids: list[int]) -> list[int]:
        """Up to the first that ends the sequence, which is kept."""
        token_ids = token_ids[: sequence.max_len - len(sequence.ids)]
        for n, token in enumerate(token_ids):
            if token in sequence.stops:
                return token_ids[: n + 1]
        return token_ids

    def _end(self, sequence: Sequence, token_ids: list[int], logprobs: list[Logprob] | None) -> None:
        """A stop rule holds. In order: end ids, stop ids, length."""
        computed_len = min(sequence.computed_len, len(sequence.ids))
        if computed_len >= sequence.seal_at:
            self._seal(sequence, computed_len)
        reason: FinishReason = "length"
        stop_reason = None
        if token_ids and token_ids[-1] in sequence.stops:
            reason = "stop"
            stop_reason = None if token_ids[-1] in sequence.eos_ids else token_ids[-1]
        delta = self._tell(sequence, token_ids, logprobs)
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        self._books.finish(sequence)

    def _seal(self, sequence: Sequence, computed_len: int) -> None:
        """A block is full: give it its key, and let go of what is left of a window."""
        manager = self._books.manager
        sequence.seal_at = manager.seal(sequence.id, sequence.ids, computed_len)
        if manager.slides:
            manager.slide(sequence.id, computed_len, sequence.last_step)

    def _tell(self, sequence: Sequence, token_ids: list[int], logprobs: list[Logprob] | None) -> Delta:
        delta = Delta(sequence.request_id, sequence.index, token_ids, logprobs=logprobs)
        if self._standing or self._rejected:
            # what a stop rule cuts off was neither given nor refused
            delta.accepted_drafts = min(self._standing, len(token_ids))
            delta.rejected_drafts = self._rejected
            self._standing = self._rejected = 0
        if not sequence.started:
            self._start(sequence, delta)
        self._deltas.append(delta)
        return delta

    def _start(self, sequence: Sequence, delta: Delta) -> None:
        """What the first delta carries."""
        if self._now is None:
            self._now = self._books.clock()
        sequence.started = True
        sequence.plain = sequence.num_logprobs is None
        first_step_s = sequence.first_step_s
        assert first_step_s is not None
        delta.cached_len = sequence.cached_len
        delta.restored_len = sequence.restored_len
        delta.restore_s = sequence.load_s
        delta.queued_s = first_step_s - sequence.siblings.arrival_s
        delta.prefill_s = self._now - first_step_s
        delta.prompt_logprobs = sequence.siblings.prompt_entries
        config = self._books.config
        if not config.draft_rule_exact and sequence.max_drafts:
            delta.draft_rule = config.draft_rule

    def _take_prompt_entries(self, sequence: Sequence) -> None:
        """Append what this step found out about the prompt; what was known from before a preemption is skipped."""
        assert self._output.prompt_logprobs is not None
        found = self._output.prompt_logprobs.get(sequence.row)
        entries = sequence.siblings.prompt_entries
        if not found or entries is None:
            return
        first = sequence.computed_len + 1  # position of found[0]
        assert first <= len(entries), "log-probabilities of prompt tokens are missing"
        entries += [_logprob(entry) for entry in found[len(entries) - first :]]


def _logprob(entry: TokenLogprobs) -> Logprob:
    return Logprob(entry.token_ids, entry.logprobs, entry.rank)
