"""A table of text that can be shown on a terminal, on a page, in a README and in a paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd
from rich import box
from rich.table import Table

from analysis.numbers.stats import Estimate

MISSING = "-"
LONG_CELL = 60  # characters


@dataclass(frozen=True)
class Sheet:
    """``lines`` of text under ``headers``, with a title and a note. ``numbers``: the same unrounded, for the CSV."""

    name: str  # of its files
    title: str
    note: str
    headers: Sequence[str]
    lines: Sequence[Sequence[str]]
    numbers: pd.DataFrame | None = field(default=None, repr=False, compare=False)

    def to_markdown(self, level: int = 3) -> str:
        """Title, note and a pipe table; level: of the heading, 0 for none."""
        cells = [self.headers, ["---"] * len(self.headers), *self.lines]
        head = [f"{'#' * level} {self.title}", "", self.note, ""] if level else []
        return "\n".join([*head, *(f"| {' | '.join(map(_escape_pipe, line))} |" for line in cells), ""])

    def to_rich(self) -> Table:
        """For a terminal."""
        table = Table(
            *self.headers, title=self.title, caption=self.note.replace("`", ""), box=box.SIMPLE, title_justify="left"
        )
        for line in self.lines:
            table.add_row(*line)
        return table

    def to_csv(self) -> str:
        """Numbers where there are any, else the lines as they are shown."""
        frame = self._frame() if self.numbers is None else self.numbers
        return frame.round(5).to_csv(index=False, lineterminator="\n")

    def to_latex(self) -> str:
        """A booktabs table with caption and label."""
        columns = "l" + "r" * (len(self.headers) - 1)
        return self._frame().to_latex(
            index=False, escape=True, column_format=columns, caption=_escape_latex(self.title), label=f"tab:{self.name}"
        )

    def to_html(self) -> str:
        """The bare ``<table>``; text is escaped."""
        is_prose = any(len(cell) > LONG_CELL for line in self.lines for cell in line)
        classes = "sheet prose" if is_prose else "sheet"  # numbers must not break, sentences must
        return self._frame().to_html(index=False, border=0, classes=classes, justify="unset")

    def _frame(self) -> pd.DataFrame:
        return pd.DataFrame([list(line) for line in self.lines], columns=list(self.headers), dtype=str)


def _escape_pipe(text: str) -> str:
    return text.replace("|", r"\|")


def _escape_latex(text: str) -> str:
    for mark in "&%$#_{}":
        text = text.replace(mark, rf"\{mark}")
    return text


def format_number(value: float | None, form: str) -> str:
    """``value`` in the given format; ``-`` where it is unknown.

    >>> format_number(0.125, ".1%"), format_number(None, ".1f")
    ('12.5%', '-')
    """
    return MISSING if value is None or pd.isna(value) else format(value, form)


def format_range(values: pd.Series) -> str:
    """One number if all are equal, else the least and the largest.

    >>> format_range(pd.Series([8, 8])), format_range(pd.Series([2, 8]))
    ('8', '2 to 8')
    """
    return f"{values.min()}" if values.nunique() == 1 else f"{values.min()} to {values.max()}"


def format_estimate(estimate: Estimate, form: str = "+.1%", show_n: bool = False) -> str:
    """Middle and interval; says ``n = 1`` in place of an interval that does not exist.

    >>> format_estimate(Estimate(3, 0.1, 0.05, 0.15)), format_estimate(Estimate(1, 0.1, math.nan, math.nan))
    ('+10.0% (+5.0% to +15.0%)', '+10.0% (n = 1)')
    """
    if math.isnan(estimate.middle):
        return MISSING
    if not estimate.is_known:
        return f"{estimate.middle:{form}} (n = {estimate.n})"
    n = f", n = {estimate.n}" if show_n else ""
    return f"{estimate.middle:{form}} ({estimate.low:{form}} to {estimate.high:{form}}{n})"
