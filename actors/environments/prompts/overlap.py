"""How many prompts of the evaluation are prompts of the training data, too: a policy is not measured on what it learns.

    prompts of the evaluation ─▶ digests ─┐
    rows of the training data, in turn ───┴─▶ equal ones, counted

Prompts are compared as the data hold them, without template and tokenizer; where an environment makes tasks of rows,
whole rows are, since their prompts may all be equal. The rows that are looked at are bounded, and
one ``look`` lasts about as long as it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import monotonic

from actors.environments.prompts.rows import Row, Source, digest_of


class Overlap:
    """It compares once. ``rows_max``: rows of the training data, and of the evaluation, that are looked at.

    ``whole_rows``: a row is its prompt, its answer and all columns beside them; else its prompt alone.
    """

    def __init__(
        self,
        training: Mapping[str, Source],
        evaluation: Mapping[str, Source],
        rows_max: int,
        *,
        whole_rows: bool = False,
    ) -> None:
        self._whole_rows = whole_rows
        self._held_out: dict[int, bool] = {}
        """Digest of a prompt of the evaluation → whether it was found in the training data."""
        self._look = self._compare(training, evaluation, rows_max)

    @property
    def equal(self) -> int:
        """Prompts of the evaluation that are in the training data, as far as they have been compared."""
        return sum(self._held_out.values())

    def look(self, until_s: float) -> bool:
        """Go on until that time, by one row at least; False: there is more to compare."""
        return all(monotonic() < until_s for _ in self._look)

    def _compare(
        self, training: Mapping[str, Source], evaluation: Mapping[str, Source], rows_max: int
    ) -> Iterator[None]:
        for row in _rows(evaluation, rows_max):
            self._held_out[self._digest(row)] = False
            yield
        for row in _rows(training, rows_max):
            if (digest := self._digest(row)) in self._held_out:
                self._held_out[digest] = True
            yield

    def _digest(self, row: Row) -> int:
        if self._whole_rows:
            return digest_of(repr((row.prompt, row.answer, sorted(row.extra.items()))))
        return digest_of(row.prompt if isinstance(row.prompt, str) else repr(row.prompt))


def _rows(sources: Mapping[str, Source], rows_max: int) -> Iterator[Row]:
    for source in sources.values():
        for index in range(min(len(source), rows_max)):
            yield source.row(index)
