"""How far each mode of the core reaches: how many functions of src/ speak of it.

A mode that every stage asks about is dear: each new kind of row has to be thought through with it. So a number may only
fall. Lower it when it has. Kernels do not count: no stage asks anything about a mode because there is one more for it.
"""

import re

from support import c_sources

# Words by which a function speaks of a mode, and the most functions that do.
MOST = {
    "unstored sequences": (r"unstored", 11),
    "limits in bytes": (r"max_bytes|demand|preview", 50),
    "forgetting": (r"forgotten|forget|horizon", 20),
    "evicting": (r"evict|victim|fate|LOSES_WINDOWS", 114),
    "replacing, restoring": (r"replaced|replac(e|ing)\b|TO_REPLACE|is_given|restor", 50),
    "cross-attention": (r"cross|TO_CROSS|KVC_CROSS", 45),
    "deltas": (r"delta|divide", 78),
    "strides": (
        r"(pool(s\[\w+\])?|plan|list|pools?->)(->|\.)stride\b|kvc_rows_below|strided|stride_of|policy\.stride",
        76,
    ),
    "selected rows": (r"sketch|select(s|ed|ing)?\b|select_rows", 66),
    "chosen rows": (r"chosen|choos|choices|by_token", 80),
    "checkpoints": (r"checkpoint|state_bytes", 61),
    "scales of rows": (r"row_scale|_scales|scaled", 32),
    "masked": (r"masked", 21),
    "trees": (r"\bparents|subtree|tree_number|descend|ancestor", 20),
    "huge pages": (r"fault|resident|huge", 39),
    "prior": (r"prior", 3),
}


def functions():
    """Return the text of each function above kernels that has more than one line, without the comment before it."""
    paths = (path for path in sorted(c_sources.SRC.glob("*/*.[ch]")) if path.parent.name != "kernels")
    texts = (c_sources.blank(path.read_text()) for path in paths)
    return [f.text for text in texts for f in c_sources.functions_of(text) if f.num_lines > 1]


def test_reach():
    texts = functions()
    assert len(texts) > 1500
    found = {mode: sum(bool(re.search(words, text)) for text in texts) for mode, (words, _) in MOST.items()}
    for mode, number in found.items():
        print(f"{mode}: {number} functions")
    assert all(found.values())
    grown = {mode: (number, MOST[mode][1]) for mode, number in found.items() if number > MOST[mode][1]}
    assert not grown, "more functions speak of a mode than before: let fewer ask"
