"""The hashes of a fit's rows, by which they are known again."""

from __future__ import annotations

from ...data.sketch import RowSketch
from .block import Block
from .parts import Part, Plan


class RowHashes(RowSketch, Part):
    """The smallest hashes of the training rows, as a part of a fit's statistics.

    Where outputs have no input row of their own (atoms of structures), no row can be judged.
    """

    @classmethod
    def begin(cls, block: Block, plan: Plan) -> RowHashes:
        """Of no rows yet."""
        return cls()

    def update(self, block: Block) -> None:
        """Take the hashes of the block's samples in."""
        if block.hashes is None:
            self.void()
            return
        self.expect(block.expected, block.hashes)
        self.add(block.hashes)

    @property
    def judges(self) -> bool:
        """Whether rows can be known again."""
        return self.limit > 0

    def require_held(self, removed: RowSketch) -> None:
        """Refuse to take out rows that are not in the fit, as far as hashes tell."""
        if not self.judges:
            raise ValueError(
                "The rows of this fit cannot be recognised: its outputs have no input row of "
                "their own (atoms of structures), or its batches were objects. Pass check=False to "
                "take rows out unasked, exactly as they were added; the sample of rows is then "
                "dropped."
            )
        lacking, judged = self.lacking(removed)
        if lacking:
            limited = ""
            if self.limit < RowSketch().limit:
                limited = f" that could be judged ({self.share:.1%} of all)"
            raise ValueError(
                f"{lacking} of {judged} rows{limited} were never in the fit (or were taken out "
                "already, or had another target). Give rows as they were added, in the same "
                "dtypes, or pass check=False where they cannot be recognised."
            )
