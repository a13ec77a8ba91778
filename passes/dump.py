"""Graphs written to files, before the first pass and after each pass that changed something.

    DIR/<piece>/<graph>-00-before.txt
    DIR/<piece>/<graph>-01-fuse_linear.txt

A pass that changed nothing leaves no file, so what differs between two neighbouring files is the
work of the pass that the second one is named after.
"""

from __future__ import annotations

from pathlib import Path

from torch.fx import GraphModule

from compiled_engine.errors import ConfigError
from compiled_engine.passes.pattern import Graph


class GraphDump:
    """Where the graphs of one piece go.

    Args:
        folder: made if it is not there; files of an earlier dump with the same names are replaced.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._num_graphs = 0
        self._num_passes = 0
        self._text = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--dump-graphs {folder}: cannot be made: {error.strerror}", param="dump_graphs"
            ) from error

    def start(self, graph: Graph) -> None:
        """A graph before any pass has seen it."""
        self._num_graphs += 1
        self._num_passes = 0
        self._text = _readable(graph)
        self._write("before")

    def after(self, graph: Graph, name: str) -> None:
        """The graph as the pass of that name left it."""
        self._num_passes += 1
        text = _readable(graph)
        if text != self._text:
            self._text = text
            self._write(name)

    def _write(self, name: str) -> None:
        path = self.folder / f"{self._num_graphs}-{self._num_passes:02d}-{name}.txt"
        path.write_text(self._text)


def _readable(graph: Graph) -> str:
    """Code with the shape, dtype and stride of every value."""
    owner = graph.owning_module
    module = owner if isinstance(owner, GraphModule) and owner.graph is graph else None
    if module is None:
        module = GraphModule(owner if owner is not None else {}, graph)
    text = module.print_readable(print_output=False, include_stride=True)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"
