"""Defects that are put back into the core, to see that a program finds them: a defects.txt lists its own.

A defect in such a list is a line that describes it, a source of src/, and changes: the text after each - becomes the
text after the next +, or nothing.
"""

import pytest
from support.compiling import ROOT


def read_defects(path):
    """The source and the changes of each defect of a list, as parameters; a change is text and what takes its place."""
    for block in path.read_text().split("\n\n")[1:]:
        name, source, *lines = block.strip().splitlines()
        changes = []
        for line in lines:
            if line.startswith("- "):
                changes.append((line[2:], []))
            else:
                changes[-1][1].append(line[2:])
        yield pytest.param(source, [(text, "\n".join(to)) for text, to in changes], id=name[2:])


def put_back(source, changes):
    """Return the text of a source of src/ with a defect."""
    text = (ROOT / "src" / source).read_text()
    for this, other in changes:
        assert text.count(this) == 1, f"src/{source} has changed: write the defect anew"
        text = text.replace(this, other)
    return text
