"""Random mutations of source files: one small change each, at every place where its operator applies.

Operators are those of the mutation testing literature (relational, arithmetic and logical operator
replacement, constant change, condition negation, statement deletion), and one for ordering keys: an element
of a tuple left out. Text, annotations and what is raised are left alone.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider, WhitespaceInclusivePositionProvider

_COMPARISONS: Mapping[type[cst.BaseCompOp], tuple[type[cst.BaseCompOp], ...]] = {
    cst.LessThan: (cst.LessThanEqual, cst.GreaterThan),
    cst.LessThanEqual: (cst.LessThan, cst.GreaterThan),
    cst.GreaterThan: (cst.GreaterThanEqual, cst.LessThan),
    cst.GreaterThanEqual: (cst.GreaterThan, cst.LessThan),
    cst.Equal: (cst.NotEqual,),
    cst.NotEqual: (cst.Equal,),
    cst.Is: (cst.IsNot,),
    cst.IsNot: (cst.Is,),
    cst.In: (cst.NotIn,),
    cst.NotIn: (cst.In,),
}
_BINARY: Mapping[type[cst.BaseBinaryOp], type[cst.BaseBinaryOp]] = {
    cst.Add: cst.Subtract,
    cst.Subtract: cst.Add,
    cst.Multiply: cst.Divide,
    cst.Divide: cst.Multiply,
    cst.FloorDivide: cst.Multiply,
    cst.Modulo: cst.FloorDivide,
    cst.BitAnd: cst.BitOr,
    cst.BitOr: cst.BitAnd,
    cst.BitXor: cst.BitOr,
    cst.LeftShift: cst.RightShift,
    cst.RightShift: cst.LeftShift,
}
_AUGMENTED: Mapping[type[cst.BaseAugOp], type[cst.BaseAugOp]] = {
    cst.AddAssign: cst.SubtractAssign,
    cst.SubtractAssign: cst.AddAssign,
    cst.MultiplyAssign: cst.DivideAssign,
    cst.BitOrAssign: cst.BitAndAssign,
    cst.BitAndAssign: cst.BitOrAssign,
    cst.BitXorAssign: cst.BitOrAssign,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "True": "False", "False": "True"}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one file. ``patch`` is a unified diff without context.

    ``key`` names the change by its file and its lines, so that it survives edits elsewhere in the file;
    ``occurrence`` counts equal lines before it.
    """

    path: str
    line: int
    operator: str
    patch: str
    source: str
    occurrence: int = 0

    @property
    def key(self) -> str:
        changed = [line for line in self.patch.splitlines() if line[:3] not in ("+++", "---", "@@ ")]
        text = "\n".join([self.path, str(self.occurrence), *changed])
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


