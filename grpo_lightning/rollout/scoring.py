"""Rewards while generation goes on: what only waits for other processes or for the network is asked at once."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from grpo_lightning.distributed import world_size
from grpo_lightning.reward import RewardBatch, RewardSet
from grpo_lightning.reward.score import Verdict
from grpo_lightning.rollout.engine import Completion, Engine, Request, SamplingParams

Groups = list[tuple[int, list[Completion]]]  # the number of the request, and its completions


class EagerScorer:
    """Generates, and scores the groups that are finished in a thread meanwhile.

    The thread takes all groups that have finished by the time it is free as one batch, and asks the components with
    `by_row` alone (see `reward.score.Component`); `RewardSet` is given what they said and asks the others at the end.
    A thread that computes in Python would only take turns with the one that generates, and components that look at a
    whole batch, or run in the calling thread, would not say the same of a part.

    Args:
        batch_of: what the rewards see of finished groups, row by row in their order.
    """

    def __init__(self, engine: Engine, rewards: RewardSet, batch_of: Callable[[Groups], RewardBatch]) -> None:
        self.engine, self.rewards, self.batch_of = engine, rewards, batch_of
        # A shared engine's groups are spread over the processes once all are there.
        self.active = bool(rewards.by_row) and (world_size() == 1 or not engine.shared)
        self._finished: deque[tuple[int, list[Completion]]] = deque()
        self._verdicts: dict[int, dict[str, list[Verdict]]] = {}
        self._error: BaseException | None = None
        self._pool: ThreadPoolExecutor | None = None

    def generate(self, requests: list[Request], params: SamplingParams) -> list[list[Completion]]:
        """What `engine.generate` gives. An error of the rewards ends the generation, and is raised."""
        if not self.active:
            return self.engine.generate(requests, params)
        self._pool = ThreadPoolExecutor(1, "score")
        try:
            return self.engine.generate(requests, params, done=self._done)
        except BaseException:
            self._pool.shutdown(cancel_futures=True)
            raise

    def verdicts(self, count: int) -> dict[str, list[Verdict]]:
        """By component, what it said of every row of the `count` requests, in their order; waits for the thread."""
        if self._pool is None:
            return {}
        self._pool.shutdown()
        if self._error is not None:
            raise self._error
        return {
            name: [verdict for index in range(count) for verdict in self._verdicts[index][name]]
            for name in self.rewards.by_row
        }

    def _done(self, index: int, completions: list[Completion]) -> None:
        if self._error is not None:
            raise self._error
        self._finished.append((index, completions))
        assert self._pool is not None
        self._pool.submit(self._score)

    def _score(self) -> None:
        """Score what has finished; a call for groups that an earlier one has taken along finds nothing to do."""
        groups: Groups = []
        while self._finished:
            groups.append(self._finished.popleft())
        if not groups or self._error is not None:
            return
        try:
            scored = self.rewards.score_by_row(self.batch_of(groups))
        except BaseException as error:
            self._error = error
            return
        at = 0
        for index, completions in groups:
            span = slice(at, at + len(completions))
            self._verdicts[index] = {name: verdicts[span] for name, verdicts in scored.items()}
            at = span.stop
