"""Small edits of a Python source that a slip of the hand could make, found in its syntax tree.

Only lines that compute are edited: bodies of functions, without what refuses arguments (`raise`,
`assert`, an `if` or a loop that ends in one, functions named for it), without words and
annotations, and without functions that choose sizes of scratch memory or of blocks, which by design
change no result.
"""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from itertools import accumulate, pairwise

OPERATORS = {
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "%", "%": "//", "**": "*", "&": "|", "|": "&",
    "^": "|", "<<": ">>", ">>": "<<", "and": "or", "or": "and",
}  # fmt: skip
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
FUNCTIONS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
KINDS = ("operator", "comparison", "constant")

REFUSING = ("expect", "declines", "_declines", "check", "__")
"""How names of functions begin that compute nothing, but for __init__."""
SIZING = ("bytes", "layout", "shapes", "copies", "_buffers")
"""How names of functions end that say how much memory a call takes."""
NO_RESULTS = {
    "block_rows", "_block", "batch_size", "group_units", "_units", "rows_of_a_program", "tiling",
    "rule", "configuration", "_norm_rows", "_extents", "with_room", "bounds", "_bounds",
}  # fmt: skip
"""Functions that choose how much is computed or kept at once, or what slots to refuse."""


@dataclass(frozen=True)
class Edit:
    """One token in another's place: text[begin:end] becomes `new`; `kind` is one of KINDS."""

    kind: str
    begin: int
    end: int
    new: str

    def apply(self, text: str) -> str:
        """The edited text."""
        return text[: self.begin] + self.new + text[self.end :]


def edits(text: str) -> list[Edit]:
    """All edits of a module's computing lines, in the order of the text.

    >>> [edit.apply("def f(x):\\n    return x + 1\\n").splitlines()[1] for edit in
    ...  edits("def f(x):\\n    return x + 1\\n")]
    ['    return x - 1', '    return x + 2', '    return x + 0']
    """
    finder = _Finder(text)
    finder.visit(ast.parse(text))
    return sorted(finder.found, key=lambda edit: edit.begin)


class _Finder(ast.NodeVisitor):
    """Collects edits; `inside` is whether a function's body is being read."""

    def __init__(self, text: str) -> None:
        self.found: list[Edit] = []
        self.inside = False
        self._lines = text.splitlines(keepends=True)
        self._starts = [0, *accumulate(map(len, self._lines))]
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self._tokens = [
            (self._starts[token.start[0] - 1] + token.start[1], token.string)
            for token in tokens
            if token.type in (tokenize.OP, tokenize.NAME)
        ]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        name = node.name
        computes = not (name in NO_RESULTS or name.startswith(REFUSING) or name.endswith(SIZING))
        if not computes and name != "__init__":
            return
        before, self.inside = self.inside, True
        for statement in node.body:
            self.visit(statement)
        self.inside = before

    def visit_Raise(self, node: ast.Raise) -> None:
        """Words."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """A check."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if not _refuses(node):
            self.generic_visit(node)
            return
        for statement in node.orelse:
            self.visit(statement)

    def visit_For(self, node: ast.For) -> None:
        if not _refuses(node):
            self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._between("operator", OPERATORS, node.left, node.right)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._between("operator", OPERATORS, node.target, node.value, suffix="=")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in pairwise(node.values):
            self._between("operator", OPERATORS, left, right)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in pairwise([node.left, *node.comparators]):
            self._between("comparison", COMPARISONS, left, right)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        name = getattr(function, "id", getattr(function, "attr", ""))
        if name in FUNCTIONS:
            end = self._end(function)
            self._add("operator", end - len(name), end, FUNCTIONS[name])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        operand = node.operand
        if isinstance(node.op, ast.USub) and isinstance(operand, ast.Constant):
            # Towards zero alone: where -1 says "none", any number below zero says so.
            self._add("constant", self._begin(node), self._end(node), repr(1 - operand.value))  # type: ignore[operator]
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            for step in (1, -1):
                begin, end = self._begin(node), self._end(node)
                self._add("constant", begin, end, repr(value + step))

    def _between(
        self, kind: str, table: dict[str, str], left: ast.expr, right: ast.expr, suffix: str = ""
    ) -> None:
        low, high = self._end(left), self._begin(right)
        for begin, string in self._tokens:
            if low <= begin < high and string.removesuffix(suffix) in table:
                new = table[string.removesuffix(suffix)] + suffix
                self._add(kind, begin, begin + len(string), new)
                return

    def _add(self, kind: str, begin: int, end: int, new: str) -> None:
        if self.inside:
            self.found.append(Edit(kind, begin, end, new))

    def _begin(self, node: ast.expr) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """Characters before a place that the syntax tree counts in bytes of UTF-8."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())


def _refuses(node: ast.stmt) -> bool:
    """Whether a statement does nothing but raise under some condition."""
    if isinstance(node, ast.If | ast.For):
        return _refuses(node.body[-1])
    return isinstance(node, ast.Raise)
