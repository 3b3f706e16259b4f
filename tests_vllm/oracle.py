"""What vLLM answers without a connector, from the same chunks.

In bfloat16 a prompt's logits depend on where its chunks ended. The oracle knows from the schedules how each prefix was
computed, also before it was stored, and lets an engine without a connector or a prefix cache compute it the same way.
"""

from __future__ import annotations

from dataclasses import replace

from engines import Engine, Reply, Run

Chain = tuple[int, ...]
"""Ends of chunks, from the first token on."""


class Oracle:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._chains: dict[tuple[str | None, tuple[int, ...]], Chain] = {}
        """How a prefix was first computed, by salt and tokens."""
        self.worst = {True: 0.0, False: 0.0}
        """The largest difference of logprobs so far, of exact and of other comparisons."""

    def check(self, run: Run | Reply, *, exact: bool = True, outliers: int = 0) -> None:
        """Every reply is what vLLM alone says. `exact`: from the same chunks, which batches and preemptions change.

        `outliers`: number of replies that may differ by twice as much. In bfloat16 other chunks alone have moved a
        logprob of vLLM by .264, in one of some hundred replies.
        """
        replies = [run] if isinstance(run, Reply) else run.replies.values()
        for reply in replies:
            chain = self._learn(reply)
            if not reply.tokens:
                continue
            try:
                self._compare(reply, chain, exact)
            except AssertionError:
                if not outliers:
                    raise
                outliers -= 1
                self._compare(reply, chain, exact, factor=2)

    def _learn(self, reply: Reply) -> Chain | None:
        """How all of this reply's tokens were computed, or None if that is unknown or was interrupted."""
        if not reply.spans:
            return None
        chain = self._chain(reply, reply.spans[0][0])
        for before, (start, end) in zip([(0, reply.spans[0][0]), *reply.spans], reply.spans, strict=False):
            if start != before[1] or end > len(reply.said):  # preempted; or a step that nothing is sampled from
                return None
            if chain is not None:
                chain = (*chain, end)
                self._chains.setdefault((reply.request.salt, tuple(reply.said[:end])), chain)
        return chain

    def _chain(self, reply: Reply, count: int) -> Chain | None:
        return self._chains.get((reply.request.salt, tuple(reply.said[:count]))) if count else ()

    def _compare(self, reply: Reply, chain: Chain | None, exact: bool, factor: int = 1) -> None:
        family = self._engine.family
        exact = exact and chain is not None
        request = replace(reply.request, at=0, salt=None)
        chunks = [end for end in chain if end < len(request.prompt)] if chain else None
        own = self._engine.run([request], chunks=chunks)["0"]
        tolerance = factor * (family.exact if exact else family.loose)
        for number, (token, right) in enumerate(zip(reply.tokens, own.tokens, strict=False)):
            ours, theirs = reply.logprobs[number], own.logprobs[number]
            where = f"token {number} of a prompt of {len(request.prompt)}, {reply.cached} cached, {reply.spans[:3]}"
            # Only the best few are told, and which they are may differ at their end.
            for name in {str(token), str(right)} & theirs.keys() & ours.keys():
                difference = abs(ours[name] - theirs[name])
                assert difference <= tolerance, f"{where}: {ours} is not {theirs}"
                self.worst[exact] = max(self.worst[exact], difference)
            if token != right:
                assert theirs[str(right)] - theirs.get(str(token), -1e9) <= 2 * tolerance, f"{where}: {ours}, {theirs}"
                return  # a tie: what follows is another text
