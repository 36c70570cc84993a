"""Horovod's rendezvous, for processes that start Horovod more than once."""

from __future__ import annotations

from horovod.runner.http.http_server import OK, RendezvousHandler  # noqa: TID251


class Handler(RendezvousHandler):  # type: ignore[misc]
    """The handler of horovodrun's server, with a mended ``do_DELETE``."""

    def do_DELETE(self) -> None:  # noqa: N802
        """Record that a rank has connected to the others of a scope; when all have, forget the scope's addresses.

        Horovod's own method then forgets which ranks have connected in *every* scope. Rank 0 may be done with its
        ``cross`` scope, of one rank on one host, before rank 1 has reported on their ``local`` scope. The addresses of
        that are then kept for ever, and ranks that start Horovod again connect to old ones: they hang, or gloo aborts
        them (about 1 start in 100 on busy processors).
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
