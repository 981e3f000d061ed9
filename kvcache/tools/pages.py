"""The ``--help`` pages, as wide as the terminal; where that is narrow, what is said of an option stands below it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

from kvcache.columns import WIDTH, columns, definitions, wrap


def _page(command: Any, context: Any) -> str:
    """Return the page of a command: its usage, summary, arguments, options, commands and examples."""
    width = columns(WIDTH)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    parts = [wrap(f"Usage: {usage}", width, rest="    "), wrap(command.help, width, "  ", "  ")]
    sections: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for parameter in command.get_params(context):
        sections[parameter.param_type_name].append(parameter.get_help_record(context))
    sections["command"] = [*_commands(command, context)]
    parts += [f"{name.title()}s:\n{definitions(said, width, '  ')}" for name, said in sections.items() if said]
    if command.epilog:
        heading, *examples = command.epilog.splitlines()
        parts.append("\n".join([f"  {heading}", *(_example(line, width) for line in examples)]))
    return "\n\n".join(parts)


def _commands(command: Any, context: Any) -> Iterator[tuple[str, str]]:
    for name in command.list_commands(context) if isinstance(command, TyperGroup) else ():
        yield name, command.get_command(context, name).help


def _example(line: str, width: int) -> str:
    """Return a command line, in lines that a shell takes as one where it is wide."""
    if len(line) + 4 <= width:
        return f"    {line}"
    return wrap(line, width - 2, "    ", "        ").replace("\n", " \\\n")


class Command(TyperCommand):
    """A command with a page of its own."""

    def get_help(self, ctx: Any) -> str:
        """Return the page."""
        return _page(self, ctx)


class Group(TyperGroup):
    """The command of commands, with a page of its own."""

    def get_help(self, ctx: Any) -> str:
        """Return the page."""
        return _page(self, ctx)
