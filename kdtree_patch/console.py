"""How commands show tables: rich, as wide as the terminal. Imported where rich is known to be there."""

from __future__ import annotations

from rich.console import Console

# In a file or a pipe rich would assume 80 columns, and fold.
PIPED_WIDTH = 160


def open_console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PIPED_WIDTH)
