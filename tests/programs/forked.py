"""Run a script in a process that ``fork_server.py`` forks, and end as it does: ``forked.py ADDRESS SCRIPT ...``

It has the arguments, environment, folder, and standard streams of this process, and gets its signals.
"""

import json
import os
import resource
import signal
import socket
import sys

streams = []
for stream in range(3):
    try:
        os.fstat(stream)
    except OSError:  # it is closed
        continue
    streams.append(stream)
_, address, *command = sys.argv
order = {"command": command, "cwd": os.getcwd(), "environ": dict(os.environ), "streams": streams}
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(f"\0{address}")
    socket.send_fds(connection, [b" "], streams)
    connection.sendall(json.dumps(order).encode() + b"\n")
    answer = connection.makefile()
    pid = int(answer.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    code = int(answer.readline())
if code < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
