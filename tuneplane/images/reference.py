"""The grammar of an image's name, `[docker://][REGISTRY/]REPOSITORY[:TAG][@sha256:HEX]`.

Sources: the OCI distribution specification ("Pulling manifests": name and tag), the distribution project's
reference grammar (host, port, what counts as a registry), the OCI image specification (digest).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tuneplane.kernel.errors import Fault, UsageError

DEFAULT_REGISTRY = "docker.io"
DEFAULT_TAG = "latest"
LONGEST_NAME = 255  # the distribution project's limit on registry and repository together
LONGEST_TEXT = 512  # name, tag and digest at their longest, and a scheme

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_IMAGE_ID = re.compile(r"[0-9a-f]{64}")
_LOGIN = re.compile(r".*@(?=[^@]*/)", re.DOTALL)


@dataclass(frozen=True)
class Reference:
    """An image in a registry. `registry` is `host[:port]` as written; a tag or a digest is always there."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.registry}/{self.repository}{tag}{digest}"


def parse_reference(text: str, where: str = "") -> Reference:
    """The reference that `text` names; `docker.io`, `library/` and `latest` filled in as Docker does.

    Raises UsageError saying what is wrong; `where` is the flag or file that `text` stands in.
    """
    try:
        return _reference(text)
    except _Wrong as wrong:
        raise UsageError(Fault(f"image {_shown(text)}: {wrong}", where, wrong.remedy)) from None


def parse_registry(text: str, where: str = "") -> str:
    """`host[:port]`, checked; `index.docker.io` is `docker.io`. Raises UsageError."""
    try:
        _check_characters(text)
        return _registry(text)
    except _Wrong as wrong:
        remedy = wrong.remedy or "write host[:port] alone"
        shown = _shown("…" + text[text.rindex("@") :] if "@" in text else text)
        raise UsageError(Fault(f"image registry {shown}: {wrong}", where, remedy)) from None


class _Wrong(ValueError):
    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.remedy = remedy


def _shown(text: str) -> str:
    """Without a login that somebody put before the registry (C11): messages end in logs."""
    text = _LOGIN.sub("…@", text)
    return repr(text if len(text) <= LONGEST_TEXT else text[:60] + "…")


def _reference(text: str) -> Reference:
    _check_characters(text)
    rest = text.removeprefix("docker://")
    if "://" in rest:
        raise _Wrong("only docker:// may stand before it", "give the registry's host[:port] without a scheme")
    if "#" in rest:
        raise _Wrong(
            "'#' has no place in it", "write a '/' after the registry; enroot's '#' is put in for you"
        )
    name, at, digest = rest.partition("@")
    if at and "/" in digest:
        raise _Wrong("user names and passwords have no place in it", "log in with the registry's own tool")
    if at and not _DIGEST.fullmatch(digest):
        raise _Wrong(
            f"{digest!r} is no digest", "a digest is sha256: and 64 hexadecimal digits in lower case"
        )
    registry, path = _split_registry(name)
    path, colon, tag = path.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise _Wrong(
            f"{tag!r} is no tag", "letters, digits, '_', '.', '-', 128 at most, the first not . or -"
        )
    if _IMAGE_ID.fullmatch(rest):
        raise _Wrong("this is an image's id, not its name", "write REPOSITORY@sha256:…")
    _check_repository(path)
    if registry == DEFAULT_REGISTRY and "/" not in path:
        path = f"library/{path}"
    if len(registry) + 1 + len(path) > LONGEST_NAME:
        raise _Wrong(f"registry and repository are longer than {LONGEST_NAME} characters")
    return Reference(registry, path, tag or (None if at else DEFAULT_TAG), digest or None)


def _check_characters(text: str) -> None:
    if not text:
        raise _Wrong("it is empty")
    if len(text) > LONGEST_TEXT:
        raise _Wrong(f"it is longer than {LONGEST_TEXT} characters")
    for character in text:
        if not "!" <= character <= "~":
            raise _Wrong(
                f"{character!r} (U+{ord(character):04X}) has no place in it", "plain ASCII, no blanks"
            )


def _split_registry(name: str) -> tuple[str, str]:
    """Registry and path. The first component is a registry where it cannot be part of a repository's name."""
    first, slash, rest = name.partition("/")
    if slash and (set(first) & set(".:[") or first == "localhost" or first != first.lower()):
        return _registry(first), rest
    return DEFAULT_REGISTRY, name


def _registry(text: str) -> str:
    if "@" in text:
        raise _Wrong("user names and passwords have no place in it")
    host, port = _split_port(text)
    if port is not None and not (_PORT.fullmatch(port) and int(port) <= 65535):
        raise _Wrong(f"{port!r} is no port", "1 to 65535, without leading zeros")
    if host.startswith("["):
        _check_ipv6(host)
    elif not _HOST.fullmatch(host):
        raise _Wrong(f"{host!r} is no host", "a name or an address, without a dot at its end")
    return DEFAULT_REGISTRY if text == "index.docker.io" else text


def _split_port(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        address, bracket, rest = text.partition("]")
        if rest and not rest.startswith(":"):
            raise _Wrong(f"{rest!r} has no place after the address")
        return address + bracket, rest[1:] if rest else None
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _check_ipv6(host: str) -> None:
    from ipaddress import AddressValueError, IPv6Address

    try:
        if not host.endswith("]") or "%" in host:
            raise AddressValueError
        IPv6Address(host[1:-1])
    except AddressValueError:
        raise _Wrong(f"{host!r} is no IPv6 address", "write it in brackets, without a zone") from None


def _check_repository(path: str) -> None:
    for component in path.split("/"):
        if not component:
            raise _Wrong("a part of the repository's name is empty")
        if component in (".", ".."):
            raise _Wrong(
                f"{component!r} has no place in it", "a local image is a path that ends in .sif or .sqsh"
            )
        if component != component.lower():
            raise _Wrong(f"{component!r} holds capitals", "repositories are written in lower case")
        if not _COMPONENT.fullmatch(component):
            raise _Wrong(
                f"{component!r} is no part of a repository's name",
                "lower case letters and digits, with one '.', '_', '__' or '-' between them",
            )
