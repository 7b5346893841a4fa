"""The TLS context for a set of credentials. Must not verify less than the server's certificate and name."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from gpuactors.kube.config import AccessError, Credentials


def tls_context(credentials: Credentials) -> ssl.SSLContext:
    """Make a client's context. Raises `AccessError` for an invalid CA, certificate or key."""
    if credentials.ca is not None and not credentials.ca.strip():
        # For OpenSSL an empty one would be none at all, and the system's would be trusted.
        raise AccessError("the CA of the API server is empty; renew the file")
    try:
        context = ssl.create_default_context(cadata=credentials.ca)
    except ssl.SSLError as exc:
        raise AccessError(f"the CA of the API server is no PEM certificate: {exc}; renew the file") from exc
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if credentials.certificate is None:
        return context
    # OpenSSL takes a certificate from a file only; this one is in memory, and gone with its descriptor.
    with _in_memory(f"{credentials.certificate}\n{credentials.key or ''}") as path:
        try:
            context.load_cert_chain(path)
        except ssl.SSLError as exc:
            raise AccessError(
                f"the client certificate for the API server and its key do not belong together, or are none: {exc}; "
                "renew them"
            ) from exc
    return context


@contextmanager
def _in_memory(text: str) -> Iterator[str]:
    descriptor = os.memfd_create("client-certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
