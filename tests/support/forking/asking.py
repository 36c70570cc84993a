"""Stands in for ``python``: has the server of ``serving.py`` fork a process, and ends as that process ends.

    python -I -S asking.py ADDRESS [-u] [-X faulthandler] SCRIPT | -m MODULE | -c CODE [ARGUMENT ...]

The fork gets the streams, folder, environment, limits and processors of this process, and its signals.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys

_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def main() -> None:
    """Run a program in a fork, or in this process where it has other options."""
    address, arguments = sys.argv[1], sys.argv[2:]
    unbuffered, program = arguments[:1] == ["-u"], arguments
    if unbuffered:
        program = program[1:]
    if shows_faults := program[:2] == ["-X", "faulthandler"]:
        program = program[2:]
    if not program or (program[0].startswith("-") and program[0] not in ("-m", "-c")):
        os.execv(sys.executable, [sys.executable, *arguments])
    streams = [number for number in range(3) if is_open(number)]
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"\0{address}")
        order = {
            "program": program,
            "streams": streams,
            "unbuffered": unbuffered,
            "shows_faults": shows_faults,
            "orig_argv": [f"{address}/python", *arguments],
            "folder": os.getcwd(),
            "environ": dict(os.environ),
            "limits": [(limit, resource.getrlimit(limit)) for limit in _LIMITS],
            "processors": sorted(os.sched_getaffinity(0)),
            "ignored": [number for number in _PASSED_ON if signal.getsignal(number) == signal.SIG_IGN],
        }
        socket.send_fds(server, [b" "], streams)
        server.sendall(json.dumps(order).encode() + b"\n")
        answers = server.makefile()
        fork = int(answers.readline())
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(fork, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        code = int(answers.readline())
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
