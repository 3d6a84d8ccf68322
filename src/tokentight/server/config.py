"""How the HTTP service runs. Imports nothing heavy: the command line reads its defaults here."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_TIMEOUT_S = 10**6


class ServerConfigError(ValueError):
    """A setting of the service out of range; the message names it."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP service.

    `port` 0 takes a free one. `served_model_names` empty means the model as it was given; the
    first is the one that responses carry. With `api_keys`, every endpoint but `/health`,
    `/ready`, `/version` and `/metrics` wants one of them as bearer token. `max_choices` bounds
    prompts times `n` of one HTTP request. A client that takes or sends nothing for
    `client_timeout_s` seconds while it is its turn is given up. Requests still open
    `drain_timeout_s` seconds after the first signal to stop are ended.

    Raises:
        ServerConfigError: naming the setting, its value and what is allowed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_body_bytes: int = 16 * 1024 * 1024
    max_choices: int = 1024
    client_timeout_s: float = 60.0
    drain_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.host:
            raise ServerConfigError("host must not be empty; 127.0.0.1 serves this machine alone")
        if not 0 <= self.port <= 65535:
            raise ServerConfigError(f"port is {self.port}; it must be in [0, 65535]")
        if any(not name for name in self.served_model_names):
            raise ServerConfigError("served_model_names must not contain an empty name")
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise ServerConfigError("an API key must be printable ASCII and not empty")
        for name in ("max_body_bytes", "max_choices"):
            value = getattr(self, name)
            if value < 1:
                raise ServerConfigError(f"{name} is {value}; it must be at least 1")
        for name in ("client_timeout_s", "drain_timeout_s"):
            value = getattr(self, name)
            if not 0 < value <= MAX_TIMEOUT_S:
                raise ServerConfigError(f"{name} is {value}; it must be in (0, {MAX_TIMEOUT_S}]")
