"""Print what `kvcache plan --users` made."""

from __future__ import annotations

from itertools import groupby

from kvcache.errors import plain
from kvcache.layer import count
from kvcache.system import readable
from kvcache.tools.memory_plan import Plan
from kvcache.tools.shown_plan import FITS, print_limits, print_machine, speed
from kvcache.tools.team_plan import Team
from kvcache.tools.terminal import print_paragraph, print_table


def write(made: Plan, team: Team) -> None:
    """Print a plan for a team."""
    print_machine(made)
    if team.operations_per_second is not None:
        rate = f"{team.operations_per_second / 1e9:,.0f} GFLOP/s"
        print_paragraph(f"prompts are multiplied by weights at {rate} ({team.operations_source})")
    print(f"\n{count(team.users, 'user')}, each with a text of {count(made.context, 'token')}")
    both = [*zip(made.rows, team.rows, strict=True)]
    for policy, rows in groupby(both, key=lambda pair: pair[0].policy):
        own = [*rows]
        print()
        print_paragraph(policy)
        print_table(
            ["type", "running", "needs", "fits", "kept", "needs", "fits"],
            [
                [
                    row.dtype,
                    *(readable(row.nbytes), readable(row.needs), FITS[row.fits]),
                    *(readable(more.kept_nbytes), readable(more.kept_needs), FITS[more.kept_fits]),
                ]
                for row, more in own
            ],
        )
        if made.bandwidth is None:
            continue
        print()
        print_table(
            ["type", f"{_unit(made)} alone", f"each of {team.users:,}", "all", "first token: new", "known"],
            [
                [
                    row.dtype,
                    *(speed(rate) for rate in _speeds(row.tokens_per_second, more.tokens_per_second_alone, team.users)),
                    *map(_seconds, (more.new_seconds, more.known_seconds)),
                ]
                for row, more in own
            ],
        )
    print()
    _print_meanings(made, team)


def _speeds(together: float | None, alone: float | None, users: int) -> tuple[float | None, float | None, float | None]:
    """Return the tokens per second of a user alone, of each of all users, and of all together."""
    return alone, None if together is None else together / users, together


def _unit(made: Plan) -> str:
    return "attention/s" if made.memory.weights == 0 else "tokens/s"


def _seconds(seconds: float | None) -> str:
    """Return seconds with two digits."""
    if seconds is None:
        return "-"
    number = float(f"{seconds:.2g}")
    return f"{number:,.{0 if number >= 10 else 1 if number >= 1 else 2}f} s"


def _print_meanings(made: Plan, team: Team) -> None:
    """Say what the columns are."""
    texts = f"{count(team.users, 'text')} of {count(made.context, 'token')}"
    print_paragraph(f"running: keys and values of {texts}, all answered at once")
    has_windows = any(row.nbytes != more.kept_nbytes for row, more in zip(made.rows, team.rows, strict=True))
    windows = ". Layers with a window keep all of them, too" if has_windows else ""
    print_paragraph(f"kept: all rows of these texts, so that later prompts can begin with them{windows}")
    needed = [
        *(["weights"] if made.memory.weights else []),
        *(["recurrent states"] if made.memory.states else []),
        *(["while running, more rows of a prompt"] if any(row.prompt_nbytes for row in made.rows) else []),
        *([f"with kept texts, {readable(team.kept_states)} of kept states"] if team.kept_states else []),
    ]
    others = f", {', '.join(needed)}" if needed else ""
    print_paragraph(f"needs: these rows{others}; without the buffers of the program that runs the model")
    if made.bandwidth is not None:
        print_paragraph(f"{_unit(made)}: at most, at the end of a text: alone, of each of {team.users:,}, and of all")
        print_paragraph(_meaning_of_seconds(made, team))
    print_limits(made)


def _meaning_of_seconds(made: Plan, team: Team) -> str:
    """Say what the seconds are of, or why they are not known."""
    if made.memory.multiplied is None or made.memory.weights_read is None:
        return f"first token: not known, because the parameters of this {plain(made.model_type)} are not counted"
    if team.operations_per_second is None:
        return "first token: not known from --bandwidth alone; give --cores as well"
    known = f"known: all but its last {count(team.new_tokens, 'token')} are kept"
    return f"first token: estimated, of a prompt of {count(team.prompt, 'token')} alone. new: nothing is kept; {known}"