class _Places(cst.CSTVisitor):
    """Collects (operator, node, replacement) in the order of the source."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, cst.CSTNode, cst.CSTNode]] = []

    def _offer(self, operator: str, node: cst.CSTNode, *replacements: cst.CSTNode) -> None:
        self.found += [(operator, node, replacement) for replacement in replacements]

    # -- what is left alone

    def visit_Annotation(self, node: cst.Annotation) -> bool:
        return False

    def visit_Raise(self, node: cst.Raise) -> bool:
        return False

    def visit_FormattedString(self, node: cst.FormattedString) -> bool:
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Decorator(self, node: cst.Decorator) -> bool:
        return False

    def visit_If(self, node: cst.If) -> bool:
        if isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING":
            return False
        self._negate(node.test)
        return True

    # -- operators

    def _negate(self, test: cst.BaseExpression) -> None:
        negated = cst.UnaryOperation(
            cst.Not(), test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        )
        self._offer("condition negated", test, negated)

    def visit_While(self, node: cst.While) -> None:
        if not isinstance(node.test, cst.Name):
            self._negate(node.test)

    def visit_CompIf(self, node: cst.CompIf) -> None:
        self._negate(node.test)

    def visit_IfExp(self, node: cst.IfExp) -> None:
        self._offer("branches swapped", node, node.with_changes(body=node.orelse, orelse=node.body))

    def visit_ComparisonTarget(self, node: cst.ComparisonTarget) -> None:
        for other in _COMPARISONS.get(type(node.operator), ()):
            self._offer("comparison", node.operator, _spaced(other, node.operator))

    def visit_BinaryOperation(self, node: cst.BinaryOperation) -> None:
        other = _BINARY.get(type(node.operator))
        if other is not None and not any(map(_is_text, (node.left, node.right))):
            self._offer("arithmetic", node.operator, _spaced(other, node.operator))

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        other = _AUGMENTED.get(type(node.operator))
        if other is not None:
            self._offer("arithmetic", node.operator, _spaced(other, node.operator))

    def visit_BooleanOperation(self, node: cst.BooleanOperation) -> None:
        other = cst.Or if isinstance(node.operator, cst.And) else cst.And
        self._offer("and, or", node.operator, _spaced(other, node.operator))

    def visit_UnaryOperation(self, node: cst.UnaryOperation) -> None:
        if isinstance(node.operator, cst.Not):
            inside = node.expression.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            self._offer("not left out", node, inside)

    def visit_Integer(self, node: cst.Integer) -> None:
        value = node.evaluated_value
        self._offer("number", node, node.with_changes(value=str(value + 1)))
        if value:
            self._offer("number", node, node.with_changes(value=str(value - 1)))

    def visit_Name(self, node: cst.Name) -> None:
        if node.value in _NAMES:
            self._offer("name", node, node.with_changes(value=_NAMES[node.value]))

    def visit_Tuple(self, node: cst.Tuple) -> None:
        if len(node.elements) > 1 and node.lpar:
            for index in range(len(node.elements)):
                rest = [element for place, element in enumerate(node.elements) if place != index]
                if len(rest) == 1:
                    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(""))
                    rest[0] = rest[0].with_changes(comma=comma)
                self._offer("element left out", node, node.with_changes(elements=rest))

    def visit_Break(self, node: cst.Break) -> None:
        self._offer("break, continue", node, cst.Continue())

    def visit_Continue(self, node: cst.Continue) -> None:
        self._offer("break, continue", node, cst.Break())

    def visit_Expr(self, node: cst.Expr) -> None:
        if isinstance(node.value, cst.Call):
            self._offer("statement left out", node, cst.Pass())

    def visit_Assign(self, node: cst.Assign) -> None:
        if any(isinstance(target.target, cst.Attribute | cst.Subscript) for target in node.targets):
            self._offer("statement left out", node, cst.Pass())


def _spaced(kind: type, like: cst.CSTNode) -> cst.CSTNode:
    """An operator of another kind with a space on both sides, as the formatter writes it."""
    space = cst.SimpleWhitespace(" ")
    return kind(whitespace_before=space, whitespace_after=space)


def _is_text(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.BaseString)


def find_mutations(path: str, source: str) -> Iterator[Mutation]:
    """Every mutation of one file, in the order of its lines; each gives source that parses and differs."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    places = _Places()
    wrapper.visit(places)
    positions = wrapper.resolve(PositionProvider)
    spans = wrapper.resolve(WhitespaceInclusivePositionProvider)
    before = source.splitlines()
    starts = list(itertools.accumulate((len(line) for line in source.splitlines(keepends=True)), initial=0))
    for operator, node, replacement in places.found:
        # Spliced as text: a tree that is built anew for each place takes minutes for a folder.
        begin, end = (starts[edge.line - 1] + edge.column for edge in (spans[node].start, spans[node].end))
        changed = source[:begin] + wrapper.module.code_for_node(replacement) + source[end:]
        try:
            compile(changed, path, "exec")
        except SyntaxError:
            continue  # a target that cannot be left out, say
        patch = list(difflib.unified_diff(before, changed.splitlines(), path, path, lineterm="", n=0))
        line = positions[node].start.line
        occurrence = before[: line - 1].count(before[line - 1])
        yield Mutation(path, line, operator, "\n".join(patch), changed, occurrence)


def sample_mutations(mutations: Sequence[Mutation], *, count: int, seed: int) -> list[Mutation]:
    """``count`` of the mutations, the same ones for the same seed and files, in the order of the draw.

    A change that two operators make alike is drawn once.
    """
    unique = list({mutation.key: mutation for mutation in mutations}.values())
    random.Random(seed).shuffle(unique)
    return unique[:count]
