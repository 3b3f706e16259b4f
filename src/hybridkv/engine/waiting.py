"""The queue of waiting samples, in which clients take turns. It knows nothing of pages or steps."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice, zip_longest

from hybridkv.engine.request import Sample


class _Line:
    """The waiting samples of one client that have not run yet."""

    def __init__(self) -> None:
        self.siblings: OrderedDict[Sample, None] = OrderedDict()
        """Samples whose prompt has been computed. They start before other prompts, while it is still in the cache."""
        self.prompts: OrderedDict[Sample, None] = OrderedDict()

    def __iter__(self) -> Iterator[Sample]:
        return chain(self.siblings, self.prompts)

    def __bool__(self) -> bool:
        return bool(self.siblings or self.prompts)

    def lane_of(self, sample: Sample) -> OrderedDict[Sample, None]:
        return self.siblings if sample.index else self.prompts


class Waiting:
    """Samples without a lease, in the order in which they start.

    Samples that have run before are first, in the order in which they first started. Then each client starts one sample
    in turn; the samples of one client start in order of arrival. A client whose first sample arrives is served after
    the clients that wait already, but before the client that was served last.

    Adding and removing a sample takes the same time however long the queue is.
    """

    def __init__(self) -> None:
        self._returned: list[Sample] = []
        """Samples that have run before. At most as many as run at once."""
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        """By client, in the order of their next turns. No line is empty."""
        self._served_last = ""
        """The client of the last sample that started for the first time."""
        self._weights: dict[Sample, int] = {}
        """All samples here, each with the number of samples that it stands for: it and those to be forked from it."""
        self.num_samples = 0
        """The sum of the weights."""

    def __len__(self) -> int:
        return len(self._weights)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.first(len(self)))

    def first(self, count: int) -> list[Sample]:
        """The next `count` samples in the order in which they start, or all if there are fewer."""
        turns = zip_longest(*islice(self._lines.values(), count))
        in_turn = (sample for turn in turns for sample in turn if sample is not None)
        return list(islice(chain(self._returned, in_turn), count))

    def num_ahead(self, client: str) -> int:
        """Number of places that a fork of this client leaves free: for preempted samples, and for each other client."""
        return len(self._returned) + len(self._lines) - (client in self._lines)

    def add(self, sample: Sample) -> None:
        self._weights[sample] = weight = 1 + sample.request.num_to_fork
        self.num_samples += weight
        if sample.has_run:
            insort(self._returned, sample, key=lambda one: one.rank)
            return
        client = sample.request.client
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = _Line()
            if self._served_last in self._lines:
                self._lines.move_to_end(self._served_last)
        line.lane_of(sample)[sample] = None

    def discard(self, sample: Sample) -> None:
        """Remove a sample if it waits here."""
        weight = self._weights.pop(sample, 0)
        if not weight:
            return
        self.num_samples -= weight
        if sample.has_run:
            self._returned.remove(sample)
            return
        client = sample.request.client
        line = self._lines[client]
        del line.lane_of(sample)[sample]
        if not line:
            del self._lines[client]

    def take(self, sample: Sample) -> None:
        """Remove a sample that starts. If it starts for the first time, this was its client's turn."""
        self.discard(sample)
        if sample.has_run:
            return
        self._served_last = sample.request.client
        if self._served_last in self._lines:
            self._lines.move_to_end(self._served_last)
