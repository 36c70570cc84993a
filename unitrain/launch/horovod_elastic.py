"""Asks horovodrun's elastic driver for this process's next rank, and then runs a rank's command again in its place.

Run as a script, with the command as its arguments. It imports neither UniTrain nor torch: it may wait for minutes.
"""

from __future__ import annotations

import http.client
import os
import sys

# In the order of the driver's answer.
VARIABLES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_NO_PLACE = -1


def next_place(server: str, host: str, local_rank: str) -> dict[str, str] | None:
    """Return the variables of the next rank, once every process of the job has asked for its own, or has ended.

    Args:
        server: address of the driver's server.
        host: name of this host, as horovodrun knows it.
        local_rank: rank of this process on it so far.

    Returns:
        None if the job goes on without this process.

    Raises:
        ConnectionError: the driver has ended, or does not answer.
    """
    connection = http.client.HTTPConnection(server)
    try:
        connection.request("GET", f"/rank_and_size/{host}:{local_rank}")
        response = connection.getresponse()
        numbers = [int(number) for number in response.read().split(b",")]
        if response.status != http.client.OK or len(numbers) != len(VARIABLES):
            raise ValueError(f"it answered {response.status}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ConnectionError(f"horovodrun gave no new rank at {server}: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if numbers[0] == _NO_PLACE:
        return None
    return {f"HOROVOD_{name}": str(number) for name, number in zip(VARIABLES, numbers, strict=True)}


def main(command: list[str]) -> None:
    """Run the command in place of this process, with the variables of its next rank."""
    host, local_rank = os.environ["HOROVOD_HOSTNAME"], os.environ["HOROVOD_LOCAL_RANK"]
    server = f"{os.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
    try:
        place = next_place(server, host, local_rank)
    except ConnectionError as error:
        sys.exit(f"unitrain: {host}, local rank {local_rank}: {error}.")
    if place is None:
        print(f"unitrain: {host}, local rank {local_rank}: the job goes on without it.", file=sys.stderr)
        return  # with 0: the driver takes anything else for a failure of the host
    os.execvpe(command[0], command, {**os.environ, **place})


if __name__ == "__main__":
    main(sys.argv[1:])
