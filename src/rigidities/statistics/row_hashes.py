"""The hashes of a fit's rows, by which rows of other data are recognised."""

from __future__ import annotations

from ..data.sketch import NO_LIMIT, RowSketch
from .block import Block


class RowHashes(RowSketch):
    """The smallest hashes of the training rows.

    Where outputs have no input row of their own (atoms of structures), no row can be recognised.
    """

    def update(self, block: Block) -> None:
        """Take the hashes of the block's samples in."""
        if block.hashes is None:
            self.void()
            return
        self.expect(block.expected, block.hashes)
        self.add(block.hashes)

    @property
    def judges(self) -> bool:
        """Whether rows can be recognised."""
        return self.limit > 0

    def require_held(self, removed: RowSketch) -> None:
        """Refuse to remove rows that are not in the fit, as far as hashes tell.

        Raises:
            ValueError: Some rows are not in the fit, or rows cannot be recognised at all.
        """
        if not self.judges:
            raise ValueError(
                "The rows of this fit cannot be recognised: its outputs have no input row of "
                "their own (atoms of structures), or its batches were objects. Pass check=False "
                "to remove rows without this check, exactly as they were added. The sample of "
                "rows is then dropped."
            )
        lacking, judged = self.lacking(removed)
        if not lacking:
            return
        limited = ""
        if self.limit < NO_LIMIT:
            limited = f" that could be checked ({self.share:.1%} of all)"
        raise ValueError(
            f"{lacking} of {judged} rows{limited} were never in the fit (or were already removed, "
            "or had another target). Pass rows as they were added, in the same dtypes, or pass "
            "check=False if they cannot be recognised."
        )
