"""Serve the explore page with Python's HTTP server, by default only to this machine.

Pages of other sites cannot use a server on this machine: a request must name this machine as its host (a foreign name
that points here does not), have this page as its origin if it states one, and send JSON.
"""

import ipaddress
import json
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import ConfigDict, ValidationError, validate_call

from relinear.explore.changes import effect, prefix_view, try_change
from relinear.explore.explored_model import ExploredModel
from relinear.explore.page import content_policy, live_page
from relinear.settings.messages import quoted, validation_message

#: the most bytes of a request
MAX_BODY_BYTES = 1 << 20


def _call(function: Callable[..., Any], values: Mapping[str, Any], models: Sequence[ExploredModel]) -> Any:
    """Call a function on the model that a request names, with its values converted to the parameters' types."""
    number = str(values.get("model", 0))
    if number not in map(str, range(len(models))):
        raise ValueError(f"model must be 0 to {len(models) - 1}, got {quoted(number)}")
    checked = validate_call(config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True))
    try:
        arguments = {name: value for name, value in values.items() if name != "model"}
        return checked(function)(models[int(number)], **arguments)
    except ValidationError as error:
        raise ValueError(validation_message(error)) from None


def _unit(explored: ExploredModel, point: str, unit: int, seed: int = 0) -> Any:
    control = explored.control_of(point, unit, seed)
    return {"unit": explored.unit(point, unit), "control": control and explored.unit(*control)}


#: (method, path) -> the function that answers it; GET reads the index, POST runs the model
_ROUTES: dict[tuple[str, str], Callable[..., Any]] = {
    ("GET", "/api/units"): ExploredModel.units,
    ("GET", "/api/unit"): _unit,
    ("GET", "/api/search"): ExploredModel.search,
    ("GET", "/api/text"): ExploredModel.text,
    ("POST", "/api/color"): ExploredModel.color,
    ("POST", "/api/next"): ExploredModel.next_token,
    ("POST", "/api/change"): try_change,
    ("POST", "/api/effect"): effect,
    ("POST", "/api/prefix"): prefix_view,
}


class _RequestError(Exception):
    """Raised for a wrong request; the answer is an HTTP status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, models: Sequence[ExploredModel], host: str, port: int) -> None:
        self.models, self.host = models, host  # it answers to this name, besides IP addresses
        page = live_page([explored.overview() for explored in models])
        self.page, self.policy = page.encode(), content_policy(page)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that have disconnected."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "relinear", ""
    timeout = 60

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, to keep the user's terminal free."""

    def do_GET(self) -> None:
        """Answer a GET or POST request."""
        method = self.command
        try:
            self._check_origin()
            parts = urlsplit(self.path)
            if (method, parts.path) == ("GET", "/"):
                self._send(200, self.server.page, "text/html; charset=utf-8")
                return
            answer = _ROUTES.get((method, parts.path))
            if answer is None:
                raise _RequestError(404, f"there is nothing at {method} {parts.path}")
            values = self._body() if method == "POST" else dict(parse_qsl(parts.query, keep_blank_values=True))
            self._send_json(200, _call(answer, values, self.server.models))
        except _RequestError as error:
            self._send_json(error.status, {"error": str(error)})
        except ValueError as error:
            self._send_json(400, {"error": str(error)})
        except (ConnectionError, TimeoutError):
            raise
        except Exception:
            traceback.print_exc()
            self._send_json(500, {"error": "this is a bug of relinear; the terminal shows the traceback"})

    do_POST = do_GET

    def _check_origin(self) -> None:
        """Raise for requests to a host name that is not this machine's, or from another page."""
        host = self.headers.get("Host", "")
        name = urlsplit(f"//{host}").hostname or ""
        if not (_is_address(name) or name == self.server.host):
            raise _RequestError(403, f"this server does not answer for the host {quoted(host)}")
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            raise _RequestError(403, f"this server does not answer pages of {quoted(origin)}")

    def _body(self) -> Mapping[str, Any]:
        if self.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            raise _RequestError(415, "send JSON: Content-Type application/json")
        length = int(self.headers.get("Content-Length", 0))
        if length > MAX_BODY_BYTES:
            self.rfile.read(min(length, 8 * MAX_BODY_BYTES))  # a client reads the answer only after it has sent all
            raise _RequestError(413, f"a request has at most {MAX_BODY_BYTES:,} bytes")
        try:
            values = json.loads(self.rfile.read(length))
            json.dumps(values, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            raise _RequestError(400, "the request is not valid JSON, or a text in it holds half a character") from None
        if not isinstance(values, dict):
            raise _RequestError(400, "the request must be a JSON object")
        return values

    def _send_json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value, allow_nan=False).encode(), "application/json")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": self.server.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def _is_address(name: str) -> bool:
    """Return whether a host is an IP address or localhost, which no name server can redirect."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


def make_server(models: Sequence[ExploredModel], host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the page about ``models``; ``serve_forever`` answers at its ``server_address``.

    Args:
        models: one model, or two side by side.
        host: address to listen on; by default only this machine can connect. With any other host whoever can
            connect may run the model. It answers to this name and to IP addresses.
        port: 0 takes a free one.

    Raises:
        OSError: if it cannot listen there; it names host and port.
    """
    try:
        return _Server(models, host, port)
    except OSError as error:
        text = f"cannot listen there ({error.strerror}); choose another --port"
        raise OSError(error.errno, text, f"{host}:{port}") from error
