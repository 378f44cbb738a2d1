"""The port on which ranks meet, where the environment names one. Packtrain's own workers need none: they inherit it."""

from __future__ import annotations

import errno
import os
import socket

from packtrain.config.rule import Finding, Severity
from packtrain.launch import group


def taken_port() -> Finding | None:
    """What is wrong with MASTER_PORT on this host: an error in a group, which meets there, else a warning."""
    port = os.environ.get("MASTER_PORT")
    if port is None:
        return None
    severity: Severity = "error" if group.in_group() else "warning"
    mend = "export MASTER_PORT with a free one, the same on every node"
    if not port.isdigit() or not 0 < int(port) < 2**16:
        return Finding("port", "MASTER_PORT", severity, f"{port!r} is no port", mend)
    reason = _refused(os.environ.get("MASTER_ADDR", ""), int(port))
    return Finding("port", "MASTER_PORT", severity, f"port {port} of this host {reason}", mend) if reason else None


def _refused(address: str, port: int) -> str:
    """Why nothing can listen there; nothing where it can, or where the address is another host's."""
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except socket.gaierror:
            return ""
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "is taken by another program"
            return "" if error.errno == errno.EADDRNOTAVAIL else f"cannot be had ({error.strerror})"
    return ""
