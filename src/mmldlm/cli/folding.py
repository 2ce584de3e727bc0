"""Tables on a terminal that lose nothing where it is narrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def folding_table(*head: str, title: str) -> Table:
    """A table whose cells go on in the next line instead of being cut off; brackets in its title are no markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title))
    for column in head:
        table.add_column(column, overflow="fold")
    return table
