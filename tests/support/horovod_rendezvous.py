"""Horovod's rendezvous, for processes that start Horovod more than once."""

from __future__ import annotations

from horovod.runner.http.http_server import OK, RendezvousHandler  # noqa: TID251


class Handler(RendezvousHandler):  # type: ignore[misc]
    """The handler of horovodrun's server, with a mended ``do_DELETE``."""

    def do_DELETE(self) -> None:  # noqa: N802
        """Note that a rank has connected to those of a scope, and forget the addresses of the scope with its last rank.

        Horovod's own method then forgets which ranks have connected in *all* scopes. Rank 0 can come to the end of its
        scope over hosts before rank 1 has connected on its host, of which the addresses then stay; where the ranks
        start Horovod again, they connect to these, and hang or are aborted (about 1 start in 100 on busy processors).
        """
        _, scope, key = self.path.split("/")
        if scope not in self.server.scope_size:  # of a process set
            super().do_DELETE()
            return
        with self.server.finished_list_lock:
            finished = self.server.finished_list[scope]
            finished.append(key)
            if len(finished) == self.server.scope_size[scope]:
                del self.server.finished_list[scope]
                with self.server.cache_lock:
                    del self.server.cache[scope]
        self.send_status_code(OK)
