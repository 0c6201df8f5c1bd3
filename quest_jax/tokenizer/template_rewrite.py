"""Makes a parsed chat template pay for the steps jinja's sandbox has no hook for.

Loop bodies, printed text, ``~``, comparisons, subscripts and dicts run without asking anyone. The rewrite routes them
through four filters.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from quest_jax.tokenizer.work_limit import STEP, metered, pay, pay_content, pay_length


def rewrite(tree: nodes.Template) -> nodes.Template:
    """Routes what would happen unseen through ``FILTERS``; changes the tree in place."""
    return _Rewrite().visit(tree)


class _Rewrite(NodeTransformer):
    def visit_Output(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered("=content", child) for child in node.nodes]
        return node

    visit_Concat = visit_Output

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for side in (node, *node.ops):
            if not isinstance(side.expr, nodes.Const):
                side.expr = _filtered("=content", side.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered("=length", node.node)
        elif not isinstance(node.arg, nodes.Const):
            node.arg = _filtered("=content", node.arg)  # a tuple is hashed
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = _filtered("=content", pair.key)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._charge_body(node)
        node.iter = _filtered("=items", node.iter, _count(node.test) if node.test else 0)
        return node

    def _charge_body(self, node: Any) -> nodes.Node:
        """Each run of a body costs what it holds, since each node of it may take time or make an object."""
        count = _count(node)
        self.generic_visit(node)
        price = _filtered("=nodes", nodes.Const(count, lineno=node.lineno))
        node.body.insert(0, nodes.ExprStmt(price, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _charge_body


def _count(node: nodes.Node) -> int:
    return 1 + sum(1 for _ in node.find_all(nodes.Node))


def _filtered(name: str, node: nodes.Node, *args: int) -> nodes.Filter:
    constants = [nodes.Const(arg, lineno=node.lineno) for arg in args]
    return nodes.Filter(node, name, constants, [], None, None, lineno=node.lineno)


# pass_context keeps jinja from running them while it compiles.
@jinja2.pass_context
def _content(context: Context, value: Any) -> Any:
    pay_content(value)
    return value


@jinja2.pass_context
def _length(context: Context, value: Any) -> Any:
    pay_length(value)
    return value


@jinja2.pass_context
def _items(context: Context, value: Any, test_nodes: int) -> Iterator[Any]:
    return metered(value, STEP + test_nodes)


@jinja2.pass_context
def _nodes(context: Context, count: int) -> None:
    pay(count)


FILTERS: dict[str, Callable[..., Any]] = {"=content": _content, "=items": _items, "=length": _length, "=nodes": _nodes}
"""What the environment needs for rewritten templates."""
