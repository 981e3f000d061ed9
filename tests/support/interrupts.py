"""Interrupt a call at each point where Python would run a signal's handler, in turn."""

import dis
import functools
import logging
import signal
import sys
import threading
from _thread import interrupt_main

# Python runs the handlers of signals behind these instructions, and at the beginning of a function.
CHECKED = ("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
# Python's own, whose locks stay locked if the interrupt comes at the wrong moment; and what stands in the way here.
LEFT_OUT = (__file__, logging.__file__, threading.__file__, "<frozen")


class Arm:
    """`-Arm()` sends SIGINT, and no handler runs behind a minus: it does in the code that is traced."""

    __neg__ = staticmethod(functools.partial(interrupt_main, signal.SIGINT))


@functools.cache
def points(code):
    """Return the offsets of the instructions behind which handlers run."""
    return frozenset(at.offset for at in dis.get_instructions(code) if at.opname.startswith(CHECKED))


def interrupt(number, call, also=()):
    """Call, with SIGINT at the point of this number, from 1 on; return whether there was one, and what was raised.

    Points are counted in all code that runs, except code that is left out. Functions in `also` are counted, too.
    """
    left, arm, own = number, Arm(), [function.__code__ for function in also]

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename.startswith(LEFT_OUT) and frame.f_code not in own:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call" or (event == "opcode" and frame.f_lasti in points(frame.f_code)):
            left -= 1
            if not left:
                sys.settrace(None)
                -arm  # noqa: B018
        return trace

    before, raised = sys.gettrace(), None
    sys.settrace(trace)
    try:
        try:
            call()
        finally:
            sys.settrace(before)
            run_handlers()
    except BaseException as error:
        raised = error.with_traceback(None)  # which would keep what the call held
    return left <= 0, raised


def run_handlers():
    """Have a handler run here, at the beginning of a function, if its signal came behind the last point."""


def interrupt_everywhere(make, check, step=1, also=()):
    """Interrupt `call()` at each `step`-th point, of a new `scene, call = make()` each; then call `check(scene)`.

    Return how often. What is raised is the interrupt, unless a finalizer swallowed it. `also` is as in `interrupt`.
    """
    number = 1
    while True:
        scene, call = make()
        met, raised = interrupt(number, call, also)
        if not met:
            assert raised is None, raised
            return number // step
        try:
            assert raised is None or type(raised) is KeyboardInterrupt, raised
            check(scene)
        except BaseException as error:
            error.add_note(f"the interrupt came at point {number}")
            raise
        number += step


def in_a_thread(function):
    """Call it in another thread, which must not hang, and raise what it raises."""
    raised = []

    def run():
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "a lock is held"
    if raised:
        raise raised[0]
