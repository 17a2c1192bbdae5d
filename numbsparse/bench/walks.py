"""The index arrays of a layout as text: who walks which of them, in which product."""

from __future__ import annotations

import numpy as np

from numbsparse.layout import Layout, Walk

EXAMPLE = [[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 1]]


def picture(layout: Layout) -> str:
    """The pattern with the blocks' numbers, and the arrays that each product follows."""
    index = layout.index
    parts = [
        _grid(layout),
        "forward walks down the block columns:",
        _walk("columns", index.columns, "y[:, {line}] = ", "x[:, {other}] @ w[{block}]"),
        "input_grad walks along the block rows:",
        _walk("rows", index.rows, "dx[:, {line}] = ", "dy[:, {other}] @ w[{block}].T"),
        "weight_grad takes the blocks as they are stored:",
        _blocks(index.block_rows, index.block_columns),
    ]
    return "\n\n".join(parts)


def _grid(layout: Layout) -> str:
    rows, columns = layout.shape
    cells = np.full(layout.shape, "·", object)
    cells[layout.index.block_rows, layout.index.block_columns] = np.arange(layout.n_blocks)
    heads = "".join(f"{column:4}" for column in range(columns))
    lines = [f"{row:12} │" + "".join(f"{cell!s:>4}" for cell in cells[row]) for row in range(rows)]
    return "\n".join(
        [
            "the number of each kept block: its place in `values`",
            "",
            f"block column  {heads}",
            f"   block row ┌{'─' * (4 * columns)}",
            *lines,
        ]
    )


def _walk(name: str, walk: Walk, output: str, term: str) -> str:
    ends = walk.indptr[1:-1]
    arrays = [
        f"    {name}.indptr   {_array(walk.indptr)}",
        f"    {name}.indices  {_array(walk.indices, ends)}",
        f"    {name}.blocks   {_array(walk.blocks, ends)}",
        "",
    ]
    for line, (begin, end) in enumerate(zip(walk.indptr[:-1], walk.indptr[1:], strict=True)):
        terms = [
            term.format(other=other, block=block)
            for other, block in zip(walk.indices[begin:end], walk.blocks[begin:end], strict=True)
        ]
        arrays.append(f"    {output.format(line=line)}{' + '.join(terms) or '0'}")
    return "\n".join(arrays)


def _blocks(rows: np.ndarray, columns: np.ndarray) -> str:
    lines = [f"    block_rows     {_array(rows)}", f"    block_columns  {_array(columns)}", ""]
    lines += [
        f"    dw[{block}] = x[:, {row}].T @ dy[:, {column}]"
        for block, (row, column) in enumerate(zip(rows, columns, strict=True))
    ]
    return "\n".join(lines)


def _array(values: np.ndarray, cuts: np.ndarray | None = None) -> str:
    """Numbers in brackets; a bar where the next line begins."""
    bars = set() if cuts is None else {int(cut) for cut in cuts}
    text = "".join(("|" if i in bars else " ") + str(value) for i, value in enumerate(values))
    return f"[{text} ]"
